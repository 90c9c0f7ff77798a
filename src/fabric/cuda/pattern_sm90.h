// Kernels of the self-test: write a pattern with this rank's stores; wait for a signal and compare
// what it promises.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "penstock/fabric/device_views.h"

namespace penstock::cuda {

// Enqueues the pattern of `seed` into `to`[words], own or peer memory.
cudaError_t launch_fill(std::uint64_t* to, std::uint64_t words, std::uint64_t seed, int blocks,
                        cudaStream_t stream);

struct Receive {
  GuardView guard;
  const std::uint64_t* word = nullptr;  // this rank's signal word
  std::uint64_t epoch = 0;
  std::int32_t peer = -1;  // its writer, for the record
  std::int32_t region = -1;
  const std::uint64_t* data = nullptr;  // [words], compared by the threads that saw the signal
  std::uint64_t words = 0;
  std::uint64_t seed = 0;
  // Device words: lowest position that differs from the pattern (~0 before the launch), and the
  // WaitStatus of a failed wait (0 before).
  std::uint64_t* first_wrong = nullptr;
  std::uint32_t* status = nullptr;
};
// Enqueues one wait and compare. Every CTA waits by itself and compares at once, so that data
// behind its signal shows; all `blocks` must be resident.
cudaError_t launch_receive(const Receive& receive, int blocks, cudaStream_t stream);
// Loads the kernels now (see load_packet_kernels).
cudaError_t load_pattern_kernels();

}  // namespace penstock::cuda
