// Block formats: many elements, one scale. Per-block primitives for host and device; quantise.h
// holds the host functions over whole arrays.
//
//   format                block                         elements  scale
//   FP8 128x128           128 rows x 128 columns        E4M3      f32   weights (weight_scale_inv)
//   FP8 per channel       one row                       E4M3      f32   weights (weight_scale)
//   FP8 per token / 128   128 columns of a row          E4M3      f32   activations
//   FP8 index row         a row of 128                  E4M3      f32, a power of two
//   MXFP4                 32 columns (K) of a row       E2M1      E8M0  weights
//   MXFP8                 32 columns (K) of a row       E4M3      E8M0  wire, activations
//
// A value is element * scale, one f32 product. Blocks at a matrix's edge may be partial in the f32
// formats (the scale covers what is there); MX blocks are always whole, columns % 32 == 0.
//
// What the edges do, in every format:
// - All zeros: elements 0 with their signs and a finite scale (each rule below says which): zeros
//   come back as they were.
// - One NaN or Inf in a block: the scale is NaN and the whole block reads as NaN. Nothing finite is
//   made of it (an Inf is not clipped to the largest value), and the damage ends with the block.
// - f32 subnormals are numbers like others, in the elements and in the scale 2^-127. What is below
//   half the smallest element times the scale becomes zero.
//
// The largest magnitude travels as the integer amax_bits = max over the block of (f32 bits without
// sign): integers order like magnitudes, Inf above all finite, NaN above Inf, so NaN cannot be lost
// as it is in fmaxf, and the reduction has no order (__reduce_max_sync does it in a warp).
//
// The arithmetic is IEEE 754: device code that uses it is compiled without -use_fast_math, whose
// -prec-div=false changes scales by an ulp and whose -ftz=true turns subnormals into zeros.
#pragma once

#include <cstdint>

#include "penstock/core/host_device.h"
#include "penstock/numerics/formats.h"

namespace penstock {

inline constexpr int kFp8BlockSize = 128;  // FP8 128x128, per token / 128, index rows
inline constexpr int kMxBlockSize = 32;    // MXFP4, MXFP8

// How an MX block's exponent follows from amax.
enum class MxScaleRule : std::uint8_t {
  // floor(log2 amax) - emax of the element (OCP MX v1.0, 6.3). Saturates: elements of a block with
  // amax in (448, 512) * 2^n (E4M3) or (6, 8) * 2^n (E2M1) are clipped. Penstock's weights use it.
  kOcpFloor,
  // ceil(log2(amax / max of the element)): the smallest power of two with which nothing is clipped.
  // Wire and activations use it.
  kCeil,
};

PENSTOCK_HOST_DEVICE constexpr std::uint32_t abs_bits(float x) {
  return float_bits(x) & ~kF32SignBit;
}
PENSTOCK_HOST_DEVICE constexpr std::uint32_t abs_bits(Bf16 x) {
  return static_cast<std::uint32_t>(x.bits & 0x7FFFu) << 16;
}
PENSTOCK_HOST_DEVICE constexpr std::uint32_t max_bits(std::uint32_t a, std::uint32_t b) {
  return a > b ? a : b;
}
// amax_bits of `count` elements (T: float or Bf16), `stride` elements apart. 0 for an empty range.
template <typename T>
PENSTOCK_HOST_DEVICE constexpr std::uint32_t amax_bits(const T* x, std::int64_t count,
                                                       std::int64_t stride = 1) {
  std::uint32_t result = 0;
  for (std::int64_t i = 0; i < count; ++i) result = max_bits(result, abs_bits(x[i * stride]));
  return result;
}
PENSTOCK_HOST_DEVICE constexpr bool is_finite_bits(std::uint32_t amax) {
  return amax < kF32InfBits;
}

// -------------------------------------------------------------------------------------------------
// Scales from amax_bits

// The floor under activations' amax, from DeepSeek-V3's act_quant: a group of zeros gets the scale
// 1e-4 / 448 and no division by zero.
inline constexpr float kActivationAmaxFloor = 1e-4f;
// The floor under weights' amax: 448 * 2^-126, below which amax / 448 would be subnormal.
inline constexpr float kWeightAmaxFloor = 448.0f * 0x1p-126f;

// FP8 weights (128x128 and per channel): s = amax / 448; amax 0 gives 1, and amax is raised to
// kWeightAmaxFloor. NaN or Inf gives NaN.
PENSTOCK_HOST_DEVICE constexpr float fp8_weight_scale(std::uint32_t amax) {
  if (!is_finite_bits(amax)) return float_from_bits(kF32NanBits);
  if (amax == 0) return 1.0f;
  return float_from_bits(max_bits(amax, float_bits(kWeightAmaxFloor))) / E4M3::kMax;
}

// FP8 activations per token / 128: s = max(amax, 1e-4) / 448. NaN or Inf gives NaN.
PENSTOCK_HOST_DEVICE constexpr float fp8_activation_scale(std::uint32_t amax) {
  if (!is_finite_bits(amax)) return float_from_bits(kF32NanBits);
  return float_from_bits(max_bits(amax, float_bits(kActivationAmaxFloor))) / E4M3::kMax;
}

// FP8 index rows (ue8m0): y = max(amax, 1e-4) / 448, an IEEE division; code = exponent field of y,
// plus one if its mantissa is not zero. So s = 2^ceil(log2 y), and with this division it is also
// the exact ceil(log2(max(amax, 1e-4) / 448)), i.e. MxScaleRule::kCeil over the floored amax.
// (Multiplying by the f32 constant 1/448 instead, as DeepSeek's kernel does, can move y by an ulp,
// but never to the other side of a power of two: the codes are the same.) NaN or Inf gives 0xFF.
PENSTOCK_HOST_DEVICE constexpr E8M0 ue8m0_index_scale(std::uint32_t amax) {
  if (!is_finite_bits(amax)) return E8M0{E8M0::kNanBits};
  const std::uint32_t y =
      float_bits(float_from_bits(max_bits(amax, float_bits(kActivationAmaxFloor))) / E4M3::kMax);
  return E8M0{static_cast<std::uint8_t>((y >> 23) + ((y & 0x007FFFFFu) != 0 ? 1u : 0u))};
}

// MX scale of a block of Elem (E4M3, E5M2 or E2M1). Exponents below -127 are raised to -127 (E8M0
// 0x00), so zeros and amax < 2^(emax - 127) get 2^-127; above is unreachable: f32's largest finite
// value gives 2^(127 - emax), + 1 under kCeil. NaN or Inf gives 0xFF. Integer arithmetic only,
// exact for subnormal amax too.
template <typename Elem>
PENSTOCK_HOST_DEVICE constexpr E8M0 mx_scale(std::uint32_t amax, MxScaleRule rule) {
  if (!is_finite_bits(amax)) return E8M0{E8M0::kNanBits};
  // amax < 2^-126 (field 0): both rules end far below the clamp, whatever the mantissa.
  int exponent = static_cast<int>(amax >> 23) - 127 - Elem::kEmax;
  if (rule == MxScaleRule::kCeil) {
    // max of Elem is m * 2^emax, 1 <= m < 2; amax / max exceeds a power of two iff its significand
    // exceeds m.
    constexpr std::uint32_t kMantissaOfMax = float_bits(Elem::kMax) & 0x007FFFFFu;
    if ((amax & 0x007FFFFFu) > kMantissaOfMax) ++exponent;
  }
  return E8M0::from_exponent(exponent);
}

// -------------------------------------------------------------------------------------------------
// Elements under a scale

// x / scale, an IEEE division, then E4M3 (nearest even, saturating). A NaN scale gives E4M3's NaN.
PENSTOCK_HOST_DEVICE constexpr E4M3 quantise_fp8(float x, float scale) {
  return E4M3::from_float(x / scale);
}
// q * scale, rounded to f32. A caller that goes on to add it may see compilers fuse the two into
// one rounding (nvcc does by default): where host and device must agree bit for bit, keep them
// apart.
PENSTOCK_HOST_DEVICE constexpr float dequantise_fp8(E4M3 q, float scale) {
  return q.to_float() * scale;
}

// x * 2^-exponent of the scale, then Elem. The product is exact but where it is subnormal, and
// there every element format rounds to zero. A NaN scale gives Elem::from_float(NaN): E4M3 0x7F,
// E2M1 0x7.
template <typename Elem>
PENSTOCK_HOST_DEVICE constexpr Elem quantise_mx(float x, E8M0 scale) {
  return Elem::from_float(x * scale.inverse());
}
// q * scale; exact unless the product is beyond f32 (Inf) or a subnormal with too few bits.
template <typename Elem>
PENSTOCK_HOST_DEVICE constexpr float dequantise_mx(Elem q, E8M0 scale) {
  return q.to_float() * scale.to_float();
}

// -------------------------------------------------------------------------------------------------
// Whole MX blocks of 32 and rows of them

PENSTOCK_HOST_DEVICE constexpr float as_float(float x) { return x; }
PENSTOCK_HOST_DEVICE constexpr float as_float(Bf16 x) { return x.to_float(); }

// One MXFP8 block: x [32] (float or Bf16) -> q [32]; returns its scale.
template <typename T>
PENSTOCK_HOST_DEVICE constexpr E8M0 quantise_mxfp8_block(const T* x, MxScaleRule rule, E4M3* q) {
  const E8M0 scale = mx_scale<E4M3>(amax_bits(x, kMxBlockSize), rule);
  for (int i = 0; i < kMxBlockSize; ++i) q[i] = quantise_mx<E4M3>(as_float(x[i]), scale);
  return scale;
}
PENSTOCK_HOST_DEVICE constexpr void dequantise_mxfp8_block(const E4M3* q, E8M0 scale, float* out) {
  for (int i = 0; i < kMxBlockSize; ++i) out[i] = dequantise_mx(q[i], scale);
}

// One MXFP4 block: x [32] (float or Bf16) -> pairs [16], low nibble first; returns its scale.
template <typename T>
PENSTOCK_HOST_DEVICE constexpr E8M0 quantise_mxfp4_block(const T* x, MxScaleRule rule,
                                                         std::uint8_t* pairs) {
  const E8M0 scale = mx_scale<E2M1>(amax_bits(x, kMxBlockSize), rule);
  for (int i = 0; i < kMxBlockSize; i += 2) {
    pairs[i / 2] = pack_e2m1(quantise_mx<E2M1>(as_float(x[i]), scale),
                             quantise_mx<E2M1>(as_float(x[i + 1]), scale));
  }
  return scale;
}
PENSTOCK_HOST_DEVICE constexpr void dequantise_mxfp4_block(const std::uint8_t* pairs, E8M0 scale,
                                                           float* out) {
  for (int i = 0; i < kMxBlockSize; ++i) {
    out[i] = dequantise_mx(unpack_e2m1(pairs[i / 2], i), scale);
  }
}

// The inline wire row: `hidden` E4M3 bytes, then hidden / 32 E8M0 bytes, nothing between and
// nothing after. hidden % 32 == 0. A row is a multiple of 16 bytes when hidden % 512 == 0.
PENSTOCK_HOST_DEVICE constexpr std::int64_t wire_row_bytes(std::int64_t hidden) {
  return hidden + hidden / kMxBlockSize;
}
// Byte offset of the scale of column `column`.
PENSTOCK_HOST_DEVICE constexpr std::int64_t wire_scale_offset(std::int64_t hidden,
                                                              std::int64_t column) {
  return hidden + column / kMxBlockSize;
}
// x [hidden] (float or Bf16) -> row [wire_row_bytes(hidden)], scales by kCeil.
template <typename T>
PENSTOCK_HOST_DEVICE constexpr void write_wire_row(const T* x, std::int64_t hidden,
                                                   std::uint8_t* row) {
  for (std::int64_t begin = 0; begin < hidden; begin += kMxBlockSize) {
    const E8M0 scale = mx_scale<E4M3>(amax_bits(x + begin, kMxBlockSize), MxScaleRule::kCeil);
    for (std::int64_t i = begin; i < begin + kMxBlockSize; ++i) {
      row[i] = quantise_mx<E4M3>(as_float(x[i]), scale).bits;
    }
    row[wire_scale_offset(hidden, begin)] = scale.bits;
  }
}
// Element `column` of a wire row.
PENSTOCK_HOST_DEVICE constexpr float read_wire_element(const std::uint8_t* row, std::int64_t hidden,
                                                       std::int64_t column) {
  return dequantise_mx(E4M3{row[column]}, E8M0{row[wire_scale_offset(hidden, column)]});
}

}  // namespace penstock
