// One tensor-parallel rank's share of the forward pass over a chunk of token rows.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/engine_weights.h"
#include "model/float_buffer.h"
#include "model/paged_cache.h"
#include "penstock/core/thread_pool.h"
#include "penstock/fabric/all_reduce.h"
#include "penstock/model/engine.h"

namespace penstock::engine {

// Consecutive new tokens of one sequence; its pages hold them already.
struct Segment {
  const Sequence* sequence = nullptr;
  std::int64_t first = 0;  // position of tokens[0]
  std::span<const std::int32_t> tokens;
};

// Rows in segment order. logit_rows: rows whose logits are wanted, ascending.
struct Chunk {
  std::span<const Segment> segments;
  std::span<const std::int64_t> logit_rows;
  float* logits = nullptr;  // [logit_rows, vocab], each rank writes its slice of the vocabulary
  const CaptureHook* capture = nullptr;  // called on rank 0
};

// Stages run one after another; within a stage this rank's threads take tasks. A task computes
// whole output elements, so who takes it changes nothing.
class RankWorker {
 public:
  // Collective over the team.
  RankWorker(const ModelConfig& config, const EngineOptions& options, const ModelWeights& weights,
             int rank, const TeamHandle& team);

  // Collective over the ranks. Writes this rank's caches at the chunk's positions.
  void forward(const Chunk& chunk);
  CacheStorage& cache() { return cache_; }
  std::int64_t scratch_bytes() const;

 private:
  struct Row {
    const Sequence* sequence = nullptr;
    std::int64_t position = 0;
    std::int32_t token = 0;
  };
  // An expert (or dense MLP) and its rows.
  struct ExpertRun {
    const MlpWeights* weights = nullptr;
    std::int64_t rows = 0;
    std::int64_t width = 0;    // this rank's part of the intermediate
    const float* x = nullptr;  // [rows, hidden]
    float* hidden = nullptr;   // [rows, width]
    float* out = nullptr;      // [rows, hidden]
  };
  // Outputs [begin, end) of one product, x [rows, matrix cols].
  struct Block {
    const cpu::Matrix* matrix = nullptr;
    std::int64_t begin = 0;
    std::int64_t end = 0;
    const float* x = nullptr;
    std::int64_t rows = 0;
    float* y = nullptr;
    std::int64_t ldy = 0;
  };
  struct ThreadScratch {
    FloatBuffer linear, queries, latents, logits, up, scores;
    std::vector<std::uint64_t> keys;
    std::vector<const float*> row_pointers;
  };

  template <typename Body>
  void tasks(std::int64_t count, const Body& body);
  template <typename Body>
  void for_rows(const Body& body);
  bool rounds(const cpu::Matrix& matrix) const;
  const float* operand(const cpu::Matrix& matrix, const float* x, std::int64_t rows,
                       std::int64_t count, const FloatBuffer& to);
  void add_blocks(const cpu::Matrix& matrix, const float* x, std::int64_t rows, float* y,
                  std::int64_t ldy);
  void run_blocks();
  ThreadScratch& scratch(int thread) { return scratch_[static_cast<std::size_t>(thread)]; }

  void embed();
  void rotate(float* x, std::int64_t row) const;
  void attention_inputs(const LayerWeights& layer, std::int64_t index);
  void pick();
  void attend(const LayerWeights& layer, std::int64_t index);
  void route(const LayerWeights& layer);
  void choose_experts(const LayerWeights& layer, std::int64_t row);
  void mlp(const LayerWeights& layer);
  void reduce();
  void logits(const Chunk& chunk);
  void capture(const char* stage, std::int64_t layer, std::int64_t row,
               std::span<const float> values, std::span<const std::int32_t> indices) const;
  void capture_stream(const char* stage, std::int64_t layer) const;

  const ModelConfig& config_;
  const EngineOptions& options_;
  const ModelWeights& weights_;
  int rank_;
  std::unique_ptr<AllReduce> all_reduce_;  // none for one rank
  ThreadPool pool_;
  CacheStorage cache_;
  std::int64_t heads_;  // of this rank
  float latent_eps_;

  std::vector<float> frequencies_;  // [rope / 2] radians a position
  std::int64_t hidden_floats_ = 0;
  std::int64_t pick_stride_ = 0;

  // The chunk at hand.
  const Chunk* chunk_ = nullptr;
  std::vector<Row> rows_;
  std::int64_t count_ = 0;       // rows
  std::int64_t full_layer_ = 0;  // layers before this one that run the indexer
  std::vector<Block> blocks_;
  std::vector<ExpertRun> runs_;
  std::vector<cpu::Matrix> down_;
  std::vector<std::int64_t> expert_row_;      // [rows, top_k]: row of the expert-ordered buffers
  std::vector<std::int32_t> expert_id_;       // [rows, top_k], best first
  std::vector<float> expert_weight_;          // [rows, top_k]
  std::vector<std::int32_t> pick_positions_;  // [rows, pick_stride_], ascending
  std::vector<Slot> pick_slots_;              // [rows, pick_stride_]
  std::vector<std::int64_t> pick_count_;      // [rows]; picks stay for the shared layers behind

  FloatBuffer x_;                // [rows, hidden] residual stream
  FloatBuffer normed_;           // [rows, hidden]
  FloatBuffer rounded_;          // FP8 activations: what a product reads instead of its input
  FloatBuffer rounded_experts_;  // the same of gathered_
  FloatBuffer c_q_;              // [rows, q_lora]
  FloatBuffer c_kv_;             // [rows, kv_lora + rope]
  FloatBuffer q_;                // [rows, this rank's heads, nope + rope]
  FloatBuffer index_q_;          // [rows, index_heads, index_dim]
  FloatBuffer index_k_;          // [rows, index_dim]
  FloatBuffer index_w_;          // [rows, index_heads]
  FloatBuffer heads_out_;        // [rows, this rank's heads, v]
  FloatBuffer router_;           // [rows, experts]
  FloatBuffer gathered_;         // [rows * top_k, hidden], expert by expert
  FloatBuffer hidden_;           // [rows * top_k, expert width] and the shared expert's, or dense
  FloatBuffer expert_out_;       // [rows * top_k + rows, hidden]
  FloatBuffer partial_;          // [rows, hidden] what this rank adds to the residual stream
  FloatBuffer cosines_;          // [rows, rope / 2]
  FloatBuffer sines_;            // [rows, rope / 2]
  FloatBuffer scores_;           // [context] of a row whose pages the threads share
  std::vector<ThreadScratch> scratch_;
};

}  // namespace penstock::engine
