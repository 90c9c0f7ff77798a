#include "ops/cpu/elementwise.h"

#define HWY_DISABLED_TARGETS HWY_SSSE3
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/elementwise.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include <cmath>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "ops/cpu/simd-inl.h"
#include "penstock/numerics/block.h"

HWY_BEFORE_NAMESPACE();
namespace penstock::cpu::HWY_NAMESPACE {

// Calls use(i, count) for runs of up to kLanes elements.
template <class Use>
HWY_INLINE void for_vectors(std::int64_t n, const Use& use) {
  for (std::int64_t i = 0; i < n; i += kLanes) use(i, std::min(kLanes, n - i));
}
HWY_INLINE void store_first(V v, std::int64_t count, float* to) {
  const D d;
  if (count == kLanes) {
    hn::StoreU(v, d, to);
  } else {
    alignas(64) float values[kLanes];
    hn::Store(v, d, values);
    std::copy_n(values, count, to);
  }
}

void rms_norm_kernel(const float* x, const float* gain, std::int64_t n, float eps, float* out) {
  const D d;
  V sum = hn::Zero(d);
  for_vectors(n, [&](std::int64_t i, std::int64_t count) {
    const V v = load_first(x + i, count);
    sum = hn::MulAdd(v, v, sum);
  });
  const V scale = hn::Set(d, 1.0f / std::sqrt(sum_lanes(sum) / static_cast<float>(n) + eps));
  for_vectors(n, [&](std::int64_t i, std::int64_t count) {
    store_first(hn::Mul(hn::Mul(load_first(x + i, count), scale), load_first(gain + i, count)),
                count, out + i);
  });
}

void layer_norm_kernel(const float* x, const float* gain, const float* bias, std::int64_t n,
                       float eps, float* out) {
  const D d;
  V sum = hn::Zero(d);
  for_vectors(
      n, [&](std::int64_t i, std::int64_t count) { sum = hn::Add(sum, load_first(x + i, count)); });
  const V mean = hn::Set(d, sum_lanes(sum) / static_cast<float>(n));
  V squares = hn::Zero(d);
  for_vectors(n, [&](std::int64_t i, std::int64_t count) {
    const V v = hn::IfThenElseZero(hn::FirstN(d, static_cast<std::size_t>(count)),
                                   hn::Sub(load_first(x + i, count), mean));
    squares = hn::MulAdd(v, v, squares);
  });
  const V scale = hn::Set(d, 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(n) + eps));
  for_vectors(n, [&](std::int64_t i, std::int64_t count) {
    const V v = hn::Mul(hn::Sub(load_first(x + i, count), mean), scale);
    store_first(hn::MulAdd(v, load_first(gain + i, count), load_first(bias + i, count)), count,
                out + i);
  });
}

void silu_mul_kernel(const float* gate, const float* up, std::int64_t n, float* out) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  for_vectors(n, [&](std::int64_t i, std::int64_t count) {
    const V g = load_first(gate + i, count);
    // exp of a negative number only: it cannot overflow.
    const V e = hn::Exp(d, hn::Neg(hn::Abs(g)));
    const V numerator = hn::IfThenElse(hn::Ge(g, hn::Zero(d)), g, hn::Mul(g, e));
    const V silu = hn::Div(numerator, hn::Add(one, e));
    store_first(hn::Mul(silu, load_first(up + i, count)), count, out + i);
  });
}

void add_to_kernel(float* x, const float* y, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, std::int64_t count) {
    store_first(hn::Add(load_first(x + i, count), load_first(y + i, count)), count, x + i);
  });
}

void add_scaled_to_kernel(float* x, float weight, const float* y, std::int64_t n) {
  const D d;
  const V w = hn::Set(d, weight);
  for_vectors(n, [&](std::int64_t i, std::int64_t count) {
    store_first(hn::MulAdd(w, load_first(y + i, count), load_first(x + i, count)), count, x + i);
  });
}

}  // namespace penstock::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace penstock::cpu {

HWY_EXPORT(rms_norm_kernel);
HWY_EXPORT(layer_norm_kernel);
HWY_EXPORT(silu_mul_kernel);
HWY_EXPORT(add_to_kernel);
HWY_EXPORT(add_scaled_to_kernel);

void rms_norm(const float* x, const float* gain, std::int64_t n, float eps, float* out) {
  HWY_DYNAMIC_DISPATCH(rms_norm_kernel)(x, gain, n, eps, out);
}
void layer_norm(const float* x, const float* gain, const float* bias, std::int64_t n, float eps,
                float* out) {
  HWY_DYNAMIC_DISPATCH(layer_norm_kernel)(x, gain, bias, n, eps, out);
}
void silu_mul(const float* gate, const float* up, std::int64_t n, float* out) {
  HWY_DYNAMIC_DISPATCH(silu_mul_kernel)(gate, up, n, out);
}
void add_to(float* x, const float* y, std::int64_t n) {
  HWY_DYNAMIC_DISPATCH(add_to_kernel)(x, y, n);
}
void add_scaled_to(float* x, float weight, const float* y, std::int64_t n) {
  HWY_DYNAMIC_DISPATCH(add_scaled_to_kernel)(x, weight, y, n);
}

void rotate_pairs(float* x, const float* cosines, const float* sines, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float a = x[2 * i];
    const float b = x[2 * i + 1];
    x[2 * i] = a * cosines[i] - b * sines[i];
    x[2 * i + 1] = a * sines[i] + b * cosines[i];
  }
}

void round_to_fp8(const float* x, std::int64_t n, float* out) {
  for (std::int64_t begin = 0; begin < n; begin += kFp8BlockSize) {
    const std::int64_t count = std::min<std::int64_t>(kFp8BlockSize, n - begin);
    const float scale = fp8_activation_scale(amax_bits(x + begin, count));
    for (std::int64_t i = begin; i < begin + count; ++i) {
      out[i] = dequantise_fp8(quantise_fp8(x[i], scale), scale);
    }
  }
}

}  // namespace penstock::cpu
#endif
