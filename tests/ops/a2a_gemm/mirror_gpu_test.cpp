// The mirror on GPUs, 1 to 8 ranks on one GPU, and over all GPUs where there are several: bit for
// bit the unfused result, whatever the transport, and exact where the numbers allow it.
#include <atomic>
#include <cmath>
#include <random>
#include <thread>

#include "ops/a2a_gemm/cuda/operator.h"
#include "ops/a2a_gemm/gpu_ranks.h"
#include "ops/a2a_gemm/mirror_layout.h"
#include "penstock/core/error.h"

namespace penstock::a2a_gemm {
namespace {

using cuda::DeviceRank;

std::size_t out_bytes(const Shape& shape) {
  return static_cast<std::size_t>(total_rows(shape) * shape.columns * 2);
}

std::vector<std::byte> expected(World& world, int rank) {
  std::vector<std::byte> out(out_bytes(world.shape()));
  mirror_reference(world.shape(), rank, world.operands().data(), out.data());
  return out;
}

// out[row, column] of `rank` in f64, no roundings but the inputs'. X of a World has rows for all
// destinations; the mirror takes the first rows[source] of them.
double exact_element(World& world, int rank, std::int64_t row, std::int64_t column) {
  const Shape& s = world.shape();
  int source = 0;
  while (row >= row_offset(s, source) + s.rows[static_cast<std::size_t>(source)]) ++source;
  const Operands& o = world.operands()[static_cast<std::size_t>(source)];
  const std::int64_t x_row = row - row_offset(s, source);
  const std::int64_t w_row = std::int64_t{rank} * s.columns + column;
  double sum = 0.0;
  for (std::int64_t k = 0; k < s.depth; ++k) {
    if (s.format == Format::kBf16) {
      sum += static_cast<double>(static_cast<const Bf16*>(o.x)[x_row * s.depth + k].to_float()) *
             static_cast<double>(static_cast<const Bf16*>(o.w)[w_row * s.depth + k].to_float());
      continue;
    }
    const std::int64_t block = k / kScaleBlock;
    const std::int64_t w_scale =
        (std::int64_t{rank} * s.column_scale_blocks() + column / kScaleBlock) * s.scale_blocks() +
        block;
    sum += static_cast<double>(static_cast<const E4M3*>(o.x)[x_row * s.depth + k].to_float()) *
           static_cast<double>(o.x_scales[block * o.x_scale_stride + x_row]) *
           static_cast<double>(static_cast<const E4M3*>(o.w)[w_row * s.depth + k].to_float()) *
           static_cast<double>(o.w_scales[w_scale]);
  }
  return sum;
}

void expect_near_f64(const std::vector<std::byte>& bytes, World& world, int rank) {
  const Shape& shape = world.shape();
  const std::int64_t rows = total_rows(shape);
  const auto* got = reinterpret_cast<const Bf16*>(bytes.data());
  double error = 0.0;
  double norm = 0.0;
  std::mt19937_64 random(5);
  for (int i = 0; i < 500; ++i) {
    const auto row = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rows));
    const auto column =
        static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(shape.columns));
    const double exact = exact_element(world, rank, row, column);
    const double value = static_cast<double>(got[row * shape.columns + column].to_float());
    error += (value - exact) * (value - exact);
    norm += exact * exact;
  }
  EXPECT_LE(std::sqrt(error), 1e-2 * std::sqrt(norm)) << "rank " << rank;
}

struct Case {
  const char* name;
  Shape shape;
  bool spread = false;
};
class MirrorGpu : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    ASSERT_GT(cuda::device_count(), 0) << cuda::unavailable_reason();
    if (GetParam().spread && cuda::device_count() < 2) GTEST_SKIP() << "one GPU only";
  }
};

// Three calls with new data each, in every form and into poisoned results.
TEST_P(MirrorGpu, EqualsTheUnfusedResultBitForBit) {
  const Shape& shape = GetParam().shape;
  std::vector<World> worlds;
  worlds.reserve(3);
  worlds.emplace_back(shape, Data::kSmallIntegers, 11);
  worlds.emplace_back(shape, Data::kRandom, 12);
  worlds.emplace_back(shape, Data::kSmallIntegers, 13);
  run_ranks(shape.ranks, GetParam().spread, [&](const TeamHandle& team, int device) {
    const int me = team->rank();
    const auto rank = DeviceRank::create(team, device);
    const auto images = images_of(worlds, me);
    RankMemory memory(worlds[0], images[0], me, 1, out_bytes(shape));
    ScopedStream stream;
    const std::vector<Options> forms{
        with(Fuse::kNever), with(Fuse::kAlways), with(Fuse::kAlways, TransportKind::kSm),
        with(Fuse::kAlways, TransportKind::kDirect), with(Fuse::kNever, TransportKind::kSm)};
    std::vector<std::vector<std::byte>> unfused(worlds.size());
    for (std::size_t form = 0; form < forms.size(); ++form) {
      const auto op = make_cuda_gemm_a2a(rank, shape, forms[form]);
      ready(*op, team, stream.handle);
      for (std::size_t c = 0; c < worlds.size(); ++c) {
        memory.fill(images[c], stream.handle);
        op->run({stream.handle}, memory.operands);
        const auto got = memory.result(stream.handle);
        if (form == 0) {
          unfused[c] = got;
          if (c == 1) {
            expect_near_f64(got, worlds[c], me);
          } else {
            expect_same(got, expected(worlds[c], me), shape, me, "unfused");
          }
        } else {
          expect_same(got, unfused[c], shape, me, "form " + std::to_string(form));
        }
      }
      team->barrier();
    }
    EXPECT_FALSE(team->faulted());
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, MirrorGpu,
    testing::Values(Case{"one_rank", even_shape(1, 272, 96, 304, kB)},
                    Case{"two_ranks", even_shape(2, 528, 208, 304, kB)},
                    Case{"two_ranks_fp8", even_shape(2, 528, 272, 304, kF)},
                    Case{"three_ranks_fp8", uneven({272, 16, 400}, 144, 272, kF)},
                    Case{"four_ranks_one_without_rows", uneven({16, 0, 560, 272}, 80, 32, kB)},
                    Case{"five_ranks", even_shape(5, 32, 16, 16, kB)},
                    Case{"six_ranks_fp8", even_shape(6, 48, 32, 16, kF)},
                    Case{"seven_ranks_one_with_rows", uneven({0, 0, 0, 544, 0, 0, 0}, 32, 16, kB)},
                    Case{"eight_ranks", even_shape(8, 272, 64, 272, kB)},
                    Case{"eight_ranks_fp8", even_shape(8, 288, 128, 272, kF)},
                    Case{"two_ranks_spread", even_shape(2, 1040, 512, 784, kB), true},
                    Case{"eight_ranks_spread_fp8", even_shape(8, 272, 128, 272, kF), true}),
    [](const auto& test) { return std::string(test.param.name); });

// 1,000 calls on a small shape, new data in each, two calls in flight, one rank late at random.
void run_thousand(TransportKind transport, Format format, bool spread) {
  constexpr int kCalls = 1000;
  constexpr int kAtOnce = 8;
  const Shape shape = uneven({272, 16, 32}, 16, 16, format);
  std::vector<World> worlds;
  worlds.reserve(kAtOnce);
  for (int i = 0; i < kAtOnce; ++i) {
    worlds.emplace_back(shape, Data::kSmallIntegers, 90 + static_cast<std::uint64_t>(i));
  }
  run_ranks(3, spread, [&](const TeamHandle& team, int device) {
    const int me = team->rank();
    const auto op =
        make_cuda_gemm_a2a(DeviceRank::create(team, device), shape, with(Fuse::kAlways, transport));
    const auto images = images_of(worlds, me);
    RankMemory memory(worlds[0], images[0], me, kAtOnce, out_bytes(shape));
    ScopedStream stream;
    std::vector<std::vector<std::byte>> want;
    for (World& world : worlds) want.push_back(expected(world, me));
    ready(*op, team, stream.handle);
    std::mt19937_64 random(3);
    for (int c = 0; c < kCalls; c += kAtOnce) {
      for (std::size_t i = 0; i < kAtOnce; ++i) {
        if (random() % 24 == static_cast<std::uint64_t>(me)) {
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
        }
        memory.fill(images[i], stream.handle);
        op->run({stream.handle}, memory.operands);
        memory.fetch(i, stream.handle);
      }
      stream.wait();
      for (std::size_t i = 0; i < kAtOnce; ++i) {
        expect_same(memory.fetched(i), want[i], shape, me, "call " + std::to_string(c) + " and on");
      }
      if (testing::Test::HasFailure()) break;
    }
    EXPECT_FALSE(team->faulted());
    team->barrier();
  });
}
TEST(MirrorGpuStress, AThousandCallsByCopyEngine) {
  run_thousand(TransportKind::kCopyEngine, kB, false);
}
TEST(MirrorGpuStress, AThousandCallsBySms) { run_thousand(TransportKind::kSm, kF, false); }
TEST(MirrorGpuStress, AThousandCallsDirect) { run_thousand(TransportKind::kDirect, kB, false); }
TEST(MirrorGpuStress, AThousandCallsOverAllGpus) {
  if (cuda::device_count() < 2) GTEST_SKIP() << "one GPU only";
  run_thousand(TransportKind::kCopyEngine, kF, true);
}

// Graphs of one call and of two, replayed with new contents in the same memory.
TEST(MirrorGpuGraph, ReplaysTakeNewContents) {
  const Shape shape = even_shape(2, 528, 144, 272, kF);
  std::vector<World> worlds;
  worlds.reserve(3);
  for (std::uint64_t i = 0; i < 3; ++i) worlds.emplace_back(shape, Data::kSmallIntegers, 40 + i);
  for (const TransportKind transport :
       {TransportKind::kCopyEngine, TransportKind::kSm, TransportKind::kDirect}) {
    run_ranks(2, false, [&](const TeamHandle& team, int device) {
      const int me = team->rank();
      const auto op = make_cuda_gemm_a2a(DeviceRank::create(team, device), shape,
                                         with(Fuse::kAlways, transport));
      const auto images = images_of(worlds, me);
      RankMemory memory(worlds[0], images[0], me, 1, out_bytes(shape));
      ScopedStream stream;
      std::vector<std::vector<std::byte>> want;
      for (World& world : worlds) want.push_back(expected(world, me));
      ready(*op, team, stream.handle);
      for (const int calls : {1, 2}) {
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t exec = nullptr;
        PENSTOCK_CUDA_CHECK(
            cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < calls; ++i) op->run({stream.handle}, memory.operands);
        PENSTOCK_CUDA_CHECK(cudaStreamEndCapture(stream.handle, &graph));
        PENSTOCK_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
        PENSTOCK_CUDA_CHECK(cudaGraphUpload(exec, stream.handle));
        stream.wait();
        team->barrier();
        for (std::size_t replay = 0; replay < 12; ++replay) {
          memory.fill(images[replay % 3], stream.handle);
          PENSTOCK_CUDA_CHECK(cudaGraphLaunch(exec, stream.handle));
          op->track({stream.handle});
          expect_same(memory.result(stream.handle), want[replay % 3], shape, me,
                      "replay " + std::to_string(replay));
        }
        EXPECT_FALSE(team->faulted());
        team->barrier();
        (void)cudaGraphExecDestroy(exec);
        (void)cudaGraphDestroy(graph);
        team->barrier();
      }
      memory.fill(images[0], stream.handle);
      op->run({stream.handle}, memory.operands);
      expect_same(memory.result(stream.handle), want[0], shape, me, "eager");
      team->barrier();
    });
  }
}

// A rank that does not come: the others' kernels end at the deadline, the fault names it, and after
// rearm() the same operators give right results again.
TEST(MirrorGpuFault, AStoppedRankIsNamedAndRearmBringsTheOperatorBack) {
  const Shape shape = even_shape(3, 272, 64, 272, kB);
  std::vector<World> worlds;
  for (std::uint64_t i = 0; i < 5; ++i) worlds.emplace_back(shape, Data::kSmallIntegers, 70 + i);
  run_ranks(3, false, [&](const TeamHandle& team, int device) {
    const int me = team->rank();
    Options options = with(Fuse::kAlways);
    options.deadline = std::chrono::milliseconds(200);
    const auto op = make_cuda_gemm_a2a(DeviceRank::create(team, device), shape, options);
    const auto images = images_of(worlds, me);
    RankMemory memory(worlds[0], images[0], me, 1, out_bytes(shape));
    ScopedStream stream;
    memory.fill(images[0], stream.handle);
    stream.wait();
    ready(*op, team, stream.handle);
    const auto start = std::chrono::steady_clock::now();
    if (me != 2) {
      op->run({stream.handle}, memory.operands);
      stream.wait();
    }
    while (!team->faulted() && std::chrono::steady_clock::now() - start < kDeadline / 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_TRUE(team->faulted());
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
    const auto record = team->fault();
    ASSERT_TRUE(record.has_value());
    EXPECT_EQ(record->peer, 2) << describe(*record);
    EXPECT_EQ(record->region, kMirrorArrived) << describe(*record);
    EXPECT_THROW(op->run({stream.handle}, memory.operands), Fault);
    team->rearm();
    for (std::size_t c = 1; c < worlds.size(); ++c) {
      memory.fill(images[c], stream.handle);
      op->run({stream.handle}, memory.operands);
      expect_same(memory.result(stream.handle), expected(worlds[c], me), shape, me, "after rearm");
    }
    team->barrier();
  });
}

TEST(MirrorGpuRefusal, EveryRankIsRefusedInWords) {
  std::atomic<int> refused{0};
  run_ranks(2, false, [&](const TeamHandle& team, int device) {
    const auto rank = DeviceRank::create(team, device);
    const auto refuses = [&](const Shape& shape, const Options& options, const char* word) {
      try {
        (void)make_cuda_gemm_a2a(rank, shape, options);
        ADD_FAILURE() << word;
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
        ++refused;
      }
    };
    const Shape shape = even_shape(2, 32, 32, 16, kB);
    Options options = with(Fuse::kAuto);
    options.order = ChunkOrder::kArrival;
    refuses(shape, options, "arrival order");
    options = with(Fuse::kAuto);
    options.copy_ctas = 7;
    refuses(shape, options, "copy_ctas is 7");
    refuses(even_shape(2, 32, 32, team->rank() == 0 ? 16 : 32, kB), with(Fuse::kAuto),
            "columns=32");
    team->barrier();
  });
  EXPECT_EQ(refused.load(), 6);
}

}  // namespace
}  // namespace penstock::a2a_gemm
