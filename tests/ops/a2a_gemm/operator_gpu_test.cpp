// The CUDA operator over the fabric: 1 to 8 ranks on one GPU, and over all GPUs where there are
// several.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <span>
#include <thread>

#include "core/cuda/device_buffer.h"
#include "fabric/cuda/device_rank.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/memory.h"
#include "fabric/cuda/window_backend.h"
#include "ops/a2a_gemm/cuda/operator.h"
#include "ops/a2a_gemm/random_operands.h"
#include "penstock/core/error.h"
#include "penstock/ops/a2a_gemm/layout.h"

namespace penstock::a2a_gemm {
namespace {

using cuda::DeviceBuffer;
using cuda::DeviceRank;

constexpr std::chrono::seconds kDeadline{8};
constexpr Format kB = Format::kBf16;
constexpr Format kF = Format::kFp8;

// Before gtest_main makes the first CUDA call.
[[maybe_unused]] const bool kPrepared = [] {
  cuda::prepare_process();
  return true;
}();

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

struct ScopedStream {
  ScopedStream() { PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~ScopedStream() { (void)cudaStreamDestroy(handle); }
  void wait() const { PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(handle)); }
  cudaStream_t handle = nullptr;
};

// Pinned copies of one rank's inputs. Pageable ones would not do: such a copy holds the driver's
// staging buffer until the stream reaches it, and where ranks share a GPU that stream may be
// waiting for a rank which waits for the staging buffer.
class Image {
 public:
  Image(World& world, int rank) {
    const RankData& data = world.rank(rank);
    const std::array<std::span<const std::byte>, 4> parts{
        std::span(data.x), std::as_bytes(std::span(data.x_scales)), std::span(world.w()),
        std::as_bytes(std::span(world.w_scales()))};
    for (std::size_t i = 0; i < parts.size(); ++i) {
      bytes_[i] = parts[i].size();
      memory_[i] = cuda::PinnedMemory(std::max<std::size_t>(bytes_[i], 1));
      if (bytes_[i] > 0) std::memcpy(memory_[i].as<std::byte>(), parts[i].data(), bytes_[i]);
    }
  }
  std::size_t bytes(std::size_t part) const { return bytes_[part]; }
  void send(std::size_t part, void* to, cudaStream_t stream) const {
    if (bytes_[part] == 0) return;
    PENSTOCK_CUDA_CHECK(cudaMemcpyAsync(to, memory_[part].as<std::byte>(), bytes_[part],
                                        cudaMemcpyHostToDevice, stream));
  }

 private:
  std::array<cuda::PinnedMemory, 4> memory_;  // x, its scales, w, its scales
  std::array<std::size_t, 4> bytes_{};
};
std::vector<Image> images_of(std::vector<World>& worlds, int rank) {
  std::vector<Image> images;
  for (World& world : worlds) images.emplace_back(world, rank);
  return images;
}

// One rank's operands on its device, with poison around `out`, and room for `results` results.
class RankMemory {
 public:
  RankMemory(const World& world, const Image& image, int rank, std::size_t results = 1)
      : out_bytes_(world.expected_bytes(rank)), out_(out_bytes_ + kGuard) {
    for (std::size_t i = 0; i < in_.size(); ++i) in_[i] = DeviceBuffer<std::byte>(image.bytes(i));
    for (std::size_t i = 0; i < results; ++i) host_.emplace_back(out_.bytes());
    operands = world.operands()[static_cast<std::size_t>(rank)];
    operands.x = in_[0].data();
    operands.w = in_[2].data();
    operands.out = out_.data();
    if (world.shape().format == Format::kFp8) {
      operands.x_scales = reinterpret_cast<const float*>(in_[1].data());
      operands.w_scales = reinterpret_cast<const float*>(in_[3].data());
    }
  }
  // All in the order of `stream`.
  void fill(const Image& image, cudaStream_t stream) {
    for (std::size_t i = 0; i < in_.size(); ++i) image.send(i, in_[i].data(), stream);
    PENSTOCK_CUDA_CHECK(cudaMemsetAsync(out_.data(), 0xA5, out_.bytes(), stream));
  }
  void fetch(std::size_t result, cudaStream_t stream) {
    PENSTOCK_CUDA_CHECK(cudaMemcpyAsync(host_[result].as<std::byte>(), out_.data(), out_.bytes(),
                                        cudaMemcpyDeviceToHost, stream));
  }
  // Of a fetch that is done.
  std::vector<std::byte> fetched(std::size_t result) const {
    const auto* from = host_[result].as<std::byte>();
    for (std::size_t i = out_bytes_; i < out_.bytes(); ++i) {
      EXPECT_EQ(from[i], std::byte{0xA5}) << "written behind the result, byte " << i;
    }
    return {from, from + out_bytes_};
  }
  std::vector<std::byte> result(cudaStream_t stream) {
    fetch(0, stream);
    PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream));
    return fetched(0);
  }

  Operands operands;

 private:
  static constexpr std::size_t kGuard = 1024;
  std::size_t out_bytes_;
  DeviceBuffer<std::byte> out_;
  std::array<DeviceBuffer<std::byte>, 4> in_;
  std::vector<cuda::PinnedMemory> host_;
};

// Behind it every rank has its memory and its streams set up: allocations and first launches may
// wait for the GPU to be idle, and then for the kernels of ranks that wait for this one.
void ready(A2aGemm& op, const TeamHandle& team, cudaStream_t stream) {
  op.prepare({stream});
  team->barrier();
}

void expect_same(const std::vector<std::byte>& got, const std::vector<std::byte>& want,
                 const Shape& shape, int rank, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i], want[i]) << what << ": rank " << rank << " element ("
                               << static_cast<std::int64_t>(i / 2) / shape.columns << ", "
                               << static_cast<std::int64_t>(i / 2) % shape.columns << ")";
  }
}

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

int device_of(bool spread, int rank) { return spread ? rank % cuda::device_count() : 0; }

void run_ranks(int ranks, bool spread, const std::function<void(const TeamHandle&, int)>& body,
               std::chrono::nanoseconds deadline = kDeadline) {
  run_local_team(ranks,
                 [&](const TeamHandle& team) {
                   const int device = device_of(spread, team->rank());
                   const cuda::ScopedDevice scope(device);
                   body(team, device);
                 },
                 {.deadline = deadline});
}

Options with(Fuse fuse, TransportKind transport = TransportKind::kCopyEngine) {
  Options options;
  options.fuse = fuse;
  options.transport = transport;
  options.row_block_rows = 256;
  options.copy_ctas = 2;
  return options;
}

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
    options.order = ChunkOrder::kArrival;
    refuses(shape, options, "arrival order");
    options = with(Fuse::kAuto);
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
  EXPECT_EQ(refused.load(), 8);
}

}  // namespace
}  // namespace penstock::a2a_gemm
