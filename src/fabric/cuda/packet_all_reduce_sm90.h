// The packet all-reduce as kernels: consecutive calls in one launch, for tests, for the link
// benchmark and as the smallest example of PacketAllReduce in a persistent kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "penstock/fabric/device_views.h"

namespace penstock::cuda {

struct PacketCalls {
  GuardView guard;
  PacketView packets;
  // Calls that were made before this launch, device memory; advanced by `calls` when the launch is
  // through. The first call has epoch *epoch + 1.
  std::uint64_t* epoch = nullptr;
  // [inputs][count] packets of 12 bytes (six bf16 each); call c reads input c % inputs.
  const std::uint32_t* in = nullptr;
  // [inputs][count] packets of 12 bytes; call c overwrites result c % inputs.
  std::uint32_t* out = nullptr;
  std::uint64_t inputs = 1;
  std::uint64_t calls = 1;
  std::uint64_t count = 0;  // packets a call; at most packets.capacity
  bool two_shot = false;
  // Device words, zero at first: barrier arrivals of this rank's grid (used where a sweep is due).
  std::uint64_t* barrier = nullptr;
  // Device word: set to the WaitStatus of a failed wait, left alone otherwise.
  std::uint32_t* status = nullptr;
  // This rank dawdles this long before each call, on one thread block in turn: tests of timing. 0:
  // not at all.
  std::uint32_t delay_ns = 0;
};

// Threads of one block. One packet a thread is the shape that decode uses: 1024 packets (a row of
// 6144) over 8 blocks.
inline constexpr int kPacketThreads = 128;

// Enqueues the calls on `stream` with `blocks` blocks, which must all be resident at once beside
// everything else that runs on the GPU; then a second kernel that advances *epoch. Capture-safe.
// Ranks: 2 .. 8 (cudaErrorInvalidValue otherwise; the caller says why).
cudaError_t launch_packet_calls(const PacketCalls& calls, int blocks, cudaStream_t stream);

// Loads the kernels now. A module that loads while another kernel spins can wait for that kernel
// for ever.
cudaError_t load_packet_kernels();

}  // namespace penstock::cuda
