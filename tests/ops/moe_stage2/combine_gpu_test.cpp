// The combine on the device: the oracle's bits for every wire byte, weight and missing slot.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "core/cuda/device_buffer.h"
#include "ops/moe_stage2/cuda/combine_sm90.h"
#include "penstock/ops/moe_stage2/reference.h"

namespace penstock::moe_stage2 {
namespace {

using cuda::DeviceBuffer;

struct Case {
  std::int32_t tokens, top_k, hidden;
  WireFormat wire;
};

class Combine : public testing::TestWithParam<Case> {};

// Random bytes as wire rows: every E4M3 and E8M0 code appears, NaN and both scale ends among them.
TEST_P(Combine, EqualsOracleBitForBit) {
  const auto [tokens, top_k, hidden, wire] = GetParam();
  std::mt19937_64 random(static_cast<std::uint64_t>(tokens * 131 + top_k * 17 + hidden));
  const std::int64_t row_bytes = wire_row_bytes(hidden, wire);
  const auto rows_per_run = static_cast<std::int64_t>(tokens) * top_k / 3 + 1;
  std::vector<unsigned char> landing(static_cast<std::size_t>(rows_per_run * row_bytes) * kMaxRuns);
  for (auto& byte : landing) byte = static_cast<unsigned char>(random());
  if (wire == WireFormat::kFp8) {
    // Scales of all kinds, most of them of ordinary size.
    for (std::int64_t r = 0; r < rows_per_run * kMaxRuns; ++r) {
      for (std::int32_t b = 0; b < hidden / kWireBlock; ++b) {
        if (random() % 50 != 0)
          landing[static_cast<std::size_t>(r * row_bytes + hidden + b)] =
              static_cast<unsigned char>(120 + random() % 12);
      }
    }
  }
  const auto slots = static_cast<std::size_t>(tokens * top_k);
  std::vector<RowPlace> inverse(slots);
  std::vector<float> weight(slots);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < slots; ++i) {
    weight[i] = normal(random);
    if (random() % 9 == 0) continue;
    inverse[i].run = static_cast<std::int32_t>(random() % kMaxRuns);
    inverse[i].row = static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(rows_per_run));
  }
  const DeviceBuffer<unsigned char> device_landing(landing);
  const DeviceBuffer<RowPlace> device_inverse(inverse);
  const DeviceBuffer<float> device_weight(weight);
  const auto elements = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(hidden);
  DeviceBuffer<std::uint16_t> out(elements + 64);
  out.fill(0xA5);
  CombineArgs args;
  args.runs.row_bytes = row_bytes;
  for (int r = 0; r < kMaxRuns; ++r)
    args.runs.base[r] = device_landing.data() + r * rows_per_run * row_bytes;
  args.inverse = device_inverse.data();
  args.weight = device_weight.data();
  args.out = out.data();
  args.tokens = tokens;
  args.top_k = top_k;
  args.hidden = hidden;
  PENSTOCK_CUDA_CHECK(load_combine_sm90());
  PENSTOCK_CUDA_CHECK(launch_combine_sm90(args, wire, 132, nullptr));
  PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
  const auto got = out.download();
  for (std::int32_t t = 0; t < tokens; ++t) {
    std::vector<const unsigned char*> rows(static_cast<std::size_t>(top_k), nullptr);
    for (std::int32_t k = 0; k < top_k; ++k) {
      const RowPlace place = inverse[static_cast<std::size_t>(t * top_k + k)];
      if (place.run < 0) continue;
      rows[static_cast<std::size_t>(k)] =
          landing.data() + (place.run * rows_per_run + place.row) * row_bytes;
    }
    for (std::int32_t c = 0; c < hidden; ++c) {
      const Bf16 want =
          combine_element(rows.data(), weight.data() + static_cast<std::ptrdiff_t>(t) * top_k,
                          top_k, hidden, wire, c);
      const std::uint16_t value =
          got[static_cast<std::size_t>(t) * static_cast<std::size_t>(hidden) +
              static_cast<std::size_t>(c)];
      ASSERT_EQ(value, want.bits) << "token " << t << " column " << c;
    }
  }
  for (std::size_t i = elements; i < got.size(); ++i) ASSERT_EQ(got[i], 0xA5A5);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Combine,
    testing::Values(Case{1, 1, 128, WireFormat::kBf16}, Case{1, 1, 128, WireFormat::kFp8},
                    Case{700, 4, 384, WireFormat::kFp8}, Case{700, 5, 384, WireFormat::kBf16},
                    Case{90, 8, 6144, WireFormat::kFp8}, Case{90, 8, 6144, WireFormat::kBf16},
                    Case{37, 16, 7168, WireFormat::kFp8}, Case{50, 6, 4096, WireFormat::kFp8},
                    // More than one segment a row, the last one shorter.
                    Case{300, 3, 7296, WireFormat::kFp8}, Case{9, 5, 14464, WireFormat::kFp8},
                    Case{9, 2, 7296, WireFormat::kBf16}, Case{5, 9, 22144, WireFormat::kBf16}));

TEST(Combine, NoTokensIsNoLaunch) {
  EXPECT_EQ(launch_combine_sm90(CombineArgs{}, WireFormat::kFp8, 132, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace penstock::moe_stage2
