// penstock env: each environment variable that the library reads.
#include "penstock/core/env.h"

#include <fmt/format.h>

#include "cli/command.h"

namespace penstock::cli {
namespace {

int run(const Command& command) {
  const auto rows = Env::table();
  if (command.json) {
    Json out = Json::array();
    for (const auto& row : rows) {
      out.push_back({{"name", row.name},
                     {"value", row.value},
                     {"valid", row.problem.empty()},
                     {"in_force", row.in_force},
                     {"problem", row.problem},
                     {"default", row.fallback},
                     {"origin", row.origin},
                     {"description", row.description}});
    }
    print_json(out);
    return kExitOk;
  }
  std::string text = fmt::format("{:<28} {:<12} {:<12} {:<12} {}\n", "name", "in force", "default",
                                 "origin", "what");
  for (const auto& row : rows) {
    text += fmt::format("{:<28} {:<12} {:<12} {:<12} {}\n", row.name, row.in_force, row.fallback,
                        row.origin, row.description);
  }
  for (const auto& row : rows) {
    if (!row.problem.empty()) text += fmt::format("refused: {}\n", row.problem);
  }
  write_stdout(text);
  return kExitOk;
}

}  // namespace

void add_env(CLI::App& app, Command& command) {
  CLI::App* sub =
      app.add_subcommand("env", "Print each environment variable: name, value, default, origin");
  bind(*sub, command, [&command] { return run(command); });
}

}  // namespace penstock::cli
