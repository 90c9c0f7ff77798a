// Scripted arrivals for the gated GEMM's benchmark, and its random operands.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace penstock::bench {

// A word that becomes `epoch` `at_ns` after the script's start.
struct ScriptedArrival {
  std::uint64_t* word;
  std::uint64_t at_ns;
};

// One warp that plays `count` arrivals, sorted by time, by the GPU's wall clock. Its kernel takes
// no shared memory and one warp, yet a GEMM that fills an SM's registers does not fit beside it:
// launch such a GEMM on two SMs less.
cudaError_t play_script(const ScriptedArrival* arrivals, int count, const std::uint64_t* epoch,
                        cudaStream_t stream);
// Waits in a kernel of its own until `count` words have reached *epoch: the gate in front of the
// GEMM. Gives up after two seconds.
cudaError_t wait_for_words(const std::uint64_t* const* words, int count, const std::uint64_t* epoch,
                           cudaStream_t stream);
// ++*epoch, in stream order.
cudaError_t advance_epoch(std::uint64_t* epoch, cudaStream_t stream);
// count bf16 (even) from a normal distribution of deviation 1.
cudaError_t fill_bf16_normal(void* out, std::size_t count, std::uint64_t seed, cudaStream_t stream);
// Loads the kernels, so that none is loaded while another spins.
cudaError_t load_script_kernels();

}  // namespace penstock::bench
