#include "penstock/ops/a2a_gemm/heuristics.h"

#include <gtest/gtest.h>

#include "penstock/core/error.h"

namespace penstock::a2a_gemm {
namespace {

TEST(ScheduleTest, OpenGatesCostWavesOfTiles) {
  const TileGrid grid = tile_grid(1024, 2048, 4);  // 4 x 8 = 32 cluster tiles
  const std::vector<double> open(2, 0.0);
  EXPECT_DOUBLE_EQ(schedule_floor_us(grid, 2, 1024, 32, 5.0, open), 10.0);
  EXPECT_DOUBLE_EQ(schedule_floor_us(grid, 2, 1024, 31, 5.0, open), 20.0);
  EXPECT_DOUBLE_EQ(schedule_floor_us(grid, 2, 1024, 1, 5.0, open), 320.0);
}

TEST(ScheduleTest, ALateChunkDelaysOnlyWhatNeedsIt) {
  const TileGrid grid = tile_grid(512, 256, 1);  // two cluster tiles, one column
  // [step][row block]: the second row block of source 1 comes at 100.
  const std::vector<double> late{0.0, 0.0, 0.0, 100.0};
  EXPECT_DOUBLE_EQ(schedule_floor_us(grid, 2, 256, 1, 5.0, late), 105.0);
  // The first comes at 100: one worker waits with the tile in hand.
  const std::vector<double> first{0.0, 0.0, 100.0, 0.0};
  EXPECT_DOUBLE_EQ(schedule_floor_us(grid, 2, 256, 1, 5.0, first), 115.0);
  EXPECT_DOUBLE_EQ(schedule_floor_us(grid, 2, 256, 2, 5.0, first), 105.0);
  // Hidden behind the local chunk: costs nothing.
  const std::vector<double> hidden{0.0, 0.0, 5.0, 15.0};
  EXPECT_DOUBLE_EQ(schedule_floor_us(grid, 2, 256, 1, 5.0, hidden), 20.0);
}

TEST(HeuristicsTest, FusesWhereThereIsSomethingToHide) {
  // The sizes of docs/a2a-gemm.md: hidden 8192, sequence 8192 and up.
  for (const int ranks : {2, 8}) {
    for (const int sequence : {8192, 16384, 65536}) {
      const Shape shape = even_shape(ranks, sequence / ranks, 8192 / ranks, 8192, Format::kBf16);
      const Config c = choose(shape, 0);
      EXPECT_TRUE(c.fuse) << describe(shape) << ": " << describe(c);
      EXPECT_LT(c.fused_us, c.unfused_us);
      EXPECT_GE(c.fused_us, c.gemm_us);
    }
  }
  EXPECT_FALSE(choose(even_shape(1, 4096, 8192, 8192, Format::kBf16), 0).fuse);
  // Rank 1 has no rows: nothing to compute, nothing to fuse.
  Shape uneven = even_shape(2, 4096, 4096, 8192, Format::kBf16);
  uneven.rows[1] = 0;
  EXPECT_FALSE(choose(uneven, 1).fuse);
  EXPECT_TRUE(choose(uneven, 0).fuse);
}

TEST(HeuristicsTest, RowBlockIsTheSameOnEveryRank) {
  Shape shape = even_shape(4, 4096, 2048, 8192, Format::kFp8);
  shape.rows = {16384, 16, 0, 2048};
  const std::int32_t expected = choose(shape, 0).row_block_rows;
  EXPECT_EQ(expected % kClusterRows, 0);
  for (int rank = 1; rank < 4; ++rank) EXPECT_EQ(choose(shape, rank).row_block_rows, expected);
}

TEST(HeuristicsTest, KeepsAGivenRowBlockAndRefusesBadOnes) {
  const Shape shape = even_shape(2, 4096, 2048, 8192, Format::kBf16);
  EXPECT_EQ(choose(shape, 0, {}, 768).row_block_rows, 768);
  EXPECT_THROW(choose(shape, 0, {}, 128), Error);
  EXPECT_THROW(choose(shape, 0, {}, -256), Error);
  EXPECT_THROW(choose(shape, 2), Error);
}

TEST(HeuristicsTest, SlowLinksMakeTheExchangeTheFloor) {
  Machine slow;
  slow.link_gbps = 10.0;
  const Shape shape = even_shape(2, 4096, 4096, 8192, Format::kBf16);
  const Config c = choose(shape, 0, slow);
  EXPECT_GT(c.exchange_us, c.gemm_us);
  EXPECT_GE(c.fused_us, c.exchange_us);
  EXPECT_LT(c.fused_us, c.unfused_us);
}

// Where fusing was measured not to pay `auto` leaves it, whatever is predicted; what was measured
// on a shared GPU says nothing about ranks with a GPU of their own.
TEST(HeuristicsTest, MeasuredSizesWhereFusingDoesNotPayAreLeftUnfused) {
  Machine shared;
  shared.sms = 64;
  shared.shared_gpu = true;
  const Shape narrow = even_shape(2, 4096, 1024, 2048, Format::kBf16);
  EXPECT_LT(measured_gain(narrow, shared), 1.0);
  EXPECT_GT(measured_gain(narrow, shared), 0.9);
  EXPECT_FALSE(choose(narrow, 0, shared).fuse);
  EXPECT_EQ(measured_gain(narrow, {}), 0.0);
  EXPECT_TRUE(choose(narrow, 0).fuse);
  // Near a point, and of another format.
  EXPECT_FALSE(choose(even_shape(2, 4800, 1024, 2048, Format::kBf16), 0, shared).fuse);
  EXPECT_FALSE(choose(even_shape(2, 4096, 1024, 2048, Format::kFp8), 0, shared).fuse);
  // Where it pays, and where nothing was measured.
  EXPECT_TRUE(choose(even_shape(2, 4096, 4096, 8192, Format::kBf16), 1, shared).fuse);
  EXPECT_EQ(measured_gain(even_shape(3, 4096, 1024, 2048, Format::kBf16), shared), 0.0);
  EXPECT_EQ(measured_gain(even_shape(2, 4096, 1024, 512, Format::kBf16), shared), 0.0);
  EXPECT_TRUE(choose(even_shape(3, 4096, 1024, 2048, Format::kBf16), 0, shared).fuse);
}

}  // namespace
}  // namespace penstock::a2a_gemm
