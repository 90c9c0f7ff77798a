// Geometry of a `glm_moe_dsa` model, read from config.json in every published spelling.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace penstock {

// One decoder stack. Sizes are elements; names follow Hugging Face's keys where those are plain.
struct ModelConfig {
  std::int64_t hidden = 0;               // hidden_size
  std::int64_t layers = 0;               // num_hidden_layers; the MTP layer behind them is skipped
  std::int64_t vocab = 0;                // vocab_size
  std::int64_t dense_intermediate = 0;   // intermediate_size
  std::int64_t expert_intermediate = 0;  // moe_intermediate_size
  std::int64_t heads = 0;                // num_attention_heads
  std::int64_t q_lora = 0;               // q_lora_rank
  std::int64_t kv_lora = 0;              // kv_lora_rank
  std::int64_t nope = 0;                 // qk_nope_head_dim
  std::int64_t rope = 0;                 // qk_rope_head_dim
  std::int64_t v_dim = 0;                // v_head_dim
  std::int64_t experts = 0;              // n_routed_experts
  std::int64_t shared_experts = 0;       // n_shared_experts
  std::int64_t top_k = 0;                // num_experts_per_tok
  std::int64_t groups = 1;               // n_group
  std::int64_t top_groups = 1;           // topk_group
  bool norm_top_k = true;                // norm_topk_prob
  double routed_scale = 1.0;             // routed_scaling_factor
  std::int64_t index_heads = 0;          // index_n_heads
  std::int64_t index_dim = 0;            // index_head_dim
  std::int64_t index_top_k = 0;          // index_topk
  double rope_theta = 0.0;
  std::int64_t max_positions = 0;  // max_position_embeddings
  double rms_eps = 1e-5;           // rms_norm_eps
  double latent_eps =
      1e-6;  // q_a / kv_a layernorm: transformers 1e-6 (default), vLLM and SGLang 1e-5
  double index_norm_eps = 1e-6;   // the indexer's LayerNorm
  std::int64_t bos = -1;          // bos_token_id, -1 if absent
  std::vector<std::int64_t> eos;  // eos_token_id: number or list
  std::vector<bool>
      full_indexer;  // [layers]: the layer runs its own indexer; false: it reuses the newest picks
  std::vector<bool> sparse_mlp;     // [layers]: mixture of experts; false: dense SwiGLU
  std::int64_t fp8_block_rows = 0;  // weight_block_size[0]; 0: not block-quantised
  std::int64_t fp8_block_cols = 0;  // weight_block_size[1]
  std::string
      experts_format;  // "", "fp8" or "mxfp4": how routed experts are stored when it differs
  std::vector<std::string> unknown_keys;  // kept by name, reported once

  std::int64_t qk_dim() const { return nope + rope; }
  std::int64_t cache_dim() const { return kv_lora + rope; }
};

// Parses the text of a config.json. Throws Error: InvalidArgument naming the key that is missing,
// of the wrong type or out of range; Unsupported naming the value that this build cannot run (other
// model_type, YaRN RoPE, other scoring).
ModelConfig parse_config(std::string_view json_text);
// Reads DIR/config.json and parses it; errors carry the path.
ModelConfig load_config(const std::string& directory);

}  // namespace penstock
