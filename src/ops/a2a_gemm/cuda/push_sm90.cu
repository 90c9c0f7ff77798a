// Transport sm: a few CTAs store the pieces, one after the other and all of them at each, so that
// pieces arrive in the order in which they are read.
#include <cuda_runtime.h>

#include "ops/a2a_gemm/cuda/call_kernels.h"
#include "penstock/fabric/signal_device.cuh"

namespace penstock::a2a_gemm {
namespace {

using device::Scope;

constexpr int kThreads = 512;

__global__ void __launch_bounds__(kThreads, 1) push_sm90(const __grid_constant__ SendArgs args) {
  const std::uint64_t thread = blockIdx.x * static_cast<std::uint64_t>(kThreads) + threadIdx.x;
  const std::uint64_t threads = gridDim.x * static_cast<std::uint64_t>(kThreads);
  const std::uint64_t epoch = device::load_relaxed<Scope::kDevice>(args.epoch);
  // In a call that was not opened the pieces are counted, and neither stored nor announced.
  const bool open = device::load_relaxed<Scope::kDevice>(args.open) == epoch;
  const auto slot = static_cast<std::uint32_t>(args.slot);
  for (int i = 0; i < args.count; ++i) {
    const Piece piece = args.pieces[i];
    const std::int64_t row = args.row_offset[piece.peer] + piece.row;
    const auto to = static_cast<std::uint64_t>(piece.row);
    std::byte* base = args.base[piece.peer];
    if (open) {
      device::put_threads(base + args.index.chunk(slot, args.rank, to),
                          args.x + row * static_cast<std::int64_t>(args.index.shape.row_bytes),
                          static_cast<std::uint64_t>(piece.rows) * args.index.shape.row_bytes,
                          thread, threads);
    }
    __syncthreads();
    if (threadIdx.x != 0) continue;
    ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_device> done(args.done[i]);
    if ((done.fetch_add(1, ::cuda::memory_order_acq_rel) + 1) % gridDim.x == 0 && open) {
      device::store_release<Scope::kSystem>(
          reinterpret_cast<std::uint64_t*>(
              base +
              args.index.arrived(slot, args.rank, static_cast<std::uint64_t>(piece.row_block))),
          epoch);
    }
  }
}

}  // namespace

cudaError_t load_push_sm90() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, push_sm90);
}

cudaError_t launch_push_sm90(const SendArgs& args, int ctas, cudaStream_t stream) {
  push_sm90<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace penstock::a2a_gemm
