// The tensors that a glm_moe_dsa checkpoint must hold: one table from the geometry, which the
// checkpoint is checked against and which sizes and conversions are counted from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/model/config.h"

namespace penstock::model {

// What a tensor is for. The class decides which storage formats are accepted and how a report
// groups it.
enum class TensorClass : unsigned char {
  kEmbedding,     // model.embed_tokens, lm_head: never quantised
  kNorm,          // norm weights and biases
  kAttention,     // MLA projections
  kIndexer,       // indexer wq_b, wk
  kIndexerHeads,  // indexer weights_proj: never quantised
  kRouter,        // mlp.gate: never quantised
  kRouterBias,    // e_score_correction_bias: F32 only (about 34 in GLM-5.3; BF16 loses the order)
  kDenseMlp,      // gate, up, down of dense layers
  kSharedExpert,  // gate, up, down of the shared experts
  kRoutedExpert,  // gate, up, down of one routed expert
};

struct TensorSpec {
  std::string name;                 // a matrix without ".weight", anything else in full
  std::vector<std::int64_t> shape;  // two dimensions: a matrix [outputs, inputs]
  TensorClass kind = TensorClass::kNorm;
  int layer = -1;  // -1: outside of the layers

  bool is_matrix() const { return shape.size() == 2; }
  // May be stored as FP8 or MXFP4.
  bool may_be_quantised() const {
    return kind == TensorClass::kAttention || kind == TensorClass::kIndexer ||
           kind == TensorClass::kDenseMlp || kind == TensorClass::kSharedExpert ||
           kind == TensorClass::kRoutedExpert;
  }
  std::int64_t elements() const {
    std::int64_t n = 1;
    for (const std::int64_t d : shape) n *= d;
    return n;
  }
};

// "model.layers.3."
std::string layer_prefix(std::int64_t layer);

// All tensors of the model in a fixed order: embeddings, layers from 0 on, final norm, lm_head.
std::vector<TensorSpec> list_tensors(const ModelConfig& config);

}  // namespace penstock::model
