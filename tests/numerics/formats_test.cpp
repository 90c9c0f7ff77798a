// Scalar formats against tables that ml_dtypes made (tables.h), for every code and every probe.
#include "penstock/numerics/formats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "numerics/probes.h"
#include "numerics/tables.h"

namespace penstock {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Usable in constant expressions, on both signs.
static_assert(E4M3::from_float(449.0f).bits == 0x7E);
static_assert(E4M3::from_float_no_saturate(464.0f).bits == 0x7E);  // the tie goes to the even code
static_assert(E4M3::from_float_no_saturate(-464.00003f).bits == 0x7F);
static_assert(E5M2::from_float_no_saturate(-61440.0f).bits == 0xFC);
static_assert(E5M2::from_float(-61440.0f).bits == 0xFB);
static_assert(E2M1::from_float(-2.5f).bits == 0xC);
static_assert(Bf16::from_float(1.00390625f).bits == 0x3F80);
static_assert(E8M0{127}.to_float() == 1.0f);
static_assert(Bf16{0x8000} != Bf16{0} && Bf16{Bf16::kNanBits} == Bf16{Bf16::kNanBits});

bool is_nan_bits(std::uint32_t bits) { return (bits & 0x7FFFFFFFu) > kF32InfBits; }

template <typename Format, std::size_t kSize>
void check_decode(const std::uint32_t (&expected)[kSize]) {
  for (std::size_t code = 0; code < kSize; ++code) {
    const auto f = Format::from_bits(static_cast<std::uint8_t>(code));
    EXPECT_EQ(float_bits(f.to_float()), expected[code]) << "code " << code;
  }
}

TEST(FormatsTest, EveryCodeDecodesAsInMlDtypes) {
  check_decode<E4M3>(tables::kDecodeE4M3);
  check_decode<E5M2>(tables::kDecodeE5M2);
  check_decode<E2M1>(tables::kDecodeE2M1);
  check_decode<E8M0>(tables::kDecodeE8M0);
}

TEST(FormatsTest, EveryBf16CodeDecodesAsInMlDtypes) {
  for (std::uint32_t high = 0; high < 256; ++high) {
    probes::RowDigest digest;
    for (std::uint32_t low = 0; low < 256; ++low) {
      const auto code = static_cast<std::uint16_t>(high << 8 | low);
      digest.add(float_bits(Bf16{code}.to_float()), 4);
    }
    EXPECT_EQ(digest.value(), tables::kBf16Decode[high]) << "codes " << high << " * 256 ...";
  }
}

// Encodes every probe and compares with the threshold table; `sign_shift` places the sign.
template <typename Encode, std::size_t kSize>
void check_encode(Encode encode, const std::uint32_t (&thresholds)[kSize], int sign_shift,
                  std::uint32_t nan_code, std::uint32_t unsigned_code = 0x100) {
  std::int64_t failures = 0;
  const auto check = [&](std::uint32_t bits) {
    const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
    std::uint32_t expected = nan_code;
    if (magnitude <= kF32InfBits) {
      expected = tables::lookup(thresholds, magnitude);
      if (expected != unsigned_code) expected |= (bits >> 31) << sign_shift;
    }
    const std::uint32_t actual = encode(float_from_bits(bits)).bits;
    if (actual != expected && ++failures <= 5) {
      ADD_FAILURE() << std::hex << "f32 0x" << bits << ": got 0x" << actual << ", expected 0x"
                    << expected;
    }
  };
  for (int b = 0; b < probes::kBinades; ++b) {
    for (int m = 0; m < probes::kMantissas; ++m) check(probes::probe_bits(b, m));
  }
  for (const std::uint32_t sign : {0u, 0x80000000u}) {
    for (const std::uint32_t threshold : thresholds) {  // each step, and one ulp to either side
      check(sign | (threshold - 1));
      check(sign | threshold);
      check(sign | (threshold + 1));
    }
    for (const std::uint32_t nan : {0x7F800001u, 0x7FBFFFFFu, 0x7FC00000u, 0x7FFFFFFFu}) {
      check(sign | nan);
    }
  }
  EXPECT_EQ(failures, 0);
}

TEST(FormatsTest, E4M3EncodesAsInMlDtypes) {
  check_encode([](float x) { return E4M3::from_float(x); }, tables::kEncodeE4M3, 7, 0x7F);
}
TEST(FormatsTest, E4M3NoSaturateEncodesAsInMlDtypes) {
  check_encode([](float x) { return E4M3::from_float_no_saturate(x); },
               tables::kEncodeE4M3NoSaturate, 7, 0x7F, /*unsigned_code=*/0x7F);
}
TEST(FormatsTest, E5M2EncodesAsInMlDtypes) {
  check_encode([](float x) { return E5M2::from_float(x); }, tables::kEncodeE5M2, 7, 0x7F);
}
TEST(FormatsTest, E5M2NoSaturateEncodesAsInMlDtypes) {
  check_encode([](float x) { return E5M2::from_float_no_saturate(x); },
               tables::kEncodeE5M2NoSaturate, 7, 0x7F);
}
TEST(FormatsTest, E2M1EncodesAsInMlDtypes) {
  check_encode([](float x) { return E2M1::from_float(x); }, tables::kEncodeE2M1, 3, 0x7);
}

TEST(FormatsTest, Bf16EncodesAsInMlDtypes) {
  for (int b = 0; b < probes::kBinades; ++b) {
    probes::RowDigest digest;
    for (int m = 0; m < probes::kMantissas; ++m) {
      digest.add(Bf16::from_float(float_from_bits(probes::probe_bits(b, m))).bits, 2);
    }
    EXPECT_EQ(digest.value(), tables::kBf16Encode[b])
        << "sign " << b / 256 << ", exponent field " << b % 256;
  }
}

TEST(FormatsTest, E8M0RoundsInTheNamedDirection) {
  for (int b = 0; b < probes::kBinades; ++b) {
    for (int m = 0; m < probes::kMantissas; ++m) {
      const std::uint32_t bits = probes::probe_bits(b, m);
      const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
      const bool nan = magnitude > kF32InfBits;
      const std::uint32_t ceil = nan ? 0xFF
                                 : magnitude == kF32InfBits
                                     ? 0xFE
                                     : tables::lookup(tables::kScaleE8M0Ceil, magnitude);
      const std::uint32_t floor = nan ? 0xFF
                                  : magnitude == kF32InfBits
                                      ? 0xFE
                                      : tables::lookup(tables::kScaleE8M0Floor, magnitude);
      const float x = float_from_bits(bits);
      ASSERT_EQ(E8M0::from_float_ceil(x).bits, ceil) << std::hex << bits;
      ASSERT_EQ(E8M0::from_float_floor(x).bits, floor) << std::hex << bits;
    }
  }
}

TEST(FormatsTest, E8M0Ends) {
  EXPECT_EQ(E8M0{0x00}.to_float(), std::ldexp(1.0f, -127));
  EXPECT_EQ(E8M0{0x00}.inverse(), std::ldexp(1.0f, 127));
  EXPECT_EQ(E8M0{0xFE}.to_float(), std::ldexp(1.0f, 127));
  EXPECT_EQ(E8M0{0xFE}.inverse(), std::ldexp(1.0f, -127));
  EXPECT_TRUE(std::isnan(E8M0{0xFF}.to_float()));
  EXPECT_TRUE(std::isnan(E8M0{0xFF}.inverse()));
  EXPECT_TRUE(E8M0{0xFF}.is_nan());
  EXPECT_FALSE(E8M0{0xFE}.is_nan());
  EXPECT_EQ(E8M0::from_exponent(-1000).bits, 0x00);
  EXPECT_EQ(E8M0::from_exponent(-127).bits, 0x00);
  EXPECT_EQ(E8M0::from_exponent(127).bits, 0xFE);
  EXPECT_EQ(E8M0::from_exponent(1000).bits, 0xFE);
  for (int code = 0; code < 255; ++code) {
    const E8M0 scale{static_cast<std::uint8_t>(code)};
    EXPECT_EQ(scale.to_float() * scale.inverse(), 1.0f) << code;
    EXPECT_EQ(E8M0::from_float_ceil(scale.to_float()), scale);
    EXPECT_EQ(E8M0::from_float_floor(scale.to_float()), scale);
    EXPECT_EQ(E8M0::from_exponent(code - 127), scale);
  }
}

TEST(FormatsTest, NanAndInfBecomeWhatTheHeaderSays) {
  for (const float nan :
       {kNan, -kNan, float_from_bits(0x7F800001u), float_from_bits(0xFF800001u)}) {
    EXPECT_EQ(Bf16::from_float(nan).bits, 0x7FFF);
    EXPECT_EQ(E4M3::from_float(nan).bits, 0x7F);
    EXPECT_EQ(E4M3::from_float_no_saturate(nan).bits, 0x7F);
    EXPECT_EQ(E5M2::from_float(nan).bits, 0x7F);
    EXPECT_EQ(E5M2::from_float_no_saturate(nan).bits, 0x7F);
    EXPECT_EQ(E2M1::from_float(nan).bits, 0x7);
    EXPECT_EQ(E8M0::from_float_ceil(nan).bits, 0xFF);
    EXPECT_EQ(E8M0::from_float_floor(nan).bits, 0xFF);
  }
  EXPECT_EQ(Bf16::from_float(-kInfinity).bits, 0xFF80);
  EXPECT_EQ(Bf16::from_float(std::numeric_limits<float>::max()).bits, 0x7F80);
  EXPECT_EQ(E4M3::from_float(-kInfinity).bits, 0xFE);
  EXPECT_EQ(E4M3::from_float_no_saturate(-kInfinity).bits, 0x7F);
  EXPECT_EQ(E5M2::from_float(-kInfinity).bits, 0xFB);
  EXPECT_EQ(E5M2::from_float_no_saturate(-kInfinity).bits, 0xFC);
  EXPECT_EQ(E2M1::from_float(-kInfinity).bits, 0xF);
}

// decode then encode is the identity on every code but a NaN's, which becomes the canonical one;
// the value passes through Bf16 unchanged.
template <typename Format>
void check_round_trip(int codes, bool has_nan) {
  int nans = 0;
  for (int code = 0; code < codes; ++code) {
    const auto f = Format::from_bits(static_cast<std::uint8_t>(code));
    const float value = f.to_float();
    if (std::isnan(value)) {
      ++nans;
      EXPECT_EQ(Format::from_float(value).bits, 0x7F) << code;
      EXPECT_TRUE(f.to_bf16().is_nan());
      continue;
    }
    if (!std::isinf(value)) {
      EXPECT_EQ(Format::from_float(value), f) << code;
    }
    EXPECT_EQ(float_bits(f.to_bf16().to_float()), float_bits(value)) << code;
  }
  EXPECT_EQ(nans > 0, has_nan);
}

TEST(FormatsTest, EveryCodeRoundTrips) {
  check_round_trip<E4M3>(256, true);
  check_round_trip<E5M2>(256, true);
  check_round_trip<E2M1>(16, false);
  for (int code = 0; code < 256; ++code) {
    const E5M2 f{static_cast<std::uint8_t>(code)};
    if (!f.is_nan()) {
      EXPECT_EQ(E5M2::from_float_no_saturate(f.to_float()), f) << code;
    }
    EXPECT_EQ(E4M3{static_cast<std::uint8_t>(code)}.is_nan(),
              is_nan_bits(tables::kDecodeE4M3[code]));
    EXPECT_EQ(f.is_nan(), is_nan_bits(tables::kDecodeE5M2[code]));
  }
  for (int code = 0; code < (1 << 16); ++code) {
    const Bf16 f{static_cast<std::uint16_t>(code)};
    const Bf16 back = Bf16::from_float(f.to_float());
    if (f.is_nan()) {
      ASSERT_EQ(back.bits, Bf16::kNanBits) << code;
    } else {
      ASSERT_EQ(back, f) << code;
    }
  }
}

TEST(FormatsTest, NibblesPackLowFirst) {
  for (int even = 0; even < 16; ++even) {
    for (int odd = 0; odd < 16; ++odd) {
      const auto lo = E2M1::from_bits(static_cast<std::uint8_t>(even | 0xA0));
      const auto hi = E2M1::from_bits(static_cast<std::uint8_t>(odd));
      const std::uint8_t pair = pack_e2m1(lo, hi);
      EXPECT_EQ(pair, even | odd << 4);
      EXPECT_EQ(unpack_e2m1(pair, 6), lo);
      EXPECT_EQ(unpack_e2m1(pair, 7), hi);
    }
  }
}

}  // namespace
}  // namespace penstock
