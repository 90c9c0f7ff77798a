// The CPU operator of a whole `glm_moe_dsa` model: sequences in a paged latent cache, one call a
// step.
//
//   Checkpoint checkpoint("models/tiny-glm");
//   Engine engine(checkpoint, {.ranks = 2});
//   const SequenceId sequence = engine.create_sequence();
//   StepResult out = engine.step({{sequence, prompt}});          // prefill: [1, vocab]
//   while (...) out = engine.step({{sequence, {next_token}}});   // decode
//
// Formulas: Hugging Face transformers 5.17 `glm_moe_dsa`, attention in its absorbed form. Weights
// stay in the checkpoint's mapping in their stored format and are converted in registers.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "penstock/model/checkpoint.h"
#include "penstock/model/config.h"
#include "penstock/ops/decode_layer/shape.h"

namespace penstock {

// What a matrix product with quantised weights reads on its other side.
enum class ActivationFormat : unsigned char {
  kF32,  // f32 as computed
  kFp8,  // rounded to E4M3 with one f32 scale per token and 128 columns, max(amax, 1e-4) / 448;
         // products of unquantised weights (router, indexer head weights, lm_head) and the two
         // absorbed products W_UK, W_UV keep f32
};
std::string_view to_string(ActivationFormat format);

struct EngineOptions;
class DecodeLayers;  // decode_layers.h
using DecodeLayersFactory = std::unique_ptr<DecodeLayers> (*)(const Checkpoint&,
                                                              const EngineOptions&);

// Zero (or a negative latent_eps) asks for the default written beside each member.
struct EngineOptions {
  // Tensor-parallel ranks, each a thread with its own cache: 1, 2, 4 or 8, a divisor of the heads
  // and of both intermediate sizes. Results differ between rank counts by f32 summation order only.
  int ranks = 1;
  // Compute threads of one rank; 0: PENSTOCK_THREADS_COUNT, else hardware threads / ranks, at least
  // 1.
  int threads = 0;
  ActivationFormat activations = ActivationFormat::kF32;
  // Cache pages (64 tokens, all layers) shared by all sequences; 0: what one sequence of
  // max_context tokens needs. Memory is reserved at construction and touched on first use.
  std::int64_t pages = 0;
  // Token rows computed at once; longer steps run in chunks of this size, which changes no bit.
  std::int64_t max_rows = 256;
  // Longest sequence in tokens; 0: the model's max_position_embeddings.
  std::int64_t max_context = 0;
  // Eps of q_a_layernorm and kv_a_layernorm; negative: the configuration's.
  double latent_eps = -1.0;
  // What runs the decoder layers; null: the engine's own products. cpu_decode_layers or
  // cuda_decode_layers (decode_layers.h) run each as decode_layer, prefill in chunks of up to 16
  // rows; embedding, final norm and lm_head stay on the CPU. That operator attends to given picks
  // and has no indexer yet, so contexts end at the indexer's top-k, below which the picks are all
  // positions. Values cross its stages in bf16 (reference.h names where); activations must be kF32.
  DecodeLayersFactory decode_layers = nullptr;
  // Cache rows of decode_layers; the engine's own are f32.
  decode::KvFormat kv_format = decode::KvFormat::kBf16;
};

// Names a sequence of one engine; never reused by it.
using SequenceId = std::int64_t;

// New tokens of one sequence. tokens [n >= 1], each in [0, vocab); a sequence appears once a step.
struct StepEntry {
  SequenceId sequence = -1;
  std::vector<std::int32_t> tokens;
};

// Which rows of logits a step returns.
enum class LogitRows : unsigned char {
  kLast,  // one row an entry: its last token's
  kAll,   // one row a token: entries in order, tokens in order
};

struct StepResult {
  std::int64_t rows = 0;
  std::int64_t vocab = 0;
  std::vector<float> logits;  // [rows, vocab]
  std::span<const float> row(std::int64_t i) const {
    return {logits.data() + i * vocab, static_cast<std::size_t>(vocab)};
  }
};

// One token's intermediate result, shown to a capture hook. Spans die when the hook returns.
//   stage            values                              indices
//   "embedding"      [hidden] residual stream            -
//   "layer.out"      [hidden] residual stream            -
//   "indexer.picks"  -                                   [min(k, position + 1)] positions,
//   ascending "router.logits"  [experts] before the sigmoid        - "router.choice"  [top_k]
//   weights                     [top_k] expert ids, best first
struct Capture {
  std::string_view stage;
  std::int64_t layer = -1;  // -1 for "embedding"
  SequenceId sequence = -1;
  std::int64_t position = 0;
  std::span<const float> values;
  std::span<const std::int32_t> indices;
};
using CaptureHook = std::function<void(const Capture&)>;

// Bytes held, all ranks together.
struct EngineMemory {
  std::int64_t weight_bytes = 0;     // mapped weights and scales that a step may read
  std::int64_t converted_bytes = 0;  // norms and biases kept as f32; decode_layers' weight units
  std::int64_t cache_bytes = 0;      // latent and index pages, reserved
  std::int64_t scratch_bytes = 0;    // activations of max_rows rows
  std::int64_t page_bytes = 0;       // one page (64 tokens, all layers, all ranks)
};

// Without decode_layers, cache rows are f32: latent rows [kv_lora + rope] (normalised c_kv, then
// k_pe rotated in place, pairs (2i, 2i + 1) kept interleaved) and index keys [index_dim]. bf16 rows
// would halve them, but their rounding alone is 1e-3 relative, the whole budget of this operator
// against its reference.
//
// Determinism: a token's bits depend on its sequence's tokens and the rank count only; not on what
// else is in the batch, chunking, threads or page placement. They may differ between instruction
// sets (the widest one that the processor has is chosen at run time). With cuda_decode_layers also
// on the multiprocessors that a rank has (decode_layer.h).
//
// One caller at a time: calls from two threads need the caller's lock. Engines are independent.
class Engine {
 public:
  // Tokens a cache page holds.
  static constexpr std::int64_t kPageTokens = 64;

  // The checkpoint must outlive the engine. Throws Error: InvalidArgument naming an option's value,
  // Unsupported for a geometry that cannot be sharded so, ResourceExhausted for memory or threads.
  Engine(const Checkpoint& checkpoint, const EngineOptions& options = {});
  ~Engine();
  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;

  const ModelConfig& config() const noexcept;
  // The options in force, defaults filled in.
  const EngineOptions& options() const noexcept;

  // An empty sequence; holds no page until its first token.
  SequenceId create_sequence();
  // Gives its pages back. Throws InvalidArgument for an unknown sequence.
  void remove_sequence(SequenceId sequence);
  // Tokens in the cache. Throws InvalidArgument for an unknown sequence.
  std::int64_t length(SequenceId sequence) const;
  // Keeps the first `length` tokens and gives the pages behind them back. Throws InvalidArgument
  // for an unknown sequence or a length outside [0, length(sequence)].
  void truncate(SequenceId sequence, std::int64_t length);
  std::int64_t free_pages() const noexcept;
  std::int64_t total_pages() const noexcept;

  // Appends each entry's tokens and returns logits [rows, vocab]. Prefill and decode entries mix
  // freely. All checks come first, so that a refused step changes nothing: InvalidArgument for an
  // empty batch or entry, an unknown or repeated sequence, a token outside the vocabulary, a
  // context over max_context; ResourceExhausted, with the counts, when pages run out. When a rank
  // fails during the step the first error is thrown after all ranks ended; no sequence has grown
  // then and the step may be repeated.
  StepResult step(std::span<const StepEntry> batch, LogitRows rows = LogitRows::kLast);
  StepResult step(std::initializer_list<StepEntry> batch, LogitRows rows = LogitRows::kLast);

  // Shows intermediate results of later steps, on the calling thread, rank 0's values, rows in
  // batch order within a stage. An empty hook ends it. An exception from the hook ends the step as
  // a rank's failure does. With decode_layers: "embedding" and "layer.out" only.
  void set_capture(CaptureHook hook);

  EngineMemory memory() const noexcept;
  // All of memory() but page_bytes, summed.
  std::int64_t memory_bytes() const noexcept;

  // Overwrites every cache element that belongs to no token with `value` (with decode_layers: with
  // NaN); for tests of stale reads.
  void poison_unused(float value);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace penstock
