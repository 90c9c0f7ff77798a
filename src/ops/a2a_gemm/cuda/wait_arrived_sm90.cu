// The gate of the unfused form: a kernel that ends when everything is there.
#include <cuda_runtime.h>

#include "ops/a2a_gemm/cuda/call_kernels.h"
#include "penstock/fabric/signal_device.cuh"

namespace penstock::a2a_gemm {
namespace {

using device::Scope;

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    wait_arrived_sm90(const __grid_constant__ WaitArrivedArgs args) {
  const device::Guard guard(args.guard);
  const std::uint64_t epoch = *args.epoch;
  const int words = (args.ranks - 1) * args.row_blocks;
  for (int i = static_cast<int>(threadIdx.x); i < words; i += kThreads) {
    const int step = 1 + i / args.row_blocks;
    const int block = i % args.row_blocks;
    const int source = source_of_step(args.rank, step, args.ranks);
    const device::WaitSite site{source, step, kArrived, source * args.row_blocks + block};
    if (device::wait_epoch<Scope::kSystem>(args.arrived + source * args.arrival_stride + block,
                                           epoch, guard, site) != WaitStatus::kArrived) {
      return;
    }
  }
}

}  // namespace

cudaError_t load_wait_arrived_sm90() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, wait_arrived_sm90);
}

cudaError_t launch_wait_arrived_sm90(const WaitArrivedArgs& args, cudaStream_t stream) {
  wait_arrived_sm90<<<1, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace penstock::a2a_gemm
