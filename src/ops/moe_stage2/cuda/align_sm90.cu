#include "ops/moe_stage2/cuda/align_sm90.h"
#include "penstock/fabric/signal_device.cuh"

namespace penstock::moe_stage2 {
namespace {

// A thread a peer.
__global__ void __launch_bounds__(64) align_sm90(const __grid_constant__ AlignArgs a) {
  const device::Guard guard(a.guard);
  const std::uint64_t epoch = *a.epoch + 1;
  const int peer = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (peer == 0) *a.epoch = epoch;
  if (peer >= a.window.ranks) return;
  device::store_release<device::Scope::kSystem>(
      reinterpret_cast<std::uint64_t*>(a.window.bases[peer] + a.window.mapping_offset +
                                       static_cast<std::uint64_t>(a.window.rank) * kAlignLineBytes),
      epoch);
  (void)device::wait_epoch<device::Scope::kSystem>(
      reinterpret_cast<const std::uint64_t*>(a.window.base +
                                             static_cast<std::uint64_t>(peer) * kAlignLineBytes),
      epoch, guard, {peer, 0, 0, peer});
}

}  // namespace

cudaError_t launch_align_sm90(const AlignArgs& args, cudaStream_t stream) {
  align_sm90<<<1, 64, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t load_align_sm90() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, align_sm90);
}

}  // namespace penstock::moe_stage2
