// Launcher of the grouped FP8 GEMM. Internal: the operator and the benchmark include it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/moe_stage2/cuda/post_sm90.h"
#include "penstock/ops/moe_stage2/plan.h"

namespace penstock::moe_stage2 {

inline constexpr int kGemmTileColumns =
    256;  // of one CTA; a cluster of two takes 512 beside each other
inline constexpr int kCounterStride = 32;  // u32 words: one counter per 128-byte line

// Operands of y[row] = act[row] x W2[expert(row)]^T. All pointers are device memory.
struct GroupedGemmArgs {
  // [I / 128, act_scale_stride] f32: transposed, so that the 128 scales which a tile needs for one
  // block of K are 512 consecutive bytes: one bulk copy on the barrier of the stage they belong to.
  // Row-major they would be 128 pieces of 4 bytes. act_scale_stride (rows) is a multiple of 128.
  const float* act_scales = nullptr;
  std::int64_t act_scale_stride = 0;
  const float* weight_scales = nullptr;  // [experts, H / 128, I / 128] f32
  std::int32_t hidden = 0;
  std::int32_t k_blocks = 0;  // I / 128

  const std::int32_t* tile_count = nullptr;  // the plan's, see PlanOutputs
  const std::int32_t* tile_expert = nullptr;
  const std::int32_t* tile_rows = nullptr;
  const std::int32_t* tile_mate = nullptr;
  const RowPlace* place = nullptr;
  RunBases runs;
  // The operator's two slots: with `epoch` (device memory) odd, rows go to runs_odd. Null: to runs.
  RunBases runs_odd;
  const std::uint64_t* epoch = nullptr;

  // A word that clusters draw their steps from: zero before the first launch, and zero again when a
  // launch ends. Launches that share it must not overlap. Null is refused.
  std::uint32_t* next_step = nullptr;

  // Tiles [c * tiles_per_chunk, ...) are chunk c. Each finished CTA tile adds one to
  // chunk_counters[c * kCounterStride]; the addition that completes the chunk also stores
  // chunk_epoch to chunk_flags[c * kCounterStride] with release order at system scope (flags null:
  // nothing), and posts the chunk. Counters have to be zero at launch. Null: nobody waits for
  // chunks.
  std::uint32_t* chunk_counters = nullptr;
  std::uint32_t* chunk_flags = nullptr;
  std::uint32_t chunk_epoch = 0;
  std::int32_t tiles_per_chunk = 1;
  // What the tile that completes a chunk does with it; needs chunk_counters.
  ChunkPost post;
};

struct GroupedGemmMaps {
  CUtensorMap act;     // [rows, I] u8, box 64 x 128
  CUtensorMap weight;  // [experts, H, I] u8, box 1 x 128 x 128
};

// Enqueues the GEMM on `ctas` CTAs (even; at most one an SM). No allocation, no synchronisation:
// may be captured. Rows whose place says run < 0 are not written.
cudaError_t launch_grouped_gemm_sm90(const GroupedGemmArgs& args, const GroupedGemmMaps& maps,
                                     WireFormat wire, int ctas, cudaStream_t stream);

// Loads the kernels now instead of at the first launch, and opts in to their shared memory.
cudaError_t load_grouped_gemm_sm90();

}  // namespace penstock::moe_stage2
