// The oracle of a2a_gemm: plain loops.
#pragma once

#include <cstdint>

#include "penstock/numerics/formats.h"
#include "penstock/ops/a2a_gemm/shape.h"

namespace penstock::a2a_gemm {

// One rank's inputs and result. cpu: host memory; cuda: device memory, 16-byte aligned.
struct Operands {
  // [total_rows, depth] bf16 or E4M3, rows grouped by destination.
  const void* x = nullptr;
  // FP8: [scale_blocks, x_scale_stride] f32: transposed, scale of (row, block b) at
  // [b * x_scale_stride + row]. x_scale_stride >= total_rows, a multiple of 16.
  const float* x_scales = nullptr;
  std::int64_t x_scale_stride = 0;
  // [ranks, columns, depth], as X.
  const void* w = nullptr;
  // FP8: [ranks, column_scale_blocks, scale_blocks] f32.
  const float* w_scales = nullptr;
  // [rows of this rank, columns] bf16.
  void* out = nullptr;
};

// Rows of one source as they are multiplied: a chunk, or the owner's rows of X.
struct ChunkView {
  const void* data = nullptr;     // [rows, depth]
  const float* scales = nullptr;  // [scale_blocks, scale_stride]
  std::int64_t scale_stride = 0;
};

// sums [rows, columns] f32 += chunk [rows, depth] x W[source]^T for rows [row, row + rows) of the
// chunk. Element by element: eight interleaved partial sums along 128-byte steps, added pairwise,
// then (FP8: times both scales) added to the sum. The order depends on nothing but the shape, so
// whoever calls it with the same chunks in the same order gets the same bits.
void add_chunk(const Shape& shape, const ChunkView& chunk, std::int32_t row, std::int32_t rows,
               const void* w, const float* w_scales, std::int32_t source, float* sums);

// q [total_rows, depth] and scales [scale_blocks, stride] = x [total_rows, depth] in E4M3 with one
// scale per 1 x 128 (numerics: fp8_activation_scale), stride >= total_rows. What
// Options::quantise_x sends, bit for bit on either back end. Blocks with a NaN or an Inf become
// NaN.
void quantise_x(const Shape& shape, const Bf16* x, E4M3* q, float* scales, std::int64_t stride);

// out [rows, columns] bf16 = sums, to nearest even.
void round_sums(const float* sums, std::int64_t count, void* out);

// The unfused result of `rank` from all ranks' operands: gather, then one pass over K in the
// operator's order. What the CPU operator returns, bit for bit.
void reference(const Shape& shape, std::int32_t rank, const Operands* all, void* out);

// Element (row, column) of rank's result in f64, no roundings but the inputs'.
double element_f64(const Shape& shape, std::int32_t rank, const Operands* all, std::int64_t row,
                   std::int64_t column);

}  // namespace penstock::a2a_gemm
