// The plan against a naive oracle, over every routing pattern and rank count.
#include "penstock/ops/moe_stage2/plan.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <tuple>

#include "penstock/core/error.h"
#include "penstock/ops/moe_stage2/routing.h"

namespace penstock::moe_stage2 {
namespace {

Shape small_shape(int ranks, int experts_per_rank, int top_k, std::int64_t tokens, double slack) {
  Shape s;
  s.ranks = ranks;
  s.experts = ranks * experts_per_rank;
  s.top_k = top_k;
  s.hidden = 128;
  s.intermediate = 128;
  s.max_tokens_per_rank = tokens;
  s.row_slack = slack;
  return s;
}

// Checks a rank's plan row by row with counters of the simplest kind.
void check_against_oracle(const Shape& shape, const SourceRows& rows, const PlanOutputs& plan) {
  const std::int64_t reserved = reserved_rows(shape);
  std::int64_t tile = 0;
  for (std::size_t e = 0; e < rows.expert_rows.size(); ++e) {
    for (std::int64_t left = rows.expert_rows[e]; left > 0; left -= kTileRows, ++tile) {
      RC_ASSERT(plan.tile_expert[tile] == static_cast<std::int32_t>(e));
      RC_ASSERT(plan.tile_rows[tile] == std::min<std::int64_t>(left, kTileRows));
    }
  }
  RC_ASSERT(*plan.tile_count == tile);
  // Mates: neighbours of one expert and each other's. Alone: a last tile of at most half, and what
  // is left of an odd number of others.
  std::int32_t alone = 0;
  for (std::int32_t t = 0; t < tile; ++t) {
    const std::int32_t mate = plan.tile_mate[t];
    RC_ASSERT(mate >= 0);
    RC_ASSERT(mate < tile);
    RC_ASSERT(plan.tile_mate[mate] == t);
    RC_ASSERT(plan.tile_expert[mate] == plan.tile_expert[t]);
    RC_ASSERT(std::abs(mate - t) <= 1);
    alone += mate == t;
  }
  for (const std::int32_t count : rows.expert_rows) {
    const bool half = count % kTileRows > 0 && count % kTileRows <= kHalfTileRows;
    alone -= half + (tiles_of(count) - half) % 2;
  }
  RC_ASSERT(alone == 0);
  RC_ASSERT(*plan.fault == kPlanWhole);

  std::map<int, std::int64_t> sent;
  for (std::size_t i = 0; i < rows.origin.size(); ++i) {
    if (i % kTileRows == 0) {
      for (int d = 0; d < kMaxRanks; ++d) {
        RC_ASSERT(plan.prefix[i / kTileRows * kMaxRanks + static_cast<std::size_t>(d)] == sent[d]);
      }
    }
    const RowOrigin origin = rows.origin[i];
    if (origin.rank < 0) {
      RC_ASSERT(plan.place[i].run == -1);
      continue;
    }
    const std::int64_t rank = sent[origin.rank]++;
    const bool spills = rank >= reserved;
    RC_ASSERT(plan.place[i].run == origin.rank + (spills ? kMaxRanks : 0));
    RC_ASSERT(plan.place[i].row == (spills ? rank - reserved : rank));
    RC_ASSERT(plan.row_table[origin.rank * plan.row_table_stride + rank] ==
              origin.token * shape.top_k + origin.slot);
  }
  for (int d = 0; d < kMaxRanks; ++d) {
    RC_ASSERT(plan.prefix[tile * kMaxRanks + d] == sent[d]);
  }
}

// What a receiver finds through its inverse table is the row with exactly that (rank, token, slot).
void check_round_trip(const Shape& shape, const Routing& routing) {
  std::vector<SourceRows> rows;
  std::vector<HostPlan> plans;
  for (int r = 0; r < shape.ranks; ++r) {
    rows.push_back(rows_at(routing, r));
    plans.emplace_back(shape, rows.back().tiles());
    check_against_oracle(shape, rows.back(), plans.back().plan(rows.back()));
  }
  for (int me = 0; me < shape.ranks; ++me) {
    const std::int64_t slots = static_cast<std::int64_t>(routing.tokens(me)) * shape.top_k;
    std::vector<RowPlace> inverse(static_cast<std::size_t>(slots));
    std::map<std::pair<int, int>, RowOrigin> landing;  // (run, row) -> who was put there
    for (int source = 0; source < shape.ranks; ++source) {
      const auto& plan = plans[static_cast<std::size_t>(source)].outputs();
      const std::int64_t count = plan.prefix[*plan.tile_count * kMaxRanks + me];
      RC_ASSERT(invert_on_host(plan.row_table + me * plan.row_table_stride, count, source,
                               reserved_rows(shape), inverse.data(), slots) == kPlanWhole);
      const auto& origins = rows[static_cast<std::size_t>(source)].origin;
      for (std::size_t i = 0; i < origins.size(); ++i) {
        if (origins[i].rank != me) continue;
        const RowPlace at = plan.place[i];
        const int run = at.run >= kMaxRanks ? kMaxRanks + source : source;
        RC_ASSERT(landing.emplace(std::pair(run, at.row), origins[i]).second);
      }
    }
    for (std::int64_t s = 0; s < slots; ++s) {
      const RowPlace place = inverse[static_cast<std::size_t>(s)];
      const auto found = landing.find({place.run, place.row});
      RC_ASSERT(found != landing.end());
      RC_ASSERT(found->second.token == s / shape.top_k);
      RC_ASSERT(found->second.slot == s % shape.top_k);
      RC_ASSERT(place.run % kMaxRanks ==
                routing.expert[static_cast<std::size_t>(me)][static_cast<std::size_t>(s)] /
                    shape.experts_per_rank());
    }
    RC_ASSERT(static_cast<std::int64_t>(landing.size()) == slots);
  }
}

TEST(Plan, MatchesOracleOnEveryPatternAndRankCount) {
  EXPECT_TRUE(rc::check([] {
    const int ranks = *rc::gen::inRange(1, kMaxRanks + 1);
    const int local = *rc::gen::inRange(1, 9);
    const int top_k = *rc::gen::inRange(1, std::min(kMaxTopK, ranks * local) + 1);
    const int tokens = *rc::gen::inRange(0, 300);
    const double slack = *rc::gen::element(1.0, 1.03, 1.5, 4.0);
    const auto pattern = static_cast<Pattern>(*rc::gen::inRange(0, kPatternCount));
    const int call = *rc::gen::inRange(0, 20);
    const auto seed = *rc::gen::inRange<std::uint64_t>(0, 1u << 30);
    const Shape shape = small_shape(ranks, local, top_k, tokens, slack);
    RC_TAG(std::string(to_string(pattern)));
    check_round_trip(shape, make_routing(shape, pattern, seed, call));
  }));
}

// Any origins at all, not only those that a routing can produce.
TEST(Plan, MatchesOracleOnArbitraryOrigins) {
  EXPECT_TRUE(rc::check([] {
    const int ranks = *rc::gen::inRange(1, kMaxRanks + 1);
    const Shape shape = small_shape(ranks, 5, 3, 2000, 1.0);
    SourceRows rows;
    rows.expert_rows = *rc::gen::container<std::vector<std::int32_t>>(5, rc::gen::inRange(0, 400));
    for (const std::int32_t count : rows.expert_rows) {
      for (std::int32_t i = 0; i < count; ++i) {
        rows.origin.push_back({*rc::gen::inRange(0, 2000),
                               static_cast<std::int16_t>(*rc::gen::inRange(0, ranks)),
                               static_cast<std::int16_t>(*rc::gen::inRange(0, 3))});
      }
      rows.origin.resize((rows.origin.size() + kTileRows - 1) / kTileRows * kTileRows);
    }
    HostPlan plan(shape, rows.tiles());
    check_against_oracle(shape, rows, plan.plan(rows));
  }));
}

// A chunk's rows are one range per peer, the ranges of consecutive chunks touch, and together they
// are the run.
TEST(Plan, ChunksAreContiguousRangesPerPeer) {
  const Shape shape = small_shape(5, 4, 4, 900, 1.5);
  const SourceRows rows = rows_at(make_routing(shape, Pattern::kHotRank, 3), 0);
  HostPlan host(shape, rows.tiles());
  const PlanOutputs& plan = host.plan(rows);
  for (const std::int64_t chunk_tiles : {1, 2, 7, 1000}) {
    for (int d = 0; d < shape.ranks; ++d) {
      std::int32_t next = 0;
      for (std::int64_t t = 0; t < *plan.tile_count; t += chunk_tiles) {
        const std::int64_t last = std::min<std::int64_t>(t + chunk_tiles, *plan.tile_count);
        const RowRange range = rows_of_tiles(plan.prefix, t, last, d);
        ASSERT_EQ(range.begin, next);
        std::vector<bool> there(static_cast<std::size_t>(range.end - range.begin));
        for (std::int64_t r = t * kTileRows; r < last * kTileRows; ++r) {
          const RowPlace place = plan.place[r];
          if (place.run % kMaxRanks != d || place.run < 0) continue;
          const std::int64_t rank = place.row + (place.run >= kMaxRanks ? reserved_rows(shape) : 0);
          ASSERT_GE(rank, range.begin);
          ASSERT_LT(rank, range.end);
          there[static_cast<std::size_t>(rank - range.begin)] = true;
        }
        ASSERT_EQ(std::count(there.begin(), there.end(), false), 0);
        next = range.end;
      }
    }
  }
}

TEST(Plan, SpillsExactlyWhatPassesTheReservation) {
  const Shape shape = small_shape(4, 4, 2, 1000, 1.03);
  const SourceRows rows = rows_at(make_routing(shape, Pattern::kAllToOne, 3), 3);
  HostPlan host(shape, rows.tiles());
  const PlanOutputs& plan = host.plan(rows);
  std::int64_t spilled = 0;
  for (std::int64_t r = 0; r < rows.tiles() * kTileRows; ++r)
    spilled += plan.place[r].run >= kMaxRanks;
  // 2000 rows for each destination against ceil(500 * 1.03).
  EXPECT_EQ(reserved_rows(shape), 515);
  EXPECT_EQ(spilled, 4 * (2000 - 515));
}

TEST(Plan, ReportsFaultsAndStaysInBounds) {
  const Shape shape = small_shape(2, 2, 1, 400, 1.0);
  const SourceRows rows = rows_at(make_routing(shape, Pattern::kAllToOne, 3), 1);
  {
    HostPlan plan(shape, rows.tiles() - 1);
    EXPECT_EQ(*plan.plan(rows).fault, kPlanTilesOverCapacity);
    EXPECT_EQ(*plan.outputs().tile_count, 0);
  }
  {
    SourceRows bad = rows;
    bad.origin[5].rank = 2;
    bad.origin[9].slot = 1;
    HostPlan plan(shape, rows.tiles());
    EXPECT_EQ(*plan.plan(bad).fault, kPlanBadOrigin);
    EXPECT_EQ(plan.outputs().place[5].run, -1);
    EXPECT_EQ(plan.outputs().place[9].run, -1);
  }
  {
    SourceRows bad = rows;
    ASSERT_NE(rows.expert_rows.back() % kTileRows, 0);
    bad.origin.back().rank = 0;
    HostPlan plan(shape, rows.tiles());
    EXPECT_EQ(*plan.plan(bad).fault, kPlanBadPadding);
  }
  {
    const Shape fewer = small_shape(2, 2, 1, 10, 1.0);  // tables for 10 rows a pair
    HostPlan plan(fewer, rows.tiles());
    EXPECT_EQ(*plan.plan(rows).fault, kPlanTableOverflow);
  }
  EXPECT_EQ(describe_plan_fault(kPlanWhole), "");
  EXPECT_NE(describe_plan_fault(kPlanBadOrigin | kPlanBadPadding).find("; "), std::string::npos);
}

TEST(Plan, InverseSkipsSlotsOutsideTheTable) {
  const std::vector<std::int32_t> table{0, 3, 4, -1, 1};
  std::vector<RowPlace> inverse(4);
  EXPECT_EQ(invert_on_host(table.data(), 5, 2, 3, inverse.data(), 4), kPlanBadOrigin);
  EXPECT_EQ(inverse[0].run, 2);
  EXPECT_EQ(inverse[3].row, 1);
  EXPECT_EQ(inverse[2].run, -1);
  EXPECT_EQ(inverse[1].run, kMaxRanks + 2);  // row 4 of the run is row 1 of its spill
  EXPECT_EQ(inverse[1].row, 1);
}

TEST(Routing, RemoteFractionIsWhatWasAskedFor) {
  Shape shape = small_shape(2, 8, 6, 400, 2.0);
  for (const double remote : {0.0, 0.5, 0.875, 1.0}) {
    const Routing routing = make_remote_routing(shape, remote, 3);
    std::int64_t away = 0;
    for (int rank = 0; rank < 2; ++rank) {
      ASSERT_EQ(routing.tokens(rank), 400);
      const auto& experts = routing.expert[static_cast<std::size_t>(rank)];
      for (std::size_t t = 0; t < 400; ++t) {
        std::vector<std::int32_t> token(experts.begin() + static_cast<std::ptrdiff_t>(6 * t),
                                        experts.begin() + static_cast<std::ptrdiff_t>(6 * t + 6));
        for (const std::int32_t e : token) away += e / shape.experts_per_rank() != rank ? 1 : 0;
        std::sort(token.begin(), token.end());
        EXPECT_EQ(std::adjacent_find(token.begin(), token.end()), token.end());
      }
    }
    EXPECT_NEAR(static_cast<double>(away) / (2 * 400 * 6), remote, 0.02);
  }
  for (const double wrong : {1.5, -0.5, 1e30, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW((void)make_remote_routing(shape, wrong, 3), Error) << wrong;
  }
  shape.top_k = 9;  // more than a rank has experts
  EXPECT_THROW((void)make_remote_routing(shape, 1.0, 3), Error);
}

// Addresses past 4 GiB: 2^20 rows of 14,336 bytes.
TEST(Plan, AddressesAreSixtyFourBit) {
  RunBases bases;
  bases.row_bytes = wire_row_bytes(7168, WireFormat::kBf16);
  auto* origin = reinterpret_cast<unsigned char*>(std::uintptr_t{1} << 40);
  bases.base[3] = origin;
  EXPECT_EQ(bases.address({3, 1 << 20}) - origin, std::int64_t{14336} << 20);
}

}  // namespace
}  // namespace penstock::moe_stage2
