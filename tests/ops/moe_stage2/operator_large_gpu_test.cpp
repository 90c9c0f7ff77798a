// The CUDA operator at 2,048 to 16,384 tokens a rank, and past 4 GiB of rows: every row the same on
// all ways home, and sampled tokens against the reference, bit for bit, and against f64. Operands
// follow from their index, so that the reference makes the rows that it needs and no others.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <span>

#include "core/cuda/device_buffer.h"
#include "ops/moe_stage2/gpu_team.h"
#include "penstock/ops/moe_stage2/reference.h"
#include "penstock/ops/moe_stage2/routing.h"

namespace penstock::moe_stage2 {
namespace {

using cuda::DeviceBuffer;

constexpr std::array<std::int64_t, 4> kTokens{2048, 4096, 8192, 16384};
constexpr int kSamples = 24;  // tokens of a rank and call, the first and the last among them

// A rank's operands. Elements of act and its scales repeat with prime periods.
struct Numbers {
  Numbers(const Shape& shape, int rank) {
    std::mt19937_64 random(71 + static_cast<std::uint64_t>(rank));
    const auto integers = [&](std::size_t count) {
      std::vector<E4M3> list(count);
      for (E4M3& x : list) {
        x = E4M3::from_float(static_cast<float>(static_cast<int>(random() % 9) - 4));
      }
      return list;
    };
    const auto scales = [&](std::size_t count) {
      std::normal_distribution<float> normal;
      std::vector<float> list(count);
      for (float& x : list) x = std::exp(normal(random));
      return list;
    };
    act = integers(1'000'003);
    act_scales = scales(65'537);
    weight = integers(static_cast<std::size_t>(shape.experts_per_rank()) *
                      static_cast<std::size_t>(shape.hidden) *
                      static_cast<std::size_t>(shape.intermediate));
    weight_scales = scales(weight.size() / (128 * 128));
    slot_weight = scales(static_cast<std::size_t>(shape.max_tokens_per_rank * shape.top_k));
  }
  std::vector<E4M3> act;
  std::vector<float> act_scales;
  std::vector<E4M3> weight;
  std::vector<float> weight_scales, slot_weight;
};

// Fills `to` with repetitions of `period`.
template <typename T>
void repeat(const DeviceBuffer<T>& to, const std::vector<T>& period) {
  const DeviceBuffer<T> once(period);
  for (std::size_t at = 0; at < to.size(); at += period.size()) {
    PENSTOCK_CUDA_CHECK(cudaMemcpy(to.data() + at, once.data(),
                                   std::min(period.size(), to.size() - at) * sizeof(T),
                                   cudaMemcpyDeviceToDevice));
  }
  PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
}

// The same on the device, for any call of up to `tiles` tiles.
struct DeviceNumbers {
  DeviceNumbers(const Numbers& numbers, const Shape& shape, std::int64_t most_tiles)
      : tiles(most_tiles),
        act(static_cast<std::size_t>(tiles * kTileRows * shape.intermediate)),
        act_scales(static_cast<std::size_t>(tiles * kTileRows * (shape.intermediate / 128))),
        weight(numbers.weight),
        weight_scales(numbers.weight_scales),
        slot_weight(numbers.slot_weight),
        expert_rows(static_cast<std::size_t>(shape.experts_per_rank())),
        origin(static_cast<std::size_t>(tiles * kTileRows)),
        out(static_cast<std::size_t>(shape.max_tokens_per_rank * shape.hidden)) {
    repeat(act, numbers.act);
    repeat(act_scales, numbers.act_scales);
  }
  Operands operands(const Shape& shape, const SourceRows& rows, std::int64_t tokens) const {
    EXPECT_LE(rows.tiles(), tiles);
    cuda::write_device(expert_rows.data(), rows.expert_rows.data(), expert_rows.bytes());
    cuda::write_device(origin.data(), rows.origin.data(), rows.origin.size() * sizeof(RowOrigin));
    Operands o;
    o.gemm.act = act.data();
    o.gemm.act_scales = act_scales.data();
    o.gemm.act_scale_stride = tiles * kTileRows;
    o.gemm.weight = weight.data();
    o.gemm.weight_scales = weight_scales.data();
    o.gemm.hidden = shape.hidden;
    o.gemm.intermediate = shape.intermediate;
    o.expert_rows = expert_rows.data();
    o.origin = origin.data();
    o.tiles = rows.tiles();
    o.weight = slot_weight.data();
    o.tokens = tokens;
    o.out = out.data();
    return o;
  }
  std::int64_t tiles;
  DeviceBuffer<E4M3> act;
  DeviceBuffer<float> act_scales;
  DeviceBuffer<E4M3> weight;
  DeviceBuffer<float> weight_scales, slot_weight;
  DeviceBuffer<std::int32_t> expert_rows;
  DeviceBuffer<RowOrigin> origin;
  DeviceBuffer<Bf16> out;
};

// What some tokens of a rank have to get.
struct Sample {
  std::vector<std::int64_t> tokens;
  std::vector<Bf16> bits;     // [tokens, hidden]
  std::vector<double> exact;  // the same in f64, without a wire
};

Sample sample_of(const Shape& shape, int rank, std::int64_t tokens,
                 const std::vector<SourceRows>& sources, const std::vector<Numbers>& numbers,
                 std::int64_t tiles, std::uint64_t seed) {
  Sample sample;
  if (tokens == 0) return sample;
  std::mt19937_64 random(seed);
  std::vector<int> index(static_cast<std::size_t>(tokens), -1);
  for (int i = 0; i < kSamples; ++i) {
    const std::int64_t token =
        i == 0
            ? 0
            : (i == 1 ? tokens - 1
                      : static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(tokens)));
    int& at = index[static_cast<std::size_t>(token)];
    if (at >= 0) continue;
    at = static_cast<int>(sample.tokens.size());
    sample.tokens.push_back(token);
  }
  const auto h = static_cast<std::size_t>(shape.hidden);
  const std::size_t k = static_cast<std::size_t>(shape.intermediate);
  const std::size_t blocks = k / 128;
  const auto row_bytes = static_cast<std::size_t>(wire_row_bytes(shape.hidden, shape.wire));
  const std::size_t slots = sample.tokens.size() * static_cast<std::size_t>(shape.top_k);
  std::vector<unsigned char> wire(slots * row_bytes);
  std::vector<int> found(slots, 0);
  sample.exact.resize(sample.tokens.size() * h);
  const std::vector<float>& weights = numbers[static_cast<std::size_t>(rank)].slot_weight;
  for (std::size_t s = 0; s < sources.size(); ++s) {
    const Numbers& from = numbers[s];
    std::size_t row = 0;
    for (std::size_t e = 0; e < sources[s].expert_rows.size(); ++e) {
      const std::size_t end = row + static_cast<std::size_t>(sources[s].expert_rows[e]);
      for (; row < end; ++row) {
        const RowOrigin origin = sources[s].origin[row];
        if (origin.rank != rank) continue;
        const int at = index[static_cast<std::size_t>(origin.token)];
        if (at < 0) continue;
        std::vector<E4M3> act(k);
        std::vector<float> scales(blocks);
        for (std::size_t i = 0; i < k; ++i) act[i] = from.act[(row * k + i) % from.act.size()];
        for (std::size_t b = 0; b < blocks; ++b) {
          const std::size_t element = b * static_cast<std::size_t>(tiles * kTileRows) + row;
          scales[b] = from.act_scales[element % from.act_scales.size()];
        }
        const GemmOperands gemm{
            act.data(),   scales.data(),     1, from.weight.data(), from.weight_scales.data(),
            shape.hidden, shape.intermediate};
        const std::size_t slot =
            static_cast<std::size_t>(at) * static_cast<std::size_t>(shape.top_k) +
            static_cast<std::size_t>(origin.slot);
        write_row(gemm, 0, static_cast<std::int32_t>(e), shape.wire,
                  wire.data() + slot * row_bytes);
        ++found[slot];
        const double weight = static_cast<double>(
            weights[static_cast<std::size_t>(origin.token * shape.top_k + origin.slot)]);
        for (std::int32_t c = 0; c < shape.hidden; ++c) {
          sample.exact[static_cast<std::size_t>(at) * h + static_cast<std::size_t>(c)] +=
              weight * gemm_element_f64(gemm, 0, static_cast<std::int32_t>(e), c);
        }
      }
      row = (row + kTileRows - 1) / kTileRows * kTileRows;
    }
  }
  for (const int times : found) EXPECT_EQ(times, 1);
  std::vector<const unsigned char*> rows(static_cast<std::size_t>(shape.top_k));
  for (std::size_t i = 0; i < sample.tokens.size(); ++i) {
    for (std::size_t slot = 0; slot < rows.size(); ++slot) {
      rows[slot] = wire.data() + (i * rows.size() + slot) * row_bytes;
    }
    for (std::int32_t c = 0; c < shape.hidden; ++c) {
      sample.bits.push_back(combine_element(rows.data(),
                                            weights.data() + sample.tokens[i] * shape.top_k,
                                            shape.top_k, shape.hidden, shape.wire, c));
    }
  }
  return sample;
}

// Rows of `out` that are not the sample's.
int wrong_rows(const Sample& sample, const std::vector<Bf16>& out, std::size_t hidden) {
  int wrong = 0;
  for (std::size_t i = 0; i < sample.tokens.size(); ++i) {
    wrong += std::memcmp(out.data() + static_cast<std::size_t>(sample.tokens[i]) * hidden,
                         sample.bits.data() + i * hidden, hidden * sizeof(Bf16)) != 0;
  }
  return wrong;
}

// ||out - exact|| / ||exact|| over the sample.
double error_of(const Sample& sample, const std::vector<Bf16>& out, std::size_t hidden) {
  double error = 0.0;
  double norm = 0.0;
  for (std::size_t i = 0; i < sample.exact.size(); ++i) {
    const auto at = static_cast<std::size_t>(sample.tokens[i / hidden]) * hidden + i % hidden;
    const double difference = static_cast<double>(out[at].to_float()) - sample.exact[i];
    error += difference * difference;
    norm += sample.exact[i] * sample.exact[i];
  }
  return norm == 0.0 ? 0.0 : std::sqrt(error / norm);
}

class MoeStage2LargeGpuTest : public GpuTeamTest {
 protected:
  // Calls of each token count in each pattern, on the first `variants` ways home.
  static void check(const Shape& shape, std::span<const std::int64_t> token_counts, int patterns,
                    std::size_t variants) {
    const std::int64_t tiles =
        (ranks() * shape.max_tokens_per_rank * shape.top_k + kTileRows - 1) / kTileRows +
        shape.experts_per_rank();
    std::vector<Numbers> numbers;
    for (int r = 0; r < ranks(); ++r) numbers.emplace_back(shape, r);
    std::vector<SourceRows> sources(static_cast<std::size_t>(ranks()));
    run([&](const TeamHandle& team, const auto& rank) {
      const int self = team->rank();
      ScopedStream stream;
      std::vector<std::unique_ptr<MoeStage2>> operators;
      for (const Variant& v : std::span(kVariants).first(variants)) {
        operators.push_back(make_cuda_moe_stage2(rank, shape, options_of(v, 0)));
        operators.back()->prepare(stream.get());
      }
      const DeviceNumbers device(numbers[static_cast<std::size_t>(self)], shape, tiles);
      const auto h = static_cast<std::size_t>(shape.hidden);
      for (const std::int64_t most : token_counts) {
        for (int p = 0; p < patterns; ++p) {
          Shape part = shape;
          part.max_tokens_per_rank = most;
          const Routing routing = make_routing(part, static_cast<Pattern>(p), 29, p);
          sources[static_cast<std::size_t>(self)] = rows_at(routing, self);
          team->barrier();
          const std::int64_t tokens = routing.tokens(self);
          const Sample sample = sample_of(shape, self, tokens, sources, numbers, tiles,
                                          static_cast<std::uint64_t>(p));
          const Operands o =
              device.operands(shape, sources[static_cast<std::size_t>(self)], tokens);
          std::vector<Bf16> first;
          for (std::size_t v = 0; v < operators.size(); ++v) {
            PENSTOCK_CUDA_CHECK(
                cudaMemsetAsync(device.out.data(), 0xA5, device.out.bytes(), stream.handle));
            stream.wait();
            team->barrier();  // copies that wait and kernels that wait apart
            operators[v]->run(stream.get(), o);
            stream.wait();
            team->check();
            team->barrier();
            std::vector<Bf16> out(static_cast<std::size_t>(tokens) * h);
            if (!out.empty()) {
              cuda::read_device(out.data(), device.out.data(), out.size() * sizeof(Bf16));
            }
            const std::string where = std::string(kVariants[v].name) + ", " +
                                      std::string(to_string(static_cast<Pattern>(p))) + ", " +
                                      std::to_string(most) + " tokens, rank " +
                                      std::to_string(self);
            if (v > 0) {
              EXPECT_TRUE(out.empty() ||
                          std::memcmp(out.data(), first.data(), out.size() * sizeof(Bf16)) == 0)
                  << where;
              continue;
            }
            EXPECT_EQ(wrong_rows(sample, out, h), 0) << where;
            EXPECT_LT(error_of(sample, out, h), shape.wire == WireFormat::kFp8 ? 5e-2 : 1e-2)
                << where;
            first = std::move(out);
          }
        }
      }
    });
  }
};

TEST_P(MoeStage2LargeGpuTest, Fp8RowsMatchTheReferenceInEveryPattern) {
  check(make_shape(ranks(), 4, 3, kTokens.back(), 1.5, WireFormat::kFp8), kTokens, kPatternCount,
        std::size(kVariants));
}
TEST_P(MoeStage2LargeGpuTest, Bf16RowsMatchTheReferenceInEveryPattern) {
  check(make_shape(ranks(), 4, 3, kTokens.back(), 1.5, WireFormat::kBf16), kTokens, kPatternCount,
        std::size(kVariants));
}

// 4.6 GB of rows in one run.
TEST_P(MoeStage2LargeGpuTest, RowsBeyond4GiBMatchTheReference) {
  if (ranks() != 1) GTEST_SKIP() << "one rank has all rows in one run";
  constexpr std::array<std::int64_t, 1> kFew{40'000};
  Shape shape = make_shape(1, 8, 8, kFew[0], 1.0, WireFormat::kBf16);
  shape.hidden = 7168;
  shape.intermediate = 128;
  ASSERT_GT(reserved_rows(shape) * wire_row_bytes(shape.hidden, shape.wire), std::int64_t{1} << 32);
  check(shape, kFew, 1, 1);
}

INSTANTIATE_TEST_SUITE_P(Ranks, MoeStage2LargeGpuTest, placements(), name_of);

}  // namespace
}  // namespace penstock::moe_stage2
