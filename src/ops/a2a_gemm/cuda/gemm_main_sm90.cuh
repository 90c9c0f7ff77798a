// The main loop of a2a_gemm's GEMMs, sm_90a: persistent, warp-specialised, clusters of two CTAs.
//
// A CTA computes 128 x 256 tiles, 128 bytes of K a step, through a ring of four stages. The two
// CTAs of a cluster stack their tiles and share W: each fetches half of the 32 KB of a stage and
// multicasts it, so that 32 KB instead of 48 KB a stage and CTA come from L2. Warp 0 copies; what
// it has to wait for, and from where it reads, a gate says, and nothing else in the kernel knows
// that operands can be late.
//
// bf16: two consumer warpgroups of 64 rows x 256 columns, m64n256k16, 128 accumulators, one step in
// flight. FP8: two of 128 rows x 128 columns, so that one weight scale covers a warpgroup's half,
// as two waves of m64n128k32; after each step a wave is scaled and added in f32 to 128 sums while
// the other warpgroup's matrix instructions run.
//
// A Job says which tiles there are, which chunks of K a tile goes through, and where it is written:
//
//   const GemmArgs& args()                   sizes and scales
//   int tiles()                              cluster tiles
//   Place place(int linear)                  of the linear-th: cluster_row, column, more of its own
//   int chunks()                             that a tile goes through, each args().steps deep
//   bool local(int slab)                     whether the rows that meet W[slab] are this rank's
//   int slab(const Place&, int chunk)        slab of W, where the order is known beforehand
//   std::uint16_t* result(const Place&)      [rows, columns] that the tile belongs to
//   void written(const Place&, int linear, int warp)   a consumer warp has stored its part
//   kPicked                                  chunks in an order that is found while it runs: Picks
#pragma once

#include <cuda_runtime.h>

#include "ops/a2a_gemm/cuda/a2a_gemm_sm90.h"
#include "ops/sm90/fp8_wave.cuh"
#include "ops/sm90/mma.cuh"
#include "ops/sm90/ptx.cuh"
#include "penstock/fabric/signal_device.cuh"
#include "penstock/ops/a2a_gemm/plan.h"

namespace penstock::a2a_gemm::main_loop {

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

constexpr std::uint32_t kAOffset = 0;
constexpr std::uint32_t kWOffset = kAOffset + kStages * kABytes;
constexpr std::uint32_t kStagingOffset = kWOffset + kStages * kWBytes;
constexpr std::uint32_t kScaleOffset = kStagingOffset + kConsumerWarps * kStagingBytes;
constexpr std::uint32_t kFullOffset = kScaleOffset + kStages * kScaleBytes;
constexpr std::uint32_t kEmptyOffset = kFullOffset + kStages * 8;
constexpr std::uint32_t kGateOffset = kEmptyOffset + kStages * 8;  // the gate's own words
constexpr std::uint32_t kMostGateBytes = 232448 - kGateOffset;     // of what a block can have

// A tile uses the stages from 0 on, so that a stage's addresses and descriptors are constants in
// the unrolled loops; where its steps are no multiple of kStages, the last stages of a round are
// left out. Bit s is the parity of stage s.
__device__ __forceinline__ std::uint32_t parity_of(std::uint32_t parities, int stage) {
  return (parities >> stage) & 1u;
}

// The cluster tiles of this CTA: first, first + step, ... below total.
struct Walk {
  int cta_rank;
  int first;
  int step;
  int total;

  template <typename Job>
  __device__ explicit Walk(const Job& job)
      : cta_rank(static_cast<int>(cluster_cta_rank())),
        first(static_cast<int>(blockIdx.x) / kClusterCtas),
        step(static_cast<int>(gridDim.x) / kClusterCtas),
        total(job.tiles()) {}
};

// Chunks in the order in which they were found, where a Job picks them while it runs: tile `index`
// of this cluster has a word whose nibble s is 1 + the slab of its s-th chunk, 0 while that is
// open. Words are never used again, so that nobody has to know who has read them; tiles from
// kPickedTiles on take their chunks in the order known beforehand (hidden 8192, sequence 65536, two
// ranks: 63 tiles a cluster).
constexpr int kPickedTiles = 128;
struct Picks {
  std::uint32_t order[kPickedTiles];
  std::uint32_t failed;  // nothing is picked any more

  // Of a chunk whose first step has been waited for, so the word is there.
  template <typename Job>
  __device__ __forceinline__ int slab(const Job& job, const typename Job::Place& place, int index,
                                      int chunk) const {
    const std::uint32_t found = index < kPickedTiles ? order[index] >> (4 * chunk) & 15u : 0;
    return found != 0 ? static_cast<int>(found) - 1 : job.slab(place, chunk);
  }
};

// ---- roles

// gate.pass(place, index, chunk, has_rows) returns the slab of W that the chunk meets once its rows
// may be read by the SM's copy engine; `index` counts this CTA's tiles.
template <Format kFormat, typename Job, typename Gate>
__device__ __forceinline__ void copy_operands(const Job& job, const GemmMaps& maps,
                                              std::uint32_t shared, Gate& gate) {
  constexpr std::uint16_t kBoth = (1u << kClusterCtas) - 1;
  const GemmArgs& args = job.args();
  const Walk walk(job);
  std::uint32_t parities = (1u << kStages) - 1;  // a fresh barrier passes this wait
  int index = 0;
  for (int linear = walk.first; linear < walk.total; linear += walk.step, ++index) {
    const typename Job::Place place = job.place(linear);
    const int row = place.cluster_row * kClusterRows + walk.cta_rank * kTileRows;
    const int rows_left = args.rows - row;
    int stage = 0;
    // Both CTAs of a cluster go through the chunks in one order: each brings half of W.
#pragma unroll 1
    for (int s = 0; s < job.chunks(); ++s) {
      const int slab = gate.pass(place, linear, index, s, rows_left > 0);
      const bool local = job.local(slab);
      const CUtensorMap* a_map = local ? &maps.local : &maps.chunk;
      const int a_row = local ? row : slab * args.chunk_rows + row;
      const int w_row = slab * args.columns + place.column * kTileColumns +
                        walk.cta_rank * (kTileColumns / kClusterCtas);
      const float* scales = nullptr;
      std::uint32_t scale_bytes = 0;
      if constexpr (kFormat == Format::kFp8) {
        scales = (local ? args.local_scales
                        : args.chunk_scales +
                              static_cast<std::int64_t>(slab) * args.steps * args.scale_stride) +
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
                                           const GemmArgs& args, std::uint16_t* out, int row,
                                           int column) {
  // Opaque, like Job::place(): addresses made of it must not live through all of K.
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
        out + static_cast<std::int64_t>(row + r) * args.columns + column + piece * 8;
    store_global_v4_if(inside, to, v);
  }
  __syncwarp();
}

// Rows 64 * kGroup of the tile and on. A warpgroup's number is a template parameter: descriptors
// and barriers are then uniform constants.
template <int kGroup, typename Job>
__device__ __forceinline__ void multiply_bf16(const Job& job, std::uint32_t shared) {
  const GemmArgs& args = job.args();
  const Walk walk(job);
  const Release release(shared, walk.cta_rank);
  const int warp = threadIdx.x / 32 % 4;
  const std::uint32_t staging = shared + kStagingOffset + (kGroup * 4 + warp) * kStagingBytes;
  const std::uint32_t a_descriptor =
      descriptor_k_major_128b(shared + kAOffset + kGroup * (kABytes / 2));
  const std::uint32_t w_descriptor = descriptor_k_major_128b(shared + kWOffset);
  const int total_steps = job.chunks() * args.steps;
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

    const typename Job::Place place = job.place(linear);
    const int row =
        place.cluster_row * kClusterRows + walk.cta_rank * kTileRows + kGroup * 64 + warp * 16;
    const int column = place.column * kTileColumns;
    std::uint16_t* out = job.result(place);
    write_rows<0>(sum, staging, args, out, row, column);
    write_rows<64>(sum, staging, args, out, row, column + 128);
    job.written(place, linear, kGroup * 4 + warp);
  }
}

// Columns 128 * kGroup of the tile and on. The warpgroups take turns at the tensor cores, wave by
// wave, and do under a matrix instruction whatever is none: both as measured in moe_stage2's GEMM.
template <int kGroup, typename Job>
__device__ __forceinline__ void multiply_fp8(const Job& job, std::uint32_t shared,
                                             const Picks* picks) {
  const GemmArgs& args = job.args();
  const Walk walk(job);
  const Release release(shared, walk.cta_rank);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const int group_row = warp * 16;  // of each 64-row wave
  const std::uint32_t a_scales = shared + kScaleOffset + (group_row + lane / 4) * 4;
  const std::uint32_t a_descriptor = descriptor_k_major_128b(shared + kAOffset);
  const std::uint32_t w_descriptor =
      descriptor_k_major_128b(shared + kWOffset + kGroup * (kWBytes / 2));
  const int total_steps = job.chunks() * args.steps;

  // Weight scale of step kb of W[slab] for this warpgroup's columns of a tile. A group past the
  // last column reads the last scales and writes nothing.
  const auto w_scale = [&](const typename Job::Place& place, int slab, int kb) {
    const int scale_columns = (args.columns + kScaleBlock - 1) / kScaleBlock;
    const int column = min(place.column * (kTileColumns / kScaleBlock) + kGroup, scale_columns - 1);
    return __ldg(args.w_scales +
                 (static_cast<std::int64_t>(slab) * scale_columns + column) * args.steps + kb);
  };
  // Those of steps [step, step + 32) of the tile at `linear`, one a lane.
  const auto read_w_scales = [&](int linear, int step) {
    const typename Job::Place place = job.place(min(linear, walk.total - 1));
    const int mine = min(step + lane, total_steps - 1);
    const int chunk = Job::kOneChunk ? 0 : mine / args.steps;
    return w_scale(place, job.slab(place, chunk), mine - chunk * args.steps);
  };

  std::uint32_t parities = 0;
  if (kGroup == 1) named_barrier_arrive(kTurnBarrier, kTurnThreads);
  float scale_lane = !Job::kPicked && walk.first < walk.total ? read_w_scales(walk.first, 0) : 0.0f;
  float d[64];
  float sum[2][64];
  int index = 0;  // kPicked: of the tile, of its chunk, and the step in that
  for (int linear = walk.first; linear < walk.total; linear += walk.step, ++index) {
    int chunk = 0;
    int kb = 0;
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
      if constexpr (!Job::kPicked) {
        if (step > 0 && step % 32 == 0) scale_lane = read_w_scales(linear, step);
      }
      barrier_wait(shared + kFullOffset + stage * 8, parity_of(parities, stage));
      if constexpr (Job::kPicked) {  // which slab it is, is known since the copy was started
        if (kb % 32 == 0) {
          const typename Job::Place place = job.place(linear);
          scale_lane =
              w_scale(place, picks->slab(job, place, index, chunk), min(kb + lane, args.steps - 1));
        }
      }
      const std::uint32_t address = a_scales + stage * kScaleBytes;
      a0 = load_shared_f32(address);
      a1 = load_shared_f32(address + 8 * 4);
      a2 = load_shared_f32(address + 64 * 4);
      a3 = load_shared_f32(address + 72 * 4);
      w = __shfl_sync(0xffffffffu, scale_lane, (Job::kPicked ? kb : step) % 32);
      if constexpr (Job::kPicked) {
        if (++kb == args.steps) {
          kb = 0;
          ++chunk;
        }
      }
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
    if constexpr (!Job::kPicked) scale_lane = read_w_scales(linear + walk.step, 0);

    const typename Job::Place place = job.place(linear);
    const int row = place.cluster_row * kClusterRows + walk.cta_rank * kTileRows + group_row;
    const int column = place.column * kTileColumns + kGroup * 128;
    const std::uint32_t staging = shared + kStagingOffset + (kGroup * 4 + warp) * kStagingBytes;
    std::uint16_t* out = job.result(place);
    write_rows<0>(sum[0], staging, args, out, row, column);
    write_rows<0>(sum[1], staging, args, out, row + 64, column);
    job.written(place, linear, kGroup * 4 + warp);
  }
  // Takes the turn that the last wave of warpgroup 1 gave, so that no barrier is left half full.
  if (kGroup == 0) named_barrier_sync(kTurnBarrier, kTurnThreads);
}

// The kernel between its first and its last barrier: `watch` is what warp 1 does.
template <Format kFormat, typename Job, typename Gate, typename Watch>
__device__ __forceinline__ void run_roles(const Job& job, const GemmMaps& maps,
                                          std::uint32_t shared, const Picks* picks, Gate&& gate,
                                          Watch&& watch) {
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
      copy_operands<kFormat>(job, maps, shared, gate);
    } else if (threadIdx.x / 32 == 1) {
      watch();
    }
    __syncwarp();
  } else {
    register_budget_raise<224>();
    const bool first = threadIdx.x < 256;
    if constexpr (kFormat == Format::kBf16) {
      first ? multiply_bf16<0>(job, shared) : multiply_bf16<1>(job, shared);
    } else {
      first ? multiply_fp8<0>(job, shared, picks) : multiply_fp8<1>(job, shared, picks);
    }
  }
  // The other CTA still copies into this one's shared memory and arrives on its barriers: leave
  // together. Behind it every copy of this CTA has been waited for.
  cluster_sync();
}

}  // namespace penstock::a2a_gemm::main_loop
