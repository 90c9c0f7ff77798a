#include "ops/cpu/attention.h"

#define HWY_DISABLED_TARGETS HWY_SSSE3
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/attention.cpp"
#include <limits>

#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "ops/cpu/dot-inl.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace penstock::cpu::HWY_NAMESPACE {

// Vectors of latent columns (or of page tokens) held beside the heads of a tile: 16 accumulators
// with 32 registers, 8 with 16.
inline constexpr std::int64_t kWidth = kLanes >= 16 ? 4 : 2;

// In place: logits -> exp(scale * (logit - max)), zeros up to a whole vector. Returns 1 / sum.
HWY_INLINE float softmax(float* logits, std::int64_t count, float scale) {
  const D d;
  const V scales = hn::Set(d, scale);
  const V lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  V most = lowest;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const auto valid = hn::FirstN(d, static_cast<std::size_t>(std::min(kLanes, count - i)));
    most = hn::Max(most, hn::IfThenElse(valid, hn::Load(d, logits + i), lowest));
  }
  const V max = hn::MaxOfLanes(d, most);
  V sum = hn::Zero(d);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const auto valid = hn::FirstN(d, static_cast<std::size_t>(std::min(kLanes, count - i)));
    const V x = hn::Mul(hn::Sub(hn::Load(d, logits + i), max), scales);
    const V p = hn::IfThenElseZero(valid, hn::Exp(d, x));
    hn::Store(p, d, logits + i);
    sum = hn::Add(sum, p);
  }
  return 1.0f / sum_lanes(sum);
}

template <int heads>
HWY_INLINE void attend_heads(const float* q, std::int64_t ldq, const float* const* rows,
                             std::int64_t picks, std::int64_t dim, std::int64_t latent, float scale,
                             float* logits, std::int64_t ldl, float* out, std::int64_t ldo) {
  constexpr int kRows = static_cast<int>(kLanes) / heads;
  const D d;
  const float* a[heads];
  for (int h = 0; h < heads; ++h) a[h] = q + h * ldq;
  for (std::int64_t t = 0; t < picks; t += kRows) {
    const float* b[kRows];
    for (int j = 0; j < kRows; ++j) b[j] = rows[std::min(t + j, picks - 1)];
    alignas(64) float sums[kLanes];
    hn::Store(dot_tile<heads>(a, b, dim), d, sums);
    for (int h = 0; h < heads; ++h) std::copy_n(sums + h * kRows, kRows, logits + h * ldl + t);
  }
  float inverse[heads];
  for (int h = 0; h < heads; ++h) inverse[h] = softmax(logits + h * ldl, picks, scale);
  for (std::int64_t c = 0; c < latent; c += kWidth * kLanes) {
    V acc[heads][kWidth];
    for (auto& row : acc) {
      for (V& v : row) v = hn::Zero(d);
    }
    for (std::int64_t t = 0; t < picks; ++t) {
      V value[kWidth];
      for (std::int64_t v = 0; v < kWidth; ++v) value[v] = hn::LoadU(d, rows[t] + c + v * kLanes);
      for (int h = 0; h < heads; ++h) {
        const V p = hn::Set(d, logits[h * ldl + t]);
        for (std::int64_t v = 0; v < kWidth; ++v) acc[h][v] = hn::MulAdd(value[v], p, acc[h][v]);
      }
    }
    for (int h = 0; h < heads; ++h) {
      const V by = hn::Set(d, inverse[h]);
      for (std::int64_t v = 0; v < kWidth; ++v) {
        hn::StoreU(hn::Mul(acc[h][v], by), d, out + h * ldo + c + v * kLanes);
      }
    }
  }
}

void attend_kernel(const float* q, std::int64_t ldq, std::int64_t heads, const float* const* rows,
                   std::int64_t picks, std::int64_t dim, std::int64_t latent, float scale,
                   float* logits, float* out, std::int64_t ldo) {
  const std::int64_t ldl = attend_scratch(picks) / 4;
  std::int64_t h = 0;
  for (; h + kTileX <= heads; h += kTileX) {
    attend_heads<kTileX>(q + h * ldq, ldq, rows, picks, dim, latent, scale, logits, ldl,
                         out + h * ldo, ldo);
  }
  for (; h < heads; ++h) {
    attend_heads<1>(q + h * ldq, ldq, rows, picks, dim, latent, scale, logits, ldl, out + h * ldo,
                    ldo);
  }
}

// Adds the relu'd, weighted products of `heads` heads to totals [kWidth].
template <int heads>
HWY_INLINE void index_heads(const float* q, const float* weights, std::int64_t dim,
                            const float* page, V* total) {
  const D d;
  V acc[heads][kWidth];
  for (auto& row : acc) {
    for (V& v : row) v = hn::Zero(d);
  }
  for (std::int64_t i = 0; i < dim; ++i) {
    V key[kWidth];
    for (std::int64_t v = 0; v < kWidth; ++v) {
      key[v] = hn::LoadU(d, page + i * kIndexPageTokens + v * kLanes);
    }
    for (int h = 0; h < heads; ++h) {
      const V qv = hn::Set(d, q[h * dim + i]);
      for (std::int64_t v = 0; v < kWidth; ++v) acc[h][v] = hn::MulAdd(key[v], qv, acc[h][v]);
    }
  }
  for (int h = 0; h < heads; ++h) {
    const V w = hn::Set(d, weights[h]);
    for (std::int64_t v = 0; v < kWidth; ++v) {
      total[v] = hn::MulAdd(w, hn::Max(acc[h][v], hn::Zero(d)), total[v]);
    }
  }
}

void index_scores_kernel(const float* q, const float* weights, std::int64_t heads, std::int64_t dim,
                         const float* page, float* scores) {
  const D d;
  static_assert(kIndexPageTokens % (kWidth * kLanes) == 0);
  for (std::int64_t c = 0; c < kIndexPageTokens; c += kWidth * kLanes) {
    V total[kWidth];
    for (V& v : total) v = hn::Zero(d);
    std::int64_t h = 0;
    for (; h + kTileX <= heads; h += kTileX) {
      index_heads<kTileX>(q + h * dim, weights + h, dim, page + c, total);
    }
    for (; h < heads; ++h) index_heads<1>(q + h * dim, weights + h, dim, page + c, total);
    for (std::int64_t v = 0; v < kWidth; ++v) hn::StoreU(total[v], d, scores + c + v * kLanes);
  }
}

}  // namespace penstock::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace penstock::cpu {

HWY_EXPORT(attend_kernel);
HWY_EXPORT(index_scores_kernel);

std::int64_t attend_scratch(std::int64_t picks) { return 4 * ((picks + 31) / 16 * 16); }

void attend(const float* q, std::int64_t ldq, std::int64_t heads, const float* const* rows,
            std::int64_t picks, std::int64_t dim, std::int64_t latent, float scale, float* logits,
            float* out, std::int64_t ldo) {
  HWY_DYNAMIC_DISPATCH(attend_kernel)
  (q, ldq, heads, rows, picks, dim, latent, scale, logits, out, ldo);
}

void index_scores(const float* q, const float* weights, std::int64_t heads, std::int64_t dim,
                  const float* page, float* scores) {
  HWY_DYNAMIC_DISPATCH(index_scores_kernel)(q, weights, heads, dim, page, scores);
}

}  // namespace penstock::cpu
#endif
