// penstock bench link: size curves of each transport and the packet all-reduce's latency.
#include <fmt/format.h>

#include <algorithm>

#include "cli/bench_plot.h"
#include "cli/command.h"
#include "penstock/core/version.h"
#include "penstock/fabric/link_bench.h"

namespace penstock::cli {
namespace {

struct Options {
  int ranks = 2;
  LinkBenchOptions link;
  std::uint64_t width = 6144;
  double deadline_s = 0;
  std::string plot;
};

struct Results {
  std::vector<LinkPoint> link;
  std::vector<AllReducePoint> all_reduce;
};

Results measure(const Options& options) {
  LocalTeamOptions local;
  local.deadline = std::chrono::nanoseconds(static_cast<std::int64_t>(options.deadline_s * 1e9));
  Results out;
  run_local_team(
      options.ranks,
      [&](const TeamHandle& team) {
        auto link = bench_link(team, cpu_fabric_backend(), options.link);
        auto all_reduce = bench_all_reduce(team, options.width, options.link.samples);
        if (team->rank() == 0) out = {std::move(link), std::move(all_reduce)};
      },
      local);
  return out;
}

// One line a point, so that runs can be joined with cat.
void print_line(const Json& point) { write_stdout(point.dump() + "\n"); }

void print_lines(const Options& options, const Results& results) {
  for (const LinkPoint& p : results.link) {
    print_line({{"schema", 1},
                {"bench", "link"},
                {"version", version()},
                {"backend", "cpu"},
                {"ranks", options.ranks},
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
                {"ranks", options.ranks},
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

std::string table(const Options& options, const Results& results) {
  std::string text = fmt::format(
      "link between 2 of {} CPU ranks (threads); time from put to the answer to its signal\n"
      "  {:<12} {:>12} {:>4} {:>12} {:>12} {:>12} {:>9}\n",
      options.ranks, "transport", "bytes", "dir", "median us", "p10 us", "p90 us", "GB/s");
  for (const LinkPoint& p : results.link) {
    text += fmt::format("  {:<12} {:>12} {:>4} {:>12.1f} {:>12.1f} {:>12.1f} {:>9.2f}{}\n",
                        to_string(p.kind), p.bytes, p.both_directions ? 2 : 1, p.time.median_us,
                        p.time.p10_us, p.time.p90_us, p.gb_per_s, p.correct ? "" : "  WRONG DATA");
  }
  text += fmt::format(
      "\npacket all-reduce of rows of {} f32 over {} ranks\n  {:<12} {:>5} {:>12} {:>12} {:>12}\n",
      options.width, options.ranks, "kind", "rows", "median us", "p10 us", "p90 us");
  for (const AllReducePoint& p : results.all_reduce) {
    text += fmt::format("  {:<12} {:>5} {:>12.1f} {:>12.1f} {:>12.1f}\n", to_string(p.kind), p.rows,
                        p.time.median_us, p.time.p10_us, p.time.p90_us);
  }
  return text;
}

std::string plot(const Results& results) {
  std::vector<PlotSeries> series;
  for (const LinkPoint& p : results.link) {
    const std::string name =
        fmt::format("{}, {}", to_string(p.kind), p.both_directions ? "both ways" : "one way");
    auto known = std::find_if(series.begin(), series.end(),
                              [&](const PlotSeries& s) { return s.name == name; });
    if (known == series.end()) known = series.insert(series.end(), PlotSeries{name, {}});
    known->points.emplace_back(static_cast<double>(p.bytes), p.gb_per_s);
  }
  return log_log_svg("penstock bench link, CPU ranks", "bytes", "GB/s, one direction", series);
}

int run(const Command& command, const Options& options) {
  if (options.link.min_bytes > options.link.max_bytes) {
    throw UsageError(fmt::format("--min-bytes {} is larger than --max-bytes {}",
                                 options.link.min_bytes, options.link.max_bytes));
  }
  const Results results = measure(options);
  if (!options.plot.empty()) {
    OutputFile file(options.plot);
    file.write(plot(results));
    file.close();
  }
  if (command.json) {
    print_lines(options, results);
  } else {
    write_stdout(table(options, results));
  }
  const bool correct = std::all_of(results.link.begin(), results.link.end(),
                                   [](const LinkPoint& p) { return p.correct; });
  return correct ? kExitOk : kExitFault;
}

}  // namespace

void add_bench_link(CLI::App& bench, Command& command) {
  CLI::App* sub = bench.add_subcommand(
      "link", "Size curves of each transport between CPU ranks, and the packet all-reduce");
  const auto options = std::make_shared<Options>();
  sub->add_option("--ranks", options->ranks, "CPU ranks, threads of this process")
      ->check(CLI::Range(2, kMaxRanks))
      ->capture_default_str();
  sub->add_option("--min-bytes", options->link.min_bytes, "Smallest message, a multiple of 8")
      ->check(CLI::Range(std::uint64_t{8}, std::uint64_t{1} << 32))
      ->capture_default_str();
  sub->add_option("--max-bytes", options->link.max_bytes, "Largest message")
      ->check(CLI::Range(std::uint64_t{8}, std::uint64_t{1} << 32))
      ->capture_default_str();
  sub->add_option("--samples", options->link.samples, "Samples of a point")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  sub->add_option("--width", options->width, "f32 elements of an all-reduce row")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 24))
      ->capture_default_str();
  sub->add_option("--deadline", options->deadline_s,
                  "Longest wait, seconds; 0 means PENSTOCK_DEADLINE_S")
      ->check(CLI::Range(0.0, 86400.0));
  sub->add_option("--plot", options->plot, "Write the size curves to this SVG file");
  bind(*sub, command, [&command, options] { return run(command, *options); });
}

}  // namespace penstock::cli
