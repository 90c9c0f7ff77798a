#include "ops/cpu/linear.h"

// SSSE3 without SSE4.1 is a processor generation that nobody runs models on.
#define HWY_DISABLED_TARGETS HWY_SSSE3
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/linear.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
#include "ops/cpu/dot-inl.h"
#include "ops/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace penstock::cpu::HWY_NAMESPACE {

// Rows of W decoded together for a tile of x rows.
inline constexpr std::int64_t kTileRows = 16;
// Up to this many rows of x, decoding in registers again for each costs less than scratch.
inline constexpr std::int64_t kDirectRows = 2;
inline constexpr std::int64_t kDirectOutputs = kOneLane ? 1 : 4;
// Vectors of columns of the transposed product: kTileX x kPanel accumulators.
inline constexpr std::int64_t kPanel = kLanes >= 16 ? 4 : 2;
static_assert(64 % (kPanel * kLanes) == 0);

HWY_INLINE std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

template <class Dec>
void decode_into(const Matrix& w, std::int64_t row, float* out) {
  const D d;
  const std::uint8_t* data = row_data(w, row);
  for_scale_runs<Dec>(w, row, [&](std::int64_t k, std::int64_t run, float s) {
    const V scale = hn::Set(d, s);
    std::int64_t i = 0;
    for (; i + kLanes <= run; i += kLanes) {
      hn::StoreU(weights_at<Dec>(data, w.col0 + k + i, scale), d, out + k + i);
    }
    if (i < run) {
      hn::StoreU(weights_tail<Dec>(data, w.col0 + k + i, run - i, scale), d, out + k + i);
    }
  });
}

// One row of x against kDirectOutputs rows of W at a time, no scratch.
template <class Dec>
void linear_direct(const Matrix& w, std::int64_t begin, std::int64_t end, const float* x,
                   float* y) {
  const D d;
  for (std::int64_t n = begin; n < end; n += kDirectOutputs) {
    const std::uint8_t* rows[kDirectOutputs];
    std::int64_t index[kDirectOutputs];
    V acc[kDirectOutputs];
    for (std::int64_t j = 0; j < kDirectOutputs; ++j) {
      index[j] = std::min(n + j, end - 1);
      rows[j] = row_data(w, index[j]);
      acc[j] = hn::Zero(d);
    }
    for (std::int64_t k = 0; k < w.cols;) {
      const std::int64_t column = w.col0 + k;
      const std::int64_t run =
          std::min(w.cols - k, Dec::kScaleColumns - column % Dec::kScaleColumns);
      V scale[kDirectOutputs];
      for (std::int64_t j = 0; j < kDirectOutputs; ++j) {
        scale[j] = hn::Set(d, Dec::scale(w, w.row0 + index[j], column));
      }
      std::int64_t i = 0;
      for (; i + kLanes <= run; i += kLanes) {
        const V xv = hn::LoadU(d, x + k + i);
        for (std::int64_t j = 0; j < kDirectOutputs; ++j) {
          acc[j] = hn::MulAdd(weights_at<Dec>(rows[j], column + i, scale[j]), xv, acc[j]);
        }
      }
      if (i < run) {
        const V xv = load_first(x + k + i, run - i);
        for (std::int64_t j = 0; j < kDirectOutputs; ++j) {
          acc[j] =
              hn::MulAdd(weights_tail<Dec>(rows[j], column + i, run - i, scale[j]), xv, acc[j]);
        }
      }
      k += run;
    }
    alignas(64) float sums[kLanes];
    hn::Store(fold_all<static_cast<int>(kDirectOutputs)>(acc), d, sums);
    std::copy_n(sums, std::min(kDirectOutputs, end - n), y + n);
  }
}

// kTileX rows of x against `count` <= kTileRows decoded rows.
template <int tile_x>
HWY_INLINE void tile_outputs(const float* x, std::int64_t ldx, const float* tile, std::int64_t ldt,
                             std::int64_t count, std::int64_t cols, float* y, std::int64_t ldy) {
  constexpr int kOutputs = static_cast<int>(kLanes) / tile_x;
  const D d;
  const float* a[tile_x];
  for (int i = 0; i < tile_x; ++i) a[i] = x + i * ldx;
  for (std::int64_t n = 0; n < count; n += kOutputs) {
    const float* b[kOutputs];
    for (int j = 0; j < kOutputs; ++j) b[j] = tile + std::min(n + j, count - 1) * ldt;
    alignas(64) float sums[kLanes];
    hn::Store(dot_tile<tile_x>(a, b, cols), d, sums);
    const std::int64_t valid = std::min<std::int64_t>(kOutputs, count - n);
    for (int i = 0; i < tile_x; ++i) std::copy_n(sums + i * kOutputs, valid, y + i * ldy + n);
  }
}

template <class Dec>
void linear_tiled(const Matrix& w, std::int64_t begin, std::int64_t end, const float* x,
                  std::int64_t ldx, std::int64_t rows, float* y, std::int64_t ldy, float* scratch) {
  const std::int64_t ldt = round_up(w.cols, kPadding);
  for (std::int64_t n = begin; n < end; n += kTileRows) {
    const std::int64_t count = std::min(kTileRows, end - n);
    for (std::int64_t j = 0; j < count; ++j) decode_into<Dec>(w, n + j, scratch + j * ldt);
    std::int64_t m = 0;
    for (; m + kTileX <= rows; m += kTileX) {
      tile_outputs<kTileX>(x + m * ldx, ldx, scratch, ldt, count, w.cols, y + m * ldy + n, ldy);
    }
    for (; m < rows; ++m) {
      tile_outputs<1>(x + m * ldx, ldx, scratch, ldt, count, w.cols, y + m * ldy + n, ldy);
    }
  }
}

void linear_kernel(const Matrix& w, std::int64_t begin, std::int64_t end, const float* x,
                   std::int64_t ldx, std::int64_t rows, float* y, std::int64_t ldy,
                   float* scratch) {
  with_decoder(w.format, [&](auto decoder) {
    using Dec = decltype(decoder);
    if (rows <= kDirectRows) {
      for (std::int64_t m = 0; m < rows; ++m) {
        linear_direct<Dec>(w, begin, end, x + m * ldx, y + m * ldy);
      }
    } else {
      linear_tiled<Dec>(w, begin, end, x, ldx, rows, y, ldy, scratch);
    }
  });
}

// y[0, c .. c + panel vectors) for one row of x, weights decoded in registers. Sums run over r in
// order.
template <class Dec, std::int64_t panel>
HWY_INLINE void transposed_direct(const Matrix& w, std::int64_t c, const float* x, float* y) {
  const D d;
  V acc[panel];
  for (V& a : acc) a = hn::Zero(d);
  for (std::int64_t r = 0; r < w.rows;) {
    // Rows that share their scales.
    const std::int64_t row = w.row0 + r;
    const std::int64_t end = r + std::min(w.rows - r, Dec::kScaleRows - row % Dec::kScaleRows);
    float scales[panel];
    for (std::int64_t v = 0; v < panel; ++v) {
      scales[v] = Dec::scale(w, row, w.col0 + c + v * kLanes);
    }
    for (; r < end; ++r) {
      const std::uint8_t* data = row_data(w, r);
      const V xv = hn::Set(d, x[r]);
      for (std::int64_t v = 0; v < panel; ++v) {
        const V weights = weights_at<Dec>(data, w.col0 + c + v * kLanes, hn::Set(d, scales[v]));
        acc[v] = hn::MulAdd(weights, xv, acc[v]);
      }
    }
  }
  for (std::int64_t v = 0; v < panel; ++v) hn::StoreU(acc[v], d, y + c + v * kLanes);
}

// One row of x over all columns. Wide panels first: 256 bytes of a row in sequence, where 64 would
// leave the prefetcher with strides.
template <class Dec>
void transposed_row(const Matrix& w, std::int64_t begin, std::int64_t end, const float* x,
                    float* y) {
  constexpr std::int64_t kWide = kLanes >= 16 ? 16 : kPanel;
  std::int64_t c = begin;
  for (; c + kWide * kLanes <= end; c += kWide * kLanes) transposed_direct<Dec, kWide>(w, c, x, y);
  for (; c < end; c += kPanel * kLanes) transposed_direct<Dec, kPanel>(w, c, x, y);
}

// `tile_x` rows of x against a decoded panel [rows of W, kPanel vectors].
template <int tile_x>
HWY_INLINE void transposed_tile(const float* panel, std::int64_t depth, const float* x,
                                std::int64_t ldx, float* y, std::int64_t ldy) {
  const D d;
  V acc[tile_x][kPanel];
  for (auto& row : acc) {
    for (V& a : row) a = hn::Zero(d);
  }
  for (std::int64_t r = 0; r < depth; ++r) {
    V w[kPanel];
    for (std::int64_t v = 0; v < kPanel; ++v) {
      w[v] = hn::Load(d, panel + (r * kPanel + v) * kLanes);
    }
    for (int i = 0; i < tile_x; ++i) {
      const V xv = hn::Set(d, x[i * ldx + r]);
      for (std::int64_t v = 0; v < kPanel; ++v) acc[i][v] = hn::MulAdd(w[v], xv, acc[i][v]);
    }
  }
  for (int i = 0; i < tile_x; ++i) {
    for (std::int64_t v = 0; v < kPanel; ++v) hn::StoreU(acc[i][v], d, y + i * ldy + v * kLanes);
  }
}

void linear_transposed_kernel(const Matrix& w, std::int64_t begin, std::int64_t end, const float* x,
                              std::int64_t ldx, std::int64_t rows, float* y, std::int64_t ldy,
                              float* scratch) {
  const D d;
  constexpr std::int64_t kStep = kPanel * kLanes;
  with_decoder(w.format, [&](auto decoder) {
    using Dec = decltype(decoder);
    if (rows <= kDirectRows) {
      for (std::int64_t m = 0; m < rows; ++m) {
        transposed_row<Dec>(w, begin, end, x + m * ldx, y + m * ldy);
      }
      return;
    }
    for (std::int64_t c = begin; c < end; c += kStep) {
      for (std::int64_t r = 0; r < w.rows; ++r) {
        const std::uint8_t* data = row_data(w, r);
        for (std::int64_t v = 0; v < kPanel; ++v) {
          const std::int64_t column = w.col0 + c + v * kLanes;
          const V scale = hn::Set(d, Dec::scale(w, w.row0 + r, column));
          hn::Store(weights_at<Dec>(data, column, scale), d, scratch + (r * kPanel + v) * kLanes);
        }
      }
      std::int64_t m = 0;
      for (; m + kTileX <= rows; m += kTileX) {
        transposed_tile<kTileX>(scratch, w.rows, x + m * ldx, ldx, y + m * ldy + c, ldy);
      }
      for (; m < rows; ++m) {
        transposed_tile<1>(scratch, w.rows, x + m * ldx, ldx, y + m * ldy + c, ldy);
      }
    }
  });
}

void decode_row_kernel(const Matrix& w, std::int64_t row, float* out) {
  with_decoder(w.format, [&](auto decoder) {
    using Dec = decltype(decoder);
    const D d;
    const std::uint8_t* data = row_data(w, row);
    for_scale_runs<Dec>(w, row, [&](std::int64_t k, std::int64_t run, float s) {
      alignas(64) float values[kLanes];
      for (std::int64_t i = 0; i < run; i += kLanes) {
        const std::int64_t count = std::min(kLanes, run - i);
        const V scale = hn::Set(d, s);
        hn::Store(count == kLanes ? weights_at<Dec>(data, w.col0 + k + i, scale)
                                  : weights_tail<Dec>(data, w.col0 + k + i, count, scale),
                  d, values);
        std::copy_n(values, count, out + k + i);
      }
    });
  });
}

const char* simd_name_kernel() { return hwy::TargetName(HWY_TARGET); }

}  // namespace penstock::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace penstock::cpu {

HWY_EXPORT(linear_kernel);
HWY_EXPORT(linear_transposed_kernel);
HWY_EXPORT(decode_row_kernel);
HWY_EXPORT(simd_name_kernel);

std::int64_t linear_scratch(std::int64_t rows, std::int64_t cols) {
  // 16 decoded rows, or a panel of 64 columns.
  return std::max((cols + kPadding) * 16, rows * 64);
}

void linear(const Matrix& w, std::int64_t begin, std::int64_t end, const float* x, std::int64_t ldx,
            std::int64_t rows, float* y, std::int64_t ldy, float* scratch) {
  HWY_DYNAMIC_DISPATCH(linear_kernel)(w, begin, end, x, ldx, rows, y, ldy, scratch);
}

void linear_transposed(const Matrix& w, std::int64_t begin, std::int64_t end, const float* x,
                       std::int64_t ldx, std::int64_t rows, float* y, std::int64_t ldy,
                       float* scratch) {
  HWY_DYNAMIC_DISPATCH(linear_transposed_kernel)(w, begin, end, x, ldx, rows, y, ldy, scratch);
}

void decode_row(const Matrix& w, std::int64_t row, float* out) {
  HWY_DYNAMIC_DISPATCH(decode_row_kernel)(w, row, out);
}

const char* simd_name() { return HWY_DYNAMIC_DISPATCH(simd_name_kernel)(); }

}  // namespace penstock::cpu
#endif
