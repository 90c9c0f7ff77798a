// Decode and prefill of the CPU engine, with their floors.
//
// Floors, per token, each the larger of two terms:
//   decode   bytes: every weight that the token needs in its stored format, the picked latent rows
//            and all index keys (f32 cache), over the rate at which this machine's threads read a
//            buffer of that size over and over
//   prefill  bytes of all weights over the chunk's tokens (small)
//   both     FLOP: two per active weight, 4 (kv_lora + rope/2) per head and pick, 2 index_dim per
//            index head and key, over the rate of multiply-adds in registers
// The decoding of weights (about four instructions for 16 of them) is in neither: it is the price
// of keeping them in eight bits.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/bench/report.h"
#include "cli/bench/rounds.h"
#include "machine_rates.h"
#include "ops/cpu/linear.h"
#include "penstock/core/error.h"
#include "penstock/core/version.h"
#include "penstock/model/engine.h"
#include "penstock/model/inspect.h"
#include "penstock/model/safetensors.h"

namespace penstock {
namespace {

struct Arguments {
  std::string model;
  std::string json;
  std::int64_t context = 512;
  int threads = 0;
  int ranks = 1;
  std::string activations = "f32";
  int samples = 200;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Attention and indexer FLOP of one token at a position, all layers.
double attention_flop(const ModelConfig& c, std::int64_t position) {
  const double picks = static_cast<double>(std::min(c.index_top_k, position + 1));
  const double per_pick = 2.0 * static_cast<double>(c.cache_dim() + c.kv_lora);
  double flop = static_cast<double>(c.layers * c.heads) * picks * per_pick;
  // Where all are picked nobody scores.
  if (position + 1 > c.index_top_k) {
    const auto full = std::count(c.full_indexer.begin(), c.full_indexer.end(), true);
    flop += static_cast<double>(full * c.index_heads * c.index_dim) * 2.0 *
            static_cast<double>(position + 1);
  }
  return flop;
}

// The first greedy golden run of the model's folder, if there is one: -1 none, 0 wrong, 1 right.
int check_golden(Engine& engine, const std::string& model) {
  const std::string path = model + "/golden.safetensors";
  if (!std::filesystem::exists(path)) return -1;
  const SafetensorsFile file(path);
  const TensorView& view = file.at("greedy.0.tokens");
  const std::vector<std::int32_t> want(view.as<std::int32_t>(),
                                       view.as<std::int32_t>() + view.elements());
  constexpr std::size_t kGenerated = 160;
  const SequenceId sequence = engine.create_sequence();
  std::vector<std::int32_t> got(want.begin(), want.end() - kGenerated);
  StepResult result = engine.step({{sequence, got}});
  while (true) {
    const auto row = result.row(0);
    got.push_back(
        static_cast<std::int32_t>(std::max_element(row.begin(), row.end()) - row.begin()));
    if (got.size() == want.size()) break;
    result = engine.step({{sequence, {got.back()}}});
  }
  engine.remove_sequence(sequence);
  return got == want ? 1 : 0;
}

int run(const Arguments& arguments) {
  const Checkpoint checkpoint(arguments.model);
  const ModelConfig& c = checkpoint.config();
  EngineOptions options;
  options.ranks = arguments.ranks;
  options.threads = arguments.threads;
  options.activations =
      arguments.activations == "fp8" ? ActivationFormat::kFp8 : ActivationFormat::kF32;
  options.max_context = std::min(c.max_positions, arguments.context + 512);
  Engine engine(checkpoint, options);
  const int threads = engine.options().threads * engine.options().ranks;
  const int golden = check_golden(engine, arguments.model);

  // Text-like tokens without a text: any will do, their experts are spread.
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(arguments.context));
  std::uint64_t state = 1;
  for (std::int32_t& token : tokens) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    token = static_cast<std::int32_t>((state >> 33) % static_cast<std::uint64_t>(c.vocab));
  }

  std::vector<double> prefill;
  SequenceId sequence = -1;
  for (int i = 0; i < std::max(5, arguments.samples / 20); ++i) {
    if (sequence >= 0) engine.remove_sequence(sequence);
    sequence = engine.create_sequence();
    const auto start = std::chrono::steady_clock::now();
    engine.step({{sequence, tokens}});
    prefill.push_back(seconds_since(start) / static_cast<double>(tokens.size()));
  }
  std::vector<double> decode;
  for (int i = 0; i < arguments.samples; ++i) {
    const std::int32_t token = tokens[static_cast<std::size_t>(i) % tokens.size()];
    const auto start = std::chrono::steady_clock::now();
    engine.step({{sequence, {token}}});
    decode.push_back(seconds_since(start));
    engine.truncate(sequence, arguments.context);
  }

  ThreadPool pool(threads);
  DecodeShape shape;
  shape.context = arguments.context + 1;
  shape.kv = KvFormat::kBf16;
  DecodeBytes bytes = decode_floor(checkpoint, shape).step;
  bytes[DecodePart::kKv] *= 2.0;  // f32 rows
  bytes[DecodePart::kIndexCache] *=
      static_cast<double>(c.index_dim * 4) / static_cast<double>(index_row_bytes(c));
  const double read = bench::read_rate(pool, static_cast<std::int64_t>(bytes.total()));
  const double fma = bench::fma_rate(pool);
  const double active = 2.0 * static_cast<double>(count_parameters(c).active);
  double flop = 0.0;
  for (std::int64_t p = 0; p < arguments.context; ++p) flop += attention_flop(c, p);
  const double prefill_flop = active + flop / static_cast<double>(arguments.context);
  const double decode_flop = active + attention_flop(c, arguments.context);
  const double weights = static_cast<double>(summarise(checkpoint).bytes);
  const double chunk = static_cast<double>(std::min(engine.options().max_rows, arguments.context));

  std::ofstream json;
  if (!arguments.json.empty()) {
    json.open(arguments.json);
    require(json.good(), ErrorKind::kBackend,
            [&] { return fmt::format("cannot write {}", arguments.json); });
  }
  fmt::print("{} | {} | {} threads, {} ranks, activations {}\n", bench::processor_name(),
             cpu::simd_name(), threads, engine.options().ranks, arguments.activations);
  fmt::print("reads {:.1f} GB/s out of {:.1f} MB, multiply-adds {:.0f} GFLOP/s\n", read / 1e9,
             bytes.total() / 1e6, fma / 1e9);
  fmt::print("golden greedy run: {}\n\n", golden < 0   ? "none beside the model"
                                          : golden > 0 ? "equal"
                                                       : "DIFFERENT");
  fmt::print("{:<8} {:>9} {:>9} {:>24} {:>10} {:>10} {:>9} {:>9}\n", "", "tokens/s", "best",
             "us/token p10, 50, 90", "MB/token", "MFLOP", "floor us", "of floor");
  const auto report = [&](const char* name, const std::vector<double>& samples, double token_bytes,
                          double token_flop) {
    bench::Quantiles q = bench::quantiles(samples);  // seconds
    for (double* value : {&q.p10_us, &q.median_us, &q.p90_us, &q.least_us}) *value *= 1e6;
    const double byte_floor = token_bytes / read;
    const double flop_floor = token_flop / fma;
    const double floor = std::max(byte_floor, flop_floor);
    fmt::print("{:<8} {:>9.0f} {:>9.0f} {:>24} {:>10.2f} {:>10.1f} {:>9.1f} {:>8.1f}%\n", name,
               1e6 / q.median_us, 1e6 / q.least_us,
               fmt::format("{:.0f}, {:.0f}, {:.0f}", q.p10_us, q.median_us, q.p90_us),
               token_bytes / 1e6, token_flop / 1e6, floor * 1e6, 100.0 * floor * 1e6 / q.median_us);
    if (!json.is_open()) return;
    const nlohmann::json line = {
        {"bench", std::string("engine.") + name},
        {"version", version()},
        {"machine", bench::processor_name()},
        {"simd", cpu::simd_name()},
        {"model", arguments.model},
        {"context", arguments.context},
        {"ranks", engine.options().ranks},
        {"threads", threads},
        {"activations", arguments.activations},
        {"method", "wall clock of Engine::step per token"},
        {"samples", samples.size()},
        {"median_us", q.median_us},
        {"p10_us", q.p10_us},
        {"p90_us", q.p90_us},
        {"best_us", q.least_us},
        {"tokens_per_s", 1e6 / q.median_us},
        {"bytes", token_bytes},
        {"flop", token_flop},
        {"read_gb_per_s", read / 1e9},
        {"fma_gflop_per_s", fma / 1e9},
        {"floor_bytes_us", byte_floor * 1e6},
        {"floor_flop_us", flop_floor * 1e6},
        {"fraction_of_floor", floor * 1e6 / q.median_us},
        {"seed", 1},
        {"golden", golden < 0 ? nlohmann::json(nullptr) : nlohmann::json(golden > 0)}};
    json << line.dump() << '\n';
  };
  report("decode", decode, bytes.total(), decode_flop);
  report("prefill", prefill, weights / chunk, prefill_flop);
  return golden == 0 ? 1 : 0;
}

}  // namespace
}  // namespace penstock

int main(int argc, char** argv) {
  penstock::Arguments arguments;
  CLI::App app("Decode and prefill speed of the CPU engine, beside what the machine allows");
  app.add_option("model", arguments.model, "checkpoint directory")->required();
  app.add_option("--json", arguments.json, "write JSON lines to this file");
  app.add_option("--context", arguments.context, "tokens in the cache")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--threads", arguments.threads, "of one rank; 0: all hardware threads / ranks")
      ->check(CLI::Range(0, 1024));
  app.add_option("--ranks", arguments.ranks, "tensor-parallel ranks")
      ->check(CLI::IsMember({1, 2, 4, 8}));
  app.add_option("--activations", arguments.activations)->check(CLI::IsMember({"f32", "fp8"}));
  app.add_option("--samples", arguments.samples, "decode steps timed")
      ->check(CLI::Range(10, 1000000));
  CLI11_PARSE(app, argc, argv);
  try {
    return penstock::run(arguments);
  } catch (const std::exception& error) {
    fmt::print(stderr, "penstock_engine_bench: {}\n", error.what());
    return 1;
  }
}
