// GEMM, then all-to-all: bit for bit the unfused result, whatever transport, piece size and timing.
#include "penstock/ops/a2a_gemm/mirror.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <random>
#include <thread>

#include "ops/a2a_gemm/random_operands.h"
#include "penstock/core/error.h"

namespace penstock::a2a_gemm {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || !defined(NDEBUG)
constexpr int kManyCalls = 40;
#else
constexpr int kManyCalls = 1000;
#endif
constexpr Format kB = Format::kBf16;
constexpr Format kF = Format::kFp8;
constexpr std::chrono::seconds kDeadline{60};

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

// The mirror's result of `rank`, and its size.
std::vector<std::byte> expected(World& world, int rank) {
  const Shape& s = world.shape();
  std::vector<std::byte> out(static_cast<std::size_t>(total_rows(s) * s.columns * 2));
  mirror_reference(s, rank, world.operands().data(), out.data());
  return out;
}

// X of a World has rows for all destinations; the mirror takes the first rows[rank] of them.
void run_calls(const Shape& shape, const Options& options, int calls, bool delay) {
  constexpr int kWorlds = 4;
  std::vector<World> worlds;
  for (int i = 0; i < kWorlds; ++i) {
    worlds.emplace_back(shape, Data::kRandom, 300 + static_cast<std::uint64_t>(i));
  }
  run_local_team(shape.ranks,
                 [&](const TeamHandle& team) {
                   const int me = team->rank();
                   const auto op = make_cpu_gemm_a2a(team, shape, options);
                   std::vector<std::vector<std::byte>> want;
                   for (World& world : worlds) want.push_back(expected(world, me));
                   std::vector<std::byte> out(want[0].size());
                   std::mt19937_64 random(static_cast<std::uint64_t>(me));
                   for (int c = 0; c < calls; ++c) {
                     if (delay && random() % 16 == 0) {
                       std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
                     }
                     const auto world = static_cast<std::size_t>(c % kWorlds);
                     out.assign(out.size(), std::byte{0xA5});
                     Operands o = worlds[world].operands()[static_cast<std::size_t>(me)];
                     o.out = out.data();
                     op->run({}, o);
                     ASSERT_TRUE(out == want[world]) << "rank " << me << ", call " << c;
                   }
                   team->barrier();
                 },
                 {.deadline = kDeadline});
}

struct Case {
  const char* name;
  Shape shape;
  TransportKind transport;
};
class MirrorTest : public testing::TestWithParam<Case> {};

TEST_P(MirrorTest, EqualsTheUnfusedResultBitForBit) {
  for (const Fuse fuse : {Fuse::kAlways, Fuse::kNever, Fuse::kAuto}) {
    Options options;
    options.transport = GetParam().transport;
    options.fuse = fuse;
    options.row_block_rows = 256;
    run_calls(GetParam().shape, options, 3, false);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, MirrorTest,
    testing::Values(
        Case{"one_rank", even_shape(1, 80, 96, 48, kB), TransportKind::kCopyEngine},
        Case{"two_ranks", even_shape(2, 288, 64, 32, kB), TransportKind::kCopyEngine},
        Case{"two_ranks_fp8", even_shape(2, 272, 144, 48, kF), TransportKind::kSm},
        Case{"three_ranks_direct", even_shape(3, 528, 48, 16, kB), TransportKind::kDirect},
        Case{"four_ranks_uneven", uneven({16, 0, 272, 32}, 144, 16, kF),
             TransportKind::kCopyEngine},
        Case{"seven_ranks_one_with_rows", uneven({0, 0, 0, 272, 0, 0, 0}, 32, 16, kB),
             TransportKind::kDirect},
        Case{"eight_ranks", even_shape(8, 48, 32, 32, kB), TransportKind::kSm},
        Case{"nobody_has_rows", even_shape(2, 0, 32, 32, kB), TransportKind::kCopyEngine}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(MirrorStressTest, ManyCallsWithNewDataAndLateRanks) {
  Options options;
  options.fuse = Fuse::kAlways;
  options.row_block_rows = 256;
  options.engine.max_delay = std::chrono::microseconds(100);
  options.engine.reorder_peers = true;
  run_calls(uneven({272, 16, 32}, 16, 16, kB), options, kManyCalls, true);
}

// The oracle itself against f64, so that it is no circle.
TEST(MirrorReferenceTest, StaysWithinOnePercentOfF64) {
  const Shape shape = uneven({32, 16}, 80, 48, kB);
  World world(shape, Data::kRandom, 9);
  const auto bytes = expected(world, 1);
  const auto* got = reinterpret_cast<const Bf16*>(bytes.data());
  double error = 0.0;
  double norm = 0.0;
  for (std::int64_t i = 0; i < 48 * 48; ++i) {
    const std::int64_t row = i / 48;
    const int source = row < 32 ? 0 : 1;
    const Operands& o = world.operands()[static_cast<std::size_t>(source)];
    const auto* x = static_cast<const Bf16*>(o.x) + (source == 0 ? row : row - 32) * 80;
    const auto* w = static_cast<const Bf16*>(o.w) + (48 + i % 48) * 80;  // slab of rank 1
    double exact = 0.0;
    for (int k = 0; k < 80; ++k) {
      exact += static_cast<double>(x[k].to_float()) * static_cast<double>(w[k].to_float());
    }
    const double value = static_cast<double>(got[i].to_float());
    error += (value - exact) * (value - exact);
    norm += exact * exact;
  }
  EXPECT_LE(std::sqrt(error), 1e-2 * std::sqrt(norm));
}

TEST(MirrorFaultTest, AMissingRankIsNamedAndRearmBringsTheOperatorBack) {
  const Shape shape = even_shape(3, 32, 32, 16, kB);
  World world(shape, Data::kRandom, 7);
  run_local_team(3,
                 [&](const TeamHandle& team) {
                   const int me = team->rank();
                   Options options;
                   options.deadline = std::chrono::seconds(2);
                   const auto op = make_cpu_gemm_a2a(team, shape, options);
                   const auto want = expected(world, me);
                   std::vector<std::byte> out(want.size());
                   Operands o = world.operands()[static_cast<std::size_t>(me)];
                   o.out = out.data();
                   if (me != 2) {
                     try {
                       op->run({}, o);
                       ADD_FAILURE() << "rank 2 never came";
                     } catch (const Fault& fault) {
                       EXPECT_EQ(fault.record().peer, 2) << fault.what();
                     }
                   } else {
                     while (!team->faulted()) {
                       std::this_thread::sleep_for(std::chrono::milliseconds(1));
                     }
                   }
                   team->rearm();
                   for (int c = 0; c < 3; ++c) {
                     out.assign(out.size(), std::byte{0xA5});
                     op->run({}, o);
                     EXPECT_TRUE(out == want) << "rank " << me;
                   }
                   team->barrier();
                 },
                 {.deadline = std::chrono::seconds(20)});
}

TEST(MirrorRefusalTest, OptionsAndOperandsAreChecked) {
  const Shape shape = even_shape(1, 32, 128, 16, kF);
  run_local_team(1, [&](const TeamHandle& team) {
    Options options;
    options.quantise_x = true;
    EXPECT_THROW((void)make_cpu_gemm_a2a(team, shape, options), Error);
    options = {};
    options.order = ChunkOrder::kArrival;
    EXPECT_THROW((void)make_cpu_gemm_a2a(team, shape, options), Error);
    const auto op = make_cpu_gemm_a2a(team, shape);
    World world(shape, Data::kRandom, 1);
    Operands o = world.rank(0).operands;
    o.x_scale_stride = 24;
    EXPECT_THROW(op->run({}, o), Error);
    o = world.rank(0).operands;
    o.w = nullptr;
    EXPECT_THROW(op->run({}, o), Error);
    op->run({}, world.rank(0).operands);
    EXPECT_EQ(world.rank(0).out, expected(world, 0));
  });
}

}  // namespace
}  // namespace penstock::a2a_gemm
