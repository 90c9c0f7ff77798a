// decode_layer on one GPU, one rank's shard, linked to be carried to a machine without the
// project's libraries; `penstock bench decode` runs the same (ops/decode_layer/bench.h).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>

#include "cli/bench/decode_report.h"
#include "penstock/core/error.h"

int main(int argc, char** argv) {
  using namespace penstock;
  decode::DecodeBenchOptions options;
  options.shape.ranks = 8;
  options.chain = false;
  std::vector<int> rows = {1, 2, 4, 8};
  std::string output;
  std::string trace;
  CLI::App app{"us per layer of decode_layer on one GPU"};
  app.add_option("--rows", rows, "row counts")->delimiter(',');
  app.add_option("--tp", options.shape.ranks, "ranks whose shard is run");
  app.add_option("--layers", options.layers, "layers in the graph");
  app.add_option("--sets", options.sets, "distinct sets of weights, used in turn");
  app.add_option("--picks", options.picks, "picks a row");
  app.add_option("--samples", options.samples, "graph replays measured");
  app.add_option("--gpus", options.gpus, "shards that run at once, with all-reduces between them");
  app.add_option("--sm-budget", options.sm_budget, "multiprocessors to use, 0: all");
  app.add_flag("--timeline", options.timeline, "per-stage times (costs a little)");
  app.add_flag("--chain", options.chain, "the chain of separate kernels beside it");
  app.add_flag("--check", options.check, "compare the kernel's rows with the chain's");
  app.add_option("--trace", trace, "write the last point's timeline to this file");
  app.add_option("--json", output, "append JSON lines to this file");
  CLI11_PARSE(app, argc, argv);
  try {
    options.shape.rows = std::max(1, *std::max_element(rows.begin(), rows.end()));
    options.timeline = options.timeline || !trace.empty();
    const auto bench = decode::make_gpu_decode_bench(options);
    std::vector<decode::DecodeBenchPoint> points;
    for (const int count : rows) {
      points.push_back(bench->run(count));
      if (!output.empty()) {
        std::ofstream(output, std::ios::app)
            << bench::decode_line(options, points.back()).dump() << "\n";
      }
      if (!trace.empty())
        std::ofstream(trace) << bench::decode_trace(options, points.back()).text();
    }
    fmt::print("{}", bench::decode_table(options, points));
  } catch (const Error& error) {
    fmt::print(stderr, "decode_layer_bench: {}\n", error.what());
    return 1;
  }
  return 0;
}
