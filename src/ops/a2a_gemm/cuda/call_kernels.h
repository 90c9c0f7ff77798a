// The kernels of a call beside the GEMM: its beginning, the gate of the unfused form, and the
// copies of transport sm. Internal: the operator includes it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "penstock/fabric/device_views.h"
#include "penstock/ops/a2a_gemm/layout.h"
#include "penstock/ops/a2a_gemm/plan.h"

namespace penstock::a2a_gemm {

// Opens a call on one slot: ++*epoch, zeroes the counters, then waits until every peer that gets
// rows from this rank has read what it got in the slot's previous call. Only then *open becomes the
// epoch: whoever writes to peers or announces something in this call looks at it, and does neither
// while it lags behind. One CTA.
struct BeginArgs {
  std::uint64_t* epoch = nullptr;           // of the slot, this rank's
  std::uint64_t* open = nullptr;            // the last epoch of the slot whose wait succeeded
  const std::uint64_t* consumed = nullptr;  // [ranks], kLineBytes apart
  std::uint32_t peers = 0;                  // bit r: rank r gets rows from this rank
  std::int32_t ranks = 1;
  std::int32_t slot = 0;
  std::int32_t region = kConsumed;    // of `consumed`, for the record
  std::uint32_t* counters = nullptr;  // [counter_count]
  std::int32_t counter_count = 0;
  GuardView guard;
};
cudaError_t launch_begin_call_sm90(const BeginArgs& args, cudaStream_t stream);

// Returns when every row block of every other source has been announced for *epoch: behind it the
// GEMM needs no gate. One CTA.
struct WaitArrivedArgs {
  const std::uint64_t* arrived = nullptr;  // [ranks][row_blocks]
  std::int64_t arrival_stride = 0;         // words from source to source
  std::int32_t row_blocks = 0;             // of this rank's rows
  std::int32_t ranks = 1;
  std::int32_t rank = 0;
  const std::uint64_t* epoch = nullptr;
  GuardView guard;
};
cudaError_t launch_wait_arrived_sm90(const WaitArrivedArgs& args, cudaStream_t stream);

// What a rank sends in a call, and where to.
struct SendArgs {
  const std::byte* x = nullptr;     // [total rows, K], 16-byte aligned
  const float* x_scales = nullptr;  // [scale blocks][x_scale_stride]
  std::int64_t x_scale_stride = 0;
  const Piece* pieces = nullptr;  // [count], device memory
  std::int32_t count = 0;
  std::int32_t rows[kMaxRanks] = {};        // of each destination
  std::int64_t row_offset[kMaxRanks] = {};  // of its rows in X
  std::byte* base[kMaxRanks] = {};          // windows as this rank maps them
  WindowIndex index;
  std::int32_t rank = 0;
  std::int32_t slot = 0;
  // [count] device words, zero at first: CTAs that are done with a piece; they count on from call
  // to call, so the grid must stay the same.
  std::uint64_t* done = nullptr;
  const std::uint64_t* epoch = nullptr;
  const std::uint64_t* open = nullptr;  // BeginArgs::open: not the epoch, nothing is stored
};

// FP8: stores the scales of all rows that leave into the peers' windows, on at most `ctas` CTAs. No
// signal: the pieces' own signals come behind this kernel in stream order. Scales are a
// thirty-second of the bytes and lie in strips of a few KB; by copy engine each strip would cost
// what a piece does.
cudaError_t launch_push_scales_sm90(const SendArgs& args, int ctas, cudaStream_t stream);

// Stores the pieces into the peers' windows and announces each behind its last byte.
cudaError_t launch_push_sm90(const SendArgs& args, int ctas, cudaStream_t stream);

// q [rows, depth] and scales [depth / 128 rounded up][scale_stride] of x, as quantise_x() on the
// host.
struct QuantiseArgs {
  const std::uint16_t* x = nullptr;  // [rows, depth] bf16, 8-byte aligned
  std::uint8_t* q = nullptr;         // E4M3
  float* scales = nullptr;
  std::int64_t rows = 0;  // > 0
  std::int64_t scale_stride = 0;
  std::int32_t depth = 0;
};
cudaError_t launch_quantise_x_sm90(const QuantiseArgs& args, cudaStream_t stream);

// Load them now instead of at their first launches.
cudaError_t load_begin_call_sm90();
cudaError_t load_wait_arrived_sm90();
cudaError_t load_quantise_x_sm90();
cudaError_t load_push_scales_sm90();
cudaError_t load_push_sm90();

}  // namespace penstock::a2a_gemm
