#include "fabric/cuda/link_kernels_sm90.h"
#include "penstock/fabric/signal_device.cuh"
#include "penstock/fabric/transport_device.cuh"

namespace penstock::cuda {
namespace {

using device::Guard;
using device::Scope;

__global__ void measure_kernel(const __grid_constant__ EchoArgs args) {
  const Guard guard(args.guard);
  if (args.start_word != nullptr) {
    (void)device::wait_epoch<Scope::kDevice>(args.start_word, args.start_value, guard,
                                             {0, 3, -1, -1});
  }
  args.clock[0] = static_cast<std::uint64_t>(clock64());
  args.clock[1] = device::global_timer_ns();
  WaitStatus status = WaitStatus::kArrived;
  for (int round = 0; round < args.rounds && status == WaitStatus::kArrived; ++round) {
    const std::uint64_t epoch = args.first + static_cast<std::uint64_t>(round);
    const long long start = clock64();
    if (args.ring.slots == nullptr) {
      device::store_release<Scope::kSystem>(args.peer_word, epoch);
    } else {
      const auto put_at = [&](int i) {
        PutDescriptor put = args.put;
        put.src_offset += static_cast<std::uint64_t>(i) * args.stride;
        put.dst_offset += static_cast<std::uint64_t>(i) * args.stride;
        put.signal_epoch = epoch;
        if (i + 1 != args.burst) put.signal_offset = kNoSignal;
        return put;
      };
      if (args.together) {
        status = device::post_many(args.ring, args.burst, put_at, guard, {args.put.peer, 0, -1, 0});
      } else {
        for (int i = 0; i < args.burst && status == WaitStatus::kArrived; ++i) {
          status = device::post(args.ring, put_at(i), guard, {args.put.peer, 0, -1, i});
        }
      }
      if (status != WaitStatus::kArrived) break;
    }
    status = device::wait_epoch<Scope::kSystem>(args.own_word, epoch, guard,
                                                {args.put.peer, 1, -1, round});
    args.cycles[round] = static_cast<std::uint32_t>(clock64() - start);
  }
  args.clock[2] = static_cast<std::uint64_t>(clock64());
  args.clock[3] = device::global_timer_ns();
  if (args.end_word != nullptr) device::store_release<Scope::kDevice>(args.end_word, 1);
  if (status != WaitStatus::kArrived) *args.status = static_cast<std::uint32_t>(status);
}

__global__ void answer_kernel(const __grid_constant__ EchoArgs args) {
  const Guard guard(args.guard);
  for (int round = 0; round < args.rounds; ++round) {
    const std::uint64_t epoch = args.first + static_cast<std::uint64_t>(round);
    const WaitStatus status =
        device::wait_epoch<Scope::kSystem>(args.own_word, epoch, guard, {0, 2, -1, round});
    if (status != WaitStatus::kArrived) {
      *args.status = static_cast<std::uint32_t>(status);
      return;
    }
    device::store_release<Scope::kSystem>(args.answer_word, epoch);
  }
}

__global__ void __launch_bounds__(1024, 2) occupy_kernel(const __grid_constant__ OccupyArgs args) {
  const Guard guard(args.guard);
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(args.arrived), 1ULL);
  (void)device::wait_epoch_block<Scope::kDevice>(args.end, 1, guard,
                                                 {0, 4, -1, static_cast<int>(blockIdx.x)});
}

constexpr int kBusyThreads = 256;
constexpr int kTileBytes = 16384;

__global__ void __launch_bounds__(kBusyThreads, 1)
    busy_kernel(const __grid_constant__ BusyArgs args) {
  __shared__ uint4 tile[kTileBytes / sizeof(uint4)];
  const auto* from = reinterpret_cast<const uint4*>(args.data);
  const std::uint64_t tiles = args.bytes / kTileBytes;
  constexpr int kAccumulators = 8;
  float sum[kAccumulators][4] = {};
  constexpr int kLoads = kTileBytes / sizeof(uint4) / kBusyThreads;
  std::uint64_t at = blockIdx.x % tiles;
  for (int step = 0; step < args.steps; ++step) {
    uint4 next[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      next[i] = from[at * (kTileBytes / sizeof(uint4)) + i * kBusyThreads + threadIdx.x];
    }
    at = (at + gridDim.x) % tiles;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kLoads; ++i) tile[i * kBusyThreads + threadIdx.x] = next[i];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kLoads * 4; ++k) {
      const uint4 a = tile[(threadIdx.x + k * 32) % (kTileBytes / sizeof(uint4))];
#pragma unroll
      for (int c = 0; c < kAccumulators; ++c) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, "
            "%7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[c][0]), "+f"(sum[c][1]), "+f"(sum[c][2]), "+f"(sum[c][3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(a.x ^ c), "r"(a.y));
      }
    }
  }
  float total = 0.0F;
#pragma unroll
  for (int c = 0; c < kAccumulators; ++c) total += sum[c][0] + sum[c][1] + sum[c][2] + sum[c][3];
  args.sink[blockIdx.x * kBusyThreads + threadIdx.x] = total;
}

}  // namespace

cudaError_t launch_measure(const EchoArgs& args, cudaStream_t stream) {
  measure_kernel<<<1, 1, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_answer(const EchoArgs& args, cudaStream_t stream) {
  answer_kernel<<<1, 1, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_occupy(const OccupyArgs& args, int blocks, cudaStream_t stream) {
  occupy_kernel<<<blocks, 1024, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_busy(const BusyArgs& args, int blocks, cudaStream_t stream) {
  busy_kernel<<<blocks, kBusyThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

double busy_flop(const BusyArgs& args, int blocks) {
  constexpr double kFlopPerProduct = 2.0 * 16 * 8 * 16;
  constexpr double kProducts = 16 * 8;  // loop trips x accumulators
  return kFlopPerProduct * kProducts * (kBusyThreads / 32) * args.steps * blocks;
}

cudaError_t load_link_kernels() {
  cudaFuncAttributes attributes{};
  if (const auto status = cudaFuncGetAttributes(&attributes, measure_kernel); status != cudaSuccess)
    return status;
  if (const auto status = cudaFuncGetAttributes(&attributes, answer_kernel); status != cudaSuccess)
    return status;
  if (const auto status = cudaFuncGetAttributes(&attributes, occupy_kernel); status != cudaSuccess)
    return status;
  return cudaFuncGetAttributes(&attributes, busy_kernel);
}

}  // namespace penstock::cuda
