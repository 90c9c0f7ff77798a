// Index arithmetic of a2a_gemm: who sends what when, and in which order tiles and chunks are
// computed. Host and device, no memory access.
//
// The order of K. Rank d multiplies the chunks of sources d, d + 1, ..., d + P - 1 (mod P): its own
// first, which needs no wire. In step j of the exchange source s sends to rank s - j, which is when
// rank d gets source d + j: every rank sends to one peer and receives from one peer in each step,
// and chunks arrive in the order in which they are read. The order is fixed, so the f32 sums are
// too: results do not depend on timing, transport or chunk size.
//
// The order of rows. Copies run row block by row block, all peers within a block: a tile needs its
// row block from every source before it ends, and the first tiles would otherwise wait for nearly
// the whole exchange.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/ops/a2a_gemm/shape.h"

namespace penstock::a2a_gemm {

inline constexpr int kTileRows = 128;  // of one CTA; a cluster stacks two and shares W
inline constexpr int kTileColumns = 256;
inline constexpr int kClusterCtas = 2;
inline constexpr int kClusterRows = kTileRows * kClusterCtas;

// In which order a rank multiplies its chunks.
enum class ChunkOrder : std::uint8_t {
  kRotation,  // own first, then the next ranks: same bits every time
  kArrival,   // own first, then whichever is there: f32 sums depend on timing, so two runs may
              // differ in the last bit
};

PENSTOCK_HOST_DEVICE constexpr int source_of_step(int rank, int step, int ranks) {
  return (rank + step) % ranks;
}
PENSTOCK_HOST_DEVICE constexpr int destination_of_step(int rank, int step, int ranks) {
  return (rank - step + ranks) % ranks;
}

PENSTOCK_HOST_DEVICE constexpr std::int32_t row_block_count(std::int32_t rows,
                                                            std::int32_t row_block_rows) {
  return (rows + row_block_rows - 1) / row_block_rows;
}

// One piece on the wire: rows [row, row + rows) of what goes to `peer`, announced together.
struct Piece {
  std::int32_t peer = 0;
  std::int32_t row = 0;  // of the destination's chunk
  std::int32_t rows = 0;
  std::int32_t row_block = 0;
  friend bool operator==(const Piece&, const Piece&) = default;
};
// Pieces that `rank` sends, in order. Its own chunk is none.
std::vector<Piece> pieces_of(const Shape& shape, std::int32_t rank, std::int32_t row_block_rows);

// Tiles of one rank's result in the order in which clusters take them: bands of `band` cluster
// tiles of rows; inside a band column after column, and down each column. A wave then covers a
// nearly square piece of the result, which is what keeps its operands in L2, and bands finish in
// the order in which rows arrive.
struct TileGrid {
  std::int32_t cluster_rows = 0;  // cluster tiles down
  std::int32_t columns = 0;       // tiles across
  std::int32_t band = 1;

  PENSTOCK_HOST_DEVICE constexpr std::int32_t tiles() const { return cluster_rows * columns; }
};
PENSTOCK_HOST_DEVICE constexpr TileGrid tile_grid(std::int32_t rows, std::int32_t columns,
                                                  std::int32_t band) {
  return {(rows + kClusterRows - 1) / kClusterRows, (columns + kTileColumns - 1) / kTileColumns,
          band};
}
struct TilePlace {
  std::int32_t cluster_row = 0;
  std::int32_t column = 0;  // tile, not element
  friend bool operator==(const TilePlace&, const TilePlace&) = default;
};
PENSTOCK_HOST_DEVICE constexpr TilePlace tile_place(const TileGrid& grid, std::int32_t linear) {
  const std::int32_t per_band = grid.band * grid.columns;
  const std::int32_t first = linear / per_band * grid.band;
  const std::int32_t left = grid.cluster_rows - first;
  const std::int32_t height = left < grid.band ? left : grid.band;
  const std::int32_t inside = linear % per_band;
  return {first + inside % height, inside / height};
}

// The mirror's tiles (mirror.h) in the order in which clusters take them: row block by row block,
// in each the parts of the destinations in the order of the steps, then the rank's own part. A part
// of a row block is a piece and leaves when its last tile is written.
struct MirrorGrid {
  TileGrid part;  // what one destination gets of this rank's rows
  std::int32_t ranks = 1;
  std::int32_t rank = 0;
  std::int32_t block_rows = 1;  // cluster tiles of a row block

  PENSTOCK_HOST_DEVICE constexpr std::int32_t tiles() const { return ranks * part.tiles(); }
  PENSTOCK_HOST_DEVICE constexpr std::int32_t blocks() const {
    return (part.cluster_rows + block_rows - 1) / block_rows;
  }
  PENSTOCK_HOST_DEVICE constexpr std::int32_t pieces() const { return blocks() * (ranks - 1); }
  PENSTOCK_HOST_DEVICE constexpr std::int32_t block_height(std::int32_t block) const {
    const std::int32_t left = part.cluster_rows - block * block_rows;
    return left < block_rows ? left : block_rows;
  }
  PENSTOCK_HOST_DEVICE constexpr std::int32_t piece_tiles(std::int32_t piece) const {
    return block_height(piece / (ranks - 1)) * part.columns;
  }
};
PENSTOCK_HOST_DEVICE constexpr MirrorGrid mirror_grid(std::int32_t ranks, std::int32_t rank,
                                                      std::int32_t rows, std::int32_t columns,
                                                      std::int32_t row_block_rows,
                                                      std::int32_t band) {
  return {tile_grid(rows, columns, band), ranks, rank, row_block_rows / kClusterRows};
}
// Piece i as the rank sends it, `rows` rows in all.
PENSTOCK_HOST_DEVICE constexpr Piece mirror_piece(const MirrorGrid& grid, std::int32_t rows,
                                                  std::int32_t i) {
  const std::int32_t block = i / (grid.ranks - 1);
  const std::int32_t row = block * grid.block_rows * kClusterRows;
  const std::int32_t left = rows - row;
  const std::int32_t most = grid.block_rows * kClusterRows;
  return {destination_of_step(grid.rank, i % (grid.ranks - 1) + 1, grid.ranks), row,
          left < most ? left : most, block};
}
struct MirrorPlace {
  std::int32_t cluster_row = 0;
  std::int32_t column = 0;  // tile, of the destination's part
  std::int32_t destination = 0;
  std::int32_t piece = -1;  // row block * (ranks - 1) + step - 1; -1: stays here
  friend bool operator==(const MirrorPlace&, const MirrorPlace&) = default;
};
PENSTOCK_HOST_DEVICE constexpr MirrorPlace mirror_place(const MirrorGrid& grid,
                                                        std::int32_t linear) {
  const std::int32_t sent = (grid.ranks - 1) * grid.part.tiles();
  if (linear >= sent) {
    const TilePlace place = tile_place(grid.part, linear - sent);
    return {place.cluster_row, place.column, grid.rank, -1};
  }
  const std::int32_t per_block = grid.block_rows * (grid.ranks - 1) * grid.part.columns;
  const std::int32_t block = linear / per_block;
  const std::int32_t height = grid.block_height(block);
  const std::int32_t inside = linear - block * per_block;
  const std::int32_t per_piece = height * grid.part.columns;
  const std::int32_t step = inside / per_piece;
  const TilePlace place =
      tile_place({height, grid.part.columns, grid.part.band}, inside - step * per_piece);
  return {block * grid.block_rows + place.cluster_row, place.column,
          destination_of_step(grid.rank, step + 1, grid.ranks), block * (grid.ranks - 1) + step};
}

}  // namespace penstock::a2a_gemm
