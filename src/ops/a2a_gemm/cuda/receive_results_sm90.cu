// The mirror's receiving end: pieces from the window into the result, each source's as they come.
#include <cuda_runtime.h>

#include "ops/a2a_gemm/cuda/mirror_kernels.h"
#include "penstock/fabric/signal_device.cuh"

namespace penstock::a2a_gemm {
namespace {

using device::Scope;

constexpr int kThreads = 512;

// The last CTA of the grid tells the sources that their results have been read.
__device__ __forceinline__ void publish_consumed(const ReceiveArgs& args,
                                                 const device::Guard& guard) {
  ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_device> finished(*args.finished);
  if ((finished.fetch_add(1, ::cuda::memory_order_acq_rel) + 1) % gridDim.x != 0) return;
  if (guard.aborted()) return;
  const std::uint64_t epoch = *args.epoch;
  for (int source = 0; source < args.ranks; ++source) {
    if (args.consumed[source] != nullptr) {
      device::store_release<Scope::kSystem>(args.consumed[source], epoch);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    receive_results_sm90(const __grid_constant__ ReceiveArgs args) {
  const device::Guard guard(args.guard);
  const std::uint64_t epoch = *args.epoch;
  const auto slot = static_cast<std::uint32_t>(args.slot);
  const auto blocks = static_cast<int>(args.index.shape.row_blocks);
  int failed = 0;  // the same in all threads of the CTA
  for (int block = 0; block < blocks && failed == 0; ++block) {
    for (int step = 1; step < args.ranks && failed == 0; ++step) {
      const int source = source_of_step(args.rank, step, args.ranks);
      const std::int32_t row = block * args.row_block_rows;
      if (row >= args.rows[source]) continue;
      const auto* word = reinterpret_cast<const std::uint64_t*>(
          args.window + args.index.arrived(slot, source, static_cast<std::uint64_t>(block)));
      const device::WaitSite site{source, step, kMirrorArrived, source * blocks + block};
      failed = device::wait_epoch_block<Scope::kSystem>(word, epoch, guard, site) !=
               WaitStatus::kArrived;
      if (failed != 0) break;
      const std::int32_t rows = min(args.row_block_rows, args.rows[source] - row);
      device::put_threads(
          args.out + (args.row_offset[source] + row) *
                         static_cast<std::int64_t>(args.index.shape.row_bytes),
          args.window + args.index.landing(slot, source, static_cast<std::uint64_t>(row)),
          static_cast<std::uint64_t>(rows) * args.index.shape.row_bytes,
          blockIdx.x * static_cast<std::uint64_t>(kThreads) + threadIdx.x,
          gridDim.x * static_cast<std::uint64_t>(kThreads));
    }
  }
  __syncthreads();  // every thread's reads of the window
  if (threadIdx.x == 0) publish_consumed(args, guard);
}

}  // namespace

cudaError_t load_receive_results_sm90() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, receive_results_sm90);
}

cudaError_t launch_receive_results_sm90(const ReceiveArgs& args, int ctas, cudaStream_t stream) {
  receive_results_sm90<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace penstock::a2a_gemm
