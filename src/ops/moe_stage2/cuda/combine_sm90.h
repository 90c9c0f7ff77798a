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
  RunBases runs;                      // by source, see RowPlace
  const RowPlace* inverse = nullptr;  // [tokens, top_k]
  const float* weight = nullptr;      // [tokens, top_k]
  std::uint16_t* out = nullptr;       // [tokens, hidden] bf16, 16-byte aligned
  std::int32_t tokens = 0;
  std::int32_t top_k = 0;
  std::int32_t hidden = 0;
};

// Enqueues the combine of rows that are all there (no waiting). No allocation: may be captured.
cudaError_t launch_combine_sm90(const CombineArgs& args, WireFormat wire, int sm_count,
                                cudaStream_t stream);

}  // namespace penstock::moe_stage2
