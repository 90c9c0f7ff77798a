// The beginning of a call: epoch, reuse of the slot, row tables to their destinations.
#include "ops/moe_stage2/cuda/chained_launch.h"
#include "ops/moe_stage2/cuda/operator_kernels.h"
#include "ops/moe_stage2/cuda/post_sm90.cuh"

namespace penstock::moe_stage2 {
namespace {

constexpr int kThreads = 512;
constexpr int kMostParts =
    8;  // CTAs that share one peer's table: one CTA stores 45 GB/s over NVLink

__device__ std::uint64_t* word_at(std::byte* window, std::uint64_t offset) {
  return reinterpret_cast<std::uint64_t*>(window + offset);
}

__device__ std::int64_t spilled_rows(const TablesArgs& a, std::int64_t rows) {
  const auto reserved = static_cast<std::int64_t>(a.index.shape.reserved);
  return rows > reserved ? rows - reserved : 0;
}

__device__ void raise_stop(const TablesArgs& a) {
  ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_device>(a.state->stop)
      .store(1, ::cuda::memory_order_relaxed);
}

// One thread: may this rank write what the call of `epoch` writes at `peer` and for it?
__device__ bool may_write(const TablesArgs& a, const device::Guard& guard, std::uint64_t epoch,
                          int peer, bool spills) {
  const auto reached = [&](std::uint64_t of, std::uint64_t expected) {
    const std::uint32_t s = parity_of(of);
    return device::wait_epoch<device::Scope::kSystem>(
               word_at(a.window.base, a.index.consumed(s, peer)), expected, guard,
               {peer, kStageReuse, kConsumed, static_cast<std::int32_t>(a.index.pair(s, peer))}) ==
           WaitStatus::kArrived;
  };
  return reached(epoch, reuse_epoch(epoch)) && (!spills || reached(epoch - 1, epoch - 1));
}

// The last CTA to come publishes the call: what it writes is read by later kernels of the stream
// and, some time, by the host.
__device__ void publish(const TablesArgs& a, std::uint64_t epoch, std::int32_t fault,
                        const std::int32_t* totals) {
  CallState& state = *a.state;
  CallReport& report = *a.report;
  if (state.stop == 0) {
    for (int d = 0; d < a.window.ranks; ++d) {
      const std::int64_t rows = totals[d];
      const std::int64_t spilled = spilled_rows(a, rows);
      report.rows[d] = rows;
      report.spilled[d] = spilled;
      if (d == a.window.rank) continue;
      state.rows_sent += static_cast<std::uint64_t>(rows - spilled);
      state.table_bytes += sizeof(TableHead) + 4 * static_cast<std::uint64_t>(rows);
      state.signals += 1;
    }
    report.rows_sent = state.rows_sent;
    report.table_bytes = state.table_bytes;
    report.signals = state.signals;
  } else {
    *a.plan.tile_count = 0;
  }
  report.epoch = epoch;
  if (fault != kPlanWhole) report.plan_fault = fault;
  *a.plan.fault = kPlanWhole;
  state.epoch = epoch;
  state.chunks_done = 0;
  state.table_arrivals = 0;
  for (int d = 0; d < a.window.ranks; ++d) state.peer_arrivals[d] = 0;
}

// Everything that one peer gets before the rows; this CTA is one of `parts`.
__device__ void begin_peer(const TablesArgs& a, std::uint64_t epoch, int peer, int part, int parts,
                           const std::int32_t* totals) {
  const int self = a.window.rank;
  const int ranks = a.window.ranks;
  const std::uint32_t slot = parity_of(epoch);
  std::byte* there = a.window.bases[peer] + a.window.mapping_offset;
  int failed = 0;
  if (threadIdx.x == 0) {
    // Stream order: the combine of the call before has read everything.
    if (part == 0 && epoch > 1) {
      device::store_release<device::Scope::kSystem>(
          word_at(there, a.index.consumed(parity_of(epoch - 1), self)), epoch - 1);
    }
    bool spills = false;
    for (int d = 0; d < ranks; ++d) spills = spills || spilled_rows(a, totals[d]) > 0;
    const device::Guard guard(a.guard);
    failed = may_write(a, guard, epoch, peer, spills) ? 0 : 1;
    if (failed != 0) raise_stop(a);
  }
  if (__syncthreads_or(failed) != 0) return;
  const std::int64_t rows = totals[peer];
  std::byte* table = there + a.index.landing_table(slot, self);
  if (part == 0 && threadIdx.x == 0) reinterpret_cast<TableHead*>(table)->rows = rows;
  device::put_threads(
      table + kLineBytes,
      reinterpret_cast<const std::byte*>(a.plan.row_table + peer * a.plan.row_table_stride),
      static_cast<std::uint64_t>(rows) * sizeof(std::int32_t),
      static_cast<std::uint64_t>(part) * kThreads + threadIdx.x,
      static_cast<std::uint64_t>(parts) * kThreads);
  __syncthreads();
  if (threadIdx.x != 0) return;
  ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_system> arrivals(
      a.state->peer_arrivals[peer]);
  if (arrivals.fetch_add(1, ::cuda::memory_order_acq_rel) + 1 !=
      static_cast<std::uint32_t>(parts)) {
    return;
  }
  device::store_release<device::Scope::kSystem>(word_at(there, a.index.table_arrived(slot, self)),
                                                epoch);
}

// A CTA is a peer's part; a rank without peers has one that does nothing but publish.
__global__ void __launch_bounds__(kThreads)
    tables_sm90(const __grid_constant__ TablesArgs a, const int parts) {
  wait_for_previous();
  const std::uint64_t epoch = a.state->epoch + 1;
  const std::int32_t fault = *a.plan.fault;
  // Rows for each destination.
  const std::int32_t* totals =
      a.plan.prefix + static_cast<std::int64_t>(*a.plan.tile_count) * kMaxRanks;
  const int index = static_cast<int>(blockIdx.x);
  if (fault != kPlanWhole) {
    if (threadIdx.x == 0) raise_stop(a);
  } else if (a.window.ranks > 1 &&
             __syncthreads_or(static_cast<int>(threadIdx.x == 0 && a.state->stop != 0)) == 0) {
    // Right neighbour first, so that not everybody starts with rank 0.
    const int peer = (a.window.rank + 1 + index / parts) % a.window.ranks;
    begin_peer(a, epoch, peer, index % parts, parts, totals);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_device> arrivals(a.state->table_arrivals);
  if (arrivals.fetch_add(1, ::cuda::memory_order_acq_rel) + 1 == gridDim.x) {
    publish(a, epoch, fault, totals);
  }
}

}  // namespace

cudaError_t launch_tables_sm90(const TablesArgs& args, const Residency& where,
                               cudaStream_t stream) {
  const int peers = args.window.ranks > 1 ? args.window.ranks - 1 : 1;
  // Waiting CTAs stay within the rank's share.
  const int most = args.window.ranks > 1 ? kMostParts : 1;
  const int fit = where.shared ? where.sms / peers : most;
  const int parts = fit < 1 ? 1 : (fit < most ? fit : most);
  const int ctas = peers * parts;
  if (where.shared && ctas > where.sms) return cudaErrorInvalidConfiguration;
  return launch_chained(tables_sm90,
                        {dim3(static_cast<unsigned>(ctas)), kThreads,
                         where.shared ? static_cast<unsigned>(kWholeSmBytes) : 0, stream},
                        args, parts);
}

cudaError_t load_tables_sm90() {
  return cudaFuncSetAttribute(tables_sm90, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              kWholeSmBytes);
}

}  // namespace penstock::moe_stage2
