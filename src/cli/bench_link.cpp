// penstock bench link: size curves of each transport and the packet all-reduce's latency.
#include <fmt/format.h>

#include <algorithm>

#include "cli/bench/plot.h"
#include "cli/bench/report.h"
#include "cli/command.h"
#include "cli/ranks.h"
#include "fabric/gpu.h"
#include "penstock/core/version.h"
#include "penstock/fabric/link_bench.h"

namespace penstock::cli {
namespace {

struct Options {
  RankOptions ranks;
  LinkBenchOptions link;
  std::uint64_t width = 6144;
  std::string nccl = GpuLinkOptions{}.nccl;
  std::string commit = "unknown";
  std::string plot;
};

struct Results {
  std::vector<LinkPoint> link;
  std::vector<AllReducePoint> all_reduce;
};

// One line a point, so that runs can be joined with cat.
void print_line(const Json& point) { write_stdout(point.dump() + "\n"); }

void print_lines(const Ranks& ranks, const Results& results) {
  for (const LinkPoint& p : results.link) {
    print_line({{"schema", 1},
                {"bench", "link"},
                {"version", version()},
                {"backend", "cpu"},
                {"ranks", ranks.size()},
                {"rank_kind", ranks.kind()},
                {"transport", to_string(p.kind)},
                {"bytes", p.bytes},
                {"directions", p.both_directions ? 2 : 1},
                {"method", "put, signal, answer; host clock of rank 0"},
                {"samples", p.time.count},
                {"median_us", p.time.median_us},
                {"p10_us", p.time.p10_us},
                {"p90_us", p.time.p90_us},
                {"gb_per_s", p.gb_per_s},
                {"moved_bytes", p.moved_bytes},
                {"correct", p.correct}});
  }
  for (const AllReducePoint& p : results.all_reduce) {
    print_line({{"schema", 1},
                {"bench", "all_reduce"},
                {"version", version()},
                {"backend", "cpu"},
                {"ranks", ranks.size()},
                {"rank_kind", ranks.kind()},
                {"kind", to_string(p.kind)},
                {"rows", p.rows},
                {"width", p.width},
                {"dtype", "f32"},
                {"method", "call to return on rank 0, after a barrier"},
                {"samples", p.time.count},
                {"median_us", p.time.median_us},
                {"p10_us", p.time.p10_us},
                {"p90_us", p.time.p90_us},
                {"correct", true}});
  }
}

std::string table(const Ranks& ranks, const Results& results) {
  std::string text = fmt::format(
      "link between 2 of {} CPU ranks ({}); time from put to the answer to its signal\n"
      "  {:<12} {:>12} {:>4} {:>12} {:>12} {:>12} {:>9}\n",
      ranks.size(), ranks.kind(), "transport", "bytes", "dir", "median us", "p10 us", "p90 us",
      "GB/s");
  for (const LinkPoint& p : results.link) {
    text += fmt::format("  {:<12} {:>12} {:>4} {:>12.1f} {:>12.1f} {:>12.1f} {:>9.2f}{}\n",
                        to_string(p.kind), p.bytes, p.both_directions ? 2 : 1, p.time.median_us,
                        p.time.p10_us, p.time.p90_us, p.gb_per_s, p.correct ? "" : "  WRONG DATA");
  }
  text += fmt::format(
      "\npacket all-reduce of rows of {} f32 over {} ranks\n  {:<12} {:>5} {:>12} {:>12} {:>12}\n",
      results.all_reduce.front().width, ranks.size(), "kind", "rows", "median us", "p10 us",
      "p90 us");
  for (const AllReducePoint& p : results.all_reduce) {
    text += fmt::format("  {:<12} {:>5} {:>12.1f} {:>12.1f} {:>12.1f}\n", to_string(p.kind), p.rows,
                        p.time.median_us, p.time.p10_us, p.time.p90_us);
  }
  return text;
}

void write_plot(const std::string& path, const std::string& svg) {
  OutputFile file(path);
  file.write(svg);
  file.close();
}

std::string plot(const Results& results) {
  std::vector<bench::PlotSeries> series;
  for (const LinkPoint& p : results.link) {
    const std::string name =
        fmt::format("{}, {}", to_string(p.kind), p.both_directions ? "both ways" : "one way");
    bench::series_named(series, name).points.emplace_back(static_cast<double>(p.bytes), p.gb_per_s);
  }
  return bench::svg_of(
      {"penstock bench link, CPU ranks", "bytes", "GB/s, one direction", bench::PlotUnit::kBytes},
      series);
}

int run_cpu(const Command& command, const Options& options, const Ranks& ranks) {
  Results results;
  ranks.run([&](const TeamHandle& team) {
    auto link = bench_link(team, cpu_fabric_backend(), options.link);
    auto all_reduce = bench_all_reduce(team, options.width, options.link.samples);
    if (team->rank() == 0) results = {std::move(link), std::move(all_reduce)};
  });
  if (!ranks.leads()) return kExitOk;
  if (!options.plot.empty()) write_plot(options.plot, plot(results));
  if (command.json) {
    print_lines(ranks, results);
  } else {
    write_stdout(table(ranks, results));
  }
  const bool correct = std::all_of(results.link.begin(), results.link.end(),
                                   [](const LinkPoint& p) { return p.correct; });
  return correct ? kExitOk : kExitFault;
}

// ---- GPUs -------------------------------------------------------------------------------------

const LinkValue* condition(const LinkFigure& figure, std::string_view name) {
  for (const auto& [key, value] : figure.conditions) {
    if (key == name) return &value;
  }
  return nullptr;
}
std::string text_of(const LinkFigure& figure, std::string_view name) {
  const LinkValue* value = condition(figure, name);
  if (value == nullptr) return {};
  if (const auto* number = std::get_if<std::int64_t>(value)) return fmt::format("{}", *number);
  if (const auto* real = std::get_if<double>(value)) return fmt::format("{:.2f}", *real);
  return std::get<std::string>(*value);
}
std::int64_t bytes_of(const LinkFigure& figure) {
  const LinkValue* value = condition(figure, "bytes");
  return value == nullptr ? 0 : std::get<std::int64_t>(*value);
}

// A column of the size table: "copy_engine", "sm 8 CTAs", "nccl, both ways".
std::string curve_of(const LinkFigure& figure) {
  std::string name = text_of(figure, "transport");
  if (const std::string ctas = text_of(figure, "ctas"); !ctas.empty()) name += " " + ctas;
  if (text_of(figure, "direction") == "both") name += " both";
  return name;
}

std::vector<bench::PlotSeries> curves(const GpuLinkBench& bench) {
  std::vector<bench::PlotSeries> series;
  for (const LinkFigure& figure : bench.figures) {
    if (figure.figure != "rate") continue;
    bench::series_named(series, curve_of(figure))
        .points.emplace_back(static_cast<double>(bytes_of(figure)), figure.median);
  }
  return series;
}

std::string table(const Ranks& ranks, const GpuMachine& machine, const GpuLinkBench& bench) {
  const std::vector<bench::PlotSeries> series = curves(bench);
  std::string text =
      fmt::format("{} x {}, driver {}; {} ranks ({}), {}\nNCCL: {}\n", machine.cards.size(),
                  machine.cards.front().name, machine.driver, ranks.size(), ranks.kind(),
                  bench.figures.empty() ? "" : text_of(bench.figures[0], "placement"), bench.nccl);
  text += fmt::format("\nGB/s of one direction, medians (sm N: N copy CTAs)\n{:>12}", "bytes");
  for (const bench::PlotSeries& s : series) text += fmt::format(" {:>16}", s.name);
  text += "\n";
  for (std::size_t i = 0; !series.empty() && i < series[0].points.size(); ++i) {
    text += fmt::format("{:>12.0f}", series[0].points[i].first);
    for (const bench::PlotSeries& s : series) text += fmt::format(" {:>16.1f}", s.points[i].second);
    text += "\n";
  }
  text += fmt::format("\n{:<26} {:>10} {:>10} {:>10}\n", "figure", "median", "p10", "p90");
  for (const LinkFigure& figure : bench.figures) {
    if (figure.figure == "rate") continue;
    text += fmt::format("{:<26} {:>10.2f} {:>10.2f} {:>10.2f} {}", figure.figure, figure.median,
                        figure.p10, figure.p90, figure.unit);
    for (const auto& [key, value] : figure.conditions) {
      if (key == "ranks" || key == "placement" || key == "method") continue;
      text += fmt::format(" {}={}", key, text_of(figure, key));
    }
    text += "\n";
  }
  return text;
}

void print_lines(const Options& options, const Ranks& ranks, const GpuMachine& machine,
                 const GpuLinkBench& bench) {
  for (const LinkFigure& figure : bench.figures) {
    Json line = {{"schema", 2},
                 {"bench", "link"},
                 {"version", version()},
                 {"commit", options.commit},
                 {"backend", "cuda"},
                 {"gpu", machine.cards.front().name},
                 {"gpus", machine.cards.size()},
                 {"driver", machine.driver},
                 {"nvlinks", machine.cards.front().nvlinks_active},
                 {"sm_clock_mhz_at_start", machine.cards.front().sm_clock_mhz},
                 {"rank_kind", ranks.kind()},
                 {"nccl_column", bench.nccl},
                 {"figure", figure.figure},
                 {"unit", figure.unit},
                 {"samples", figure.samples},
                 {"median", figure.median},
                 {"p10", figure.p10},
                 {"p90", figure.p90}};
    for (const auto& [key, value] : figure.conditions) {
      std::visit([&, &name = key](const auto& v) { line[name] = v; }, value);
    }
    print_line(line);
  }
}

int run_gpu(const Command& command, const Options& options, const Ranks& ranks) {
  GpuLinkOptions link;
  link.min_bytes = options.link.min_bytes;
  link.max_bytes = options.link.max_bytes;
  link.samples = options.link.samples;
  link.nccl = options.nccl;
  GpuMachine machine;
  if (ranks.leads()) machine = describe_gpus();
  GpuLinkBench bench;
  ranks.run([&](const TeamHandle& team) {
    auto mine = gpu_bench_link(team, gpu_of_rank(team->local_rank()), link);
    if (team->rank() == 0) bench = std::move(mine);
  });
  if (!ranks.leads()) return kExitOk;
  if (!options.plot.empty()) {
    write_plot(options.plot,
               bench::svg_of({fmt::format("penstock bench link, {} x {}", machine.cards.size(),
                                          machine.cards.front().name),
                              "bytes", "GB/s, one direction", bench::PlotUnit::kBytes},
                             curves(bench)));
  }
  if (command.json) {
    print_lines(options, ranks, machine, bench);
  } else {
    write_stdout(table(ranks, machine, bench));
  }
  return kExitOk;  // wrong bytes are an error of the benchmark itself
}

int run(const Command& command, const Options& options) {
  if (options.link.min_bytes > options.link.max_bytes) {
    throw UsageError(fmt::format("--min-bytes {} is larger than --max-bytes {}",
                                 options.link.min_bytes, options.link.max_bytes));
  }
  const Ranks ranks(options.ranks);
  return ranks.gpu_refusal().empty() ? run_gpu(command, options, ranks)
                                     : run_cpu(command, options, ranks);
}

}  // namespace

void add_bench_link(CLI::App& bench, Command& command) {
  CLI::App* sub = bench.add_subcommand(
      "link", "Size curves of each transport between two ranks, latencies, the packet all-reduce");
  const auto options = std::make_shared<Options>();
  add_rank_options(*sub, options->ranks, 2);
  sub->add_option("--min-bytes", options->link.min_bytes, "Smallest message, a multiple of 8")
      ->check(CLI::Range(std::uint64_t{8}, std::uint64_t{1} << 32))
      ->capture_default_str();
  sub->add_option("--max-bytes", options->link.max_bytes, "Largest message")
      ->check(CLI::Range(std::uint64_t{8}, std::uint64_t{1} << 32))
      ->capture_default_str();
  sub->add_option("--samples", options->link.samples, "Samples of a point")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  sub->add_option("--width", options->width, "CPU ranks: f32 elements of an all-reduce row")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 24))
      ->capture_default_str();
  sub->add_option("--nccl", options->nccl,
                  "GPUs: NCCL library for the column beside, if it is there")
      ->capture_default_str();
  sub->add_option("--commit", options->commit, "GPUs: commit to write into the JSON lines")
      ->capture_default_str();
  sub->add_option("--plot", options->plot, "Write the size curves to this SVG file");
  bind(*sub, command, [&command, options] { return run(command, *options); });
}

}  // namespace penstock::cli
