#include "fabric/cuda/put_sm90.h"
#include "penstock/fabric/signal_device.cuh"

namespace penstock::cuda {
namespace {

// At most kSmPutAtOnce pieces of 16 bytes a thread: all loads, then all stores, one trip to memory.
__device__ void put_at_once(const SmPut& put, std::uint64_t first, std::uint64_t stride) {
  const std::uint64_t pieces = put.bytes / sizeof(uint4);
  const auto* from = reinterpret_cast<const uint4*>(put.src);
  auto* to = reinterpret_cast<uint4*>(put.dst);
  uint4 piece[kSmPutAtOnce];
#pragma unroll
  for (int k = 0; k < kSmPutAtOnce; ++k) {
    if (first + k * stride < pieces) piece[k] = from[first + k * stride];
  }
#pragma unroll
  for (int k = 0; k < kSmPutAtOnce; ++k) {
    if (first + k * stride < pieces) to[first + k * stride] = piece[k];
  }
}

__global__ void __launch_bounds__(kSmPutThreads, 1)
    sm_put_kernel(const __grid_constant__ SmPut put) {
  const std::uint64_t first = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::uint64_t stride = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  const auto all = reinterpret_cast<std::uint64_t>(put.dst) |
                   reinterpret_cast<std::uint64_t>(put.src) | put.bytes;
  if (all % sizeof(uint4) == 0 && put.bytes <= kSmPutAtOnce * sizeof(uint4) * stride) {
    put_at_once(put, first, stride);
  } else {
    device::put_threads(put.dst, put.src, put.bytes, first, stride);
  }
  if (put.word == nullptr && put.done == nullptr) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  // Every CTA's stores are made visible to the system by its own fence, all CTAs at once; the last
  // one then has nothing of its own outstanding when it signals.
  ::cuda::atomic_thread_fence(::cuda::memory_order_acq_rel, ::cuda::thread_scope_system);
  ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_device> arrivals(*put.arrivals);
  if (arrivals.fetch_add(1, ::cuda::memory_order_relaxed) + 1 != gridDim.x) return;
  ::cuda::atomic_thread_fence(::cuda::memory_order_acq_rel, ::cuda::thread_scope_system);
  if (put.word != nullptr) device::store_relaxed<device::Scope::kSystem>(put.word, put.epoch);
  arrivals.store(0, ::cuda::memory_order_relaxed);  // for the next launch, which stream order puts
                                                    // behind this one
  if (put.done != nullptr) device::store_release<device::Scope::kSystem>(put.done, put.done_value);
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

const void* sm_put_function() { return reinterpret_cast<const void*>(sm_put_kernel); }

cudaError_t load_sm_put() {
  cudaFuncAttributes attributes{};
  if (const auto status = cudaFuncGetAttributes(&attributes, nothing_kernel); status != cudaSuccess)
    return status;
  return cudaFuncGetAttributes(&attributes, sm_put_kernel);
}

}  // namespace penstock::cuda
