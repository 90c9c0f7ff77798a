#include "model/decode_weights.h"

#include <fmt/format.h>

#include "penstock/core/error.h"

namespace penstock::engine {
namespace {

void demand(std::string_view key, std::int64_t value, std::int64_t wanted) {
  require(value == wanted, ErrorKind::kUnsupported, [&] {
    return fmt::format("decode_layer cannot run {} = {}: its kernels are written for {}", key,
                       value, wanted);
  });
}

bool by_block(const Checkpoint& checkpoint, const Weight& weight) {
  return weight.format == WeightFormat::kFp8Block && checkpoint.config().fp8_block_rows == 128 &&
         checkpoint.config().fp8_block_cols == 128;
}

decode::Fp8Matrix matrix(const Checkpoint& checkpoint, const std::string& name) {
  const Weight weight = checkpoint.weight(name);
  require(by_block(checkpoint, weight), ErrorKind::kUnsupported, [&] {
    return fmt::format(
        "{} is stored as {}: decode_layer reads E4M3 with one f32 scale per 128x128 block "
        "(`penstock convert` changes formats)",
        name, to_string(weight.format));
  });
  return {weight.data, weight.scale};
}

decode::Fp8Matrix attention_matrix(const Checkpoint& checkpoint, const std::string& name) {
  const Weight weight = checkpoint.weight(name);
  if (weight.format == WeightFormat::kFp8Channel) return {weight.data, weight.scale};
  return matrix(checkpoint, name);
}

constexpr const char* kAttention[] = {"q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj",
                                      "o_proj"};

std::string attention_name(std::int64_t layer, const char* which) {
  return fmt::format("model.layers.{}.self_attn.{}", layer, which);
}

}  // namespace

decode::DecodeShape decode_layer_shape(const ModelConfig& config, std::int64_t layer, int ranks) {
  demand("kv_lora_rank", config.kv_lora, decode::kLatent);
  demand("qk_nope_head_dim", config.nope, decode::kNope);
  demand("qk_rope_head_dim", config.rope, decode::kRope);
  demand("v_head_dim", config.v_dim, decode::kValue);
  demand("n_group", config.groups, 1);
  decode::DecodeShape shape;
  shape.hidden = static_cast<int>(config.hidden);
  shape.q_lora = static_cast<int>(config.q_lora);
  shape.heads = static_cast<int>(config.heads);
  shape.experts = static_cast<int>(config.experts);
  shape.top_k = static_cast<int>(config.top_k);
  shape.intermediate = static_cast<int>(config.expert_intermediate);
  shape.ranks = ranks;
  shape.eps = static_cast<float>(config.rms_eps);
  shape.eps_latent = static_cast<float>(config.latent_eps);
  shape.routed_scale = static_cast<float>(config.routed_scale);
  shape.norm_topk = config.norm_top_k;
  shape.rope_theta = config.rope_theta;
  if (!config.sparse_mlp[static_cast<std::size_t>(layer)]) {
    return decode::dense_shape(shape, static_cast<int>(config.dense_intermediate));
  }
  demand("n_shared_experts", config.shared_experts, 1);
  decode::validate(shape);
  return shape;
}

decode::DecodeShape decode_layer_shape(const Checkpoint& checkpoint, std::int64_t layer,
                                       int ranks) {
  decode::DecodeShape shape = decode_layer_shape(checkpoint.config(), layer, ranks);
  const auto channels = [&](const char* which) {
    return decode::per_channel(attention_matrix(checkpoint, attention_name(layer, which)));
  };
  if (channels(kAttention[0])) shape.attention_scales = decode::AttentionScales::kChannel;
  for (const char* which : kAttention) {
    require(channels(which) == channels(kAttention[0]), ErrorKind::kUnsupported, [&] {
      return fmt::format(
          "{} and {} have scales of different kinds: decode_layer takes all attention matrices of "
          "a layer per 128x128 block or all per channel",
          attention_name(layer, kAttention[0]), attention_name(layer, which));
    });
  }
  return shape;
}

decode::LayerTensors decode_layer_tensors(const Checkpoint& checkpoint, std::int64_t layer) {
  const ModelConfig& config = checkpoint.config();
  const std::string at = fmt::format("model.layers.{}.", layer);
  decode::LayerTensors t;
  t.q_a = attention_matrix(checkpoint, at + "self_attn.q_a_proj");
  t.kv_a = attention_matrix(checkpoint, at + "self_attn.kv_a_proj_with_mqa");
  t.q_b = attention_matrix(checkpoint, at + "self_attn.q_b_proj");
  t.kv_b = attention_matrix(checkpoint, at + "self_attn.kv_b_proj");
  t.o = attention_matrix(checkpoint, at + "self_attn.o_proj");
  t.norm_input = checkpoint.tensor(at + "input_layernorm.weight");
  t.norm_q = checkpoint.tensor(at + "self_attn.q_a_layernorm.weight");
  t.norm_kv = checkpoint.tensor(at + "self_attn.kv_a_layernorm.weight");
  t.norm_post = checkpoint.tensor(at + "post_attention_layernorm.weight");
  if (!config.sparse_mlp[static_cast<std::size_t>(layer)]) {
    t.dense_gate = matrix(checkpoint, at + "mlp.gate_proj");
    t.dense_up = matrix(checkpoint, at + "mlp.up_proj");
    t.dense_down = matrix(checkpoint, at + "mlp.down_proj");
    return t;
  }
  t.router = checkpoint.tensor(at + "mlp.gate.weight");
  t.bias = checkpoint.tensor(at + "mlp.gate.e_score_correction_bias");
  for (std::int64_t e = 0; e < config.experts; ++e) {
    const std::string expert = fmt::format("{}mlp.experts.{}.", at, e);
    t.gate.push_back(matrix(checkpoint, expert + "gate_proj"));
    t.up.push_back(matrix(checkpoint, expert + "up_proj"));
    t.down.push_back(matrix(checkpoint, expert + "down_proj"));
  }
  t.shared_gate = matrix(checkpoint, at + "mlp.shared_experts.gate_proj");
  t.shared_up = matrix(checkpoint, at + "mlp.shared_experts.up_proj");
  t.shared_down = matrix(checkpoint, at + "mlp.shared_experts.down_proj");
  return t;
}

}  // namespace penstock::engine
