// Grouped FP8 GEMM of the down projection, sm_90a: persistent, warp-specialised, clusters of two.
//
// A CTA computes 128 x 256 tiles of y, 128 deep steps through a ring of four stages. Warp 0 copies
// (tensor copies; the CTAs of a cluster share W or A by multicast), warp 1 counts finished tiles,
// two consumer warpgroups multiply into 64 accumulators each and after each block of K add them,
// scaled, in f32 to 128 running sums. 192 of the 232 registers are sums. How the warpgroups keep
// out of each other's way depends on how long their epilogue is: multiply_in_turns() for rows in
// bf16, 128 rows x 128 columns each; multiply_drifting() for rows in fp8, 64 rows x 256 columns
// each.
#include <cuda_runtime.h>

#include "ops/moe_stage2/cuda/chained_launch.h"
#include "ops/moe_stage2/cuda/grouped_gemm_sm90.h"
#include "ops/moe_stage2/cuda/post_sm90.cuh"
#include "ops/sm90/fp8_wave.cuh"
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
// Facts of a step (FactsOfWork), published by the copier one step ahead. It can be kStages + 1
// steps ahead of the slowest consumer, which reads its own and the next.
constexpr int kFactSlots = 8;
static_assert(kFactSlots >= kStages + 3);
constexpr std::uint32_t kFactsOffset = kLastOffset + 8;
constexpr std::uint32_t kSharedBytes = kFactsOffset + kFactSlots * 16;
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

// The steps of this CTA: first, first + step, ... below total.
struct Steps {
  int first;
  int step;
  int total;
  int cluster_columns;
  int cta_rank;

  __device__ __forceinline__ int count() const {
    return first < total ? (total - first + step - 1) / step : 0;
  }
  // Work of the i-th step; past the end that of the last.
  __device__ __forceinline__ Work work(const GroupedGemmArgs& args, int i) const {
    const int linear = min(first + i * step, total - 1);
    return work_of(linear, __ldg(args.tile_mate + linear / cluster_columns), cluster_columns,
                   cta_rank);
  }
};

// Stages are used from 0 on in every step, so that a stage's addresses and descriptors are
// constants in the unrolled loops; with k_blocks % kStages != 0 the last stages of a round are
// skipped. Bit s is the parity of stage s.
__device__ __forceinline__ std::uint32_t parity_of(std::uint32_t parities, int stage) {
  return (parities >> stage) & 1u;
}

// ---- roles
// -----------------------------------------------------------------------------------------

__device__ __forceinline__ void publish_facts(const GroupedGemmArgs& args, std::uint32_t shared,
                                              int i, const Work& work) {
  store_shared_v4(shared + kFactsOffset + i % kFactSlots * 16,
                  make_uint4(static_cast<unsigned>(work.m), static_cast<unsigned>(work.column),
                             static_cast<unsigned>(args.tile_rows[work.m]),
                             static_cast<unsigned>(args.tile_expert[work.m])));
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
  const int count = steps.count();
  if (count == 0) return;
  std::uint32_t parities =
      (1u << kStages) - 1;  // a fresh barrier passes a wait for the phase before its first
  const Lag lag = lag_of(args.k_blocks);
  Work work = steps.work(args, 0);
  publish_facts(args, shared, 0, work);
  for (int i = 0; i < count; ++i) {
    const int expert = args.tile_expert[work.m];
    const int row = work.m * kTileRows;
    const Work next = steps.work(args, i + 1);
    publish_facts(args, shared, i + 1, next);
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
                                 work.column + steps.cta_rank * kScaleBlock, expert, kBoth);
        load_tensor_2d(act, act_map, full, k, row);
        load_tensor_2d(act + kActHalf, act_map, full, k, row + kTileRows / 2);
      } else {
        load_tensor_2d_multicast(act + steps.cta_rank * kActHalf, act_map, full, k,
                                 row + steps.cta_rank * (kTileRows / 2), kBoth);
        load_tensor_3d(weight, weight_map, full, k, work.column, expert);
        load_tensor_3d(weight + kWeightHalf, weight_map, full, k, work.column + kScaleBlock,
                       expert);
      }
      load_bulk(shared + kScaleOffset + stage * kScaleBytes,
                args.act_scales + kb * args.act_scale_stride + row, kScaleBytes, full);
    }
    work = next;
  }
}

// Counts finished tiles in a warp of its own: the fence takes about a microsecond, which would
// otherwise stand between two tiles of a consumer.
//
// Consumers say nothing until their last step. Whoever gives back a stage in step i + 1 has stored
// the rows of step i, so the copier, which waits for that stage anyway (block 0 of K when it
// refills it with block kStages; with fewer blocks a step later), knows that all have left step i.
// A handshake of every consumer warp with this one cost 2.4% of the kernel where warpgroups take
// turns.
__device__ __forceinline__ void count_tiles(const GroupedGemmArgs& args, std::uint32_t shared,
                                            int tiles, const Steps& steps) {
  const int column_tiles = (args.hidden + kGemmTileColumns - 1) / kGemmTileColumns;
  const int count = steps.count();
  // The copier speaks of no step from here on.
  const int silent = count - lag_of(args.k_blocks).steps;
  int left = 0;  // steps that are over
  for (int i = 0; i < count; ++i) {
    const Work work = steps.work(args, i);
    if (i >= silent) {
      if (left < count) barrier_wait(shared + kLastOffset, 0);
      left = count;
    }
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

// Writes one wave, 16 rows x 128 columns a warp, as bf16. `address` is the start of the row that
// this lane stands for (lane l: row l % 16 of wave l / 16), null where nothing is to be written.
__device__ __forceinline__ void write_wave_bf16(const float (&sum)[64], std::uint32_t staging,
                                                int wave, unsigned char* address, int column) {
  const int lane = threadIdx.x % 32;
  // stmatrix: lanes 0-7 address rows 0-7, 8-15 rows 8-15 of column group j, 16-31 the same of j
  // + 1.
  const int matrix_row = lane % 16;
  const int matrix_group = lane / 16;
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    const std::uint32_t piece = (j + matrix_group) ^ (matrix_row & 7);
    store_matrix_x4(staging + matrix_row * 256 + piece * 16, pack_bf16(sum[4 * j], sum[4 * j + 1]),
                    pack_bf16(sum[4 * j + 2], sum[4 * j + 3]),
                    pack_bf16(sum[4 * j + 4], sum[4 * j + 5]),
                    pack_bf16(sum[4 * j + 6], sum[4 * j + 7]));
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = 2 * i + lane / 16;
    const int piece = lane % 16;
    const auto target =
        __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(address), wave * 16 + row);
    const uint4 v = load_shared_v4(staging + row * 256 + ((piece ^ (row & 7)) * 16));
    store_global_v4_if(target != 0,
                       reinterpret_cast<unsigned char*>(target) + 2 * column + piece * 16, v);
  }
  __syncwarp();
}

// mx_scale<E4M3>(amax, kCeil) and its inverse() without branches; a test compares them for every
// exponent.
struct WireScale {
  std::uint32_t code;
  float inverse;
};
__device__ __forceinline__ WireScale wire_scale(std::uint32_t amax) {
  constexpr std::uint32_t kMantissaOfMax = float_bits(E4M3::kMax) & 0x007fffffu;
  const int exponent =
      static_cast<int>(amax >> 23) - E4M3::kEmax + ((amax & 0x007fffffu) > kMantissaOfMax ? 1 : 0);
  const std::uint32_t code = static_cast<std::uint32_t>(exponent > 0 ? exponent : 0);
  const bool finite = is_finite_bits(amax);
  return {finite ? code : E8M0::kNanBits,
          __uint_as_float(finite ? (254u - code) << 23 : kF32NanBits)};
}

// max(|a|, |b|), NaN if either is: the bits order as in amax_bits().
__device__ __forceinline__ float max_magnitude(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(fabsf(a)), "f"(fabsf(b)));
  return m;
}

// The same wave as E4M3 with one E8M0 per 32 columns behind the row's payload.
__device__ __forceinline__ void write_wave_fp8(const float (&sum)[64], std::uint32_t staging,
                                               int wave, unsigned char* address, int column,
                                               int hidden) {
  const int lane = threadIdx.x % 32;
  std::uint32_t exponents[2] = {0, 0};
  // Word [half][g]: this lane's two columns of column groups 2 g (low) and 2 g + 1, in row lane / 4
  // + 8 half.
  std::uint32_t words[2][8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      float largest = 0.0f;
#pragma unroll
      for (int j = 4 * block; j < 4 * block + 4; ++j) {
        largest =
            max_magnitude(largest, max_magnitude(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]));
      }
      largest = max_magnitude(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = max_magnitude(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const WireScale scale = wire_scale(__float_as_uint(largest));
      exponents[half] |= scale.code << (8 * block);
#pragma unroll
      for (int g = 2 * block; g < 2 * block + 2; ++g) {
        const float* even = sum + 8 * g + 2 * half;
        const std::uint32_t low = pack_e4m3(even[0] * scale.inverse, even[1] * scale.inverse);
        const std::uint32_t high = pack_e4m3(even[4] * scale.inverse, even[5] * scale.inverse);
        words[half][g] = low | high << 16;
      }
    }
  }
  // stmatrix puts a lane's two 16-bit halves beside each other: the pairs of a 16-byte piece,
  // columns 2 q and 8 + 2 q of lanes q = 0 .. 3, stand as 0 4 1 5 2 6 3 7 and are put in order when
  // read.
  const int matrix_row = lane % 16;
#pragma unroll
  for (int g = 0; g < 8; g += 2) {
    const std::uint32_t piece = (g + lane / 16) ^ (matrix_row & 7);
    store_matrix_x4(staging + matrix_row * 128 + piece * 16, words[0][g], words[1][g],
                    words[0][g + 1], words[1][g + 1]);
  }
  __syncwarp();
  const auto packed_address = reinterpret_cast<unsigned long long>(address);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * i + lane / 8;
    const int piece = lane % 8;
    const auto target = __shfl_sync(0xffffffffu, packed_address, wave * 16 + row);
    const uint4 v = load_shared_v4(staging + row * 128 + ((piece ^ (row & 7)) * 16));
    const uint4 ordered = make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410),
                                     __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x7632));
    store_global_v4_if(target != 0, reinterpret_cast<unsigned char*>(target) + column + piece * 16,
                       ordered);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto target = __shfl_sync(0xffffffffu, packed_address, wave * 16 + lane / 4 + 8 * half);
    if (lane % 4 == 0 && target != 0) {
      *reinterpret_cast<std::uint32_t*>(reinterpret_cast<unsigned char*>(target) + hidden +
                                        column / kWireBlock) = exponents[half];
    }
  }
  __syncwarp();
}

template <WireFormat kWire>
__device__ __forceinline__ void write_wave(const float (&sum)[64], std::uint32_t staging, int wave,
                                           unsigned char* address, int column, int hidden) {
  if constexpr (kWire == WireFormat::kBf16) {
    write_wave_bf16(sum, staging, wave, address, column);
  } else {
    write_wave_fp8(sum, staging, wave, address, column, hidden);
  }
}

// A consumer warp has stored its rows of the last step.
__device__ __forceinline__ void announce_end(std::uint32_t shared) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(shared + kLastOffset);
}

// ---- the bf16 wire's consumer
// -------------------------------------------------------------------------

// Scales of this lane's four rows of a tile, of one block of K.
struct ActScales {
  float row[4];
};
__device__ __forceinline__ ActScales read_act_scales(std::uint32_t address) {
  return {{load_shared_f32(address), load_shared_f32(address + 8 * 4),
           load_shared_f32(address + 64 * 4), load_shared_f32(address + 72 * 4)}};
}

// A warpgroup's number is a template parameter: descriptors and barriers are then uniform
// constants, and nothing but the matrix instruction stands between a turn and its use.
template <WireFormat kWire, int kGroup>
__device__ __forceinline__ void multiply_in_turns(const GroupedGemmArgs& args, std::uint32_t shared,
                                                  const Steps& steps) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;  // of this warpgroup
  const int group_row = warp * 16;        // of each 64-row wave
  const std::uint32_t act_scales = shared + kScaleOffset + (group_row + lane / 4) * 4;
  const std::uint32_t act_descriptor = descriptor_k_major_128b(shared + kActOffset);
  const std::uint32_t weight_descriptor =
      descriptor_k_major_128b(shared + kWeightOffset + kGroup * (kWeightBytes / 2));
  const std::uint32_t empty_other = map_to_cta(shared + kEmptyOffset, steps.cta_rank ^ 1);

  // Weight scales of blocks kb ... kb + 31 of K for this warpgroup's 128 columns, one a lane. A
  // group past the last column reads the last scales and writes nothing.
  const auto read_weight_scales = [&](int expert, int column, int kb) {
    const int scale_rows = args.hidden / kScaleBlock;
    const int scale_row = min(column / kScaleBlock + kGroup, scale_rows - 1);
    return __ldg(args.weight_scales +
                 (static_cast<std::int64_t>(expert) * scale_rows + scale_row) * args.k_blocks +
                 min(kb + lane, args.k_blocks - 1));
  };

  // Gives a stage back. Both CTAs' copiers write into it (W or A comes by multicast), so both have
  // to know.
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
  if (kGroup == 1) named_barrier_arrive(kTurnBarrier, kTurnThreads);

  float d[64];
  float sum[2][64];
  const int count = steps.count();
  for (int i = 0; i < count; ++i) {
    const std::uint32_t facts = shared + kFactsOffset + i % kFactSlots * 16;
    const std::uint32_t next_facts = shared + kFactsOffset + (i + 1) % kFactSlots * 16;
    // The copier wrote both before it announced the first bytes of this step's first stage.
    barrier_wait(shared + kFullOffset, parity_of(parities, 0));
    const bool two_waves = load_shared_i32(facts + 8) > 64;
    if (i == 0)
      scale_lane = read_weight_scales(load_shared_i32(facts + 12), load_shared_i32(facts + 4), 0);
    // A whole step before its use.
    const float next_scale_lane =
        read_weight_scales(load_shared_i32(next_facts + 12), load_shared_i32(next_facts + 4), 0);
    RowPlace place;
#pragma unroll
    for (int k = 0; k < 64; ++k) {
      sum[0][k] = 0.0f;
      sum[1][k] = 0.0f;
    }
    ActScales scales = read_act_scales(act_scales);
    float w = __shfl_sync(0xffffffffu, scale_lane, 0);
    // Waits for block kb, which follows the one in `stage`, and reads its scales.
    const auto prepare = [&](int stage, int kb) {
      if (kb >= args.k_blocks) return;
      const int next_stage = (stage + 1) % kStages;
      if (kb % 32 == 0) {
        scale_lane =
            read_weight_scales(load_shared_i32(facts + 12), load_shared_i32(facts + 4), kb);
      }
      barrier_wait(shared + kFullOffset + next_stage * 8, parity_of(parities, next_stage));
      scales = read_act_scales(act_scales + next_stage * kScaleBytes);
      w = __shfl_sync(0xffffffffu, scale_lane, kb % 32);
    };
    for (int round = 0; round < args.k_blocks; round += kStages) {
      if (round + kStages >= args.k_blocks) {
        place = args.place[static_cast<std::int64_t>(load_shared_i32(facts)) * kTileRows +
                           (lane / 16) * 64 + group_row + lane % 16];
      }
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        const int kb = round + stage;
        if (kb >= args.k_blocks) break;
        const std::uint32_t a = act_descriptor + stage * (kActBytes >> 4);
        const std::uint32_t b = weight_descriptor + stage * (kWeightBytes >> 4);
        named_barrier_sync(kTurnBarrier + kGroup, kTurnThreads);
        start_wave(d, a, b);
        // Under the matrix instructions: everything that is neither a sum nor one of them.
        if (kb > 0) release((stage + kStages - 1) % kStages);
        parities ^= 1u << stage;
        const float s00 = scales.row[0] * w;
        const float s01 = scales.row[1] * w;
        const float s10 = scales.row[2] * w;
        const float s11 = scales.row[3] * w;
        pass_turn<kGroup>(d);
        if (!two_waves) prepare(stage, kb + 1);
        end_wave(d);
        promote(sum[0], d, s00, s01);
        if (two_waves) {  // the same in both warpgroups, so their turns stay even
          named_barrier_sync(kTurnBarrier + kGroup, kTurnThreads);
          start_wave(d, a + (64 * kScaleBlock >> 4), b);
          pass_turn<kGroup>(d);
          prepare(stage, kb + 1);
          end_wave(d);
          promote(sum[1], d, s10, s11);
        }
      }
    }
    release((args.k_blocks - 1) % kStages);

    const int column = load_shared_i32(facts + 4) + kGroup * kScaleBlock;
    if (column < args.hidden) {
      const std::uint32_t staging = shared + kStagingOffset + (kGroup * 4 + warp) * kStagingBytes;
      unsigned char* address =
          place.run >= 0 ? (odd ? args.runs_odd : args.runs).address(place) : nullptr;
      write_wave<kWire>(sum[0], staging, 0, address, column, args.hidden);
      if (two_waves) write_wave<kWire>(sum[1], staging, 1, address, column, args.hidden);
    }
    scale_lane = next_scale_lane;
  }
  announce_end(shared);
  // Takes the turn that the last wave of warpgroup 1 gave, so that no barrier is left half full.
  if (kGroup == 0) named_barrier_sync(kTurnBarrier, kTurnThreads);
}

// ---- the fp8 wire's consumer
// --------------------------------------------------------------------------

// Starts the product of this warpgroup's 64 rows with 64 columns.
__device__ __forceinline__ void start_columns(float (&d)[32], const std::uint32_t (&a)[4][4],
                                              std::uint32_t b) {
#pragma unroll
  for (int i = 0; i < 32; ++i) mma_pin(d[i]);
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
// two such products in flight, so that one warpgroup alone keeps the tensor cores nearly busy and
// no turns are needed. The two drift apart, and one quantises its rows while the other multiplies:
// 4 to 5% for this wire. Rows in bf16 leave quickly, and there turns are 1 to 3% better. The order
// of additions is the same.
template <WireFormat kWire>
__device__ __forceinline__ void multiply_drifting(const GroupedGemmArgs& args, std::uint32_t shared,
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
  float d[2][32];
  float sum[2][64];
  std::uint32_t a[kScaleBlock / 32][4];
  const int count = steps.count();
  for (int i = 0; i < count; ++i) {
    const std::uint32_t facts = shared + kFactsOffset + i % kFactSlots * 16;
    const std::uint32_t next_facts = shared + kFactsOffset + (i + 1) % kFactSlots * 16;
    // The copier wrote both before it announced the first bytes of this step's first stage.
    barrier_wait(shared + kFullOffset, parity_of(parities, 0));
    if (i == 0)
      scale_lane = read_weight_scales(load_shared_i32(facts + 12), load_shared_i32(facts + 4), 0);
    // A whole step before its use.
    const float next_scale_lane =
        read_weight_scales(load_shared_i32(next_facts + 12), load_shared_i32(next_facts + 4), 0);
    if (load_shared_i32(facts + 8) <= group * 64) {  // a half tile: no rows for this warpgroup
      for (int kb = 0; kb < args.k_blocks; ++kb) {
        const int stage = kb % kStages;
        barrier_wait(shared + kFullOffset + stage * 8, parity_of(parities, stage));
        parities ^= 1u << stage;
        release(stage);
      }
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
          const bool more = kb + 1 < args.k_blocks;
          const int next_stage = (stage + 1) % kStages;
          if (more) {
            if ((kb + 1) % 16 == 0) {
              scale_lane = read_weight_scales(load_shared_i32(facts + 12),
                                              load_shared_i32(facts + 4), kb + 1);
            }
            barrier_wait(shared + kFullOffset + next_stage * 8, parity_of(parities, next_stage));
            read_scales(next_stage, kb + 1);
          }
          mma_wait<0>();
          if (more) read_act(next_stage);
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
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = column + half * kScaleBlock;
        if (first < args.hidden) {
          write_wave<kWire>(sum[half], staging, 0, address, first, args.hidden);
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
    barrier_init_fence();
  }
  cluster_sync();
  wait_for_previous();
  const int cta_rank = static_cast<int>(cluster_cta_rank());
  const int tiles = *args.tile_count;
  const int cluster_columns =
      (args.hidden + kClusterCtas * kGemmTileColumns - 1) / (kClusterCtas * kGemmTileColumns);
  const Steps steps{static_cast<int>(blockIdx.x) / kClusterCtas,
                    static_cast<int>(gridDim.x) / kClusterCtas, tiles * cluster_columns,
                    cluster_columns, cta_rank};

  if (threadIdx.x < 128) {
    register_budget_lower<40>();
    if (threadIdx.x == 0) {
      copy_operands(args, &act_map, &weight_map, shared, steps);
    } else if (threadIdx.x == 32 && args.chunk_counters != nullptr) {
      if (tiles == 0 && blockIdx.x == 0) no_chunks(args.post);
      count_tiles(args, shared, tiles, steps);
    }
    __syncwarp();
  } else {
    register_budget_raise<232>();
    if constexpr (kWire == WireFormat::kFp8) {
      multiply_drifting<kWire>(args, shared, steps, static_cast<int>(threadIdx.x) / 128 - 1);
    } else if (threadIdx.x < 256) {
      multiply_in_turns<kWire, 0>(args, shared, steps);
    } else {
      multiply_in_turns<kWire, 1>(args, shared, steps);
    }
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
  const LaunchPlace place{dim3(static_cast<unsigned>(ctas / kClusterCtas * kClusterCtas)), kThreads,
                          kSharedBytes, stream};
  return wire == WireFormat::kBf16 ? launch_chained(grouped_gemm_sm90<WireFormat::kBf16>, place,
                                                    args, maps.act, maps.weight)
                                   : launch_chained(grouped_gemm_sm90<WireFormat::kFp8>, place,
                                                    args, maps.act, maps.weight);
}

}  // namespace penstock::moe_stage2
