#include "penstock/model/inspect.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "model/tensor_list.h"
#include "penstock/core/error.h"
#include "penstock/numerics/block.h"

namespace penstock {
namespace {

using model::TensorClass;
using model::TensorSpec;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::string_view purpose(TensorClass kind) {
  switch (kind) {
    case TensorClass::kEmbedding:
      return "embeddings";
    case TensorClass::kNorm:
      return "norms";
    case TensorClass::kAttention:
      return "attention";
    case TensorClass::kIndexer:
    case TensorClass::kIndexerHeads:
      return "indexer";
    case TensorClass::kRouter:
    case TensorClass::kRouterBias:
      return "router";
    case TensorClass::kDenseMlp:
      return "dense_mlp";
    case TensorClass::kSharedExpert:
      return "shared_experts";
    case TensorClass::kRoutedExpert:
      return "routed_experts";
  }
  return "unknown";
}

StorageGroup& group_named(std::vector<StorageGroup>& groups, std::string_view name) {
  const auto it = std::find_if(groups.begin(), groups.end(),
                               [&](const StorageGroup& g) { return g.name == name; });
  if (it != groups.end()) return *it;
  groups.push_back({});
  groups.back().name = name;
  return groups.back();
}

// Bytes of a tensor, its scale included.
using StoredBytes = std::function<double(const TensorSpec&)>;

double formula_bytes(const TensorSpec& spec, const WeightFormats& formats) {
  WeightFormat format = WeightFormat::kPlain;
  switch (spec.kind) {
    case TensorClass::kAttention:
      format = formats.attention;
      break;
    case TensorClass::kIndexer:
      format = formats.indexer;
      break;
    case TensorClass::kDenseMlp:
      format = formats.dense_mlp;
      break;
    case TensorClass::kSharedExpert:
      format = formats.shared_experts;
      break;
    case TensorClass::kRoutedExpert:
      format = formats.routed_experts;
      break;
    case TensorClass::kRouterBias:
      return 4.0 * static_cast<double>(spec.elements());
    default:
      break;
  }
  const auto elements = static_cast<double>(spec.elements());
  switch (format) {
    case WeightFormat::kPlain:
      return 2.0 * elements;
    case WeightFormat::kFp8Block:
      return elements + 4.0 * static_cast<double>(ceil_div(spec.shape[0], kFp8BlockSize) *
                                                  ceil_div(spec.shape[1], kFp8BlockSize));
    case WeightFormat::kFp8Channel:
      return elements + 4.0 * static_cast<double>(spec.shape[0]);
    case WeightFormat::kMxfp4:
      return elements / 2.0 + elements / kMxBlockSize;
  }
  return 0.0;
}

std::int64_t stored_bytes(const Checkpoint& checkpoint, const TensorSpec& spec) {
  if (!spec.is_matrix()) return checkpoint.tensor(spec.name).bytes();
  const Weight weight = checkpoint.weight(spec.name);
  const bool scaled = weight.format != WeightFormat::kPlain;
  return weight.data.bytes() + (scaled ? weight.scale.bytes() : 0);
}

void check_shape(const ModelConfig& c, const DecodeShape& shape) {
  const auto fail = [](const std::string& text) { throw_error(ErrorKind::kInvalidArgument, text); };
  if (shape.ranks < 1) fail(fmt::format("ranks is {}; at least 1 is needed", shape.ranks));
  if (shape.rows < 1) fail(fmt::format("rows is {}; at least 1 is needed", shape.rows));
  if (shape.context < 1) fail(fmt::format("context is {}; at least 1 is needed", shape.context));
  const auto divides = [&](std::string_view what, std::int64_t size) {
    if (size % shape.ranks != 0) {
      fail(fmt::format("{} ranks do not divide {} {}", shape.ranks, what, size));
    }
  };
  divides("num_attention_heads", c.heads);
  divides("intermediate_size", c.dense_intermediate);
  divides("moe_intermediate_size", c.expert_intermediate);
  divides("vocab_size", c.vocab);
}

DecodePart part_of(const TensorSpec& spec) {
  switch (spec.kind) {
    case TensorClass::kAttention:
      if (spec.name.ends_with("q_b_proj")) return DecodePart::kQB;
      if (spec.name.ends_with("kv_b_proj")) return DecodePart::kUkUv;
      if (spec.name.ends_with("o_proj")) return DecodePart::kO;
      return DecodePart::kQkvA;
    case TensorClass::kIndexer:
    case TensorClass::kIndexerHeads:
      return DecodePart::kIndexer;
    case TensorClass::kRouter:
      return DecodePart::kRouter;
    case TensorClass::kDenseMlp:
      return DecodePart::kDenseMlp;
    case TensorClass::kSharedExpert:
      return DecodePart::kSharedExperts;
    case TensorClass::kRoutedExpert:
      return DecodePart::kRoutedExperts;
    case TensorClass::kEmbedding:
      return spec.name == "lm_head" ? DecodePart::kLmHead : DecodePart::kEmbedding;
    case TensorClass::kNorm:
    case TensorClass::kRouterBias:
      break;
  }
  return DecodePart::kNorms;
}

// The share of a tensor that one rank reads in one step.
double share_read(DecodePart part, const ModelConfig& c, const DecodeFloor& floor) {
  const double ranks = floor.shape.ranks;
  switch (part) {
    case DecodePart::kQB:
    case DecodePart::kUkUv:
    case DecodePart::kO:
    case DecodePart::kSharedExperts:
    case DecodePart::kDenseMlp:
    case DecodePart::kLmHead:
      return 1.0 / ranks;
    case DecodePart::kRoutedExperts:
      return floor.distinct_experts / static_cast<double>(c.experts) / ranks;
    case DecodePart::kEmbedding:
      return static_cast<double>(floor.shape.rows) / static_cast<double>(c.vocab);
    default:
      return 1.0;
  }
}

DecodeFloor floor_of(const ModelConfig& c, const DecodeShape& shape, const StoredBytes& bytes) {
  check_shape(c, shape);
  DecodeFloor floor;
  floor.shape = shape;
  floor.distinct_experts = expected_distinct_experts(c.experts, c.top_k, shape.rows);
  floor.layers.resize(static_cast<std::size_t>(c.layers));
  DecodeBytes outside;
  for (const TensorSpec& spec : model::list_tensors(c)) {
    const DecodePart part = part_of(spec);
    DecodeBytes& place =
        spec.layer < 0 ? outside : floor.layers[static_cast<std::size_t>(spec.layer)];
    place[part] += bytes(spec) * share_read(part, c, floor);
  }
  const auto rows = static_cast<double>(shape.rows);
  const std::int64_t picks = std::min(shape.context, c.index_top_k);
  for (std::size_t i = 0; i < floor.layers.size(); ++i) {
    floor.layers[i][DecodePart::kKv] =
        rows * static_cast<double>(picks * kv_row_bytes(c, shape.kv));
    if (c.full_indexer[i]) {
      floor.layers[i][DecodePart::kIndexCache] =
          rows * static_cast<double>(shape.context) * static_cast<double>(index_row_bytes(c));
    }
    floor.step += floor.layers[i];
  }
  floor.step += outside;
  return floor;
}

}  // namespace

ParameterCount count_parameters(const ModelConfig& config) {
  ParameterCount count;
  std::int64_t embedding = 0;
  std::int64_t routed = 0;
  for (const TensorSpec& spec : model::list_tensors(config)) {
    count.total += spec.elements();
    if (spec.kind == TensorClass::kRoutedExpert) routed += spec.elements();
    if (spec.name == "model.embed_tokens") embedding = spec.elements();
  }
  count.active = count.total - embedding - routed + routed / config.experts * config.top_k;
  return count;
}

CheckpointSummary summarise(const Checkpoint& checkpoint) {
  CheckpointSummary out;
  out.parameters = count_parameters(checkpoint.config());
  for (const TensorSpec& spec : model::list_tensors(checkpoint.config())) {
    std::string_view format;
    if (spec.is_matrix()) {
      const Weight weight = checkpoint.weight(spec.name);
      format = weight.format == WeightFormat::kPlain ? to_string(weight.data.dtype)
                                                     : to_string(weight.format);
    } else {
      format = to_string(checkpoint.tensor(spec.name).dtype);
    }
    const std::int64_t bytes = stored_bytes(checkpoint, spec);
    for (StorageGroup* group :
         {&group_named(out.by_format, format), &group_named(out.by_purpose, purpose(spec.kind))}) {
      ++group->tensors;
      group->parameters += spec.elements();
      group->bytes += bytes;
    }
    out.bytes += bytes;
  }
  const std::string mtp = model::layer_prefix(checkpoint.config().layers);
  for (const std::string& name : checkpoint.names()) {
    if (name.starts_with(mtp)) out.mtp_bytes += checkpoint.tensor(name).bytes();
  }
  for (const std::string& name : checkpoint.surplus()) {
    out.surplus_bytes += checkpoint.tensor(name).bytes();
  }
  return out;
}

std::string_view to_string(KvFormat format) {
  switch (format) {
    case KvFormat::kBf16:
      return "bf16";
    case KvFormat::kFp8Scaled:
      return "fp8_scaled";
    case KvFormat::kFp8Plain:
      return "fp8_plain";
  }
  return "unknown";
}

std::int64_t kv_row_bytes(const ModelConfig& config, KvFormat format) {
  switch (format) {
    case KvFormat::kBf16:
      return 2 * config.cache_dim();
    case KvFormat::kFp8Scaled:
      require(config.kv_lora % kFp8BlockSize == 0, ErrorKind::kInvalidArgument, [&] {
        return fmt::format(
            "kv_lora_rank {} is no multiple of {}, so the scaled FP8 cache row does not fit it; "
            "use bf16 or fp8_plain",
            config.kv_lora, kFp8BlockSize);
      });
      return config.kv_lora + config.kv_lora / kFp8BlockSize * 4 + 2 * config.rope;
    case KvFormat::kFp8Plain:
      return config.cache_dim();
  }
  return 0;
}

std::int64_t index_row_bytes(const ModelConfig& config) { return config.index_dim + 4; }

std::int64_t cache_bytes_per_token(const ModelConfig& config, KvFormat format) {
  const auto full = std::count(config.full_indexer.begin(), config.full_indexer.end(), true);
  return config.layers * kv_row_bytes(config, format) + full * index_row_bytes(config);
}

std::string_view to_string(DecodePart part) {
  switch (part) {
    case DecodePart::kQkvA:
      return "qkv_a";
    case DecodePart::kQB:
      return "q_b";
    case DecodePart::kUkUv:
      return "uk_uv";
    case DecodePart::kO:
      return "o";
    case DecodePart::kIndexer:
      return "indexer";
    case DecodePart::kIndexCache:
      return "index_cache";
    case DecodePart::kKv:
      return "kv";
    case DecodePart::kRouter:
      return "router";
    case DecodePart::kRoutedExperts:
      return "routed_experts";
    case DecodePart::kSharedExperts:
      return "shared_experts";
    case DecodePart::kDenseMlp:
      return "dense_mlp";
    case DecodePart::kNorms:
      return "norms";
    case DecodePart::kEmbedding:
      return "embedding";
    case DecodePart::kLmHead:
      return "lm_head";
  }
  return "unknown";
}

double expected_distinct_experts(std::int64_t experts, std::int64_t top_k, std::int64_t rows) {
  const auto all = static_cast<double>(experts);
  return all * (1.0 - std::pow(1.0 - static_cast<double>(top_k) / all, static_cast<double>(rows)));
}

DecodeFloor decode_floor(const ModelConfig& config, const WeightFormats& formats,
                         const DecodeShape& shape) {
  return floor_of(config, shape,
                  [&](const TensorSpec& spec) { return formula_bytes(spec, formats); });
}

DecodeFloor decode_floor(const Checkpoint& checkpoint, const DecodeShape& shape) {
  return floor_of(checkpoint.config(), shape, [&](const TensorSpec& spec) {
    return static_cast<double>(stored_bytes(checkpoint, spec));
  });
}

double floor_us(double bytes, double gb_per_s) {
  require(std::isfinite(gb_per_s) && gb_per_s > 0.0, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("bandwidth is {} GB/s; it must be positive and finite", gb_per_s);
  });
  return bytes / gb_per_s * 1e-3;
}

}  // namespace penstock
