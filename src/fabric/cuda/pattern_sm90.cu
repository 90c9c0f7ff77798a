#include "fabric/cuda/pattern_sm90.h"
#include "fabric/pattern.h"
#include "penstock/fabric/signal_device.cuh"

namespace penstock::cuda {
namespace {

constexpr int kThreads = 512;

__global__ void __launch_bounds__(kThreads)
    fill_kernel(std::uint64_t* to, std::uint64_t words, std::uint64_t seed) {
  const std::uint64_t stride = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t i = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < words; i += stride) {
    to[i] = pattern_word(seed, i);
  }
}

__global__ void __launch_bounds__(kThreads) receive_kernel(const __grid_constant__ Receive args) {
  const device::Guard guard(args.guard);
  const WaitStatus status = device::wait_epoch_block<device::Scope::kSystem>(
      args.word, args.epoch, guard,
      {args.peer, 0, args.region, static_cast<std::int32_t>(blockIdx.x)});
  if (status != WaitStatus::kArrived) {
    if (threadIdx.x == 0) *args.status = static_cast<std::uint32_t>(status);
    return;
  }
  const std::uint64_t stride = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  std::uint64_t wrong = ~0ULL;
  for (std::uint64_t i = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < args.words && wrong == ~0ULL; i += stride) {
    if (args.data[i] != pattern_word(args.seed, i)) wrong = i;
  }
  if (wrong == ~0ULL) return;
  ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_device>(*args.first_wrong)
      .fetch_min(wrong, ::cuda::memory_order_relaxed);
}

}  // namespace

cudaError_t launch_fill(std::uint64_t* to, std::uint64_t words, std::uint64_t seed, int blocks,
                        cudaStream_t stream) {
  fill_kernel<<<blocks, kThreads, 0, stream>>>(to, words, seed);
  return cudaGetLastError();
}

cudaError_t launch_receive(const Receive& receive, int blocks, cudaStream_t stream) {
  receive_kernel<<<blocks, kThreads, 0, stream>>>(receive);
  return cudaGetLastError();
}

cudaError_t load_pattern_kernels() {
  cudaFuncAttributes attributes{};
  if (const auto status = cudaFuncGetAttributes(&attributes, fill_kernel); status != cudaSuccess)
    return status;
  return cudaFuncGetAttributes(&attributes, receive_kernel);
}

}  // namespace penstock::cuda
