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
  for (int i = peer; i < args.counter_count; i += 32) args.counters[i] = 0;
  bool free = true;
  if ((args.peers >> peer & 1u) != 0) {
    const device::Guard guard(args.guard);
    const device::WaitSite site{peer, 0, args.region, args.slot * args.ranks + peer};
    free = device::wait_epoch<Scope::kSystem>(args.consumed + peer * (kLineBytes / 8), before,
                                              guard, site) == WaitStatus::kArrived;
  }
  // A failed wait has raised the guard's abort, which ends the call's waits, and leaves `open`
  // behind: kernels store nothing then, and the copies that are enqueued already announce an old
  // epoch. Their bytes still land: a peer that was late may multiply rows of both calls, after the
  // fault.
  if (__all_sync(0xffffffffu, free) != 0 && peer == 0) {
    device::store_relaxed<Scope::kDevice>(args.open, before + 1);
  }
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
