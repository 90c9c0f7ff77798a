// moe_stage2: the experts' down projection and the top-k combine. The problem as plain numbers.
//
// Rank r of P owns E / P experts. After dispatch and the first stage it holds the rows routed to
// them, sorted by expert, each expert's rows padded to whole tiles of kTileRows. y = act x
// W2[expert]^T goes back to the rank that each row came from, where out[token] = sum over slots k
// of weight_k * y(token, k).
#pragma once

#include <cstdint>
#include <string>

#include "penstock/core/host_device.h"

namespace penstock::moe_stage2 {

inline constexpr int kTileRows = 128;    // rows of a GEMM tile; every expert starts on a tile
inline constexpr int kScaleBlock = 128;  // columns (and weight rows) that share one f32 scale
inline constexpr int kWireBlock = 32;    // columns that share one E8M0 on the fp8 wire
inline constexpr int kMaxRanks = 8;
inline constexpr int kMaxTopK = 16;
inline constexpr int kMaxExpertsPerRank = 1024;

// How a result row travels.
enum class WireFormat : std::uint8_t {
  kBf16,  // H bf16
  kFp8,   // H E4M3, then H / 32 E8M0 (rule: ceil(log2(amax / 448)), never saturates), then padding
};

// Sizes of one operator; the same on every rank. Counts are elements, not bytes.
struct Shape {
  std::int32_t ranks = 1;                // P, 1 to 8, any number
  std::int32_t experts = 0;              // E routed experts of all ranks, a multiple of P
  std::int32_t top_k = 0;                // slots per token, 1 to 16
  std::int32_t hidden = 0;               // H, a multiple of 128
  std::int32_t intermediate = 0;         // I, a multiple of 128
  std::int64_t max_tokens_per_rank = 0;  // bound on T_r of every rank; T_r may differ and be zero
  double row_slack = 1.5;  // reservation per (source, destination) over the even share
  WireFormat wire = WireFormat::kFp8;

  constexpr std::int32_t experts_per_rank() const { return experts / ranks; }
};

// Says in words what is wrong with a shape, value and remedy; empty if nothing is.
std::string find_fault(const Shape& shape);

// Throws Error(kInvalidArgument, find_fault(shape)) unless the shape is usable.
void validate(const Shape& shape);

// Bytes from one row to the next on the wire: 2 H, or H + H / 32, each rounded up to 16 so that
// rows are copied in 16-byte pieces.
PENSTOCK_HOST_DEVICE constexpr std::int64_t wire_row_bytes(std::int32_t hidden, WireFormat wire) {
  const std::int64_t bytes = wire == WireFormat::kBf16
                                 ? 2 * static_cast<std::int64_t>(hidden)
                                 : static_cast<std::int64_t>(hidden) + hidden / kWireBlock;
  return (bytes + 15) / 16 * 16;
}

// Valid rows that one rank can receive at worst: every rank sends all its tokens' slots there, but
// a token picks an expert once only.
constexpr std::int64_t worst_rows_per_rank(const Shape& s) {
  const std::int64_t slots = s.top_k < s.experts_per_rank() ? s.top_k : s.experts_per_rank();
  return static_cast<std::int64_t>(s.ranks) * s.max_tokens_per_rank * slots;
}

// The same rows with every expert padded to whole tiles. Only experts that have rows are padded, so
// the padding is bounded by the rows as well.
constexpr std::int64_t worst_padded_rows_per_rank(const Shape& s) {
  const std::int64_t rows = worst_rows_per_rank(s);
  const std::int64_t padded_experts = rows < s.experts_per_rank() ? rows : s.experts_per_rank();
  return (rows + padded_experts * (kTileRows - 1)) / kTileRows * kTileRows;
}

// Rows reserved in a destination's window for one source: the even share max_tokens * top_k / P
// times row_slack, rounded up, at least 1 and never more than the worst case of a pair. Rows past
// it take the spill path.
std::int64_t reserved_rows(const Shape& shape);

// Rows that one source can have for one destination at worst: max_tokens * top_k of the
// destination, all on experts of that source.
constexpr std::int64_t worst_rows_per_pair(const Shape& s) {
  const std::int64_t slots = s.top_k < s.experts_per_rank() ? s.top_k : s.experts_per_rank();
  return s.max_tokens_per_rank * slots;
}

}  // namespace penstock::moe_stage2
