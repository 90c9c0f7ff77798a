// Launchers of the operator's own kernels, in the order of a call: plan, tables, GEMM (with the
// copy CTAs of transport sm beside it), invert, combine. Internal.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/moe_stage2/cuda/combine_sm90.h"
#include "ops/moe_stage2/cuda/post_sm90.h"
#include "penstock/fabric/device_views.h"
#include "penstock/ops/moe_stage2/layout.h"
#include "penstock/ops/moe_stage2/plan.h"

namespace penstock::moe_stage2 {

// Kernels that wait for peers may run beside a peer's GEMM on the same GPU, and the GEMM needs
// whole SMs: with several ranks on a GPU every waiting CTA takes one, too (by shared memory that it
// does not use), and a launch no more of them than the rank's share. Otherwise waiting CTAs, spread
// over all SMs, could keep out what they wait for.
struct Residency {
  int sms = 0;          // of this rank
  bool shared = false;  // other ranks are on the same GPU
};
inline constexpr int kWholeSmBytes = 160 * 1024;

// What a call tells the host, in pinned memory; written when its tables leave.
struct CallReport {
  std::int64_t rows[kMaxRanks] = {};
  std::int64_t spilled[kMaxRanks] = {};
  std::uint64_t rows_sent = 0;    // to peers, of all calls so far, spilled ones left out
  std::uint64_t table_bytes = 0;  // the same, of row tables
  std::uint64_t signals = 0;      // the same, of signals behind rows
  std::uint64_t epoch = 0;
  std::int32_t plan_fault = kPlanWhole;    // of a call that therefore sent nothing
  std::int32_t origin_fault = kPlanWhole;  // a peer's row names a slot that this rank has not
};

// State of one operator between and within calls, device memory, a line each.
struct CallState {
  alignas(128) std::uint64_t epoch = 0;  // of the call in progress, or of the last one
  // A call has failed: nothing is sent, awaited or combined until the host clears it.
  alignas(128) std::uint32_t stop = 0;
  alignas(128) std::uint32_t chunks_done = 0;
  alignas(128) std::uint32_t table_arrivals = 0;
  alignas(128) std::uint32_t copy_arrivals = 0;
  alignas(128) std::uint32_t peer_arrivals[kMaxRanks] = {};
  // For the report, added to by each call.
  alignas(128) std::uint64_t rows_sent = 0;
  std::uint64_t table_bytes = 0;
  std::uint64_t signals = 0;
};

// ---- tables -----------------------------------------------------------------------------------

struct TablesArgs {
  GuardView guard;
  WindowView window;
  WindowIndex index;
  CallState* state = nullptr;
  CallReport* report = nullptr;  // pinned
  PlanOutputs plan;
};

// Begins a call: counts the epoch, clears the plan's fault word for the next, tells peers that the
// call before is consumed, waits until each has consumed what this call overwrites (two calls ago;
// one call ago if rows spill), sends row tables. A few CTAs a peer. A plan that is at fault, or a
// wait that fails, sets `stop` and tile_count to 0. May be captured.
cudaError_t launch_tables_sm90(const TablesArgs& args, const Residency& where, cudaStream_t stream);

// ---- copy CTAs, and what is posted at the end ---------------------------------------------------

struct ShipArgs {
  ChunkPost post;  // kind is ignored by ship
  CallState* state = nullptr;
  const std::int32_t* tile_count = nullptr;
  const std::uint32_t* chunk_counters = nullptr;  // null: all tiles are done
  std::int32_t tiles_per_chunk = 1;
  std::int32_t column_tiles = 1;  // additions a tile makes to its chunk's counter
};

// Transport sm: `ctas` CTAs copy each chunk when its counter is full, then signal. Beside the GEMM
// (another stream, chunk_counters given) or behind it. May be captured.
cudaError_t launch_ship_sm90(const ShipArgs& args, int ctas, bool beside_gemm, cudaStream_t stream);

// Posts everything at once behind the GEMM: copy_engine's puts and signals, or direct's signals.
// May be captured.
cudaError_t launch_post_all_sm90(const ShipArgs& args, cudaStream_t stream);

// ---- receiver -----------------------------------------------------------------------------------

struct InvertArgs {
  GuardView guard;
  WindowIndex index;
  const std::byte* window = nullptr;  // own
  CallState* state = nullptr;
  CallReport* report = nullptr;
  RowPlace* inverse = nullptr;  // [slots]
  std::int64_t slots = 0;
  std::int32_t ranks = 0;
  std::int32_t rank = -1;
};

// Waits for each peer's row table and inverts it: inverse[slot] = where its row is. The own rows'
// places are there, from the plan; a rank without peers launches nothing. May be captured.
cudaError_t launch_invert_sm90(const InvertArgs& args, const Residency& where, cudaStream_t stream);

struct ArrivalsArgs {
  GuardView guard;
  WindowIndex index;
  const std::byte* window = nullptr;  // own
  const CallState* state = nullptr;
  std::int32_t rank = -1;
};

// The combine of rows that arrive: a CTA waits for the peers that its token needs, each once.
// `even` and `odd` are the two slots'. Same bits as launch_combine_sm90. May be captured.
cudaError_t launch_combine_arrivals_sm90(const CombineArgs& even, const CombineArgs& odd,
                                         const ArrivalsArgs& arrivals, WireFormat wire,
                                         const Residency& where, cudaStream_t stream);

// Loads all of the above now (and opts in to whole SMs), so that no first launch waits for an idle
// GPU.
cudaError_t load_tables_sm90();
cudaError_t load_ship_sm90();
cudaError_t load_post_all_sm90();
cudaError_t load_invert_sm90();
cudaError_t load_combine_arrivals_sm90();

}  // namespace penstock::moe_stage2
