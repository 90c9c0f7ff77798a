// The CUDA operator over the fabric: 1 to 8 ranks on one GPU, and over all GPUs where there are
// several.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "fabric/cuda/window_backend.h"
#include "ops/a2a_gemm/cuda/call_kernels.h"
#include "ops/a2a_gemm/cuda/operator.h"
#include "ops/a2a_gemm/gpu_ranks.h"
#include "penstock/core/error.h"
#include "penstock/ops/a2a_gemm/layout.h"

namespace penstock::a2a_gemm {
namespace {

using cuda::DeviceBuffer;
using cuda::DeviceRank;

// Before gtest_main makes the first CUDA call.
[[maybe_unused]] const bool kPrepared = [] {
  cuda::prepare_process();
  return true;
}();

void expect_near_f64(const std::vector<std::byte>& bytes, World& world, int rank) {
  const Shape& shape = world.shape();
  const std::int32_t rows = shape.rows[static_cast<std::size_t>(rank)];
  const auto* got = reinterpret_cast<const Bf16*>(bytes.data());
  double error = 0.0;
  double norm = 0.0;
  std::mt19937_64 random(5);
  for (int i = 0; i < 1000 && rows > 0; ++i) {
    const auto row = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rows));
    const auto column =
        static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(shape.columns));
    const double exact = element_f64(shape, rank, world.operands().data(), row, column);
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

class OperatorGpu : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    ASSERT_GT(cuda::device_count(), 0) << cuda::unavailable_reason();
    if (GetParam().spread && cuda::device_count() < 2) GTEST_SKIP() << "one GPU only";
  }
};

// Three calls with new data each, in every form: exact where the numbers allow it, the unfused
// form's bits and within 1e-2 of f64 elsewhere.
TEST_P(OperatorGpu, EqualsTheUnfusedResultBitForBit) {
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
    RankMemory memory(worlds[0], images[0], me);
    ScopedStream stream;
    const std::vector<Options> forms{with(Fuse::kNever), with(Fuse::kAlways),
                                     with(Fuse::kAlways, TransportKind::kSm)};
    std::vector<std::vector<std::byte>> unfused(worlds.size());
    for (std::size_t form = 0; form < forms.size(); ++form) {
      const auto op = make_cuda_a2a_gemm(rank, shape, forms[form]);
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
            expect_same(got, worlds[c].expected(me), shape, me, "unfused");
          }
        } else {
          expect_same(got, unfused[c], shape, me, form == 1 ? "fused" : "fused, sm");
        }
      }
      std::uint64_t sent = 0;
      for (int peer = 0; peer < shape.ranks; ++peer) {
        if (peer == me) continue;
        sent += static_cast<std::uint64_t>(shape.rows[static_cast<std::size_t>(peer)]) *
                static_cast<std::uint64_t>(shape.row_bytes() + 4 * shape.scale_blocks());
      }
      EXPECT_EQ(op->counters().bytes, worlds.size() * sent) << "the own chunk is not copied";
      team->barrier();
    }
    EXPECT_FALSE(team->faulted());
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, OperatorGpu,
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
                    Case{"two_ranks_spread_fp8", even_shape(2, 1040, 512, 784, kF), true},
                    Case{"eight_ranks_spread", even_shape(8, 272, 64, 272, kB), true}),
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
        make_cuda_a2a_gemm(DeviceRank::create(team, device), shape, with(Fuse::kAlways, transport));
    const auto images = images_of(worlds, me);
    RankMemory memory(worlds[0], images[0], me, kAtOnce);
    ScopedStream stream;
    std::vector<std::vector<std::byte>> want;
    for (const World& world : worlds) want.push_back(world.expected(me));
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
TEST(OperatorGpuStress, AThousandCallsByCopyEngine) {
  run_thousand(TransportKind::kCopyEngine, kB, false);
}
TEST(OperatorGpuStress, AThousandCallsBySms) { run_thousand(TransportKind::kSm, kF, false); }
TEST(OperatorGpuStress, AThousandCallsOverAllGpus) {
  if (cuda::device_count() < 2) GTEST_SKIP() << "one GPU only";
  run_thousand(TransportKind::kCopyEngine, kF, true);
}

// Graphs of one call and of two, replayed with new contents in the same memory.
TEST(OperatorGpuGraph, ReplaysTakeNewContents) {
  for (const bool spread : {false, true}) {
    if (spread && cuda::device_count() < 2) continue;
    for (const TransportKind transport : {TransportKind::kCopyEngine, TransportKind::kSm}) {
      const Shape shape = even_shape(2, 528, 144, 272, kF);
      std::vector<World> worlds;
      worlds.reserve(3);
      for (std::uint64_t i = 0; i < 3; ++i)
        worlds.emplace_back(shape, Data::kSmallIntegers, 40 + i);
      run_ranks(2, spread, [&](const TeamHandle& team, int device) {
        const int me = team->rank();
        const auto op = make_cuda_a2a_gemm(DeviceRank::create(team, device), shape,
                                           with(Fuse::kAlways, transport));
        const auto images = images_of(worlds, me);
        RankMemory memory(worlds[0], images[0], me);
        ScopedStream stream;
        std::vector<std::vector<std::byte>> want;
        for (const World& world : worlds) want.push_back(world.expected(me));
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
        // Eager calls go on where the graphs stopped.
        memory.fill(images[0], stream.handle);
        op->run({stream.handle}, memory.operands);
        expect_same(memory.result(stream.handle), want[0], shape, me, "eager");
        team->barrier();
      });
    }
  }
}

// bf16 rows that the operator quantises: the bits of rows that came quantised.
TEST(OperatorGpuQuantise, BitsOfQuantisedRows) {
  const Shape shape = uneven({272, 16, 32}, 272, 48, kF);
  std::vector<World> worlds;
  worlds.emplace_back(shape, Data::kRandom, 5);
  const auto rows = worlds[0].take_bf16_rows(6);
  run_ranks(3, false, [&](const TeamHandle& team, int device) {
    const int me = team->rank();
    const auto rank = DeviceRank::create(team, device);
    const auto images = images_of(worlds, me);
    RankMemory memory(worlds[0], images[0], me);
    const DeviceBuffer<Bf16> x(rows[static_cast<std::size_t>(me)]);
    ScopedStream stream;
    std::vector<std::byte> want;
    for (const bool quantise : {false, true}) {
      Options options = with(Fuse::kAlways);
      options.quantise_x = quantise;
      const auto op = make_cuda_a2a_gemm(rank, shape, options);
      ready(*op, team, stream.handle);
      memory.fill(images[0], stream.handle);
      Operands o = memory.operands;
      if (quantise) {
        o.x = x.data();
        o.x_scales = nullptr;
      }
      op->run({stream.handle}, o);
      const auto got = memory.result(stream.handle);
      if (quantise) {
        expect_same(got, want, shape, me, "quantised");
      } else {
        want = got;
      }
      team->barrier();
    }
  });
}

// A rank that does not come: the others' kernels end at the deadline, the fault names it, and after
// rearm() the same operators give right results again.
TEST(OperatorGpuFault, AStoppedRankIsNamedAndRearmBringsTheOperatorBack) {
  const Shape shape = even_shape(3, 272, 64, 272, kB);
  std::vector<World> worlds;
  for (std::uint64_t i = 0; i < 5; ++i) worlds.emplace_back(shape, Data::kSmallIntegers, 70 + i);
  run_ranks(3, false, [&](const TeamHandle& team, int device) {
    const int me = team->rank();
    Options options = with(Fuse::kAlways);
    options.deadline = std::chrono::milliseconds(200);
    const auto op = make_cuda_a2a_gemm(DeviceRank::create(team, device), shape, options);
    const auto images = images_of(worlds, me);
    RankMemory memory(worlds[0], images[0], me);
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
    EXPECT_EQ(record->region, kArrived) << describe(*record);
    EXPECT_THROW(op->run({stream.handle}, memory.operands), Fault);
    team->rearm();
    for (std::size_t c = 1; c < worlds.size(); ++c) {
      memory.fill(images[c], stream.handle);
      op->run({stream.handle}, memory.operands);
      expect_same(memory.result(stream.handle), worlds[c].expected(me), shape, me, "after rearm");
    }
    team->barrier();
  });
}

// Chunks in arrival order: exact where every order gives the same sums, within 1e-2 of f64
// elsewhere, and the timeline says in which order a tile took them.
TEST(OperatorGpuArrival, IsExactOnSmallIntegersAndNearF64) {
  for (const Format format : {kB, kF}) {
    const Shape shape = uneven({528, 272, 16, 784}, 272, 304, format);
    std::vector<World> worlds;
    worlds.emplace_back(shape, Data::kSmallIntegers, 21);
    worlds.emplace_back(shape, Data::kRandom, 22);
    worlds.emplace_back(shape, Data::kSmallIntegers, 23);
    run_ranks(shape.ranks, false, [&](const TeamHandle& team, int device) {
      const int me = team->rank();
      const auto rank = DeviceRank::create(team, device);
      const auto images = images_of(worlds, me);
      RankMemory memory(worlds[0], images[0], me);
      ScopedStream stream;
      Timeline timeline;
      for (const bool traced : {false, true}) {
        Options options = with(Fuse::kAlways);
        options.order = ChunkOrder::kArrival;
        if (traced) options.timeline = &timeline;
        const auto op = make_cuda_a2a_gemm(rank, shape, options);
        ready(*op, team, stream.handle);
        for (std::size_t c = 0; c < worlds.size(); ++c) {
          if (me == 2) std::this_thread::sleep_for(std::chrono::milliseconds(3));
          memory.fill(images[c], stream.handle);
          op->run({stream.handle}, memory.operands);
          const auto got = memory.result(stream.handle);
          if (c == 1) {
            expect_near_f64(got, worlds[c], me);
          } else {
            expect_same(got, worlds[c].expected(me), shape, me, "in arrival order");
          }
        }
        op->collect_timeline();
        team->barrier();
      }
      int tiles = 0;
      int products = 0;
      int arrivals = 0;
      for (const TimelineEvent& event : timeline.take()) {
        EXPECT_LE(event.begin_ns, event.end_ns);
        tiles += event.what == Activity::kTile ? 1 : 0;
        products += event.what == Activity::kMultiply ? 1 : 0;
        arrivals += event.what == Activity::kArrival ? 1 : 0;
      }
      const std::int32_t rows = shape.rows[static_cast<std::size_t>(me)];
      EXPECT_EQ(tiles, tile_grid(rows, shape.columns, 1).tiles());
      EXPECT_EQ(products, tiles * shape.ranks);
      EXPECT_EQ(arrivals, (shape.ranks - 1) * row_block_count(rows, 256));
      team->barrier();
    });
  }
}

// A call whose slot a peer has not left yet stores nothing and announces nothing, by the kernels
// that push and by whoever copies `open`; the next call goes on as if it had not been.
TEST(OperatorGpuReuse, ACallThatWasNotOpenedDrainsWithoutPublishing) {
  const Shape shape = even_shape(2, 272, 128, 16, kF);
  const WindowIndex index = window_index(window_shape(shape, 256, false));
  const auto bytes = static_cast<std::size_t>(index.at.total_bytes);
  DeviceBuffer<std::byte> mine(bytes);
  DeviceBuffer<std::byte> peers(bytes);
  mine.fill(0);
  peers.fill(0);
  World world(shape, Data::kSmallIntegers, 3);
  const DeviceBuffer<std::byte> x(world.rank(0).x);
  const DeviceBuffer<float> scales(world.rank(0).x_scales);
  const std::vector<Piece> pieces = pieces_of(shape, 0, 256);
  const DeviceBuffer<Piece> device_pieces(pieces);
  // generation, abort, claim, its array, epoch, open, then pieces' counters
  DeviceBuffer<std::uint64_t> words(6 + pieces.size());
  std::vector<std::uint64_t> first(words.size(), 0);
  first[0] = 1;
  first[3] = reinterpret_cast<std::uint64_t>(words.data() + 1);
  first[4] = first[5] = 4;
  words.upload(first);
  const cuda::PinnedMemory record(sizeof(FaultRecord));
  *record.as<FaultRecord>() = FaultRecord{};
  BeginArgs begin;
  begin.epoch = words.data() + 4;
  begin.open = words.data() + 5;
  begin.consumed = reinterpret_cast<const std::uint64_t*>(mine.data() + index.consumed(0, 0));
  begin.peers = 2;
  begin.ranks = 2;
  begin.guard.generation = words.data();
  begin.guard.abort_word = words.data() + 1;
  begin.guard.record_claim = words.data() + 2;
  begin.guard.abort_words = reinterpret_cast<std::uint64_t* const*>(words.data() + 3);
  begin.guard.record = record.as<FaultRecord>();
  begin.guard.deadline_ns = 20'000'000;
  begin.guard.rank = 0;
  begin.guard.ranks = 1;
  SendArgs send;
  send.x = x.data();
  send.x_scales = scales.data();
  send.x_scale_stride = world.rank(0).operands.x_scale_stride;
  send.pieces = device_pieces.data();
  send.count = static_cast<std::int32_t>(pieces.size());
  send.rows[0] = send.rows[1] = 272;
  send.row_offset[1] = 272;
  send.base[0] = mine.data();
  send.base[1] = peers.data();
  send.index = index;
  send.done = words.data() + 6;
  send.epoch = begin.epoch;
  send.open = begin.open;
  const auto call = [&] {
    PENSTOCK_CUDA_CHECK(launch_begin_call_sm90(begin, nullptr));
    PENSTOCK_CUDA_CHECK(launch_push_scales_sm90(send, 4, nullptr));
    PENSTOCK_CUDA_CHECK(launch_push_sm90(send, 2, nullptr));
    PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
  };

  call();  // the peer's word says 0, the last call was 4
  EXPECT_EQ(record.as<FaultRecord>()->valid, 1u);
  EXPECT_EQ(record.as<FaultRecord>()->peer, 1);
  EXPECT_EQ(record.as<FaultRecord>()->region, kConsumed);
  EXPECT_EQ(words.download()[4], 5u);
  EXPECT_EQ(words.download()[5], 4u) << "what the copies announce";
  for (const std::byte b : peers.download()) ASSERT_EQ(b, std::byte{0});

  const std::uint64_t consumed = 5;  // the peer has come; a rearm has raised the generation
  PENSTOCK_CUDA_CHECK(cudaMemcpy(mine.data() + index.consumed(0, 1), &consumed, sizeof(consumed),
                                 cudaMemcpyHostToDevice));
  const std::uint64_t generation = 2;
  PENSTOCK_CUDA_CHECK(
      cudaMemcpy(words.data(), &generation, sizeof(generation), cudaMemcpyHostToDevice));
  call();
  EXPECT_EQ(words.download()[5], 6u);
  const std::vector<std::byte> window = peers.download();
  for (std::uint64_t block = 0; block < index.shape.row_blocks; ++block) {
    std::uint64_t word = 0;
    std::memcpy(&word, window.data() + index.arrived(0, 0, block), sizeof(word));
    EXPECT_EQ(word, 6u) << "row block " << block;
  }
  const auto rows = static_cast<std::size_t>(272 * shape.row_bytes());
  EXPECT_EQ(std::memcmp(window.data() + index.chunk(0, 0, 0), world.rank(0).x.data() + rows, rows),
            0);
  EXPECT_EQ(std::memcmp(window.data() + index.chunk_scale(0, 0, 0, 0),
                        world.rank(0).x_scales.data() + 272, 272 * sizeof(float)),
            0);
}

TEST(OperatorGpuRefusal, EveryRankIsRefusedInWords) {
  std::atomic<int> refused{0};
  run_ranks(2, false, [&](const TeamHandle& team, int device) {
    const auto rank = DeviceRank::create(team, device);
    const auto refuses = [&](const Shape& shape, const Options& options, const char* word) {
      try {
        (void)make_cuda_a2a_gemm(rank, shape, options);
        ADD_FAILURE() << word;
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
        ++refused;
      }
    };
    const Shape shape = even_shape(2, 32, 32, 16, kB);
    refuses(shape, with(Fuse::kAuto, TransportKind::kDirect), "transport direct");
    Options options = with(Fuse::kAuto);
    options.copy_ctas = 7;
    refuses(shape, options, "copy_ctas is 7");
    refuses(even_shape(2, 32, 32, team->rank() == 0 ? 16 : 32, kB), with(Fuse::kAuto),
            "columns=32");
    const auto op = make_cuda_a2a_gemm(rank, shape, with(Fuse::kAuto));
    World world(shape, Data::kSmallIntegers, 1);
    Operands o = world.rank(team->rank()).operands;  // refused before anything is read
    o.x = reinterpret_cast<const void*>(std::uintptr_t{4098});
    EXPECT_THROW(op->run({}, o), Error);
    team->barrier();
  });
  EXPECT_EQ(refused.load(), 6);
}

}  // namespace
}  // namespace penstock::a2a_gemm
