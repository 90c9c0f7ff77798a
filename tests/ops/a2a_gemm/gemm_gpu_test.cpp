// The gated GEMM on the device against the oracle: exact where the numbers allow it, within 1e-2 of
// f64 elsewhere, with pieces that come late, in any order, or not at all.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>

#include "core/cuda/device_buffer.h"
#include "fabric/cuda/memory.h"
#include "ops/a2a_gemm/cuda/gemm_maps.h"
#include "ops/a2a_gemm/random_operands.h"
#include "penstock/core/fault_record.h"
#include "penstock/ops/a2a_gemm/layout.h"

namespace penstock::a2a_gemm {
namespace {

using cuda::DeviceBuffer;

struct ScopedStream {
  ScopedStream() { PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~ScopedStream() { (void)cudaStreamDestroy(handle); }
  cudaStream_t handle = nullptr;
};

// One rank's call on the device. Other ranks' chunks come from host memory by copies.
class Device {
 public:
  Device(World& world, int rank, std::int32_t row_block_rows = kClusterRows)
      : world_(world),
        shape_(world.shape()),
        rank_(rank),
        index_(window_index(window_shape(shape_, row_block_rows, false))),
        window_(static_cast<std::size_t>(index_.at.total_bytes)),
        x_(world.rank(rank).x),
        x_scales_(world.rank(rank).x_scales),
        w_(world.w()),
        w_scales_(world.w_scales()),
        out_(world.rank(rank).out.size() + kGuardBytes),
        words_(8),
        consumed_(kMaxRanks * kWordStride),
        record_(sizeof(FaultRecord)) {
    window_.fill(0xA5);
    PENSTOCK_CUDA_CHECK(
        cudaMemset(window_.data() + index_.at.offset[kArrived], 0, index_.at.bytes[kArrived]));
    consumed_.fill(0);
    out_.fill(0xA5);
    *record_.as<FaultRecord>() = FaultRecord{};
    set_epoch(1);
    const std::int64_t first = row_offset(shape_, rank_);
    args.ranks = shape_.ranks;
    args.rank = rank_;
    args.rows = shape_.rows[static_cast<std::size_t>(rank_)];
    args.columns = shape_.columns;
    args.steps = shape_.steps();
    args.chunk_rows = max_rows(shape_);
    args.row_block_rows = row_block_rows;
    args.row_blocks = static_cast<std::int32_t>(index_.shape.row_blocks);
    args.band = 2;
    args.out = reinterpret_cast<std::uint16_t*>(out_.data());
    args.chunk_scales =
        reinterpret_cast<const float*>(window_.data() + index_.chunk_scale(0, 0, 0, 0));
    args.scale_stride = static_cast<std::int64_t>(scale_stride(index_.shape.max_rows));
    args.local_scales = x_scales_.data() + first;
    args.local_scale_stride = world.rank(rank).operands.x_scale_stride;
    args.w_scales = w_scales_.data();
    args.guard.generation = words_.data();
    args.guard.abort_word = words_.data() + 1;
    args.guard.record_claim = words_.data() + 2;
    args.guard.abort_words = reinterpret_cast<std::uint64_t* const*>(words_.data() + 3);
    args.guard.record = record_.as<FaultRecord>();
    args.guard.deadline_ns = 5'000'000'000;
    args.guard.rank = rank_;
    args.guard.ranks = 1;
    args.guard.op = 7;
    args.epoch = words_.data() + 4;
    args.finished = words_.data() + 5;
    for (int peer = 0; peer < shape_.ranks; ++peer) {
      if (peer != rank_) args.consumed[peer] = consumed_.data() + peer * kWordStride;
    }
    // A map of no rows is refused by the driver, and nothing is launched over it.
    if (args.rows > 0)
      maps = make_gemm_maps(shape_, rank_, x_.data() + first * shape_.row_bytes(),
                            window_.data() + index_.chunk(0, 0, 0), w_.data());
    PENSTOCK_CUDA_CHECK(load_gemm_sm90());
  }

  void gate() {
    args.arrived = reinterpret_cast<const std::uint64_t*>(window_.data() + index_.arrived(0, 0, 0));
    args.arrival_stride = static_cast<std::int64_t>(arrival_stride(index_.shape.row_blocks) / 8);
  }
  void set_epoch(std::uint64_t epoch) {
    epoch_ = epoch;
    const std::vector<std::uint64_t> words{
        1, 0, 0, reinterpret_cast<std::uint64_t>(words_.data() + 1), epoch, 0, 0, 0};
    words_.upload(words);
  }

  // Copies row block `block` of `source`'s chunk behind what `stream` holds, then announces it.
  void deliver(int source, std::int32_t block, cudaStream_t stream) {
    const std::int32_t row = block * args.row_block_rows;
    const std::int32_t rows = std::min(args.row_block_rows, args.rows - row);
    if (rows <= 0) return;
    const RankData& from = world_.rank(source);
    const std::int64_t at = row_offset(shape_, rank_) + row;
    const auto to = static_cast<std::uint64_t>(row);
    const auto send = [&](std::uint64_t offset, const void* data, std::size_t bytes) {
      PENSTOCK_CUDA_CHECK(
          cudaMemcpyAsync(window_.data() + offset, data, bytes, cudaMemcpyHostToDevice, stream));
    };
    send(index_.chunk(0, source, to), from.x.data() + at * shape_.row_bytes(),
         static_cast<std::size_t>(rows) * index_.shape.row_bytes);
    for (std::uint64_t b = 0; b < index_.shape.scale_blocks; ++b) {
      send(index_.chunk_scale(0, source, b, to),
           from.x_scales.data() + static_cast<std::int64_t>(b) * from.operands.x_scale_stride + at,
           static_cast<std::size_t>(rows) * 4);
    }
    send(index_.arrived(0, source, static_cast<std::uint64_t>(block)), &epoch_, 8);
  }
  void deliver_all() {
    for (int s = 0; s < shape_.ranks; ++s) {
      if (s == rank_) continue;
      for (int b = 0; b < args.row_blocks; ++b) deliver(s, b, side.handle);
    }
    PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(side.handle));
  }
  void launch(int ctas) {
    if (args.rows == 0) return;
    PENSTOCK_CUDA_CHECK(launch_gemm_sm90(args, maps, shape_.format, ctas, main.handle));
  }
  std::vector<std::byte> result() {
    PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(main.handle));
    std::vector<std::byte> all = out_.download();
    for (std::size_t i = all.size() - kGuardBytes; i < all.size(); ++i) {
      EXPECT_EQ(all[i], std::byte{0xA5}) << "written behind the result, byte " << i;
    }
    all.resize(all.size() - kGuardBytes);
    return all;
  }
  void poison() { out_.fill(0xA5); }
  std::uint64_t consumed(int peer) {
    return consumed_.download()[static_cast<std::size_t>(peer * kWordStride)];
  }
  const FaultRecord& record() const { return *record_.as<FaultRecord>(); }

  GemmArgs args;
  GemmMaps maps{};
  ScopedStream main;
  ScopedStream side;

 private:
  static constexpr std::size_t kGuardBytes = 4096;
  static constexpr int kWordStride = 16;
  World& world_;
  Shape shape_;
  int rank_;
  WindowIndex index_;
  DeviceBuffer<std::byte> window_;
  DeviceBuffer<std::byte> x_;
  DeviceBuffer<float> x_scales_;
  DeviceBuffer<std::byte> w_;
  DeviceBuffer<float> w_scales_;
  DeviceBuffer<std::byte> out_;
  DeviceBuffer<std::uint64_t> words_;
  DeviceBuffer<std::uint64_t> consumed_;
  cuda::PinnedMemory record_;
  std::uint64_t epoch_ = 1;
};

void expect_exact(const std::vector<std::byte>& got, const std::vector<std::byte>& want,
                  const Shape& shape) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i], want[i]) << "byte " << i << ", element ("
                               << static_cast<std::int64_t>(i / 2) / shape.columns << ", "
                               << static_cast<std::int64_t>(i / 2) % shape.columns << ")";
  }
}

struct Case {
  const char* name;
  Shape shape;
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
constexpr Format kB = Format::kBf16;
constexpr Format kF = Format::kFp8;

class GatedGemm : public testing::TestWithParam<Case> {};

TEST_P(GatedGemm, IsExactOnSmallIntegersForEveryRank) {
  World world(GetParam().shape, Data::kSmallIntegers, 11);
  for (int rank = 0; rank < world.shape().ranks; ++rank) {
    Device device(world, rank);
    device.gate();
    device.deliver_all();
    device.launch(132);
    expect_exact(device.result(), world.expected(rank), world.shape());
    for (int peer = 0; peer < world.shape().ranks; ++peer) {
      EXPECT_EQ(device.consumed(peer), peer != rank && device.args.rows > 0 ? 1u : 0u);
    }
    EXPECT_EQ(device.record().valid, 0u);
  }
}

TEST_P(GatedGemm, StaysWithinOnePercentOfF64) {
  World world(GetParam().shape, Data::kRandom, 12);
  Device device(world, 0);
  device.deliver_all();
  device.launch(132);
  const auto bytes = device.result();
  const auto* got = reinterpret_cast<const Bf16*>(bytes.data());
  double error = 0.0;
  double norm = 0.0;
  std::mt19937_64 random(5);
  for (int i = 0; i < 4000 && device.args.rows > 0; ++i) {
    const auto row =
        static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(device.args.rows));
    const auto column =
        static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(device.args.columns));
    const double exact = element_f64(world.shape(), 0, world.operands().data(), row, column);
    const double value = static_cast<double>(got[row * device.args.columns + column].to_float());
    ASSERT_TRUE(std::isfinite(value)) << row << ", " << column;
    error += (value - exact) * (value - exact);
    norm += exact * exact;
  }
  EXPECT_LE(std::sqrt(error), 1e-2 * std::sqrt(norm));
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, GatedGemm,
    testing::Values(Case{"one_rank", even_shape(1, 256, 256, 256, kB)},
                    Case{"one_rank_fp8", even_shape(1, 256, 256, 256, kF)},
                    Case{"smallest", even_shape(2, 16, 16, 16, kB)},
                    Case{"smallest_fp8", even_shape(2, 16, 16, 16, kF)},
                    Case{"odd_edges", uneven({272, 400, 16}, 208, 304, kB)},
                    Case{"odd_edges_fp8", uneven({272, 400, 16}, 208, 304, kF)},
                    Case{"no_rows_somewhere", uneven({784, 0, 144, 128}, 128, 528, kB)},
                    Case{"no_rows_somewhere_fp8", uneven({784, 0, 144, 128}, 128, 528, kF)},
                    Case{"eight_ranks", even_shape(8, 528, 64, 784, kB)},
                    Case{"eight_ranks_fp8", even_shape(8, 528, 128, 784, kF)},
                    Case{"seven_ranks_fp8", even_shape(7, 48, 400, 272, kF)}),
    [](const auto& test) { return std::string(test.param.name); });

// The kernel runs first and waits; pieces come in any order while it does. Result: the bits of the
// open gates.
TEST(GatedGemmGate, LatePiecesInAnyOrderGiveTheSameBits) {
  for (const Format format : {kB, kF}) {
    for (std::uint64_t seed = 0; seed < 6; ++seed) {
      World world(even_shape(4, 784, 256, 512, format), Data::kRandom, 20 + seed);
      Device open(world, 1);
      open.deliver_all();
      open.launch(132);
      const auto want = open.result();

      Device device(world, 1);
      device.gate();
      device.launch(seed % 2 == 0 ? 132 : 6);
      std::vector<std::pair<int, int>> pieces;
      for (int s = 0; s < 4; ++s) {
        for (int b = 0; b < device.args.row_blocks && s != 1; ++b) pieces.emplace_back(s, b);
      }
      std::mt19937_64 random(seed);
      std::shuffle(pieces.begin(), pieces.end(), random);
      for (const auto& [source, block] : pieces) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        device.deliver(source, block, device.side.handle);
      }
      expect_exact(device.result(), want, world.shape());
      EXPECT_EQ(device.consumed(0), 1u);
    }
  }
}

TEST(GatedGemmGate, AnOldEpochDoesNotOpenIt) {
  World world(even_shape(2, 272, 64, 256, kB), Data::kSmallIntegers, 31);
  Device device(world, 0);
  device.gate();
  device.deliver_all();  // epoch 1
  device.set_epoch(3);
  device.launch(132);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(cudaStreamQuery(device.main.handle), cudaErrorNotReady);
  World fresh(world.shape(), Data::kSmallIntegers, 32);
  // New contents under the new epoch.
  world.rank(1).x = fresh.rank(1).x;
  device.deliver_all();
  std::vector<std::byte> want(world.rank(0).out.size());
  std::vector<Operands> operands = world.operands();
  operands[1].x = world.rank(1).x.data();
  reference(world.shape(), 0, operands.data(), want.data());
  expect_exact(device.result(), want, world.shape());
  EXPECT_EQ(device.consumed(1), 3u);
}

// A piece that never comes: the kernel ends by itself, says who is missing, and frees nothing.
TEST(GatedGemmGate, ADeadlineEndsTheKernelWithARecord) {
  World world(even_shape(3, 272, 64, 256, kB), Data::kRandom, 51);
  Device device(world, 0);
  device.gate();
  device.args.guard.deadline_ns = 30'000'000;
  device.deliver(1, 0, device.side.handle);
  device.deliver(1, 1, device.side.handle);
  device.deliver(2, 0, device.side.handle);  // block 1 of source 2 is missing
  PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(device.side.handle));
  device.launch(132);
  PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(device.main.handle));
  const FaultRecord& record = device.record();
  EXPECT_EQ(record.valid, 1u);
  EXPECT_EQ(record.cause, static_cast<std::uint32_t>(FaultCause::kDeadline));
  EXPECT_EQ(record.peer, 2);
  EXPECT_EQ(record.op, 7);
  EXPECT_EQ(record.region, kArrived);
  EXPECT_EQ(record.index, 2 * 2 + 1);
  EXPECT_EQ(record.expected, 1u);
  EXPECT_EQ(record.seen, 0u);
  EXPECT_GE(record.waited_ns, 30'000'000u);
  EXPECT_EQ(device.consumed(1), 0u);
  EXPECT_EQ(device.consumed(2), 0u);
}

// In arrival order every tile takes its own chunk first, then the others as they came; sums that
// are exact in any order come out exact, on any number of CTAs.
TEST(GatedGemmArrival, TilesTakeChunksAsTheyCome) {
  for (const Format format : {kB, kF}) {
    for (const int ctas : {132, 6, 2}) {
      World world(even_shape(5, 528, 256, 784, format), Data::kSmallIntegers, 71);
      Device device(world, 1);
      device.gate();
      device.args.order = ChunkOrder::kArrival;
      const TileGrid grid = tile_grid(528, 784, device.args.band);
      const auto words = static_cast<std::size_t>(trace_words(5));
      const auto tiles = static_cast<std::size_t>(grid.tiles());
      DeviceBuffer<std::uint64_t> stamps(tiles * words + 5 * 3);
      stamps.fill(0xff);
      device.args.trace = {stamps.data(), stamps.data() + tiles * words};
      device.launch(ctas);
      const std::vector<int> order{4, 0, 3, 2};  // rotation would be 2, 3, 4, 0
      for (const int source : order) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        for (int b = 0; b < device.args.row_blocks; ++b) {
          device.deliver(source, b, device.side.handle);
        }
      }
      expect_exact(device.result(), world.expected(1), world.shape());
      EXPECT_EQ(device.consumed(4), 1u);
      // The first tile of each cluster has been waiting for every chunk.
      const std::vector<std::uint64_t> noted = stamps.download();
      for (int tile = 0; tile < std::min(grid.tiles(), ctas / 2); ++tile) {
        const std::uint64_t* at = noted.data() + static_cast<std::size_t>(tile) * words;
        EXPECT_EQ(at[0] & kTraceSourceMask, 1u);
        for (std::size_t i = 0; i < order.size(); ++i) {
          EXPECT_EQ(at[2 * (i + 1)] & kTraceSourceMask, static_cast<std::uint64_t>(order[i]))
              << "tile " << tile << ", chunk " << i + 1;
          EXPECT_GE(at[2 * (i + 1) + 1], at[2 * i + 1]);
        }
      }
    }
  }
}

// More tiles a cluster than the kernel keeps orders for.
TEST(GatedGemmArrival, ManyTilesOnOneCluster) {
  World world(even_shape(2, 2320, 64, 4112, kB), Data::kSmallIntegers, 73);
  Device device(world, 0);
  device.gate();
  device.args.order = ChunkOrder::kArrival;
  device.deliver_all();
  device.launch(2);
  expect_exact(device.result(), world.expected(0), world.shape());
}

TEST(GatedGemmArrival, ADeadlineEndsTheKernelWithARecord) {
  World world(even_shape(3, 272, 64, 256, kF), Data::kRandom, 51);
  Device device(world, 0);
  device.gate();
  device.args.order = ChunkOrder::kArrival;
  device.args.guard.deadline_ns = 30'000'000;
  device.deliver(2, 0, device.side.handle);
  device.deliver(2, 1, device.side.handle);
  device.deliver(1, 0, device.side.handle);  // block 1 of source 1 is missing
  PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(device.side.handle));
  device.launch(132);
  PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(device.main.handle));
  EXPECT_EQ(device.record().valid, 1u);
  EXPECT_EQ(device.record().peer, 1);
  EXPECT_EQ(device.record().index, 1 * 2 + 1);
  EXPECT_EQ(device.consumed(1), 0u);
  EXPECT_EQ(device.consumed(2), 0u);
}

TEST(GatedGemmDeterminism, SameBitsOnAnyNumberOfCtasAndBands) {
  for (const Format format : {kB, kF}) {
    World world(even_shape(3, 1040, 256, 1296, format), Data::kRandom, 61);
    Device device(world, 1);
    device.deliver_all();
    device.launch(132);
    const auto want = device.result();
    for (const int ctas : {2, 10, 64, 130}) {
      for (const int band : {1, 3, 8}) {
        device.poison();
        device.args.band = band;
        device.launch(ctas);
        expect_exact(device.result(), want, world.shape());
      }
    }
  }
}

}  // namespace
}  // namespace penstock::a2a_gemm
