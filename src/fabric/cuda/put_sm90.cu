#include "fabric/cuda/put_sm90.h"
#include "penstock/fabric/signal_device.cuh"

namespace penstock::cuda {
namespace {

__global__ void __launch_bounds__(kSmPutThreads, 1)
    sm_put_kernel(const __grid_constant__ SmPut put) {
  device::put_threads(put.dst, put.src, put.bytes,
                      static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
                      static_cast<std::uint64_t>(gridDim.x) * blockDim.x);
  if (put.word == nullptr) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_device> arrivals(*put.arrivals);
  if (arrivals.fetch_add(1, ::cuda::memory_order_acq_rel) + 1 != gridDim.x) return;
  arrivals.store(0, ::cuda::memory_order_relaxed);  // for the next launch, which stream order puts
                                                    // behind this one
  device::store_release<device::Scope::kSystem>(put.word, put.epoch);
}

__global__ void nothing_kernel() {}

}  // namespace

cudaError_t launch_nothing(cudaStream_t stream) {
  nothing_kernel<<<1, 1, 0, stream>>>();
  return cudaGetLastError();
}

cudaError_t launch_sm_put(const SmPut& put, int blocks, cudaStream_t stream, int threads) {
  sm_put_kernel<<<blocks, threads, 0, stream>>>(put);
  return cudaGetLastError();
}

cudaError_t load_sm_put() {
  cudaFuncAttributes attributes{};
  if (const auto status = cudaFuncGetAttributes(&attributes, nothing_kernel); status != cudaSuccess)
    return status;
  return cudaFuncGetAttributes(&attributes, sm_put_kernel);
}

}  // namespace penstock::cuda
