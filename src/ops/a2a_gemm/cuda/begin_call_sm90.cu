// Opens a call: a new epoch, and the peers' leave to write into their windows. A kernel of its own,
// ahead of the copies in stream order: nothing that moves bytes has to wait for anybody.
#include <cuda_runtime.h>

#include "ops/a2a_gemm/cuda/call_kernels.h"
#include "penstock/fabric/signal_device.cuh"

namespace penstock::a2a_gemm {
namespace {

using device::Scope;

__global__ void __launch_bounds__(32) begin_call_sm90(const __grid_constant__ BeginArgs args) {
  const auto peer = static_cast<int>(threadIdx.x);
  // Read by every thread before one of them moves it on.
  const std::uint64_t before = device::load_relaxed<Scope::kDevice>(args.epoch);
  __syncwarp();
  if (peer == 0) device::store_relaxed<Scope::kDevice>(args.epoch, before + 1);
  if ((args.peers >> peer & 1u) == 0) return;
  const device::Guard guard(args.guard);
  const device::WaitSite site{peer, 0, kConsumed, args.slot * args.ranks + peer};
  // A failed wait raises the guard's abort, which ends the call's waits. Its copies are enqueued
  // already and still run: a peer that was late may multiply rows of both calls, after the fault.
  (void)device::wait_epoch<Scope::kSystem>(args.consumed + peer * (kLineBytes / 8), before, guard,
                                           site);
}

}  // namespace

cudaError_t load_begin_call_sm90() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, begin_call_sm90);
}

cudaError_t launch_begin_call_sm90(const BeginArgs& args, cudaStream_t stream) {
  begin_call_sm90<<<1, 32, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace penstock::a2a_gemm
