#include "penstock/model/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "model/json_text.h"
#include "penstock/core/error.h"

namespace penstock {
namespace {

using model::kind_of;
using model::printable;
using nlohmann::json;

constexpr std::size_t kMaxConfigBytes = std::size_t{16} << 20;

// Bounds keep every product of sizes that the library forms inside int64, with room.
constexpr std::int64_t kMaxWidth = std::int64_t{1} << 20;  // hidden and intermediate sizes
constexpr std::int64_t kMaxLayers = 4096;
constexpr std::int64_t kMaxVocab = std::int64_t{1} << 24;
constexpr std::int64_t kMaxHeads = 4096;
constexpr std::int64_t kMaxHeadDim = 4096;
constexpr std::int64_t kMaxLatent = std::int64_t{1} << 16;
constexpr std::int64_t kMaxExperts = std::int64_t{1} << 14;
constexpr std::int64_t kMaxPositions = std::int64_t{1} << 31;
constexpr std::int64_t kMaxToken = std::numeric_limits<std::int32_t>::max();

[[noreturn]] void invalid(const std::string& text) {
  throw_error(ErrorKind::kInvalidArgument, "config.json: " + text);
}
[[noreturn]] void unsupported(const std::string& text) {
  throw_error(ErrorKind::kUnsupported, "config.json: " + text);
}

// A value as it stands in the file, for messages.
std::string shown(const json& value) {
  return printable(value.dump(-1, ' ', true, json::error_handler_t::replace), 80);
}

// Reads keys of one object and remembers which were asked for; the rest are the unknown keys. A
// null counts as absent: Hugging Face writes null for "not set".
class Reader {
 public:
  Reader(const json& object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {}

  const json* find(const std::string& key) {
    known_.insert(key);
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  const json& need(const std::string& key) {
    const json* value = find(key);
    if (value == nullptr) invalid(fmt::format("the key '{}{}' is missing", prefix_, key));
    return *value;
  }

  std::int64_t integer(const std::string& key, std::int64_t least, std::int64_t most) {
    return integer_of(key, need(key), least, most);
  }
  std::optional<std::int64_t> optional_integer(const std::string& key, std::int64_t least,
                                               std::int64_t most) {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    return integer_of(key, *value, least, most);
  }
  std::int64_t integer_of(const std::string& key, const json& value, std::int64_t least,
                          std::int64_t most) const {
    if (!value.is_number_integer()) {
      invalid(fmt::format("'{}{}' must be an integer, not {} ({})", prefix_, key, kind_of(value),
                          shown(value)));
    }
    // An unsigned value above int64's range must not wrap into it.
    const bool too_big =
        value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(most);
    const std::int64_t number = too_big ? 0 : value.get<std::int64_t>();
    if (too_big || number < least || number > most) {
      invalid(fmt::format("'{}{}' is {}; {} .. {} are accepted", prefix_, key, shown(value), least,
                          most));
    }
    return number;
  }

  // A real number in (above, most].
  double real(const std::string& key, double above, double most) {
    const json& value = need(key);
    if (!value.is_number()) {
      invalid(fmt::format("'{}{}' must be a number, not {} ({})", prefix_, key, kind_of(value),
                          shown(value)));
    }
    const double number = value.get<double>();
    // Written so that a NaN fails.
    if (!(number > above && number <= most)) {
      invalid(fmt::format("'{}{}' is {}; it must be above {} and at most {}", prefix_, key,
                          shown(value), above, most));
    }
    return number;
  }

  bool boolean(const std::string& key) { return boolean_of(key, need(key)); }
  std::optional<bool> optional_boolean(const std::string& key) {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    return boolean_of(key, *value);
  }
  bool boolean_of(const std::string& key, const json& value) const {
    if (!value.is_boolean()) {
      invalid(fmt::format("'{}{}' must be true or false, not {} ({})", prefix_, key, kind_of(value),
                          shown(value)));
    }
    return value.get<bool>();
  }

  std::optional<std::string> optional_string(const std::string& key) {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) {
      invalid(fmt::format("'{}{}' must be a string, not {} ({})", prefix_, key, kind_of(*value),
                          shown(*value)));
    }
    return value->get<std::string>();
  }
  std::string string(const std::string& key) {
    need(key);
    return *optional_string(key);
  }

  const json* optional_object(const std::string& key) {
    const json* value = find(key);
    if (value != nullptr && !value->is_object()) {
      invalid(fmt::format("'{}{}' must be an object, not {} ({})", prefix_, key, kind_of(*value),
                          shown(*value)));
    }
    return value;
  }

  // Keys that carry no meaning for inference or that something else decides.
  void ignore(std::initializer_list<const char*> keys) {
    for (const char* key : keys) known_.insert(key);
  }
  void collect_unknown(std::vector<std::string>& out) const {
    for (const auto& [key, value] : object_.items()) {
      if (!known_.contains(key)) out.push_back(prefix_ + key);
    }
  }

 private:
  const json& object_;
  std::string prefix_;
  std::set<std::string> known_;
};

// Refuses a value that would change the arithmetic; absent means the model's own default.
void only_string(Reader& in, const std::string& key, std::string_view accepted,
                 std::string_view reason) {
  const auto value = in.optional_string(key);
  if (value && *value != accepted) {
    unsupported(fmt::format("'{}' is '{}'; only '{}' is supported: {}", key, printable(*value),
                            accepted, reason));
  }
}
void only_boolean(Reader& in, const std::string& key, bool accepted, std::string_view reason) {
  const auto value = in.optional_boolean(key);
  if (value && *value != accepted) {
    unsupported(fmt::format("'{}' is {}; only {} is supported: {}", key, *value, accepted, reason));
  }
}

// A list of one word per layer. The words of MTP layers behind the stack may follow and are
// dropped.
std::vector<bool> layer_words(Reader& in, const std::string& key, std::int64_t layers,
                              std::int64_t mtp_layers, std::string_view yes, std::string_view no) {
  const json& list = in.need(key);
  if (!list.is_array()) {
    invalid(fmt::format("'{}' must be a list with one entry per layer, not {} ({})", key,
                        kind_of(list), shown(list)));
  }
  const auto size = static_cast<std::int64_t>(list.size());
  if (size != layers && size != layers + mtp_layers) {
    invalid(fmt::format("'{}' has {} entries; num_hidden_layers asks for {}", key, size, layers));
  }
  std::vector<bool> out;
  for (std::int64_t i = 0; i < layers; ++i) {
    const json& word = list[static_cast<std::size_t>(i)];
    const bool is_yes = word.is_string() && word.get_ref<const std::string&>() == yes;
    const bool is_no = word.is_string() && word.get_ref<const std::string&>() == no;
    if (!is_yes && !is_no) {
      invalid(
          fmt::format("'{}[{}]' is {}; '{}' and '{}' are accepted", key, i, shown(word), yes, no));
    }
    out.push_back(is_yes);
  }
  return out;
}

// Several spellings of one thing: the first one given is taken, the others must agree with it.
class Spellings {
 public:
  explicit Spellings(std::string_view what) : what_(what) {}
  void add(std::string_view key, std::vector<bool> value) {
    if (!value_) {
      value_ = std::move(value);
      key_ = key;
      return;
    }
    for (std::size_t i = 0; i < value.size(); ++i) {
      if (value[i] != (*value_)[i]) {
        invalid(fmt::format("'{}' and '{}' disagree on {} of layer {}; keep one of them", key_, key,
                            what_, i));
      }
    }
  }
  std::optional<std::vector<bool>>& value() { return value_; }

 private:
  std::string_view what_;
  std::string key_;
  std::optional<std::vector<bool>> value_;
};

std::vector<bool> read_indexer_types(Reader& in, std::int64_t layers, std::int64_t mtp_layers) {
  const auto size = static_cast<std::size_t>(layers);
  Spellings spellings("the indexer");
  std::string source = "indexer_types";
  if (in.find("indexer_types") != nullptr) {
    spellings.add("indexer_types",
                  layer_words(in, "indexer_types", layers, mtp_layers, "full", "shared"));
  }
  if (const auto pattern = in.optional_string("index_topk_pattern")) {
    const auto length = static_cast<std::int64_t>(pattern->size());
    if (length != layers && length != layers + mtp_layers) {
      invalid(fmt::format("'index_topk_pattern' has {} letters; num_hidden_layers asks for {}",
                          length, layers));
    }
    std::vector<bool> full;
    for (std::size_t i = 0; i < size; ++i) {
      const char letter = (*pattern)[i];
      if (letter != 'F' && letter != 'S') {
        invalid(fmt::format(
            "'index_topk_pattern' has '{}' at layer {}; 'F' (full) and 'S' (shared) are accepted",
            printable({&letter, 1}), i));
      }
      full.push_back(letter == 'F');
    }
    if (!spellings.value()) source = "index_topk_pattern";
    spellings.add("index_topk_pattern", std::move(full));
  }
  const auto freq = in.optional_integer("index_topk_freq", 1, kMaxLayers);
  const auto offset = in.optional_integer("index_skip_topk_offset", 0, kMaxLayers);
  if (offset && !freq) {
    invalid("'index_skip_topk_offset' is given without 'index_topk_freq'");
  }
  if (freq) {
    // Hugging Face's rule: layer i is full if max(i - offset + 1, 0) mod freq == 0.
    std::vector<bool> full;
    for (std::int64_t i = 0; i < layers; ++i) {
      full.push_back(std::max<std::int64_t>(i - offset.value_or(0) + 1, 0) % *freq == 0);
    }
    if (!spellings.value()) source = "index_topk_freq";
    spellings.add("index_topk_freq", std::move(full));
  }
  std::vector<bool> full = spellings.value() ? *spellings.value() : std::vector<bool>(size, true);
  if (!full.front()) {
    invalid(fmt::format(
        "'{}' makes layer 0 share the picks of an earlier indexer, and there is none; the first "
        "layer must be full",
        source));
  }
  return full;
}

std::vector<bool> read_mlp_types(Reader& in, std::int64_t layers, std::int64_t mtp_layers) {
  Spellings spellings("the MLP");
  if (in.find("mlp_layer_types") != nullptr) {
    spellings.add("mlp_layer_types",
                  layer_words(in, "mlp_layer_types", layers, mtp_layers, "sparse", "dense"));
  }
  if (const auto dense = in.optional_integer("first_k_dense_replace", 0, kMaxLayers)) {
    if (*dense > layers) {
      invalid(fmt::format("'first_k_dense_replace' is {}, but num_hidden_layers is {}", *dense,
                          layers));
    }
    std::vector<bool> sparse;
    for (std::int64_t i = 0; i < layers; ++i) sparse.push_back(i >= *dense);
    spellings.add("first_k_dense_replace", std::move(sparse));
  }
  if (!spellings.value()) {
    invalid("the key 'mlp_layer_types' or 'first_k_dense_replace' is missing");
  }
  return *spellings.value();
}

double read_rope_theta(Reader& in, std::vector<std::string>& unknown) {
  constexpr double kMost = 1e12;
  std::optional<double> theta;
  const auto check_type = [](Reader& object, const std::string& key, const std::string& name) {
    const auto type = object.optional_string(key);
    if (type && *type != "default") {
      unsupported(fmt::format(
          "'{}' is '{}'; only 'default' is supported: scaled RoPE (YaRN and its kin) changes "
          "angles and the softmax scale, and no published GLM-5 uses it",
          name, printable(*type)));
    }
  };
  for (const char* group : {"rope_parameters", "rope_scaling"}) {
    const json* object = in.optional_object(group);
    if (object == nullptr) continue;
    Reader rope(*object, std::string(group) + ".");
    check_type(rope, "rope_type", std::string(group) + ".rope_type");
    check_type(rope, "type", std::string(group) + ".type");
    if (rope.find("factor") != nullptr && rope.real("factor", 0.0, 1e9) != 1.0) {
      unsupported(fmt::format("'{}.factor' is {}; only unscaled RoPE (factor 1) is supported",
                              group, shown(rope.need("factor"))));
    }
    if (rope.find("partial_rotary_factor") != nullptr) {
      // The rotated slice is qk_rope_head_dim in this architecture; the factor restates it.
      rope.real("partial_rotary_factor", 0.0, 1.0);
    }
    if (rope.find("rope_theta") != nullptr) {
      const double value = rope.real("rope_theta", 1.0, kMost);
      if (theta && *theta != value) {
        invalid(fmt::format("'{}.rope_theta' is {}, elsewhere it is {}; keep one of them", group,
                            value, *theta));
      }
      theta = value;
    }
    rope.collect_unknown(unknown);
  }
  if (in.find("rope_theta") != nullptr) {
    const double value = in.real("rope_theta", 1.0, kMost);
    if (theta && *theta != value) {
      invalid(fmt::format(
          "'rope_theta' is {}, but 'rope_parameters.rope_theta' is {}; keep one of them", value,
          *theta));
    }
    theta = value;
  }
  if (!theta) invalid("the key 'rope_parameters.rope_theta' or 'rope_theta' is missing");
  return *theta;
}

void read_block_size(ModelConfig& config, const json& value, const std::string& key) {
  if (!value.is_array() || value.size() != 2 || !value[0].is_number_integer() ||
      !value[1].is_number_integer()) {
    invalid(fmt::format("'{}' must be a list of two integers, not {}", key, shown(value)));
  }
  if (value[0] != 128 || value[1] != 128) {
    unsupported(
        fmt::format("'{}' is {}; only [128, 128] is supported, the block of the published "
                    "FP8 checkpoints",
                    key, shown(value)));
  }
  config.fp8_block_rows = 128;
  config.fp8_block_cols = 128;
}

// compressed-tensors: one entry per group of layers; each must be 8-bit float weights with a scale
// per output channel or per 128x128 block.
void read_config_groups(ModelConfig& config, const json& groups) {
  for (const auto& [name, group] : groups.items()) {
    const std::string prefix = fmt::format("quantization_config.config_groups.{}.", name);
    if (!group.is_object()) invalid(fmt::format("'{}' must be an object", prefix));
    Reader in(group, prefix);
    const json* weights = in.optional_object("weights");
    if (weights == nullptr) invalid(fmt::format("the key '{}weights' is missing", prefix));
    Reader w(*weights, prefix + "weights.");
    const std::int64_t bits = w.integer("num_bits", 1, 64);
    const std::string type = w.string("type");
    const std::string strategy = w.string("strategy");
    if (bits != 8 || type != "float" || (strategy != "channel" && strategy != "block")) {
      unsupported(fmt::format(
          "'{}weights' asks for {}-bit {} weights with strategy '{}'; 8-bit float with strategy "
          "'channel' or 'block' is supported",
          prefix, bits, printable(type), printable(strategy)));
    }
    if (strategy == "block") {
      read_block_size(config, w.need("block_structure"), prefix + "weights.block_structure");
    }
    if (const json* inputs = in.optional_object("input_activations")) {
      Reader a(*inputs, prefix + "input_activations.");
      const auto dynamic = a.optional_boolean("dynamic");
      if (dynamic && !*dynamic) {
        unsupported(fmt::format(
            "'{}input_activations.dynamic' is false; activations are quantised with scales found "
            "at run time only",
            prefix));
      }
    }
  }
}

void read_quantization(ModelConfig& config, const json& object) {
  Reader in(object, "quantization_config.");
  const std::string method = in.string("quant_method");
  if (method == "compressed-tensors") {
    const json* groups = in.optional_object("config_groups");
    if (groups == nullptr) invalid("the key 'quantization_config.config_groups' is missing");
    read_config_groups(config, *groups);
    in.ignore({"format", "ignore", "quantization_status", "kv_cache_scheme", "version",
               "global_compression_ratio", "sparsity_config", "transform_config"});
    in.collect_unknown(config.unknown_keys);
    return;
  }
  if (method != "fp8") {
    unsupported(fmt::format(
        "'quantization_config.quant_method' is '{}'; 'fp8' and 'compressed-tensors' are supported",
        printable(method)));
  }
  const auto format = in.optional_string("fmt");
  if (format && *format != "e4m3") {
    unsupported(fmt::format("'quantization_config.fmt' is '{}'; only 'e4m3' is supported",
                            printable(*format)));
  }
  const auto scheme = in.optional_string("activation_scheme");
  if (scheme && *scheme != "dynamic") {
    unsupported(
        fmt::format("'quantization_config.activation_scheme' is '{}'; only 'dynamic' is supported: "
                    "activations are quantised with scales found at run time",
                    printable(*scheme)));
  }
  if (const json* block = in.find("weight_block_size")) {
    read_block_size(config, *block, "quantization_config.weight_block_size");
  }
  in.ignore({"modules_to_not_convert", "dequantize"});
  in.collect_unknown(config.unknown_keys);
}

void read_tokens(ModelConfig& config, Reader& in) {
  config.bos = in.optional_integer("bos_token_id", 0, kMaxToken).value_or(-1);
  if (const json* eos = in.find("eos_token_id")) {
    if (eos->is_array()) {
      for (std::size_t i = 0; i < eos->size(); ++i) {
        config.eos.push_back(
            in.integer_of(fmt::format("eos_token_id[{}]", i), (*eos)[i], 0, kMaxToken));
      }
    } else {
      config.eos.push_back(in.integer_of("eos_token_id", *eos, 0, kMaxToken));
    }
  }
  for (const std::int64_t token : config.eos) {
    if (token >= config.vocab) {
      invalid(fmt::format("'eos_token_id' holds {}, but vocab_size is {}", token, config.vocab));
    }
  }
  if (config.bos >= config.vocab) {
    invalid(fmt::format("'bos_token_id' is {}, but vocab_size is {}", config.bos, config.vocab));
  }
}

void check_routing(const ModelConfig& c) {
  // A hostile file of 2 KB must not make a tensor list of tens of GB; GLM-5 has 78 x 256.
  constexpr std::int64_t kMaxLayerExperts = std::int64_t{1} << 18;
  if (c.layers * c.experts > kMaxLayerExperts) {
    invalid(fmt::format("'num_hidden_layers' {} x 'n_routed_experts' {} is over {}", c.layers,
                        c.experts, kMaxLayerExperts));
  }
  if (c.experts % c.groups != 0) {
    invalid(fmt::format("'n_group' is {}, which does not divide n_routed_experts {}", c.groups,
                        c.experts));
  }
  const std::int64_t in_group = c.experts / c.groups;
  if (c.groups > 1 && in_group < 2) {
    invalid(fmt::format(
        "'n_group' is {} for {} experts; a group's score is the sum of its two best, so it needs "
        "two experts",
        c.groups, c.experts));
  }
  if (c.top_groups > c.groups) {
    invalid(fmt::format("'topk_group' is {}, but n_group is {}", c.top_groups, c.groups));
  }
  if (c.top_k > c.top_groups * in_group) {
    invalid(fmt::format(
        "'num_experts_per_tok' is {}, but the {} of {} groups that routing keeps hold {} experts",
        c.top_k, c.top_groups, c.groups, c.top_groups * in_group));
  }
}

}  // namespace

ModelConfig parse_config(std::string_view json_text) {
  require(json_text.size() <= kMaxConfigBytes, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("config.json: {} bytes; at most {} are accepted", json_text.size(),
                       kMaxConfigBytes);
  });
  const json root = model::parse_json(json_text, "config.json");
  if (!root.is_object()) invalid(fmt::format("must be an object, not {}", kind_of(root)));
  Reader in(root, "");
  ModelConfig c;

  // What the model is comes first, so that another model's file is refused by name and not by some
  // key that it lacks.
  const std::string model_type = in.string("model_type");
  if (model_type != "glm_moe_dsa") {
    unsupported(
        fmt::format("'model_type' is '{}'; only 'glm_moe_dsa' (GLM-5, 5.1, 5.2, 5.3) is "
                    "supported",
                    printable(model_type)));
  }
  only_string(in, "hidden_act", "silu", "the expert kernels fuse SwiGLU");
  only_string(in, "scoring_func", "sigmoid", "the router scores with a sigmoid");
  only_string(in, "topk_method", "noaux_tc",
              "experts are chosen by score plus correction bias, within groups");
  only_string(in, "moe_router_dtype", "float32",
              "the router computes in float32; a rounded correction bias loses the order");
  only_boolean(in, "attention_bias", false, "projections have no bias tensors here");
  only_boolean(in, "mlp_bias", false, "projections have no bias tensors here");
  only_boolean(in, "tie_word_embeddings", false, "lm_head must be a tensor of its own");
  only_boolean(in, "rope_interleave", true, "rotation pairs are (2i, 2i + 1)");
  only_boolean(in, "indexer_rope_interleave", true, "rotation pairs are (2i, 2i + 1)");
  for (const char* key : {"dtype", "torch_dtype"}) {
    const auto dtype = in.optional_string(key);
    if (dtype && *dtype != "bfloat16" && *dtype != "float32") {
      unsupported(fmt::format("'{}' is '{}'; 'bfloat16' and 'float32' are supported", key,
                              printable(*dtype)));
    }
  }
  if (const auto freq = in.optional_integer("moe_layer_freq", 1, kMaxLayers); freq && *freq != 1) {
    unsupported(
        fmt::format("'moe_layer_freq' is {}; only 1 is supported: use mlp_layer_types", *freq));
  }

  c.hidden = in.integer("hidden_size", 1, kMaxWidth);
  c.layers = in.integer("num_hidden_layers", 1, kMaxLayers);
  c.vocab = in.integer("vocab_size", 1, kMaxVocab);
  c.dense_intermediate = in.integer("intermediate_size", 1, kMaxWidth);
  c.expert_intermediate = in.integer("moe_intermediate_size", 1, kMaxWidth);
  c.heads = in.integer("num_attention_heads", 1, kMaxHeads);
  c.q_lora = in.integer("q_lora_rank", 1, kMaxLatent);
  c.kv_lora = in.integer("kv_lora_rank", 1, kMaxLatent);
  c.nope = in.integer("qk_nope_head_dim", 1, kMaxHeadDim);
  c.rope = in.integer("qk_rope_head_dim", 2, kMaxHeadDim);
  c.v_dim = in.integer("v_head_dim", 1, kMaxHeadDim);
  c.experts = in.integer("n_routed_experts", 1, kMaxExperts);
  c.shared_experts = in.integer("n_shared_experts", 1, 64);
  c.top_k = in.integer("num_experts_per_tok", 1, c.experts);
  c.groups = in.optional_integer("n_group", 1, c.experts).value_or(1);
  c.top_groups = in.optional_integer("topk_group", 1, c.experts).value_or(1);
  c.norm_top_k = in.boolean("norm_topk_prob");
  c.routed_scale = in.real("routed_scaling_factor", 0.0, 1e6);
  c.index_heads = in.integer("index_n_heads", 1, kMaxHeads);
  c.index_dim = in.integer("index_head_dim", 2, kMaxHeadDim);
  c.index_top_k = in.integer("index_topk", 1, kMaxPositions);
  c.max_positions = in.integer("max_position_embeddings", 1, kMaxPositions);
  c.rms_eps = in.real("rms_norm_eps", 0.0, 1.0);
  if (c.rope % 2 != 0) {
    invalid(fmt::format("'qk_rope_head_dim' is {}; rotation works on pairs, so it must be even",
                        c.rope));
  }
  if (c.rope > c.index_dim) {
    invalid(fmt::format(
        "'qk_rope_head_dim' is {}, but index_head_dim is {}: the indexer rotates that many of its "
        "dimensions",
        c.rope, c.index_dim));
  }
  if (const auto qk = in.optional_integer("qk_head_dim", 1, 2 * kMaxHeadDim);
      qk && *qk != c.qk_dim()) {
    invalid(fmt::format("'qk_head_dim' is {}, but qk_nope_head_dim + qk_rope_head_dim is {}", *qk,
                        c.qk_dim()));
  }
  check_routing(c);

  const std::int64_t mtp_layers =
      in.optional_integer("num_nextn_predict_layers", 0, 64).value_or(0);
  c.full_indexer = read_indexer_types(in, c.layers, mtp_layers);
  c.sparse_mlp = read_mlp_types(in, c.layers, mtp_layers);
  c.rope_theta = read_rope_theta(in, c.unknown_keys);
  read_tokens(c, in);
  if (const json* quantization = in.optional_object("quantization_config")) {
    read_quantization(c, *quantization);
  }
  if (const auto format = in.optional_string("experts_format")) {
    if (*format != "fp8" && *format != "mxfp4") {
      unsupported(fmt::format("'experts_format' is '{}'; 'fp8' and 'mxfp4' are supported",
                              printable(*format)));
    }
    c.experts_format = *format;
  }

  // Keys that training, other software or the tensors' own shapes decide. head_dim is published as
  // 192 and as 64 for the same weights; nothing here reads it.
  in.ignore({"architectures", "attention_dropout", "auto_map", "ep_size", "head_dim",
             "index_share_for_mtp_iteration", "initializer_range", "num_key_value_heads",
             "pad_token_id", "pretraining_tp", "transformers_version", "use_cache",
             "aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "output_router_logits"});
  in.collect_unknown(c.unknown_keys);
  return c;
}

ModelConfig load_config(const std::string& directory) {
  const std::string path = directory + "/config.json";
  const std::string text = model::read_text_file(path, kMaxConfigBytes);
  try {
    return parse_config(text);
  } catch (const Error& e) {
    throw_error(e.kind(), fmt::format("{}: {}", directory, e.what()));
  }
}

}  // namespace penstock
