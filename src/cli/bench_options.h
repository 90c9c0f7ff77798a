// What the operators' benchmarks take alike, and how they write it out.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "cli/bench/contest.h"
#include "cli/bench/report.h"
#include "cli/command.h"
#include "cli/ranks.h"

namespace penstock::cli {

struct BenchOptions {
  RankOptions ranks;
  int rounds = 10;
  int warm_up = 2;
  bool check = false;
  bool graph = false;
  std::uint64_t seed = 1;
  double max_minutes = 10.0;
  std::string svg;
  std::string trace;
  std::string commit = "unknown";
};
// Adds --rounds, --check, --svg and so on, and the ranks' options.
void add_bench_options(CLI::App& subcommand, BenchOptions& options);

// Throw UsageError for what the back end cannot do.
void refuse_for_cpu(const BenchOptions& options);
void refuse_for_cuda(const BenchOptions& options);
// Throws UsageError if `multiply_adds`, spread over the ranks that this machine runs at once, last
// longer than --max-minutes at the rate of the CPU operators' plain loops.
void refuse_long_cpu_run(const BenchOptions& options, double multiply_adds, int ranks);
// Throws Error(kResourceExhausted) if this machine's memory does not hold so much.
void refuse_large_cpu_run(std::uint64_t bytes);

// Creates the file, or throws Error(kBackend).
void write_file(const std::string& path, const std::string& text);

// Keys that every JSON line of an operator's benchmark carries.
bench::Json common_keys(const BenchOptions& options, const Ranks& ranks, std::string_view bench);
// Times, bytes moved and the check's findings of one variant.
void add_result(bench::Json& line, const bench::VariantResult& result, bool checked);
// "ok", "WRONG", or "-" where nothing was checked.
std::string verdict(const bench::VariantResult& result, bool checked);

}  // namespace penstock::cli
