// Kernels of the link benchmark.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "penstock/fabric/device_views.h"

namespace penstock::cuda {

// Rank 0 measures, rank 1 answers. Cycles of one SM are turned into time by the wall clock read at
// both ends.
struct EchoArgs {
  GuardView guard;
  RingView ring;      // slots == nullptr: a direct store instead of a descriptor
  PutDescriptor put;  // as posted by the measuring rank; signal_epoch is set per round
  std::uint64_t* peer_word = nullptr;  // the signal's word, mapped here (direct stores)
  const std::uint64_t* own_word =
      nullptr;  // where the answer (measuring rank) or the signal (answering rank) arrives
  std::uint64_t* answer_word = nullptr;  // the measuring rank's word, mapped at the answering rank
  std::uint64_t first = 1;               // epoch of the first round
  int rounds = 1;
  int burst = 1;  // descriptors posted before the measuring rank waits; only the last one signals
  bool together = false;            // the burst by one post_many() instead of one post() each
  std::uint64_t stride = 0;         // bytes between the descriptors of a burst, at both ends
  std::uint32_t* cycles = nullptr;  // [rounds] of the measuring rank
  std::uint64_t* clock = nullptr;   // [4] cycles and nanoseconds at start and end
  std::uint32_t* status = nullptr;
  // Not nullptr: the measuring rank waits for start_word >= start_value first, and sets end_word to
  // 1 at its end.
  const std::uint64_t* start_word = nullptr;
  std::uint64_t start_value = 0;
  std::uint64_t* end_word = nullptr;
};
cudaError_t launch_measure(const EchoArgs& args, cudaStream_t stream);
cudaError_t launch_answer(const EchoArgs& args, cudaStream_t stream);

// Blocks of 1024 threads, two of which fill an SM, that count themselves in `arrived` and wait for
// `end` >= 1.
struct OccupyArgs {
  GuardView guard;
  std::uint64_t* arrived = nullptr;
  std::uint64_t* end = nullptr;
  int enough = 0;  // arrivals after which no SM has a free slot for a full block
};
cudaError_t launch_occupy(const OccupyArgs& args, int blocks, cudaStream_t stream);

// Keeps every SM busy as a GEMM does: each CTA streams 128 x 64 bf16 tiles from `data` into shared
// memory and runs m16n8k16 products on them. 2 * 16 * 8 * 16 FLOP an instruction and warp; see
// busy_flop().
struct BusyArgs {
  const std::uint16_t* data = nullptr;  // [bytes / 2] bf16
  std::uint64_t bytes = 0;              // a multiple of 16384
  int steps = 1;                        // tiles a CTA
  float* sink = nullptr;                // [blocks * 256]
};
cudaError_t launch_busy(const BusyArgs& args, int blocks, cudaStream_t stream);
double busy_flop(const BusyArgs& args, int blocks);

cudaError_t load_link_kernels();

}  // namespace penstock::cuda
