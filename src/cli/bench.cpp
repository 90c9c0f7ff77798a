// penstock bench: the measurements, one subcommand each.
#include "cli/command.h"

namespace penstock::cli {

void add_bench(CLI::App& app, Command& command) {
  CLI::App* bench = app.add_subcommand("bench", "Measure; --json prints one object a line");
  bench->require_subcommand(1);
  add_bench_link(*bench, command);
  add_bench_moe_stage2(*bench, command);
  add_bench_a2a_gemm(*bench, command);
  add_bench_decode(*bench, command);
}

}  // namespace penstock::cli
