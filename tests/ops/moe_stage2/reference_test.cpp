#include "penstock/ops/moe_stage2/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace penstock::moe_stage2 {
namespace {

constexpr std::int32_t kHidden = 256;
constexpr std::int32_t kIntermediate = 384;
constexpr std::int64_t kRows = 4;
constexpr std::int32_t kExperts = 2;

struct Operands {
  std::vector<E4M3> act, weight;
  std::vector<float> act_scales, weight_scales;
  GemmOperands view() const {
    return {act.data(),           act_scales.data(), kRows,        weight.data(),
            weight_scales.data(), kHidden,           kIntermediate};
  }
};

Operands make_operands(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Operands o;
  o.act.resize(kRows * kIntermediate);
  o.weight.resize(static_cast<std::size_t>(kExperts) * kHidden * kIntermediate);
  o.act_scales.resize(kRows * 3);
  o.weight_scales.resize(kExperts * 2 * 3);
  for (auto& x : o.act) x = E4M3::from_float(100.0f * normal(random));
  for (auto& x : o.weight) x = E4M3::from_float(100.0f * normal(random));
  for (auto& x : o.act_scales) x = std::exp(normal(random));
  for (auto& x : o.weight_scales) x = std::exp(normal(random));
  return o;
}

// The layouts spelled out once more, element by element.
TEST(MoeReference, F64IsTheDefinition) {
  const Operands o = make_operands(1);
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (const std::int32_t column : {0, 127, 128, 255}) {
      const std::int32_t expert = static_cast<std::int32_t>(row % kExperts);
      double want = 0.0;
      for (std::int32_t k = 0; k < kIntermediate; ++k) {
        const double a =
            static_cast<double>(
                o.act[static_cast<std::size_t>(row * kIntermediate + k)].to_float()) *
            static_cast<double>(o.act_scales[static_cast<std::size_t>(k / 128 * kRows + row)]);
        const double w =
            static_cast<double>(
                o.weight[static_cast<std::size_t>((expert * kHidden + column) * kIntermediate + k)]
                    .to_float()) *
            static_cast<double>(o.weight_scales[static_cast<std::size_t>(
                (expert * 2 + column / 128) * 3 + k / 128)]);
        want += a * w;
      }
      EXPECT_NEAR(gemm_element_f64(o.view(), row, expert, column), want,
                  1e-9 * std::fabs(want) + 1e-6);
    }
  }
}

TEST(MoeReference, F32StepsStayNearF64) {
  const Operands o = make_operands(2);
  double error = 0.0;
  double norm = 0.0;
  for (std::int32_t c = 0; c < kHidden; ++c) {
    const double exact = gemm_element_f64(o.view(), 1, 1, c);
    const double value = static_cast<double>(gemm_element_f32(o.view(), 1, 1, c));
    error += (value - exact) * (value - exact);
    norm += exact * exact;
  }
  EXPECT_LT(std::sqrt(error / norm), 1e-6);
}

TEST(MoeReference, RowsReadBackWithinTheFormat) {
  const Operands o = make_operands(3);
  for (const WireFormat wire : {WireFormat::kBf16, WireFormat::kFp8}) {
    std::vector<unsigned char> bytes(static_cast<std::size_t>(wire_row_bytes(kHidden, wire)), 0xA5);
    write_row(o.view(), 2, 0, wire, bytes.data());
    float amax = 0.0f;
    for (std::int32_t c = 0; c < kHidden; ++c) {
      amax = std::max(amax, std::fabs(gemm_element_f32(o.view(), 2, 0, c)));
    }
    // bf16: half a unit of 2^-8. E4M3 under a block scale of at most 2 amax / 448: half a unit of
    // 2^-3 of the element, or of the scaled subnormal step.
    for (std::int32_t c = 0; c < kHidden; ++c) {
      const float want = gemm_element_f32(o.view(), 2, 0, c);
      const float bound = wire == WireFormat::kBf16
                              ? std::fabs(want) * 0x1p-8f
                              : std::fabs(want) * 0x1p-4f + amax / 448.0f * 0x1p-9f;
      EXPECT_NEAR(read_row(bytes.data(), kHidden, wire, c), want, bound);
    }
  }
}

TEST(MoeReference, CombineAddsInSlotOrderAndSkipsMissingSlots) {
  std::vector<unsigned char> big(256), small(256), minus(256);
  const auto put = [](std::vector<unsigned char>& row, float x) {
    const std::uint16_t bits = Bf16::from_float(x).bits;
    row[0] = static_cast<unsigned char>(bits & 0xff);
    row[1] = static_cast<unsigned char>(bits >> 8);
  };
  put(big, 0x1p25f);
  put(small, 1.0f);
  put(minus, -0x1p25f);
  const std::vector<float> ones(4, 1.0f);
  // 2^25 + 1 - 2^25 is 0 in f32, 2^25 - 2^25 + 1 is 1: the order is the slots'.
  const unsigned char* lost[] = {big.data(), small.data(), minus.data(), nullptr};
  const unsigned char* kept[] = {big.data(), minus.data(), nullptr, small.data()};
  EXPECT_EQ(combine_element(lost, ones.data(), 4, 128, WireFormat::kBf16, 0).to_float(), 0.0f);
  EXPECT_EQ(combine_element(kept, ones.data(), 4, 128, WireFormat::kBf16, 0).to_float(), 1.0f);
  const unsigned char* none[] = {nullptr};
  EXPECT_EQ(combine_element(none, ones.data(), 1, 128, WireFormat::kFp8, 0).bits, 0);
}

}  // namespace
}  // namespace penstock::moe_stage2
