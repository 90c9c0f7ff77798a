// Grouped FP8 GEMM of the down projection, sm_90a: persistent, warp-specialised, clusters of two.
//
// A CTA computes 128 x 256 tiles of y, 128 deep steps through a ring of four stages. Warp 0 copies
// (tensor copies; the CTAs of a cluster share W or A by multicast), warp 1 counts finished tiles,
// warp 2 draws the cluster's next step from a counter of the grid. Two consumer warpgroups have 64
// rows x 256 columns each: products of 64 columns into 2 x 32 accumulators, which after each block
// of K are scaled and added in f32 to 128 running sums. 192 of the 232 registers are sums.
#include <cuda_runtime.h>

#include "ops/moe_stage2/cuda/chained_launch.h"
#include "ops/moe_stage2/cuda/grouped_gemm_sm90.h"
#include "ops/moe_stage2/cuda/post_sm90.cuh"
#include "ops/sm90/mma.cuh"
#include "ops/sm90/ptx.cuh"
#include "penstock/numerics/block.h"

namespace penstock::moe_stage2 {
namespace {

using namespace penstock::sm90;

// ---- shared storage
// --------------------------------------------------------------------------------
constexpr int kStages = 4;
constexpr int kClusterCtas = 2;
constexpr int kThreads = 384;
constexpr int kConsumerWarps = 8;
constexpr std::uint32_t kActBytes = kTileRows * kScaleBlock;
constexpr std::uint32_t kWeightBytes = kGemmTileColumns * kScaleBlock;
constexpr std::uint32_t kScaleBytes = kTileRows * sizeof(float);
constexpr std::uint32_t kStagingBytes = 16 * 256;  // of one warp: 16 rows x 128 bf16

constexpr std::uint32_t kActOffset = 0;
constexpr std::uint32_t kWeightOffset = kActOffset + kStages * kActBytes;
constexpr std::uint32_t kStagingOffset = kWeightOffset + kStages * kWeightBytes;
constexpr std::uint32_t kScaleOffset = kStagingOffset + kConsumerWarps * kStagingBytes;
constexpr std::uint32_t kFullOffset = kScaleOffset + kStages * kScaleBytes;
constexpr std::uint32_t kEmptyOffset = kFullOffset + kStages * 8;
constexpr std::uint32_t kLeftOffset = kEmptyOffset + kStages * 8;  // see count_tiles()
constexpr std::uint32_t kLastOffset = kLeftOffset + 8;
// Steps are published by the dealing warp, at most one ahead of the copier, which is at most
// kStages ahead of the slowest consumer of either CTA. The counting warp can be held up by a full
// ring of descriptors and says what it has read.
constexpr int kStepSlots = 8;
static_assert(kStepSlots >= kStages + 3);
constexpr std::uint32_t kFactsOffset = kLastOffset + 8;
constexpr std::uint32_t kDealtOffset = kFactsOffset + kStepSlots * 16;
constexpr std::uint32_t kTakenOffset = kDealtOffset + kStepSlots * 8;
constexpr std::uint32_t kDrawnOffset = kTakenOffset + 8;
constexpr std::uint32_t kDrawnStepOffset = kDrawnOffset + kStepSlots * 8;
constexpr std::uint32_t kReadOffset = kDrawnStepOffset + kStepSlots * 4;  // by the counting warp
constexpr std::uint32_t kSharedBytes = kReadOffset + kStepSlots * 8;
static_assert(kFactsOffset % 16 == 0);
static_assert(kSharedBytes <= 232448, "more shared memory than a block of sm_90 can have");

// What a CTA computes in one step of its cluster.
struct Work {
  int m;        // tile
  int column;   // first column
  bool paired;  // the other CTA has the mate's rows and the same columns; else the same rows and
                // the next columns
};

// Steps run over columns first, so that rows finish in order and chunks early: cluster_columns
// steps a tile. Two mates put theirs together and share W (each CTA fetches half of its 32 KB a
// stage); a tile without a mate shares A (half of 16 KB). 32 KB instead of 40 KB from L2 per CTA
// and stage.
__device__ __forceinline__ Work work_of(int linear, int mate, int cluster_columns, int cta_rank) {
  const int m = linear / cluster_columns;
  const int n = linear - m * cluster_columns;
  if (mate == m) return {m, (n * kClusterCtas + cta_rank) * kGemmTileColumns, false};
  const int step = m > mate ? cluster_columns + n : n;
  return {min(m, mate) + cta_rank, step * kGemmTileColumns, true};
}

// The grid's steps: cluster_columns a tile.
struct Steps {
  int total;
  int cluster_columns;
  int clusters;
  int cta_rank;
};

// What the other roles know of a step. m < 0: no more steps.
struct Facts {
  int m;
  int column;
  int rows;
  int expert;
  bool paired;
};
__device__ __forceinline__ std::uint32_t facts_address(std::uint32_t shared, int i) {
  return shared + kFactsOffset + i % kStepSlots * 16;
}
__device__ __forceinline__ Facts read_facts(std::uint32_t shared, int i) {
  const uint4 v = load_shared_v4(facts_address(shared, i));
  return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z >> 1),
          static_cast<int>(v.w), (v.z & 1u) != 0};
}
// Waits for the facts of this CTA's i-th step.
__device__ __forceinline__ void wait_dealt(std::uint32_t shared, int i) {
  barrier_wait(shared + kDealtOffset + i % kStepSlots * 8, i / kStepSlots & 1);
}

// Stages are used from 0 on in every step, so that a stage's addresses and descriptors are
// constants in the unrolled loops; with k_blocks % kStages != 0 the last stages of a round are
// skipped. Bit s is the parity of stage s.
__device__ __forceinline__ std::uint32_t parity_of(std::uint32_t parities, int stage) {
  return (parities >> stage) & 1u;
}

// ---- roles
// -----------------------------------------------------------------------------------------

// Deals steps to the cluster, one ahead of the copier: whoever is free takes the next one, in the
// grid's order. In a fixed order 5% of the SMs' time was idle at the end, because steps of half
// tiles take two thirds of the time of others and some clusters have more of them. CTA 0 draws and
// tells CTA 1. The look-ups behind a draw are why this is a warp of its own: in the copier they
// stood between the copies of two steps.
__device__ __forceinline__ void deal_steps(const GroupedGemmArgs& args, std::uint32_t shared,
                                           const Steps& steps) {
  const std::uint32_t other_drawn = map_to_cta(shared + kDrawnOffset, steps.cta_rank ^ 1);
  const std::uint32_t other_step = map_to_cta(shared + kDrawnStepOffset, steps.cta_rank ^ 1);
  for (int i = 0;; ++i) {
    const int slot = i % kStepSlots;
    const std::uint32_t drawn = shared + kDrawnOffset + slot * 8;
    int linear;
    if (steps.cta_rank == 0) {
      linear = static_cast<int>(atomicAdd(args.next_step, 1u));
      // Every cluster draws until it is told that there is no more; after the last such draw the
      // counter is as the next launch wants it.
      if (linear == steps.total + steps.clusters - 1) *args.next_step = 0;
    }
    if (i > 0) barrier_wait(shared + kTakenOffset, (i - 1) & 1);
    if (steps.cta_rank == 0) {
      store_async_u32(other_step + slot * 4, static_cast<std::uint32_t>(linear),
                      other_drawn + slot * 8);
    } else {
      barrier_arrive_expect(drawn, 4);
      barrier_wait(drawn, i / kStepSlots & 1);
      linear = load_shared_i32(shared + kDrawnStepOffset + slot * 4);
    }
    const bool more = linear < steps.total;
    uint4 facts = make_uint4(0xffffffffu, 0, 0, 0);
    if (more) {
      const Work work = work_of(linear, __ldg(args.tile_mate + linear / steps.cluster_columns),
                                steps.cluster_columns, steps.cta_rank);
      facts =
          make_uint4(static_cast<unsigned>(work.m), static_cast<unsigned>(work.column),
                     static_cast<unsigned>(args.tile_rows[work.m]) << 1 | (work.paired ? 1u : 0u),
                     static_cast<unsigned>(args.tile_expert[work.m]));
    }
    if (args.chunk_counters != nullptr && i >= kStepSlots) {
      barrier_wait(shared + kReadOffset + slot * 8, (i / kStepSlots - 1) & 1);
    }
    store_shared_v4(facts_address(shared, i), facts);
    barrier_arrive(shared + kDealtOffset + slot * 8);
    if (!more) return;
  }
}

// Steps behind which the copier is when it knows that a step is over, and the block of K at which
// it learns it: see count_tiles().
struct Lag {
  int steps;
  int block;
};
__device__ __forceinline__ Lag lag_of(int k_blocks) {
  return k_blocks > kStages ? Lag{1, kStages} : Lag{2, 0};
}

__device__ __forceinline__ void copy_operands(const GroupedGemmArgs& args,
                                              const CUtensorMap* act_map,
                                              const CUtensorMap* weight_map, std::uint32_t shared,
                                              const Steps& steps) {
  constexpr std::uint32_t kActHalf = kActBytes / 2;
  constexpr std::uint32_t kWeightHalf = kWeightBytes / 2;
  constexpr std::uint16_t kBoth = (1u << kClusterCtas) - 1;
  std::uint32_t parities =
      (1u << kStages) - 1;  // a fresh barrier passes a wait for the phase before its first
  const Lag lag = lag_of(args.k_blocks);
  int i = 0;
  for (;; ++i) {
    wait_dealt(shared, i);
    const Facts work = read_facts(shared, i);
    if (work.m < 0) break;
    barrier_arrive(shared + kTakenOffset);
    const int row = work.m * kTileRows;
    for (int kb = 0; kb < args.k_blocks; ++kb) {
      const int stage = kb % kStages;
      const std::uint32_t full = shared + kFullOffset + stage * 8;
      const std::uint32_t act = shared + kActOffset + stage * kActBytes;
      const std::uint32_t weight = shared + kWeightOffset + stage * kWeightBytes;
      const int k = kb * kScaleBlock;
      barrier_wait(shared + kEmptyOffset + stage * 8, parity_of(parities, stage));
      parities ^= 1u << stage;
      if (kb == lag.block) store_release_shared(shared + kLeftOffset, i + 1 - lag.steps);
      barrier_arrive_expect(full, kActBytes + kWeightBytes + kScaleBytes);
      if (work.paired) {
        load_tensor_3d_multicast(weight + steps.cta_rank * kWeightHalf, weight_map, full, k,
                                 work.column + steps.cta_rank * kScaleBlock, work.expert, kBoth);
        load_tensor_2d(act, act_map, full, k, row);
        load_tensor_2d(act + kActHalf, act_map, full, k, row + kTileRows / 2);
      } else {
        load_tensor_2d_multicast(act + steps.cta_rank * kActHalf, act_map, full, k,
                                 row + steps.cta_rank * (kTileRows / 2), kBoth);
        load_tensor_3d(weight, weight_map, full, k, work.column, work.expert);
        load_tensor_3d(weight + kWeightHalf, weight_map, full, k, work.column + kScaleBlock,
                       work.expert);
      }
      load_bulk(shared + kScaleOffset + stage * kScaleBytes,
                args.act_scales + kb * args.act_scale_stride + row, kScaleBytes, full);
    }
  }
  barrier_wait(shared + kLastOffset, 0);
  store_release_shared(shared + kLeftOffset, i);
}

// Counts finished tiles in a warp of its own: the fence takes about a microsecond, which would
// otherwise stand between two tiles of a consumer.
//
// Consumers say nothing until they are through. Whoever gives back a stage in step i + 1 has stored
// the rows of step i, so the copier, which waits for that stage anyway (block 0 of K when it
// refills it with block kStages; with fewer blocks a step later), knows that all have left step i.
__device__ __forceinline__ void count_tiles(const GroupedGemmArgs& args, std::uint32_t shared,
                                            int tiles) {
  const int column_tiles = (args.hidden + kGemmTileColumns - 1) / kGemmTileColumns;
  int left = 0;  // steps that are over
  for (int i = 0;; ++i) {
    wait_dealt(shared, i);
    const Facts work = read_facts(shared, i);
    if (work.m < 0) return;
    barrier_arrive(shared + kReadOffset + i % kStepSlots * 8);
    while (left <= i) {
      left = load_acquire_shared(shared + kLeftOffset);
      if (left <= i) __nanosleep(200);  // a step takes 15 us
    }
    if (work.column >= args.hidden) continue;
    const int chunk = work.m / args.tiles_per_chunk;
    const int chunk_begin = chunk * args.tiles_per_chunk;
    const int chunk_tiles = min(tiles - chunk_begin, args.tiles_per_chunk);
    const std::int64_t word = static_cast<std::int64_t>(chunk) * kCounterStride;
    if (count_tile(args.chunk_counters + word,
                   static_cast<std::uint32_t>(chunk_tiles * column_tiles))) {
      if (args.chunk_flags != nullptr) {
        store_release_system(args.chunk_flags + word, args.chunk_epoch);
      }
      chunk_completed(args.post, chunk_begin, chunk_begin + chunk_tiles,
                      (tiles + args.tiles_per_chunk - 1) / args.tiles_per_chunk);
    }
  }
}

// Where a warp's pieces of 16 bytes go: lane l holds the start of row l % 16 in `address`, null
// where nothing is to be written, and gets those of rows l / kLanes, + 32 / kLanes, ... of sixteen.
template <int kLanes>
struct Targets {
  unsigned char* row[kLanes / 2];
  __device__ __forceinline__ explicit Targets(unsigned char* address) {
#pragma unroll
    for (int i = 0; i < kLanes / 2; ++i) {
      row[i] = reinterpret_cast<unsigned char*>(
          __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(address),
                      32 / kLanes * i + threadIdx.x % 32 / kLanes));
    }
  }
};

// Writes a warp's 16 rows x 256 columns as bf16; only the first 128 unless `both`.
__device__ __forceinline__ void write_rows_bf16(const float (&sum)[2][64], std::uint32_t staging,
                                                unsigned char* address, int column, bool both) {
  const int lane = threadIdx.x % 32;
  // stmatrix: lanes 0-7 address rows 0-7, 8-15 rows 8-15 of column group j, 16-31 the same of j
  // + 1.
  const int matrix_row = lane % 16;
  const int matrix_group = lane / 16;
  const Targets<16> targets(address);
  const int piece = lane % 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 1 && !both) break;
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
      const float* s = sum[half] + 4 * j;
      const std::uint32_t group = (j + matrix_group) ^ (matrix_row & 7);
      store_matrix_x4(staging + matrix_row * 256 + group * 16, pack_bf16(s[0], s[1]),
                      pack_bf16(s[2], s[3]), pack_bf16(s[4], s[5]), pack_bf16(s[6], s[7]));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = 2 * i + lane / 16;
      const uint4 v = load_shared_v4(staging + row * 256 + ((piece ^ (row & 7)) * 16));
      store_global_v4_if(targets.row[i] != nullptr,
                         targets.row[i] + 2 * column + piece * 16 + half * 256, v);
    }
    __syncwarp();
  }
}

// mx_scale<E4M3>(amax, kCeil) and its inverse() without branches; a test compares them for every
// exponent.
__device__ __forceinline__ std::uint32_t wire_scale(std::uint32_t amax) {
  constexpr std::uint32_t kMantissaOfMax = float_bits(E4M3::kMax) & 0x007fffffu;
  const int exponent =
      static_cast<int>(amax >> 23) - E4M3::kEmax + ((amax & 0x007fffffu) > kMantissaOfMax ? 1 : 0);
  return is_finite_bits(amax) ? static_cast<std::uint32_t>(exponent > 0 ? exponent : 0)
                              : E8M0::kNanBits;
}
__device__ __forceinline__ float inverse_scale(std::uint32_t code) {
  const std::uint32_t bits = (254u - code) << 23;
  return __uint_as_float(bits | bits >> 31);  // the NaN code, 255, gives a NaN
}

// max(|a|, |b|), NaN if either is: the bits order as in amax_bits().
__device__ __forceinline__ float max_magnitude(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(fabsf(a)), "f"(fabsf(b)));
  return m;
}

// The same rows as E4M3 with one E8M0 per 32 columns behind the row's payload.
__device__ __forceinline__ void write_rows_fp8(const float (&sum)[2][64], std::uint32_t staging,
                                               unsigned char* address, int column, int hidden,
                                               bool both) {
  const int lane = threadIdx.x % 32;
  // Blocks of 32 columns: [2 r + half][block] is block 4 half + block of row lane / 4 + 8 r. A lane
  // has 8 of its columns, the four lanes of a row all of them.
  float largest[4][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const float* s = sum[half] + 16 * block + 2 * r;
        largest[2 * r + half][block] =
            max_magnitude(max_magnitude(max_magnitude(s[0], s[1]), max_magnitude(s[4], s[5])),
                          max_magnitude(max_magnitude(s[8], s[9]), max_magnitude(s[12], s[13])));
      }
    }
  }
  // Lane q of the four gets the blocks [q][...]: first rows are divided, then halves.
  const bool upper_row = (lane & 2) != 0;
  const bool upper_half = (lane & 1) != 0;
  float of_row[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const float away = upper_row ? largest[half][block] : largest[2 + half][block];
      const float mine = upper_row ? largest[2 + half][block] : largest[half][block];
      of_row[half][block] = max_magnitude(mine, __shfl_xor_sync(0xffffffffu, away, 2));
    }
  }
  std::uint32_t codes = 0;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const float away = upper_half ? of_row[0][block] : of_row[1][block];
    const float mine = upper_half ? of_row[1][block] : of_row[0][block];
    codes |= wire_scale(__float_as_uint(max_magnitude(mine, __shfl_xor_sync(0xffffffffu, away, 1))))
             << (8 * block);
  }
  // stmatrix puts a lane's two 16-bit halves beside each other: the pairs of a 16-byte piece,
  // columns 2 q and 8 + 2 q of lanes q = 0 .. 3, stand as 0 4 1 5 2 6 3 7 and are put in order when
  // read.
  const int matrix_row = lane % 16;
  constexpr std::uint32_t kHalfBytes = 16 * 128;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Word [r][g]: this lane's two columns of column groups 2 g (low) and 2 g + 1, in row lane / 4
    // + 8 r.
    std::uint32_t words[2][8];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::uint32_t of_half = __shfl_sync(0xffffffffu, codes, (lane & ~3) + 2 * r + half);
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const float inverse = inverse_scale(of_half >> (8 * block) & 0xffu);
#pragma unroll
        for (int g = 2 * block; g < 2 * block + 2; ++g) {
          const float* s = sum[half] + 8 * g + 2 * r;
          words[r][g] = pack_e4m3(s[0] * inverse, s[1] * inverse) |
                        static_cast<std::uint32_t>(pack_e4m3(s[4] * inverse, s[5] * inverse)) << 16;
        }
      }
    }
#pragma unroll
    for (int g = 0; g < 8; g += 2) {
      const std::uint32_t piece = (g + lane / 16) ^ (matrix_row & 7);
      store_matrix_x4(staging + half * kHalfBytes + matrix_row * 128 + piece * 16, words[0][g],
                      words[1][g], words[0][g + 1], words[1][g + 1]);
    }
  }
  const Targets<8> targets(address);
  const auto scales = reinterpret_cast<unsigned char*>(
      __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(address),
                  lane / 4 + 8 * (upper_row ? 1 : 0)));
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 1 && !both) break;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * i + lane / 8;
      const int piece = lane % 8;
      const uint4 v =
          load_shared_v4(staging + half * kHalfBytes + row * 128 + ((piece ^ (row & 7)) * 16));
      const uint4 ordered =
          make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410),
                     __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x7632));
      store_global_v4_if(targets.row[i] != nullptr,
                         targets.row[i] + column + piece * 16 + half * 128, ordered);
    }
  }
  if (scales != nullptr && (both || !upper_half)) {
    *reinterpret_cast<std::uint32_t*>(scales + hidden + column / kWireBlock +
                                      (upper_half ? 4 : 0)) = codes;
  }
  __syncwarp();
}

// A consumer warp has stored its last rows.
__device__ __forceinline__ void announce_end(std::uint32_t shared) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(shared + kLastOffset);
}

// Starts the product of this warpgroup's 64 rows with 64 columns.
__device__ __forceinline__ void start_columns(float (&d)[32], const std::uint32_t (&a)[4][4],
                                              std::uint32_t b) {
#pragma unroll
  for (int i = 0; i < 32; ++i) mma_pin_unset(d[i]);
  mma_fence();
#pragma unroll
  for (int k = 0; k < kScaleBlock / 32; ++k) mma_m64n64k32_e4m3(d, a[k], b + 2 * k, k != 0);
  mma_commit();
}
// Waits until at most kPending products are unfinished; `d` belongs to a finished one.
template <int kPending>
__device__ __forceinline__ void end_columns(float (&d)[32]) {
  mma_wait<kPending>();
#pragma unroll
  for (int i = 0; i < 32; ++i) mma_pin(d[i]);
}
__device__ __forceinline__ void promote_columns(float* sum, const float (&d)[32], float low,
                                                float high) {
#pragma unroll
  for (int i = 0; i < 32; ++i) sum[i] = fmaf((i & 2) ? high : low, d[i], sum[i]);
}

// A warpgroup has 64 rows and all 256 columns: its act block in registers, 64 columns at a time,
// two such products in flight, so that one warpgroup alone keeps the tensor cores nearly busy. The
// two drift apart, and one writes its rows while the other multiplies.
template <WireFormat kWire>
__device__ __forceinline__ void multiply(const GroupedGemmArgs& args, std::uint32_t shared,
                                         const Steps& steps, int group) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;  // of this warpgroup
  const int first_row = group * 64 + warp * 16;
  const std::uint32_t act_scales = shared + kScaleOffset + (first_row + lane / 4) * 4;
  // Lane l addresses row l % 16 of the warp's rows, bytes 16 (l / 16) of each 32; the copy engine
  // put 16-byte piece p of a row at p ^ (row % 8).
  std::uint32_t act_rows =
      shared + kActOffset + (first_row + lane % 16) * kScaleBlock + ((lane / 16) ^ (lane % 8)) * 16;
  asm volatile("" : "+r"(act_rows));  // kept: computing it again stands before the next product
  const std::uint32_t weight_descriptor = descriptor_k_major_128b(shared + kWeightOffset);
  constexpr std::uint32_t kColumnsStep = 64 * kScaleBlock >> 4;
  const std::uint32_t empty_other = map_to_cta(shared + kEmptyOffset, steps.cta_rank ^ 1);

  // Weight scales of blocks kb ... kb + 15 of K: lanes 0 to 15 of the first 128 columns, the others
  // of the second. A half past the last column reads the last scales and is not written.
  const auto read_weight_scales = [&](int expert, int column, int kb) {
    const int scale_rows = args.hidden / kScaleBlock;
    const int scale_row = min(column / kScaleBlock + lane / 16, scale_rows - 1);
    return __ldg(args.weight_scales +
                 (static_cast<std::int64_t>(expert) * scale_rows + scale_row) * args.k_blocks +
                 min(kb + lane % 16, args.k_blocks - 1));
  };
  const auto release = [&](int stage) {
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(shared + kEmptyOffset + stage * 8);
      barrier_arrive_remote(empty_other + stage * 8);
    }
  };

  const bool odd = args.epoch != nullptr && penstock::parity_of(*args.epoch) != 0;
  std::uint32_t parities = 0;
  float scale_lane = 0.0f;
  float next_scale_lane = 0.0f;
  float d[2][32];
  float sum[2][64];
  std::uint32_t a[kScaleBlock / 32][4];
  wait_dealt(shared, 0);
  bool more = load_shared_i32(facts_address(shared, 0)) >= 0;
  if (more) {
    scale_lane = read_weight_scales(read_facts(shared, 0).expert, read_facts(shared, 0).column, 0);
  }
  for (int i = 0; more; ++i) {
    const std::uint32_t facts = facts_address(shared, i);
    // The next step's scales, some blocks of K before their use.
    const auto look_ahead = [&] {
      wait_dealt(shared, i + 1);
      const Facts next = read_facts(shared, i + 1);
      more = next.m >= 0;
      if (more) next_scale_lane = read_weight_scales(next.expert, next.column, 0);
    };
    barrier_wait(shared + kFullOffset, parity_of(parities, 0));
    if (load_shared_i32(facts + 8) >> 1 <= group * 64) {  // a half tile: no rows for this warpgroup
      for (int kb = 0; kb < args.k_blocks; ++kb) {
        const int stage = kb % kStages;
        barrier_wait(shared + kFullOffset + stage * 8, parity_of(parities, stage));
        parities ^= 1u << stage;
        release(stage);
      }
      look_ahead();
    } else {
      RowPlace place;
#pragma unroll
      for (int k = 0; k < 64; ++k) {
        sum[0][k] = 0.0f;
        sum[1][k] = 0.0f;
      }
      float row_scale[2];
      float half_scale[2];
      const auto read_scales = [&](int stage, int kb) {
        row_scale[0] = load_shared_f32(act_scales + stage * kScaleBytes);
        row_scale[1] = load_shared_f32(act_scales + stage * kScaleBytes + 8 * 4);
        half_scale[0] = __shfl_sync(0xffffffffu, scale_lane, kb % 16);
        half_scale[1] = __shfl_sync(0xffffffffu, scale_lane, 16 + kb % 16);
      };
      const auto read_act = [&](int stage) {
#pragma unroll
        for (int k = 0; k < kScaleBlock / 32; ++k)
          load_matrix_x4(a[k], (act_rows ^ (k * 32)) + stage * kActBytes);
      };
      read_scales(0, 0);
      read_act(0);
      for (int round = 0; round < args.k_blocks; round += kStages) {
        if (round + kStages >= args.k_blocks) {
          look_ahead();
          place = args.place[static_cast<std::int64_t>(load_shared_i32(facts)) * kTileRows +
                             first_row + lane % 16];
        }
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
          const int kb = round + stage;
          if (kb >= args.k_blocks) break;
          const std::uint32_t b = weight_descriptor + stage * (kWeightBytes >> 4);
          start_columns(d[0], a, b);
          start_columns(d[1], a, b + kColumnsStep);
          const float s00 = row_scale[0] * half_scale[0];
          const float s01 = row_scale[1] * half_scale[0];
          const float s10 = row_scale[0] * half_scale[1];
          const float s11 = row_scale[1] * half_scale[1];
          parities ^= 1u << stage;
          end_columns<1>(d[0]);
          promote_columns(sum[0], d[0], s00, s01);
          start_columns(d[0], a, b + 2 * kColumnsStep);
          end_columns<1>(d[1]);
          promote_columns(sum[0] + 32, d[1], s00, s01);
          start_columns(d[1], a, b + 3 * kColumnsStep);
          end_columns<1>(d[0]);
          promote_columns(sum[1], d[0], s10, s11);
          const bool next_block = kb + 1 < args.k_blocks;
          const int next_stage = (stage + 1) % kStages;
          if (next_block) {
            if ((kb + 1) % 16 == 0) {
              scale_lane = read_weight_scales(load_shared_i32(facts + 12),
                                              load_shared_i32(facts + 4), kb + 1);
            }
            barrier_wait(shared + kFullOffset + next_stage * 8, parity_of(parities, next_stage));
            read_scales(next_stage, kb + 1);
          }
          mma_wait<0>();
          if (next_block) read_act(next_stage);
          // Pinned behind the reads, so that the sums fill their latency.
          end_columns<0>(d[1]);
          promote_columns(sum[1] + 32, d[1], s10, s11);
          release(stage);
        }
      }

      const int column = load_shared_i32(facts + 4);
      const std::uint32_t staging = shared + kStagingOffset + (group * 4 + warp) * kStagingBytes;
      unsigned char* address =
          place.run >= 0 ? (odd ? args.runs_odd : args.runs).address(place) : nullptr;
      const bool both = column + kScaleBlock < args.hidden;
      if (column < args.hidden) {
        if constexpr (kWire == WireFormat::kBf16) {
          write_rows_bf16(sum, staging, address, column, both);
        } else {
          write_rows_fp8(sum, staging, address, column, args.hidden, both);
        }
      }
    }
    scale_lane = next_scale_lane;
  }
  announce_end(shared);
}

template <WireFormat kWire>
__global__ void __cluster_dims__(kClusterCtas, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_gemm_sm90(const __grid_constant__ GroupedGemmArgs args,
                      const __grid_constant__ CUtensorMap act_map,
                      const __grid_constant__ CUtensorMap weight_map) {
  extern __shared__ __align__(1024) unsigned char storage[];
  const std::uint32_t shared = shared_address(storage);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&act_map);
    prefetch_tensor_map(&weight_map);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared + kFullOffset + s * 8, 1);
      barrier_init(shared + kEmptyOffset + s * 8, kClusterCtas * kConsumerWarps);
    }
    store_release_shared(shared + kLeftOffset, 0);
    barrier_init(shared + kLastOffset, kConsumerWarps);
    barrier_init(shared + kTakenOffset, 1);
    for (int s = 0; s < kStepSlots; ++s) {
      barrier_init(shared + kDealtOffset + s * 8, 1);
      barrier_init(shared + kDrawnOffset + s * 8, 1);
      barrier_init(shared + kReadOffset + s * 8, 1);
    }
    barrier_init_fence();
  }
  cluster_sync();
  wait_for_previous();
  const int cta_rank = static_cast<int>(cluster_cta_rank());
  const int tiles = *args.tile_count;
  const int cluster_columns =
      (args.hidden + kClusterCtas * kGemmTileColumns - 1) / (kClusterCtas * kGemmTileColumns);
  const Steps steps{tiles * cluster_columns, cluster_columns,
                    static_cast<int>(gridDim.x) / kClusterCtas, cta_rank};

  if (threadIdx.x < 128) {
    register_budget_lower<40>();
    if (threadIdx.x == 0) {
      copy_operands(args, &act_map, &weight_map, shared, steps);
    } else if (threadIdx.x == 32 && args.chunk_counters != nullptr) {
      if (tiles == 0 && blockIdx.x == 0) no_chunks(args.post);
      count_tiles(args, shared, tiles);
    } else if (threadIdx.x == 64) {
      deal_steps(args, shared, steps);
    }
    __syncwarp();
  } else {
    register_budget_raise<232>();
    multiply<kWire>(args, shared, steps, static_cast<int>(threadIdx.x) / 128 - 1);
  }
  // The other CTA still copies into this one's shared memory and arrives on its barriers: leave
  // together.
  cluster_sync();
}

template <WireFormat kWire>
cudaError_t opt_in() {
  return cudaFuncSetAttribute(grouped_gemm_sm90<kWire>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(kSharedBytes));
}

}  // namespace

cudaError_t load_grouped_gemm_sm90() {
  const cudaError_t status = opt_in<WireFormat::kBf16>();
  return status != cudaSuccess ? status : opt_in<WireFormat::kFp8>();
}

cudaError_t launch_grouped_gemm_sm90(const GroupedGemmArgs& args, const GroupedGemmMaps& maps,
                                     WireFormat wire, int ctas, cudaStream_t stream) {
  if (args.next_step == nullptr) return cudaErrorInvalidValue;
  const LaunchPlace place{dim3(static_cast<unsigned>(ctas / kClusterCtas * kClusterCtas)), kThreads,
                          kSharedBytes, stream};
  return wire == WireFormat::kBf16 ? launch_chained(grouped_gemm_sm90<WireFormat::kBf16>, place,
                                                    args, maps.act, maps.weight)
                                   : launch_chained(grouped_gemm_sm90<WireFormat::kFp8>, place,
                                                    args, maps.act, maps.weight);
}

}  // namespace penstock::moe_stage2
