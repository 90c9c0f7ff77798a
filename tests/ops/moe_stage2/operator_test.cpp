// The CPU operator over ranks that are threads: bit for bit the plain sum over slots, whatever the
// routing, the transport, the chunk size, the slack and the timing.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <map>
#include <random>
#include <thread>
#include <tuple>

#include "penstock/core/error.h"
#include "penstock/fabric/guard.h"
#include "penstock/fabric/team.h"
#include "penstock/ops/moe_stage2/moe_stage2.h"
#include "penstock/ops/moe_stage2/routing.h"

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

// All ranks' operands of one call and what each has to get, made without plan or window.
class World {
 public:
  World(const Shape& shape, Pattern pattern, std::uint64_t seed, int call)
      : shape_(shape), routing_(make_routing(shape, pattern, seed, call)) {
    std::mt19937_64 random(seed + 977 * static_cast<std::uint64_t>(call));
    std::normal_distribution<float> normal;
    const auto values = [&](std::size_t count) {
      std::vector<E4M3> list(count);
      for (auto& x : list) x = E4M3::from_float(100.0f * normal(random));
      return list;
    };
    const auto scales = [&](std::size_t count) {
      std::vector<float> list(count);
      for (auto& x : list) x = std::exp(normal(random));
      return list;
    };
    for (int r = 0; r < shape.ranks; ++r) {
      Rank& rank = ranks_.emplace_back();
      rank.rows = rows_at(routing_, r);
      rank.act = values(rank.rows.origin.size() * 128);
      rank.act_scales = scales(rank.rows.origin.size());
      rank.weight = values(static_cast<std::size_t>(shape.experts_per_rank()) * 128 * 128);
      rank.weight_scales = scales(static_cast<std::size_t>(shape.experts_per_rank()));
      rank.slot_weight = scales(static_cast<std::size_t>(routing_.tokens(r) * shape.top_k));
      rank.out.assign(static_cast<std::size_t>(routing_.tokens(r)) * 128, Bf16::from_bits(0xA5A5));
    }
  }

  Operands operands(int r) {
    Rank& rank = ranks_[static_cast<std::size_t>(r)];
    Operands o;
    o.gemm = gemm(rank);
    o.expert_rows = rank.rows.expert_rows.data();
    o.origin = rank.rows.origin.data();
    o.tiles = rank.rows.tiles();
    o.weight = rank.slot_weight.data();
    o.tokens = routing_.tokens(r);
    o.out = rank.out.data();
    return o;
  }

  void expect_right(int r, const std::string& what) {
    // (token, slot) -> wire row, straight from the sources' origins.
    std::map<std::pair<int, int>, std::vector<unsigned char>> rows;
    for (Rank& source : ranks_) {
      std::size_t row = 0;
      for (std::size_t e = 0; e < source.rows.expert_rows.size(); ++e) {
        for (std::int32_t i = 0; i < source.rows.expert_rows[e]; ++i, ++row) {
          const RowOrigin origin = source.rows.origin[row];
          if (origin.rank != r) continue;
          auto& bytes = rows[{origin.token, origin.slot}];
          bytes.resize(static_cast<std::size_t>(wire_row_bytes(128, shape_.wire)));
          write_row(gemm(source), static_cast<std::int64_t>(row), static_cast<std::int32_t>(e),
                    shape_.wire, bytes.data());
        }
        row = (row + kTileRows - 1) / kTileRows * kTileRows;
      }
    }
    const Rank& rank = ranks_[static_cast<std::size_t>(r)];
    std::vector<const unsigned char*> slots(static_cast<std::size_t>(shape_.top_k));
    for (int t = 0; t < routing_.tokens(r); ++t) {
      for (int k = 0; k < shape_.top_k; ++k)
        slots[static_cast<std::size_t>(k)] = rows.at({t, k}).data();
      for (int c = 0; c < 128; ++c) {
        const Bf16 want = combine_element(slots.data(), rank.slot_weight.data() + t * shape_.top_k,
                                          shape_.top_k, 128, shape_.wire, c);
        ASSERT_EQ(rank.out[static_cast<std::size_t>(t * 128 + c)].bits, want.bits)
            << what << ": rank " << r << " token " << t << " column " << c;
      }
    }
  }

 private:
  struct Rank {
    SourceRows rows;
    std::vector<E4M3> act, weight;
    std::vector<float> act_scales, weight_scales, slot_weight;
    std::vector<Bf16> out;
  };
  static GemmOperands gemm(const Rank& rank) {
    return {rank.act.data(),
            rank.act_scales.data(),
            static_cast<std::int64_t>(rank.rows.origin.size()),
            rank.weight.data(),
            rank.weight_scales.data(),
            128,
            128};
  }
  Shape shape_;
  Routing routing_;
  std::vector<Rank> ranks_;
};

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
