// The scalar storage formats: Bf16, E4M3, E5M2, E2M1, E8M0.
//
// Strong types around the stored bits, the same source for host and device, constexpr throughout.
// Every conversion works on the bits of the f32 and rounds once, so that the result depends neither
// on the rounding mode nor on flush-to-zero flags.
//
//   format  bits  bias  max finite  min normal  min subnormal  Inf  NaN
//   Bf16    16    127   3.39e38     2^-126      2^-133         yes  yes
//   E4M3    8     7     448 (0x7E)  2^-6        2^-9           no   0x7F, 0xFF    (OCP OFP8, "fn")
//   E5M2    8     15    57344       2^-14       2^-16          yes  0x7D .. 0x7F  (OCP OFP8)
//   E2M1    4     1     6           1           0.5            no   no            (OCP MX v1.0)
//   E8M0    8     127   2^127       2^-127      none; no zero  no   0xFF          (OCP MX v1.0)
//
// Rules of from_float(x), the conversion that everything in Penstock uses:
// - Bf16, E4M3, E5M2, E2M1 round to nearest, ties to even. The sign of a zero is kept.
// - E4M3, E5M2 and E2M1 saturate: what rounds beyond the largest finite value, and Inf, become that
//   value with x's sign (PTX calls it satfinite). Bf16 overflows to Inf as IEEE 754 does.
// - A NaN becomes the one NaN that Hopper's cvt instructions write, whatever its sign and payload:
//   Bf16 0x7FFF, E4M3 0x7F, E5M2 0x7F. So host and device agree bit for bit on NaN too. E2M1 has no
//   NaN: it becomes +6 (0x7), as in CUDA and in PTX for sm_100. Block formats therefore carry NaN
//   in the scale (block.h).
// - E8M0 has no nearest rule: from_float_ceil and from_float_floor say the direction.
//
// to_float() is exact for every code; NaN codes give the quiet f32 NaN 0x7FFFFFFF (E4M3, E5M2,
// E8M0) or keep their bits (Bf16).
//
// On sm_90 hardware converts f32 to Bf16, E4M3 and E5M2, and E4M3 and E5M2 to f16; kernels' inner
// loops use that. These functions are the definition that such code is tested against.
#pragma once

#include <cstdint>

#include "penstock/core/host_device.h"

namespace penstock {

// Bits of an f32 and back. Not std::bit_cast: a constexpr function of the standard library is
// host-only for nvcc.
PENSTOCK_HOST_DEVICE constexpr std::uint32_t float_bits(float x) {
  return __builtin_bit_cast(std::uint32_t, x);
}
PENSTOCK_HOST_DEVICE constexpr float float_from_bits(std::uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

inline constexpr std::uint32_t kF32SignBit = 0x80000000u;
inline constexpr std::uint32_t kF32InfBits = 0x7F800000u;
inline constexpr std::uint32_t kF32NanBits = 0x7FFFFFFFu;  // PTX's canonical NaN

namespace detail {

// value >> shift, rounded to nearest, ties to even; shift in [1, 31].
PENSTOCK_HOST_DEVICE constexpr std::uint32_t shift_right_rne(std::uint32_t value, int shift) {
  const std::uint32_t half = std::uint32_t{1} << (shift - 1);
  const std::uint32_t odd = (value >> shift) & 1u;
  return (value + (half - 1u) + odd) >> shift;
}

// Magnitude code of a finite |x| (bits without the sign) in a format of kMantissaBits and kBias,
// the exponent unbounded above: the caller compares with its largest code. The code of a rounded
// value that reaches the next binade is right by itself, since the carry runs into the exponent
// field.
template <int kMantissaBits, int kBias>
PENSTOCK_HOST_DEVICE constexpr std::uint32_t encode_magnitude(std::uint32_t abs_bits) {
  constexpr int kShift = 23 - kMantissaBits;
  constexpr int kRebias = 127 - kBias;
  const int exponent = static_cast<int>(abs_bits >> 23) - kRebias;  // biased as in the target
  if (exponent >= 1) {
    return shift_right_rne(abs_bits - (static_cast<std::uint32_t>(kRebias) << 23), kShift);
  }
  // Subnormal in the target: the unit is fixed, the significand moves. f32 subnormals (exponent
  // field 0) are below half a unit of every format here (kBias < 127), with or without hidden bit.
  const int shift = kShift + 1 - exponent;
  if (shift > 24) return 0;  // below half a unit
  const std::uint32_t significand = (abs_bits & 0x007FFFFFu) | 0x00800000u;
  return shift_right_rne(significand, shift);
}

// Exact value of a finite code given without its sign.
template <int kMantissaBits, int kBias>
PENSTOCK_HOST_DEVICE constexpr std::uint32_t decode_magnitude(std::uint32_t code) {
  constexpr std::uint32_t kMantissaMask = (1u << kMantissaBits) - 1u;
  // 2^(1 - kBias - kMantissaBits), a normal f32, so the product below is exact under flush-to-zero.
  constexpr float kUnit =
      float_from_bits(static_cast<std::uint32_t>(127 + 1 - kBias - kMantissaBits) << 23);
  const std::uint32_t exponent = code >> kMantissaBits;
  const std::uint32_t mantissa = code & kMantissaMask;
  if (exponent == 0) return float_bits(static_cast<float>(mantissa) * kUnit);
  return ((exponent + (127u - kBias)) << 23) | (mantissa << (23 - kMantissaBits));
}

}  // namespace detail

// bfloat16: the upper half of an f32.
struct Bf16 {
  std::uint16_t bits;

  static constexpr std::uint16_t kNanBits = 0x7FFF;

  PENSTOCK_HOST_DEVICE static constexpr Bf16 from_bits(std::uint16_t bits) { return Bf16{bits}; }
  // Nearest even; overflow gives Inf; NaN gives 0x7FFF.
  PENSTOCK_HOST_DEVICE static constexpr Bf16 from_float(float x) {
    const std::uint32_t u = float_bits(x);
    if ((u & ~kF32SignBit) > kF32InfBits) return Bf16{kNanBits};
    return Bf16{static_cast<std::uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16)};
  }
  PENSTOCK_HOST_DEVICE constexpr float to_float() const {
    return float_from_bits(static_cast<std::uint32_t>(bits) << 16);
  }
  PENSTOCK_HOST_DEVICE constexpr bool is_nan() const { return (bits & 0x7FFFu) > 0x7F80u; }
  // Equality of bits, not of values: -0 differs from +0, a NaN equals itself.
  PENSTOCK_HOST_DEVICE friend constexpr bool operator==(Bf16 a, Bf16 b) { return a.bits == b.bits; }
  PENSTOCK_HOST_DEVICE friend constexpr bool operator!=(Bf16 a, Bf16 b) { return a.bits != b.bits; }
};

// FP8 E4M3 "fn": no Inf, one NaN per sign.
struct E4M3 {
  std::uint8_t bits;

  static constexpr int kEmax = 8;  // exponent of the largest finite value
  static constexpr float kMax = 448.0f;
  static constexpr std::uint8_t kMaxBits = 0x7E;
  static constexpr std::uint8_t kNanBits = 0x7F;

  PENSTOCK_HOST_DEVICE static constexpr E4M3 from_bits(std::uint8_t bits) { return E4M3{bits}; }
  // Nearest even, saturating: overflow and Inf give +-448, NaN gives 0x7F. (448, 464) rounds to 448
  // with or without saturation.
  PENSTOCK_HOST_DEVICE static constexpr E4M3 from_float(float x) { return convert(x, kMaxBits); }
  // Nearest even, not saturating: what rounds above 448, and Inf, give NaN (0x7F, positive). 464 is
  // a tie and goes to 448. PyTorch's and ml_dtypes' casts do this (they keep the NaN's sign).
  PENSTOCK_HOST_DEVICE static constexpr E4M3 from_float_no_saturate(float x) {
    return convert(x, kNanBits);
  }
  PENSTOCK_HOST_DEVICE constexpr float to_float() const {
    const std::uint32_t magnitude = bits & 0x7Fu;
    if (magnitude == kNanBits) return float_from_bits(kF32NanBits);
    return float_from_bits(detail::decode_magnitude<3, 7>(magnitude) |
                           (static_cast<std::uint32_t>(bits & 0x80u) << 24));
  }
  // Exact: every E4M3 value is a Bf16 value. NaN gives 0x7FFF.
  PENSTOCK_HOST_DEVICE constexpr Bf16 to_bf16() const { return Bf16::from_float(to_float()); }
  PENSTOCK_HOST_DEVICE constexpr bool is_nan() const { return (bits & 0x7Fu) == kNanBits; }
  // Equality of bits.
  PENSTOCK_HOST_DEVICE friend constexpr bool operator==(E4M3 a, E4M3 b) { return a.bits == b.bits; }
  PENSTOCK_HOST_DEVICE friend constexpr bool operator!=(E4M3 a, E4M3 b) { return a.bits != b.bits; }

 private:
  PENSTOCK_HOST_DEVICE static constexpr E4M3 convert(float x, std::uint8_t overflow) {
    const std::uint32_t u = float_bits(x);
    const std::uint32_t magnitude = u & ~kF32SignBit;
    if (magnitude > kF32InfBits) return E4M3{kNanBits};
    const std::uint32_t code = detail::encode_magnitude<3, 7>(magnitude);
    if (code > kMaxBits && overflow == kNanBits) return E4M3{kNanBits};
    const std::uint32_t sign = (u >> 24) & 0x80u;
    return E4M3{static_cast<std::uint8_t>(sign | (code > kMaxBits ? overflow : code))};
  }
};

// FP8 E5M2: IEEE-like, with Inf (0x7C, 0xFC) and three NaN codes per sign.
struct E5M2 {
  std::uint8_t bits;

  static constexpr int kEmax = 15;
  static constexpr float kMax = 57344.0f;
  static constexpr std::uint8_t kMaxBits = 0x7B;
  static constexpr std::uint8_t kInfBits = 0x7C;
  static constexpr std::uint8_t kNanBits = 0x7F;

  PENSTOCK_HOST_DEVICE static constexpr E5M2 from_bits(std::uint8_t bits) { return E5M2{bits}; }
  // Nearest even, saturating: overflow and Inf give +-57344, NaN gives 0x7F.
  PENSTOCK_HOST_DEVICE static constexpr E5M2 from_float(float x) { return convert(x, kMaxBits); }
  // Nearest even, overflow to Inf: 61440 and above (a tie at 61440 goes to the even code, Inf).
  PENSTOCK_HOST_DEVICE static constexpr E5M2 from_float_no_saturate(float x) {
    return convert(x, kInfBits);
  }
  PENSTOCK_HOST_DEVICE constexpr float to_float() const {
    const std::uint32_t magnitude = bits & 0x7Fu;
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24;
    if (magnitude > kInfBits) return float_from_bits(kF32NanBits);
    if (magnitude == kInfBits) return float_from_bits(kF32InfBits | sign);
    return float_from_bits(detail::decode_magnitude<2, 15>(magnitude) | sign);
  }
  // Exact. NaN gives 0x7FFF.
  PENSTOCK_HOST_DEVICE constexpr Bf16 to_bf16() const { return Bf16::from_float(to_float()); }
  PENSTOCK_HOST_DEVICE constexpr bool is_nan() const { return (bits & 0x7Fu) > kInfBits; }
  // Equality of bits.
  PENSTOCK_HOST_DEVICE friend constexpr bool operator==(E5M2 a, E5M2 b) { return a.bits == b.bits; }
  PENSTOCK_HOST_DEVICE friend constexpr bool operator!=(E5M2 a, E5M2 b) { return a.bits != b.bits; }

 private:
  PENSTOCK_HOST_DEVICE static constexpr E5M2 convert(float x, std::uint8_t overflow) {
    const std::uint32_t u = float_bits(x);
    const std::uint32_t magnitude = u & ~kF32SignBit;
    if (magnitude > kF32InfBits) return E5M2{kNanBits};
    const std::uint32_t code = detail::encode_magnitude<2, 15>(magnitude);
    const std::uint32_t sign = (u >> 24) & 0x80u;
    return E5M2{static_cast<std::uint8_t>(sign | (code > kMaxBits ? overflow : code))};
  }
};

// FP4 E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. One code in the low nibble of a byte,
// the high nibble zero; arrays hold two a byte (pack_e2m1).
struct E2M1 {
  std::uint8_t bits;

  static constexpr int kEmax = 2;
  static constexpr float kMax = 6.0f;
  static constexpr std::uint8_t kMaxBits = 0x7;

  // The high nibble of `bits` is ignored.
  PENSTOCK_HOST_DEVICE static constexpr E2M1 from_bits(std::uint8_t bits) {
    return E2M1{static_cast<std::uint8_t>(bits & 0xFu)};
  }
  // Nearest even, saturating: overflow and Inf give +-6; NaN gives +6, the format having none.
  PENSTOCK_HOST_DEVICE static constexpr E2M1 from_float(float x) {
    const std::uint32_t u = float_bits(x);
    const std::uint32_t magnitude = u & ~kF32SignBit;
    if (magnitude > kF32InfBits) return E2M1{kMaxBits};
    const std::uint32_t code = detail::encode_magnitude<1, 1>(magnitude);
    const std::uint32_t sign = (u >> 28) & 0x8u;
    return E2M1{static_cast<std::uint8_t>(sign | (code > kMaxBits ? kMaxBits : code))};
  }
  PENSTOCK_HOST_DEVICE constexpr float to_float() const {
    return float_from_bits(detail::decode_magnitude<1, 1>(bits & 0x7u) |
                           (static_cast<std::uint32_t>(bits & 0x8u) << 28));
  }
  // Exact.
  PENSTOCK_HOST_DEVICE constexpr Bf16 to_bf16() const { return Bf16::from_float(to_float()); }
  // Equality of bits.
  PENSTOCK_HOST_DEVICE friend constexpr bool operator==(E2M1 a, E2M1 b) { return a.bits == b.bits; }
  PENSTOCK_HOST_DEVICE friend constexpr bool operator!=(E2M1 a, E2M1 b) { return a.bits != b.bits; }
};

// Two E2M1 codes in a byte: the element of even index in the low nibble.
PENSTOCK_HOST_DEVICE constexpr std::uint8_t pack_e2m1(E2M1 even, E2M1 odd) {
  return static_cast<std::uint8_t>((even.bits & 0xFu) | ((odd.bits & 0xFu) << 4));
}
// Element `index` (only its parity counts) of a packed byte.
PENSTOCK_HOST_DEVICE constexpr E2M1 unpack_e2m1(std::uint8_t pair, std::int64_t index) {
  return E2M1{static_cast<std::uint8_t>((index & 1) != 0 ? pair >> 4 : pair & 0xFu)};
}

// E8M0: the power of two 2^(bits - 127), bits in 0 .. 254; 0xFF is NaN. No sign, no zero: 0x00 is
// 2^-127, a subnormal f32. (Decoders that shift the code into the f32 exponent read 0x00 as 0 and
// 0xFF as Inf; these do not.)
struct E8M0 {
  std::uint8_t bits;

  static constexpr std::uint8_t kMaxBits = 0xFE;
  static constexpr std::uint8_t kNanBits = 0xFF;

  PENSTOCK_HOST_DEVICE static constexpr E8M0 from_bits(std::uint8_t bits) { return E8M0{bits}; }
  // 2^exponent, clamped to [2^-127, 2^127].
  PENSTOCK_HOST_DEVICE static constexpr E8M0 from_exponent(int exponent) {
    const int code = exponent + 127;
    return E8M0{static_cast<std::uint8_t>(code < 0 ? 0 : (code > 254 ? 254 : code))};
  }
  // The smallest power of two >= |x| (CUDA's default, cudaRoundPosInf). 0 and everything below give
  // 2^-127; above 2^127 and Inf saturate to 2^127; NaN gives 0xFF. The sign is ignored.
  PENSTOCK_HOST_DEVICE static constexpr E8M0 from_float_ceil(float x) {
    const std::uint32_t magnitude = float_bits(x) & ~kF32SignBit;
    if (magnitude > kF32InfBits) return E8M0{kNanBits};
    const std::uint32_t exponent = magnitude >> 23;
    const std::uint32_t mantissa = magnitude & 0x007FFFFFu;
    // Below 2^-126 the exponent field is 0 and the halfway value 2^-127 is mantissa 0x400000.
    if (exponent == 0) return E8M0{static_cast<std::uint8_t>(mantissa > 0x00400000u ? 1 : 0)};
    const std::uint32_t code = exponent + (mantissa != 0 ? 1u : 0u);
    return E8M0{static_cast<std::uint8_t>(code > kMaxBits ? kMaxBits : code)};
  }
  // The largest power of two <= |x| (CUDA's cudaRoundZero). Below 2^-127, and 0, give 2^-127; Inf
  // saturates to 2^127; NaN gives 0xFF. The sign is ignored.
  PENSTOCK_HOST_DEVICE static constexpr E8M0 from_float_floor(float x) {
    const std::uint32_t magnitude = float_bits(x) & ~kF32SignBit;
    if (magnitude > kF32InfBits) return E8M0{kNanBits};
    const std::uint32_t code = magnitude >> 23;
    return E8M0{static_cast<std::uint8_t>(code > kMaxBits ? kMaxBits : code)};
  }
  // Exact; 0x00 gives the subnormal 2^-127, 0xFF gives NaN.
  PENSTOCK_HOST_DEVICE constexpr float to_float() const {
    if (bits == kNanBits) return float_from_bits(kF32NanBits);
    if (bits == 0) return float_from_bits(0x00400000u);
    return float_from_bits(static_cast<std::uint32_t>(bits) << 23);
  }
  // 2^(127 - bits), exact: the factor that an element is multiplied by before its conversion. 0xFE
  // gives the subnormal 2^-127, 0xFF gives NaN.
  PENSTOCK_HOST_DEVICE constexpr float inverse() const {
    if (bits == kNanBits) return float_from_bits(kF32NanBits);
    return E8M0{static_cast<std::uint8_t>(254 - bits)}.to_float();
  }
  PENSTOCK_HOST_DEVICE constexpr bool is_nan() const { return bits == kNanBits; }
  // Equality of bits.
  PENSTOCK_HOST_DEVICE friend constexpr bool operator==(E8M0 a, E8M0 b) { return a.bits == b.bits; }
  PENSTOCK_HOST_DEVICE friend constexpr bool operator!=(E8M0 a, E8M0 b) { return a.bits != b.bits; }
};

// Arrays of these are the stored bytes: a checkpoint's or a packet's memory is read in place.
static_assert(sizeof(Bf16) == 2 && sizeof(E4M3) == 1 && sizeof(E5M2) == 1 && sizeof(E2M1) == 1 &&
              sizeof(E8M0) == 1);

}  // namespace penstock
