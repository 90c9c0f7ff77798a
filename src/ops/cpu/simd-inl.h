// Blocks shared by the CPU kernels: decoding a vector of weights, and sums whose order is fixed.
// Compiled once an instruction set.
#if defined(PENSTOCK_OPS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#  ifdef PENSTOCK_OPS_CPU_SIMD_INL_H_
#    undef PENSTOCK_OPS_CPU_SIMD_INL_H_
#  else
#    define PENSTOCK_OPS_CPU_SIMD_INL_H_
#  endif

#  include <algorithm>
#  include <bit>
#  include <cstdint>
#  include <cstring>

#  include "hwy/highway.h"
#  include "ops/cpu/matrix.h"

HWY_BEFORE_NAMESPACE();
namespace penstock::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
inline constexpr std::int64_t kLanes = static_cast<std::int64_t>(HWY_LANES(float));
inline constexpr bool kOneLane = HWY_TARGET == HWY_SCALAR;

// Adds neighbours: lower half from a, upper from b. log2(kLanes) rounds over kLanes accumulators
// give their sums lane by lane; the tree over lanes is the same whoever sits in the other half.
HWY_INLINE V fold(V a, V b) {
#  if HWY_TARGET == HWY_SCALAR
  (void)b;
  return a;
#  else
  const D d;
  return hn::Add(hn::ConcatEven(d, b, a), hn::ConcatOdd(d, b, a));
#  endif
}

// Sums of `count` (a power of two, at most kLanes) accumulators, in lanes [0, count); sums repeat
// behind.
template <int count>
HWY_INLINE V fold_all(V* acc) {
  int left = count;
  for (std::int64_t width = kLanes; width > 1; width /= 2) {
    if (left > 1) {
      for (int i = 0; i < left / 2; ++i) acc[i] = fold(acc[2 * i], acc[2 * i + 1]);
      left /= 2;
    } else {
      acc[0] = fold(acc[0], acc[0]);
    }
  }
  return acc[0];
}

HWY_INLINE float sum_lanes(V v) { return hn::GetLane(fold_all<1>(&v)); }

// Loads the first `count` of kLanes floats, zeros behind. Memory up to a whole vector is readable.
// (MaskedLoad would need an aligned address on SSE4.)
HWY_INLINE V load_first(const float* from, std::int64_t count) {
  const D d;
  return hn::IfThenElseZero(hn::FirstN(d, static_cast<std::size_t>(count)), hn::LoadU(d, from));
}

// Decoders. value() gives kLanes weights from stored column `column` on, to be multiplied by
// scale(), which carries what value() leaves out. E4M3 and E2M1 codes are placed in an f16's sign,
// exponent and mantissa: that misses a constant power of two, and subnormals come out right
// because an f16's are converted like any other value.
template <MatrixFormat format>
struct Decoder;

// Columns (rows) of a scale's block where there is no bound.
inline constexpr std::int64_t kUnbounded = std::int64_t{1} << 62;

template <>
struct Decoder<MatrixFormat::kF32> {
  static constexpr bool kScaled = false;
  static constexpr std::int64_t kScaleColumns = kUnbounded;
  static constexpr std::int64_t kScaleRows = kUnbounded;
  static constexpr std::int64_t bytes(std::int64_t columns) { return columns * 4; }
  static HWY_INLINE V value(const std::uint8_t* row, std::int64_t column) {
    const D d;
    return hn::LoadU(d, reinterpret_cast<const float*>(row) + column);
  }
  static float scale(const Matrix&, std::int64_t, std::int64_t) { return 1.0f; }
};

template <>
struct Decoder<MatrixFormat::kBf16> {
  static constexpr bool kScaled = false;
  static constexpr std::int64_t kScaleColumns = kUnbounded;
  static constexpr std::int64_t kScaleRows = kUnbounded;
  static constexpr std::int64_t bytes(std::int64_t columns) { return columns * 2; }
  static HWY_INLINE V value(const std::uint8_t* row, std::int64_t column) {
    const D d;
    const hn::Rebind<std::uint32_t, D> du;
    const hn::Rebind<std::uint16_t, D> dh;
    const auto* from = reinterpret_cast<const std::uint16_t*>(row) + column;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(dh, from))));
  }
  static float scale(const Matrix&, std::int64_t, std::int64_t) { return 1.0f; }
};

// Scales from 2^120 on overflow to infinity; no quantiser makes such a scale.
struct E4m3Decoder {
  static constexpr bool kScaled = true;
  static constexpr float kGain = 256.0f;  // f16's bias 15 - E4M3's bias 7
  static constexpr std::int64_t bytes(std::int64_t columns) { return columns; }
  static HWY_INLINE V value(const std::uint8_t* row, std::int64_t column) {
    const D d;
    const hn::Rebind<std::int16_t, D> dw;
    const hn::Rebind<hwy::float16_t, D> dh;
    const hn::Rebind<std::int8_t, D> db;
    const auto bytes = hn::LoadU(db, reinterpret_cast<const std::int8_t*>(row) + column);
    // The sign reaches bits 15 and 14; bit 14, the exponent's top, is cleared.
    const auto half = hn::And(hn::ShiftLeft<7>(hn::PromoteTo(dw, bytes)),
                              hn::Set(dw, static_cast<std::int16_t>(0xBF80)));
#  if HWY_TARGET <= HWY_AVX2
    // Code 0x7F, NaN, is the only one that a carry takes to bit 14, and with that bit an f16's
    // exponent is all ones.
    const auto carry = hn::And(hn::Add(half, hn::Set(dw, 0x0080)), hn::Set(dw, 0x4000));
    return hn::PromoteTo(d, hn::BitCast(dh, hn::Or(half, carry)));
#  else
    // Conversion in software knows no NaN. The code reads as 480 / 256; the largest number is
    // 448 / 256.
    const V v = hn::PromoteTo(d, hn::BitCast(dh, half));
    return hn::IfThenElse(hn::Gt(hn::Abs(v), hn::Set(d, 448.0f / kGain)), hn::NaN(d), v);
#  endif
  }
};

template <>
struct Decoder<MatrixFormat::kFp8Block> : E4m3Decoder {
  static constexpr std::int64_t kScaleColumns = kScaleBlock;
  static constexpr std::int64_t kScaleRows = kScaleBlock;
  static float scale(const Matrix& w, std::int64_t row, std::int64_t column) {
    const std::int64_t i = row / kScaleBlock * w.scale_stride + column / kScaleBlock;
    return static_cast<const float*>(w.scales)[i] * kGain;
  }
};

template <>
struct Decoder<MatrixFormat::kFp8Channel> : E4m3Decoder {
  static constexpr std::int64_t kScaleColumns = kUnbounded;
  static constexpr std::int64_t kScaleRows = 1;
  static float scale(const Matrix& w, std::int64_t row, std::int64_t) {
    return static_cast<const float*>(w.scales)[row] * kGain;
  }
};

template <>
struct Decoder<MatrixFormat::kMxfp4> {
  static constexpr bool kScaled = true;
  static constexpr std::int64_t kScaleColumns = 32;
  static constexpr std::int64_t kScaleRows = 1;
  static constexpr std::int64_t bytes(std::int64_t columns) { return (columns + 1) / 2; }
  static HWY_INLINE V value(const std::uint8_t* row, std::int64_t column) {
    const D d;
    const V gain = hn::Set(d, 16384.0f);  // f16's bias 15 - E2M1's bias 1
    const hn::Rebind<hwy::float16_t, D> dh;
#  if HWY_TARGET == HWY_SCALAR
    const hn::Rebind<std::uint16_t, D> du;
    const unsigned nibble = row[column / 2] >> (column % 2 * 4);
    const auto half =
        hn::Set(du, static_cast<std::uint16_t>((nibble & 8u) << 12 | (nibble & 7u) << 9));
#  else
    const hn::Repartition<std::uint32_t, decltype(dh)> du;  // kLanes / 2 lanes
    const hn::Rebind<std::uint8_t, decltype(du)> db;
    const auto byte = hn::PromoteTo(du, hn::LoadU(db, row + column / 2));
    // Low nibble to bits 0..3, high nibble to bits 16..19: one 32-bit lane becomes two f16.
    const auto pair = hn::Or(byte, hn::ShiftLeft<12>(byte));
    const auto half = hn::Or(hn::ShiftLeft<12>(hn::And(pair, hn::Set(du, 0x00080008u))),
                             hn::ShiftLeft<9>(hn::And(pair, hn::Set(du, 0x00070007u))));
#  endif
    return hn::Mul(hn::PromoteTo(d, hn::BitCast(dh, half)), gain);
  }
  // 2^(code - 127) with its ends: code 0 is an f32 subnormal, 0xFF is NaN.
  static float scale(const Matrix& w, std::int64_t row, std::int64_t column) {
    const std::uint32_t code =
        static_cast<const std::uint8_t*>(w.scales)[row * w.scale_stride + column / 32];
    const std::uint32_t bits = code == 0 ? 0x00400000u : code == 255 ? 0x7FC00000u : code << 23;
    return std::bit_cast<float>(bits);
  }
};

// kLanes weights from stored column `column` on, scaled: one f32 rounding.
template <class Dec>
HWY_INLINE V weights_at(const std::uint8_t* row, std::int64_t column, V scale) {
  const V v = Dec::value(row, column);
  return Dec::kScaled ? hn::Mul(v, scale) : v;
}

// The last `count` < kLanes weights of a row, zeros behind; reads no byte past them.
template <class Dec>
HWY_INLINE V weights_tail(const std::uint8_t* row, std::int64_t column, std::int64_t count,
                          V scale) {
  const D d;
  alignas(64) std::uint8_t buffer[4 * HWY_MAX_BYTES] = {};
  std::memcpy(buffer, row + Dec::bytes(column), static_cast<std::size_t>(Dec::bytes(count)));
  // A NaN scale must not reach the zeros behind the row.
  return hn::IfThenElseZero(hn::FirstN(d, static_cast<std::size_t>(count)),
                            weights_at<Dec>(buffer, 0, scale));
}

// Calls use(k, length, scale) for the runs of window row `row` that share a scale.
template <class Dec, class Use>
HWY_INLINE void for_scale_runs(const Matrix& w, std::int64_t row, const Use& use) {
  for (std::int64_t k = 0; k < w.cols;) {
    const std::int64_t column = w.col0 + k;
    const std::int64_t run = std::min(w.cols - k, Dec::kScaleColumns - column % Dec::kScaleColumns);
    use(k, run, Dec::scale(w, w.row0 + row, column));
    k += run;
  }
}

HWY_INLINE const std::uint8_t* row_data(const Matrix& w, std::int64_t row) {
  return reinterpret_cast<const std::uint8_t*>(w.data) + (w.row0 + row) * w.row_bytes;
}

// Calls use with the Decoder of the matrix's format.
template <class Use>
HWY_INLINE void with_decoder(MatrixFormat format, const Use& use) {
  switch (format) {
    case MatrixFormat::kF32:
      return use(Decoder<MatrixFormat::kF32>());
    case MatrixFormat::kBf16:
      return use(Decoder<MatrixFormat::kBf16>());
    case MatrixFormat::kFp8Block:
      return use(Decoder<MatrixFormat::kFp8Block>());
    case MatrixFormat::kFp8Channel:
      return use(Decoder<MatrixFormat::kFp8Channel>());
    case MatrixFormat::kMxfp4:
      return use(Decoder<MatrixFormat::kMxfp4>());
  }
}

}  // namespace penstock::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
