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
__global__ void __launch_bounds__(kCombineThreads, 2)
    combine_arrivals_sm90(const __grid_constant__ CombineArgs even,
                          const __grid_constant__ CombineArgs odd,
                          const __grid_constant__ CombineRing ring,
                          const __grid_constant__ ArrivalsArgs arrivals) {
  extern __shared__ __align__(128) unsigned char storage[];
  wait_for_previous();
  if (arrivals.state->stop != 0) return;
  const device::Guard guard(arrivals.guard);
  const std::uint64_t epoch = arrivals.state->epoch;
  const bool is_odd = parity_of(epoch) != 0;
  // The two differ in their runs alone.
  combine_tokens<kWire>(
      even, ring, storage,
      [&](RowPlace place) { return is_odd ? odd.runs.address(place) : even.runs.address(place); },
      ArrivalWait{arrivals, guard, epoch});
}

}  // namespace

cudaError_t launch_combine_arrivals_sm90(const CombineArgs& even, const CombineArgs& odd,
                                         const ArrivalsArgs& arrivals, WireFormat wire,
                                         const Residency& where, cudaStream_t stream) {
  if (even.tokens == 0) return cudaSuccess;
  const CombineRing ring = combine_ring(even.hidden, even.top_k, wire, where.shared);
  const std::int64_t resident = static_cast<std::int64_t>(where.sms) * ring.ctas_per_sm;
  const std::int64_t items = static_cast<std::int64_t>(even.tokens) * ring.segments;
  const auto ctas = static_cast<unsigned>(items < resident ? items : resident);
  const std::uint32_t whole = where.shared ? static_cast<std::uint32_t>(kWholeSmBytes) : 0;
  const LaunchPlace place{dim3(ctas), static_cast<unsigned>(ring.threads),
                          ring.shared_bytes > whole ? ring.shared_bytes : whole, stream};
  return wire == WireFormat::kBf16 ? launch_chained(combine_arrivals_sm90<WireFormat::kBf16>, place,
                                                    even, odd, ring, arrivals)
                                   : launch_chained(combine_arrivals_sm90<WireFormat::kFp8>, place,
                                                    even, odd, ring, arrivals);
}

cudaError_t load_combine_arrivals_sm90() {
  for (const void* kernel :
       {reinterpret_cast<const void*>(combine_arrivals_sm90<WireFormat::kBf16>),
        reinterpret_cast<const void*>(combine_arrivals_sm90<WireFormat::kFp8>)}) {
    const cudaError_t status = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kCombineMostSharedBytes);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace penstock::moe_stage2
