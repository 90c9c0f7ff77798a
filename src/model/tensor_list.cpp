#include "model/tensor_list.h"

#include <fmt/format.h>

#include <string_view>

namespace penstock::model {

std::string layer_prefix(std::int64_t layer) { return fmt::format("model.layers.{}.", layer); }

std::vector<TensorSpec> list_tensors(const ModelConfig& c) {
  std::vector<TensorSpec> out;
  int layer = -1;
  const auto add = [&](std::string name, std::vector<std::int64_t> shape, TensorClass kind) {
    out.push_back({std::move(name), std::move(shape), kind, layer});
  };
  const auto add_mlp = [&](const std::string& prefix, std::int64_t width, TensorClass kind) {
    add(prefix + "gate_proj", {width, c.hidden}, kind);
    add(prefix + "up_proj", {width, c.hidden}, kind);
    add(prefix + "down_proj", {c.hidden, width}, kind);
  };

  add("model.embed_tokens", {c.vocab, c.hidden}, TensorClass::kEmbedding);
  for (layer = 0; layer < static_cast<int>(c.layers); ++layer) {
    const std::string prefix = layer_prefix(layer);
    const std::string attention = prefix + "self_attn.";
    add(prefix + "input_layernorm.weight", {c.hidden}, TensorClass::kNorm);
    add(attention + "q_a_proj", {c.q_lora, c.hidden}, TensorClass::kAttention);
    add(attention + "q_a_layernorm.weight", {c.q_lora}, TensorClass::kNorm);
    add(attention + "q_b_proj", {c.heads * c.qk_dim(), c.q_lora}, TensorClass::kAttention);
    add(attention + "kv_a_proj_with_mqa", {c.cache_dim(), c.hidden}, TensorClass::kAttention);
    add(attention + "kv_a_layernorm.weight", {c.kv_lora}, TensorClass::kNorm);
    add(attention + "kv_b_proj", {c.heads * (c.nope + c.v_dim), c.kv_lora},
        TensorClass::kAttention);
    add(attention + "o_proj", {c.hidden, c.heads * c.v_dim}, TensorClass::kAttention);
    if (c.full_indexer[static_cast<std::size_t>(layer)]) {
      const std::string indexer = attention + "indexer.";
      add(indexer + "wq_b", {c.index_heads * c.index_dim, c.q_lora}, TensorClass::kIndexer);
      add(indexer + "wk", {c.index_dim, c.hidden}, TensorClass::kIndexer);
      add(indexer + "k_norm.weight", {c.index_dim}, TensorClass::kNorm);
      add(indexer + "k_norm.bias", {c.index_dim}, TensorClass::kNorm);
      add(indexer + "weights_proj", {c.index_heads, c.hidden}, TensorClass::kIndexerHeads);
    }
    add(prefix + "post_attention_layernorm.weight", {c.hidden}, TensorClass::kNorm);
    const std::string mlp = prefix + "mlp.";
    if (!c.sparse_mlp[static_cast<std::size_t>(layer)]) {
      add_mlp(mlp, c.dense_intermediate, TensorClass::kDenseMlp);
      continue;
    }
    add(mlp + "gate", {c.experts, c.hidden}, TensorClass::kRouter);
    add(mlp + "gate.e_score_correction_bias", {c.experts}, TensorClass::kRouterBias);
    for (std::int64_t e = 0; e < c.experts; ++e) {
      add_mlp(fmt::format("{}experts.{}.", mlp, e), c.expert_intermediate,
              TensorClass::kRoutedExpert);
    }
    add_mlp(mlp + "shared_experts.", c.shared_experts * c.expert_intermediate,
            TensorClass::kSharedExpert);
  }
  layer = -1;
  add("model.norm.weight", {c.hidden}, TensorClass::kNorm);
  add("lm_head", {c.vocab, c.hidden}, TensorClass::kEmbedding);
  return out;
}

}  // namespace penstock::model
