#include "penstock/model/config.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <sys/stat.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "model/expect_error.h"
#include "model/glm5_config.h"
#include "model/temp_dir.h"
#include "penstock/core/error.h"

namespace penstock {
namespace {

using nlohmann::json;
using testing::expect_error;
using testing::glm52_json;
using testing::glm5_json;
using testing::TempDir;

// A copy with one key set; a null removes it.
json with(json config, const std::string& key, const json& value) {
  if (value.is_null()) {
    config.erase(key);
  } else {
    config[key] = value;
  }
  return config;
}

ModelConfig parse(const json& config) { return parse_config(config.dump()); }

void refuses(const json& config, std::initializer_list<std::string_view> words) {
  expect_error(ErrorKind::kInvalidArgument, words, [&] { parse(config); });
}
void unsupported(const json& config, std::initializer_list<std::string_view> words) {
  expect_error(ErrorKind::kUnsupported, words, [&] { parse(config); });
}

TEST(ConfigTest, ReadsGlm5) {
  const ModelConfig c = parse(glm5_json());
  EXPECT_EQ(c.hidden, 6144);
  EXPECT_EQ(c.layers, 78);
  EXPECT_EQ(c.vocab, 154880);
  EXPECT_EQ(c.dense_intermediate, 12288);
  EXPECT_EQ(c.expert_intermediate, 2048);
  EXPECT_EQ(c.heads, 64);
  EXPECT_EQ(c.q_lora, 2048);
  EXPECT_EQ(c.kv_lora, 512);
  EXPECT_EQ(c.nope, 192);
  EXPECT_EQ(c.rope, 64);
  EXPECT_EQ(c.v_dim, 256);
  EXPECT_EQ(c.experts, 256);
  EXPECT_EQ(c.shared_experts, 1);
  EXPECT_EQ(c.top_k, 8);
  EXPECT_EQ(c.groups, 1);
  EXPECT_EQ(c.top_groups, 1);
  EXPECT_TRUE(c.norm_top_k);
  EXPECT_EQ(c.routed_scale, 2.5);
  EXPECT_EQ(c.index_heads, 32);
  EXPECT_EQ(c.index_dim, 128);
  EXPECT_EQ(c.index_top_k, 2048);
  EXPECT_EQ(c.rope_theta, 1e6);
  EXPECT_EQ(c.max_positions, 202752);
  EXPECT_EQ(c.rms_eps, 1e-5);
  EXPECT_EQ(c.latent_eps, 1e-6);
  EXPECT_EQ(c.index_norm_eps, 1e-6);
  EXPECT_EQ(c.bos, -1);
  EXPECT_EQ(c.eos, (std::vector<std::int64_t>{151329, 151336, 151338}));
  EXPECT_EQ(c.fp8_block_rows, 0);
  EXPECT_EQ(c.experts_format, "");
  EXPECT_TRUE(c.unknown_keys.empty());
  EXPECT_EQ(c.full_indexer, std::vector<bool>(78, true));
  for (std::size_t i = 0; i < 78; ++i) EXPECT_EQ(c.sparse_mlp[i], i >= 3) << i;
}

TEST(ConfigTest, ReadsTinyGlm) {
  const ModelConfig c = load_config(PENSTOCK_TEST_MODELS "/tiny-glm");
  EXPECT_EQ(c.layers, 4);
  EXPECT_EQ(c.full_indexer, (std::vector<bool>{true, true, false, true}));
  EXPECT_EQ(c.sparse_mlp, (std::vector<bool>{false, true, true, true}));
  EXPECT_EQ(c.rope_theta, 1e4);
  EXPECT_EQ(c.bos, 2);
  EXPECT_EQ(c.eos, std::vector<std::int64_t>{3});
  EXPECT_EQ(c.fp8_block_rows, 128);
  EXPECT_EQ(c.fp8_block_cols, 128);
  EXPECT_TRUE(c.unknown_keys.empty());
}

// ---- spellings ----------------------------------------------------------------------------------

TEST(ConfigTest, IndexerFrequencyAndOffsetGiveTheFullLayersOfGlm52) {
  const ModelConfig c = parse(glm52_json());
  std::vector<std::size_t> full;
  for (std::size_t i = 0; i < 78; ++i) {
    if (c.full_indexer[i]) full.push_back(i);
  }
  std::vector<std::size_t> want = {0, 1, 2};
  for (std::size_t i = 6; i <= 74; i += 4) want.push_back(i);
  EXPECT_EQ(full, want);
  EXPECT_EQ(full.size(), 21U);
}

TEST(ConfigTest, IndexerSpellingsAgree) {
  const std::vector<bool> want = parse(glm52_json()).full_indexer;
  json types = json::array();
  std::string pattern;
  for (const bool full : want) {
    types.push_back(full ? "full" : "shared");
    pattern += full ? 'F' : 'S';
  }
  EXPECT_EQ(parse(with(glm5_json(), "indexer_types", types)).full_indexer, want);
  EXPECT_EQ(parse(with(glm5_json(), "index_topk_pattern", pattern)).full_indexer, want);
  // All at once, as converters write them; with the MTP layer's entry behind the stack.
  json all = with(glm52_json(), "indexer_types", types);
  all["index_topk_pattern"] = pattern + "S";
  EXPECT_EQ(parse(all).full_indexer, want);
  all["index_topk_pattern"] = std::string(pattern).replace(5, 1, "F");
  refuses(all, {"indexer_types", "index_topk_pattern", "layer 5"});
}

TEST(ConfigTest, IndexerSpellingsAreChecked) {
  refuses(with(glm5_json(), "index_topk_pattern", "FFS"), {"index_topk_pattern", "3", "78"});
  refuses(with(glm5_json(), "index_topk_pattern", "X" + std::string(77, 'F')), {"'X'", "layer 0"});
  refuses(with(glm5_json(), "index_topk_pattern", "S" + std::string(77, 'F')),
          {"index_topk_pattern", "first layer must be full"});
  json types = json(std::vector<std::string>(78, "full"));
  types[0] = "shared";
  refuses(with(glm5_json(), "indexer_types", types), {"indexer_types", "first layer must be full"});
  types[0] = "half";
  refuses(with(glm5_json(), "indexer_types", types), {"indexer_types[0]", "half"});
  types[0] = 1;
  refuses(with(glm5_json(), "indexer_types", types), {"indexer_types[0]", "1"});
  types.erase(0);
  refuses(with(glm5_json(), "indexer_types", types), {"indexer_types", "77", "78"});
  refuses(with(glm5_json(), "indexer_types", "full"), {"indexer_types", "list", "string"});
  refuses(with(glm5_json(), "index_skip_topk_offset", 3),
          {"index_skip_topk_offset", "index_topk_freq"});
  refuses(with(glm5_json(), "index_topk_freq", 0), {"index_topk_freq", "0"});
  // Offset 0: max(0 + 1, 0) mod 4 is 1, so layer 0 would be shared.
  refuses(with(glm5_json(), "index_topk_freq", 4), {"index_topk_freq", "first layer must be full"});
}

TEST(ConfigTest, MlpSpellingsAgree) {
  json types = json(std::vector<std::string>(78, "sparse"));
  for (std::size_t i = 0; i < 3; ++i) types[i] = "dense";
  const json listed = with(glm5_json(), "mlp_layer_types", types);
  EXPECT_EQ(parse(listed).sparse_mlp, parse(glm5_json()).sparse_mlp);
  EXPECT_EQ(parse(with(listed, "first_k_dense_replace", nullptr)).sparse_mlp,
            parse(glm5_json()).sparse_mlp);
  refuses(with(listed, "first_k_dense_replace", 4),
          {"mlp_layer_types", "first_k_dense_replace", "layer 3"});
  refuses(with(glm5_json(), "first_k_dense_replace", nullptr),
          {"mlp_layer_types", "first_k_dense_replace", "missing"});
  refuses(with(glm5_json(), "first_k_dense_replace", 79), {"first_k_dense_replace", "79", "78"});
}

TEST(ConfigTest, RopeSpellingsAgree) {
  const json flat = with(with(glm5_json(), "rope_parameters", nullptr), "rope_theta", 1000000.0);
  EXPECT_EQ(parse(flat).rope_theta, 1e6);
  json null_scaling = flat;
  null_scaling["rope_scaling"] = nullptr;
  EXPECT_EQ(parse(null_scaling).rope_theta, 1e6);
  EXPECT_EQ(parse(with(glm5_json(), "rope_theta", 1000000)).rope_theta, 1e6);
  refuses(with(glm5_json(), "rope_theta", 10000), {"rope_theta", "10000", "1000000"});
  refuses(with(glm5_json(), "rope_parameters", nullptr), {"rope_theta", "missing"});
  refuses(with(glm5_json(), "rope_parameters", json{{"rope_type", "default"}}),
          {"rope_parameters.rope_theta", "missing"});
  refuses(with(flat, "rope_theta", 1), {"rope_theta", "above 1"});
}

TEST(ConfigTest, ScaledRopeIsRefusedWithItsReason) {
  unsupported(with(glm5_json(), "rope_parameters",
                   {{"rope_type", "yarn"}, {"rope_theta", 1e6}, {"factor", 4.0}}),
              {"rope_parameters.rope_type", "yarn", "YaRN"});
  unsupported(with(glm5_json(), "rope_scaling", {{"type", "linear"}, {"factor", 2.0}}),
              {"rope_scaling.type", "linear"});
  unsupported(with(glm5_json(), "rope_scaling", {{"factor", 2.0}}), {"rope_scaling.factor", "2.0"});
}

TEST(ConfigTest, TokensAreANumberAListOrAbsent) {
  EXPECT_EQ(parse(with(glm5_json(), "eos_token_id", 7)).eos, std::vector<std::int64_t>{7});
  EXPECT_TRUE(parse(with(glm5_json(), "eos_token_id", nullptr)).eos.empty());
  EXPECT_EQ(parse(with(glm5_json(), "bos_token_id", 5)).bos, 5);
  refuses(with(glm5_json(), "eos_token_id", {1, "2"}), {"eos_token_id[1]", "string"});
  refuses(with(glm5_json(), "eos_token_id", {1, 154880}), {"eos_token_id", "154880"});
  refuses(with(glm5_json(), "bos_token_id", 154880), {"bos_token_id", "154880"});
  refuses(with(glm5_json(), "eos_token_id", -1), {"eos_token_id", "-1"});
}

TEST(ConfigTest, Dtype) {
  EXPECT_NO_THROW(parse(with(with(glm5_json(), "dtype", nullptr), "torch_dtype", "bfloat16")));
  EXPECT_NO_THROW(parse(with(glm5_json(), "dtype", "float32")));
  unsupported(with(glm5_json(), "torch_dtype", "float16"), {"torch_dtype", "float16"});
}

// ---- every key ----------------------------------------------------------------------------------

const std::vector<std::string> kIntegers = {"hidden_size",
                                            "num_hidden_layers",
                                            "vocab_size",
                                            "intermediate_size",
                                            "moe_intermediate_size",
                                            "num_attention_heads",
                                            "q_lora_rank",
                                            "kv_lora_rank",
                                            "qk_nope_head_dim",
                                            "qk_rope_head_dim",
                                            "v_head_dim",
                                            "n_routed_experts",
                                            "n_shared_experts",
                                            "num_experts_per_tok",
                                            "index_n_heads",
                                            "index_head_dim",
                                            "index_topk",
                                            "max_position_embeddings"};
const std::vector<std::string> kReals = {"routed_scaling_factor", "rms_norm_eps"};

TEST(ConfigTest, AMissingKeyIsNamed) {
  std::vector<std::string> keys = kIntegers;
  keys.insert(keys.end(), kReals.begin(), kReals.end());
  keys.insert(keys.end(), {"model_type", "norm_topk_prob"});
  for (const std::string& key : keys) {
    refuses(with(glm5_json(), key, nullptr), {"'" + key + "'", "missing"});
    json null = glm5_json();
    null[key] = nullptr;
    refuses(null, {"'" + key + "'", "missing"});
  }
}

TEST(ConfigTest, AValueOfTheWrongTypeIsNamed) {
  for (const std::string& key : kIntegers) {
    for (const json& value : {json("64"), json(true), json(64.0), json(64.5), json::array({64})}) {
      refuses(with(glm5_json(), key, value), {"'" + key + "'", "must be an integer"});
    }
  }
  for (const std::string& key : kReals) {
    refuses(with(glm5_json(), key, "1"), {"'" + key + "'", "must be a number"});
    refuses(with(glm5_json(), key, false), {"'" + key + "'", "must be a number"});
  }
  refuses(with(glm5_json(), "norm_topk_prob", 1), {"'norm_topk_prob'", "true or false"});
  refuses(with(glm5_json(), "model_type", 5), {"'model_type'", "string"});
  refuses(with(glm5_json(), "quantization_config", "fp8"), {"'quantization_config'", "object"});
}

TEST(ConfigTest, AValueOutOfRangeIsNamed) {
  for (const std::string& key : kIntegers) {
    for (const json& value :
         {json(0), json(-1), json(std::int64_t{1} << 62), json(18446744073709551615ULL)}) {
      refuses(with(glm5_json(), key, value), {"'" + key + "' is " + value.dump()});
    }
  }
  for (const std::string& key : kReals) {
    for (const json& value : {json(0), json(-1.0), json(1e300)}) {
      refuses(with(glm5_json(), key, value), {"'" + key + "'", "must be above"});
    }
  }
}

TEST(ConfigTest, NumbersThatJsonDoesNotKnowAreFoundByTheirKey) {
  for (const char* word : {"NaN", "Infinity", "-Infinity", "1e999"}) {
    std::string text = glm5_json().dump();
    const std::string key = "\"rms_norm_eps\":";
    const std::size_t at = text.find(key) + key.size();
    text.replace(at, text.find(',', at) - at, word);
    expect_error(ErrorKind::kInvalidArgument, {"rms_norm_eps"}, [&] { parse_config(text); });
  }
}

TEST(ConfigTest, UnknownKeysAreKeptByName) {
  json config = glm5_json();
  config["zebra"] = 1;
  config["aardvark"] = json::object({{"x", 1}});
  config["rope_parameters"]["zoo"] = 2;
  config["quantization_config"] = {
      {"quant_method", "fp8"}, {"weight_block_size", {128, 128}}, {"novelty", 1}};
  const ModelConfig c = parse(config);
  EXPECT_EQ(c.unknown_keys,
            (std::vector<std::string>{"rope_parameters.zoo", "quantization_config.novelty",
                                      "aardvark", "zebra"}));
}

// ---- what this build cannot run -----------------------------------------------------------------

TEST(ConfigTest, OtherModelsAreRefusedByName) {
  unsupported(with(glm5_json(), "model_type", "deepseek_v3"), {"deepseek_v3", "glm_moe_dsa"});
  unsupported(json{{"model_type", "llama"}}, {"llama"});
  unsupported(with(glm5_json(), "scoring_func", "softmax"), {"scoring_func", "softmax"});
  unsupported(with(glm5_json(), "topk_method", "greedy"), {"topk_method", "greedy"});
  unsupported(with(glm5_json(), "hidden_act", "gelu"), {"hidden_act", "gelu"});
  unsupported(with(glm5_json(), "moe_router_dtype", "bfloat16"), {"moe_router_dtype"});
  unsupported(with(glm5_json(), "attention_bias", true), {"attention_bias"});
  unsupported(with(glm5_json(), "mlp_bias", true), {"mlp_bias"});
  unsupported(with(glm5_json(), "tie_word_embeddings", true), {"tie_word_embeddings", "lm_head"});
  unsupported(with(glm5_json(), "rope_interleave", false), {"rope_interleave"});
  unsupported(with(glm5_json(), "indexer_rope_interleave", false), {"indexer_rope_interleave"});
  unsupported(with(glm5_json(), "moe_layer_freq", 2), {"moe_layer_freq", "2"});
  unsupported(with(glm5_json(), "experts_format", "int4"), {"experts_format", "int4"});
}

TEST(ConfigTest, Quantization) {
  const auto quantized = [](const json& q) { return with(glm5_json(), "quantization_config", q); };
  const json fp8 = {{"quant_method", "fp8"},
                    {"fmt", "e4m3"},
                    {"activation_scheme", "dynamic"},
                    {"weight_block_size", {128, 128}}};
  EXPECT_EQ(parse(quantized(fp8)).fp8_block_rows, 128);
  EXPECT_EQ(parse(quantized(with(fp8, "weight_block_size", nullptr))).fp8_block_rows, 0);
  unsupported(quantized(with(fp8, "weight_block_size", {64, 128})), {"weight_block_size", "64"});
  refuses(quantized(with(fp8, "weight_block_size", {128})), {"weight_block_size"});
  unsupported(quantized(with(fp8, "activation_scheme", "static")), {"activation_scheme", "static"});
  unsupported(quantized(with(fp8, "fmt", "e5m2")), {"fmt", "e5m2"});
  unsupported(quantized({{"quant_method", "gptq"}}), {"quant_method", "gptq"});
  refuses(quantized(json::object()), {"quantization_config.quant_method", "missing"});

  json ct = {{"quant_method", "compressed-tensors"},
             {"config_groups",
              {{"group_0",
                {{"weights", {{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}}},
                 {"input_activations", {{"dynamic", true}}}}}}}};
  EXPECT_EQ(parse(quantized(ct)).fp8_block_rows, 0);
  json& weights = ct["config_groups"]["group_0"]["weights"];
  weights["strategy"] = "tensor";
  unsupported(quantized(ct), {"group_0", "tensor"});
  weights["strategy"] = "block";
  weights["block_structure"] = {128, 128};
  EXPECT_EQ(parse(quantized(ct)).fp8_block_rows, 128);
  weights["num_bits"] = 4;
  unsupported(quantized(ct), {"group_0", "4-bit"});
  weights["num_bits"] = 8;
  ct["config_groups"]["group_0"]["input_activations"]["dynamic"] = false;
  unsupported(quantized(ct), {"dynamic"});
}

// ---- relations ----------------------------------------------------------------------------------

TEST(ConfigTest, RelationsBetweenKeysAreChecked) {
  // Each in its range, their product a tensor list of tens of GB.
  refuses(with(with(glm5_json(), "num_hidden_layers", 4096), "n_routed_experts", 16384),
          {"num_hidden_layers", "4096", "n_routed_experts", "16384"});
  refuses(with(glm5_json(), "n_group", 7), {"n_group", "7", "256"});
  refuses(with(with(glm5_json(), "n_group", 256), "topk_group", 256), {"n_group", "two"});
  refuses(with(glm5_json(), "topk_group", 2), {"topk_group", "2", "n_group is 1"});
  refuses(with(with(glm5_json(), "n_group", 64), "topk_group", 1), {"num_experts_per_tok", "8"});
  EXPECT_EQ(parse(with(with(glm5_json(), "n_group", 8), "topk_group", 4)).top_groups, 4);
  refuses(with(glm5_json(), "num_experts_per_tok", 257), {"num_experts_per_tok", "257"});
  refuses(with(glm5_json(), "qk_rope_head_dim", 63), {"qk_rope_head_dim", "63", "even"});
  refuses(with(glm5_json(), "qk_rope_head_dim", 130),
          {"qk_rope_head_dim", "index_head_dim is 128"});
  refuses(with(glm5_json(), "qk_head_dim", 128), {"qk_head_dim", "256"});
  EXPECT_NO_THROW(parse(with(glm5_json(), "qk_head_dim", 256)));
  EXPECT_NO_THROW(parse(with(glm5_json(), "head_dim", 7)));  // ignored by rule
}

// ---- text ---------------------------------------------------------------------------------------

TEST(ConfigTest, TextThatIsNoConfigIsRefused) {
  for (const char* text : {"", "{", "[]", "7", "{} x", "\xff\xfe{}", "{\"a\":\"\xff\"}"}) {
    expect_error(ErrorKind::kInvalidArgument, {"config.json"}, [&] { parse_config(text); });
  }
  expect_error(ErrorKind::kInvalidArgument, {"'hidden_size' appears twice"},
               [] { parse_config(R"({"hidden_size": 1, "hidden_size": 2})"); });
  // The same key in two objects is no duplicate.
  expect_error(ErrorKind::kInvalidArgument, {"'model_type' is missing"}, [] {
    parse_config(R"({"a": {"x": 1}, "b": {"x": 2}, "c": [{"x": 1}, {"x": 1}]})");
  });
  const std::string deep = "{\"a\":" + std::string(100000, '[') + std::string(100000, ']') + "}";
  expect_error(ErrorKind::kInvalidArgument, {"nested", "'a'"}, [&] { parse_config(deep); });
  expect_error(ErrorKind::kInvalidArgument, {"bytes"},
               [] { parse_config(std::string((16 << 20) + 1, ' ')); });
}

TEST(ConfigTest, FilesAreNamedInErrors) {
  const TempDir dir;
  expect_error(ErrorKind::kInvalidArgument, {dir.file("config.json")},
               [&] { load_config(dir.path()); });
  dir.write("config.json", "{}");
  expect_error(ErrorKind::kInvalidArgument, {dir.path(), "model_type"},
               [&] { load_config(dir.path()); });
  const TempDir fifo;
  ASSERT_EQ(::mkfifo(fifo.file("config.json").c_str(), 0600), 0);
  expect_error(ErrorKind::kInvalidArgument, {"not a regular file"},
               [&] { load_config(fifo.path()); });
}

// Any pattern whose first layer is full comes back as it went in, in both of its list spellings.
RC_GTEST_PROP(ConfigProperty, PatternsRoundTrip, (std::vector<bool> shared)) {
  RC_PRE(shared.size() < 200U);
  json config = glm5_json();
  config["num_hidden_layers"] = shared.size() + 1;
  config["first_k_dense_replace"] = 0;
  std::string pattern = "F";
  json types = {"full"};
  for (const bool s : shared) {
    pattern += s ? 'S' : 'F';
    types.push_back(s ? "shared" : "full");
  }
  config["index_topk_pattern"] = pattern;
  config["indexer_types"] = types;
  const ModelConfig c = parse(config);
  for (std::size_t i = 0; i < pattern.size(); ++i)
    RC_ASSERT(c.full_indexer[i] == (pattern[i] == 'F'));
}

// Whatever happens to one character, the parser returns or throws its own error.
RC_GTEST_PROP(ConfigProperty, OneChangedByteNeverEscapes, (std::size_t at, char byte)) {
  std::string text = glm52_json().dump();
  text[at % text.size()] = byte;
  try {
    parse_config(text);
  } catch (const Error& e) {
    RC_ASSERT(std::string_view(e.what()).starts_with("config.json: "));
  }
}

}  // namespace
}  // namespace penstock
