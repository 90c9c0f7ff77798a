// The mirror's transport sm: a few CTAs copy the pieces to their ranks as the GEMM beside them
// finishes them, one after the other and all of them at each.
#include <cuda_runtime.h>

#include "ops/a2a_gemm/cuda/post_results_sm90.cuh"

namespace penstock::a2a_gemm {
namespace {

using device::Scope;

constexpr int kThreads = 512;
constexpr int kWarpsPerTile = 16;  // that store a tile of a cluster: two CTAs of eight

// One thread: every part of the piece is stored. False: the wait failed.
__device__ bool wait_for_result(const ResultSend& send, std::int32_t index,
                                const device::Guard& guard) {
  const auto full = static_cast<std::uint32_t>(send.grid.piece_tiles(index) * kWarpsPerTile);
  ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_device> counter(send.counters[index]);
  device::WaitClock clock;
  while (counter.load(::cuda::memory_order_relaxed) < full) {
    if (const WaitStatus status = guard.poll(clock); status != WaitStatus::kArrived) {
      (void)guard.fail(status, clock, {send.grid.rank, 0, kMirrorSend, index}, full,
                       counter.load(::cuda::memory_order_relaxed));
      return false;
    }
    __nanosleep(200);  // the GEMM's counters share the L2 with these polls
  }
  return counter.load(::cuda::memory_order_acquire) >= full;
}

__global__ void __launch_bounds__(kThreads, 1)
    ship_results_sm90(const __grid_constant__ ResultSend send, bool beside) {
  if (!is_open(send)) return;
  const device::Guard guard(send.guard);
  const std::uint64_t epoch = device::load_relaxed<Scope::kDevice>(send.epoch);
  const auto slot = static_cast<std::uint32_t>(send.slot);
  const std::int32_t pieces = send.grid.pieces();
  for (std::int32_t i = 0; i < pieces; ++i) {
    int failed = 0;
    if (beside && threadIdx.x == 0) failed = wait_for_result(send, i, guard) ? 0 : 1;
    if (__syncthreads_or(failed) != 0) return;
    const Piece piece = mirror_piece(send.grid, send.rows, i);
    const auto row = static_cast<std::uint64_t>(piece.row);
    device::put_threads(send.base[piece.peer] + send.index.landing(slot, send.grid.rank, row),
                        send.base[send.grid.rank] + send.index.send(slot, piece.peer, row),
                        static_cast<std::uint64_t>(piece.rows) * send.index.shape.row_bytes,
                        blockIdx.x * static_cast<std::uint64_t>(kThreads) + threadIdx.x,
                        gridDim.x * static_cast<std::uint64_t>(kThreads));
    __syncthreads();
    if (threadIdx.x != 0) continue;
    ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_device> done(send.counters[pieces + i]);
    if (done.fetch_add(1, ::cuda::memory_order_acq_rel) + 1 == gridDim.x) {
      device::store_release<Scope::kSystem>(
          reinterpret_cast<std::uint64_t*>(send.base[piece.peer] + piece_word(send, piece)), epoch);
    }
  }
}

}  // namespace

cudaError_t load_ship_results_sm90() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, ship_results_sm90);
}

cudaError_t launch_ship_results_sm90(const ResultSend& send, bool beside, int ctas,
                                     cudaStream_t stream) {
  ship_results_sm90<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(send, beside);
  return cudaGetLastError();
}

}  // namespace penstock::a2a_gemm
