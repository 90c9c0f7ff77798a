// The operator: down projection, rows home chunk by chunk, top-k combine.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>

#include "penstock/core/stream.h"
#include "penstock/fabric/transport.h"
#include "penstock/ops/moe_stage2/reference.h"
#include "penstock/ops/moe_stage2/shape.h"
#include "penstock/ops/timeline.h"

namespace penstock::moe_stage2 {

struct Options {
  TransportKind transport = TransportKind::kCopyEngine;
  bool choose_transport = false;         // cuda: choose_transport(shape) instead of `transport`
  std::int32_t tiles_per_chunk = 0;      // rows of so many tiles leave together; 0: by the shape
  bool fuse = true;                      // false: everything leaves after the last tile
  std::chrono::nanoseconds deadline{0};  // of one wait; 0: the team's
  CpuEngineOptions engine;               // cpu, copy_engine only
  Timeline* timeline = nullptr;          // cpu only: gets what each call did when
  // cuda, sm only: SMs that copy beside the GEMM; even, 2 to 16; 0: choose_copy_ctas(shape), at
  // most a quarter of the rank's SMs
  std::int32_t copy_ctas = 0;
  std::int32_t device = -1;  // cuda only: the rank's GPU; -1: the calling thread's current one
};

// One rank's operands of one call.
struct Operands {
  GemmOperands gemm;                          // rows as dispatch left them, see SourceRows
  const std::int32_t* expert_rows = nullptr;  // [experts_per_rank] valid rows of each local expert
  const RowOrigin* origin = nullptr;          // [tiles * kTileRows]
  std::int64_t tiles = 0;                     // that act and origin hold
  const float* weight = nullptr;              // [tokens, top_k] of this rank's own tokens
  std::int64_t tokens = 0;                    // T_r, at most max_tokens_per_rank, zero allowed
  Bf16* out = nullptr;                        // [tokens, hidden]
};

// What the last call of this rank did.
struct CallFacts {
  std::array<std::int64_t, kMaxRanks> rows{};  // rows for each destination, own ones included
  std::array<std::int64_t, kMaxRanks>
      spilled{};  // those past the reservation; raise row_slack to avoid them
};

// One rank's operator. One thread of the rank at a time; instances are independent of each other.
class MoeStage2 {
 public:
  virtual ~MoeStage2() = default;

  // Collective: every rank calls it with its own operands, in the same order. On cpu it returns
  // when `out` is complete; up to two calls are in flight between ranks. On cuda every pointer is
  // device memory (act, weight, act_scales and out 16-byte aligned, act_scale_stride a multiple of
  // 128) and the call only enqueues on `stream`; it allocates nothing and may be captured in a
  // graph, whose replays take new contents and routing from the same memory (prepare() the streams
  // first, track() after each replay). Contents and row counts may change from call to call.
  // Deterministic: the bytes of `out` depend on the operands alone, not on transport, chunk size,
  // slack or timing. Rows past a reservation are fetched from the sender's spill region, never
  // lost. Errors: InvalidArgument for a missing operand, too many tokens, or origins that the plan
  // refuses (with its words); this rank then sends nothing, and its peers' waits end at their
  // deadline. On cuda what only the device can see (origins) is thrown by the next call of run(),
  // and a fault that comes later by the team's check(). Fault when a peer does not come in time or
  // any rank faulted (out is then undefined); the team's rearm() makes the operator usable again.
  virtual void run(Stream stream, const Operands& operands) = 0;

  // cuda, before the first run() or replay on a stream that other ranks' kernels may have to wait
  // for: sets it up now (run() does it by itself, except while capturing). Waits for the stream.
  // Nothing on cpu.
  virtual void prepare(Stream stream) { (void)stream; }
  // cuda, after each launch of a graph that holds run(): tells the rank's fault handling where work
  // is, and throws InvalidArgument for what an earlier call found wrong on the device, as run()
  // does. Replays must be ordered behind each other and behind other calls of this operator, by one
  // stream or by events; run() outside of a graph orders itself. Nothing on cpu.
  virtual void track(Stream stream) { (void)stream; }

  virtual const Shape& shape() const noexcept = 0;
  virtual const Layout& layout() const noexcept = 0;
  // cuda: of the last call that has ended.
  virtual const CallFacts& facts() const noexcept = 0;
  // What has been moved to peers, by the transport or by direct stores. Rows that stay at home and
  // fetched spill rows are in neither. cuda: row tables are direct stores on every transport.
  virtual TransportCounters counters() const noexcept = 0;
};

// Bytes of this operator's window at every rank.
std::uint64_t window_bytes(const Shape& shape, const Options& options);

// Collective. The CPU operator over host memory. Throws InvalidArgument on every rank when the
// shapes or options of the ranks differ or are wrong, ResourceExhausted when the window does not
// fit.
std::unique_ptr<MoeStage2> make_cpu_moe_stage2(TeamHandle team, const Shape& shape,
                                               const Options& options = {});

// Collective. The operator on GPUs: one rank a GPU, or several ranks of one process that share it.
// Results are those of the CPU operator where the tensor cores' sums are exact
// (docs/moe-stage2.md); they do not depend on transport, chunk size or the number of CTAs. Throws
// as above, Unsupported where there is no Hopper GPU, in a build without CUDA, and where ranks
// cannot reach each other.
std::unique_ptr<MoeStage2> make_cuda_moe_stage2(TeamHandle team, const Shape& shape,
                                                const Options& options = {});

}  // namespace penstock::moe_stage2
