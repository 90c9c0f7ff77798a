#include "a2a_gemm_script.h"
#include "ops/sm90/ptx.cuh"
#include "penstock/fabric/guard_device.cuh"

namespace penstock::bench {
namespace {

constexpr std::uint64_t kGiveUpNs = 2'000'000'000;

__global__ void script_kernel(const ScriptedArrival* arrivals, int count,
                              const std::uint64_t* epoch) {
  if (threadIdx.x != 0) return;
  const std::uint64_t start = device::global_timer_ns();
  const std::uint64_t value = *epoch;
  for (int i = 0; i < count; ++i) {
    const ScriptedArrival arrival = arrivals[i];
    while (device::global_timer_ns() - start < arrival.at_ns) {
    }
    device::store_release<device::Scope::kSystem>(arrival.word, value);
  }
}

__global__ void wait_kernel(const std::uint64_t* const* words, int count,
                            const std::uint64_t* epoch) {
  const std::uint64_t start = device::global_timer_ns();
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    while (device::load_acquire<device::Scope::kSystem>(words[i]) < *epoch &&
           device::global_timer_ns() - start < kGiveUpNs) {
    }
  }
}

__global__ void advance_kernel(std::uint64_t* epoch) { ++*epoch; }

__device__ std::uint64_t hash(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t z =
      seed * 0xd1342543de82ef95ull + index * 0x9e3779b97f4a7c15ull + 0x632be59bd9b4e019ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
__global__ void fill_kernel(std::uint32_t* out, std::size_t pairs, std::uint64_t seed) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < pairs;
       i += step) {
    const std::uint64_t h = hash(seed, i);
    const float u = (static_cast<float>(static_cast<std::uint32_t>(h) >> 8) + 0.5f) * 0x1p-24f;
    const float v = static_cast<float>(static_cast<std::uint32_t>(h >> 40)) * 0x1p-24f;
    float s;
    float c;
    sincospif(2.0f * v, &s, &c);
    const float radius = sqrtf(-2.0f * logf(u));
    out[i] = sm90::pack_bf16(radius * c, radius * s);
  }
}

}  // namespace

cudaError_t play_script(const ScriptedArrival* arrivals, int count, const std::uint64_t* epoch,
                        cudaStream_t stream) {
  script_kernel<<<1, 32, 0, stream>>>(arrivals, count, epoch);
  return cudaGetLastError();
}
cudaError_t wait_for_words(const std::uint64_t* const* words, int count, const std::uint64_t* epoch,
                           cudaStream_t stream) {
  wait_kernel<<<1, 256, 0, stream>>>(words, count, epoch);
  return cudaGetLastError();
}
cudaError_t advance_epoch(std::uint64_t* epoch, cudaStream_t stream) {
  advance_kernel<<<1, 1, 0, stream>>>(epoch);
  return cudaGetLastError();
}
cudaError_t fill_bf16_normal(void* out, std::size_t count, std::uint64_t seed,
                             cudaStream_t stream) {
  fill_kernel<<<1056, 256, 0, stream>>>(static_cast<std::uint32_t*>(out), count / 2, seed);
  return cudaGetLastError();
}
cudaError_t load_script_kernels() {
  cudaFuncAttributes attributes{};
  cudaError_t status = cudaFuncGetAttributes(&attributes, script_kernel);
  if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, wait_kernel);
  if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, advance_kernel);
  return status;
}

}  // namespace penstock::bench
