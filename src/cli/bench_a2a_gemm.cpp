// penstock bench a2a-gemm: the gated GEMM on each transport beside the same work unfused and beside
// the GEMM alone, in interleaved rounds.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "cli/bench/a2a_contest.h"
#include "cli/bench/plot.h"
#include "cli/bench_options.h"
#include "fabric/gpu.h"
#include "penstock/core/error.h"

namespace penstock::cli {
namespace {

using a2a_gemm::Format;
using a2a_gemm::Shape;

struct Options {
  BenchOptions common;
  std::optional<std::int32_t> hidden;
  std::vector<std::int32_t> sequences;
  std::string format = "bf16";
  std::int32_t row_block_rows = 0;
  bool mirror = false;
  std::string nccl = a2a_gemm::BenchOptions{}.nccl;
  std::string cublaslt;
};

// One sequence length and what was measured there.
struct Point {
  Shape shape;
  std::int32_t sequence = 0;
  bool mirror = false;
  a2a_gemm::Config config;  // rank 0's, as the heuristics choose
  std::vector<bench::VariantResult> results{};
  bench::Json facts = bench::Json::object();  // what only one back end knows
};

double median(const bench::VariantResult& result) { return bench::quantiles(result.us).median_us; }
// 0 where the variant was not measured.
double median_of(const Point& point, std::string_view name) {
  for (const bench::VariantResult& r : point.results) {
    if (r.variant.name == name) return median(r);
  }
  return 0.0;
}
// The unfused form's time over the fused one's, both by copy engine; 0 if one is missing.
double fusing_gain(const Point& point) {
  const double fused = median_of(point, "copy_engine");
  return fused > 0.0 ? median_of(point, bench::kA2aUnfused) / fused : 0.0;
}
// What speed-ups are against: NCCL and the library's GEMM where they are there, else the operator
// unfused.
std::string_view baseline(const Point& point) {
  for (const std::string_view name : {"nccl_cublaslt", "nccl"}) {
    if (median_of(point, name) > 0.0) return name;
  }
  return bench::kA2aUnfused;
}
// Of one rank's GEMM.
std::int64_t columns_of(const Point& point) {
  return std::int64_t{point.shape.columns} * (point.mirror ? point.shape.ranks : 1);
}
std::int64_t depth_of(const Point& point) {
  return std::int64_t{point.shape.depth} * (point.mirror ? 1 : point.shape.ranks);
}
double flop_of(const Point& point) {
  double most = 0.0;
  for (int rank = 0; rank < point.shape.ranks; ++rank)
    most = std::max(most, flop(point.shape, rank));
  return most;
}

bench::A2aProblem problem_of(const Options& options, std::int32_t hidden, int ranks,
                             std::int32_t sequence) {
  if (hidden % ranks != 0 || sequence % ranks != 0) {
    throw UsageError(fmt::format("--hidden {} and --seq {} have to be multiples of --ranks {}",
                                 hidden, sequence, ranks));
  }
  bench::A2aProblem problem;
  problem.seed = options.common.seed;
  problem.row_block_rows = options.row_block_rows;
  problem.mirror = options.mirror;
  // a2a_gemm: K is a rank's share of hidden and N all of it; the mirror the other way round.
  const std::int32_t share = hidden / ranks;
  problem.shape = a2a_gemm::even_shape(ranks, sequence / ranks, options.mirror ? hidden : share,
                                       options.mirror ? share : hidden,
                                       options.format == "fp8" ? Format::kFp8 : Format::kBf16);
  if (const std::string fault = find_fault(problem.shape); !fault.empty()) {
    throw UsageError(fault);
  }
  return problem;
}

void refuse_for_cpu(const Options& options, const std::vector<bench::A2aProblem>& problems) {
  refuse_for_cpu(options.common);
  constexpr double kMultiplying = 6;  // variants
  const double calls =
      options.common.warm_up + options.common.rounds + (options.common.check ? 1 : 0);
  double work = 0.0;
  std::uint64_t bytes = 0;
  for (const bench::A2aProblem& problem : problems) {
    for (int rank = 0; rank < problem.shape.ranks; ++rank) {
      work += flop(problem.shape, rank) / 2 * calls * kMultiplying;
    }
    bytes = std::max(
        bytes, cpu_a2a_contest_bytes(problem) * static_cast<std::uint64_t>(problem.shape.ranks));
  }
  refuse_long_cpu_run(options.common, work, problems.front().shape.ranks);
  refuse_large_cpu_run(bytes);
}

bench::Json line_of(const Options& options, const Point& point, const bench::VariantResult& r) {
  const Shape& s = point.shape;
  const double us = median(r);
  const double alone = median_of(point, bench::kA2aGemmAlone);
  const double unfused = median_of(point, baseline(point));
  bench::Json line = {{"format", options.format},
                      {"mirror", point.mirror},
                      {"hidden", columns_of(point)},
                      {"sequence", point.sequence},
                      {"m", s.rows[0]},
                      {"n", columns_of(point)},
                      {"k", depth_of(point)},
                      {"row_block_rows", point.config.row_block_rows},
                      {"band", point.config.band},
                      {"auto_fuses", point.config.fuse},
                      {"fusing_gain", fusing_gain(point)},
                      {"graph", options.common.graph},
                      {"variant", r.variant.name}};
  line.update(point.facts);
  add_result(line, r, options.common.check);
  line["flop"] = flop_of(point);
  line["tflops"] = flop_of(point) / us * 1e-6;
  if (r.variant.whole) {
    line["wire_gb_per_s"] = (r.moved_bytes + r.direct_bytes) / us * 1e-3;
    line["gemm_alone_us"] = alone;
    line["exposed_us"] = us - alone;
    line["over_gemm"] = us / alone;
    line["baseline"] = baseline(point);
    line["speedup_over_baseline"] = unfused / us;
  }
  return line;
}

std::string table(const Options& options, const Ranks& ranks, std::string_view machine,
                  const std::vector<Point>& points) {
  std::string text = fmt::format(
      "{}, {} ranks ({}) on {}; hidden {}, {}{}\nmedians of {} interleaved rounds, the "
      "slowest rank of each; exposed: beyond the GEMM alone\n",
      options.mirror ? "gemm_a2a" : "a2a_gemm", ranks.size(), ranks.kind(), machine,
      columns_of(points.front()), options.format, options.common.graph ? ", graph" : "",
      options.common.rounds);
  for (const Point& point : points) {
    const Shape& s = point.shape;
    text += fmt::format("\nsequence {}: M {} N {} K {}, row blocks of {}; the heuristics {}\n",
                        point.sequence, s.rows[0], columns_of(point), depth_of(point),
                        point.config.row_block_rows, point.config.fuse ? "fuse" : "do not fuse");
    const double alone = median_of(point, bench::kA2aGemmAlone);
    const double unfused = median_of(point, baseline(point));
    bench::Table rows({"variant", "us", "p10", "p90", "TFLOPS", "wire GB/s", "exposed us", "x gemm",
                       fmt::format("x {}", baseline(point)), "check"});
    for (const bench::VariantResult& r : point.results) {
      const bench::Quantiles t = bench::quantiles(r.us);
      const bool whole = r.variant.whole;
      const auto number = [&](bool there, double value, int digits) {
        return there ? fmt::format("{:.{}f}", value, digits) : std::string("-");
      };
      rows.add({r.variant.name, fmt::format("{:.1f}", t.median_us), fmt::format("{:.1f}", t.p10_us),
                fmt::format("{:.1f}", t.p90_us),
                fmt::format("{:.4g}", flop_of(point) / t.median_us * 1e-6),
                number(whole, (r.moved_bytes + r.direct_bytes) / t.median_us * 1e-3, 3),
                number(whole, t.median_us - alone, 1), number(whole, t.median_us / alone, 3),
                number(whole && unfused > 0, unfused / t.median_us, 3),
                verdict(r, options.common.check)});
    }
    text += rows.text();
    if (const std::string left_out = point.facts.value("left_out", ""); !left_out.empty()) {
      text += fmt::format("left out: {}\n", left_out);
    }
    if (const double gain = fusing_gain(point); gain > 0.0) {
      text += fmt::format("fusing {} here: unfused takes {:.3f} of its time; auto {}\n",
                          gain > 1.0 ? "pays" : "does not pay", gain,
                          point.config.fuse ? "fuses" : "does not fuse");
    }
  }
  return text;
}

std::string plot(const Options& options, std::string_view machine,
                 const std::vector<Point>& points) {
  std::vector<bench::PlotSeries> series;
  for (const Point& point : points) {
    const double unfused = median_of(point, baseline(point));
    for (const bench::VariantResult& r : point.results) {
      if (r.variant.name == baseline(point)) continue;
      bench::series_named(series, r.variant.name)
          .points.emplace_back(point.sequence, unfused / median(r));
    }
  }
  return bench::svg_of(
      {fmt::format("{}, hidden {}, {} ranks, {}, {}", options.mirror ? "gemm_a2a" : "a2a_gemm",
                   columns_of(points.front()), points.front().shape.ranks, options.format, machine),
       "sequence", fmt::format("times faster than {}", baseline(points[0])),
       bench::PlotUnit::kNumber, bench::PlotScale::kFromZero},
      series);
}

Point point_of(const bench::A2aProblem& problem) {
  return {.shape = problem.shape,
          .sequence = static_cast<std::int32_t>(total_rows(problem.shape)),
          .mirror = problem.mirror,
          .config = choose(problem.shape, 0, {}, problem.row_block_rows)};
}

constexpr double kErrorBound = 1e-2;

Point measure_cpu(const Options& options, const Ranks& ranks, const bench::A2aProblem& problem,
                  const std::function<void(double)>& progress) {
  bench::ContestOptions contest;
  contest.warm_up = options.common.warm_up;
  contest.rounds = options.common.rounds;
  contest.check = options.common.check;
  contest.error_bound = kErrorBound;
  contest.progress = progress;
  Point point = point_of(problem);
  ranks.run([&](const TeamHandle& team) {
    const auto contestant = bench::make_cpu_a2a_contest(team, problem);
    auto mine = bench::compete(*team, *contestant, static_cast<std::size_t>(problem.shape.columns),
                               contest);
    if (team->rank() == 0) point.results = std::move(mine);
  });
  point.facts["method"] =
      "interleaved rounds, ranks aligned by a barrier, the slowest rank of each; warm weights";
  return point;
}

Point measure_cuda(const Options& options, const Ranks& ranks, const bench::A2aProblem& problem) {
  using a2a_gemm::BenchVariant;
  a2a_gemm::BenchOptions wanted;
  wanted.shape = problem.shape;
  wanted.rounds = options.common.rounds;
  wanted.warmup = options.common.warm_up;
  wanted.graph = options.common.graph;
  wanted.mirror = options.mirror;
  wanted.row_block_rows = options.row_block_rows;
  wanted.seed = options.common.seed;
  wanted.nccl = options.nccl;
  wanted.dense = bench::cublaslt_baseline(options.cublaslt);
  a2a_gemm::BenchResult measured;
  std::vector<double> errors;
  ranks.run([&](const TeamHandle& team) {
    const int device = gpu_of_rank(team->local_rank());
    auto mine = gpu_bench_a2a_gemm(team, device, wanted);
    std::vector<double> worst;
    if (options.common.check) worst = bench::cuda_a2a_errors(team, device, problem);
    if (team->rank() == 0) {
      measured = std::move(mine);
      errors = std::move(worst);
    }
  });
  Point point = point_of(problem);
  point.config = measured.config;
  for (const a2a_gemm::BenchTiming& timing : measured.timings) {
    bench::VariantResult& result = point.results.emplace_back();
    const bool whole = is_whole(timing.variant);
    result.variant = {timing.variant == BenchVariant::kGemm
                          ? std::string(bench::kA2aGemmAlone)
                          : std::string(to_string(timing.variant)),
                      whole || timing.variant == BenchVariant::kNcclDense, whole};
    result.us = timing.us;
    if (result.variant.whole) result.moved_bytes = measured.wire_bytes;
    if (!whole || !options.common.check) continue;
    // Elements, over all variants that the back end compared; chunks as they come may be added in
    // another order, which the GPU tests hold to f64.
    if (timing.variant != BenchVariant::kArrival) result.differing_rows = measured.differing;
    if (timing.variant == BenchVariant::kCopyEngine) result.relative_error = errors.at(0);
    if (timing.variant == BenchVariant::kSm) result.relative_error = errors.at(1);
    // Variants without an oracle run of their own are held to the others' bytes.
    result.correct = result.differing_rows == 0 &&
                     (result.relative_error < 0.0 || result.relative_error <= kErrorBound);
  }
  point.facts = {{"method",
                  "interleaved rounds, ranks aligned by a device barrier, CUDA events, the slowest "
                  "rank of each; L2 scrubbed before each"},
                 {"gpu", measured.machine},
                 {"driver", measured.driver},
                 {"ranks_share_gpu", measured.shared_gpu},
                 {"nccl", measured.nccl},
                 {"left_out", measured.left_out},
                 {"compared", measured.compared},
                 {"wire_bytes", measured.wire_bytes}};
  return point;
}

int run(const Command& command, const Options& options) {
  const Ranks ranks(options.common.ranks);
  const bool on_gpu = ranks.gpu_refusal().empty();
  const std::vector<std::int32_t> cpu_sequences{512, 1024, 2048};
  const std::vector<std::int32_t> gpu_sequences{8192, 16384, 65536};
  std::vector<bench::A2aProblem> problems;
  for (const std::int32_t sequence : !options.sequences.empty() ? options.sequences
                                     : on_gpu                   ? gpu_sequences
                                                                : cpu_sequences) {
    problems.push_back(
        problem_of(options, options.hidden.value_or(on_gpu ? 8192 : 256), ranks.size(), sequence));
  }
  if (!on_gpu) refuse_for_cpu(options, problems);
  if (options.mirror && !options.common.trace.empty()) {
    throw UsageError("--trace with --mirror: the mirror keeps no timeline; leave one out");
  }

  std::vector<Point> points;
  {
    Progress progress("bench a2a-gemm");
    for (std::size_t i = 0; i < problems.size(); ++i) {
      const auto show = [&](double fraction) {
        progress.show((static_cast<double>(i) + fraction) / static_cast<double>(problems.size()),
                      fmt::format("sequence {}", total_rows(problems[i].shape)));
      };
      show(0.0);
      points.push_back(on_gpu ? measure_cuda(options, ranks, problems[i])
                              : measure_cpu(options, ranks, problems[i], show));
    }
  }
  std::string trace;
  if (!options.common.trace.empty()) {
    ranks.run([&](const TeamHandle& team) {
      const bench::Trace mine =
          on_gpu ? bench::trace_cuda_a2a(team, gpu_of_rank(team->local_rank()), problems.back())
                 : bench::trace_cpu_a2a(team, problems.back());
      if (team->rank() == 0) trace = mine.text();
    });
  }
  if (!ranks.leads()) return kExitOk;
  if (!options.common.trace.empty()) write_file(options.common.trace, trace);

  const std::string machine =
      on_gpu ? points.front().facts["gpu"].get<std::string>() : bench::processor_name() + ", CPU";
  if (!options.common.svg.empty()) {
    write_file(options.common.svg, plot(options, machine, points));
  }
  bool correct = true;
  bench::JsonLines lines(common_keys(options.common, ranks, "a2a_gemm"));
  for (const Point& point : points) {
    for (const bench::VariantResult& result : point.results) {
      correct = correct && result.correct;
      lines.add(line_of(options, point, result));
    }
  }
  write_stdout(command.json ? lines.text() : table(options, ranks, machine, points));
  return correct ? kExitOk : kExitFault;
}

}  // namespace

void add_bench_a2a_gemm(CLI::App& parent, Command& command) {
  CLI::App* sub = parent.add_subcommand(
      "a2a-gemm", "All-to-all and the GEMM that consumes it: fused, unfused, and the GEMM alone");
  const auto options = std::make_shared<Options>();
  add_bench_options(*sub, options->common);
  sub->add_option("--hidden", options->hidden,
                  "N, and K over all ranks; without it 8192 on GPUs, 256 on CPUs")
      ->check(CLI::Range(1, 1 << 20));
  sub->add_option("--seq", options->sequences, "Rows of all ranks, several separated by commas")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 24));
  sub->add_option("--format", options->format, "Of the operands, and so of the wire")
      ->check(CLI::IsMember({"bf16", "fp8"}))
      ->capture_default_str();
  sub->add_option("--row-block-rows", options->row_block_rows,
                  "Rows that are announced together, a multiple of 256; 0: by the shape")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  sub->add_flag("--mirror", options->mirror,
                "The other way round: the GEMM (K all of hidden), then the all-to-all");
  sub->add_option("--nccl", options->nccl, "GPUs: NCCL library of the baselines, if it is there")
      ->capture_default_str();
  sub->add_option("--cublaslt", options->cublaslt,
                  "GPUs: cuBLASLt library of the baselines; libcublasLt.so.13 without it");
  bind(*sub, command, [&command, options] { return run(command, *options); });
}

}  // namespace penstock::cli
