#include "fabric/cuda/packet_all_reduce_sm90.h"
#include "penstock/fabric/packet_device.cuh"
#include "penstock/fabric/signal_device.cuh"

namespace penstock::cuda {
namespace {

using device::Guard;
using device::Payload;
using device::Scope;

// Barrier over this rank's grid that ends like every other wait. `round` counts its uses in this
// launch, `base` the arrivals before it.
__device__ WaitStatus grid_barrier(std::uint64_t* arrivals, std::uint64_t target,
                                   const Guard& guard) {
  __syncthreads();
  if (threadIdx.x == 0) {
    ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_device>(*arrivals).fetch_add(
        1, ::cuda::memory_order_acq_rel);
  }
  return device::wait_epoch_block<Scope::kDevice>(arrivals, target, guard,
                                                  {guard.view().rank, 0, -1, -1});
}

template <int kRanks>
__global__ void __launch_bounds__(kPacketThreads)
    packet_calls_kernel(const __grid_constant__ PacketCalls args) {
  const Guard guard(args.guard);
  const device::PacketAllReduce<kRanks> all_reduce(args.packets, guard);
  const std::uint64_t first = blockIdx.x * blockDim.x + threadIdx.x;
  const std::uint64_t stride = gridDim.x * blockDim.x;
  const std::uint64_t before = *args.epoch;
  // Every launch makes the same number of barrier arrivals per sweep, so arrivals / blocks counts
  // whole barriers.
  std::uint64_t barriers = device::load_relaxed<Scope::kDevice>(args.barrier) / gridDim.x;
  WaitStatus status = WaitStatus::kArrived;
  for (std::uint64_t call = 0; call < args.calls; ++call) {
    const std::uint64_t epoch = before + call + 1;
    if (args.delay_ns != 0 && blockIdx.x == call % gridDim.x) __nanosleep(args.delay_ns);
    const std::uint64_t at = call % args.inputs * args.count;
    const auto load = [&](std::uint64_t p) {
      const std::uint32_t* in = args.in + (at + p) * 3;
      return Payload{{in[0], in[1], in[2]}};
    };
    const auto store = [&](std::uint64_t p, const Payload& sum) {
      std::uint32_t* out = args.out + (at + p) * 3;
      out[0] = sum.word[0];
      out[1] = sum.word[1];
      out[2] = sum.word[2];
    };
    // A thread whose wait failed does nothing more but goes on to the barriers, where the others of
    // its block are; they all leave together, by a vote.
    if (status == WaitStatus::kArrived) {
      status = args.two_shot ? all_reduce.two_shot(epoch, first, stride, args.count, load, store)
                             : all_reduce.one_shot(epoch, first, stride, args.count, load, store);
    }
    if (!sweep_due(epoch)) continue;
    const WaitStatus consumed = grid_barrier(args.barrier, ++barriers * gridDim.x, guard);
    if (status == WaitStatus::kArrived) status = consumed;
    if (__syncthreads_or(status != WaitStatus::kArrived) != 0) break;
    all_reduce.sweep(epoch, first, stride);
    status = grid_barrier(args.barrier, ++barriers * gridDim.x, guard);  // the same for all threads
    if (status != WaitStatus::kArrived) break;
  }
  if (status != WaitStatus::kArrived) *args.status = static_cast<std::uint32_t>(status);
}

__global__ void advance_epoch_kernel(std::uint64_t* epoch, std::uint64_t calls) { *epoch += calls; }

using Kernel = void (*)(PacketCalls);

Kernel kernel_for(int ranks) {
  switch (ranks) {
    case 2:
      return packet_calls_kernel<2>;
    case 3:
      return packet_calls_kernel<3>;
    case 4:
      return packet_calls_kernel<4>;
    case 5:
      return packet_calls_kernel<5>;
    case 6:
      return packet_calls_kernel<6>;
    case 7:
      return packet_calls_kernel<7>;
    case 8:
      return packet_calls_kernel<8>;
    default:
      return nullptr;
  }
}

}  // namespace

cudaError_t launch_packet_calls(const PacketCalls& calls, int blocks, cudaStream_t stream) {
  const Kernel kernel = kernel_for(calls.packets.ranks);
  if (kernel == nullptr || calls.count > calls.packets.capacity) return cudaErrorInvalidValue;
  kernel<<<blocks, kPacketThreads, 0, stream>>>(calls);
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) return status;
  advance_epoch_kernel<<<1, 1, 0, stream>>>(calls.epoch, calls.calls);
  return cudaGetLastError();
}

cudaError_t load_packet_kernels() {
  cudaFuncAttributes attributes{};
  for (int ranks = 2; ranks <= 8; ++ranks) {
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel_for(ranks));
    if (status != cudaSuccess) return status;
  }
  return cudaFuncGetAttributes(&attributes, advance_epoch_kernel);
}

}  // namespace penstock::cuda
