// The CPU products and rows: every code of every format against numerics, sums against f64, and
// bits that do not depend on company.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "hwy/highway.h"
#include "hwy/targets.h"
#include "ops/cpu/attention.h"
#include "ops/cpu/elementwise.h"
#include "ops/cpu/linear.h"
#include "penstock/numerics/block.h"
#include "penstock/numerics/formats.h"

namespace penstock::cpu {
namespace {

// Random stored bytes of any format, with the buffers that a Matrix points into.
struct Stored {
  std::vector<std::byte> data;
  std::vector<float> scales;
  std::vector<std::uint8_t> codes;  // MXFP4 scales
  Matrix matrix;
};

std::uint8_t finite_e4m3(std::mt19937& random) {
  const auto code = static_cast<std::uint8_t>(random() & 0xFFu);
  return (code & 0x7Fu) == 0x7Fu ? static_cast<std::uint8_t>(code & 0x80u) : code;
}

Stored make_stored(MatrixFormat format, std::int64_t rows, std::int64_t cols, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> scale(0.001f, 0.01f);
  Stored s;
  Matrix& m = s.matrix;
  m.format = format;
  m.rows = rows;
  m.cols = cols;
  const auto fill = [&](std::int64_t row_bytes, auto write) {
    m.row_bytes = row_bytes;
    s.data.resize(static_cast<std::size_t>(rows * row_bytes));
    write();
  };
  switch (format) {
    case MatrixFormat::kF32:
      fill(cols * 4, [&] {
        for (std::int64_t i = 0; i < rows * cols; ++i) {
          reinterpret_cast<float*>(s.data.data())[i] = normal(random);
        }
      });
      break;
    case MatrixFormat::kBf16:
      fill(cols * 2, [&] {
        for (std::int64_t i = 0; i < rows * cols; ++i) {
          reinterpret_cast<std::uint16_t*>(s.data.data())[i] =
              Bf16::from_float(normal(random)).bits;
        }
      });
      break;
    case MatrixFormat::kFp8Block:
    case MatrixFormat::kFp8Channel: {
      fill(cols, [&] {
        for (std::byte& b : s.data) b = std::byte{finite_e4m3(random)};
      });
      const bool block = format == MatrixFormat::kFp8Block;
      m.scale_stride = block ? (cols + 127) / 128 : 1;
      s.scales.resize(
          static_cast<std::size_t>((block ? (rows + 127) / 128 : rows) * m.scale_stride));
      for (float& v : s.scales) v = scale(random);
      m.scales = s.scales.data();
      break;
    }
    case MatrixFormat::kMxfp4:
      fill(cols / 2, [&] {
        for (std::byte& b : s.data) b = std::byte{static_cast<std::uint8_t>(random() & 0xFFu)};
      });
      m.scale_stride = cols / 32;
      s.codes.resize(static_cast<std::size_t>(rows * m.scale_stride));
      for (std::uint8_t& v : s.codes) v = static_cast<std::uint8_t>(120 + random() % 12);
      m.scales = s.codes.data();
      break;
  }
  m.data = s.data.data();
  return s;
}

// One element by numerics.
float element(const Matrix& m, std::int64_t row, std::int64_t col) {
  const std::int64_t r = m.row0 + row;
  const std::int64_t c = m.col0 + col;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(m.data) + r * m.row_bytes;
  switch (m.format) {
    case MatrixFormat::kF32:
      return reinterpret_cast<const float*>(bytes)[c];
    case MatrixFormat::kBf16:
      return Bf16::from_bits(reinterpret_cast<const std::uint16_t*>(bytes)[c]).to_float();
    case MatrixFormat::kFp8Block:
      return E4M3::from_bits(bytes[c]).to_float() *
             static_cast<const float*>(m.scales)[r / 128 * m.scale_stride + c / 128];
    case MatrixFormat::kFp8Channel:
      return E4M3::from_bits(bytes[c]).to_float() * static_cast<const float*>(m.scales)[r];
    case MatrixFormat::kMxfp4:
      return unpack_e2m1(bytes[c / 2], c).to_float() *
             E8M0::from_bits(
                 static_cast<const std::uint8_t*>(m.scales)[r * m.scale_stride + c / 32])
                 .to_float();
  }
  return 0.0f;
}

std::vector<float> random_floats(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<std::size_t>(count + kPadding));
  for (float& v : out) v = normal(random);
  // Kernels may read the padding; it must not matter.
  std::fill_n(out.end() - kPadding, kPadding, std::numeric_limits<float>::quiet_NaN());
  return out;
}

std::uint32_t bits(float v) { return std::bit_cast<std::uint32_t>(v); }

constexpr MatrixFormat kFormats[] = {MatrixFormat::kF32, MatrixFormat::kBf16,
                                     MatrixFormat::kFp8Block, MatrixFormat::kFp8Channel,
                                     MatrixFormat::kMxfp4};
// Every instruction set that this build has and this processor runs.
const std::vector<std::int64_t> kTargets = hwy::SupportedAndGeneratedTargets();

// Makes the kernels use one instruction set for the length of a test.
void choose(std::int64_t target) {
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

class TargetTest : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { choose(GetParam()); }
  void TearDown() override { choose(0); }
};
INSTANTIATE_TEST_SUITE_P(Simd, TargetTest, testing::ValuesIn(kTargets),
                         [](const auto& test) { return std::string(hwy::TargetName(test.param)); });

class MatrixTest : public testing::TestWithParam<std::tuple<MatrixFormat, std::int64_t>> {
 protected:
  void SetUp() override { choose(std::get<1>(GetParam())); }
  void TearDown() override { choose(0); }
  MatrixFormat format() const { return std::get<0>(GetParam()); }
  // MXFP4 rows are whole blocks; the others end anywhere.
  std::int64_t odd(std::int64_t cols) const {
    return format() == MatrixFormat::kMxfp4 ? cols / 32 * 32 : cols;
  }
};
INSTANTIATE_TEST_SUITE_P(Formats, MatrixTest,
                         testing::Combine(testing::ValuesIn(kFormats),
                                          testing::ValuesIn(kTargets)));

TEST_P(MatrixTest, DecodesEveryElementBitForBit) {
  const Stored s = make_stored(format(), 300, odd(331), 1);
  for (const Matrix& m :
       {s.matrix, s.matrix.row_window(192, 70).col_window(32, odd(s.matrix.cols - 64))}) {
    std::vector<float> row(static_cast<std::size_t>(m.cols));
    for (std::int64_t r = 0; r < m.rows; ++r) {
      decode_row(m, r, row.data());
      for (std::int64_t c = 0; c < m.cols; ++c) {
        ASSERT_EQ(bits(row[static_cast<std::size_t>(c)]), bits(element(m, r, c)))
            << "row " << r << " column " << c;
      }
    }
  }
}

TEST_P(MatrixTest, ProductMatchesF64AndABatchMatchesItsRows) {
  const Stored s = make_stored(format(), 150, odd(421), 2);
  const Matrix m = s.matrix.row_window(3, 139).col_window(32, odd(379));
  std::vector<float> scratch(static_cast<std::size_t>(linear_scratch(m.rows, m.cols)));
  constexpr std::int64_t kRows = 23;
  const std::vector<float> x = random_floats(kRows * m.cols, 3);
  std::vector<float> all(static_cast<std::size_t>(kRows * m.rows));
  linear(m, 0, m.rows, x.data(), m.cols, kRows, all.data(), m.rows, scratch.data());
  for (std::int64_t i = 0; i < kRows; ++i) {
    for (std::int64_t n = 0; n < m.rows; ++n) {
      double want = 0;
      double size = 0;
      for (std::int64_t k = 0; k < m.cols; ++k) {
        const double term =
            double{x[static_cast<std::size_t>(i * m.cols + k)]} * double{element(m, n, k)};
        want += term;
        size += std::abs(term);
      }
      ASSERT_NEAR(all[static_cast<std::size_t>(i * m.rows + n)], want, 2e-6 * size);
    }
  }
  // Any number of rows, any split of the outputs: the same bits.
  for (const std::int64_t rows : {1, 2, 3, 4, 5, 8}) {
    std::vector<float> some(static_cast<std::size_t>(rows * m.rows));
    for (std::int64_t begin = 0; begin < m.rows; begin += 37) {
      linear(m, begin, std::min(begin + 37, m.rows), x.data() + 7 * m.cols, m.cols, rows,
             some.data(), m.rows, scratch.data());
    }
    for (std::int64_t i = 0; i < rows * m.rows; ++i) {
      ASSERT_EQ(bits(some[static_cast<std::size_t>(i)]),
                bits(all[static_cast<std::size_t>(7 * m.rows + i)]))
          << rows << " rows, output " << i;
    }
  }
}

TEST_P(MatrixTest, TransposedProductMatchesF64AndABatchMatchesItsRows) {
  const Stored s = make_stored(format(), 448, 256, 4);
  const Matrix m = s.matrix.row_window(192, 201);
  std::vector<float> scratch(static_cast<std::size_t>(linear_scratch(m.rows, m.cols)) + 16);
  void* aligned = scratch.data();
  std::size_t space = scratch.size() * 4;
  auto* work = static_cast<float*>(std::align(64, space - 64, aligned, space));
  constexpr std::int64_t kRows = 9;
  const std::vector<float> x = random_floats(kRows * m.rows, 5);
  std::vector<float> all(static_cast<std::size_t>(kRows * m.cols));
  linear_transposed(m, 0, m.cols, x.data(), m.rows, kRows, all.data(), m.cols, work);
  for (std::int64_t i = 0; i < kRows; ++i) {
    for (std::int64_t c = 0; c < m.cols; ++c) {
      double want = 0;
      double size = 0;
      for (std::int64_t r = 0; r < m.rows; ++r) {
        const double term =
            double{x[static_cast<std::size_t>(i * m.rows + r)]} * double{element(m, r, c)};
        want += term;
        size += std::abs(term);
      }
      ASSERT_NEAR(all[static_cast<std::size_t>(i * m.cols + c)], want, 2e-6 * size);
    }
  }
  for (const std::int64_t rows : {1, 2, 3, 6}) {
    std::vector<float> some(static_cast<std::size_t>(rows * m.cols));
    linear_transposed(m, 0, m.cols, x.data() + 2 * m.rows, m.rows, rows, some.data(), m.cols, work);
    for (std::int64_t i = 0; i < rows * m.cols; ++i) {
      ASSERT_EQ(bits(some[static_cast<std::size_t>(i)]),
                bits(all[static_cast<std::size_t>(2 * m.cols + i)]));
    }
  }
}

TEST_P(TargetTest, MatrixCodesAllE4m3CodesAndNan) {
  std::vector<std::byte> data(256);
  for (std::size_t i = 0; i < 256; ++i) data[i] = static_cast<std::byte>(i);
  const float scale = 0.37f;
  Matrix m{MatrixFormat::kFp8Channel, data.data(), &scale, 256, 1, 0, 0, 1, 256};
  std::vector<float> row(256);
  decode_row(m, 0, row.data());
  for (unsigned i = 0; i < 256; ++i) {
    const E4M3 code = E4M3::from_bits(static_cast<std::uint8_t>(i));
    if (code.is_nan()) {
      EXPECT_TRUE(std::isnan(row[i])) << i;
    } else {
      EXPECT_EQ(bits(row[i]), bits(code.to_float() * scale)) << i;
    }
  }
}

TEST_P(TargetTest, MatrixCodesAllE2m1CodesUnderAllScales) {
  std::vector<std::byte> data(16);
  for (std::size_t i = 0; i < 16; ++i) data[i] = static_cast<std::byte>((i ^ 5u) << 4 | i);
  for (unsigned code = 0; code < 256; ++code) {
    const auto scale = static_cast<std::uint8_t>(code);
    Matrix m{MatrixFormat::kMxfp4, data.data(), &scale, 16, 1, 0, 0, 1, 32};
    std::vector<float> row(32);
    decode_row(m, 0, row.data());
    for (std::int64_t i = 0; i < 32; ++i) {
      const float got = row[static_cast<std::size_t>(i)];
      if (code == 255) {
        EXPECT_TRUE(std::isnan(got));
      } else {
        EXPECT_EQ(bits(got), bits(element(m, 0, i))) << "scale " << code << " column " << i;
      }
    }
  }
}

TEST_P(TargetTest, MatrixCodesANanWeightReachesItsOutputOnly) {
  Stored s = make_stored(MatrixFormat::kFp8Block, 40, 70, 6);
  s.data[static_cast<std::size_t>(21 * 70 + 69)] = std::byte{0xFF};
  const std::vector<float> x = random_floats(5 * 70, 7);
  std::vector<float> scratch(static_cast<std::size_t>(linear_scratch(40, 70)));
  for (const std::int64_t rows : {1, 5}) {
    std::vector<float> y(static_cast<std::size_t>(rows * 40));
    linear(s.matrix, 0, 40, x.data(), 70, rows, y.data(), 40, scratch.data());
    for (std::int64_t i = 0; i < rows * 40; ++i) {
      EXPECT_EQ(std::isnan(y[static_cast<std::size_t>(i)]), i % 40 == 21);
    }
  }
}

// softmax(scale q k) v in f64.
std::vector<double> attend_f64(const float* q, const std::vector<const float*>& rows,
                               std::int64_t dim, std::int64_t latent, double scale) {
  std::vector<double> p;
  double most = -1e300;
  for (const float* row : rows) {
    double dot = 0;
    for (std::int64_t i = 0; i < dim; ++i) dot += double{q[i]} * double{row[i]};
    p.push_back(dot * scale);
    most = std::max(most, p.back());
  }
  double sum = 0;
  for (double& v : p) sum += v = std::exp(v - most);
  std::vector<double> out(static_cast<std::size_t>(latent));
  for (std::size_t t = 0; t < rows.size(); ++t) {
    for (std::int64_t c = 0; c < latent; ++c) {
      out[static_cast<std::size_t>(c)] += p[t] / sum * double{rows[t][c]};
    }
  }
  return out;
}

TEST_P(TargetTest, AttendMatchesF64AndHeadsDoNotDependOnCompany) {
  constexpr std::int64_t kDim = 200, kLatent = 128, kHeads = 7;
  const std::vector<float> q = random_floats(kHeads * kDim, 8);
  const std::vector<float> cache = random_floats(150 * kDim, 9);
  for (const std::int64_t picks : {1, 2, 15, 16, 17, 63, 128, 131}) {
    std::vector<const float*> rows;
    for (std::int64_t t = 0; t < picks; ++t) rows.push_back(cache.data() + (t + 3) * kDim);
    std::vector<float> logits(static_cast<std::size_t>(attend_scratch(picks)) + 16);
    void* aligned = logits.data();
    std::size_t space = logits.size() * 4;
    auto* work = static_cast<float*>(std::align(64, space - 64, aligned, space));
    std::vector<float> out(kHeads * kLatent);
    attend(q.data(), kDim, kHeads, rows.data(), picks, kDim, kLatent, 0.0625f, work, out.data(),
           kLatent);
    for (std::int64_t h = 0; h < kHeads; ++h) {
      const std::vector<double> want = attend_f64(q.data() + h * kDim, rows, kDim, kLatent, 0.0625);
      std::vector<float> alone(kLatent);
      attend(q.data() + h * kDim, kDim, 1, rows.data(), picks, kDim, kLatent, 0.0625f, work,
             alone.data(), kLatent);
      for (std::int64_t c = 0; c < kLatent; ++c) {
        const float got = out[static_cast<std::size_t>(h * kLatent + c)];
        ASSERT_NEAR(got, want[static_cast<std::size_t>(c)], 3e-6) << picks << " picks";
        ASSERT_EQ(bits(got), bits(alone[static_cast<std::size_t>(c)]));
      }
    }
  }
}

TEST_P(TargetTest, IndexScoresMatchF64WithNegativeWeights) {
  constexpr std::int64_t kDim = 128, kHeads = 7;
  const std::vector<float> q = random_floats(kHeads * kDim, 10);
  const std::vector<float> w = random_floats(kHeads, 11);
  const std::vector<float> page = random_floats(kDim * kIndexPageTokens, 12);
  std::vector<float> scores(kIndexPageTokens);
  index_scores(q.data(), w.data(), kHeads, kDim, page.data(), scores.data());
  for (std::size_t t = 0; t < scores.size(); ++t) {
    double want = 0;
    for (std::int64_t h = 0; h < kHeads; ++h) {
      double dot = 0;
      for (std::int64_t i = 0; i < kDim; ++i) {
        dot += double{q[static_cast<std::size_t>(h * kDim + i)]} *
               double{page[static_cast<std::size_t>(i * kIndexPageTokens) + t]};
      }
      want += double{w[static_cast<std::size_t>(h)]} * std::max(dot, 0.0);
    }
    EXPECT_NEAR(scores[t], want, 1e-3);
  }
}

TEST_P(TargetTest, TopKIsTheSortedOrderWithTiesToTheSmallerPosition) {
  std::mt19937 random(13);
  for (int round = 0; round < 300; ++round) {
    const auto count = static_cast<std::int64_t>(1 + random() % 400);
    const auto k = static_cast<std::int64_t>(1 + random() % 150);
    std::vector<float> scores(static_cast<std::size_t>(count));
    // Few distinct values, so that ties are the rule; both zeros, infinities and NaN among them.
    const float values[] = {0.0f,
                            -0.0f,
                            1.0f,
                            -1.0f,
                            std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            2.5f,
                            std::numeric_limits<float>::quiet_NaN()};
    for (float& v : scores) v = values[random() % (round % 2 ? 8 : 4)];
    std::vector<std::int32_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      const float x = scores[static_cast<std::size_t>(a)];
      const float y = scores[static_cast<std::size_t>(b)];
      return std::isnan(y) ? !std::isnan(x) : x > y;
    });
    order.resize(static_cast<std::size_t>(std::min(k, count)));
    std::sort(order.begin(), order.end());
    std::vector<std::uint64_t> keys(scores.size());
    std::vector<std::int32_t> picks(static_cast<std::size_t>(k));
    picks.resize(
        static_cast<std::size_t>(top_k(scores.data(), count, k, keys.data(), picks.data())));
    ASSERT_EQ(picks, order);
  }
}

TEST_P(TargetTest, ElementwiseNormsMatchF64) {
  for (const std::int64_t n : {1, 5, 16, 100, 256}) {
    const std::vector<float> x = random_floats(n, 14);
    const std::vector<float> gain = random_floats(n, 15);
    const std::vector<float> bias = random_floats(n, 16);
    double squares = 0, sum = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      sum += double{x[static_cast<std::size_t>(i)]};
      squares += double{x[static_cast<std::size_t>(i)]} * double{x[static_cast<std::size_t>(i)]};
    }
    const double mean = sum / static_cast<double>(n);
    double variance = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      variance += std::pow(double{x[static_cast<std::size_t>(i)]} - mean, 2);
    }
    variance /= static_cast<double>(n);
    std::vector<float> rms(static_cast<std::size_t>(n)), layer(static_cast<std::size_t>(n));
    rms_norm(x.data(), gain.data(), n, 1e-5f, rms.data());
    layer_norm(x.data(), gain.data(), bias.data(), n, 1e-6f, layer.data());
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      EXPECT_NEAR(
          rms[i],
          double{x[i]} * double{gain[i]} / std::sqrt(squares / static_cast<double>(n) + 1e-5),
          1e-5);
      EXPECT_NEAR(
          layer[i],
          (double{x[i]} - mean) / std::sqrt(variance + 1e-6) * double{gain[i]} + double{bias[i]},
          1e-4);
    }
  }
}

TEST_P(TargetTest, ElementwiseSiluHoldsOverTheWholeRange) {
  const std::vector<float> extremes = {0.0f,   -0.0f,   1.0f,   -1.0f,   20.0f, -20.0f,
                                       88.0f,  -88.0f,  200.0f, -200.0f, 3e38f, -3e38f,
                                       1e-30f, -1e-30f, 0.5f,   -103.0f, 5.0f};
  std::vector<float> gate = extremes;
  gate.resize(extremes.size() + kPadding);
  std::vector<float> up(gate.size(), 0.5f);
  std::vector<float> out(extremes.size());
  silu_mul(gate.data(), up.data(), static_cast<std::int64_t>(extremes.size()), out.data());
  for (std::size_t i = 0; i < extremes.size(); ++i) {
    const double v = double{extremes[i]};
    const double want = 0.5 * v / (1.0 + std::exp(-v));
    EXPECT_NEAR(out[i], want, 1e-6 * std::abs(want) + 1e-37) << extremes[i];
  }
}

TEST_P(TargetTest, ElementwiseRoundToFp8IsNumericsRuleAndPartsAreIndependent) {
  const std::vector<float> x = random_floats(300, 17);
  std::vector<float> out(300);
  round_to_fp8(x.data(), 300, out.data());
  for (std::size_t i = 0; i < 300; ++i) {
    float amax = 0;
    for (std::size_t j = i / 128 * 128; j < std::min<std::size_t>(i / 128 * 128 + 128, 300); ++j) {
      amax = std::max(amax, std::abs(x[j]));
    }
    const float scale = std::max(amax, 1e-4f) / 448.0f;
    EXPECT_EQ(out[i], E4M3::from_float(x[i] / scale).to_float() * scale);
    EXPECT_LE(std::abs(out[i] - x[i]), std::max(std::abs(x[i]) / 16.0f, scale * 0x1p-10f));
  }
}

}  // namespace
}  // namespace penstock::cpu
