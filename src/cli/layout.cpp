// penstock layout OP: what an operator's window holds, before anything is allocated.
#include "penstock/fabric/layout.h"

#include <fmt/format.h>

#include "cli/command.h"
#include "penstock/core/digest.h"
#include "penstock/fabric/all_reduce.h"

namespace penstock::cli {
namespace {

int run(const Command& command, const Layout& layout) {
  if (!command.json) {
    write_stdout(layout.describe());
    return kExitOk;
  }
  Json regions = Json::array();
  for (const RegionSpan& region : layout.regions()) {
    regions.push_back({{"name", region.name},
                       {"offset", region.offset},
                       {"bytes", region.bytes},
                       {"alignment", region.alignment},
                       {"writer", to_string(region.writer)},
                       {"reader", to_string(region.reader)}});
  }
  print_json({{"operator", layout.name()},
              {"shape", layout.shape_text()},
              {"bytes", layout.total_bytes()},
              {"digest", to_hex(layout.digest())},
              {"regions", regions}});
  return kExitOk;
}

}  // namespace

void add_layout(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand("layout", "Print the regions of an operator's window");
  sub->require_subcommand(1);
  CLI::App* all_reduce = sub->add_subcommand("all_reduce", "The packet all-reduce");
  const auto shape = std::make_shared<AllReduceShape>();
  shape->ranks = 2;
  shape->max_elements = 16 * 6144;
  all_reduce->add_option("--ranks", shape->ranks, "Ranks of the team")
      ->check(CLI::Range(1, kMaxRanks))
      ->capture_default_str();
  all_reduce->add_option("--elements", shape->max_elements, "f32 elements of the largest call")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 32))
      ->capture_default_str();
  bind(*all_reduce, command, [&command, shape] { return run(command, all_reduce_layout(*shape)); });
}

}  // namespace penstock::cli
