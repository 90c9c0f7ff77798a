// moe_stage2's index arithmetic: where each result row goes and how the receiver finds it again.
// One source for host and device; nothing here touches memory that it was not handed.
//
// Words. A *run* is the rows of one (source, destination) pair in the order in which they stand at
// the source. The reservation holds the run's first reserved_rows rows; the rest is the *spill
// run*. Because a row's place is its stable rank within its destination's run, tiles [a, b)
// contribute exactly the rows [prefix[a][d], prefix[b][d]) of run d: one contiguous range per peer
// for any chunk of tiles.
#pragma once

#include <cstdint>
#include <string>

#include "penstock/core/host_device.h"
#include "penstock/ops/moe_stage2/shape.h"

namespace penstock::moe_stage2 {

// Where a row came from. rank < 0 marks a padding row; everything else in it is then ignored.
struct RowOrigin {
  std::int32_t token = 0;  // index at the origin rank, 0 to T_r - 1
  std::int16_t rank = -1;
  std::int16_t slot = 0;  // 0 to top_k - 1
};
static_assert(sizeof(RowOrigin) == 8);

// Where a row is: row `row` of run `run`. At the source runs are numbered by destination d
// (reservation) and kMaxRanks + d (spill); at the receiver by source. run < 0: nowhere (padding, or
// a slot nobody filled).
struct RowPlace {
  std::int32_t run = -1;
  std::int32_t row = 0;
};
static_assert(sizeof(RowPlace) == 8);

inline constexpr int kMaxRuns = 2 * kMaxRanks;

// Base addresses of the runs as one rank sees them: a send buffer, its own landing region, or a
// peer's.
struct RunBases {
  unsigned char* base[kMaxRuns] = {};
  std::int64_t row_bytes = 0;  // wire_row_bytes()

  PENSTOCK_HOST_DEVICE unsigned char* address(RowPlace place) const {
    return base[place.run] + static_cast<std::int64_t>(place.row) * row_bytes;
  }
};

// Splits the stable rank of a row within its destination's run between reservation and spill.
PENSTOCK_HOST_DEVICE constexpr RowPlace place_of(std::int32_t destination, std::int64_t rank_in_run,
                                                 std::int64_t reserved) {
  RowPlace place;
  const bool spills = rank_in_run >= reserved;
  place.run = spills ? kMaxRanks + destination : destination;
  place.row = static_cast<std::int32_t>(spills ? rank_in_run - reserved : rank_in_run);
  return place;
}

// A (token, slot) as the number that the row table carries to the receiver.
PENSTOCK_HOST_DEVICE constexpr std::int32_t slot_index(std::int32_t token, std::int32_t slot,
                                                       std::int32_t top_k) {
  return token * top_k + slot;  // validate() keeps max_tokens_per_rank * top_k below 2^31
}

// Tiles of an expert with `rows` valid rows; none for an expert without rows.
PENSTOCK_HOST_DEVICE constexpr std::int32_t tiles_of(std::int64_t rows) {
  return static_cast<std::int32_t>((rows + kTileRows - 1) / kTileRows);
}

// Rows of half a tile: a tile with no more is computed in half the time, but only without a mate.
inline constexpr int kHalfTileRows = kTileRows / 2;

// Mate of tile `tile`, the `index`-th of the tiles of an expert with `rows` rows: tiles 2 i and 2 i
// + 1 are mates. A tile that is left over, and a last tile of at most kHalfTileRows, is its own.
PENSTOCK_HOST_DEVICE constexpr std::int32_t mate_of(std::int32_t tile, std::int32_t index,
                                                    std::int32_t rows) {
  const std::int32_t full = (rows + kHalfTileRows - 1) / kTileRows;  // tiles of more than half
  if ((index ^ 1) >= full || index >= full) return tile;
  return (index & 1) != 0 ? tile - 1 : tile + 1;
}

// Row range of a destination's run that tiles [first, last) contribute, from the prefix table
// [tiles + 1, kMaxRanks].
struct RowRange {
  std::int32_t begin = 0;
  std::int32_t end = 0;
};
PENSTOCK_HOST_DEVICE constexpr RowRange rows_of_tiles(const std::int32_t* prefix,
                                                      std::int64_t first, std::int64_t last,
                                                      std::int32_t destination) {
  return {prefix[first * kMaxRanks + destination], prefix[last * kMaxRanks + destination]};
}

// What a plan writes. Pointers are the caller's memory: host for plan_on_host, device for the
// kernels.
struct PlanOutputs {
  std::int32_t* tile_count = nullptr;   // [1]
  std::int32_t* tile_expert = nullptr;  // [tile_capacity] local expert of each tile
  std::int32_t* tile_rows = nullptr;    // [tile_capacity] valid rows of each tile, 1 to kTileRows
  // [tile_capacity] the neighbour of the same expert that a cluster computes together with the tile
  std::int32_t* tile_mate = nullptr;
  // [tile_capacity + 1, kMaxRanks] rows per destination before a tile; entries past tile_count are
  // not written
  std::int32_t* prefix = nullptr;
  RowPlace* place = nullptr;  // [tile_capacity * kTileRows], written for the tiles there are
  // Row tables: slot_index of each row in run order, reservation and spill in one. Table d starts
  // at row_table + d * row_table_stride.
  std::int32_t* row_table = nullptr;  // [kMaxRanks, row_table_stride]
  std::int64_t row_table_stride = 0;  // entries; at least worst_rows_per_pair()
  std::int32_t* fault = nullptr;      // [1] PlanFault bits are or-ed in; the caller clears it
};

struct PlanInputs {
  const std::int32_t* expert_rows = nullptr;  // [experts] valid rows of each local expert
  // [tile_capacity * kTileRows] expert-sorted, each expert from a tile's first row on, its valid
  // rows before its padding. Padding carries rank -1.
  const RowOrigin* origin = nullptr;
  std::int32_t experts = 0;  // experts of this rank, 1 to kMaxExpertsPerRank
  std::int32_t ranks = 0;
  std::int32_t top_k = 0;
  std::int64_t reserved = 0;       // reserved_rows()
  std::int64_t tile_capacity = 0;  // tiles that act and the outputs can hold
};

// Why a plan cannot be used. Nothing is written out of bounds then; the operator turns the bits
// into an Error.
enum PlanFault : std::int32_t {
  kPlanWhole = 0,
  kPlanTilesOverCapacity = 1,  // expert_rows ask for more tiles than tile_capacity; tile_count is 0
  kPlanBadOrigin = 2,  // a valid row's rank, slot or token is out of range; the row goes nowhere
  kPlanTableOverflow = 4,  // a run is longer than row_table_stride; the row goes nowhere
  kPlanBadPadding = 8,     // a row past an expert's valid ones does not carry rank -1
};

// Says PlanFault bits in words; empty for kPlanWhole.
std::string describe_plan_fault(std::int32_t bits);

// Whether a row whose index in its tile is `index` may go anywhere: kPlanWhole, or the fault.
PENSTOCK_HOST_DEVICE constexpr std::int32_t check_origin(RowOrigin origin, std::int32_t index,
                                                         std::int32_t tile_rows, std::int32_t ranks,
                                                         std::int32_t top_k) {
  if (index >= tile_rows) return origin.rank < 0 ? kPlanWhole : kPlanBadPadding;
  const bool good = origin.rank >= 0 && origin.rank < ranks && origin.slot >= 0 &&
                    origin.slot < top_k && origin.token >= 0;
  return good ? kPlanWhole : kPlanBadOrigin;
}

// Plans on the host. Deterministic; the device kernels give the same bytes. Never throws.
void plan_on_host(const PlanInputs& in, const PlanOutputs& out);

// Receiver's side: for i < rows, inverse[table[i]] = where row i of the run from `source` is.
// Entries that no run fills keep what the caller put there (run -1). Returns kPlanBadOrigin if the
// table names a slot outside [0, slots), which is then skipped, else kPlanWhole.
std::int32_t invert_on_host(const std::int32_t* table, std::int64_t rows, std::int32_t source,
                            std::int64_t reserved, RowPlace* inverse, std::int64_t slots);

}  // namespace penstock::moe_stage2
