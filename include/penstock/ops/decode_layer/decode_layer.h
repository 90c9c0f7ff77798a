// The decode layer on a GPU: GLM-5 MoE decoder layers as persistent launches, one rank of a
// tensor-parallel group.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "penstock/core/stream.h"
#include "penstock/ops/decode_layer/plan.h"
#include "penstock/ops/decode_layer/shape.h"

namespace penstock::decode {

// Device pointers of one layer. They must stay valid while launches that use them run.
struct LayerBinding {
  const void* weights = nullptr;  // prepare_weights' output, 256-byte aligned
  void* cache = nullptr;          // paged cache, 16-byte aligned; rows as shape.kv_format says
  std::int64_t page_stride = 0;   // bytes from one 64-token page to the next, a multiple of 16
  const std::int32_t* pick_offsets =
      nullptr;                          // [rows + 1]; row s picks [offsets[s], offsets[s + 1])
  const std::int32_t* picks = nullptr;  // global cache slots: page * 64 + place; at most 2048 a row
};

// Device pointers of one step.
struct DecodeStep {
  int rows = 1;                             // at most shape.rows
  const std::uint16_t* x_in = nullptr;      // [rows, hidden] bf16
  std::uint16_t* x_out = nullptr;           // [rows, hidden] bf16; may be x_in
  const std::int32_t* positions = nullptr;  // [rows]
  const std::int64_t* slots = nullptr;      // [rows]; where the row's cache entry goes, -1: padding
};

struct DecodeOptions {
  int device = 0;
  int sm_budget = 0;       // multiprocessors to use, 0: all
  double deadline_s = 0;   // of every wait, 0: PENSTOCK_DEADLINE_S
  bool self_loop = false;  // ranks > 1 without peers: this rank writes all partials itself, for
                           // measuring a shard alone. The sums are then ranks times its own.
  int present = 0;        // Ranks 0 .. present - 1 of shape.ranks take part in the all-reduces, the
                          // others are not there: for measuring shards on fewer GPUs than ranks.
                          // 0: all. The sums lack the parts of the others.
  bool timeline = false;  // keep the SM clock at the end of every stage
};

// A stall on purpose, for tests: before stage `stage` (its place in stage_names()) of every layer,
// CTA `cta` of this rank (-1: all of them) does nothing for `seconds`.
struct DecodeStall {
  int stage = 0;
  int cta = -1;
  double seconds = 0;  // 0: no stall
};

// Construct, set_layers, then run() as often as wanted.
//
// Determinism: equal inputs give equal bits, whatever the launch, transport or graph. A row's bits
// do not depend on other rows, on padding or on the SM budget.
// One instance is for one stream at a time: launches must not overlap.
class DecodeLayer {
 public:
  // Allocates workspace and window on options.device. Throws InvalidArgument / Unsupported (shape,
  // device, budget), ResourceExhausted / Backend (memory, driver).
  DecodeLayer(const DecodeShape& shape, const DecodeOptions& options);
  ~DecodeLayer();
  DecodeLayer(const DecodeLayer&) = delete;
  DecodeLayer& operator=(const DecodeLayer&) = delete;

  // This rank's window, and where this rank reaches the windows of all ranks that are present
  // ([ranks], own included); with more than one of them and no self_loop connect() must come before
  // run(). Memory:
  // window_bytes(), zero.
  void* window() const noexcept;
  void connect(std::span<void* const> windows);
  static std::int64_t window_bytes(const DecodeShape& shape, const DecodeOptions& options);
  static std::int64_t workspace_bytes(const DecodeShape& shape, const DecodeOptions& options);

  // Uploads the table of layers (synchronous; not while launches run).
  void set_layers(std::span<const LayerBinding> layers);

  // Enqueues layers [first, first + count) on the rows of `step`: one launch for up to
  // rows_per_launch() rows, several launches in a row else (their rows are independent, but picks
  // of a row must not name the new slot of a row of a later launch). Allocates nothing, never
  // waits; may be captured. Order: the stream's. All ranks must run the same sequence. Throws
  // InvalidArgument for rows, layers or null pointers; Backend if the launch is refused.
  void run(Stream stream, const DecodeStep& step, int first, int count);
  int rows_per_launch() const noexcept;
  int launches(int rows) const noexcept;

  // Holds this rank up in all launches enqueued from now on (captured graphs keep what they were
  // captured with). Results do not change; a stall beyond the deadline of a wait for it is a fault.
  // Throws InvalidArgument for a stage or CTA that does not exist or a negative time.
  void set_stall(const DecodeStall& stall);

  // Throws Fault with the record if a wait of any finished launch expired; outputs since are void.
  void check() const;
  // After a fault, with no launch running: empties mailboxes, counter and record. With ranks > 1
  // all ranks must do it before any of them runs again. Synchronous.
  void rearm();

  // The plan of a launch of `rows` rows, and a copy of one parity's mailboxes (0 or 1: layer number
  // modulo 2 since construction or rearm), for tests and tools. Synchronous.
  const DecodePlan& plan(int rows) const;
  std::vector<std::uint32_t> mailboxes(int parity) const;
  std::vector<std::uint32_t> window_words(int parity) const;
  // [layers][grid][stages + 1] SM clocks of the last run() (timeline option), else empty.
  // Synchronous.
  std::vector<std::int64_t> timeline(int rows, int layers) const;
  static const std::vector<std::string>& stage_names();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace penstock::decode
