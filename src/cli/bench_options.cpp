#include "cli/bench_options.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "penstock/core/error.h"
#include "penstock/core/version.h"

namespace penstock::cli {
namespace {

// Multiply-adds a second of one thread in the operators' plain loops (E4M3 decoded at each use);
// measured 0.15 to 0.4e9 on x86-64 machines. For deciding what is too long, not for reporting.
constexpr double kCpuRate = 2e8;

}  // namespace

void add_bench_options(CLI::App& sub, BenchOptions& options) {
  add_rank_options(sub, options.ranks, 1);
  sub.add_option("--rounds", options.rounds, "Rounds kept; every round runs every variant once")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  sub.add_option("--warm-up", options.warm_up, "Rounds before them that are not kept")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  sub.add_flag("--check", options.check,
               "Compare every variant with the others and with f64; exit code 1 if one is wrong");
  sub.add_flag("--graph", options.graph, "CUDA: replay each variant from a graph");
  sub.add_option("--seed", options.seed, "Of operands and routing")->capture_default_str();
  sub.add_option("--max-minutes", options.max_minutes,
                 "CPU: refuse what is estimated to last longer")
      ->check(CLI::Range(0.01, 1e6))
      ->capture_default_str();
  sub.add_option("--svg", options.svg, "Write a plot of the speed-up to this file");
  sub.add_option("--trace", options.trace,
                 "Write the timeline of a call of the last size to this file (moe-stage2: CPU "
                 "only), in the "
                 "trace-event format that "
                 "ui.perfetto.dev opens");
  sub.add_option("--commit", options.commit, "Commit to write into the JSON lines")
      ->capture_default_str();
}

void refuse_for_cpu(const BenchOptions& options) {
  if (options.graph) {
    throw UsageError(
        "--graph: the CPU back end launches nothing that a graph could hold; use --backend cuda");
  }
}

void refuse_for_cuda(const BenchOptions& options) {
  if (!options.trace.empty()) {
    throw UsageError(
        "--trace: the CUDA operators keep no timeline; use --backend cpu, or a profiler");
  }
}

void refuse_long_cpu_run(const BenchOptions& options, double multiply_adds, int ranks) {
  if (!std::isfinite(options.max_minutes)) {
    throw UsageError(
        fmt::format("--max-minutes {}: give a number from 0.01 to 1000000", options.max_minutes));
  }
  const double threads =
      std::max(1u, std::min(std::thread::hardware_concurrency(), static_cast<unsigned>(ranks)));
  const double minutes = multiply_adds / (kCpuRate * threads) / 60.0;
  if (minutes <= options.max_minutes) return;
  throw UsageError(fmt::format(
      "this would take about {:.0f} minutes on {:.0f} CPU threads, more than --max-minutes {:g}: "
      "take --shape tiny, smaller sizes, fewer --rounds, or raise --max-minutes",
      std::ceil(minutes), threads, options.max_minutes));
}

void refuse_large_cpu_run(std::uint64_t bytes) {
  const auto pages = static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES));
  const std::uint64_t memory = pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  require(bytes <= memory, ErrorKind::kResourceExhausted, [&] {
    return fmt::format(
        "the benchmark needs {:.1f} GiB of memory, this machine has {:.1f}: take smaller sizes",
        static_cast<double>(bytes) / (1 << 30), static_cast<double>(memory) / (1 << 30));
  });
}

void write_file(const std::string& path, const std::string& text) {
  OutputFile file(path);
  file.write(text);
  file.close();
}

bench::Json common_keys(const BenchOptions& options, const Ranks& ranks, std::string_view bench) {
  return {{"schema", 1},
          {"bench", bench},
          {"version", version()},
          {"commit", options.commit},
          {"machine", bench::processor_name()},
          {"backend", ranks.gpu_refusal().empty() ? "cuda" : "cpu"},
          {"ranks", ranks.size()},
          {"rank_kind", ranks.kind()},
          {"seed", options.seed}};
}

void add_result(bench::Json& line, const bench::VariantResult& result, bool checked) {
  bench::add_times(line, bench::quantiles(result.us));
  line["moved_bytes"] = result.moved_bytes;
  line["direct_bytes"] = result.direct_bytes;
  if (!checked || !result.variant.same_bits) {
    line["correct"] = nullptr;
    return;
  }
  line["relative_error"] = result.relative_error;
  line["differing_rows"] = result.differing_rows;
  line["correct"] = result.correct;
}

std::string verdict(const bench::VariantResult& result, bool checked) {
  if (!checked || !result.variant.same_bits) return "-";
  return result.correct ? "ok" : "WRONG";
}

}  // namespace penstock::cli
