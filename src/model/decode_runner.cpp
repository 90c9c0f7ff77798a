#include "model/decode_runner.h"

#include <algorithm>

#include "ops/cpu/elementwise.h"
#include "ops/cpu/linear.h"
#include "penstock/numerics/formats.h"
#include "penstock/ops/decode_layer/shape.h"

namespace penstock::engine {

DecodeRunner::DecodeRunner(const ModelConfig& config, const EngineOptions& options,
                           const ModelWeights& weights, std::unique_ptr<DecodeLayers> layers)
    : config_(config),
      weights_(weights),
      layers_(std::move(layers)),
      normed_(decode::kMaxRows * config.hidden, "activations"),
      scratch_(cpu::linear_scratch(0, config.hidden), "activations") {
  picks_.reserve(static_cast<std::size_t>(decode::kMaxRows * options.max_context));
}

void DecodeRunner::forward(const Chunk& chunk) {
  x_.clear();
  positions_.clear();
  slots_.clear();
  picks_.clear();
  pick_offsets_.assign(1, 0);
  for (const Segment& segment : chunk.segments) {
    std::int64_t position = segment.first;
    for (const std::int32_t token : segment.tokens) {
      cpu::decode_row(weights_.embedding, token, normed_.data());
      for (std::int64_t i = 0; i < config_.hidden; ++i) {
        x_.push_back(Bf16::from_float(normed_.data()[i]).bits);
      }
      positions_.push_back(static_cast<std::int32_t>(position));
      slots_.push_back(segment.sequence->slot(position));
      for (std::int64_t p = 0; p <= position; ++p) {
        picks_.push_back(static_cast<std::int32_t>(segment.sequence->slot(p)));
      }
      pick_offsets_.push_back(static_cast<std::int32_t>(picks_.size()));
      ++position;
    }
  }
  const DecodeRows rows{x_, positions_, slots_, pick_offsets_, picks_};
  const auto count = static_cast<std::int64_t>(weights_.layers.size());
  if (chunk.capture != nullptr && *chunk.capture) {
    capture(chunk, "embedding", -1);
    for (std::int64_t layer = 0; layer < count; ++layer) {
      layers_->run(rows, layer, 1);
      capture(chunk, "layer.out", layer);
    }
  } else {
    layers_->run(rows, 0, count);
  }
  logits(chunk);
}

void DecodeRunner::logits(const Chunk& chunk) {
  const auto wanted = static_cast<std::int64_t>(chunk.logit_rows.size());
  if (wanted == 0) return;
  for (std::int64_t i = 0; i < wanted; ++i) {
    float* row = normed_.data() + i * config_.hidden;
    const std::int64_t from = chunk.logit_rows[static_cast<std::size_t>(i)] * config_.hidden;
    for (std::int64_t k = 0; k < config_.hidden; ++k) {
      row[k] = Bf16::from_bits(x_[static_cast<std::size_t>(from + k)]).to_float();
    }
    cpu::rms_norm(row, weights_.final_norm.data(), config_.hidden,
                  static_cast<float>(config_.rms_eps), row);
  }
  cpu::linear(weights_.lm_head, 0, config_.vocab, normed_.data(), config_.hidden, wanted,
              chunk.logits, config_.vocab, scratch_.data());
}

void DecodeRunner::capture(const Chunk& chunk, const char* stage, std::int64_t layer) {
  std::size_t row = 0;
  std::vector<float> values(static_cast<std::size_t>(config_.hidden));
  for (const Segment& segment : chunk.segments) {
    for (std::size_t i = 0; i < segment.tokens.size(); ++i, ++row) {
      for (std::size_t k = 0; k < values.size(); ++k) {
        values[k] = Bf16::from_bits(x_[row * values.size() + k]).to_float();
      }
      (*chunk.capture)({stage,
                        layer,
                        segment.sequence->id,
                        segment.first + static_cast<std::int64_t>(i),
                        values,
                        {}});
    }
  }
}

}  // namespace penstock::engine
