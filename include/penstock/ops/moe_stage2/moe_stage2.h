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

namespace penstock::moe_stage2 {

struct Options {
  TransportKind transport = TransportKind::kCopyEngine;
  std::int32_t tiles_per_chunk = 16;     // rows of so many tiles leave together; at least 1
  bool fuse = true;                      // false: everything leaves after the last tile
  std::chrono::nanoseconds deadline{0};  // of one wait; 0: the team's
  CpuEngineOptions engine;               // cpu, copy_engine only
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
  // when `out` is complete; up to two calls are in flight between ranks. Contents and row counts
  // may change from call to call. Deterministic: the bytes of `out` depend on the operands alone,
  // not on transport, chunk size, slack or timing. Rows past a reservation are fetched from the
  // sender's spill region, never lost. Errors: InvalidArgument for a missing operand, too many
  // tokens, or origins that the plan refuses (with its words); this rank then sends nothing, and
  // its peers' waits end at their deadline. Fault when a peer does not come in time or any rank
  // faulted (out is then undefined); the team's rearm() makes the operator usable again.
  virtual void run(Stream stream, const Operands& operands) = 0;

  virtual const Shape& shape() const noexcept = 0;
  virtual const Layout& layout() const noexcept = 0;
  virtual const CallFacts& facts() const noexcept = 0;
  // What has been moved to peers, by the transport or by direct stores. Rows that stay at home and
  // fetched spill rows are in neither.
  virtual TransportCounters counters() const noexcept = 0;
};

// Bytes of this operator's window at every rank.
std::uint64_t window_bytes(const Shape& shape, const Options& options);

// Collective. The CPU operator over host memory. Throws InvalidArgument on every rank when the
// shapes or options of the ranks differ or are wrong, ResourceExhausted when the window does not
// fit.
std::unique_ptr<MoeStage2> make_cpu_moe_stage2(TeamHandle team, const Shape& shape,
                                               const Options& options = {});

}  // namespace penstock::moe_stage2
