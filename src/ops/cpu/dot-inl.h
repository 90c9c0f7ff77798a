// A register tile of dot products.
#if defined(PENSTOCK_OPS_CPU_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#  ifdef PENSTOCK_OPS_CPU_DOT_INL_H_
#    undef PENSTOCK_OPS_CPU_DOT_INL_H_
#  else
#    define PENSTOCK_OPS_CPU_DOT_INL_H_
#  endif

#  include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace penstock::cpu::HWY_NAMESPACE {

// Rows of x in a full tile: with kLanes / kTileX rows of the other side, kLanes accumulators, whose
// sums are one vector. 4 x 4 with AVX-512: 8 loads for 16 multiply-adds.
inline constexpr int kTileX = kOneLane ? 1 : 4;

// Lane i * (kLanes / tile_x) + j = a[i] . b[j] over `count` elements.
template <int tile_x>
HWY_INLINE V dot_tile(const float* const* a, const float* const* b, std::int64_t count) {
  constexpr int kOther = static_cast<int>(kLanes) / tile_x;
  const D d;
  V acc[kLanes];
  for (V& v : acc) v = hn::Zero(d);
  std::int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    V av[tile_x];
    for (int i = 0; i < tile_x; ++i) av[i] = hn::LoadU(d, a[i] + k);
    for (int j = 0; j < kOther; ++j) {
      const V bv = hn::LoadU(d, b[j] + k);
      for (int i = 0; i < tile_x; ++i) {
        acc[i * kOther + j] = hn::MulAdd(bv, av[i], acc[i * kOther + j]);
      }
    }
  }
  if (k < count) {
    for (int j = 0; j < kOther; ++j) {
      const V bv = load_first(b[j] + k, count - k);
      for (int i = 0; i < tile_x; ++i) {
        acc[i * kOther + j] = hn::MulAdd(bv, load_first(a[i] + k, count - k), acc[i * kOther + j]);
      }
    }
  }
  return fold_all<static_cast<int>(kLanes)>(acc);
}

}  // namespace penstock::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
