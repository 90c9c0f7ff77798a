// penstock info: geometry, sizes, cache bytes and the floor of a decode step.
#include <fmt/format.h>

#include <filesystem>
#include <optional>

#include "cli/command.h"
#include "penstock/model/checkpoint.h"
#include "penstock/model/config.h"
#include "penstock/model/inspect.h"

namespace penstock::cli {
namespace {

struct Options {
  std::string model;
  DecodeShape shape;
  std::string kv = "fp8_scaled";
  double bandwidth = 4484.0;  // GB/s, a measured copy on one H200
};

KvFormat parse_kv(const std::string& text) {
  if (text == "bf16") return KvFormat::kBf16;
  if (text == "fp8_plain") return KvFormat::kFp8Plain;
  return KvFormat::kFp8Scaled;
}

// A directory with a config.json alone is worth describing too.
bool holds_weights(const std::string& directory) {
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().extension() == ".safetensors") return true;
    if (entry.path().filename() == "model.safetensors.index.json") return true;
  }
  return false;
}

struct Facts {
  ModelConfig config;
  ParameterCount parameters;
  std::optional<CheckpointSummary> summary;  // none without weights
  DecodeFloor floor;
  double bandwidth = 0.0;
};

Facts collect(const Options& options) {
  Facts facts;
  facts.bandwidth = options.bandwidth;
  DecodeShape shape = options.shape;
  shape.kv = parse_kv(options.kv);
  if (holds_weights(options.model)) {
    const Checkpoint checkpoint(options.model);
    facts.config = checkpoint.config();
    facts.summary = summarise(checkpoint);
    facts.parameters = facts.summary->parameters;
    facts.floor = decode_floor(checkpoint, shape);
  } else {
    facts.config = load_config(options.model);
    facts.parameters = count_parameters(facts.config);
    facts.floor = decode_floor(facts.config, WeightFormats{}, shape);
  }
  return facts;
}

Json groups_json(const std::vector<StorageGroup>& groups) {
  Json out = Json::array();
  for (const StorageGroup& g : groups) {
    out.push_back({{"name", g.name},
                   {"tensors", g.tensors},
                   {"parameters", g.parameters},
                   {"bytes", g.bytes}});
  }
  return out;
}

std::int64_t count(const std::vector<bool>& flags) {
  std::int64_t n = 0;
  for (const bool flag : flags) n += flag ? 1 : 0;
  return n;
}

void print_document(const Options& options, const Facts& facts) {
  const ModelConfig& c = facts.config;
  const DecodeFloor& floor = facts.floor;
  Json parts;
  for (int i = 0; i < kDecodeParts; ++i) {
    const auto part = static_cast<DecodePart>(i);
    parts[std::string(to_string(part))] = floor.step[part];
  }
  Json kv;
  for (const KvFormat format : {KvFormat::kBf16, KvFormat::kFp8Scaled, KvFormat::kFp8Plain}) {
    if (format == KvFormat::kFp8Scaled && c.kv_lora % 128 != 0) continue;
    kv[std::string(to_string(format))] = {{"row_bytes", kv_row_bytes(c, format)},
                                          {"bytes_per_token", cache_bytes_per_token(c, format)}};
  }
  Json out{
      {"model", options.model},
      {"geometry",
       {{"hidden", c.hidden},
        {"layers", c.layers},
        {"moe_layers", count(c.sparse_mlp)},
        {"indexer_layers", count(c.full_indexer)},
        {"vocab", c.vocab},
        {"heads", c.heads},
        {"q_lora", c.q_lora},
        {"kv_lora", c.kv_lora},
        {"nope", c.nope},
        {"rope", c.rope},
        {"v", c.v_dim},
        {"dense_intermediate", c.dense_intermediate},
        {"expert_intermediate", c.expert_intermediate},
        {"experts", c.experts},
        {"shared_experts", c.shared_experts},
        {"top_k", c.top_k},
        {"index_heads", c.index_heads},
        {"index_dim", c.index_dim},
        {"index_top_k", c.index_top_k},
        {"rope_theta", c.rope_theta},
        {"max_positions", c.max_positions}}},
      {"parameters", {{"total", facts.parameters.total}, {"active", facts.parameters.active}}}};
  if (facts.summary) {
    out["weights"] = {{"bytes", facts.summary->bytes},
                      {"by_format", groups_json(facts.summary->by_format)},
                      {"by_purpose", groups_json(facts.summary->by_purpose)},
                      {"mtp_bytes", facts.summary->mtp_bytes},
                      {"surplus_bytes", facts.summary->surplus_bytes}};
  } else {
    out["weights"] = nullptr;
  }
  out["kv_cache"] = kv;
  out["unknown_keys"] = c.unknown_keys;
  out["decode_step"] = {{"ranks", floor.shape.ranks},
                        {"rows", floor.shape.rows},
                        {"context", floor.shape.context},
                        {"kv_format", to_string(floor.shape.kv)},
                        {"assumed_formats", !facts.summary.has_value()},
                        {"distinct_experts", floor.distinct_experts},
                        {"bytes_per_rank", parts},
                        {"total_bytes_per_rank", floor.step.total()},
                        {"bandwidth_gb_per_s", facts.bandwidth},
                        {"floor_us", floor_us(floor.step.total(), facts.bandwidth)}};
  print_json(out);
}

void print_text(const Options& options, const Facts& facts) {
  const ModelConfig& c = facts.config;
  std::string text = fmt::format(
      "{}\n"
      "geometry    hidden {}, layers {} ({} MoE, {} with indexer), vocabulary {}, context {}\n"
      "attention   heads {}, q_lora {}, kv_lora {}, nope {}, rope {}, v {}, rope theta {:g}\n"
      "indexer     heads {} x {}, top-k {}\n"
      "experts     {} + {} shared, top-{}, intermediate {} (dense {})\n"
      "parameters  {} in all, {} active per token\n",
      options.model, c.hidden, c.layers, count(c.sparse_mlp), count(c.full_indexer), c.vocab,
      c.max_positions, c.heads, c.q_lora, c.kv_lora, c.nope, c.rope, c.v_dim, c.rope_theta,
      c.index_heads, c.index_dim, c.index_top_k, c.experts, c.shared_experts, c.top_k,
      c.expert_intermediate, c.dense_intermediate, facts.parameters.total, facts.parameters.active);
  if (facts.summary) {
    text +=
        fmt::format("\n{:<16} {:>8} {:>16} {:>16}\n", "weights", "tensors", "parameters", "bytes");
    const auto table = [&](const std::vector<StorageGroup>& groups) {
      for (const StorageGroup& g : groups) {
        text +=
            fmt::format("  {:<14} {:>8} {:>16} {:>16}\n", g.name, g.tensors, g.parameters, g.bytes);
      }
    };
    table(facts.summary->by_format);
    text += "by purpose\n";
    table(facts.summary->by_purpose);
    if (facts.summary->mtp_bytes > 0) {
      text += fmt::format("  not run: MTP layer, {} bytes\n", facts.summary->mtp_bytes);
    }
    if (facts.summary->surplus_bytes > 0) {
      text += fmt::format("  not read: {} bytes\n", facts.summary->surplus_bytes);
    }
  } else {
    text += "\nno weights here; below, matrices are taken as FP8 with 128x128 blocks\n";
  }

  text += fmt::format("\n{:<16} {:>8} {:>16}\n", "cache", "row", "bytes per token");
  for (const KvFormat format : {KvFormat::kBf16, KvFormat::kFp8Scaled, KvFormat::kFp8Plain}) {
    if (format == KvFormat::kFp8Scaled && c.kv_lora % 128 != 0) continue;
    text += fmt::format("  {:<14} {:>8} {:>16}\n", to_string(format), kv_row_bytes(c, format),
                        cache_bytes_per_token(c, format));
  }

  const DecodeFloor& floor = facts.floor;
  text += fmt::format(
      "\none decode step: tensor-parallel {}, rows {}, context {}, cache {}; expected distinct "
      "experts {:.1f}\n{:<16} {:>16} {:>12}\n",
      floor.shape.ranks, floor.shape.rows, floor.shape.context, to_string(floor.shape.kv),
      floor.distinct_experts, "part", "bytes per rank", "us");
  const auto line = [&](std::string_view name, double bytes) {
    text += fmt::format("  {:<14} {:>16.0f} {:>12.3f}\n", name, bytes,
                        floor_us(bytes, facts.bandwidth));
  };
  for (int i = 0; i < kDecodeParts; ++i) {
    const auto part = static_cast<DecodePart>(i);
    line(to_string(part), floor.step[part]);
  }
  line("total", floor.step.total());
  text += fmt::format("floor at {:g} GB/s: {:.1f} us\n", facts.bandwidth,
                      floor_us(floor.step.total(), facts.bandwidth));
  write_stdout(text);
}

int run(const Options& options, const Command& command) {
  const Facts facts = collect(options);
  if (command.json) {
    print_document(options, facts);
  } else {
    print_text(options, facts);
  }
  return kExitOk;
}

}  // namespace

void add_info(CLI::App& app, Command& command) {
  const auto options = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand(
      "info", "Describe a checkpoint: geometry, bytes, cache, the floor of a decode step");
  sub->footer(
      "The floor is the time to read, once, the bytes that a step cannot avoid; activations and "
      "the "
      "all-reduce are not in it. A directory that holds config.json alone is described without "
      "weights.");
  sub->add_option("MODEL", options->model, "Checkpoint directory")
      ->required()
      ->check(CLI::ExistingDirectory);
  sub->add_option("--tp", options->shape.ranks, "Tensor-parallel ranks")
      ->check(CLI::Range(1, 1024))
      ->type_name("N")
      ->capture_default_str();
  sub->add_option("--rows", options->shape.rows, "Tokens in the step, each of its own request")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
      ->type_name("S")
      ->capture_default_str();
  sub->add_option("--context", options->shape.context, "Cached tokens of each request")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40))
      ->type_name("N")
      ->capture_default_str();
  sub->add_option("--kv", options->kv, "How cache rows are stored")
      ->check(CLI::IsMember({"bf16", "fp8_scaled", "fp8_plain"}))
      ->capture_default_str();
  sub->add_option("--bandwidth", options->bandwidth,
                  "Memory bandwidth of one rank in GB/s (default: measured on one H200)")
      ->check(CLI::PositiveNumber)
      ->type_name("GB/s")
      ->capture_default_str();
  bind(*sub, command, [options, &command] { return run(*options, command); });
}

}  // namespace penstock::cli
