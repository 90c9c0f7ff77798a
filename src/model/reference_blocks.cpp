// Building blocks of the reference: linear, norms, RoPE, roundings, weights of a layer.
#include <algorithm>
#include <cmath>

#include "model/reference_shape.h"
#include "penstock/model/reference.h"
#include "penstock/numerics/formats.h"

namespace penstock::reference {

ParallelFor serial() {
  return [](std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body) {
    if (count > 0) body(0, count);
  };
}

std::string_view to_string(Round round) {
  switch (round) {
    case Round::kNone:
      return "none";
    case Round::kBF16:
      return "bf16";
    case Round::kFp8Token:
      return "fp8_token128";
    case Round::kFp8Ue8m0:
      return "fp8_ue8m0_token128";
  }
  return "?";
}

std::vector<float> load_vector(const TensorView& view) {
  std::vector<float> out(static_cast<std::size_t>(view.elements()));
  if (view.dtype == DType::kF32) {
    std::copy_n(view.as<float>(), out.size(), out.begin());
  } else if (view.dtype == DType::kBF16) {
    const auto* bits = view.as<std::uint16_t>();
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = Bf16::from_bits(bits[i]).to_float();
  } else {
    throw_error(
        ErrorKind::kInvalidArgument,
        fmt::format("reference: a vector of {} cannot be read; F32 and BF16 can", describe(view)));
  }
  return out;
}

LayerWeights load_layer(const Checkpoint& checkpoint, std::int64_t layer) {
  const ModelConfig& config = checkpoint.config();
  const std::string prefix = fmt::format("model.layers.{}.", layer);
  const auto vector = [&](const std::string& name) {
    return load_vector(checkpoint.tensor(prefix + name));
  };
  const auto weight = [&](const std::string& name) { return checkpoint.weight(prefix + name); };
  const auto mlp = [&](const std::string& name) {
    return MlpWeights{weight(name + ".gate_proj"), weight(name + ".up_proj"),
                      weight(name + ".down_proj")};
  };

  LayerWeights out;
  out.input_norm = vector("input_layernorm.weight");
  out.q_a_norm = vector("self_attn.q_a_layernorm.weight");
  out.kv_a_norm = vector("self_attn.kv_a_layernorm.weight");
  out.post_norm = vector("post_attention_layernorm.weight");
  out.q_a = weight("self_attn.q_a_proj");
  out.kv_a = weight("self_attn.kv_a_proj_with_mqa");
  out.q_b = weight("self_attn.q_b_proj");
  out.kv_b = weight("self_attn.kv_b_proj");
  out.o = weight("self_attn.o_proj");
  const auto index = static_cast<std::size_t>(layer);
  if (config.full_indexer.at(index)) {
    out.indexer = IndexerWeights{weight("self_attn.indexer.wq_b"), weight("self_attn.indexer.wk"),
                                 weight("self_attn.indexer.weights_proj"),
                                 vector("self_attn.indexer.k_norm.weight"),
                                 vector("self_attn.indexer.k_norm.bias")};
  }
  if (config.sparse_mlp.at(index)) {
    MoeWeights moe;
    moe.router = weight("mlp.gate");
    moe.bias = vector("mlp.gate.e_score_correction_bias");
    for (std::int64_t e = 0; e < config.experts; ++e) {
      moe.experts.push_back(mlp(fmt::format("mlp.experts.{}", e)));
    }
    moe.shared = mlp("mlp.shared_experts");
    out.moe = std::move(moe);
  } else {
    out.dense = mlp("mlp");
  }
  return out;
}

template <typename T>
void round_rows(Round round, std::int64_t columns, std::span<T> values) {
  if (round == Round::kNone) return;
  if (round == Round::kBF16) {
    for (T& value : values) {
      value = static_cast<T>(Bf16::from_float(static_cast<float>(value)).to_float());
    }
    return;
  }
  constexpr std::int64_t kGroup = 128;
  const std::int64_t rows = static_cast<std::int64_t>(values.size()) / columns;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t begin = 0; begin < columns; begin += kGroup) {
      T* group = values.data() + r * columns + begin;
      const std::int64_t n = std::min(kGroup, columns - begin);
      float amax = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        amax = std::max(amax, std::abs(static_cast<float>(group[i])));
      }
      float scale = std::max(amax, 1e-4F) / E4M3::kMax;
      if (round == Round::kFp8Ue8m0) scale = E8M0::from_float_ceil(scale).to_float();
      for (std::int64_t i = 0; i < n; ++i) {
        const float quotient = static_cast<float>(group[i]) / scale;
        group[i] = static_cast<T>(E4M3::from_float(quotient).to_float() * scale);
      }
    }
  }
}

template <typename T>
Array<T> linear(const Weight& weight, Range rows, Range columns, const Array<T>& x,
                const ParallelFor& parallel) {
  require_range("rows of a weight", rows, weight.rows);
  require_range("columns of a weight", columns, weight.cols);
  const std::int64_t count = x.shape.empty() ? 0 : x.dim(0);
  require_shape("the input of a linear map", x, {count, columns.size()});
  Array<T> out({count, rows.size()});
  parallel(rows.size(), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> row(static_cast<std::size_t>(weight.cols));
    for (std::int64_t r = begin; r < end; ++r) {
      dequantise_row(weight, rows.begin + r, row.data());
      for (std::int64_t s = 0; s < count; ++s) {
        out.row(s)[r] = dot(row.data() + columns.begin, x.row(s), columns.size());
      }
    }
  });
  return out;
}

template <typename T>
Array<T> rms_norm(const Array<T>& x, std::span<const float> gain, double eps) {
  const std::int64_t rows = x.shape.empty() ? 0 : x.dim(0);
  const auto n = static_cast<std::int64_t>(gain.size());
  require_shape("the input of RMSNorm", x, {rows, n});
  Array<T> out({rows, n});
  for (std::int64_t s = 0; s < rows; ++s) {
    const T* in = x.row(s);
    const T mean_square = dot(in, in, n) / static_cast<T>(n);
    const T inverse = T{1} / std::sqrt(mean_square + static_cast<T>(eps));
    for (std::int64_t i = 0; i < n; ++i) {
      out.row(s)[i] = in[i] * inverse * static_cast<T>(gain[static_cast<std::size_t>(i)]);
    }
  }
  return out;
}

template <typename T>
Array<T> layer_norm(const Array<T>& x, std::span<const float> gamma, std::span<const float> beta,
                    double eps) {
  const std::int64_t rows = x.shape.empty() ? 0 : x.dim(0);
  const auto n = static_cast<std::int64_t>(gamma.size());
  require_shape("the input of LayerNorm", x, {rows, n});
  require_size("beta of LayerNorm", beta.size(), n);
  Array<T> out({rows, n});
  for (std::int64_t s = 0; s < rows; ++s) {
    T mean = 0;
    for (std::int64_t i = 0; i < n; ++i) mean += x.row(s)[i];
    mean /= static_cast<T>(n);
    T variance = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const T d = x.row(s)[i] - mean;
      variance += d * d;
    }
    variance /= static_cast<T>(n);
    const T inverse = T{1} / std::sqrt(variance + static_cast<T>(eps));
    for (std::int64_t i = 0; i < n; ++i) {
      const auto c = static_cast<std::size_t>(i);
      out.row(s)[i] =
          (x.row(s)[i] - mean) * inverse * static_cast<T>(gamma[c]) + static_cast<T>(beta[c]);
    }
  }
  return out;
}

template <typename T>
void rotate(T* values, std::int64_t dims, std::int64_t position, double theta) {
  for (std::int64_t i = 0; i + 1 < dims; i += 2) {
    // f32 on purpose, see the header.
    const float exponent = static_cast<float>(i) / static_cast<float>(dims);
    const float frequency = 1.0F / std::pow(static_cast<float>(theta), exponent);
    const double angle = static_cast<double>(static_cast<float>(position) * frequency);
    const T cosine = static_cast<T>(std::cos(angle)), sine = static_cast<T>(std::sin(angle));
    const T a = values[i], b = values[i + 1];
    values[i] = a * cosine - b * sine;
    values[i + 1] = a * sine + b * cosine;
  }
}

#define PENSTOCK_INSTANTIATE(T)                                                                    \
  template void round_rows<T>(Round, std::int64_t, std::span<T>);                                  \
  template Array<T> linear<T>(const Weight&, Range, Range, const Array<T>&, const ParallelFor&);   \
  template Array<T> rms_norm<T>(const Array<T>&, std::span<const float>, double);                  \
  template Array<T> layer_norm<T>(const Array<T>&, std::span<const float>, std::span<const float>, \
                                  double);                                                         \
  template void rotate<T>(T*, std::int64_t, std::int64_t, double);
PENSTOCK_INSTANTIATE(float)
PENSTOCK_INSTANTIATE(double)
#undef PENSTOCK_INSTANTIATE

}  // namespace penstock::reference
