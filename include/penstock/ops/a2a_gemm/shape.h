// a2a_gemm: an all-to-all and the projection that consumes it. The problem as plain numbers.
//
// Rank s of P holds X_s [sum of rows, K], its rows grouped by destination: rows
// [row_offset(d), row_offset(d) + rows[d]) go to rank d, where they are chunk s. Rank d computes
//
//   out_d [rows[d], N] = sum over s of chunk_s [rows[d], K] x W[s] [N, K]^T,
//
// which is one GEMM of depth P * K over chunks that arrive one after the other. Sequence-parallel
// attention ends like this: K is a rank's share of the heads, rows[d] rank d's share of the
// sequence.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "penstock/core/host_device.h"

namespace penstock::a2a_gemm {

inline constexpr int kMaxRanks = 8;
inline constexpr int kUnit = 16;         // rows, columns and depth are multiples of it
inline constexpr int kScaleBlock = 128;  // FP8: columns of X (and rows of W) that share a scale
inline constexpr int kStepBytes = 128;   // bytes of K that one pipeline step covers, either format

// Elements of X and W. Accumulation is f32, the result bf16.
enum class Format : std::uint8_t {
  kBf16,
  kFp8,  // E4M3; X one f32 scale per 1 x 128, W one per 128 x 128; a last block may be partial
};
const char* to_string(Format format);  // "bf16", "fp8"

// Sizes of one operator; the same on every rank. Counts are elements, not bytes.
struct Shape {
  std::int32_t ranks = 1;                      // P, 1 to 8, any number
  std::array<std::int32_t, kMaxRanks> rows{};  // [P] of each destination, multiples of 16, may be 0
  std::int32_t depth = 0;                      // K of one chunk, a multiple of 16
  std::int32_t columns = 0;                    // N, a multiple of 16
  Format format = Format::kBf16;

  PENSTOCK_HOST_DEVICE constexpr std::int32_t element_bytes() const {
    return format == Format::kBf16 ? 2 : 1;
  }
  // Bytes of one row of a chunk.
  PENSTOCK_HOST_DEVICE constexpr std::int64_t row_bytes() const {
    return static_cast<std::int64_t>(depth) * element_bytes();
  }
  // Pipeline steps of one chunk: 64 bf16 or 128 E4M3 each, the last one padded with zeros.
  PENSTOCK_HOST_DEVICE constexpr std::int32_t steps() const {
    return static_cast<std::int32_t>((row_bytes() + kStepBytes - 1) / kStepBytes);
  }
  // Scales along K of one row (FP8), and along N of W.
  PENSTOCK_HOST_DEVICE constexpr std::int32_t scale_blocks() const {
    return format == Format::kFp8 ? (depth + kScaleBlock - 1) / kScaleBlock : 0;
  }
  PENSTOCK_HOST_DEVICE constexpr std::int32_t column_scale_blocks() const {
    return format == Format::kFp8 ? (columns + kScaleBlock - 1) / kScaleBlock : 0;
  }
};

// The shape with the same number of rows on every rank.
Shape even_shape(std::int32_t ranks, std::int32_t rows, std::int32_t depth, std::int32_t columns,
                 Format format);

// First row of X for destination `rank`.
std::int64_t row_offset(const Shape& shape, std::int32_t rank);
std::int64_t total_rows(const Shape& shape);
std::int32_t max_rows(const Shape& shape);

// 2 * rows * N * P * K of one rank.
double flop(const Shape& shape, std::int32_t rank);
// Payload and scales that one rank receives from its peers.
double wire_bytes(const Shape& shape, std::int32_t rank);

// Says in words what is wrong with a shape, value and remedy; empty if nothing is.
std::string find_fault(const Shape& shape);
// Throws Error(kInvalidArgument, find_fault(shape)) unless the shape is usable.
void validate(const Shape& shape);
// "ranks=2 rows=64,48 depth=512 columns=1024 format=bf16": enters the layout's digest.
std::string describe(const Shape& shape);

}  // namespace penstock::a2a_gemm
