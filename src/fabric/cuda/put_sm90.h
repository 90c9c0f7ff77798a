// Transport sm as a kernel: CTAs that copy one chunk into a peer's window and signal behind it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace penstock::cuda {

struct SmPut {
  std::byte* dst = nullptr;
  const std::byte* src = nullptr;
  std::uint64_t bytes = 0;        // 0: the signal alone
  std::uint64_t* word = nullptr;  // nullptr: no signal
  std::uint64_t epoch = 0;
  // Not nullptr: `done_value` is stored there, in pinned host memory, once data and signal are
  // visible.
  std::uint64_t* done = nullptr;
  std::uint64_t done_value = 0;
  std::uint32_t* arrivals =
      nullptr;  // device word, 0 between launches; one launch at a time uses it
};

inline constexpr int kSmPutThreads = 1024;
// A launch with a thread for each so many 16 bytes moves them in one trip to memory (if addresses
// and size are multiples of 16).
inline constexpr int kSmPutAtOnce = 4;
// Eight CTAs fill an NVLink 4 direction (355 GB/s measured, 16: 349, 132: 369).
inline constexpr int kSmPutBlocks = 8;

// Enqueues the copy on `stream`, `blocks` CTAs of `threads` (64 registers each). Order: the data,
// then the signal, then the done word (system scope).
cudaError_t launch_sm_put(const SmPut& put, int blocks, cudaStream_t stream,
                          int threads = kSmPutThreads);
// The kernel of launch_sm_put, which takes one SmPut by value: for the node of a graph.
const void* sm_put_function();
// An empty kernel: makes the driver set up the stream and the context's launch resources.
cudaError_t launch_nothing(cudaStream_t stream);
// Loads the kernels now (see load_packet_kernels).
cudaError_t load_sm_put();

}  // namespace penstock::cuda
