// The plan on the device: tiles and rows per (tile, destination) first, then each row's place.
//
// Two launches instead of one with a grid barrier: the second needs every earlier tile's counts,
// and reading them again in each CTA (17 KB at 65,536 rows) is cheaper than a barrier plus a scan.
#include "ops/moe_stage2/cuda/chained_launch.h"
#include "ops/moe_stage2/cuda/grouped_gemm_sm90.h"
#include "ops/moe_stage2/cuda/plan_sm90.h"

namespace penstock::moe_stage2 {
namespace {

constexpr int kWarpsPerTile = kTileRows / 32;
constexpr int kThreads = kTileRows;
constexpr unsigned kAllLanes = 0xffffffffu;

// Destination of this thread's row, or -1; faults are or-ed in.
__device__ int destination_of(const PlanInputs& in, const PlanOutputs& out, RowOrigin origin,
                              int tile_rows) {
  const int index = static_cast<int>(threadIdx.x);
  const std::int32_t fault = check_origin(origin, index, tile_rows, in.ranks, in.top_k);
  if (fault != kPlanWhole) atomicOr(out.fault, fault);
  return index < tile_rows && fault == kPlanWhole ? origin.rank : -1;
}

// One tile an iteration, a thread a row.
__global__ void __launch_bounds__(kThreads)
    plan_count_sm90(PlanInputs in, PlanOutputs out, std::int32_t* counts, PlanExtras extras) {
  __shared__ std::int32_t first_tile[kMaxExpertsPerRank + 1];
  __shared__ std::int32_t warp_counts[kWarpsPerTile][kMaxRanks];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  if (warp == 0) {
    std::int64_t before = 0;
    for (int begin = 0; begin < in.experts; begin += 32) {
      const int e = begin + lane;
      std::int64_t inclusive = e < in.experts ? tiles_of(in.expert_rows[e]) : 0;
      const std::int64_t own = inclusive;
      for (int offset = 1; offset < 32; offset *= 2) {
        const std::int64_t other = __shfl_up_sync(kAllLanes, inclusive, offset);
        if (lane >= offset) inclusive += other;
      }
      if (e < in.experts) first_tile[e] = static_cast<std::int32_t>(before + inclusive - own);
      before += __shfl_sync(kAllLanes, inclusive, 31);
    }
    // More tiles than 32 bits can say are more than any capacity, so a clamp keeps the comparison
    // true.
    if (lane == 0)
      first_tile[in.experts] = static_cast<std::int32_t>(before < 0x7fffffff ? before : 0x7fffffff);
  }
  const std::int64_t thread = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x;
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = thread; i < extras.counters; i += threads) {
    extras.chunk_counters[i * kCounterStride] = 0;
  }
  for (std::int64_t i = thread; i < extras.slots; i += threads) extras.inverse[i] = RowPlace{};
  __syncthreads();
  const int tiles = first_tile[in.experts];
  const bool fits = tiles <= in.tile_capacity;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *out.tile_count = fits ? tiles : 0;
    if (!fits) atomicOr(out.fault, kPlanTilesOverCapacity);
  }
  if (!fits) return;

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const RowOrigin origin = in.origin[static_cast<std::int64_t>(tile) * kTileRows + threadIdx.x];
    int low =
        0;  // last expert that starts at or before the tile and has one: first_tile is monotonic
    int high = in.experts;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_tile[middle] <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int rows = min(kTileRows, in.expert_rows[low] - (tile - first_tile[low]) * kTileRows);
    const int destination = destination_of(in, out, origin, rows);
    int mine = 0;  // lane d keeps destination d's count
    for (int d = 0; d < in.ranks; ++d) {
      const int count = __popc(__ballot_sync(kAllLanes, destination == d));
      if (lane == d) mine = count;
    }
    if (lane < kMaxRanks) warp_counts[warp][lane] = mine;
    __syncthreads();
    if (threadIdx.x < kMaxRanks) {
      int sum = 0;
      for (int w = 0; w < kWarpsPerTile; ++w) sum += warp_counts[w][threadIdx.x];
      counts[static_cast<std::int64_t>(tile) * kMaxRanks + threadIdx.x] = sum;
    }
    if (threadIdx.x == 0) {
      out.tile_expert[tile] = low;
      out.tile_rows[tile] = rows;
      out.tile_mate[tile] = mate_of(tile, tile - first_tile[low], in.expert_rows[low]);
    }
    __syncthreads();
  }
}

// Each CTA takes a run of consecutive tiles and sums the counts of all tiles before it.
__global__ void __launch_bounds__(kThreads)
    plan_place_sm90(PlanInputs in, PlanOutputs out, const std::int32_t* counts, PlanExtras extras) {
  __shared__ std::int32_t partial[kWarpsPerTile][kMaxRanks];
  __shared__ std::int32_t base[kMaxRanks];
  wait_for_previous();
  let_next_begin();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int tiles = *out.tile_count;
  const int per_cta = (tiles + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const int begin = static_cast<int>(blockIdx.x) * per_cta;
  const int end = min(begin + per_cta, tiles);
  if (tiles == 0 && blockIdx.x == 0 && threadIdx.x < kMaxRanks) out.prefix[threadIdx.x] = 0;
  if (begin >= end) return;

  // Thread t sums destination t % 8 of tiles t / 8, t / 8 + 16, ...
  int sum = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < begin * kMaxRanks; i += kThreads) sum += counts[i];
  sum += __shfl_xor_sync(kAllLanes, sum, 8);
  sum += __shfl_xor_sync(kAllLanes, sum, 16);
  if (lane < kMaxRanks) partial[warp][lane] = sum;
  __syncthreads();
  if (threadIdx.x < kMaxRanks) {
    int total = 0;
    for (int w = 0; w < kWarpsPerTile; ++w) total += partial[w][threadIdx.x];
    base[threadIdx.x] = total;
    out.prefix[static_cast<std::int64_t>(begin) * kMaxRanks + threadIdx.x] = total;
  }
  __syncthreads();

  for (int tile = begin; tile < end; ++tile) {
    const std::int64_t row = static_cast<std::int64_t>(tile) * kTileRows + threadIdx.x;
    const RowOrigin origin = in.origin[row];
    const int destination = destination_of(in, out, origin, out.tile_rows[tile]);
    unsigned same = 0;  // lanes of this warp with the same destination
    int mine = 0;
    for (int d = 0; d < in.ranks; ++d) {
      const unsigned lanes = __ballot_sync(kAllLanes, destination == d);
      if (destination == d) same = lanes;
      if (lane == d) mine = __popc(lanes);
    }
    if (lane < kMaxRanks) partial[warp][lane] = mine;
    __syncthreads();
    RowPlace place;
    if (destination >= 0) {
      int rank = base[destination] + __popc(same & ((1u << lane) - 1));
      for (int w = 0; w < warp; ++w) rank += partial[w][destination];
      if (rank < out.row_table_stride) {
        place = place_of(destination, rank, in.reserved);
        const std::int32_t entry = slot_index(origin.token, origin.slot, in.top_k);
        out.row_table[destination * out.row_table_stride + rank] = entry;
        if (destination == extras.rank) {
          if (entry < extras.slots) {
            extras.inverse[entry] = place;
          } else {
            atomicOr(out.fault, kPlanBadOrigin);
          }
        }
      } else {
        atomicOr(out.fault, kPlanTableOverflow);
      }
    }
    out.place[row] = place;
    __syncthreads();
    if (threadIdx.x < kMaxRanks) {
      int total = base[threadIdx.x];
      for (int w = 0; w < kWarpsPerTile; ++w) total += partial[w][threadIdx.x];
      base[threadIdx.x] = total;
      out.prefix[static_cast<std::int64_t>(tile + 1) * kMaxRanks + threadIdx.x] = total;
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_plan_sm90(const PlanInputs& in, const PlanOutputs& out, std::int32_t* scratch,
                             const PlanExtras& extras, cudaStream_t stream) {
  constexpr std::int64_t kMostCtas = 132 * 8;
  PlanExtras some = extras;
  if (some.chunk_counters == nullptr) some.counters = 0;
  if (some.inverse == nullptr) {
    some.slots = 0;
    some.rank = -1;
  }
  const auto ctas = static_cast<unsigned>(
      in.tile_capacity < 1 ? 1 : (in.tile_capacity < kMostCtas ? in.tile_capacity : kMostCtas));
  plan_count_sm90<<<ctas, kThreads, 0, stream>>>(in, out, scratch, some);
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) return status;
  return launch_chained(plan_place_sm90, {dim3(ctas), kThreads, 0, stream}, in, out, scratch, some);
}

}  // namespace penstock::moe_stage2
