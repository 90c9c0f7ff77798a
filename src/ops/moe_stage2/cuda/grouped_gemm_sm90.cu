// Grouped FP8 GEMM of the down projection, sm_90a: persistent, warp-specialised, clusters of two.
//
// A CTA computes 128 x 256 tiles of y, 128 deep steps through a ring of four stages. Warp 0 copies
// (tensor copies; the two CTAs of a cluster take neighbouring columns of the same rows and share A
// by multicast), warp 1 counts finished tiles, two consumer warpgroups multiply: each 128 rows x
// 128 columns, so that one weight scale covers its whole half, as two waves of m64n128 into the
// same 64 accumulators. After each block of K the wave is scaled and added in f32 to the 128
// running sums; while one warpgroup does so the other's matrix instructions run. 192 of the 232
// registers are sums.
#include <cuda_runtime.h>

#include "ops/moe_stage2/cuda/grouped_gemm_sm90.h"
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
constexpr std::uint32_t kDoneOffset = kEmptyOffset + kStages * 8;
constexpr std::uint32_t kCountedOffset = kDoneOffset + 8;
constexpr std::uint32_t kSharedBytes = kCountedOffset + 8;
static_assert(kSharedBytes <= 232448, "more shared memory than a block of sm_90 can have");

constexpr std::uint32_t kStaggerBarrier = 1;

// Tile `linear` of the cluster grid: columns run first, so that rows finish in order and chunks
// early.
struct TileIndex {
  int m;
  int column;  // first column of this CTA
};
__device__ __forceinline__ TileIndex tile_index(int linear, int cluster_columns, int cta_rank) {
  const int m = linear / cluster_columns;
  const int n = linear - m * cluster_columns;
  return {m, (n * kClusterCtas + cta_rank) * kGemmTileColumns};
}

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

// ---- roles
// -----------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_operands(const GroupedGemmArgs& args,
                                              const CUtensorMap* act_map,
                                              const CUtensorMap* weight_map, std::uint32_t shared,
                                              int cta_rank, int first, int step, int total,
                                              int cluster_columns) {
  RingPosition ring;
  int expert = first < total ? args.tile_expert[first / cluster_columns] : 0;
  for (int linear = first; linear < total; linear += step) {
    const TileIndex tile = tile_index(linear, cluster_columns, cta_rank);
    // The next tile's expert is fetched now: a dependent read of 0.4 us otherwise stands before
    // each tile.
    const int next = linear + step;
    const int next_expert = next < total ? args.tile_expert[next / cluster_columns] : 0;
    const int row = tile.m * kTileRows;
    for (int kb = 0; kb < args.k_blocks; ++kb) {
      const std::uint32_t full = shared + kFullOffset + ring.stage * 8;
      barrier_wait(shared + kEmptyOffset + ring.stage * 8, ring.parity ^ 1);
      barrier_arrive_expect(full, kActBytes + kWeightBytes + kScaleBytes);
      load_tensor_2d_multicast(
          shared + kActOffset + ring.stage * kActBytes + cta_rank * (kActBytes / kClusterCtas),
          act_map, full, kb * kScaleBlock, row + cta_rank * (kTileRows / kClusterCtas),
          (1u << kClusterCtas) - 1);
      load_tensor_3d(shared + kWeightOffset + ring.stage * kWeightBytes, weight_map, full,
                     kb * kScaleBlock, tile.column, expert);
      load_bulk(shared + kScaleOffset + ring.stage * kScaleBytes,
                args.act_scales + kb * args.act_scale_stride + row, kScaleBytes, full);
      ring.advance();
    }
    expert = next_expert;
  }
}

// Counts finished tiles in a warp of its own: the fence to system scope takes over a microsecond,
// which would otherwise stand between two tiles of a consumer.
__device__ __forceinline__ void count_tiles(const GroupedGemmArgs& args, std::uint32_t shared,
                                            int cta_rank, int first, int step, int total, int tiles,
                                            int cluster_columns) {
  const int column_tiles = (args.hidden + kGemmTileColumns - 1) / kGemmTileColumns;
  std::uint32_t parity = 0;
  for (int linear = first; linear < total; linear += step) {
    const TileIndex tile = tile_index(linear, cluster_columns, cta_rank);
    barrier_wait(shared + kDoneOffset, parity);
    barrier_arrive(shared + kCountedOffset);
    parity ^= 1;
    if (tile.column >= args.hidden) continue;
    const int chunk = tile.m / args.tiles_per_chunk;
    const int chunk_begin = chunk * args.tiles_per_chunk;
    const int left = tiles - chunk_begin;
    const int chunk_tiles = left < args.tiles_per_chunk ? left : args.tiles_per_chunk;
    const std::int64_t word = static_cast<std::int64_t>(chunk) * kCounterStride;
    const std::uint32_t before = fetch_add_system(args.chunk_counters + word, 1);
    if (before + 1 == static_cast<std::uint32_t>(chunk_tiles * column_tiles)) {
      store_release_system(args.chunk_flags + word, args.chunk_epoch);
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

// The same wave as E4M3 with one E8M0 per 32 columns behind the row's payload.
__device__ __forceinline__ void write_wave_fp8(const float (&sum)[64], std::uint32_t staging,
                                               int wave, unsigned char* address, int column,
                                               int hidden) {
  const int lane = threadIdx.x % 32;
  std::uint32_t exponents[2] = {0, 0};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      std::uint32_t largest = 0;
#pragma unroll
      for (int j = 4 * block; j < 4 * block + 4; ++j) {
        largest = max_bits(largest, max_bits(abs_bits(sum[4 * j + 2 * half]),
                                             abs_bits(sum[4 * j + 2 * half + 1])));
      }
      largest = max_bits(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = max_bits(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const WireScale scale = wire_scale(largest);
      exponents[half] |= scale.code << (8 * block);
#pragma unroll
      for (int j = 4 * block; j < 4 * block + 4; ++j) {
        const std::uint16_t pair = pack_e4m3(sum[4 * j + 2 * half] * scale.inverse,
                                             sum[4 * j + 2 * half + 1] * scale.inverse);
        const std::uint32_t piece = (j / 2) ^ (row & 7);
        store_shared_u16(staging + row * 128 + piece * 16 + (j % 2) * 8 + (lane % 4) * 2, pair);
      }
    }
  }
  __syncwarp();
  const auto packed_address = reinterpret_cast<unsigned long long>(address);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * i + lane / 8;
    const int piece = lane % 8;
    const auto target = __shfl_sync(0xffffffffu, packed_address, wave * 16 + row);
    const uint4 v = load_shared_v4(staging + row * 128 + ((piece ^ (row & 7)) * 16));
    store_global_v4_if(target != 0, reinterpret_cast<unsigned char*>(target) + column + piece * 16,
                       v);
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

__device__ __forceinline__ void multiply_block(float (&d)[64], std::uint64_t a, std::uint64_t b) {
#pragma unroll
  for (int i = 0; i < 64; ++i) mma_pin(d[i]);
  mma_fence();
#pragma unroll
  for (int k = 0; k < kScaleBlock / 32; ++k) {
    mma_m64n128k32_e4m3(d, a + 2 * k, b + 2 * k, k != 0);
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
  for (int i = 0; i < 64; ++i) sum[i] = fmaf((i & 2) ? high : low, d[i], sum[i]);
}

template <WireFormat kWire>
__device__ __forceinline__ void multiply(const GroupedGemmArgs& args, std::uint32_t shared,
                                         int cta_rank, int first, int step, int total,
                                         int cluster_columns) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 - 4;  // 0 to 7
  const int group = warp / 4;             // consumer warpgroup: columns 128 * group of the tile
  const int group_row = (warp % 4) * 16;  // of each 64-row wave
  const std::uint32_t staging = shared + kStagingOffset + warp * kStagingBytes;

  // First weight scale of this warpgroup's 128 columns. A group past the last column reads the last
  // scale and writes nothing.
  const auto weight_scales = [&](int expert, int column) {
    const int scale_rows = args.hidden / kScaleBlock;
    const int scale_row = min(column / kScaleBlock + group, scale_rows - 1);
    return args.weight_scales +
           (static_cast<std::int64_t>(expert) * scale_rows + scale_row) * args.k_blocks;
  };

  RingPosition ring;
  std::uint32_t tiles_done = 0;
  const float* scales = args.weight_scales;
  float weight_scale = 0.0f;
  int rows = 0;
  if (first < total) {
    const TileIndex tile = tile_index(first, cluster_columns, cta_rank);
    scales = weight_scales(args.tile_expert[tile.m], tile.column);
    rows = args.tile_rows[tile.m];
    weight_scale = __ldg(scales);
  }
  int stagger = first < total ? min(args.stagger_blocks, args.k_blocks) : 0;
  if (stagger > 0 && group == 1) {
    named_barrier_sync(kStaggerBarrier, 256);
    stagger = 0;
  }

  float d[64];
  float sum[2][64];
  for (int linear = first; linear < total; linear += step) {
    const TileIndex tile = tile_index(linear, cluster_columns, cta_rank);
    const bool two_waves = rows > 64;
    // The next tile's facts are read a whole tile before their use.
    const int next = min(linear + step, total - 1);
    const TileIndex next_tile = tile_index(next, cluster_columns, cta_rank);
    const int next_expert = args.tile_expert[next_tile.m];
    const int next_rows = args.tile_rows[next_tile.m];
    const RowPlace place = args.place[static_cast<std::int64_t>(tile.m) * kTileRows +
                                      (lane / 16) * 64 + group_row + lane % 16];
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      sum[0][i] = 0.0f;
      sum[1][i] = 0.0f;
    }
    for (int kb = 0; kb < args.k_blocks; ++kb) {
      // One block ahead, across the tile's end too: the read takes as long as the block.
      ++scales;
      if (kb + 1 == args.k_blocks) scales = weight_scales(next_expert, next_tile.column);
      const float next_weight_scale = __ldg(scales);
      barrier_wait(shared + kFullOffset + ring.stage * 8, ring.parity);
      const std::uint32_t act_scales =
          shared + kScaleOffset + ring.stage * kScaleBytes + (group_row + lane / 4) * 4;
      const float s00 = load_shared_f32(act_scales) * weight_scale;
      const float s01 = load_shared_f32(act_scales + 8 * 4) * weight_scale;
      const float s10 = load_shared_f32(act_scales + 64 * 4) * weight_scale;
      const float s11 = load_shared_f32(act_scales + 72 * 4) * weight_scale;
      const std::uint64_t a = descriptor_k_major_128b(shared + kActOffset + ring.stage * kActBytes);
      const std::uint64_t b = descriptor_k_major_128b(
          shared + kWeightOffset + ring.stage * kWeightBytes + group * (kWeightBytes / 2));
      multiply_block(d, a, b);
      promote(sum[0], d, s00, s01);
      if (two_waves) multiply_block(d, a + (64 * kScaleBlock >> 4), b);
      // Both CTAs' copiers write into this stage (A comes by multicast), so both have to know.
      __syncwarp();
      if (lane == 0) {
        const std::uint32_t empty = shared + kEmptyOffset + ring.stage * 8;
        barrier_arrive(empty);
        barrier_arrive_remote(map_to_cta(empty, cta_rank ^ 1));
      }
      if (two_waves) promote(sum[1], d, s10, s11);
      ring.advance();
      weight_scale = next_weight_scale;
      if (stagger > 0 && --stagger == 0) named_barrier_arrive(kStaggerBarrier, 256);
    }

    const int column = tile.column + group * kScaleBlock;
    if (column < args.hidden) {
      unsigned char* address = place.run >= 0 ? args.runs.address(place) : nullptr;
      if constexpr (kWire == WireFormat::kBf16) {
        write_wave_bf16(sum[0], staging, 0, address, column);
        if (two_waves) write_wave_bf16(sum[1], staging, 1, address, column);
      } else {
        write_wave_fp8(sum[0], staging, 0, address, column, args.hidden);
        if (two_waves) write_wave_fp8(sum[1], staging, 1, address, column, args.hidden);
      }
    }
    if (args.chunk_counters != nullptr) {
      // The counting warp has to have taken note of the previous tile before this one is announced.
      __syncwarp();
      if (lane == 0) {
        if (tiles_done > 0) barrier_wait(shared + kCountedOffset, (tiles_done - 1) & 1);
        barrier_arrive(shared + kDoneOffset);
      }
      ++tiles_done;
    }
    rows = next_rows;
  }
}

template <WireFormat kWire>
__global__ void __cluster_dims__(kClusterCtas, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_gemm_sm90(const __grid_constant__ GroupedGemmArgs args,
                      const __grid_constant__ CUtensorMap act_map,
                      const __grid_constant__ CUtensorMap weight_map) {
  extern __shared__ __align__(1024) unsigned char storage[];
  const std::uint32_t shared = shared_address(storage);
  const int cta_rank = static_cast<int>(cluster_cta_rank());
  const int tiles = *args.tile_count;
  const int cluster_columns =
      (args.hidden + kClusterCtas * kGemmTileColumns - 1) / (kClusterCtas * kGemmTileColumns);
  const int total = tiles * cluster_columns;
  const int first = static_cast<int>(blockIdx.x) / kClusterCtas;
  const int step = static_cast<int>(gridDim.x) / kClusterCtas;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&act_map);
    prefetch_tensor_map(&weight_map);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared + kFullOffset + s * 8, 1);
      barrier_init(shared + kEmptyOffset + s * 8, kClusterCtas * kConsumerWarps);
    }
    barrier_init(shared + kDoneOffset, kConsumerWarps);
    barrier_init(shared + kCountedOffset, 1);
    barrier_init_fence();
  }
  cluster_sync();

  if (threadIdx.x < 128) {
    register_budget_lower<40>();
    if (threadIdx.x == 0) {
      copy_operands(args, &act_map, &weight_map, shared, cta_rank, first, step, total,
                    cluster_columns);
    } else if (threadIdx.x == 32 && args.chunk_counters != nullptr) {
      count_tiles(args, shared, cta_rank, first, step, total, tiles, cluster_columns);
    }
    __syncwarp();
  } else {
    register_budget_raise<232>();
    multiply<kWire>(args, shared, cta_rank, first, step, total, cluster_columns);
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
  const dim3 grid(static_cast<unsigned>(ctas / kClusterCtas * kClusterCtas));
  if (wire == WireFormat::kBf16) {
    grouped_gemm_sm90<WireFormat::kBf16>
        <<<grid, kThreads, kSharedBytes, stream>>>(args, maps.act, maps.weight);
  } else {
    grouped_gemm_sm90<WireFormat::kFp8>
        <<<grid, kThreads, kSharedBytes, stream>>>(args, maps.act, maps.weight);
  }
  return cudaGetLastError();
}

}  // namespace penstock::moe_stage2
