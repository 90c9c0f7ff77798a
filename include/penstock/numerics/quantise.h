// Quantise and dequantise whole arrays on the host, in the block formats of block.h.
//
// All functions: matrices are dense, row-major, [rows, columns]; spans must have exactly the size
// that the comment gives, else InvalidArgument naming the span and both sizes. Ranges must not
// overlap. Sizes are 64-bit; 0 rows or columns are allowed. Single-threaded, deterministic,
// thread-safe, no allocation. Quantisers return how many blocks held a NaN or an Inf; those blocks
// read as NaN (block.h), so a caller that must not have any (a checkpoint converter, say) refuses
// on > 0.
#pragma once

#include <cstdint>
#include <span>

#include "penstock/numerics/block.h"
#include "penstock/numerics/formats.h"

namespace penstock {

// Number of FP8 blocks that cover n elements: ceil(n / 128).
constexpr std::int64_t fp8_blocks(std::int64_t n) {
  return n / kFp8BlockSize + (n % kFp8BlockSize != 0 ? 1 : 0);
}

// f32 [n] <-> Bf16 [n], nearest even.
void to_bf16(std::span<const float> x, std::span<Bf16> out);
void to_float(std::span<const Bf16> x, std::span<float> out);

// FP8 128x128: w [rows, columns] -> q [rows, columns] and
// scales [ceil(rows / 128), ceil(columns / 128)]; edge blocks are partial.
// s = fp8_weight_scale(amax of the block), q = e4m3(w / s). The error |w - q s| is at most
// s * max(|w / s| / 16, 2^-10), plus the rounding of the division.
std::int64_t quantise_fp8_block(std::span<const float> w, std::int64_t rows, std::int64_t columns,
                                std::span<E4M3> q, std::span<float> scales);
void dequantise_fp8_block(std::span<const E4M3> q, std::span<const float> scales, std::int64_t rows,
                          std::int64_t columns, std::span<float> out);

// FP8 per channel: as above with one scale a row, scales [rows].
std::int64_t quantise_fp8_channel(std::span<const float> w, std::int64_t rows, std::int64_t columns,
                                  std::span<E4M3> q, std::span<float> scales);
void dequantise_fp8_channel(std::span<const E4M3> q, std::span<const float> scales,
                            std::int64_t rows, std::int64_t columns, std::span<float> out);

// FP8 per token / 128: x [rows, columns] -> q [rows, columns], scales [rows, ceil(columns / 128)].
// s = fp8_activation_scale(amax of the group), q = e4m3(x / s) (DeepSeek-V3's act_quant).
std::int64_t quantise_fp8_activation(std::span<const float> x, std::int64_t rows,
                                     std::int64_t columns, std::span<E4M3> q,
                                     std::span<float> scales);
void dequantise_fp8_activation(std::span<const E4M3> q, std::span<const float> scales,
                               std::int64_t rows, std::int64_t columns, std::span<float> out);

// Index-cache rows (ue8m0): x [rows, 128] -> q [rows, 128], scales [rows], each a power of two or
// NaN. dequantise_fp8_channel reads them back.
std::int64_t quantise_fp8_index(std::span<const float> x, std::int64_t rows, std::span<E4M3> q,
                                std::span<float> scales);

// MXFP4: w [rows, columns] -> pairs [rows, columns / 2] (low nibble first), scales
// [rows, columns / 32]. columns % 32 == 0, else InvalidArgument.
std::int64_t quantise_mxfp4(std::span<const float> w, std::int64_t rows, std::int64_t columns,
                            MxScaleRule rule, std::span<std::uint8_t> pairs,
                            std::span<E8M0> scales);
void dequantise_mxfp4(std::span<const std::uint8_t> pairs, std::span<const E8M0> scales,
                      std::int64_t rows, std::int64_t columns, std::span<float> out);

// MXFP8 (E4M3 elements): x [rows, columns] -> q [rows, columns], scales [rows, columns / 32].
// columns % 32 == 0, else InvalidArgument.
std::int64_t quantise_mxfp8(std::span<const float> x, std::int64_t rows, std::int64_t columns,
                            MxScaleRule rule, std::span<E4M3> q, std::span<E8M0> scales);
void dequantise_mxfp8(std::span<const E4M3> q, std::span<const E8M0> scales, std::int64_t rows,
                      std::int64_t columns, std::span<float> out);

// Wire rows: x [rows, hidden] -> out [rows, wire_row_bytes(hidden)], MXFP8 by kCeil.
// hidden % 32 == 0, else InvalidArgument.
std::int64_t quantise_wire_rows(std::span<const float> x, std::int64_t rows, std::int64_t hidden,
                                std::span<std::uint8_t> out);
void dequantise_wire_rows(std::span<const std::uint8_t> wire, std::int64_t rows,
                          std::int64_t hidden, std::span<float> out);

}  // namespace penstock
