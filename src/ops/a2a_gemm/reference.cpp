#include "penstock/ops/a2a_gemm/reference.h"

#include <algorithm>
#include <span>
#include <vector>

#include "penstock/numerics/block.h"
#include "penstock/numerics/quantise.h"
#include "penstock/ops/a2a_gemm/plan.h"

namespace penstock::a2a_gemm {
namespace {

constexpr int kLanes = 8;
constexpr int kMostStep = kStepBytes;  // elements of one step, E4M3
constexpr int kRowsAtOnce = 64;        // rows that are decoded together: 32 KB of stack

int step_elements(const Shape& shape) { return kStepBytes / shape.element_bytes(); }

// Elements [begin, begin + count) of a row as f32, zeros up to `padded`.
void decode(const Shape& shape, const void* row, std::int64_t begin, int count, int padded,
            float* to) {
  if (shape.format == Format::kBf16) {
    const auto* from = static_cast<const Bf16*>(row) + begin;
    for (int i = 0; i < count; ++i) to[i] = from[i].to_float();
  } else {
    const auto* from = static_cast<const E4M3*>(row) + begin;
    for (int i = 0; i < count; ++i) to[i] = from[i].to_float();
  }
  std::fill(to + count, to + padded, 0.0f);
}

float dot(const float* a, const float* b, int count) {
  float lane[kLanes] = {};
  for (int i = 0; i < count; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) lane[l] += a[i + l] * b[i + l];
  }
  return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

const std::byte* row_of(const Shape& shape, const void* rows, std::int64_t row) {
  return static_cast<const std::byte*>(rows) + row * shape.row_bytes();
}

std::int64_t w_scale_at(const Shape& shape, std::int32_t source, std::int64_t column,
                        std::int64_t block) {
  return (static_cast<std::int64_t>(source) * shape.column_scale_blocks() + column / kScaleBlock) *
             shape.scale_blocks() +
         block;
}

double element(const Shape& shape, const void* row, std::int64_t k) {
  return static_cast<double>(shape.format == Format::kBf16
                                 ? static_cast<const Bf16*>(row)[k].to_float()
                                 : static_cast<const E4M3*>(row)[k].to_float());
}

}  // namespace

void add_chunk(const Shape& shape, const ChunkView& chunk, std::int32_t row, std::int32_t rows,
               const void* w, const float* w_scales, std::int32_t source, float* sums) {
  const int step = step_elements(shape);
  float a[kRowsAtOnce][kMostStep];
  float b[kMostStep];
  float scale[kRowsAtOnce];
  for (std::int32_t first = 0; first < rows; first += kRowsAtOnce) {
    const std::int32_t count = std::min(kRowsAtOnce, rows - first);
    for (std::int32_t s = 0; s < shape.steps(); ++s) {
      const std::int32_t begin = s * step;
      const int elements = std::min(step, shape.depth - begin);
      for (std::int32_t i = 0; i < count; ++i) {
        decode(shape, row_of(shape, chunk.data, row + first + i), begin, elements, step, a[i]);
        if (shape.format == Format::kFp8) {
          scale[i] = chunk.scales[s * chunk.scale_stride + row + first + i];
        }
      }
      for (std::int32_t column = 0; column < shape.columns; ++column) {
        decode(shape, row_of(shape, w, static_cast<std::int64_t>(source) * shape.columns + column),
               begin, elements, step, b);
        float* sum = sums + static_cast<std::int64_t>(first) * shape.columns + column;
        if (shape.format == Format::kBf16) {
          for (std::int32_t i = 0; i < count; ++i) {
            sum[static_cast<std::int64_t>(i) * shape.columns] += dot(a[i], b, step);
          }
        } else {
          const float weight = w_scales[w_scale_at(shape, source, column, s)];
          for (std::int32_t i = 0; i < count; ++i) {
            sum[static_cast<std::int64_t>(i) * shape.columns] +=
                dot(a[i], b, step) * (scale[i] * weight);
          }
        }
      }
    }
  }
}

void quantise_x(const Shape& shape, const Bf16* x, E4M3* q, float* scales, std::int64_t stride) {
  const std::int64_t rows = total_rows(shape);
  const auto depth = static_cast<std::size_t>(shape.depth);
  std::vector<float> row(depth);
  std::vector<float> row_scales(static_cast<std::size_t>(shape.scale_blocks()));
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t at = r * shape.depth;
    to_float(std::span(x + at, depth), row);
    (void)quantise_fp8_activation(row, 1, shape.depth, std::span(q + at, depth), row_scales);
    for (std::size_t b = 0; b < row_scales.size(); ++b) {
      scales[static_cast<std::int64_t>(b) * stride + r] = row_scales[b];
    }
  }
}

void round_sums(const float* sums, std::int64_t count, void* out) {
  auto* to = static_cast<Bf16*>(out);
  for (std::int64_t i = 0; i < count; ++i) to[i] = Bf16::from_float(sums[i]);
}

void reference(const Shape& shape, std::int32_t rank, const Operands* all, void* out) {
  const std::int32_t rows = shape.rows[static_cast<std::size_t>(rank)];
  std::vector<float> sums(static_cast<std::size_t>(rows) * static_cast<std::size_t>(shape.columns),
                          0.0f);
  for (std::int32_t step = 0; step < shape.ranks; ++step) {
    const std::int32_t source = source_of_step(rank, step, shape.ranks);
    const Operands& from = all[source];
    const ChunkView chunk{
        row_of(shape, from.x, row_offset(shape, rank)),
        from.x_scales == nullptr ? nullptr : from.x_scales + row_offset(shape, rank),
        from.x_scale_stride};
    add_chunk(shape, chunk, 0, rows, all[rank].w, all[rank].w_scales, source, sums.data());
  }
  round_sums(sums.data(), static_cast<std::int64_t>(sums.size()), out);
}

double element_f64(const Shape& shape, std::int32_t rank, const Operands* all, std::int64_t row,
                   std::int64_t column) {
  double sum = 0.0;
  for (std::int32_t source = 0; source < shape.ranks; ++source) {
    const Operands& from = all[source];
    const std::int64_t at = row_offset(shape, rank) + row;
    const auto* a = row_of(shape, from.x, at);
    const auto* b =
        row_of(shape, all[rank].w, static_cast<std::int64_t>(source) * shape.columns + column);
    for (std::int64_t k = 0; k < shape.depth; ++k) {
      double product = element(shape, a, k) * element(shape, b, k);
      if (shape.format == Format::kFp8) {
        const std::int64_t block = k / kScaleBlock;
        product *=
            static_cast<double>(from.x_scales[block * from.x_scale_stride + at]) *
            static_cast<double>(all[rank].w_scales[w_scale_at(shape, source, column, block)]);
      }
      sum += product;
    }
  }
  return sum;
}

}  // namespace penstock::a2a_gemm
