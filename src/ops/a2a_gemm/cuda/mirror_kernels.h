// The mirror's kernels: the GEMM whose finished pieces leave, and what moves and receives them.
// Internal: the operator and its tests include it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/a2a_gemm/cuda/a2a_gemm_sm90.h"
#include "ops/a2a_gemm/mirror_layout.h"
#include "penstock/fabric/device_views.h"
#include "penstock/ops/a2a_gemm/plan.h"

namespace penstock::a2a_gemm {

// Who hands a piece over once its last tile is written.
enum class ResultPost : std::int32_t {
  kNone,        // nobody in the GEMM: ship_results_sm90 or post_results_sm90 does
  kCopyEngine,  // a descriptor into the proxy's ring, the signal behind the data
  kDirect,      // the epilogue stored into the peer's window: the signal alone
};

// What a rank sends in a call.
struct ResultSend {
  ResultPost post = ResultPost::kNone;
  MirrorGrid grid;
  std::int32_t rows = 0;  // of this rank
  std::int32_t slot = 0;
  MirrorIndex index;
  std::byte* base[kMaxRanks] = {};  // windows as this rank maps them
  RingView ring;                    // kCopyEngine
  GuardView guard;
  // [pieces] warps that have stored their part of a piece, then [pieces] CTAs of ship_results_sm90
  // that have copied theirs. begin_call_sm90 zeroes them.
  std::uint32_t* counters = nullptr;
  const std::uint64_t* epoch = nullptr;
  const std::uint64_t* open = nullptr;  // BeginArgs::open: not the epoch, nothing is handed over
};

// gemm: args of one rank's rows [rows, K] with W [ranks * N, K]; out, chunks and the gate are not
// read. result[d]: where the part of destination d goes, [rows, N].
struct MirrorArgs {
  GemmArgs gemm;
  ResultSend send;
  std::uint16_t* result[kMaxRanks] = {};
};
// Enqueues the GEMM, as launch_gemm_sm90().
cudaError_t launch_gemm_a2a_sm90(const MirrorArgs& args, const GemmMaps& maps, Format format,
                                 int ctas, cudaStream_t stream);

// Transport sm: copies pieces from the send region into the peers' windows and announces each, on
// `ctas` CTAs. `beside`: the GEMM runs at the same time, so each piece is waited for.
cudaError_t launch_ship_results_sm90(const ResultSend& send, bool beside, int ctas,
                                     cudaStream_t stream);

// Hands over all pieces behind the GEMM, as send.post says.
cudaError_t launch_post_results_sm90(const ResultSend& send, cudaStream_t stream);

// Copies pieces from the window to `out` as they come, and tells their sources behind the last.
struct ReceiveArgs {
  MirrorIndex index;
  std::byte* window = nullptr;              // this rank's
  std::uint64_t* consumed[kMaxRanks] = {};  // of each source with rows, at its rank
  std::int32_t rows[kMaxRanks] = {};        // of each source
  std::int64_t row_offset[kMaxRanks] = {};
  std::int32_t ranks = 1;
  std::int32_t rank = 0;
  std::int32_t slot = 0;
  std::int32_t row_block_rows = kClusterRows;
  std::byte* out = nullptr;  // [total rows, N] bf16
  const std::uint64_t* epoch = nullptr;
  std::uint64_t* finished = nullptr;  // as GemmArgs::finished
  GuardView guard;
};
cudaError_t launch_receive_results_sm90(const ReceiveArgs& args, int ctas, cudaStream_t stream);

// Load them now instead of at their first launches.
cudaError_t load_gemm_a2a_sm90();
cudaError_t load_ship_results_sm90();
cudaError_t load_post_results_sm90();
cudaError_t load_receive_results_sm90();

}  // namespace penstock::a2a_gemm
