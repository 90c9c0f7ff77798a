// Launchers of the gated GEMM. Internal: the operator, its tests and the benchmark include it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "penstock/fabric/device_views.h"
#include "penstock/ops/a2a_gemm/plan.h"
#include "penstock/ops/a2a_gemm/shape.h"

namespace penstock::a2a_gemm {

// What a traced call notes (a kernel of its own: others carry nothing of it), nanoseconds of the
// GPU's wall clock.
struct TraceView {
  // [cluster tiles][trace_words]: of each chunk in the order in which it was read when it was
  // wanted (the last bits hold the source) and when its rows could be read, then the tile's end.
  std::uint64_t* tiles = nullptr;     // null: no trace
  std::uint64_t* arrivals = nullptr;  // [ranks][row_blocks] first seen; all ones before the call
};
inline constexpr std::uint64_t kTraceSourceMask = 15;
PENSTOCK_HOST_DEVICE constexpr std::int64_t trace_words(std::int32_t ranks) {
  return 2 * ranks + 1;
}

// One call of one rank. All pointers are device memory unless said otherwise.
struct GemmArgs {
  std::int32_t ranks = 1;
  std::int32_t rank = 0;
  std::int32_t rows = 0;        // of this rank's result, > 0
  std::int32_t columns = 0;     // N
  std::int32_t steps = 0;       // of 128 bytes of K, one chunk
  std::int32_t chunk_rows = 0;  // rows from one source's chunk to the next in the window
  std::int32_t row_block_rows = kClusterRows;  // rows a word announces, a multiple of kClusterRows
  std::int32_t band = 1;                       // TileGrid::band
  std::uint16_t* out = nullptr;                // [rows, N] bf16

  // FP8 only, f32. Scales of row r and step s of a source at [s * stride + r].
  const float* chunk_scales = nullptr;  // [ranks][steps][scale_stride]
  std::int64_t scale_stride = 0;
  const float* local_scales = nullptr;  // of this rank's own rows
  std::int64_t local_scale_stride = 0;
  const float* w_scales = nullptr;  // [ranks][N / 128 rounded up][steps]

  // The gate. `arrived` null: everything is there already. Otherwise source s announces row block b
  // by storing an epoch >= *epoch to arrived[s * arrival_stride + b].
  const std::uint64_t* arrived = nullptr;
  std::int64_t arrival_stride = 0;  // words
  std::int32_t row_blocks = 1;      // of one source
  ChunkOrder order = ChunkOrder::kRotation;
  const std::uint64_t* epoch = nullptr;
  GuardView guard;

  // Behind the last tile, unless the call failed: *epoch to each of these words (release at system
  // scope). `finished` counts CTAs and goes on counting across launches of equal grids. Null
  // pointers: nobody waits.
  std::uint64_t* consumed[kMaxRanks] = {};
  std::uint64_t* finished = nullptr;
  TraceView trace;
};

struct GemmMaps {
  CUtensorMap local;  // [rows, row bytes], box 128 x 128 bytes
  CUtensorMap chunk;  // [ranks * chunk_rows, row bytes], box 128 x 128 bytes
  CUtensorMap w;      // [ranks * N, row bytes], box 128 x 128 bytes
};

// Enqueues the GEMM on `ctas` CTAs (rounded down to even; at most one an SM). No allocation, no
// synchronisation: may be captured. The same bits for every `ctas` and band; in arrival order the
// bits depend on which chunk came first.
cudaError_t launch_gemm_sm90(const GemmArgs& args, const GemmMaps& maps, Format format, int ctas,
                             cudaStream_t stream);
// Loads the kernels now instead of at the first launch, and opts in to their shared memory.
cudaError_t load_gemm_sm90();

}  // namespace penstock::a2a_gemm
