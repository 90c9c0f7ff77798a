// The combine of rows that are still arriving: waits for a peer when a token first needs it.
#include "ops/moe_stage2/cuda/chained_launch.h"
#include "ops/moe_stage2/cuda/combine_sm90.cuh"
#include "ops/moe_stage2/cuda/operator_kernels.h"
#include "ops/moe_stage2/cuda/post_sm90.cuh"

namespace penstock::moe_stage2 {
namespace {

// Rows of this rank itself are there by stream order.
struct ArrivalWait {
  const ArrivalsArgs& args;
  const device::Guard& guard;
  std::uint64_t epoch;

  __device__ bool operator()(int source) const {
    if (source == args.rank) return true;
    const std::uint32_t slot = parity_of(epoch);
    const auto* word =
        reinterpret_cast<const std::uint64_t*>(args.window + args.index.arrived(slot, source));
    return device::wait_epoch<device::Scope::kSystem>(
               word, epoch, guard,
               {source, kStageArrived, kArrived,
                static_cast<std::int32_t>(args.index.pair(slot, source))}) == WaitStatus::kArrived;
  }
};

template <WireFormat kWire>
__global__ void __launch_bounds__(kCombineMaxThreads, 2)
    combine_arrivals_sm90(const __grid_constant__ CombineArgs even,
                          const __grid_constant__ CombineArgs odd,
                          const __grid_constant__ ArrivalsArgs arrivals) {
  wait_for_previous();
  if (arrivals.state->stop != 0) return;
  const device::Guard guard(arrivals.guard);
  const std::uint64_t epoch = arrivals.state->epoch;
  const ArrivalWait wait{arrivals, guard, epoch};
  // Twice the code, so that addresses of runs stay in the constant bank.
  if (parity_of(epoch) != 0) {
    combine_tokens<kWire>(odd, wait);
  } else {
    combine_tokens<kWire>(even, wait);
  }
}

}  // namespace

cudaError_t launch_combine_arrivals_sm90(const CombineArgs& even, const CombineArgs& odd,
                                         const ArrivalsArgs& arrivals, WireFormat wire,
                                         const Residency& where, cudaStream_t stream) {
  if (even.tokens == 0) return cudaSuccess;
  const int threads = combine_threads(even.hidden, wire);
  const std::int64_t resident =
      static_cast<std::int64_t>(where.sms) * (where.shared ? 1 : combine_ctas_per_sm(threads));
  const auto ctas = static_cast<unsigned>(even.tokens < resident ? even.tokens : resident);
  const LaunchPlace place{dim3(ctas), static_cast<unsigned>(threads),
                          where.shared ? static_cast<unsigned>(kWholeSmBytes) : 0, stream};
  return wire == WireFormat::kBf16
             ? launch_chained(combine_arrivals_sm90<WireFormat::kBf16>, place, even, odd, arrivals)
             : launch_chained(combine_arrivals_sm90<WireFormat::kFp8>, place, even, odd, arrivals);
}

cudaError_t load_combine_arrivals_sm90() {
  for (const void* kernel :
       {reinterpret_cast<const void*>(combine_arrivals_sm90<WireFormat::kBf16>),
        reinterpret_cast<const void*>(combine_arrivals_sm90<WireFormat::kFp8>)}) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kWholeSmBytes);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace penstock::moe_stage2
