// A complete checkpoint of a few kilobytes, whose tensors a test changes before it is written.
#pragma once

#include <cstring>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/temp_dir.h"
#include "model/tensor_list.h"
#include "penstock/model/config.h"
#include "penstock/model/safetensors.h"

namespace penstock::testing {

// One tensor that owns its bytes.
struct OwnedTensor {
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::vector<std::uint8_t> bytes;

  OwnedTensor() = default;
  OwnedTensor(DType type, std::vector<std::int64_t> dims) : dtype(type), shape(std::move(dims)) {
    bytes.resize(static_cast<std::size_t>(view().bytes()));
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i % 0x3c);
  }
  TensorView view() const {
    TensorView v;
    v.data = bytes.data();
    v.dtype = dtype;
    v.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), v.shape.begin());
    return v;
  }
};

struct SmallModel {
  nlohmann::json config = nlohmann::json::parse(R"({
    "model_type": "glm_moe_dsa", "dtype": "bfloat16", "vocab_size": 32, "hidden_size": 64,
    "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1, "num_attention_heads": 2, "n_shared_experts": 1,
    "n_routed_experts": 4, "routed_scaling_factor": 2.5, "kv_lora_rank": 32, "q_lora_rank": 48,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 12, "num_experts_per_tok": 2,
    "norm_topk_prob": true, "max_position_embeddings": 64, "rms_norm_eps": 1e-05,
    "eos_token_id": 3, "rope_theta": 10000.0, "index_topk": 8, "index_head_dim": 16,
    "index_n_heads": 2, "first_k_dense_replace": 1, "index_topk_pattern": "FSF"
  })");
  // By full name. BF16, the router bias F32.
  std::map<std::string, OwnedTensor> tensors;

  SmallModel() {
    for (const model::TensorSpec& spec : model::list_tensors(parse_config(config.dump()))) {
      const bool bias = spec.kind == model::TensorClass::kRouterBias;
      tensors[spec.is_matrix() ? spec.name + ".weight" : spec.name] =
          OwnedTensor(bias ? DType::kF32 : DType::kBF16, spec.shape);
    }
  }

  // Single file.
  void write(const TempDir& dir) const {
    dir.write("config.json", config.dump());
    write_file(dir, "model.safetensors", [](const std::string&) { return true; });
  }
  // Two shards and an index; layer 0 goes into the first. The index can be changed before writing.
  void write_sharded(const TempDir& dir,
                     const std::function<void(nlohmann::json&)>& change = nullptr) const {
    dir.write("config.json", config.dump());
    const auto first = [](const std::string& name) { return name.find("layers.0.") < name.size(); };
    write_file(dir, "one.safetensors", first);
    write_file(dir, "two.safetensors", [&](const std::string& name) { return !first(name); });
    nlohmann::json index = {{"metadata", {{"total_size", 0}}}};
    for (const auto& [name, tensor] : tensors) {
      index["weight_map"][name] = first(name) ? "one.safetensors" : "two.safetensors";
    }
    if (change) change(index);
    dir.write("model.safetensors.index.json", index.dump());
  }

 private:
  void write_file(const TempDir& dir, std::string_view file,
                  const std::function<bool(const std::string&)>& take) const {
    std::vector<NamedTensor> out;
    // Wide elements first keeps them aligned.
    for (const bool f32 : {true, false}) {
      for (const auto& [name, tensor] : tensors) {
        if (take(name) && (tensor.dtype == DType::kF32) == f32)
          out.push_back({name, tensor.view()});
      }
    }
    write_safetensors(dir.file(file), out);
  }
};

}  // namespace penstock::testing
