// The CPU operator over ranks that are threads: bit for bit the unfused result, whatever the
// transport, the piece size and the timing.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "ops/a2a_gemm/random_operands.h"
#include "penstock/fabric/guard.h"
#include "penstock/ops/a2a_gemm/a2a_gemm.h"

namespace penstock::a2a_gemm {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || !defined(NDEBUG)
constexpr bool kSlowBuild = true;
#else
constexpr bool kSlowBuild = false;
#endif

constexpr std::chrono::seconds kDeadline{60};

void expect_same(const std::vector<std::byte>& got, const std::vector<std::byte>& want,
                 const Shape& shape, int rank, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  if (got == want) return;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) continue;
    const auto element = static_cast<std::int64_t>(i / 2);
    FAIL() << what << ": rank " << rank << " byte " << i << ", element (" << element / shape.columns
           << ", " << element % shape.columns << "): " << static_cast<int>(got[i]) << " for "
           << static_cast<int>(want[i]);
  }
}

// `calls` calls with fresh data each, checked after each.
void run_calls(const Shape& shape, const Options& options, int calls, std::uint64_t seed,
               bool delay_one = false) {
  std::vector<World> worlds;
  worlds.reserve(static_cast<std::size_t>(calls));
  for (int c = 0; c < calls; ++c) {
    worlds.emplace_back(shape, Data::kRandom, seed + static_cast<std::uint64_t>(c));
  }
  run_local_team(shape.ranks,
                 [&](const TeamHandle& team) {
                   const auto op = make_cpu_a2a_gemm(team, shape, options);
                   const int rank = team->rank();
                   std::mt19937_64 random(seed + static_cast<std::uint64_t>(rank));
                   for (int c = 0; c < calls; ++c) {
                     if (delay_one && random() % 3 == 0) {
                       std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
                     }
                     World& world = worlds[static_cast<std::size_t>(c)];
                     op->run({}, world.rank(rank).operands);
                     expect_same(world.rank(rank).out, world.expected(rank), shape, rank,
                                 "call " + std::to_string(c));
                   }
                   team->barrier();
                 },
                 {.deadline = kDeadline});
}

struct Case {
  const char* name;
  Shape shape;
  TransportKind transport;
  std::int32_t row_block_rows;
};

Shape uneven(std::vector<std::int32_t> rows, std::int32_t depth, std::int32_t columns,
             Format format) {
  Shape shape;
  shape.ranks = static_cast<std::int32_t>(rows.size());
  std::copy(rows.begin(), rows.end(), shape.rows.begin());
  shape.depth = depth;
  shape.columns = columns;
  shape.format = format;
  return shape;
}

class OperatorTest : public testing::TestWithParam<Case> {};

TEST_P(OperatorTest, EqualsTheUnfusedResultBitForBit) {
  const Case& c = GetParam();
  for (const Fuse fuse : {Fuse::kAlways, Fuse::kNever}) {
    Options options;
    options.transport = c.transport;
    options.fuse = fuse;
    options.row_block_rows = c.row_block_rows;
    run_calls(c.shape, options, 3, 17);
  }
}

constexpr TransportKind kCe = TransportKind::kCopyEngine;
constexpr TransportKind kSm = TransportKind::kSm;
constexpr TransportKind kDirect = TransportKind::kDirect;
constexpr Format kB = Format::kBf16;
constexpr Format kF = Format::kFp8;

INSTANTIATE_TEST_SUITE_P(
    Shapes, OperatorTest,
    testing::Values(
        Case{"one_rank", even_shape(1, 80, 96, 48, kB), kCe, 256},
        Case{"two_ranks", even_shape(2, 288, 64, 32, kB), kCe, 256},
        Case{"two_ranks_fp8", even_shape(2, 288, 272, 144, kF), kCe, 256},
        Case{"two_ranks_direct", even_shape(2, 528, 64, 16, kB), kDirect, 256},
        Case{"three_ranks_sm", even_shape(3, 528, 48, 32, kB), kSm, 256},
        Case{"four_ranks_uneven", uneven({16, 0, 560, 272}, 80, 32, kB), kCe, 256},
        Case{"four_ranks_uneven_fp8", uneven({0, 16, 304, 32}, 144, 48, kF), kDirect, 256},
        Case{"five_ranks", even_shape(5, 32, 16, 16, kB), kSm, 256},
        Case{"six_ranks", even_shape(6, 48, 32, 16, kF), kCe, 512},
        Case{"seven_ranks_one_with_rows", uneven({0, 0, 0, 544, 0, 0, 0}, 32, 16, kB), kCe, 256},
        Case{"eight_ranks", even_shape(8, 272, 32, 32, kB), kCe, 256},
        Case{"eight_ranks_fp8", even_shape(8, 32, 128, 32, kF), kSm, 0},
        Case{"nobody_has_rows", even_shape(2, 0, 32, 32, kB), kCe, 0}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(OperatorStressTest, AThousandCallsWithNewDataAndADelayedRank) {
  Options options;
  options.fuse = Fuse::kAlways;
  options.row_block_rows = 256;
  options.engine.max_delay = std::chrono::microseconds(200);
  options.engine.reorder_peers = true;
  run_calls(uneven({272, 16, 32}, 16, 16, kB), options, kSlowBuild ? 60 : 1000, 99, true);
}

TEST(OperatorStressTest, DirectStoresAThousandCalls) {
  Options options;
  options.fuse = Fuse::kAlways;
  options.transport = kDirect;
  run_calls(even_shape(2, 48, 32, 16, kF), options, kSlowBuild ? 60 : 1000, 98, true);
}

// A rank ends no call before its peer has begun it: it multiplies that call's chunk, not an old
// one.
TEST(OperatorProtocolTest, NoCallEndsBeforeThePeerHasSent) {
  const Shape shape = uneven({32, 32}, 32, 16, kB);
  std::atomic<int> finished{0};
  run_local_team(2,
                 [&](const TeamHandle& team) {
                   Options options;
                   options.fuse = Fuse::kAlways;
                   const auto op = make_cpu_a2a_gemm(team, shape, options);
                   std::vector<World> worlds;
                   for (int c = 0; c < 4; ++c) {
                     worlds.emplace_back(shape, Data::kRandom, 40 + static_cast<std::uint64_t>(c));
                   }
                   for (int c = 0; c < 4; ++c) {
                     if (team->rank() == 1) {
                       std::this_thread::sleep_for(std::chrono::milliseconds(5));
                       EXPECT_LE(finished.load(), c);
                     }
                     op->run({}, worlds[static_cast<std::size_t>(c)].rank(team->rank()).operands);
                     if (team->rank() == 0) finished.fetch_add(1);
                     expect_same(worlds[static_cast<std::size_t>(c)].rank(team->rank()).out,
                                 worlds[static_cast<std::size_t>(c)].expected(team->rank()), shape,
                                 team->rank(), "call " + std::to_string(c));
                   }
                   team->barrier();
                 },
                 {.deadline = kDeadline});
}

// A rank that only sends (it has no rows) runs ahead by exactly two calls.
TEST(OperatorProtocolTest, ASenderRunsTwoCallsAheadAndThenWaits) {
  const Shape shape = uneven({0, 32}, 32, 16, kB);
  std::atomic<int> sent{0};
  std::atomic<int> received{0};
  run_local_team(2,
                 [&](const TeamHandle& team) {
                   Options options;
                   options.fuse = Fuse::kAlways;
                   const auto op = make_cpu_a2a_gemm(team, shape, options);
                   std::vector<World> worlds;
                   for (int c = 0; c < 6; ++c) {
                     worlds.emplace_back(shape, Data::kRandom, 60 + static_cast<std::uint64_t>(c));
                   }
                   for (int c = 0; c < 6; ++c) {
                     auto& world = worlds[static_cast<std::size_t>(c)];
                     if (team->rank() == 0) {
                       op->run({}, world.rank(0).operands);
                       const int now = sent.fetch_add(1) + 1;
                       EXPECT_LE(now, received.load() + static_cast<int>(kCallsInFlight) + 1);
                       // X may be rewritten at once.
                       auto& x = world.rank(0).x;
                       x.assign(x.size(), std::byte{0x7F});
                     } else {
                       if (c == 0) {
                         const auto give_up = std::chrono::steady_clock::now() + kDeadline;
                         while (sent.load() < static_cast<int>(kCallsInFlight) &&
                                std::chrono::steady_clock::now() < give_up) {
                           std::this_thread::yield();
                         }
                         EXPECT_EQ(sent.load(), static_cast<int>(kCallsInFlight));
                         std::this_thread::sleep_for(std::chrono::milliseconds(20));
                         EXPECT_EQ(sent.load(), static_cast<int>(kCallsInFlight))
                             << "a slot was overwritten";
                       }
                       // The expectation is made from a world of its own: rank 0 spoils its X.
                       World fresh(shape, Data::kRandom, 60 + static_cast<std::uint64_t>(c));
                       op->run({}, world.rank(1).operands);
                       received.fetch_add(1);
                       expect_same(world.rank(1).out, fresh.expected(1), shape, 1,
                                   "call " + std::to_string(c));
                     }
                   }
                   team->barrier();
                 },
                 {.deadline = kDeadline});
}

TEST(OperatorFaultTest, AMissingRankIsNamedAndRearmBringsTheOperatorBack) {
  const Shape shape = even_shape(3, 32, 32, 16, kB);
  run_local_team(3,
                 [&](const TeamHandle& team) {
                   Options options;
                   options.fuse = Fuse::kAlways;
                   options.deadline = std::chrono::seconds(2);
                   const auto op = make_cpu_a2a_gemm(team, shape, options);
                   World world(shape, Data::kRandom, 7);
                   if (team->rank() != 2) {
                     try {
                       op->run({}, world.rank(team->rank()).operands);
                       ADD_FAILURE() << "rank 2 never came";
                     } catch (const Fault& fault) {
                       EXPECT_EQ(fault.record().region, 4) << fault.what();
                       EXPECT_EQ(fault.record().peer, 2) << fault.what();
                     }
                     EXPECT_THROW(team->check(), Fault);
                   } else {
                     while (!team->faulted()) {
                       std::this_thread::sleep_for(std::chrono::milliseconds(1));
                     }
                   }
                   team->rearm();
                   for (int c = 0; c < 4; ++c) {
                     World again(shape, Data::kRandom, 70 + static_cast<std::uint64_t>(c));
                     op->run({}, again.rank(team->rank()).operands);
                     expect_same(again.rank(team->rank()).out, again.expected(team->rank()), shape,
                                 team->rank(), "after rearm");
                   }
                   team->barrier();
                 },
                 {.deadline = std::chrono::seconds(20)});
}

TEST(OperatorFaultTest, AFailedCopyFaultsEveryRank) {
  const Shape shape = even_shape(2, 32, 32, 16, kB);
  std::atomic<int> faults{0};
  run_local_team(2,
                 [&](const TeamHandle& team) {
                   Options options;
                   options.fuse = Fuse::kAlways;
                   if (team->rank() == 1) options.engine.fail_after_copies = 0;
                   World world(shape, Data::kRandom, 7);
                   // The fault may overtake the other rank's last step of construction.
                   try {
                     const auto op = make_cpu_a2a_gemm(team, shape, options);
                     op->run({}, world.rank(team->rank()).operands);
                     op->run({}, world.rank(team->rank()).operands);
                     op->run({}, world.rank(team->rank()).operands);
                   } catch (const Fault& fault) {
                     EXPECT_EQ(fault.record().cause,
                               static_cast<std::uint32_t>(FaultCause::kTransport));
                     ++faults;
                   }
                 },
                 {.deadline = std::chrono::seconds(20)});
  EXPECT_EQ(faults.load(), 2);
}

TEST(OperatorRefusalTest, DifferentShapesAreRefusedOnEveryRank) {
  std::atomic<int> refused{0};
  run_local_team(2,
                 [&](const TeamHandle& team) {
                   const Shape shape = even_shape(2, 32, 32, team->rank() == 0 ? 16 : 32, kB);
                   try {
                     (void)make_cpu_a2a_gemm(team, shape);
                   } catch (const Error& error) {
                     EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
                     EXPECT_NE(std::string(error.what()).find("columns=32"), std::string::npos);
                     ++refused;
                   }
                 },
                 {.deadline = kDeadline});
  EXPECT_EQ(refused.load(), 2);
}

TEST(OperatorRefusalTest, OperandsAreChecked) {
  const Shape shape = even_shape(1, 32, 128, 16, kF);
  run_local_team(1, [&](const TeamHandle& team) {
    const auto op = make_cpu_a2a_gemm(team, shape);
    World world(shape, Data::kRandom, 1);
    const auto refuses = [&](auto change, const char* word) {
      Operands o = world.rank(0).operands;
      change(o);
      try {
        op->run({}, o);
        ADD_FAILURE() << word;
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
      }
    };
    refuses([](Operands& o) { o.x = nullptr; }, "x is null");
    refuses([](Operands& o) { o.w = nullptr; }, "w is null");
    refuses([](Operands& o) { o.out = nullptr; }, "out is null");
    refuses([](Operands& o) { o.x_scales = nullptr; }, "x_scales");
    refuses([](Operands& o) { o.w_scales = nullptr; }, "w_scales");
    refuses([](Operands& o) { o.x_scale_stride = 24; }, "x_scale_stride is 24");
    op->run({}, world.rank(0).operands);
    expect_same(world.rank(0).out, world.expected(0), shape, 0, "after refusals");
  });
}

// bf16 rows quantised by the operator: the bits of rows that came quantised, and an error against
// the bf16 rows in f64 that is that of E4M3.
TEST(OperatorQuantiseTest, BitsOfQuantisedRowsAndTheStatedError) {
  const Shape shape = uneven({272, 16, 32}, 272, 48, kF);
  World world(shape, Data::kRandom, 5);
  const auto rows = world.take_bf16_rows(6);
  run_local_team(3,
                 [&](const TeamHandle& team) {
                   const int me = team->rank();
                   for (const TransportKind kind : {kCe, kDirect}) {
                     Options options;
                     options.transport = kind;
                     options.fuse = Fuse::kAlways;
                     options.quantise_x = true;
                     const auto op = make_cpu_a2a_gemm(team, shape, options);
                     Operands o = world.rank(me).operands;
                     o.x = rows[static_cast<std::size_t>(me)].data();
                     o.x_scales = nullptr;
                     op->run({}, o);
                     expect_same(world.rank(me).out, world.expected(me), shape, me, "quantised");
                     team->barrier();
                   }
                 },
                 {.deadline = kDeadline});
  const auto* w = reinterpret_cast<const E4M3*>(world.w().data());
  const auto* got = reinterpret_cast<const Bf16*>(world.rank(0).out.data());
  double error = 0.0;
  double norm = 0.0;
  for (std::int64_t i = 0; i < 272 * 48; i += 7) {
    const std::int64_t column = i % 48;
    double exact = 0.0;
    for (std::int64_t s = 0; s < 3; ++s) {
      for (std::int64_t k = 0; k < 272; ++k) {
        exact += static_cast<double>(
                     rows[static_cast<std::size_t>(s)][static_cast<std::size_t>(i / 48 * 272 + k)]
                         .to_float()) *
                 static_cast<double>(w[(s * 48 + column) * 272 + k].to_float()) *
                 static_cast<double>(world.w_scales()[static_cast<std::size_t>(s * 3 + k / 128)]);
      }
    }
    const double value = static_cast<double>(got[i].to_float());
    error += (value - exact) * (value - exact);
    norm += exact * exact;
  }
  const double relative = std::sqrt(error / norm);
  RecordProperty("relative_error", std::to_string(relative));
  EXPECT_GT(relative, 0.01);
  EXPECT_LT(relative, 0.035);
}

TEST(OperatorQuantiseTest, NeedsAnFp8Shape) {
  run_local_team(1, [&](const TeamHandle& team) {
    Options options;
    options.quantise_x = true;
    EXPECT_THROW((void)make_cpu_a2a_gemm(team, even_shape(1, 32, 32, 16, kB), options), Error);
  });
}

// In arrival order the bits may differ, on exact data they may not.
TEST(OperatorOrderTest, ArrivalOrderIsExactWhereSumsAreExact) {
  const Shape shape = even_shape(4, 272, 32, 16, kB);
  run_local_team(4,
                 [&](const TeamHandle& team) {
                   Options options;
                   options.order = ChunkOrder::kArrival;
                   options.fuse = Fuse::kAlways;
                   options.row_block_rows = 256;
                   options.engine.max_delay = std::chrono::microseconds(500);
                   options.engine.reorder_peers = true;
                   const auto op = make_cpu_a2a_gemm(team, shape, options);
                   for (int c = 0; c < 20; ++c) {
                     World world(shape, Data::kSmallIntegers, 80 + static_cast<std::uint64_t>(c));
                     if (team->rank() == c % 4)
                       std::this_thread::sleep_for(std::chrono::milliseconds(1));
                     op->run({}, world.rank(team->rank()).operands);
                     expect_same(world.rank(team->rank()).out, world.expected(team->rank()), shape,
                                 team->rank(), "call " + std::to_string(c));
                   }
                   team->barrier();
                 },
                 {.deadline = kDeadline});
}

TEST(OperatorCountersTest, MoveExactlyWhatTheShapeSays) {
  for (const TransportKind kind : {kCe, kSm, kDirect}) {
    const Shape shape = uneven({288, 16, 32}, 144, 32, kF);
    run_local_team(
        3,
        [&](const TeamHandle& team) {
          Options options;
          options.transport = kind;
          options.fuse = Fuse::kAlways;
          options.row_block_rows = 256;
          const auto op = make_cpu_a2a_gemm(team, shape, options);
          World world(shape, Data::kRandom, 5);
          op->run({}, world.rank(team->rank()).operands);
          team->barrier();
          double sent = 0.0;  // my rows of every peer
          for (int peer = 0; peer < 3; ++peer) {
            if (peer != team->rank()) {
              sent += shape.rows[static_cast<std::size_t>(peer)] * (144.0 + 2 * 4);
            }
          }
          const TransportCounters counters = op->counters();
          EXPECT_EQ(static_cast<double>(kind == kDirect ? counters.direct_bytes : counters.bytes),
                    sent);
          EXPECT_EQ(kind == kDirect ? counters.bytes : counters.direct_bytes, 0u);
          team->barrier();
        },
        {.deadline = kDeadline});
  }
}

}  // namespace
}  // namespace penstock::a2a_gemm
