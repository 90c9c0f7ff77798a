#include "model/engine_weights.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "ops/cpu/linear.h"
#include "penstock/core/error.h"

namespace penstock::engine {
namespace {

cpu::Matrix make_matrix(const Weight& weight, const std::string& name) {
  cpu::Matrix m;
  m.data = weight.data.as<std::byte>();
  m.scales = weight.scale.data;
  m.rows = weight.rows;
  m.cols = weight.cols;
  switch (weight.format) {
    case WeightFormat::kPlain:
      require(weight.data.dtype == DType::kF32 || weight.data.dtype == DType::kBF16,
              ErrorKind::kUnsupported, [&] {
                return fmt::format("{} is stored as {}: the CPU engine reads F32 and BF16", name,
                                   to_string(weight.data.dtype));
              });
      m.format =
          weight.data.dtype == DType::kF32 ? cpu::MatrixFormat::kF32 : cpu::MatrixFormat::kBf16;
      break;
    case WeightFormat::kFp8Block:
      m.format = cpu::MatrixFormat::kFp8Block;
      m.scale_stride = (weight.cols + cpu::kScaleBlock - 1) / cpu::kScaleBlock;
      break;
    case WeightFormat::kFp8Channel:
      m.format = cpu::MatrixFormat::kFp8Channel;
      m.scale_stride = 1;
      break;
    case WeightFormat::kMxfp4:
      m.format = cpu::MatrixFormat::kMxfp4;
      m.scale_stride = weight.cols / cpu::kWindowColumns;
      break;
  }
  // MXFP4 files may call their bytes U8.
  m.row_bytes = weight.format == WeightFormat::kMxfp4
                    ? weight.cols / 2
                    : weight.cols * bits_of(weight.data.dtype) / 8;
  return m;
}

class Loader {
 public:
  explicit Loader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  cpu::Matrix matrix(const std::string& name) {
    const Weight weight = checkpoint_.weight(name);
    model_.weight_bytes += weight.data.bytes();
    if (weight.format != WeightFormat::kPlain) model_.weight_bytes += weight.scale.bytes();
    return make_matrix(weight, name);
  }

  std::vector<float> vector(const std::string& name) {
    Weight weight;
    weight.data = checkpoint_.tensor(name);
    weight.rows = 1;
    weight.cols = weight.data.elements();
    // Kernels read whole vectors.
    std::vector<float> out(static_cast<std::size_t>(weight.cols + cpu::kPadding));
    cpu::decode_row(make_matrix(weight, name), 0, out.data());
    model_.converted_bytes += weight.cols * 4;
    return out;
  }

  MlpWeights mlp(const std::string& prefix) {
    return {matrix(prefix + "gate_proj"), matrix(prefix + "up_proj"), matrix(prefix + "down_proj")};
  }

  LayerWeights layer(std::int64_t index) {
    const ModelConfig& config = checkpoint_.config();
    const std::string prefix = fmt::format("model.layers.{}.", index);
    const std::string attention = prefix + "self_attn.";
    LayerWeights layer;
    layer.input_norm = vector(prefix + "input_layernorm.weight");
    layer.q_a = matrix(attention + "q_a_proj");
    layer.q_norm = vector(attention + "q_a_layernorm.weight");
    layer.q_b = matrix(attention + "q_b_proj");
    layer.kv_a = matrix(attention + "kv_a_proj_with_mqa");
    layer.kv_norm = vector(attention + "kv_a_layernorm.weight");
    layer.kv_b = matrix(attention + "kv_b_proj");
    layer.o = matrix(attention + "o_proj");
    layer.full_indexer = config.full_indexer[static_cast<std::size_t>(index)];
    if (layer.full_indexer) {
      layer.index_q = matrix(attention + "indexer.wq_b");
      layer.index_k = matrix(attention + "indexer.wk");
      layer.index_w = matrix(attention + "indexer.weights_proj");
      layer.index_gain = vector(attention + "indexer.k_norm.weight");
      layer.index_bias = vector(attention + "indexer.k_norm.bias");
    }
    layer.post_norm = vector(prefix + "post_attention_layernorm.weight");
    layer.sparse = config.sparse_mlp[static_cast<std::size_t>(index)];
    if (!layer.sparse) {
      layer.dense = mlp(prefix + "mlp.");
      return layer;
    }
    layer.router = matrix(prefix + "mlp.gate");
    layer.router_bias = vector(prefix + "mlp.gate.e_score_correction_bias");
    if (config.shared_experts > 0) layer.dense = mlp(prefix + "mlp.shared_experts.");
    for (std::int64_t e = 0; e < config.experts; ++e) {
      layer.experts.push_back(mlp(fmt::format("{}mlp.experts.{}.", prefix, e)));
    }
    return layer;
  }

  ModelWeights load() {
    model_.embedding = matrix("model.embed_tokens");
    for (std::int64_t i = 0; i < checkpoint_.config().layers; ++i) {
      model_.layers.push_back(layer(i));
    }
    model_.final_norm = vector("model.norm.weight");
    model_.lm_head = matrix("lm_head");
    return std::move(model_);
  }

 private:
  const Checkpoint& checkpoint_;
  ModelWeights model_;
};

}  // namespace

ModelWeights load_weights(const Checkpoint& checkpoint) { return Loader(checkpoint).load(); }

}  // namespace penstock::engine
