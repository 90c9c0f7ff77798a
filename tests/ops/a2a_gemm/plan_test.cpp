#include "penstock/ops/a2a_gemm/plan.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <set>
#include <tuple>

namespace penstock::a2a_gemm {
namespace {

// In each step every rank sends to one peer and receives from one, and what it receives is what it
// reads next.
TEST(PlanTest, StepsArePermutationsThatMatch) {
  for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(source_of_step(rank, 0, ranks), rank);
      std::set<int> sources;
      for (int step = 0; step < ranks; ++step) {
        const int source = source_of_step(rank, step, ranks);
        sources.insert(source);
        EXPECT_EQ(destination_of_step(source, step, ranks), rank);
      }
      EXPECT_EQ(static_cast<int>(sources.size()), ranks);
    }
  }
}

RC_GTEST_PROP(PlanTest, PiecesCoverEveryRowOfEveryPeerOnceInOrder, ()) {
  Shape shape;
  shape.ranks = *rc::gen::inRange(1, kMaxRanks + 1);
  shape.depth = shape.columns = kUnit;
  for (std::int32_t r = 0; r < shape.ranks; ++r) {
    shape.rows[static_cast<std::size_t>(r)] = kUnit * *rc::gen::inRange(0, 100);
  }
  const std::int32_t block_rows = kClusterRows * *rc::gen::inRange(1, 4);
  const std::int32_t rank = *rc::gen::inRange(0, shape.ranks);
  std::array<std::int32_t, kMaxRanks> next{};
  std::int32_t last_block = 0;
  for (const Piece& piece : pieces_of(shape, rank, block_rows)) {
    RC_ASSERT(piece.peer != rank);
    RC_ASSERT(piece.rows > 0 && piece.rows <= block_rows);
    RC_ASSERT(piece.row == next[static_cast<std::size_t>(piece.peer)]);
    RC_ASSERT(piece.row_block == piece.row / block_rows);
    RC_ASSERT(piece.row_block >= last_block);  // row blocks first
    last_block = piece.row_block;
    next[static_cast<std::size_t>(piece.peer)] += piece.rows;
  }
  for (std::int32_t r = 0; r < shape.ranks; ++r) {
    RC_ASSERT(next[static_cast<std::size_t>(r)] ==
              (r == rank ? 0 : shape.rows[static_cast<std::size_t>(r)]));
  }
}

RC_GTEST_PROP(PlanTest, EveryTileIsTakenOnceAndBandsInOrder, ()) {
  const std::int32_t rows = *rc::gen::inRange(1, 20000);
  const std::int32_t columns = *rc::gen::inRange(1, 5000);
  const std::int32_t band = *rc::gen::inRange(1, 20);
  const TileGrid grid = tile_grid(rows, columns, band);
  RC_ASSERT(grid.cluster_rows * kClusterRows >= rows &&
            (grid.cluster_rows - 1) * kClusterRows < rows);
  std::set<std::pair<int, int>> seen;
  std::int32_t last_band = 0;
  for (std::int32_t i = 0; i < grid.tiles(); ++i) {
    const TilePlace place = tile_place(grid, i);
    RC_ASSERT(place.cluster_row >= 0 && place.cluster_row < grid.cluster_rows);
    RC_ASSERT(place.column >= 0 && place.column < grid.columns);
    RC_ASSERT(seen.insert({place.cluster_row, place.column}).second);
    RC_ASSERT(place.cluster_row / band >= last_band);
    last_band = place.cluster_row / band;
  }
  RC_ASSERT(static_cast<std::int32_t>(seen.size()) == grid.tiles());
}

RC_GTEST_PROP(PlanTest, EveryTileOfTheMirrorIsTakenOnceAndPiecesInOrder, ()) {
  const std::int32_t ranks = *rc::gen::inRange(1, kMaxRanks + 1);
  const std::int32_t rank = *rc::gen::inRange(0, ranks);
  const std::int32_t rows = *rc::gen::inRange(1, 6000);
  const std::int32_t columns = *rc::gen::inRange(1, 2000);
  const std::int32_t block_rows = kClusterRows * *rc::gen::inRange(1, 6);
  const MirrorGrid grid =
      mirror_grid(ranks, rank, rows, columns, block_rows, *rc::gen::inRange(1, 10));
  std::set<std::tuple<int, int, int>> seen;
  std::vector<std::int32_t> tiles(static_cast<std::size_t>(grid.pieces()), 0);
  std::int32_t last = 0;
  bool own = false;
  for (std::int32_t i = 0; i < grid.tiles(); ++i) {
    const MirrorPlace place = mirror_place(grid, i);
    RC_ASSERT(place.cluster_row >= 0 && place.cluster_row < grid.part.cluster_rows);
    RC_ASSERT(place.column >= 0 && place.column < grid.part.columns);
    RC_ASSERT(seen.insert({place.destination, place.cluster_row, place.column}).second);
    RC_ASSERT((place.piece < 0) == (place.destination == rank));
    RC_ASSERT(!own || place.piece < 0);  // the own part last of all
    own = place.piece < 0;
    if (own) continue;
    RC_ASSERT(place.piece >= last && place.piece <= last + 1);
    last = place.piece;
    ++tiles[static_cast<std::size_t>(place.piece)];
    const Piece piece = mirror_piece(grid, rows, place.piece);
    RC_ASSERT(piece.peer == place.destination);
    RC_ASSERT(place.cluster_row * kClusterRows >= piece.row &&
              place.cluster_row * kClusterRows < piece.row + piece.rows);
  }
  std::int32_t sent = 0;
  for (std::int32_t i = 0; i < grid.pieces(); ++i) {
    RC_ASSERT(tiles[static_cast<std::size_t>(i)] == grid.piece_tiles(i));
    sent += mirror_piece(grid, rows, i).rows;
  }
  RC_ASSERT(sent == (ranks - 1) * rows);
}

TEST(PlanTest, NoRowsNoTiles) { EXPECT_EQ(tile_grid(0, 4096, 4).tiles(), 0); }

}  // namespace
}  // namespace penstock::a2a_gemm
