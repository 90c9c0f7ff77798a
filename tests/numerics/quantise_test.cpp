// Whole arrays: codes and scales of the test matrix against ml_dtypes (tables.h), edges, refusals.
#include "penstock/numerics/quantise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "numerics/probes.h"
#include "numerics/tables.h"
#include "penstock/core/error.h"

namespace penstock {
namespace {

using probes::kColumns;
using probes::kRows;

// Compares one digest a row of stored bytes and one of all scales.
template <typename Code, typename Scale>
void check_digests(const std::vector<Code>& codes, const std::uint64_t (&expected)[kRows],
                   const std::vector<Scale>& scales, std::uint64_t expected_scales) {
  const std::size_t width = codes.size() / kRows;
  for (std::size_t r = 0; r < kRows; ++r) {
    probes::RowDigest digest;
    for (std::size_t c = 0; c < width; ++c) {
      if constexpr (sizeof(Code) == 1 && !std::is_integral_v<Code>) {
        digest.add(codes[r * width + c].bits, 1);
      } else {
        digest.add(codes[r * width + c], 1);
      }
    }
    EXPECT_EQ(digest.value(), expected[r]) << "row " << r;
  }
  probes::RowDigest digest;
  for (const Scale& s : scales) {
    if constexpr (std::is_same_v<Scale, float>) {
      digest.add(float_bits(s), 4);
    } else {
      digest.add(s.bits, 4);
    }
  }
  EXPECT_EQ(digest.value(), expected_scales) << "scales";
}

class QuantiseTest : public ::testing::Test {
 protected:
  std::vector<float> x_ = probes::block_matrix();
  std::vector<E4M3> q_ = std::vector<E4M3>(x_.size());
  std::vector<float> back_ = std::vector<float>(x_.size());
};

// Each dequantised element is its code times the scale that `scale_at(row, column)` names.
template <typename ScaleAt>
void check_products(const std::vector<E4M3>& q, const std::vector<float>& back, ScaleAt scale_at) {
  for (std::size_t i = 0; i < q.size(); ++i) {
    const float expected = q[i].to_float() * scale_at(static_cast<std::int64_t>(i) / kColumns,
                                                      static_cast<std::int64_t>(i) % kColumns);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(back[i])) << i;
    } else {
      ASSERT_EQ(float_bits(back[i]), float_bits(expected)) << i;
    }
  }
}

TEST_F(QuantiseTest, Fp8Block) {
  std::vector<float> scales(2 * 3);
  EXPECT_EQ(quantise_fp8_block(x_, kRows, kColumns, q_, scales), 2);
  check_digests(q_, tables::kFp8BlockCodes, scales, tables::kFp8BlockScales[0]);
  dequantise_fp8_block(q_, scales, kRows, kColumns, back_);
  check_products(q_, back_, [&](std::int64_t r, std::int64_t c) {
    return scales[static_cast<std::size_t>(r / 128 * 3 + c / 128)];
  });
}

TEST_F(QuantiseTest, Fp8Channel) {
  std::vector<float> scales(kRows);
  EXPECT_EQ(quantise_fp8_channel(x_, kRows, kColumns, q_, scales), 2);
  check_digests(q_, tables::kFp8ChannelCodes, scales, tables::kFp8ChannelScales[0]);
  dequantise_fp8_channel(q_, scales, kRows, kColumns, back_);
  check_products(q_, back_,
                 [&](std::int64_t r, std::int64_t) { return scales[static_cast<std::size_t>(r)]; });
}

TEST_F(QuantiseTest, Fp8Activation) {
  std::vector<float> scales(kRows * 3);
  EXPECT_EQ(quantise_fp8_activation(x_, kRows, kColumns, q_, scales), 2);
  check_digests(q_, tables::kFp8ActivationCodes, scales, tables::kFp8ActivationScales[0]);
  dequantise_fp8_activation(q_, scales, kRows, kColumns, back_);
  check_products(q_, back_, [&](std::int64_t r, std::int64_t c) {
    return scales[static_cast<std::size_t>(r * 3 + c / 128)];
  });
}

TEST_F(QuantiseTest, Fp8Index) {
  std::vector<float> keys;
  for (std::size_t r = 0; r < kRows; ++r) {
    keys.insert(keys.end(), x_.begin() + static_cast<std::ptrdiff_t>(r * kColumns),
                x_.begin() + static_cast<std::ptrdiff_t>(r * kColumns + 128));
  }
  std::vector<E4M3> q(keys.size());
  std::vector<float> scales(kRows);
  EXPECT_EQ(quantise_fp8_index(keys, kRows, q, scales), 1);
  check_digests(q, tables::kFp8IndexCodes, scales, tables::kFp8IndexScales[0]);
  for (std::size_t r = 0; r < kRows; ++r) {
    if (std::isnan(scales[r])) continue;
    EXPECT_EQ(float_bits(scales[r]) & 0x007FFFFFu, 0u) << "scale of row " << r;
    const auto scale = E8M0::from_float_floor(scales[r]);
    for (std::size_t c = 0; c < 128; ++c) {  // the rule's own words: multiply by 2^(127 - e)
      ASSERT_EQ(q[r * 128 + c], quantise_mx<E4M3>(keys[r * 128 + c], scale));
    }
  }
}

TEST_F(QuantiseTest, Mxfp4) {
  std::vector<std::uint8_t> pairs(x_.size() / 2);
  std::vector<E8M0> scales(kRows * (kColumns / 32));
  EXPECT_EQ(quantise_mxfp4(x_, kRows, kColumns, MxScaleRule::kOcpFloor, pairs, scales), 2);
  check_digests(pairs, tables::kMxfp4OcpFloorCodes, scales, tables::kMxfp4OcpFloorScales[0]);
  EXPECT_EQ(quantise_mxfp4(x_, kRows, kColumns, MxScaleRule::kCeil, pairs, scales), 2);
  check_digests(pairs, tables::kMxfp4CeilCodes, scales, tables::kMxfp4CeilScales[0]);
  dequantise_mxfp4(pairs, scales, kRows, kColumns, back_);
  for (std::size_t i = 0; i < x_.size(); ++i) {
    const auto nibble = static_cast<std::uint8_t>(pairs[i / 2] >> (4 * (i % 2)) & 0xF);
    const float expected = E2M1{nibble}.to_float() * scales[i / 32].to_float();
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(back_[i])) << i;
    } else {
      ASSERT_EQ(float_bits(back_[i]), float_bits(expected)) << i;
    }
  }
}

TEST_F(QuantiseTest, Mxfp8) {
  std::vector<E8M0> scales(kRows * (kColumns / 32));
  EXPECT_EQ(quantise_mxfp8(x_, kRows, kColumns, MxScaleRule::kOcpFloor, q_, scales), 2);
  check_digests(q_, tables::kMxfp8OcpFloorCodes, scales, tables::kMxfp8OcpFloorScales[0]);
  EXPECT_EQ(quantise_mxfp8(x_, kRows, kColumns, MxScaleRule::kCeil, q_, scales), 2);
  check_digests(q_, tables::kMxfp8CeilCodes, scales, tables::kMxfp8CeilScales[0]);
  dequantise_mxfp8(q_, scales, kRows, kColumns, back_);
  check_products(q_, back_, [&](std::int64_t r, std::int64_t c) {
    return scales[static_cast<std::size_t>(r * (kColumns / 32) + c / 32)].to_float();
  });
}

TEST_F(QuantiseTest, WireRowsHoldMxfp8Inline) {
  std::vector<E8M0> scales(kRows * (kColumns / 32));
  quantise_mxfp8(x_, kRows, kColumns, MxScaleRule::kCeil, q_, scales);
  ASSERT_EQ(wire_row_bytes(kColumns), kColumns + 9);
  const auto stride = static_cast<std::size_t>(wire_row_bytes(kColumns));
  std::vector<std::uint8_t> wire(kRows * stride);
  EXPECT_EQ(quantise_wire_rows(x_, kRows, kColumns, wire), 2);
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t c = 0; c < kColumns; ++c) {
      ASSERT_EQ(wire[r * stride + c], q_[r * kColumns + c].bits);
    }
    for (std::size_t b = 0; b < 9; ++b) {
      ASSERT_EQ(wire[r * stride + kColumns + b], scales[r * 9 + b].bits);
    }
  }
  dequantise_mxfp8(q_, scales, kRows, kColumns, back_);
  std::vector<float> from_wire(x_.size());
  dequantise_wire_rows(wire, kRows, kColumns, from_wire);
  for (std::size_t i = 0; i < x_.size(); ++i) {
    ASSERT_EQ(float_bits(from_wire[i]), float_bits(back_[i])) << i;
  }
}

TEST_F(QuantiseTest, ZerosComeBackWithTheirSigns) {
  std::vector<E8M0> scales(2 * (kColumns / 32));
  const std::span<const float> zeros(x_.data(), 2 * kColumns);  // rows 0 and 1
  std::vector<float> back(zeros.size());
  const std::span<E4M3> q(q_.data(), zeros.size());
  quantise_mxfp8(zeros, 2, kColumns, MxScaleRule::kCeil, q, scales);
  dequantise_mxfp8(q, scales, 2, kColumns, back);
  for (std::size_t i = 0; i < zeros.size(); ++i) {
    EXPECT_EQ(float_bits(back[i]), float_bits(zeros[i])) << i;
  }
  for (const E8M0 s : scales) EXPECT_EQ(s.bits, 0);
  std::vector<float> f32_scales(1 * 3);
  quantise_fp8_block(zeros, 2, kColumns, q, f32_scales);
  dequantise_fp8_block(q, f32_scales, 2, kColumns, back);
  for (std::size_t i = 0; i < zeros.size(); ++i) {
    EXPECT_EQ(float_bits(back[i]), float_bits(zeros[i])) << i;
  }
  for (const float s : f32_scales) EXPECT_EQ(s, 1.0f);
}

// A NaN costs its own block and no other.
TEST_F(QuantiseTest, DamageEndsWithTheBlock) {
  std::vector<float> x(2 * 256, 1.0f);
  x[130] = std::numeric_limits<float>::quiet_NaN();
  std::vector<E4M3> q(x.size());
  std::vector<float> back(x.size());
  std::vector<float> scales(4);
  EXPECT_EQ(quantise_fp8_activation(x, 2, 256, q, scales), 1);
  dequantise_fp8_activation(q, scales, 2, 256, back);
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (i >= 128 && i < 256) {
      EXPECT_TRUE(std::isnan(back[i])) << i;
    } else {
      EXPECT_EQ(back[i], 1.0f) << i;
    }
  }
}

TEST_F(QuantiseTest, Bf16Arrays) {
  std::vector<Bf16> b(x_.size());
  to_bf16(x_, b);
  to_float(b, back_);
  for (std::size_t i = 0; i < x_.size(); ++i) {
    ASSERT_EQ(b[i], Bf16::from_float(x_[i]));
    ASSERT_EQ(float_bits(back_[i]), static_cast<std::uint32_t>(b[i].bits) << 16);
  }
}

TEST_F(QuantiseTest, EmptyShapes) {
  std::vector<float> none;
  std::vector<E4M3> no_codes;
  std::vector<float> scales(3, -1.0f);
  EXPECT_EQ(quantise_fp8_block(none, 0, 256, no_codes, none), 0);
  EXPECT_EQ(quantise_fp8_activation(none, 3, 0, no_codes, none), 0);
  EXPECT_EQ(quantise_fp8_channel(none, 3, 0, no_codes, scales), 0);
  for (const float s : scales) EXPECT_EQ(s, 1.0f);
  dequantise_fp8_channel(no_codes, scales, 3, 0, none);
  std::vector<std::uint8_t> no_bytes;
  EXPECT_EQ(quantise_wire_rows(none, 0, 64, no_bytes), 0);
  dequantise_wire_rows(no_bytes, 5, 0, none);
}

// The Error's text, which must name the span, both sizes and the function.
template <typename Call>
std::string refusal(Call call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "was accepted";
  return {};
}

TEST_F(QuantiseTest, RefusesWrongSizes) {
  std::vector<float> x(64);
  std::vector<E4M3> q(64);
  std::vector<E8M0> scales(2);
  std::vector<std::uint8_t> bytes(32);
  const auto has = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  std::string text = refusal([&] {
    std::vector<float> few(1);
    quantise_fp8_block(x, 1, 64, std::span<E4M3>(q).first(63), few);
  });
  has(text, "quantise_fp8_block");
  has(text, "q holds 63");
  has(text, "64");
  text = refusal(
      [&] { quantise_mxfp4(x, 2, 32, MxScaleRule::kCeil, bytes, std::span(scales).first(1)); });
  has(text, "scales holds 1");
  text = refusal([&] { quantise_mxfp8(x, 4, 16, MxScaleRule::kCeil, q, scales); });
  has(text, "16 columns");
  has(text, "32");
  text = refusal([&] { quantise_mxfp8(x, -1, 32, MxScaleRule::kCeil, q, scales); });
  has(text, "[-1, 32]");
  text =
      refusal([&] { quantise_wire_rows(x, std::int64_t{1} << 40, std::int64_t{1} << 40, bytes); });
  has(text, "2^62");
  text = refusal([&] { dequantise_wire_rows(bytes, 1, 32, std::span<float>(x).first(32)); });
  has(text, "33");
  text = refusal([&] { to_bf16(x, std::span<Bf16>()); });
  has(text, "holds 0");
}

}  // namespace
}  // namespace penstock
