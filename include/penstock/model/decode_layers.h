// An engine's decoder layers as calls of decode_layer, on the CPU or on GPUs: give one of the two
// functions below to EngineOptions::decode_layers.
//
//   Engine engine(checkpoint, {.ranks = 2, .decode_layers = cuda_decode_layers});
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "penstock/model/engine.h"

namespace penstock {

// Token rows of one step, at most decode::kMaxRows; a row's picks may name the new slots of rows
// before it.
struct DecodeRows {
  std::span<std::uint16_t> x;                  // [rows, hidden] bf16 residual stream, in and out
  std::span<const std::int32_t> positions;     // [rows]
  std::span<const std::int64_t> slots;         // [rows] where each row's cache entry goes
  std::span<const std::int32_t> pick_offsets;  // [rows + 1]
  std::span<const std::int32_t> picks;         // cache slots, [offsets[s], offsets[s + 1]) of row s
};

// The layers of one model with their weights and paged caches, all ranks. One caller at a time.
class DecodeLayers {
 public:
  virtual ~DecodeLayers() = default;
  // Runs layers [first, first + count) and returns when they are done. Throws Fault if a wait of
  // the kernel expired; the next call starts from empty mailboxes.
  virtual void run(const DecodeRows& rows, std::int64_t first, std::int64_t count) = 0;
  virtual std::int64_t weight_bytes() const = 0;  // held beside the checkpoint's mapping, all ranks
  virtual std::int64_t page_bytes() const = 0;    // of one cache page, all layers and ranks
  virtual std::int64_t scratch_bytes() const = 0;  // workspaces and windows, all ranks
  // Overwrites a slot's rows in every layer with 0xFF bytes (NaN in every format).
  virtual void poison(std::int64_t slot) = 0;
};

// The CPU operator (ops/decode_layer/reference.h): plain loops on the calling thread that round
// where the kernel rounds. Throws Unsupported for a model that decode_layer cannot run.
std::unique_ptr<DecodeLayers> cpu_decode_layers(const Checkpoint& checkpoint,
                                                const EngineOptions& options);
// The kernel, in penstock::cuda: rank r on GPU r modulo their number; ranks that share a GPU share
// its multiprocessors evenly. Throws Unsupported with the reason where there is no usable GPU or no
// CUDA back end in the build, and as above.
std::unique_ptr<DecodeLayers> cuda_decode_layers(const Checkpoint& checkpoint,
                                                 const EngineOptions& options);

}  // namespace penstock
