// The combine of rows that are all there: the operator's last stage when nothing has to be waited
// for, and the benchmark's floor.
#include "ops/moe_stage2/cuda/combine_sm90.cuh"

namespace penstock::moe_stage2 {
namespace {

template <WireFormat kWire>
__global__ void __launch_bounds__(kCombineMaxThreads, 2)
    combine_sm90(const __grid_constant__ CombineArgs args) {
  combine_tokens<kWire>(args, NoWait{});
}

}  // namespace

cudaError_t launch_combine_sm90(const CombineArgs& args, WireFormat wire, int sm_count,
                                cudaStream_t stream) {
  if (args.tokens == 0) return cudaSuccess;
  const int threads = combine_threads(args.hidden, wire);
  // As many CTAs as are resident, so that each asks once per source.
  const std::int64_t resident = static_cast<std::int64_t>(sm_count) * combine_ctas_per_sm(threads);
  const auto ctas = static_cast<unsigned>(args.tokens < resident ? args.tokens : resident);
  if (wire == WireFormat::kBf16) {
    combine_sm90<WireFormat::kBf16><<<ctas, threads, 0, stream>>>(args);
  } else {
    combine_sm90<WireFormat::kFp8><<<ctas, threads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace penstock::moe_stage2
