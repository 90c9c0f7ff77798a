// Transport sm: a few CTAs that copy chunks to their ranks as the GEMM beside them finishes them.
#include "ops/moe_stage2/cuda/operator_kernels.h"
#include "ops/moe_stage2/cuda/post_sm90.cuh"

namespace penstock::moe_stage2 {
namespace {

constexpr int kThreads = 1024;  // 45 GB/s a CTA over NVLink; 8 CTAs fill a direction

// One thread: all tiles of the chunk are counted, and so all their rows written.
__device__ bool chunk_ready(const ShipArgs& a, const device::Guard& guard, int chunk, int tiles) {
  if (a.chunk_counters == nullptr) return true;
  constexpr int kStride = 32;  // kCounterStride
  const std::uint32_t full = static_cast<std::uint32_t>(tiles * a.column_tiles);
  ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_device> counter(
      *const_cast<std::uint32_t*>(a.chunk_counters + static_cast<std::int64_t>(chunk) * kStride));
  device::WaitClock clock;
  while (counter.load(::cuda::memory_order_relaxed) < full) {
    if (const WaitStatus status = guard.poll(clock); status != WaitStatus::kArrived) {
      (void)guard.fail(status, clock, {a.post.rank, kStageChunk, kSend, chunk}, full,
                       counter.load(::cuda::memory_order_relaxed));
      return false;
    }
    __nanosleep(200);  // the GEMM's counters share the L2 with these polls
  }
  return counter.load(::cuda::memory_order_acquire) >= full;
}

// In pairs like the GEMM beside it, or single CTAs would leave SMs that its clusters of two cannot
// use.
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    ship_sm90(const __grid_constant__ ShipArgs a) {
  const device::Guard guard(a.post.guard);
  const std::uint64_t epoch = a.state->epoch;
  const int tiles = *a.tile_count;
  if (a.state->stop != 0) return;
  for (int first = 0; first < tiles; first += a.tiles_per_chunk) {
    const int last = min(first + a.tiles_per_chunk, tiles);
    int failed = 0;
    if (threadIdx.x == 0) {
      failed = chunk_ready(a, guard, first / a.tiles_per_chunk, last - first) ? 0 : 1;
    }
    if (__syncthreads_or(failed) != 0) return;
    for (int step = 1; step < a.post.ranks; ++step) {
      const PutDescriptor put =
          chunk_put(a.post, parity_of(epoch), peer_after(a.post, step), first, last);
      if (put.bytes == 0) continue;
      device::put_threads(
          a.post.window.bases[put.peer] + a.post.window.mapping_offset + put.dst_offset,
          a.post.window.base + put.src_offset, put.bytes,
          static_cast<std::uint64_t>(blockIdx.x) * kThreads + threadIdx.x,
          static_cast<std::uint64_t>(gridDim.x) * kThreads);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_system> arrivals(a.state->copy_arrivals);
  if (arrivals.fetch_add(1, ::cuda::memory_order_acq_rel) + 1 != gridDim.x) return;
  arrivals.store(0, ::cuda::memory_order_relaxed);  // for the next launch, which comes behind
  announce_rows(a.post, epoch);
}

}  // namespace

cudaError_t launch_ship_sm90(const ShipArgs& args, int ctas, bool beside_gemm,
                             cudaStream_t stream) {
  ShipArgs ship = args;
  ship.post.kind = PostKind::kDirect;  // the signals are this kernel's stores
  if (!beside_gemm) {
    ship.chunk_counters = nullptr;
    ship.tiles_per_chunk = 0x7fffffff;
  }
  ship_sm90<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(ship);
  return cudaGetLastError();
}

cudaError_t load_ship_sm90() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, ship_sm90);
}

}  // namespace penstock::moe_stage2
