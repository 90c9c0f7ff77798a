// Ranks of one process on GPUs, for the tests of the CUDA operators: operands in pinned and device
// memory, results with poison behind them.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "core/cuda/device_buffer.h"
#include "fabric/cuda/device_rank.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/memory.h"
#include "ops/a2a_gemm/random_operands.h"
#include "penstock/ops/a2a_gemm/a2a_gemm.h"

namespace penstock::a2a_gemm {

using cuda::DeviceBuffer;
using cuda::DeviceRank;

inline constexpr std::chrono::seconds kDeadline{8};
inline constexpr Format kB = Format::kBf16;
inline constexpr Format kF = Format::kFp8;

inline Shape uneven(std::vector<std::int32_t> rows, std::int32_t depth, std::int32_t columns,
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
inline std::vector<Image> images_of(std::vector<World>& worlds, int rank) {
  std::vector<Image> images;
  for (World& world : worlds) images.emplace_back(world, rank);
  return images;
}

// One rank's operands on its device, with poison around `out` (of a2a_gemm's size, or `out_bytes`),
// and room for `results` results.
class RankMemory {
 public:
  RankMemory(const World& world, const Image& image, int rank, std::size_t results = 1,
             std::size_t out_bytes = 0)
      : out_bytes_(out_bytes > 0 ? out_bytes : world.expected_bytes(rank)),
        out_(out_bytes_ + kGuard) {
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
template <typename Operator>
void ready(Operator& op, const TeamHandle& team, cudaStream_t stream) {
  op.prepare({stream});
  team->barrier();
}

inline void expect_same(const std::vector<std::byte>& got, const std::vector<std::byte>& want,
                        const Shape& shape, int rank, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i], want[i]) << what << ": rank " << rank << " element ("
                               << static_cast<std::int64_t>(i / 2) / shape.columns << ", "
                               << static_cast<std::int64_t>(i / 2) % shape.columns << ")";
  }
}

inline int device_of(bool spread, int rank) { return spread ? rank % cuda::device_count() : 0; }

inline void run_ranks(int ranks, bool spread,
                      const std::function<void(const TeamHandle&, int)>& body,
                      std::chrono::nanoseconds deadline = kDeadline) {
  run_local_team(ranks,
                 [&](const TeamHandle& team) {
                   const int device = device_of(spread, team->rank());
                   const cuda::ScopedDevice scope(device);
                   body(team, device);
                 },
                 {.deadline = deadline});
}

inline Options with(Fuse fuse, TransportKind transport = TransportKind::kCopyEngine) {
  Options options;
  options.fuse = fuse;
  options.transport = transport;
  options.row_block_rows = 256;
  options.copy_ctas = 2;
  return options;
}

}  // namespace penstock::a2a_gemm
