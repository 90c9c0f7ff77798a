// The CPU operator over ranks that are threads: bit for bit the plain sum over slots, whatever the
// routing, the transport, the chunk size, the slack and the timing.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <tuple>

#include "ops/moe_stage2/world.h"
#include "penstock/core/error.h"
#include "penstock/fabric/guard.h"
#include "penstock/fabric/team.h"
#include "penstock/ops/moe_stage2/moe_stage2.h"

namespace penstock::moe_stage2 {
namespace {

constexpr std::chrono::seconds kDeadline{60};

Shape make_shape(int ranks, int local, int top_k, std::int64_t tokens, double slack,
                 WireFormat wire) {
  Shape s;
  s.ranks = ranks;
  s.experts = ranks * local;
  s.top_k = top_k;
  s.hidden = 128;
  s.intermediate = 128;
  s.max_tokens_per_rank = tokens;
  s.row_slack = slack;
  s.wire = wire;
  return s;
}

// `calls` calls with fresh data and routing each, checked after each; all ranks share the worlds.
void run_calls(const Shape& shape, Pattern pattern, const Options& options, int calls,
               std::uint64_t seed, bool delay = false) {
  std::vector<World> worlds;
  for (int c = 0; c < calls; ++c) worlds.emplace_back(shape, pattern, seed, c);
  run_local_team(shape.ranks,
                 [&](const TeamHandle& team) {
                   const auto op = make_cpu_moe_stage2(team, shape, options);
                   std::mt19937_64 random(seed + static_cast<std::uint64_t>(team->rank()));
                   for (int c = 0; c < calls; ++c) {
                     if (delay && random() % 3 == 0) {
                       std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
                     }
                     op->run({}, worlds[static_cast<std::size_t>(c)].operands(team->rank()));
                   }
                   team->barrier();
                 },
                 {.deadline = kDeadline});
  for (int c = 0; c < calls; ++c) {
    for (int r = 0; r < shape.ranks; ++r) {
      worlds[static_cast<std::size_t>(c)].expect_right(
          r, std::string(to_string(pattern)) + " over " +
                 std::string(to_string(options.transport)) + ", call " + std::to_string(c));
    }
  }
}

class MoeStage2Patterns : public testing::TestWithParam<int> {};

TEST_P(MoeStage2Patterns, EveryTransportAndChunkSizeGivesThePlainSum) {
  const auto pattern = static_cast<Pattern>(GetParam());
  for (const int ranks : {1, 2, 3, 8}) {
    for (const TransportKind transport :
         {TransportKind::kCopyEngine, TransportKind::kSm, TransportKind::kDirect}) {
      Options options;
      options.transport = transport;
      options.tiles_per_chunk = transport == TransportKind::kSm ? 3 : 1;
      options.fuse = transport != TransportKind::kSm || ranks != 2;
      const WireFormat wire = (ranks + GetParam()) % 2 == 0 ? WireFormat::kFp8 : WireFormat::kBf16;
      run_calls(make_shape(ranks, 4, 3, ranks == 8 ? 5 : 17, 1.5, wire), pattern, options, 2, 5);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, MoeStage2Patterns, testing::Range(0, kPatternCount),
                         [](const testing::TestParamInfo<int>& param) {
                           return std::string(to_string(static_cast<Pattern>(param.param)));
                         });

// No slack, everything to one rank, hostile timing, many calls: most rows spill, none is lost.
TEST(MoeStage2Operator, SpillsUnderHostileTimingStayExact) {
  for (const TransportKind transport : {TransportKind::kCopyEngine, TransportKind::kDirect}) {
    Options options;
    options.transport = transport;
    options.tiles_per_chunk = 1;
    options.engine.max_delay = std::chrono::microseconds(300);
    options.engine.reorder_peers = true;
    run_calls(make_shape(3, 4, 3, 12, 1.0, WireFormat::kFp8), Pattern::kAllToOne, options, 30, 9,
              true);
  }
}

TEST(MoeStage2Operator, ReportsRowsSpillsAndMovedBytes) {
  const Shape shape = make_shape(2, 4, 2, 10, 1.0, WireFormat::kFp8);
  World world(shape, Pattern::kAllToOne, 3, 0);
  run_local_team(
      2,
      [&](const TeamHandle& team) {
        Options options;
        options.tiles_per_chunk = 1;
        const auto op = make_cpu_moe_stage2(team, shape, options);
        op->run({}, world.operands(team->rank()));
        team->barrier();
        const bool target =
            team->rank() == 1;  // all twenty rows of each rank are here; ten are reserved
        EXPECT_EQ(op->facts().rows[0], target ? 20 : 0);
        EXPECT_EQ(op->facts().spilled[0], target ? 10 : 0);
        EXPECT_EQ(op->facts().spilled[1], target ? 10 : 0);
        const std::uint64_t rows =
            target ? 10u * static_cast<std::uint64_t>(wire_row_bytes(128, shape.wire)) : 0;
        const std::uint64_t table = 128 + (target ? 80 : 0);
        EXPECT_EQ(op->counters().bytes, rows + table);
        EXPECT_EQ(op->counters().direct_bytes, 0u);
        team->barrier();
      },
      {.deadline = kDeadline});
  for (int r = 0; r < 2; ++r) world.expect_right(r, "spill");
}

TEST(MoeStage2Operator, TwoInstancesDoNotDisturbEachOther) {
  const Shape shape = make_shape(2, 4, 2, 9, 1.5, WireFormat::kBf16);
  World first(shape, Pattern::kBalanced, 3, 0);
  World second(shape, Pattern::kHotRank, 4, 1);
  run_local_team(2,
                 [&](const TeamHandle& team) {
                   const auto a = make_cpu_moe_stage2(team, shape);
                   const auto b = make_cpu_moe_stage2(team, shape);
                   for (int i = 0; i < 3; ++i) {
                     a->run({}, first.operands(team->rank()));
                     b->run({}, second.operands(team->rank()));
                   }
                   team->barrier();
                 },
                 {.deadline = kDeadline});
  for (int r = 0; r < 2; ++r) {
    first.expect_right(r, "first");
    second.expect_right(r, "second");
  }
}

TEST(MoeStage2Fault, AMissingRankIsNamedAndRearmBringsTheOperatorBack) {
  const Shape shape = make_shape(3, 2, 2, 6, 1.5, WireFormat::kFp8);
  World lost(shape, Pattern::kBalanced, 3, 0);
  std::vector<World> worlds;
  for (int c = 0; c < 4; ++c) worlds.emplace_back(shape, Pattern::kBalanced, 4, c);
  run_local_team(3,
                 [&](const TeamHandle& team) {
                   Options options;
                   options.deadline = std::chrono::seconds(2);
                   const auto op = make_cpu_moe_stage2(team, shape, options);
                   if (team->rank() != 2) {
                     try {
                       op->run({}, lost.operands(team->rank()));
                       ADD_FAILURE() << "rank 2 never came";
                     } catch (const Fault& fault) {
                       EXPECT_EQ(fault.record().peer, 2) << fault.what();
                     }
                     EXPECT_THROW(team->check(), Fault);
                   } else {
                     while (!team->faulted()) {
                       std::this_thread::sleep_for(std::chrono::milliseconds(1));
                     }
                   }
                   team->rearm();
                   for (World& world : worlds) op->run({}, world.operands(team->rank()));
                   team->barrier();
                 },
                 {.deadline = std::chrono::seconds(20)});
  for (World& world : worlds) {
    for (int r = 0; r < 3; ++r) world.expect_right(r, "after rearm");
  }
}

TEST(MoeStage2Refusal, OperandsAreChecked) {
  const Shape shape = make_shape(1, 4, 2, 9, 1.5, WireFormat::kFp8);
  World world(shape, Pattern::kBalanced, 3, 0);
  run_local_team(1, [&](const TeamHandle& team) {
    const auto op = make_cpu_moe_stage2(team, shape);
    const auto refuses = [&](auto change, const char* words) {
      Operands o = world.operands(0);
      change(o);
      try {
        op->run({}, o);
        ADD_FAILURE() << "accepted: " << words;
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
        EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
      }
    };
    refuses([](Operands& o) { o.tokens = 10; }, "10 tokens");
    refuses([](Operands& o) { o.expert_rows = nullptr; }, "expert_rows is null");
    refuses([](Operands& o) { o.gemm.act = nullptr; }, "act");
    refuses([](Operands& o) { o.out = nullptr; }, "out is null");
    refuses([](Operands& o) { o.tiles -= 1; }, "more tiles");
    refuses([](Operands& o) { o.gemm.hidden = 256; }, "256 x 128");
    op->run({}, world.operands(0));
  });
  world.expect_right(0, "after refusals");
}

TEST(MoeStage2Refusal, DifferentShapesAreRefusedOnEveryRank) {
  std::atomic<int> refused{0};
  run_local_team(2,
                 [&](const TeamHandle& team) {
                   const Shape shape =
                       make_shape(2, 4, 2, team->rank() == 0 ? 9 : 10, 1.5, WireFormat::kFp8);
                   try {
                     (void)make_cpu_moe_stage2(team, shape);
                   } catch (const Error& error) {
                     EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
                     ++refused;
                   }
                 },
                 {.deadline = kDeadline});
  EXPECT_EQ(refused.load(), 2);
}

TEST(MoeStage2Layout, WindowBytesFollowTheSlack) {
  Options options;
  Shape shape = make_shape(8, 32, 8, 4096, 1.5, WireFormat::kFp8);
  const std::uint64_t tight = window_bytes(shape, options);
  shape.row_slack = 8.0;
  // A slack that holds every pair's worst case needs no spill region.
  EXPECT_LT(window_bytes(shape, options) / 2, tight * 8);
  options.transport = TransportKind::kDirect;
  EXPECT_LT(window_bytes(shape, options), window_bytes(shape, Options{}));
}

}  // namespace
}  // namespace penstock::moe_stage2
