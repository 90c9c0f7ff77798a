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

// What else a call wants done on the way.
struct PlanExtras {
  // The first `counters` words, kCounterStride apart, are cleared. Null: none.
  std::uint32_t* chunk_counters = nullptr;
  std::int64_t counters = 0;
  // [slots] set to where the rows are that rank `rank` has for itself, to "nowhere" elsewhere: they
  // need no table. A row for a slot outside is kPlanBadOrigin. Null: nothing.
  RowPlace* inverse = nullptr;
  std::int64_t slots = 0;
  std::int32_t rank = -1;
};

// Enqueues the plan (two kernels). The same bytes as plan_on_host. `scratch` has
// plan_scratch_bytes(). No allocation, no synchronisation: may be captured.
cudaError_t launch_plan_sm90(const PlanInputs& in, const PlanOutputs& out, std::int32_t* scratch,
                             const PlanExtras& extras, cudaStream_t stream);

}  // namespace penstock::moe_stage2
