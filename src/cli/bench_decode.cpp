// penstock bench decode: us a layer of decode_layer beside its floor and a chain of separate
// kernels; penstock trace decode: the kernel's timeline.
#include <fmt/format.h>

#include <algorithm>

#include "cli/bench/decode_cpu.h"
#include "cli/bench/decode_report.h"
#include "cli/bench_options.h"
#include "cli/command.h"
#include "fabric/gpu.h"
#include "penstock/core/error.h"
#include "penstock/core/version.h"

namespace penstock::cli {
namespace {

// Shards round their partial sums to bf16: relative L2 of a row against the whole layer.
constexpr double kShardBound = 5e-3;

struct Options {
  std::string shape = "glm5";
  std::string backend = "auto";
  int tp = 0;    // 0: the most that the shape allows
  int gpus = 0;  // 0: all that are there
  std::vector<int> rows = {1, 2, 4, 8, 16};
  int context = 8192;
  int picks = 0;
  int layers = 0;
  int sets = 3;
  int samples = 0;
  int sm_budget = 0;
  bool check = false, no_chain = false, stages = false;
  double max_minutes = 10.0;
  std::string commit = "unknown";
  std::string out;  // of trace
};

// The largest number of ranks that can share a layer.
int most_ranks(decode::DecodeShape shape) {
  for (shape.ranks = decode::kMaxRanks; shape.ranks > 1; shape.ranks /= 2) {
    try {
      decode::validate(shape);
      break;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kUnsupported) throw;
    }
  }
  return shape.ranks;
}

decode::DecodeShape shape_of(const Options& options) {
  decode::DecodeShape s;
  if (options.shape == "tiny-glm") {
    s.hidden = 256;
    s.q_lora = 128;
    s.heads = 8;
    s.experts = 16;
    s.top_k = 4;
    s.intermediate = 256;
    s.rope_theta = 1e4;
  }
  s.rows = *std::max_element(options.rows.begin(), options.rows.end());
  s.ranks = options.tp > 0 ? options.tp : most_ranks(s);
  decode::validate(s);
  return s;
}

int picks_of(const Options& options) {
  return options.picks > 0 ? options.picks : std::min(decode::kMaxPicks, options.context);
}

// Whether GPUs run it. Throws Unsupported with the reason if they are demanded and not there.
bool on_gpu(const Options& options) {
  if (options.backend == "cpu") return false;
  const std::string refusal = gpu_unavailable();
  require(refusal.empty() || options.backend == "auto", ErrorKind::kUnsupported,
          [&] { return fmt::format("--backend cuda: {}", refusal); });
  return refusal.empty();
}

decode::DecodeBenchOptions gpu_options(const Options& options) {
  decode::DecodeBenchOptions o;
  o.shape = shape_of(options);
  o.layers = options.layers > 0 ? options.layers : 76;
  o.sets = std::min(options.sets, o.layers);
  o.picks = picks_of(options);
  o.context = options.context;
  o.samples = options.samples > 0 ? options.samples : 15;
  o.sm_budget = options.sm_budget;
  o.gpus = options.gpus;
  const auto there = static_cast<int>(describe_gpus().cards.size());
  if (options.gpus == 0) {
    o.gpus = 1;
    while (o.gpus * 2 <= std::min(there, o.shape.ranks)) o.gpus *= 2;
    if (options.stages) o.gpus = 1;
  }
  o.chain = !options.no_chain;
  o.check = options.check;
  o.timeline = options.stages;
  return o;
}

int run_gpu(const Options& options, const Command& command) {
  const decode::DecodeBenchOptions o = gpu_options(options);
  const GpuMachine machine = describe_gpus();
  const GpuCard& card = machine.cards.at(static_cast<std::size_t>(o.device));
  bench::JsonLines lines({{"commit", options.commit},
                          {"machine", card.name},
                          {"driver", machine.driver},
                          {"sm_clock_mhz", card.sm_clock_mhz}});
  const auto benchmark = decode::make_gpu_decode_bench(o);
  std::vector<decode::DecodeBenchPoint> points;
  for (const int rows : options.rows) {
    points.push_back(benchmark->run(rows));
    lines.add(bench::decode_line(o, points.back()));
  }
  write_stdout(command.json ? lines.text() : bench::decode_table(o, points));
  return std::any_of(points.begin(), points.end(), bench::decode_wrong) ? kExitFault : kExitOk;
}

int run_cpu(const Options& options, const Command& command) {
  bench::DecodeCpuOptions o;
  o.shape = shape_of(options);
  o.layers = options.layers > 0 ? options.layers : 1;
  o.picks = picks_of(options);
  o.context = options.context;
  o.samples = options.samples > 0 ? options.samples : 3;
  o.check = options.check;
  if (options.stages) {
    throw UsageError("--stages: the timeline is the kernel's; use --backend cuda");
  }
  double rows = 0;
  for (const int r : options.rows) rows += r;
  BenchOptions limits;
  limits.max_minutes = options.max_minutes;
  const double runs = o.layers * static_cast<double>(o.samples) + (o.check ? 2.0 : 0.0);
  refuse_long_cpu_run(limits, bench::DecodeCpuBench::multiply_adds(o) * rows * runs, 1);
  bench::DecodeCpuBench benchmark(o);
  bench::JsonLines lines({{"schema", 1},
                          {"bench", "decode_layer"},
                          {"version", version()},
                          {"commit", options.commit},
                          {"machine", bench::processor_name()},
                          {"backend", "cpu"},
                          {"shape", decode::describe(o.shape)},
                          {"ranks", o.shape.ranks},
                          {"picks", o.picks},
                          {"context", o.context},
                          {"layers", o.layers},
                          {"method", "all ranks on the calling thread; us a layer"}});
  bench::Table table({"rows", "us a layer", "p10", "p90", "shards against one"});
  bool wrong = false;
  for (const int count : options.rows) {
    const bench::DecodeCpuPoint point = benchmark.run(count);
    const bench::Quantiles q = bench::quantiles(point.us);
    bench::Json line = {{"rows", count}};
    bench::add_times(line, q);
    const bool bad = point.check_error >= 0 && !(point.check_error <= kShardBound);
    wrong = wrong || bad;
    if (point.check_error >= 0) {
      line["worst_row_error"] = point.check_error;
      line["correct"] = !bad;
    }
    lines.add(line);
    table.add({fmt::format("{}", count), fmt::format("{:.0f}", q.median_us),
               fmt::format("{:.0f}", q.p10_us), fmt::format("{:.0f}", q.p90_us),
               point.check_error < 0
                   ? "-"
                   : fmt::format("{} {:.1e}", bad ? "WRONG" : "ok", point.check_error)});
  }
  write_stdout(command.json ? lines.text()
                            : fmt::format("{}, CPU operator, all ranks on one thread\n{}",
                                          decode::describe(o.shape), table.text()));
  return wrong ? kExitFault : kExitOk;
}

int run(const Options& options, const Command& command) {
  return on_gpu(options) ? run_gpu(options, command) : run_cpu(options, command);
}

int run_trace(Options options, const Command& command) {
  options.backend = "cuda";
  on_gpu(options);
  options.stages = options.no_chain = true;
  decode::DecodeBenchOptions o = gpu_options(options);
  o.samples = 1;
  const decode::DecodeBenchPoint point =
      decode::make_gpu_decode_bench(o)->run(options.rows.front());
  write_file(options.out, bench::decode_trace(o, point).text());
  if (command.json) {
    write_stdout(bench::decode_line(o, point).dump() + "\n");
  } else {
    write_stdout(bench::decode_table(o, std::span(&point, 1)));
  }
  return kExitOk;
}

void add_shape_options(CLI::App& sub, Options& options) {
  sub.add_option("--shape", options.shape, "The layer's sizes")
      ->check(CLI::IsMember({"glm5", "tiny-glm"}))
      ->capture_default_str();
  sub.add_option(
         "--tp", options.tp,
         "Tensor-parallel ranks; default the most that the shape allows (glm5: 8, tiny-glm: "
         "4). A GPU runs one rank's shard, its all-reduces exchange the packets of all "
         "ranks with itself")
      ->check(CLI::IsMember({1, 2, 4, 8}));
  sub.add_option("--context", options.context, "Cache slots of a row, a multiple of 64")
      ->check(CLI::Range(64, 1 << 20))
      ->capture_default_str();
  sub.add_option("--picks", options.picks, "Slots a row attends to; default 2048, or the context")
      ->check(CLI::Range(1, decode::kMaxPicks));
  sub.add_option("--layers", options.layers, "Layers a replay; default 76, on the CPU 1")
      ->check(CLI::Range(1, 1000));
  sub.add_option("--sets", options.sets,
                 "GPU: distinct sets of weights, used in turn, so that none is in L2")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  sub.add_option(
         "--gpus", options.gpus,
         "GPU: shards that run at once, with all-reduces between them, one a GPU; more than "
         "there are GPUs share them; default all GPUs, 1 with --stages")
      ->check(CLI::IsMember({1, 2, 4, 8}));
  sub.add_option("--sm-budget", options.sm_budget, "GPU: multiprocessors to use; 0: all")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
}

}  // namespace

void add_bench_decode(CLI::App& bench, Command& command) {
  const auto options = std::make_shared<Options>();
  CLI::App* sub = bench.add_subcommand("decode", "A decoder layer as one launch");
  sub->footer(
      "On a GPU: us a layer from CUDA graphs of all layers, one launch a layer and one launch for "
      "all, beside the bytes that a layer must read at 4484 GB/s and beside a chain of separate "
      "kernels, one a stage, in a graph of its own. --check compares every row with the chain's. "
      "On "
      "the CPU: the CPU operator; --check compares its shards with the whole layer.");
  add_shape_options(*sub, *options);
  sub->add_option("--rows", options->rows, "Row counts, separated by commas")
      ->delimiter(',')
      ->check(CLI::Range(1, decode::kMaxRows))
      ->capture_default_str();
  sub->add_option("--backend", options->backend, "cpu, cuda, or auto: a GPU if there is one")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  sub->add_option("--samples", options->samples, "Replays kept; default 15, on the CPU 3")
      ->check(CLI::Range(1, 100000));
  sub->add_flag("--check", options->check, "Compare results; exit code 1 if a row is wrong");
  sub->add_flag("--no-chain", options->no_chain, "GPU: leave the chain of separate kernels out");
  sub->add_flag("--stages", options->stages, "GPU: time per stage, from the kernel's timeline");
  sub->add_option("--max-minutes", options->max_minutes,
                  "CPU: refuse what is estimated to last longer")
      ->check(CLI::Range(0.01, 1e6))
      ->capture_default_str();
  sub->add_option("--commit", options->commit, "Commit to write into the JSON lines")
      ->capture_default_str();
  bind(*sub, command, [options, &command] { return run(*options, command); });
}

void add_trace(CLI::App& app, Command& command) {
  CLI::App* trace = app.add_subcommand("trace", "Write a timeline that ui.perfetto.dev opens");
  trace->require_subcommand(1);
  const auto options = std::make_shared<Options>();
  options->rows = {1};
  options->layers = 4;
  CLI::App* sub = trace->add_subcommand(
      "decode", "The decode_layer kernel's stages, one track a CTA (needs a GPU)");
  add_shape_options(*sub, *options);
  sub->add_option("--rows", options->rows, "Rows")
      ->expected(1)
      ->check(CLI::Range(1, decode::kMaxRows))
      ->capture_default_str();
  sub->add_option("-o,--output", options->out, "File to write")->required();
  bind(*sub, command, [options, &command] { return run_trace(*options, command); });
}

}  // namespace penstock::cli
