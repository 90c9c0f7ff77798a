// The gated GEMM, sm_90a: persistent, warp-specialised, clusters of two CTAs.
//
// A CTA computes 128 x 256 tiles, 128 bytes of K a step, through a ring of four stages. The two
// CTAs of a cluster stack their tiles and share W: each fetches half of the 32 KB of a stage and
// multicasts it, so that 32 KB instead of 48 KB a stage and CTA come from L2. Warp 0 copies; before
// the first step of a chunk it waits until warp 1 has seen the chunk's row block come, and nothing
// else in the kernel knows that chunks can be late: K is never split, the accumulators go through
// all chunks.
//
// bf16: two consumer warpgroups of 64 rows x 256 columns, m64n256k16, 128 accumulators, one step in
// flight. FP8: two of 128 rows x 128 columns, so that one weight scale covers a warpgroup's half,
// as two waves of m64n128k32; after each step a wave is scaled and added in f32 to 128 sums while
// the other warpgroup's matrix instructions run.
#include <cuda_runtime.h>

#include "ops/a2a_gemm/cuda/a2a_gemm_sm90.h"
#include "ops/sm90/fp8_wave.cuh"
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
constexpr std::uint32_t kSharedBytes = kSeenOffset + (kSeenWords + 1) * 4;
static_assert(kSharedBytes <= 232448, "more shared memory than a block of sm_90 can have");

// A tile uses the stages from 0 on, so that a stage's addresses and descriptors are constants in
// the unrolled loops; where its steps are no multiple of kStages, the last stages of a round are
// left out. Bit s is the parity of stage s.
__device__ __forceinline__ std::uint32_t parity_of(std::uint32_t parities, int stage) {
  return (parities >> stage) & 1u;
}

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

  // tile_place() whose divisors the compiler cannot see to be the same for every tile: it would
  // keep their reciprocals in registers through all of K, which the FP8 consumers do not have.
  __device__ __forceinline__ TilePlace place(int linear) const {
    TileGrid opaque = grid;
    asm volatile("" : "+r"(opaque.band), "+r"(opaque.columns), "+r"(opaque.cluster_rows));
    return tile_place(opaque, linear);
  }
};

// ---- the gate

// Words that have been seen, as bits in shared memory: warp 1 watches the words in the order in
// which this CTA's tiles need them and sets their bits; the copying thread, which has a pipeline to
// feed, looks at shared memory instead of making the trips to L2 of a poll and an acquire.
struct Seen {
  std::uint32_t bits[kSeenWords];
  std::uint32_t failed;  // a wait has ended without its word
};

__device__ __forceinline__ ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_block> in_block(
    std::uint32_t& word) {
  return ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_block>(word);
}

class Gate {
 public:
  __device__ Gate(const GemmArgs& args, Seen& seen) : args_(args), seen_(seen) {}

  // The copying thread. Returns when the piece may be read through the copy engine of the SM. After
  // a failed wait no wait is made any more: the kernel runs to its end over whatever is there and
  // publishes nothing.
  __device__ void pass(int source, int block, int step) {
    if (failed_) return;
    const int bit = source * args_.row_blocks + block;
    if (bit >= kSeenBits) {
      failed_ = !wait(source, block, step);
      return;
    }
    while ((in_block(seen_.bits[bit / 32]).load(::cuda::memory_order_acquire) >> (bit % 32) & 1u) ==
           0) {
      // The watching warp ends each wait by its bit or by this.
      if (in_block(seen_.failed).load(::cuda::memory_order_relaxed) != 0) {
        failed_ = true;
        return;
      }
    }
  }

  // A lane of the watching warp. False: no piece need be watched any more.
  __device__ bool watch(int source, int block, int step) {
    const int bit = source * args_.row_blocks + block;
    if (bit >= kSeenBits) return true;
    std::uint32_t& word = seen_.bits[bit / 32];
    if ((in_block(word).load(::cuda::memory_order_relaxed) >> (bit % 32) & 1u) != 0) return true;
    if (!wait(source, block, step)) {
      in_block(seen_.failed).store(1, ::cuda::memory_order_relaxed);
      return false;
    }
    in_block(word).fetch_or(1u << (bit % 32), ::cuda::memory_order_release);
    return true;
  }

 private:
  static constexpr int kSeenBits = kSeenWords * 32;

  __device__ bool wait(int source, int block, int step) {
    const device::Guard guard(args_.guard);
    const device::WaitSite site{source, step, kArrived, source * args_.row_blocks + block};
    if (device::wait_epoch<Scope::kSystem>(args_.arrived + source * args_.arrival_stride + block,
                                           *args_.epoch, guard, site) != WaitStatus::kArrived) {
      return false;
    }
    // The acquire orders ordinary reads; tensor copies are made by another proxy.
    asm volatile("fence.proxy.async;" ::: "memory");
    return true;
  }

  const GemmArgs& args_;
  Seen& seen_;
  bool failed_ = false;
};

// ---- roles

template <Format kFormat>
__device__ __forceinline__ void copy_operands(const GemmArgs& args, const GemmMaps& maps,
                                              std::uint32_t shared, Seen& seen) {
  constexpr std::uint16_t kBoth = (1u << kClusterCtas) - 1;
  const Walk walk(args);
  const bool gated = args.arrived != nullptr;
  Gate gate(args, seen);
  std::uint32_t parities = (1u << kStages) - 1;  // a fresh barrier passes this wait
  for (int linear = walk.first; linear < walk.total; linear += walk.step) {
    const TilePlace place = walk.place(linear);
    const int row = place.cluster_row * kClusterRows + walk.cta_rank * kTileRows;
    const int rows_left = args.rows - row;
    const int block = place.cluster_row * kClusterRows / args.row_block_rows;
    int stage = 0;
    // Both CTAs of a cluster go through the chunks in this one order: each brings half of W.
#pragma unroll 1
    for (int s = 0; s < args.ranks; ++s) {
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
        const std::uint32_t full = shared + kFullOffset + stage * 8;
        barrier_wait(shared + kEmptyOffset + stage * 8, parity_of(parities, stage));
        barrier_arrive_expect(full, kABytes + kWBytes + scale_bytes);
        load_tensor_2d(shared + kAOffset + stage * kABytes, a_map, full, kb * kStepBytes, a_row);
        load_tensor_2d_multicast(shared + kWOffset + stage * kWBytes + walk.cta_rank * kWHalfBytes,
                                 &maps.w, full, kb * kStepBytes, w_row, kBoth);
        if constexpr (kFormat == Format::kFp8) {
          if (scale_bytes != 0) {
            load_bulk(shared + kScaleOffset + stage * kScaleBytes, scales, scale_bytes, full);
            scales += local ? args.local_scale_stride : args.scale_stride;
          }
        }
        parities ^= 1u << stage;
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
    }
  }
}

// Warp 1: a lane a source, tile after tile in the order of the copying thread, ahead of it.
__device__ __forceinline__ void watch_arrivals(const GemmArgs& args, Seen& seen) {
  const Walk walk(args);
  Gate gate(args, seen);
  const int step = 1 + static_cast<int>(threadIdx.x) % 32;
  if (step >= args.ranks) return;
  const int source = source_of_step(args.rank, step, args.ranks);
  for (int linear = walk.first; linear < walk.total; linear += walk.step) {
    const TilePlace place = walk.place(linear);
    const int row = place.cluster_row * kClusterRows + walk.cta_rank * kTileRows;
    if (row >= args.rows) continue;
    if (!gate.watch(source, place.cluster_row * kClusterRows / args.row_block_rows, step)) return;
  }
}

// Hands stages back to both CTAs' copiers: W of a stage came from both.
class Release {
 public:
  __device__ Release(std::uint32_t shared, int cta_rank)
      : own_(shared + kEmptyOffset),
        other_(map_to_cta(own_, static_cast<std::uint32_t>(cta_rank ^ 1))) {}
  __device__ void operator()(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(own_ + stage * 8);
      barrier_arrive_remote(other_ + stage * 8);
    }
  }

 private:
  std::uint32_t own_;
  std::uint32_t other_;
};

// Writes 16 rows x 128 columns of one warp as bf16: rows [row, row + 16), columns [column, column +
// 128), what lies outside the result left out. value[4 j + 2 h + i] is element (lane / 4 + 8 h, 8 j
// + 2 (lane % 4) + i).
template <int kFirst, int kCount>
__device__ __forceinline__ void write_rows(const float (&value)[kCount], std::uint32_t staging,
                                           const GemmArgs& args, int row, int column) {
  // Opaque, like Walk::place(): addresses made of it must not live through all of K.
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));
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

// Rows 64 * kGroup of the tile and on. A warpgroup's number is a template parameter: descriptors
// and barriers are then uniform constants.
template <int kGroup>
__device__ __forceinline__ void multiply_bf16(const GemmArgs& args, std::uint32_t shared) {
  const Walk walk(args);
  const Release release(shared, walk.cta_rank);
  const int warp = threadIdx.x / 32 % 4;
  const std::uint32_t staging = shared + kStagingOffset + (kGroup * 4 + warp) * kStagingBytes;
  const std::uint32_t a_descriptor =
      descriptor_k_major_128b(shared + kAOffset + kGroup * (kABytes / 2));
  const std::uint32_t w_descriptor = descriptor_k_major_128b(shared + kWOffset);
  const int total_steps = args.ranks * args.steps;
  std::uint32_t parities = 0;
  float sum[128];
  for (int linear = walk.first; linear < walk.total; linear += walk.step) {
    for (int round = 0; round < total_steps; round += kStages) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        const int step = round + stage;
        if (step >= total_steps) break;
        barrier_wait(shared + kFullOffset + stage * 8, parity_of(parities, stage));
        parities ^= 1u << stage;
#pragma unroll
        for (int i = 0; i < 128; ++i) mma_pin(sum[i]);
        mma_fence();
#pragma unroll
        for (int k = 0; k < kStepBytes / 32; ++k) {
          mma_m64n256k16_bf16(sum, a_descriptor + stage * (kABytes >> 4) + 2 * k,
                              w_descriptor + stage * (kWBytes >> 4) + 2 * k, step != 0 || k != 0);
        }
        mma_commit();
#pragma unroll
        for (int i = 0; i < 128; ++i) mma_pin(sum[i]);
        // The step before this one is done: its stage can be filled while this one runs.
        mma_wait<1>();
        if (step > 0) release((stage + kStages - 1) % kStages);
      }
    }
    mma_wait<0>();
#pragma unroll
    for (int i = 0; i < 128; ++i) mma_pin(sum[i]);
    release((total_steps - 1) % kStages);

    const TilePlace place = walk.place(linear);
    const int row =
        place.cluster_row * kClusterRows + walk.cta_rank * kTileRows + kGroup * 64 + warp * 16;
    const int column = place.column * kTileColumns;
    write_rows<0>(sum, staging, args, row, column);
    write_rows<64>(sum, staging, args, row, column + 128);
  }
}

// Columns 128 * kGroup of the tile and on. The warpgroups take turns at the tensor cores, wave by
// wave, and do under a matrix instruction whatever is none: both as measured in moe_stage2's GEMM.
template <int kGroup>
__device__ __forceinline__ void multiply_fp8(const GemmArgs& args, std::uint32_t shared) {
  const Walk walk(args);
  const Release release(shared, walk.cta_rank);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const int group_row = warp * 16;  // of each 64-row wave
  const std::uint32_t a_scales = shared + kScaleOffset + (group_row + lane / 4) * 4;
  const std::uint32_t a_descriptor = descriptor_k_major_128b(shared + kAOffset);
  const std::uint32_t w_descriptor =
      descriptor_k_major_128b(shared + kWOffset + kGroup * (kWBytes / 2));
  const int total_steps = args.ranks * args.steps;

  // Weight scales of steps [step, step + 32) of the tile at `linear` for this warpgroup's columns,
  // one a lane. A group past the last column reads the last scales and writes nothing.
  const auto read_w_scales = [&](int linear, int step) {
    const int scale_columns = (args.columns + kScaleBlock - 1) / kScaleBlock;
    const TilePlace place = walk.place(min(linear, walk.total - 1));
    const int column = min(place.column * (kTileColumns / kScaleBlock) + kGroup, scale_columns - 1);
    const int mine = min(step + lane, total_steps - 1);
    const int chunk = mine / args.steps;
    const int source = source_of_step(args.rank, chunk, args.ranks);
    return __ldg(args.w_scales +
                 (static_cast<std::int64_t>(source) * scale_columns + column) * args.steps +
                 (mine - chunk * args.steps));
  };

  std::uint32_t parities = 0;
  if (kGroup == 1) named_barrier_arrive(kTurnBarrier, kTurnThreads);
  float scale_lane = walk.first < walk.total ? read_w_scales(walk.first, 0) : 0.0f;
  float d[64];
  float sum[2][64];
  for (int linear = walk.first; linear < walk.total; linear += walk.step) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      sum[0][i] = 0.0f;
      sum[1][i] = 0.0f;
    }
    float a0;
    float a1;
    float a2;
    float a3;
    float w;
    // Waits for `step`, which is in `stage`, and reads its scales.
    const auto prepare = [&](int stage, int step) {
      if (step >= total_steps) return;
      if (step > 0 && step % 32 == 0) scale_lane = read_w_scales(linear, step);
      barrier_wait(shared + kFullOffset + stage * 8, parity_of(parities, stage));
      const std::uint32_t address = a_scales + stage * kScaleBytes;
      a0 = load_shared_f32(address);
      a1 = load_shared_f32(address + 8 * 4);
      a2 = load_shared_f32(address + 64 * 4);
      a3 = load_shared_f32(address + 72 * 4);
      w = __shfl_sync(0xffffffffu, scale_lane, step % 32);
    };
    prepare(0, 0);
    for (int round = 0; round < total_steps; round += kStages) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        const int step = round + stage;
        if (step >= total_steps) break;
        const std::uint32_t a = a_descriptor + stage * (kABytes >> 4);
        const std::uint32_t b = w_descriptor + stage * (kWBytes >> 4);
        named_barrier_sync(kTurnBarrier + kGroup, kTurnThreads);
        start_wave(d, a, b);
        // Under the matrix instructions: everything that is neither a sum nor one of them.
        if (step > 0) release((stage + kStages - 1) % kStages);
        parities ^= 1u << stage;
        const float s00 = a0 * w;
        const float s01 = a1 * w;
        const float s10 = a2 * w;
        const float s11 = a3 * w;
        pass_turn<kGroup>(d);
        end_wave(d);
        promote(sum[0], d, s00, s01);
        named_barrier_sync(kTurnBarrier + kGroup, kTurnThreads);
        start_wave(d, a + (64 * kStepBytes >> 4), b);
        pass_turn<kGroup>(d);
        prepare((stage + 1) % kStages, step + 1);
        end_wave(d);
        promote(sum[1], d, s10, s11);
      }
    }
    release((total_steps - 1) % kStages);
    // Under the epilogue.
    scale_lane = read_w_scales(linear + walk.step, 0);

    const TilePlace place = walk.place(linear);
    const int row = place.cluster_row * kClusterRows + walk.cta_rank * kTileRows + group_row;
    const int column = place.column * kTileColumns + kGroup * 128;
    const std::uint32_t staging = shared + kStagingOffset + (kGroup * 4 + warp) * kStagingBytes;
    write_rows<0>(sum[0], staging, args, row, column);
    write_rows<0>(sum[1], staging, args, row + 64, column);
  }
  // Takes the turn that the last wave of warpgroup 1 gave, so that no barrier is left half full.
  if (kGroup == 0) named_barrier_sync(kTurnBarrier, kTurnThreads);
}

template <Format kFormat, int kGroup>
__device__ __forceinline__ void multiply(const GemmArgs& args, std::uint32_t shared) {
  if constexpr (kFormat == Format::kBf16) {
    multiply_bf16<kGroup>(args, shared);
  } else {
    multiply_fp8<kGroup>(args, shared);
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
  Seen& seen = *reinterpret_cast<Seen*>(storage + kSeenOffset);
  if (threadIdx.x == 0) {
    seen = Seen{};
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
      copy_operands<kFormat>(args, maps, shared, seen);
    } else if (threadIdx.x / 32 == 1 && args.arrived != nullptr) {
      watch_arrivals(args, seen);
    }
    __syncwarp();
  } else {
    register_budget_raise<224>();
    if (threadIdx.x < 256) {
      multiply<kFormat, 0>(args, shared);
    } else {
      multiply<kFormat, 1>(args, shared);
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
