#include "penstock/numerics/quantise.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/core/error.h"

namespace penstock {
namespace {

void require_size(const char* function, const char* span, std::size_t actual, std::int64_t rows,
                  std::int64_t columns) {
  require(static_cast<std::int64_t>(actual) == rows * columns, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("{}: {} holds {} elements, [{}, {}] needs {}", function, span, actual, rows,
                       columns, rows * columns);
  });
}

// 2^62, so that products with 33 / 32 (wire rows) and sums with a block size stay in range.
constexpr std::int64_t kMaxElements = std::int64_t{1} << 62;

void require_shape(const char* function, std::int64_t rows, std::int64_t columns) {
  require(rows >= 0 && columns >= 0 && rows <= kMaxElements && columns <= kMaxElements &&
              (columns == 0 || rows <= kMaxElements / columns),
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format(
                "{}: the shape [{}, {}] is negative or has more than 2^62 elements; pass the "
                "matrix's own sizes",
                function, rows, columns);
          });
}

void require_mx_columns(const char* function, std::int64_t columns) {
  require(columns % kMxBlockSize == 0, ErrorKind::kInvalidArgument, [&] {
    return fmt::format(
        "{}: {} columns are not a multiple of the MX block of {}; pad the rows to {} columns with "
        "zeros",
        function, columns, kMxBlockSize, (columns / kMxBlockSize + 1) * kMxBlockSize);
  });
}

// How f32 scales cover a matrix: one for each tile of [tile_rows, tile_columns].
struct ScaleGrid {
  std::int64_t tile_rows;
  std::int64_t tile_columns;
  std::int64_t rows;     // of the grid
  std::int64_t columns;  // of the grid
};

ScaleGrid block_grid(std::int64_t rows, std::int64_t columns) {
  return {kFp8BlockSize, kFp8BlockSize, fp8_blocks(rows), fp8_blocks(columns)};
}
ScaleGrid channel_grid(std::int64_t rows, std::int64_t columns) {
  return {1, columns, rows, 1};  // a row of no columns has its scale too
}
ScaleGrid token_grid(std::int64_t rows, std::int64_t columns) {
  return {1, kFp8BlockSize, rows, fp8_blocks(columns)};
}

// `scale_of` maps amax_bits to the tile's scale.
template <typename ScaleOf>
std::int64_t quantise_tiles(const char* function, std::span<const float> x, std::int64_t rows,
                            std::int64_t columns,
                            ScaleGrid (*make_grid)(std::int64_t, std::int64_t), std::span<E4M3> q,
                            std::span<float> scales, ScaleOf scale_of) {
  require_shape(function, rows, columns);
  const ScaleGrid grid = make_grid(rows, columns);
  require_size(function, "the input", x.size(), rows, columns);
  require_size(function, "q", q.size(), rows, columns);
  require_size(function, "scales", scales.size(), grid.rows, grid.columns);
  std::int64_t nonfinite = 0;
  for (std::int64_t i = 0; i < grid.rows; ++i) {
    const std::int64_t row_end = std::min(rows, (i + 1) * grid.tile_rows);
    for (std::int64_t j = 0; j < grid.columns; ++j) {
      const std::int64_t begin = j * grid.tile_columns;
      const std::int64_t width = std::min(columns, begin + grid.tile_columns) - begin;
      std::uint32_t amax = 0;
      for (std::int64_t r = i * grid.tile_rows; r < row_end; ++r) {
        amax = max_bits(amax, amax_bits(x.data() + r * columns + begin, width));
      }
      nonfinite += is_finite_bits(amax) ? 0 : 1;
      const float scale = scale_of(amax);
      scales[static_cast<std::size_t>(i * grid.columns + j)] = scale;
      for (std::int64_t r = i * grid.tile_rows; r < row_end; ++r) {
        const float* in = x.data() + r * columns + begin;
        E4M3* out = q.data() + r * columns + begin;
        for (std::int64_t c = 0; c < width; ++c) out[c] = quantise_fp8(in[c], scale);
      }
    }
  }
  return nonfinite;
}

void dequantise_tiles(const char* function, std::span<const E4M3> q, std::span<const float> scales,
                      std::int64_t rows, std::int64_t columns,
                      ScaleGrid (*make_grid)(std::int64_t, std::int64_t), std::span<float> out) {
  require_shape(function, rows, columns);
  const ScaleGrid grid = make_grid(rows, columns);
  require_size(function, "q", q.size(), rows, columns);
  require_size(function, "scales", scales.size(), grid.rows, grid.columns);
  require_size(function, "the output", out.size(), rows, columns);
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* row_scales = scales.data() + (r / grid.tile_rows) * grid.columns;
    for (std::int64_t j = 0; j < grid.columns; ++j) {
      const std::int64_t end = std::min(columns, (j + 1) * grid.tile_columns);
      for (std::int64_t c = j * grid.tile_columns; c < end; ++c) {
        const auto at = static_cast<std::size_t>(r * columns + c);
        out[at] = dequantise_fp8(q[at], row_scales[j]);
      }
    }
  }
}

}  // namespace

void to_bf16(std::span<const float> x, std::span<Bf16> out) {
  require_size("to_bf16", "the output", out.size(), 1, static_cast<std::int64_t>(x.size()));
  std::transform(x.begin(), x.end(), out.begin(), [](float v) { return Bf16::from_float(v); });
}

void to_float(std::span<const Bf16> x, std::span<float> out) {
  require_size("to_float", "the output", out.size(), 1, static_cast<std::int64_t>(x.size()));
  std::transform(x.begin(), x.end(), out.begin(), [](Bf16 v) { return v.to_float(); });
}

std::int64_t quantise_fp8_block(std::span<const float> w, std::int64_t rows, std::int64_t columns,
                                std::span<E4M3> q, std::span<float> scales) {
  return quantise_tiles("quantise_fp8_block", w, rows, columns, block_grid, q, scales,
                        fp8_weight_scale);
}

void dequantise_fp8_block(std::span<const E4M3> q, std::span<const float> scales, std::int64_t rows,
                          std::int64_t columns, std::span<float> out) {
  dequantise_tiles("dequantise_fp8_block", q, scales, rows, columns, block_grid, out);
}

std::int64_t quantise_fp8_channel(std::span<const float> w, std::int64_t rows, std::int64_t columns,
                                  std::span<E4M3> q, std::span<float> scales) {
  return quantise_tiles("quantise_fp8_channel", w, rows, columns, channel_grid, q, scales,
                        fp8_weight_scale);
}

void dequantise_fp8_channel(std::span<const E4M3> q, std::span<const float> scales,
                            std::int64_t rows, std::int64_t columns, std::span<float> out) {
  dequantise_tiles("dequantise_fp8_channel", q, scales, rows, columns, channel_grid, out);
}

std::int64_t quantise_fp8_activation(std::span<const float> x, std::int64_t rows,
                                     std::int64_t columns, std::span<E4M3> q,
                                     std::span<float> scales) {
  return quantise_tiles("quantise_fp8_activation", x, rows, columns, token_grid, q, scales,
                        fp8_activation_scale);
}

void dequantise_fp8_activation(std::span<const E4M3> q, std::span<const float> scales,
                               std::int64_t rows, std::int64_t columns, std::span<float> out) {
  dequantise_tiles("dequantise_fp8_activation", q, scales, rows, columns, token_grid, out);
}

std::int64_t quantise_fp8_index(std::span<const float> x, std::int64_t rows, std::span<E4M3> q,
                                std::span<float> scales) {
  // x / 2^n equals x * 2^-n, so the shared loop's division is the rule's multiplication.
  return quantise_tiles("quantise_fp8_index", x, rows, kFp8BlockSize, token_grid, q, scales,
                        [](std::uint32_t amax) { return ue8m0_index_scale(amax).to_float(); });
}

std::int64_t quantise_mxfp4(std::span<const float> w, std::int64_t rows, std::int64_t columns,
                            MxScaleRule rule, std::span<std::uint8_t> pairs,
                            std::span<E8M0> scales) {
  constexpr const char* kName = "quantise_mxfp4";
  require_shape(kName, rows, columns);
  require_mx_columns(kName, columns);
  require_size(kName, "the input", w.size(), rows, columns);
  require_size(kName, "pairs", pairs.size(), rows, columns / 2);
  require_size(kName, "scales", scales.size(), rows, columns / kMxBlockSize);
  std::int64_t nonfinite = 0;
  for (std::size_t b = 0; b < scales.size(); ++b) {  // blocks never cross rows: one run of blocks
    scales[b] = quantise_mxfp4_block(w.data() + b * kMxBlockSize, rule,
                                     pairs.data() + b * (kMxBlockSize / 2));
    nonfinite += scales[b].is_nan() ? 1 : 0;
  }
  return nonfinite;
}

void dequantise_mxfp4(std::span<const std::uint8_t> pairs, std::span<const E8M0> scales,
                      std::int64_t rows, std::int64_t columns, std::span<float> out) {
  constexpr const char* kName = "dequantise_mxfp4";
  require_shape(kName, rows, columns);
  require_mx_columns(kName, columns);
  require_size(kName, "pairs", pairs.size(), rows, columns / 2);
  require_size(kName, "scales", scales.size(), rows, columns / kMxBlockSize);
  require_size(kName, "the output", out.size(), rows, columns);
  for (std::size_t b = 0; b < scales.size(); ++b) {
    dequantise_mxfp4_block(pairs.data() + b * (kMxBlockSize / 2), scales[b],
                           out.data() + b * kMxBlockSize);
  }
}

std::int64_t quantise_mxfp8(std::span<const float> x, std::int64_t rows, std::int64_t columns,
                            MxScaleRule rule, std::span<E4M3> q, std::span<E8M0> scales) {
  constexpr const char* kName = "quantise_mxfp8";
  require_shape(kName, rows, columns);
  require_mx_columns(kName, columns);
  require_size(kName, "the input", x.size(), rows, columns);
  require_size(kName, "q", q.size(), rows, columns);
  require_size(kName, "scales", scales.size(), rows, columns / kMxBlockSize);
  std::int64_t nonfinite = 0;
  for (std::size_t b = 0; b < scales.size(); ++b) {
    scales[b] =
        quantise_mxfp8_block(x.data() + b * kMxBlockSize, rule, q.data() + b * kMxBlockSize);
    nonfinite += scales[b].is_nan() ? 1 : 0;
  }
  return nonfinite;
}

void dequantise_mxfp8(std::span<const E4M3> q, std::span<const E8M0> scales, std::int64_t rows,
                      std::int64_t columns, std::span<float> out) {
  constexpr const char* kName = "dequantise_mxfp8";
  require_shape(kName, rows, columns);
  require_mx_columns(kName, columns);
  require_size(kName, "q", q.size(), rows, columns);
  require_size(kName, "scales", scales.size(), rows, columns / kMxBlockSize);
  require_size(kName, "the output", out.size(), rows, columns);
  for (std::size_t b = 0; b < scales.size(); ++b) {
    dequantise_mxfp8_block(q.data() + b * kMxBlockSize, scales[b], out.data() + b * kMxBlockSize);
  }
}

std::int64_t quantise_wire_rows(std::span<const float> x, std::int64_t rows, std::int64_t hidden,
                                std::span<std::uint8_t> out) {
  constexpr const char* kName = "quantise_wire_rows";
  require_shape(kName, rows, hidden);
  require_mx_columns(kName, hidden);
  require_size(kName, "the input", x.size(), rows, hidden);
  require_size(kName, "the output", out.size(), rows, wire_row_bytes(hidden));
  std::int64_t nonfinite = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    std::uint8_t* row = out.data() + r * wire_row_bytes(hidden);
    write_wire_row(x.data() + r * hidden, hidden, row);
    nonfinite += std::count(row + hidden, row + wire_row_bytes(hidden), E8M0::kNanBits);
  }
  return nonfinite;
}

void dequantise_wire_rows(std::span<const std::uint8_t> wire, std::int64_t rows,
                          std::int64_t hidden, std::span<float> out) {
  constexpr const char* kName = "dequantise_wire_rows";
  require_shape(kName, rows, hidden);
  require_mx_columns(kName, hidden);
  require_size(kName, "the wire rows", wire.size(), rows, wire_row_bytes(hidden));
  require_size(kName, "the output", out.size(), rows, hidden);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::uint8_t* row = wire.data() + r * wire_row_bytes(hidden);
    for (std::int64_t c = 0; c < hidden; ++c) {
      out[static_cast<std::size_t>(r * hidden + c)] = read_wire_element(row, hidden, c);
    }
  }
}

}  // namespace penstock
