#include "penstock/ops/moe_stage2/mxfp4.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "penstock/core/error.h"
#include "penstock/numerics/quantise.h"
#include "penstock/ops/moe_stage2/reference.h"

namespace penstock::moe_stage2 {
namespace {

struct Mxfp4 {
  std::int64_t experts;
  std::int32_t hidden, intermediate;
  std::vector<std::uint8_t> pairs;
  std::vector<E8M0> scales;

  // Random elements, exponents in [low, high].
  Mxfp4(std::int64_t e, std::int32_t h, std::int32_t i, int low, int high, std::uint64_t seed)
      : experts(e), hidden(h), intermediate(i) {
    std::mt19937_64 random(seed);
    const auto count = static_cast<std::size_t>(e * h * i);
    pairs.resize(count / 2);
    scales.resize(count / 32);
    for (auto& p : pairs) p = static_cast<std::uint8_t>(random());
    const auto span = static_cast<std::uint64_t>(high - low + 1);
    for (auto& s : scales) s = E8M0::from_exponent(low + static_cast<int>(random() % span));
  }
  std::vector<float> values() const {
    std::vector<float> out(pairs.size() * 2);
    dequantise_mxfp4(pairs, scales, experts * hidden, intermediate, out);
    return out;
  }
};

struct Repacked {
  std::vector<E4M3> weight;
  std::vector<float> scales;

  explicit Repacked(const Mxfp4& m) : weight(m.pairs.size() * 2), scales(weight.size() / 16384) {
    repack_mxfp4(m.pairs, m.scales, m.experts, m.hidden, m.intermediate, weight, scales);
  }
  // The inverse, by the documented layout.
  std::vector<float> values(const Mxfp4& m) const {
    std::vector<float> out(weight.size());
    const auto columns = static_cast<std::size_t>(m.intermediate);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::size_t row = i / columns;
      const std::size_t column = i % columns;
      out[i] = weight[i].to_float() * scales[row / 128 * (columns / 128) + column / 128];
    }
    return out;
  }
};

void expect_same_values(const Mxfp4& m) {
  const std::vector<float> want = m.values();
  const std::vector<float> got = Repacked(m).values(m);
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_EQ(std::isnan(got[i]), std::isnan(want[i])) << i;
    if (std::isnan(want[i])) continue;
    ASSERT_EQ(got[i], want[i]) << i;
    ASSERT_EQ(std::signbit(got[i]), std::signbit(want[i])) << i;
  }
}

TEST(Mxfp4Repack, KeepsEveryValue) {
  expect_same_values(Mxfp4(3, 256, 384, -9, 2, 1));
  expect_same_values(Mxfp4(1, 128, 128, 100, 112, 2));
  // Elements and scales at the lower end of E8M0, whose smallest is below the normal f32.
  expect_same_values(Mxfp4(1, 128, 128, -127, -116, 3));
}

TEST(Mxfp4Repack, FourteenExponentsFitBesideEachOtherAndFifteenDoNot) {
  Mxfp4 m(2, 256, 128, -7, -7, 4);
  m.pairs[0] = 0x77;  // 6, so the block's exponent is known
  // The second expert's second block of rows.
  const std::size_t group = (256 + 130) * 4 + 1;
  m.scales[group] = E8M0::from_exponent(-7 - 14);
  m.pairs[group * 16] = 0x21;  // 0.5 and 1: the first needs the last bit
  m.pairs[(256 + 128) * 64] = 0x77;
  expect_same_values(m);
  m.scales[group] = E8M0::from_exponent(-7 - 15);
  try {
    const Repacked repacked(m);
    FAIL() << "a block that spans 15 exponents was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    const std::string what = error.what();
    EXPECT_NE(what.find("expert 1, rows 128 to 255, columns 0 to 127"), std::string::npos) << what;
    EXPECT_NE(what.find("exponent -22"), std::string::npos) << what;
    EXPECT_NE(what.find("row 130"), std::string::npos) << what;
  }
  // A group of zeros may have any exponent.
  for (std::size_t i = 0; i < 16; ++i) m.pairs[group * 16 + i] = 0x80;
  expect_same_values(m);
}

TEST(Mxfp4Repack, ZeroBlocksAndNanScales) {
  Mxfp4 m(1, 128, 256, -3, 3, 5);
  for (std::size_t row = 0; row < 128; ++row) {
    for (std::size_t i = 0; i < 64; ++i) m.pairs[row * 128 + i] = i % 2 == 0 ? 0x80 : 0x08;
  }
  m.scales[6] = E8M0::from_bits(E8M0::kNanBits);
  expect_same_values(m);
  EXPECT_EQ(Repacked(m).scales[0], 1.0f);
}

TEST(Mxfp4Repack, ProductsAreThoseOfTheDefinition) {
  const Mxfp4 m(2, 128, 256, -6, 4, 6);
  const std::vector<float> w = m.values();
  const Repacked repacked(m);
  std::mt19937_64 random(7);
  std::vector<E4M3> act(256);
  for (auto& a : act) a = E4M3::from_float(static_cast<float>(random() % 65) - 32.0f);
  const std::vector<float> act_scales = {0.25f, 2.0f};
  const GemmOperands op{
      act.data(), act_scales.data(), 1, repacked.weight.data(), repacked.scales.data(),
      m.hidden,   m.intermediate};
  for (std::int32_t expert = 0; expert < 2; ++expert) {
    for (std::int32_t column = 0; column < 128; ++column) {
      double want = 0.0;  // exact: few bits
      for (std::size_t k = 0; k < 256; ++k) {
        want += static_cast<double>(act[k].to_float()) * static_cast<double>(act_scales[k / 128]) *
                static_cast<double>(w[static_cast<std::size_t>(expert * 128 + column) * 256 + k]);
      }
      EXPECT_EQ(gemm_element_f64(op, 0, expert, column), want);
      EXPECT_EQ(gemm_element_f32(op, 0, expert, column), static_cast<float>(want));
    }
  }
}

TEST(Mxfp4Repack, RefusesWrongSizes) {
  Mxfp4 m(1, 128, 128, 0, 0, 8);
  std::vector<E4M3> weight(128 * 128);
  std::vector<float> scales(1);
  EXPECT_THROW(repack_mxfp4(m.pairs, m.scales, 1, 128, 96, weight, scales), Error);
  EXPECT_THROW(repack_mxfp4(m.pairs, m.scales, 2, 128, 128, weight, scales), Error);
  scales.resize(2);
  EXPECT_THROW(repack_mxfp4(m.pairs, m.scales, 1, 128, 128, weight, scales), Error);
}

}  // namespace
}  // namespace penstock::moe_stage2
