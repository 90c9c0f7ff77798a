// The receiver's inverse table: (token, slot) to row, from the peers' row tables.
#include "ops/moe_stage2/cuda/chained_launch.h"
#include "ops/moe_stage2/cuda/operator_kernels.h"
#include "ops/moe_stage2/cuda/post_sm90.cuh"

namespace penstock::moe_stage2 {
namespace {

constexpr int kThreads = 512;

// blockIdx.x counts the peers from the right neighbour on, blockIdx.y parts of a table.
__global__ void __launch_bounds__(kThreads) invert_sm90(const __grid_constant__ InvertArgs a) {
  wait_for_previous();
  if (a.state->stop != 0) return;
  const device::Guard guard(a.guard);
  const std::uint64_t epoch = a.state->epoch;
  const std::uint32_t slot = parity_of(epoch);
  const int source = (a.rank + 1 + static_cast<int>(blockIdx.x)) % a.ranks;
  const auto* word =
      reinterpret_cast<const std::uint64_t*>(a.window + a.index.table_arrived(slot, source));
  if (device::wait_epoch_block<device::Scope::kSystem>(
          word, epoch, guard,
          {source, kStageTable, kArrived, static_cast<std::int32_t>(a.index.pair(slot, source))}) !=
      WaitStatus::kArrived) {
    if (threadIdx.x == 0) {
      ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_device>(a.state->stop)
          .store(1, ::cuda::memory_order_relaxed);
    }
    return;
  }
  const std::byte* table = a.window + a.index.landing_table(slot, source);
  const auto* entries = reinterpret_cast<const std::int32_t*>(table + kLineBytes);
  const std::int64_t sent = reinterpret_cast<const TableHead*>(table)->rows;
  const auto most = static_cast<std::int64_t>(a.index.shape.table_rows);
  const std::int64_t rows = sent < most ? sent : most;
  const auto reserved = static_cast<std::int64_t>(a.index.shape.reserved);
  for (std::int64_t i = blockIdx.y * static_cast<std::int64_t>(kThreads) + threadIdx.x; i < rows;
       i += static_cast<std::int64_t>(gridDim.y) * kThreads) {
    const std::int32_t entry = entries[i];
    if (entry < 0 || entry >= a.slots) {
      a.report->origin_fault = kPlanBadOrigin;
      continue;
    }
    a.inverse[entry] = place_of(source, i, reserved);
  }
}

}  // namespace

cudaError_t launch_invert_sm90(const InvertArgs& args, const Residency& where,
                               cudaStream_t stream) {
  if (args.ranks == 1) return cudaSuccess;
  const auto peers = static_cast<unsigned>(args.ranks - 1);
  // About as many CTAs as SMs, so that a table of 32,768 rows is two entries a thread.
  const unsigned fit = static_cast<unsigned>(where.sms) / peers;
  const unsigned parts = fit < 1 ? 1 : (fit < 32 ? fit : 32);
  return launch_chained(invert_sm90,
                        {dim3(peers, parts), kThreads,
                         where.shared ? static_cast<unsigned>(kWholeSmBytes) : 0, stream},
                        args);
}

cudaError_t load_invert_sm90() {
  return cudaFuncSetAttribute(invert_sm90, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              kWholeSmBytes);
}

}  // namespace penstock::moe_stage2
