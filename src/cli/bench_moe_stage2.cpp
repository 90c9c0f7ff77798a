// penstock bench moe-stage2: the fused operator on each transport beside the same work unfused and
// beside its parts alone, in interleaved rounds.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

#include "cli/bench/moe_contest.h"
#include "cli/bench/plot.h"
#include "cli/bench_options.h"
#include "fabric/gpu.h"
#include "ops/moe_stage2/bench.h"
#include "penstock/core/error.h"
#include "penstock/ops/moe_stage2/tuning.h"

namespace penstock::cli {
namespace {

using moe_stage2::Shape;
using moe_stage2::WireFormat;

struct Model {
  std::string_view name;
  std::int32_t hidden, intermediate, experts_per_rank, top_k;
  std::array<std::int64_t, 7> tokens;  // ended by the first zero
};
constexpr std::array kModels{
    Model{"tiny", 256, 128, 8, 4, {16, 64, 256}},
    Model{"glm5", 6144, 2048, 32, 8, {16, 64, 256, 1024, 4096, 8192, 16384}},
    Model{"v4-flash", 4096, 2048, 32, 6, {16, 64, 256, 1024, 4096, 8192, 16384}},
    Model{"h7168", 7168, 2048, 32, 8, {16, 64, 256, 1024, 4096, 8192, 16384}},
};

constexpr std::array kTransports{TransportKind::kCopyEngine, TransportKind::kSm,
                                 TransportKind::kDirect};
constexpr double kRowSlack = 1.5;

struct Options {
  BenchOptions common;
  std::string shape = "tiny";
  std::vector<std::int64_t> tokens;
  std::optional<std::int32_t> hidden, intermediate, experts_per_rank, top_k;
  std::optional<double> remote;
  std::string pattern = "balanced";
  std::string wire = "fp8";
  std::string transport = "copy_engine";
  std::string nccl = moe_stage2::StageBenchOptions{}.nccl;
  std::optional<double> row_slack;
};

// One token count and what was measured there.
struct Point {
  Shape shape;
  double remote = 0.0;    // fraction of all slots
  std::int64_t rows = 0;  // of the rank that has most
  std::vector<bench::VariantResult> results{};
  bench::Json facts = bench::Json::object();  // what only one back end knows
  TransportKind marked = TransportKind::kCopyEngine;
};

// What of the measurement a line is about.
struct Derived {
  double gemm_us, combine_us, unfused_us, flop;
};

const bench::VariantResult& find(const Point& point, std::string_view name) {
  return *std::find_if(point.results.begin(), point.results.end(),
                       [&](const bench::VariantResult& r) { return r.variant.name == name; });
}
bool has(const Point& point, std::string_view name) {
  return std::any_of(point.results.begin(), point.results.end(),
                     [&](const bench::VariantResult& r) { return r.variant.name == name; });
}
double median(const bench::VariantResult& result) { return bench::quantiles(result.us).median_us; }

// What speed-ups are against: NCCL's all-to-all where it is there, else the operator unfused.
std::string_view baseline(const Point& point) {
  return has(point, bench::kUnfusedNccl) ? bench::kUnfusedNccl : bench::kUnfused;
}

// Bytes that a call sends to peers: from the routing where the back end says so, else what the
// transport counted.
double wire_bytes(const Point& point, const bench::VariantResult& r) {
  if (point.facts.contains("wire_bytes")) return point.facts["wire_bytes"].get<double>();
  return r.moved_bytes + r.direct_bytes;
}

Derived derive(const Point& point) {
  const Shape& s = point.shape;
  return {median(find(point, bench::kGemmAlone)), median(find(point, bench::kCombineAlone)),
          median(find(point, baseline(point))),
          2.0 * static_cast<double>(point.rows) * s.hidden * s.intermediate};
}

Shape shape_of(const Options& options, int ranks) {
  if (options.remote && !(*options.remote >= 0.0 && *options.remote <= 1.0)) {
    throw UsageError(fmt::format("--remote-fraction {}: give 0 to 1", *options.remote));
  }
  const auto given = {options.hidden, options.intermediate, options.top_k};
  Shape shape;
  if (options.shape == "custom") {
    if (std::any_of(given.begin(), given.end(), [](const auto& v) { return !v.has_value(); }) ||
        !options.experts_per_rank || options.tokens.empty()) {
      throw UsageError(
          "--shape custom needs --tokens, --hidden, --intermediate, --top-k and "
          "--experts-per-rank");
    }
    shape.hidden = *options.hidden;
    shape.intermediate = *options.intermediate;
    shape.top_k = *options.top_k;
    shape.experts = *options.experts_per_rank * ranks;
  } else {
    if (std::any_of(given.begin(), given.end(), [](const auto& v) { return v.has_value(); })) {
      throw UsageError(fmt::format(
          "--hidden, --intermediate and --top-k belong to --shape custom; {} has its own",
          options.shape));
    }
    const auto* model = std::find_if(kModels.begin(), kModels.end(),
                                     [&](const Model& m) { return m.name == options.shape; });
    shape.hidden = model->hidden;
    shape.intermediate = model->intermediate;
    shape.top_k = model->top_k;
    shape.experts = options.experts_per_rank.value_or(model->experts_per_rank) * ranks;
  }
  shape.ranks = ranks;
  shape.row_slack = options.row_slack.value_or(kRowSlack);
  if (!options.row_slack && options.remote && ranks > 1) {
    // Keep the biased load of a pair, remote / (P - 1) of a rank's slots, inside the reservation.
    const double load = *options.remote * ranks / (ranks - 1);
    shape.row_slack = std::max(kRowSlack, std::min(1.15 * load, static_cast<double>(ranks)));
  }
  shape.wire = options.wire == "fp8" ? WireFormat::kFp8 : WireFormat::kBf16;
  return shape;
}

std::vector<std::int64_t> tokens_of(const Options& options) {
  if (!options.tokens.empty()) return options.tokens;
  std::vector<std::int64_t> tokens;
  for (const Model& model : kModels) {
    if (model.name != options.shape) continue;
    for (const std::int64_t t : model.tokens) {
      if (t > 0) tokens.push_back(t);
    }
  }
  return tokens;
}

moe_stage2::Pattern pattern_of(const std::string& name) {
  for (int p = 0; p < moe_stage2::kPatternCount; ++p) {
    const auto pattern = static_cast<moe_stage2::Pattern>(p);
    if (to_string(pattern) == name) return pattern;
  }
  throw UsageError("unknown routing '" + name + "'");
}

std::vector<std::string> pattern_names() {
  std::vector<std::string> names;
  names.reserve(moe_stage2::kPatternCount);
  for (int p = 0; p < moe_stage2::kPatternCount; ++p) {
    names.emplace_back(to_string(static_cast<moe_stage2::Pattern>(p)));
  }
  return names;
}

// Without its routing.
bench::MoeProblem problem_of(const Options& options, int ranks, std::int64_t tokens) {
  bench::MoeProblem problem;
  problem.shape = shape_of(options, ranks);
  problem.shape.max_tokens_per_rank = tokens;
  problem.seed = options.common.seed;
  if (const std::string fault = find_fault(problem.shape); !fault.empty()) {
    throw UsageError(fault);
  }
  return problem;
}

void route(const Options& options, bench::MoeProblem& problem) {
  problem.routing =
      options.remote
          ? make_remote_routing(problem.shape, *options.remote, options.common.seed)
          : make_routing(problem.shape, pattern_of(options.pattern), options.common.seed);
}

// What the shapes alone tell, before routings are made of them.
void refuse_for_cpu(const Options& options, const std::vector<bench::MoeProblem>& problems) {
  refuse_for_cpu(options.common);
  const double calls =
      options.common.warm_up + options.common.rounds + (options.common.check ? 1 : 0);
  double work = 0.0;
  const bench::MoeContestOptions contest;
  for (const bench::MoeProblem& problem : problems) {
    const double rows = static_cast<double>(problem.shape.max_tokens_per_rank) *
                        problem.shape.top_k * problem.shape.ranks;
    // All operators and the GEMM alone multiply.
    work += rows * problem.shape.hidden * problem.shape.intermediate * calls *
            static_cast<double>(contest.transports.size() + 2);
  }
  refuse_long_cpu_run(options.common, work, problems.front().shape.ranks);
}

// What the routings need, once they are there.
void refuse_large_for_cpu(const std::vector<bench::MoeProblem>& problems) {
  const bench::MoeContestOptions contest;
  std::uint64_t bytes = 0;
  for (const bench::MoeProblem& problem : problems) {
    std::uint64_t here = 0;
    for (int rank = 0; rank < problem.shape.ranks; ++rank) {
      here += cpu_moe_contest_bytes(problem, rank, contest);
    }
    bytes = std::max(bytes, here);
  }
  refuse_large_cpu_run(bytes);
}

void refuse_for_cuda(const Options& options) {
  refuse_for_cuda(options.common);
  if (options.pattern != "balanced") {
    throw UsageError(fmt::format(
        "--routing {}: on GPUs balanced routing and --remote-fraction are measured; take "
        "--backend cpu for the other patterns",
        options.pattern));
  }
}

bench::Json line_of(const Options& options, const Point& point, const bench::VariantResult& r) {
  const Shape& s = point.shape;
  const Derived d = derive(point);
  const bench::Quantiles times = bench::quantiles(r.us);
  bench::Json line = {{"shape", options.shape},
                      {"hidden", s.hidden},
                      {"intermediate", s.intermediate},
                      {"experts_per_rank", s.experts_per_rank()},
                      {"top_k", s.top_k},
                      {"tokens_per_rank", s.max_tokens_per_rank},
                      {"routing", options.remote ? "remote fraction" : options.pattern},
                      {"remote_fraction", point.remote},
                      {"wire", options.wire},
                      {"row_slack", s.row_slack},
                      {"rows", point.rows},
                      {"graph", options.common.graph},
                      {"transport", to_string(point.marked)},
                      {"variant", r.variant.name}};
  line.update(point.facts);
  add_result(line, r, options.common.check);
  if (r.variant.whole || r.variant.name == bench::kGemmAlone) {
    line["flop"] = d.flop;
    line["tflops"] = d.flop / times.median_us * 1e-6;
  }
  if (r.variant.whole) {
    line["wire_gb_per_s"] = wire_bytes(point, r) / times.median_us * 1e-3;
    line["gemm_alone_us"] = d.gemm_us;
    line["combine_alone_us"] = d.combine_us;
    line["exposed_us"] = times.median_us - d.gemm_us - d.combine_us;
    line["over_parts"] = times.median_us / (d.gemm_us + d.combine_us);
    line["baseline"] = baseline(point);
    line["speedup_over_baseline"] = d.unfused_us / times.median_us;
  }
  return line;
}

std::string table(const Options& options, const Ranks& ranks, std::string_view machine,
                  const std::vector<Point>& points) {
  const Shape& s = points.front().shape;
  std::string text = fmt::format(
      "moe_stage2, {} ranks ({}) on {}; {}: hidden {}, intermediate {}, {} experts a rank, top-{}, "
      "{} wire{}\nmedians of {} interleaved rounds, the slowest rank of each; exposed: beyond the "
      "parts alone; * --transport\n",
      ranks.size(), ranks.kind(), machine, options.shape, s.hidden, s.intermediate,
      s.experts_per_rank(), s.top_k, options.wire, options.common.graph ? ", graph" : "",
      options.common.rounds);
  for (const Point& point : points) {
    const Derived d = derive(point);
    text += fmt::format("\n{} tokens a rank, {:.3f} of the slots remote\n",
                        point.shape.max_tokens_per_rank, point.remote);
    bench::Table rows({"variant", "us", "p10", "p90", "TFLOPS", "wire GB/s", "exposed us",
                       "x parts", fmt::format("x {}", baseline(point)), "check"});
    for (const bench::VariantResult& r : point.results) {
      const bench::Quantiles t = bench::quantiles(r.us);
      const bool whole = r.variant.whole;
      const auto number = [&](bool there, double value, int digits) {
        return there ? fmt::format("{:.{}f}", value, digits) : std::string("-");
      };
      rows.add({r.variant.name + (r.variant.name == to_string(point.marked) ? " *" : ""),
                fmt::format("{:.1f}", t.median_us), fmt::format("{:.1f}", t.p10_us),
                fmt::format("{:.1f}", t.p90_us),
                whole || r.variant.name == bench::kGemmAlone
                    ? fmt::format("{:.4g}", d.flop / t.median_us * 1e-6)
                    : std::string("-"),
                number(whole, wire_bytes(point, r) / t.median_us * 1e-3, 3),
                number(whole, t.median_us - d.gemm_us - d.combine_us, 1),
                number(whole, t.median_us / (d.gemm_us + d.combine_us), 3),
                number(whole, d.unfused_us / t.median_us, 3), verdict(r, options.common.check)});
    }
    text += rows.text();
  }
  return text;
}

std::string plot(const Options& options, std::string_view machine,
                 const std::vector<Point>& points) {
  std::vector<bench::PlotSeries> series;
  for (const Point& point : points) {
    const Derived d = derive(point);
    const auto tokens = static_cast<double>(point.shape.max_tokens_per_rank);
    for (const bench::VariantResult& r : point.results) {
      if (!r.variant.whole || r.variant.name == baseline(point)) continue;
      bench::series_named(series, r.variant.name)
          .points.emplace_back(tokens, d.unfused_us / median(r));
    }
    bench::series_named(series, "parts alone")
        .points.emplace_back(tokens, d.unfused_us / (d.gemm_us + d.combine_us));
  }
  return bench::svg_of({fmt::format("moe_stage2, {}, {} ranks, {} wire, {}", options.shape,
                                    points.front().shape.ranks, options.wire, machine),
                        "tokens a rank", fmt::format("times faster than {}", baseline(points[0])),
                        bench::PlotUnit::kNumber, bench::PlotScale::kFromZero},
                       series);
}

Point point_of(const bench::MoeProblem& problem) {
  Point point{.shape = problem.shape};
  for (int rank = 0; rank < problem.shape.ranks; ++rank) {
    point.remote += bench::remote_fraction(problem, rank) / problem.shape.ranks;
  }
  point.rows = bench::most_rows(problem);
  return point;
}

double error_bound(const Options& options) { return options.wire == "fp8" ? 5e-2 : 1e-2; }

Point measure_cpu(const Options& options, const Ranks& ranks, const bench::MoeProblem& problem,
                  const std::function<void(double)>& progress) {
  bench::ContestOptions contest;
  contest.warm_up = options.common.warm_up;
  contest.rounds = options.common.rounds;
  contest.check = options.common.check;
  contest.error_bound = error_bound(options);
  contest.progress = progress;
  Point point = point_of(problem);
  ranks.run([&](const TeamHandle& team) {
    const auto contestant = bench::make_cpu_moe_contest(team, problem, {});
    auto mine =
        bench::compete(*team, *contestant, static_cast<std::size_t>(problem.shape.hidden), contest);
    if (team->rank() == 0) point.results = std::move(mine);
  });
  point.facts["method"] =
      "interleaved rounds, ranks aligned by a barrier, the slowest rank of each; warm weights";
  return point;
}

// The command's names of what the CUDA back end times.
bench::Variant variant_of(moe_stage2::StageVariant v) {
  using moe_stage2::StageVariant;
  switch (v) {
    case StageVariant::kGemm:
      return {bench::kGemmAlone, false, false};
    case StageVariant::kCombine:
      return {bench::kCombineAlone, false, false};
    case StageVariant::kPlan:
      return {"plan alone", false, false};
    case StageVariant::kNccl:
      return {bench::kUnfusedNccl, true, true};
    default:
      return {std::string(to_string(v)), true, true};
  }
}

Point measure_cuda(const Options& options, const Ranks& ranks, const bench::MoeProblem& problem) {
  moe_stage2::StageBenchOptions stage;
  stage.shape = problem.shape;
  stage.remote_fraction = options.remote.value_or(-1.0);
  stage.rounds = options.common.rounds;
  stage.warmup = options.common.warm_up;
  stage.graph = options.common.graph;
  stage.seed = options.common.seed;
  stage.nccl = options.nccl;
  moe_stage2::StageBench measured;
  std::vector<double> errors;
  ranks.run([&](const TeamHandle& team) {
    const int device = gpu_of_rank(team->local_rank());
    auto mine = gpu_bench_stage2(team, device, stage);
    std::vector<double> worst;
    if (options.common.check) worst = bench::cuda_moe_errors(team, device, problem);
    if (team->rank() == 0) {
      measured = std::move(mine);
      errors = std::move(worst);
    }
  });
  Point point = point_of(problem);
  for (const auto& timing : measured.timings) {
    bench::VariantResult& result = point.results.emplace_back();
    result.variant = variant_of(timing.variant);
    result.us = timing.us;
    result.moved_bytes = static_cast<double>(timing.per_call.bytes);
    result.direct_bytes = static_cast<double>(timing.per_call.direct_bytes);
    if (timing.variant == moe_stage2::StageVariant::kNccl) result.moved_bytes = measured.wire_bytes;
    if (!result.variant.whole || !options.common.check) continue;
    // The back end counts rows over all variants that it compared.
    result.differing_rows = measured.differing_rows;
    for (std::size_t kind = 0; kind < errors.size(); ++kind) {
      if (to_string(static_cast<TransportKind>(kind)) == result.variant.name) {
        result.relative_error = errors[kind];
      }
    }
    // Variants without an oracle run of their own are held to the others' bytes.
    result.correct = result.differing_rows == 0 &&
                     (result.relative_error < 0.0 || result.relative_error <= error_bound(options));
  }
  point.facts = {{"method",
                  "interleaved rounds, ranks aligned by a device barrier, CUDA events, the slowest "
                  "rank of each; L2 scrubbed before each"},
                 {"gpu", measured.machine},
                 {"driver", measured.driver},
                 {"ranks_share_gpu", measured.shared_gpu},
                 {"nccl", measured.nccl},
                 {"tiles", measured.tiles},
                 {"wire_bytes", measured.wire_bytes},
                 {"combine_bytes", measured.combine_bytes},
                 {"spilled_rows", measured.spilled_rows}};
  return point;
}

// Every token count of the options, measured. Equal refusals on every rank.
std::vector<Point> measure(const Options& options, const Ranks& ranks,
                           std::vector<bench::MoeProblem>& problems, const char* title) {
  const bool on_gpu = ranks.gpu_refusal().empty();
  shape_of(options, ranks.size());  // refuses before anything is made of it
  for (const std::int64_t tokens : tokens_of(options)) {
    problems.push_back(problem_of(options, ranks.size(), tokens));
  }
  if (on_gpu) {
    refuse_for_cuda(options);
  } else {
    refuse_for_cpu(options, problems);
  }
  for (bench::MoeProblem& problem : problems) route(options, problem);
  if (!on_gpu) refuse_large_for_cpu(problems);
  std::vector<Point> points;
  Progress progress(title);
  for (std::size_t i = 0; i < problems.size(); ++i) {
    const auto show = [&](double fraction) {
      progress.show((static_cast<double>(i) + fraction) / static_cast<double>(problems.size()),
                    fmt::format("{} tokens", problems[i].shape.max_tokens_per_rank));
    };
    show(0.0);
    points.push_back(on_gpu ? measure_cuda(options, ranks, problems[i])
                            : measure_cpu(options, ranks, problems[i], show));
  }
  return points;
}

// Whose crossovers are stored and read.
std::string machine_of(const Ranks& ranks, const Point& point) {
  return ranks.leads() && ranks.gpu_refusal().empty() ? point.facts["gpu"].get<std::string>()
                                                      : bench::processor_name();
}

int run(const Command& command, const Options& options) {
  const Ranks ranks(options.common.ranks);
  std::vector<bench::MoeProblem> problems;
  std::vector<Point> points = measure(options, ranks, problems, "bench moe-stage2");
  const std::string machine = machine_of(ranks, points.front());
  for (Point& point : points) {
    point.marked =
        options.transport == "auto"
            ? choose_transport(machine, point.shape, point.facts.value("ranks_share_gpu", false))
            : parse_transport(options.transport);
  }
  std::string trace;
  if (!options.common.trace.empty()) {
    ranks.run([&](const TeamHandle& team) {
      const bench::Trace mine = bench::trace_cpu_moe(team, problems.back(), points.back().marked);
      if (team->rank() == 0) trace = mine.text();
    });
  }
  if (!ranks.leads()) return kExitOk;
  if (!options.common.trace.empty()) write_file(options.common.trace, trace);
  if (!options.common.svg.empty()) {
    write_file(options.common.svg, plot(options, machine, points));
  }
  bool correct = true;
  bench::JsonLines lines(common_keys(options.common, ranks, "moe_stage2"));
  for (const Point& point : points) {
    for (const bench::VariantResult& result : point.results) {
      correct = correct && result.correct;
      lines.add(line_of(options, point, result));
    }
  }
  write_stdout(command.json ? lines.text() : table(options, ranks, machine, points));
  return correct ? kExitOk : kExitFault;
}

// penstock tune: the shortest transport at each token count, stored for `auto`.
int run_tune(const Command& command, const Options& options) {
  const Ranks ranks(options.common.ranks);
  std::vector<bench::MoeProblem> problems;
  const std::vector<Point> points = measure(options, ranks, problems, "tune");
  if (!ranks.leads()) return kExitOk;
  moe_stage2::Crossover crossover;
  crossover.machine = machine_of(ranks, points.front());
  crossover.ranks = ranks.size();
  crossover.hidden = points.front().shape.hidden;
  crossover.wire = points.front().shape.wire;
  bench::Table rows({"tokens a rank", "copy_engine us", "sm us", "direct us", "auto takes"});
  Json list = Json::array();
  for (const Point& point : points) {
    TransportKind best = TransportKind::kCopyEngine;
    for (const TransportKind kind : kTransports) {
      if (median(find(point, to_string(kind))) < median(find(point, to_string(best)))) best = kind;
    }
    crossover.points.push_back({point.shape.max_tokens_per_rank, best});
    std::vector<std::string> cells{fmt::format("{}", point.shape.max_tokens_per_rank)};
    Json entry = {{"tokens_per_rank", point.shape.max_tokens_per_rank}};
    for (const TransportKind kind : kTransports) {
      const double us = median(find(point, to_string(kind)));
      cells.push_back(fmt::format("{:.1f}", us));
      entry[fmt::format("{}_us", to_string(kind))] = us;
    }
    cells.emplace_back(to_string(best));
    entry["transport"] = to_string(best);
    rows.add(std::move(cells));
    list.push_back(std::move(entry));
  }
  std::sort(crossover.points.begin(), crossover.points.end(),
            [](const auto& a, const auto& b) { return a.tokens < b.tokens; });
  store_crossover(crossover);
  if (command.json) {
    print_json({{"file", moe_stage2::tuning_path()},
                {"machine", crossover.machine},
                {"ranks", crossover.ranks},
                {"hidden", crossover.hidden},
                {"wire", options.wire},
                {"points", list}});
  } else {
    write_stdout(rows.text() + fmt::format("stored in {} for {}, {} ranks, hidden {}, {} wire\n",
                                           moe_stage2::tuning_path(), crossover.machine,
                                           crossover.ranks, crossover.hidden, options.wire));
  }
  return kExitOk;
}

// What both commands take.
void add_shape_options(CLI::App& sub, Options& options) {
  std::vector<std::string> names{"custom"};
  for (const Model& model : kModels) names.emplace_back(model.name);
  add_bench_options(sub, options.common);
  sub.add_option("--shape", options.shape, "Sizes of a model; tiny is a minute's work on a CPU")
      ->check(CLI::IsMember(names))
      ->capture_default_str();
  sub.add_option("--tokens", options.tokens, "Tokens a rank, several separated by commas")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24));
  sub.add_option("--hidden", options.hidden, "Columns of a row, with --shape custom");
  sub.add_option("--intermediate", options.intermediate,
                 "Depth of the product, with --shape custom");
  sub.add_option("--top-k", options.top_k, "Experts of a token, with --shape custom");
  sub.add_option("--experts-per-rank", options.experts_per_rank, "Routed experts of one rank")
      ->check(CLI::Range(1, moe_stage2::kMaxExpertsPerRank));
  CLI::Option* routing = sub.add_option("--routing", options.pattern, "Which experts tokens choose")
                             ->check(CLI::IsMember(pattern_names()))
                             ->capture_default_str();
  sub.add_option("--remote-fraction", options.remote,
                 "Fraction of the slots on other ranks' experts; balanced routing has (P - 1) / P")
      ->check(CLI::Range(0.0, 1.0))
      ->excludes(routing);
  sub.add_option("--wire", options.wire, "Format of the rows on the wire")
      ->check(CLI::IsMember({"bf16", "fp8"}))
      ->capture_default_str();
  sub.add_option("--nccl", options.nccl, "GPUs: NCCL library of the baseline, if it is there")
      ->capture_default_str();
  sub.add_option("--row-slack", options.row_slack,
                 "Reservation of a pair over the even share; without it 1.5, or what "
                 "--remote-fraction needs");
}

}  // namespace

void add_bench_moe_stage2(CLI::App& parent, Command& command) {
  CLI::App* sub = parent.add_subcommand(
      "moe-stage2", "Down projection, rows home, combine: fused, unfused, and the parts alone");
  const auto options = std::make_shared<Options>();
  add_shape_options(*sub, *options);
  sub->add_option("--transport", options->transport,
                  "The operator that is marked; all transports are measured. auto: as `penstock "
                  "tune` stored, or the built-in choice")
      ->check(CLI::IsMember({"auto", "copy_engine", "sm", "direct"}))
      ->capture_default_str();
  bind(*sub, command, [&command, options] { return run(command, *options); });
}

void add_tune(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand(
      "tune", "Measure the transports of moe_stage2 and store which is shortest, for auto");
  const auto options = std::make_shared<Options>();
  add_shape_options(*sub, *options);
  bind(*sub, command, [&command, options] { return run_tune(command, *options); });
}

}  // namespace penstock::cli
