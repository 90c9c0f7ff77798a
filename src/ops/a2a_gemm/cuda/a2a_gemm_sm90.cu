// The gated GEMM, sm_90a: persistent, warp-specialised, clusters of two CTAs.
//
// A CTA computes 128 x 256 tiles, 128 bytes of K a step, through a ring of four stages. The two
// CTAs of a cluster stack their tiles and share W: each fetches half of the 32 KB of a stage and
// multicasts it, so that 32 KB instead of 48 KB a stage and CTA come from L2. Warp 0 copies; before
// the first step of a chunk it waits until the chunk's row block is there, and nothing else in the
// kernel knows that chunks can be late: K is never split, the accumulators go through all chunks.
//
// bf16: two consumer warpgroups of 64 rows x 256 columns, m64n256k16, 128 accumulators, one step in
// flight. FP8: two of 128 rows x 128 columns, so that one weight scale covers a warpgroup's half,
// as two waves of m64n128k32; after each step a wave is scaled and added in f32 to 128 sums while
// the other warpgroup's matrix instructions run.
#include <cuda_runtime.h>

#include "ops/a2a_gemm/cuda/a2a_gemm_sm90.h"
#include "ops/sm90/mma.cuh"
#include "ops/sm90/ptx.cuh"
#include "penstock/fabric/signal_device.cuh"
#include "penstock/ops/a2a_gemm/layout.h"

namespace penstock::a2a_gemm {
namespace {

using namespace penstock::sm90;
using device::Scope;

// ---- shared storage

constexpr int kStages = 4;
constexpr int kThreads = 384;
constexpr int kConsumerWarps = 8;
constexpr std::uint32_t kABytes = kTileRows * kStepBytes;
constexpr std::uint32_t kWBytes = kTileColumns * kStepBytes;
constexpr std::uint32_t kWHalfBytes = kWBytes / kClusterCtas;
constexpr std::uint32_t kScaleBytes = kTileRows * sizeof(float);
constexpr std::uint32_t kStagingBytes = 16 * 256;  // of one warp: 16 rows x 128 bf16
constexpr int kSeenWords = 32;                     // one bit an arrival word

constexpr std::uint32_t kAOffset = 0;
constexpr std::uint32_t kWOffset = kAOffset + kStages * kABytes;
constexpr std::uint32_t kStagingOffset = kWOffset + kStages * kWBytes;
constexpr std::uint32_t kScaleOffset = kStagingOffset + kConsumerWarps * kStagingBytes;
constexpr std::uint32_t kFullOffset = kScaleOffset + kStages * kScaleBytes;
constexpr std::uint32_t kEmptyOffset = kFullOffset + kStages * 8;
constexpr std::uint32_t kSeenOffset = kEmptyOffset + kStages * 8;
constexpr std::uint32_t kSharedBytes = kSeenOffset + kSeenWords * 4;
static_assert(kSharedBytes <= 232448, "more shared memory than a block of sm_90 can have");

// One stage position of the ring and the parity of its current use.
struct RingPosition {
  std::uint32_t stage = 0;
  std::uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The cluster tiles of this CTA: first, first + step, ... below total.
struct Walk {
  TileGrid grid;
  int cta_rank;
  int first;
  int step;
  int total;

  __device__ explicit Walk(const GemmArgs& args)
      : grid(tile_grid(args.rows, args.columns, args.band)),
        cta_rank(static_cast<int>(cluster_cta_rank())),
        first(static_cast<int>(blockIdx.x) / kClusterCtas),
        step(static_cast<int>(gridDim.x) / kClusterCtas),
        total(grid.tiles()) {}
};

// ---- the gate

// Waits for row blocks on behalf of the copying thread. A word that has been seen is not read again
// (a poll is a trip to L2): the bits are in shared memory, and words past their number are polled
// each time. Little state of its own: the copying warp has few registers.
class Gate {
 public:
  __device__ Gate(const GemmArgs& args, std::uint32_t* seen) : args_(args), seen_(seen) {
    for (int i = 0; i < kSeenWords; ++i) seen_[i] = 0;
  }

  __device__ bool is_open(int source, int block) const {
    return failed_ || known(source, block) ||
           epoch_reached(device::load_relaxed<Scope::kSystem>(word(source, block)), *args_.epoch);
  }

  // Returns when the piece may be read through the copy engine of the SM. After a failed wait no
  // wait is made any more: the kernel runs to its end over whatever is there and publishes nothing.
  __device__ void pass(int source, int block, int step) {
    if (failed_ || known(source, block)) return;
    const device::Guard guard(args_.guard);
    const device::WaitSite site{source, step, kArrived, source * args_.row_blocks + block};
    if (device::wait_epoch<Scope::kSystem>(word(source, block), *args_.epoch, guard, site) !=
        WaitStatus::kArrived) {
      failed_ = true;
      return;
    }
    // The acquire orders this thread's own reads; its tensor copies are made by another proxy.
    asm volatile("fence.proxy.async;" ::: "memory");
    const int bit = source * args_.row_blocks + block;
    if (bit < kSeenWords * 32) seen_[bit / 32] |= 1u << (bit % 32);
  }

 private:
  __device__ const std::uint64_t* word(int source, int block) const {
    return args_.arrived + source * args_.arrival_stride + block;
  }
  __device__ bool known(int source, int block) const {
    const int bit = source * args_.row_blocks + block;
    return bit < kSeenWords * 32 && (seen_[bit / 32] >> (bit % 32) & 1u) != 0;
  }

  const GemmArgs& args_;
  std::uint32_t* seen_;
  bool failed_ = false;
};

// ---- roles

template <Format kFormat>
__device__ __forceinline__ void copy_operands(const GemmArgs& args, const GemmMaps& maps,
                                              std::uint32_t shared, std::uint32_t* seen) {
  constexpr std::uint16_t kBoth = (1u << kClusterCtas) - 1;
  const Walk walk(args);
  const bool gated = args.arrived != nullptr;
  Gate gate(args, seen);
  RingPosition ring;
  for (int linear = walk.first; linear < walk.total; linear += walk.step) {
    const TilePlace place = tile_place(walk.grid, linear);
    const int row = place.cluster_row * kClusterRows + walk.cta_rank * kTileRows;
    const int rows_left = args.rows - row;
    // Steps of the rotation that are still to do; without arrival_order the lowest is next.
    std::uint32_t left = (1u << args.ranks) - 1;
#pragma unroll 1
    for (int n = 0; n < args.ranks; ++n) {
      const int block = place.cluster_row * kClusterRows / args.row_block_rows;
      int s = __ffs(static_cast<int>(left)) - 1;
      if (gated && args.arrival_order && n > 0) {
#pragma unroll 1
        for (int other = s; other < args.ranks; ++other) {
          if ((left >> other & 1u) != 0 &&
              gate.is_open(source_of_step(args.rank, other, args.ranks), block)) {
            s = other;
            break;
          }
        }
      }
      left &= ~(1u << s);
      const int source = source_of_step(args.rank, s, args.ranks);
      const bool local = source == args.rank;
      if (gated && !local && rows_left > 0) gate.pass(source, block, s);
      const CUtensorMap* a_map = local ? &maps.local : &maps.chunk;
      const int a_row = local ? row : source * args.chunk_rows + row;
      const int w_row = source * args.columns + place.column * kTileColumns +
                        walk.cta_rank * (kTileColumns / kClusterCtas);
      const float* scales = nullptr;
      std::uint32_t scale_bytes = 0;
      if constexpr (kFormat == Format::kFp8) {
        scales = (local ? args.local_scales
                        : args.chunk_scales +
                              static_cast<std::int64_t>(source) * args.steps * args.scale_stride) +
                 row;
        scale_bytes = static_cast<std::uint32_t>(min(max(rows_left, 0), kTileRows)) * 4;
      }
#pragma unroll 1
      for (int kb = 0; kb < args.steps; ++kb) {
        const std::uint32_t full = shared + kFullOffset + ring.stage * 8;
        barrier_wait(shared + kEmptyOffset + ring.stage * 8, ring.parity ^ 1);
        barrier_arrive_expect(full, kABytes + kWBytes + scale_bytes);
        load_tensor_2d(shared + kAOffset + ring.stage * kABytes, a_map, full, kb * kStepBytes,
                       a_row);
        load_tensor_2d_multicast(
            shared + kWOffset + ring.stage * kWBytes + walk.cta_rank * kWHalfBytes, &maps.w, full,
            kb * kStepBytes, w_row, kBoth);
        if constexpr (kFormat == Format::kFp8) {
          if (scale_bytes != 0) {
            load_bulk(shared + kScaleOffset + ring.stage * kScaleBytes, scales, scale_bytes, full);
            scales += local ? args.local_scale_stride : args.scale_stride;
          }
        }
        ring.advance();
      }
    }
  }
}

// Hands a stage back to both CTAs' copiers: W of the stage came from both.
__device__ __forceinline__ void release(std::uint32_t shared, std::uint32_t stage, int cta_rank) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    const std::uint32_t empty = shared + kEmptyOffset + stage * 8;
    barrier_arrive(empty);
    barrier_arrive_remote(map_to_cta(empty, static_cast<std::uint32_t>(cta_rank ^ 1)));
  }
}

// Writes 16 rows x 128 columns of one warp as bf16: rows [row, row + 16), columns [column, column +
// 128), what lies outside the result left out. value[4 j + 2 h + i] is element (lane / 4 + 8 h, 8 j
// + 2 (lane % 4) + i).
template <int kFirst, int kCount>
__device__ __forceinline__ void write_rows(const float (&value)[kCount], std::uint32_t staging,
                                           const GemmArgs& args, int row, int column) {
  const int lane = threadIdx.x % 32;
  // stmatrix: lanes 0-7 address rows 0-7, 8-15 rows 8-15 of column group j, 16-31 the same of j
  // + 1.
  const int matrix_row = lane % 16;
  const int matrix_group = lane / 16;
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    const int at = kFirst + 4 * j;
    const std::uint32_t piece = static_cast<std::uint32_t>((j + matrix_group) ^ (matrix_row & 7));
    store_matrix_x4(staging + matrix_row * 256 + piece * 16, pack_bf16(value[at], value[at + 1]),
                    pack_bf16(value[at + 2], value[at + 3]),
                    pack_bf16(value[at + 4], value[at + 5]),
                    pack_bf16(value[at + 6], value[at + 7]));
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = 2 * i + lane / 16;
    const int piece = lane % 16;
    const uint4 v = load_shared_v4(staging + r * 256 + ((piece ^ (r & 7)) * 16));
    const bool inside = row + r < args.rows && column + piece * 8 < args.columns;
    std::uint16_t* to =
        args.out + static_cast<std::int64_t>(row + r) * args.columns + column + piece * 8;
    store_global_v4_if(inside, to, v);
  }
  __syncwarp();
}

__device__ __forceinline__ void multiply_bf16(const GemmArgs& args, std::uint32_t shared) {
  const Walk walk(args);
  const int warp = threadIdx.x / 32 - 4;  // 0 to 7
  const int group = warp / 4;             // consumer warpgroup: rows 64 * group of the tile
  const std::uint32_t staging = shared + kStagingOffset + warp * kStagingBytes;
  const int total_steps = args.ranks * args.steps;
  RingPosition ring;
  float sum[128];
  for (int linear = walk.first; linear < walk.total; linear += walk.step) {
    std::uint32_t previous = 0;
    for (int kb = 0; kb < total_steps; ++kb) {
      barrier_wait(shared + kFullOffset + ring.stage * 8, ring.parity);
      const std::uint32_t a =
          descriptor_k_major_128b(shared + kAOffset + ring.stage * kABytes + group * (kABytes / 2));
      const std::uint32_t w = descriptor_k_major_128b(shared + kWOffset + ring.stage * kWBytes);
#pragma unroll
      for (int i = 0; i < 128; ++i) mma_pin(sum[i]);
      mma_fence();
#pragma unroll
      for (int k = 0; k < kStepBytes / 32; ++k) {
        mma_m64n256k16_bf16(sum, a + 2 * k, w + 2 * k, kb != 0 || k != 0);
      }
      mma_commit();
#pragma unroll
      for (int i = 0; i < 128; ++i) mma_pin(sum[i]);
      // The step before this one is done: its stage can be filled while this one runs.
      mma_wait<1>();
      if (kb > 0) release(shared, previous, walk.cta_rank);
      previous = ring.stage;
      ring.advance();
    }
    mma_wait<0>();
#pragma unroll
    for (int i = 0; i < 128; ++i) mma_pin(sum[i]);
    release(shared, previous, walk.cta_rank);

    const TilePlace place = tile_place(walk.grid, linear);
    const int row =
        place.cluster_row * kClusterRows + walk.cta_rank * kTileRows + group * 64 + (warp % 4) * 16;
    const int column = place.column * kTileColumns;
    write_rows<0>(sum, staging, args, row, column);
    write_rows<64>(sum, staging, args, row, column + 128);
  }
}

__device__ __forceinline__ void multiply_wave(float (&d)[64], std::uint32_t a, std::uint32_t w) {
#pragma unroll
  for (int i = 0; i < 64; ++i) mma_pin(d[i]);
  mma_fence();
#pragma unroll
  for (int k = 0; k < kStepBytes / 32; ++k) {
    mma_m64n128k32_e4m3(d, a + 2 * k, w + 2 * k, k != 0);
  }
  mma_commit();
#pragma unroll
  for (int i = 0; i < 64; ++i) mma_pin(d[i]);
  mma_wait<0>();
}

// sum += scale * d; rows lane / 4 and lane / 4 + 8 of the warp's sixteen have a scale each.
__device__ __forceinline__ void promote(float (&sum)[64], const float (&d)[64], float low,
                                        float high) {
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] = fmaf((i & 2) != 0 ? high : low, d[i], sum[i]);
}

__device__ __forceinline__ void multiply_fp8(const GemmArgs& args, std::uint32_t shared) {
  const Walk walk(args);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 - 4;  // 0 to 7
  const int group = warp / 4;             // consumer warpgroup: columns 128 * group of the tile
  const int group_row = (warp % 4) * 16;  // of each 64-row wave
  const std::uint32_t staging = shared + kStagingOffset + warp * kStagingBytes;
  const int scale_columns = (args.columns + kScaleBlock - 1) / kScaleBlock;
  RingPosition ring;
  float d[64];
  float sum[2][64];
  for (int linear = walk.first; linear < walk.total; linear += walk.step) {
    const TilePlace place = tile_place(walk.grid, linear);
    // A group past the last column reads the last scale and writes nothing.
    const int scale_column =
        min(place.column * (kTileColumns / kScaleBlock) + group, scale_columns - 1);
    const auto scales_of = [&](int step) {
      const int source = source_of_step(args.rank, step % args.ranks, args.ranks);
      return args.w_scales +
             (static_cast<std::int64_t>(source) * scale_columns + scale_column) * args.steps;
    };
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      sum[0][i] = 0.0f;
      sum[1][i] = 0.0f;
    }
    const float* scales = scales_of(0);
    float w_scale = __ldg(scales);
    for (int s = 0; s < args.ranks; ++s) {
      for (int kb = 0; kb < args.steps; ++kb) {
        // One step ahead: the read takes as long as the step.
        ++scales;
        if (kb + 1 == args.steps) scales = scales_of(s + 1);
        const float next_w_scale = __ldg(scales);
        barrier_wait(shared + kFullOffset + ring.stage * 8, ring.parity);
        const std::uint32_t a_scales =
            shared + kScaleOffset + ring.stage * kScaleBytes + (group_row + lane / 4) * 4;
        const float s00 = load_shared_f32(a_scales) * w_scale;
        const float s01 = load_shared_f32(a_scales + 8 * 4) * w_scale;
        const float s10 = load_shared_f32(a_scales + 64 * 4) * w_scale;
        const float s11 = load_shared_f32(a_scales + 72 * 4) * w_scale;
        const std::uint32_t a = descriptor_k_major_128b(shared + kAOffset + ring.stage * kABytes);
        const std::uint32_t w = descriptor_k_major_128b(shared + kWOffset + ring.stage * kWBytes +
                                                        group * (kWBytes / 2));
        multiply_wave(d, a, w);
        promote(sum[0], d, s00, s01);
        multiply_wave(d, a + (64 * kStepBytes >> 4), w);
        release(shared, ring.stage, walk.cta_rank);
        promote(sum[1], d, s10, s11);
        ring.advance();
        w_scale = next_w_scale;
      }
    }
    const int row = place.cluster_row * kClusterRows + walk.cta_rank * kTileRows + group_row;
    const int column = place.column * kTileColumns + group * 128;
    write_rows<0>(sum[0], staging, args, row, column);
    write_rows<0>(sum[1], staging, args, row + 64, column);
  }
}

// The last CTA of the grid tells every source that its chunk has been read.
__device__ __forceinline__ void publish_consumed(const GemmArgs& args) {
  ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_device> finished(*args.finished);
  const std::uint64_t before = finished.fetch_add(1, ::cuda::memory_order_acq_rel);
  if ((before + 1) % gridDim.x != 0) return;
  const device::Guard guard(args.guard);
  if (guard.aborted()) return;
  const std::uint64_t epoch = *args.epoch;
  for (int peer = 0; peer < args.ranks; ++peer) {
    if (args.consumed[peer] != nullptr) {
      device::store_release<Scope::kSystem>(args.consumed[peer], epoch);
    }
  }
}

template <Format kFormat>
__global__ void __cluster_dims__(kClusterCtas, 1, 1) __launch_bounds__(kThreads, 1)
    a2a_gemm_sm90(const __grid_constant__ GemmArgs args, const __grid_constant__ GemmMaps maps) {
  extern __shared__ __align__(1024) unsigned char storage[];
  const std::uint32_t shared = shared_address(storage);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&maps.local);
    prefetch_tensor_map(&maps.chunk);
    prefetch_tensor_map(&maps.w);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared + kFullOffset + s * 8, 1);
      barrier_init(shared + kEmptyOffset + s * 8, kClusterCtas * kConsumerWarps);
    }
    barrier_init_fence();
  }
  cluster_sync();

  if (threadIdx.x < 128) {
    register_budget_lower<56>();
    if (threadIdx.x == 0) {
      copy_operands<kFormat>(args, maps, shared,
                             reinterpret_cast<std::uint32_t*>(storage + kSeenOffset));
    }
    __syncwarp();
  } else {
    register_budget_raise<224>();
    if constexpr (kFormat == Format::kBf16) {
      multiply_bf16(args, shared);
    } else {
      multiply_fp8(args, shared);
    }
  }
  // The other CTA still copies into this one's shared memory and arrives on its barriers: leave
  // together. Behind it every copy of this CTA has been waited for.
  cluster_sync();
  if (threadIdx.x == 0 && args.finished != nullptr) publish_consumed(args);
}

template <Format kFormat>
cudaError_t opt_in() {
  return cudaFuncSetAttribute(a2a_gemm_sm90<kFormat>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(kSharedBytes));
}

}  // namespace

cudaError_t load_gemm_sm90() {
  const cudaError_t status = opt_in<Format::kBf16>();
  return status != cudaSuccess ? status : opt_in<Format::kFp8>();
}

cudaError_t launch_gemm_sm90(const GemmArgs& args, const GemmMaps& maps, Format format, int ctas,
                             cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ctas / kClusterCtas * kClusterCtas));
  if (format == Format::kBf16) {
    a2a_gemm_sm90<Format::kBf16><<<grid, kThreads, kSharedBytes, stream>>>(args, maps);
  } else {
    a2a_gemm_sm90<Format::kFp8><<<grid, kThreads, kSharedBytes, stream>>>(args, maps);
  }
  return cudaGetLastError();
}

}  // namespace penstock::a2a_gemm
