// The combine of rows that are all there: the operator's last stage when nothing has to be waited
// for, and the benchmark's floor.
#include "ops/moe_stage2/cuda/combine_sm90.cuh"

namespace penstock::moe_stage2 {
namespace {

template <WireFormat kWire>
__global__ void __launch_bounds__(kCombineThreads, 2)
    combine_sm90(const __grid_constant__ CombineArgs args,
                 const __grid_constant__ CombineRing ring) {
  extern __shared__ __align__(128) unsigned char storage[];
  combine_tokens<kWire>(
      args, ring, storage, [&](RowPlace place) { return args.runs.address(place); }, NoWait{});
}

}  // namespace

CombineRing combine_ring(std::int32_t hidden, std::int32_t top_k, WireFormat wire, bool one_an_sm) {
  constexpr std::int32_t kBytesOfSm = 228 * 1024;
  constexpr std::int32_t kReserved = 1024;  // by the system, of each CTA
  CombineRing ring;
  ring.segments = (hidden + kCombineSegmentColumns - 1) / kCombineSegmentColumns;
  // A segment's scales start on 16 bytes, too.
  constexpr std::int32_t kStep = 16 * kWireBlock;
  ring.segment_columns = ring.segments == 1 ? hidden
                                            : ((hidden + kStep - 1) / kStep + ring.segments - 1) /
                                                  ring.segments * kStep;
  ring.segments = (hidden + ring.segment_columns - 1) / ring.segment_columns;
  ring.slot_bytes = static_cast<std::int32_t>(wire_row_bytes(ring.segment_columns, wire));
  ring.unit_rows = top_k < kCombineUnitRows ? top_k : kCombineUnitRows;
  ring.threads = (ring.segment_columns / kCombineColumns + 31) / 32 * 32 + 32;
  const std::int32_t unit = ring.unit_rows * ring.slot_bytes + kCombineUnitOverhead;
  // Three units at least: one is read, two are on their way.
  constexpr std::int32_t kUnits = 3;
  constexpr std::int32_t kRegisters = 64;  // of a thread, by the kernels' launch bounds
  ring.ctas_per_sm = 1;
  for (std::int32_t ctas = 2; ctas <= kCombineCtasPerSm && !one_an_sm; ++ctas) {
    if (ctas * ring.threads * kRegisters <= 65536 &&
        (kBytesOfSm / ctas - kReserved) / unit >= kUnits) {
      ring.ctas_per_sm = ctas;
    }
  }
  const std::int32_t fit = (kBytesOfSm / ring.ctas_per_sm - kReserved) / unit;
  ring.units = fit < kCombineMostUnits ? fit : kCombineMostUnits;
  ring.shared_bytes = static_cast<std::uint32_t>(ring.units * unit);
  return ring;
}

cudaError_t launch_combine_sm90(const CombineArgs& args, WireFormat wire, int sm_count,
                                cudaStream_t stream, bool one_an_sm) {
  if (args.tokens == 0) return cudaSuccess;
  const CombineRing ring = combine_ring(args.hidden, args.top_k, wire, one_an_sm);
  // As many CTAs as are resident, so that each asks once per source.
  const std::int64_t resident = static_cast<std::int64_t>(sm_count) * ring.ctas_per_sm;
  const std::int64_t items = static_cast<std::int64_t>(args.tokens) * ring.segments;
  const auto ctas = static_cast<unsigned>(items < resident ? items : resident);
  const auto threads = static_cast<unsigned>(ring.threads);
  if (wire == WireFormat::kBf16) {
    combine_sm90<WireFormat::kBf16><<<ctas, threads, ring.shared_bytes, stream>>>(args, ring);
  } else {
    combine_sm90<WireFormat::kFp8><<<ctas, threads, ring.shared_bytes, stream>>>(args, ring);
  }
  return cudaGetLastError();
}

cudaError_t load_combine_sm90() {
  for (const void* kernel : {reinterpret_cast<const void*>(combine_sm90<WireFormat::kBf16>),
                             reinterpret_cast<const void*>(combine_sm90<WireFormat::kFp8>)}) {
    const cudaError_t status = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kCombineMostSharedBytes);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace penstock::moe_stage2
