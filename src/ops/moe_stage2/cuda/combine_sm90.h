// Launcher of the top-k combine. Internal: the operator and the benchmark include it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "penstock/ops/moe_stage2/plan.h"

namespace penstock::moe_stage2 {

// out[t] = bf16(sum over slots k = 0, 1, ... of weight[t, k] * y(t, k)), each step one f32 fused
// multiply-add, so the bits depend on neither the launch nor the order in which rows arrived. y(t,
// k) is the row that inverse[t, k] names; a slot with run < 0 adds nothing. On the fp8 wire the
// step is fma(weight * 2^e, element, sum): the same unless weight * 2^e leaves the normal f32.
struct CombineArgs {
  RunBases runs;  // by source, see RowPlace; bases and row_bytes 16-byte aligned
  const RowPlace* inverse = nullptr;  // [tokens, top_k]
  const float* weight = nullptr;      // [tokens, top_k]
  std::uint16_t* out = nullptr;       // [tokens, hidden] bf16, 16-byte aligned
  std::int32_t tokens = 0;
  std::int32_t top_k = 0;
  std::int32_t hidden = 0;
};

// How a combine's CTAs hold rows: in a ring of units, a unit being the same segment of columns of
// up to kCombineUnitRows rows of one token.
struct CombineRing {
  std::int32_t segments = 1;         // of a row, each for a CTA at a time
  std::int32_t segment_columns = 0;  // of all but the last
  std::int32_t slot_bytes = 0;       // one row's part of a unit
  std::int32_t unit_rows = 0;
  std::int32_t units = 0;
  std::int32_t threads = 0;  // of a CTA, the copying warp included
  std::int32_t ctas_per_sm = 0;
  std::uint32_t shared_bytes = 0;
};

inline constexpr int kCombineUnitRows = 4;
inline constexpr int kCombineColumns = 16;           // of a thread
inline constexpr int kCombineSegmentColumns = 7168;  // at most
inline constexpr int kCombineThreads = kCombineSegmentColumns / kCombineColumns + 32;
inline constexpr int kCombineMostUnits = 8;
inline constexpr int kCombineCtasPerSm = 4;  // at most
inline constexpr int kCombineMostSharedBytes = 227 * 1024;
// Behind the units: of each unit a weight and a presence word a row, and two barriers.
inline constexpr int kCombineFactsBytes = 8 * kCombineUnitRows;
inline constexpr int kCombineUnitOverhead = kCombineFactsBytes + 16;

// The ring for a shape. `one_an_sm`: a CTA takes a whole SM, whatever it needs.
CombineRing combine_ring(std::int32_t hidden, std::int32_t top_k, WireFormat wire, bool one_an_sm);

// Enqueues the combine of rows that are all there (no waiting), on as many CTAs as `sm_count` SMs
// hold, or on one for each of them. No allocation: may be captured. load_combine_sm90() comes
// before the first.
cudaError_t launch_combine_sm90(const CombineArgs& args, WireFormat wire, int sm_count,
                                cudaStream_t stream, bool one_an_sm = false);
cudaError_t load_combine_sm90();

}  // namespace penstock::moe_stage2
