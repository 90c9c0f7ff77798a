// Launchers of the plan and the inverse table. Internal: the operator and the benchmark include it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "penstock/ops/moe_stage2/plan.h"

namespace penstock::moe_stage2 {

// Device memory that a plan needs between its two kernels: rows per (tile, destination).
constexpr std::int64_t plan_scratch_bytes(std::int64_t tile_capacity) {
  return tile_capacity * kMaxRanks * static_cast<std::int64_t>(sizeof(std::int32_t));
}

// Enqueues the plan (two kernels). The same bytes as plan_on_host. `scratch` has
// plan_scratch_bytes(); the first `counters` words of `chunk_counters`, kCounterStride apart, are
// cleared on the way (null: none). No allocation, no synchronisation: may be captured.
cudaError_t launch_plan_sm90(const PlanInputs& in, const PlanOutputs& out, std::int32_t* scratch,
                             std::uint32_t* chunk_counters, std::int64_t counters,
                             cudaStream_t stream);

}  // namespace penstock::moe_stage2
