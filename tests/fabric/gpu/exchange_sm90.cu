#include "fabric/gpu/exchange_sm90.h"
#include "penstock/fabric/signal_device.cuh"
#include "penstock/fabric/transport_device.cuh"

namespace penstock::test {
namespace {

using device::Guard;
using device::Scope;

constexpr std::uint32_t kPoison = 0x7fc0dead;  // a NaN, as f32

// f32 word i of the chunk that `from` sends to `to` in call `epoch`: a value that names its place,
// times a power of two that changes with every call, so that yesterday's data can never pass for
// today's.
__device__ std::uint32_t expected_word(int from, int to, std::uint64_t chunk, std::uint64_t i,
                                       std::uint64_t epoch, std::uint64_t shift) {
  const std::uint32_t place = static_cast<std::uint32_t>(
      i * 2654435761ULL + chunk * 40503ULL + static_cast<std::uint64_t>(from * 64 + to) * 97);
  const float scale = exp2f(static_cast<float>((epoch + shift) % 8));
  return __float_as_uint(static_cast<float>((place & 0xffff) + 1) * scale);
}

__device__ std::uint64_t chunk_at(const Exchange& x, std::uint64_t epoch, int peer,
                                  std::uint64_t chunk) {
  return ((parity_of(epoch) * x.shape.ranks + static_cast<std::uint64_t>(peer)) * x.shape.chunks +
          chunk) *
         x.shape.chunk_bytes;
}
__device__ std::uint64_t word_at(const Exchange& x, int peer, std::uint64_t chunk) {
  return (static_cast<std::uint64_t>(peer) * x.shape.chunks + chunk) * sizeof(std::uint64_t);
}
__device__ std::byte* window_of(const Exchange& x, int rank) {
  return x.window.bases[rank] + x.window.mapping_offset;
}

__device__ bool produce(const Exchange& x, const Guard& guard, std::uint64_t epoch, int peer,
                        std::uint64_t chunk) {
  const int self = x.window.rank;
  // The receiver has emptied this parity's buffer, hence our own send buffer of it has been read,
  // too.
  const auto* consumed = reinterpret_cast<const std::uint64_t*>(
      x.window.base + x.at.offset[kConsumed] + word_at(x, peer, chunk));
  if (device::wait_epoch_block<Scope::kSystem>(consumed, reuse_epoch(epoch), guard,
                                               {peer, 0, kConsumed, static_cast<int>(chunk)}) !=
      WaitStatus::kArrived) {
    return false;
  }
  if (x.delay_ns != 0) __nanosleep(static_cast<unsigned>(x.delay_ns));
  const std::uint64_t source = x.at.offset[kSend] + chunk_at(x, epoch, peer, chunk);
  const std::uint64_t target = x.at.offset[kReceive] + chunk_at(x, epoch, self, chunk);
  const std::uint64_t signal = x.at.offset[kArrived] + word_at(x, self, chunk);
  auto* words = reinterpret_cast<std::uint32_t*>(x.window.base + source);
  for (std::uint64_t i = threadIdx.x; i < x.shape.chunk_bytes / 4; i += blockDim.x) {
    words[i] = expected_word(self, peer, chunk, i, epoch, x.shift);
  }
  __syncthreads();
  if (x.ring.slots == nullptr) {
    device::put_signal_block(window_of(x, peer) + target, x.window.base + source,
                             x.shape.chunk_bytes,
                             reinterpret_cast<std::uint64_t*>(window_of(x, peer) + signal), epoch);
    return true;
  }
  WaitStatus status = WaitStatus::kArrived;
  if (threadIdx.x == 0) {
    PutDescriptor put;
    put.peer = peer;
    put.src_offset = source;
    put.dst_offset = target;
    put.bytes = x.shape.chunk_bytes;
    put.signal_offset = signal;
    put.signal_epoch = epoch;
    status = device::post(x.ring, put, guard, {peer, 1, kSend, static_cast<int>(chunk)});
  }
  return __syncthreads_or(static_cast<int>(status)) == 0;
}

__device__ bool consume(const Exchange& x, const Guard& guard, std::uint64_t epoch, int source,
                        std::uint64_t chunk) {
  const int self = x.window.rank;
  const auto* arrived = reinterpret_cast<const std::uint64_t*>(
      x.window.base + x.at.offset[kArrived] + word_at(x, source, chunk));
  if (device::wait_epoch_block<Scope::kSystem>(arrived, epoch, guard,
                                               {source, 2, kArrived, static_cast<int>(chunk)}) !=
      WaitStatus::kArrived) {
    return false;
  }
  const std::uint64_t at = chunk_at(x, epoch, source, chunk);
  auto* words = reinterpret_cast<std::uint32_t*>(x.window.base + x.at.offset[kReceive] + at);
  std::uint64_t right = 0;
  std::uint64_t wrong = 0;
  for (std::uint64_t i = threadIdx.x; i < x.shape.chunk_bytes / 4; i += blockDim.x) {
    if (words[i] == expected_word(source, self, chunk, i, epoch, x.shift)) {
      ++right;
    } else {
      ++wrong;
      atomicMin(reinterpret_cast<unsigned long long*>(&x.result->first_wrong), at + i * 4);
    }
    words[i] = kPoison;
  }
  atomicAdd(reinterpret_cast<unsigned long long*>(&x.result->words_right), right);
  if (wrong != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&x.result->words_wrong), wrong);
  device::signal_block(reinterpret_cast<std::uint64_t*>(
                           window_of(x, source) + x.at.offset[kConsumed] + word_at(x, self, chunk)),
                       epoch);
  return true;
}

__global__ void __launch_bounds__(kExchangeThreads)
    exchange_kernel(const __grid_constant__ Exchange x) {
  const Guard guard(x.guard);
  const bool producer = blockIdx.x % 2 == 0;
  const std::uint64_t lane = blockIdx.x / 2;
  const std::uint64_t lanes = producer ? (gridDim.x + 1) / 2 : gridDim.x / 2;
  const std::uint64_t before = *x.epoch;
  for (std::uint64_t epoch = before + 1; epoch <= before + x.calls; ++epoch) {
    for (std::uint64_t item = lane; item < x.shape.ranks * x.shape.chunks; item += lanes) {
      // Start with the next rank: all ranks at one receiver at once would be a hot spot.
      const int peer = static_cast<int>(
          (item / x.shape.chunks + static_cast<std::uint64_t>(x.window.rank) + 1) % x.shape.ranks);
      const std::uint64_t chunk = item % x.shape.chunks;
      const bool went_on =
          producer ? produce(x, guard, epoch, peer, chunk) : consume(x, guard, epoch, peer, chunk);
      if (!went_on) {
        if (threadIdx.x == 0)
          atomicAdd(reinterpret_cast<unsigned long long*>(&x.result->stopped), 1ULL);
        return;
      }
    }
  }
}

__global__ void advance_kernel(std::uint64_t* epoch, std::uint64_t calls) { *epoch += calls; }

__global__ void wait_kernel(const __grid_constant__ GuardView view, const std::uint64_t* word,
                            std::uint64_t epoch, int peer, std::uint32_t* status) {
  const Guard guard(view);
  *status = static_cast<std::uint32_t>(
      device::wait_epoch<Scope::kSystem>(word, epoch, guard, {peer, 7, 5, 3}));
}

__global__ void post_kernel(const __grid_constant__ GuardView view,
                            const __grid_constant__ RingView ring,
                            const __grid_constant__ PutDescriptor put, int count,
                            std::uint32_t* status) {
  const Guard guard(view);
  WaitStatus last = WaitStatus::kArrived;
  for (int i = 0; i < count && last == WaitStatus::kArrived; ++i)
    last = device::post(ring, put, guard, {put.peer, 8, -1, i});
  *status = static_cast<std::uint32_t>(last);
}

}  // namespace

cudaError_t launch_exchange(const Exchange& exchange, int blocks, cudaStream_t stream) {
  exchange_kernel<<<blocks, kExchangeThreads, 0, stream>>>(exchange);
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) return status;
  advance_kernel<<<1, 1, 0, stream>>>(exchange.epoch, exchange.calls);
  return cudaGetLastError();
}

cudaError_t load_exchange_kernels() {
  cudaFuncAttributes attributes{};
  if (const auto status = cudaFuncGetAttributes(&attributes, exchange_kernel);
      status != cudaSuccess)
    return status;
  if (const auto status = cudaFuncGetAttributes(&attributes, advance_kernel); status != cudaSuccess)
    return status;
  if (const auto status = cudaFuncGetAttributes(&attributes, wait_kernel); status != cudaSuccess)
    return status;
  return cudaFuncGetAttributes(&attributes, post_kernel);
}

cudaError_t launch_wait(const GuardView& guard, const std::uint64_t* word, std::uint64_t epoch,
                        int peer, std::uint32_t* status, cudaStream_t stream) {
  wait_kernel<<<1, 1, 0, stream>>>(guard, word, epoch, peer, status);
  return cudaGetLastError();
}

cudaError_t launch_posts(const GuardView& guard, const RingView& ring, const PutDescriptor& put,
                         int count, std::uint32_t* status, cudaStream_t stream) {
  post_kernel<<<1, 1, 0, stream>>>(guard, ring, put, count, status);
  return cudaGetLastError();
}

}  // namespace penstock::test
