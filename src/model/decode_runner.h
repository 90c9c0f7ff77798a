// What the engine does around decode_layer: embedding, picks, final norm, lm_head.
#pragma once

#include <memory>
#include <vector>

#include "model/engine_weights.h"
#include "model/float_buffer.h"
#include "model/rank_worker.h"
#include "penstock/model/decode_layers.h"

namespace penstock::engine {

class DecodeRunner {
 public:
  DecodeRunner(const ModelConfig& config, const EngineOptions& options, const ModelWeights& weights,
               std::unique_ptr<DecodeLayers> layers);

  // At most decode::kMaxRows rows; every row attends to all positions up to its own.
  void forward(const Chunk& chunk);
  DecodeLayers& layers() { return *layers_; }

 private:
  void logits(const Chunk& chunk);
  void capture(const Chunk& chunk, const char* stage, std::int64_t layer);

  const ModelConfig& config_;
  const ModelWeights& weights_;
  std::unique_ptr<DecodeLayers> layers_;
  FloatBuffer normed_;   // [kMaxRows, hidden]
  FloatBuffer scratch_;  // of one product
  std::vector<std::uint16_t> x_;
  std::vector<std::int32_t> positions_, pick_offsets_, picks_;
  std::vector<std::int64_t> slots_;
};

}  // namespace penstock::engine
