// config.json texts of published models and small ones, as values that tests change.
#pragma once

#include <nlohmann/json.hpp>

namespace penstock::testing {

// GLM-5 / 5.1: every layer runs its indexer, RoPE theta 1e6.
inline nlohmann::json glm5_json() {
  return nlohmann::json::parse(R"({
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
    "hidden_act": "silu", "attention_bias": false, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "vocab_size": 154880, "hidden_size": 6144,
    "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "q_lora_rank": 2048, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8,
    "norm_topk_prob": true, "max_position_embeddings": 202752, "rms_norm_eps": 1e-05,
    "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "first_k_dense_replace": 3
  })");
}

// GLM-5.2 / 5.3: indexers on layers 0, 1, 2, 6, 10, ..., 74; theta 8e6; 1M context.
inline nlohmann::json glm52_json() {
  nlohmann::json config = glm5_json();
  config["index_topk_freq"] = 4;
  config["index_skip_topk_offset"] = 3;
  config["rope_parameters"]["rope_theta"] = 8000000;
  config["max_position_embeddings"] = 1048576;
  return config;
}

}  // namespace penstock::testing
