#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <exception>
#include <nlohmann/json.hpp>

#include "penstock/core/env.h"
#include "penstock/core/version.h"

namespace {

int print_env(bool json) {
  const auto rows = penstock::Env::table();
  if (json) {
    nlohmann::ordered_json out = nlohmann::ordered_json::array();
    for (const auto& row : rows) {
      out.push_back({{"name", row.name},
                     {"value", row.value},
                     {"default", row.fallback},
                     {"origin", row.origin},
                     {"description", row.description}});
    }
    fmt::print("{}\n", out.dump(1));
    return 0;
  }
  fmt::print("{:<28} {:<12} {:<12} {:<12} {}\n", "name", "value", "default", "origin", "what");
  for (const auto& row : rows) {
    fmt::print("{:<28} {:<12} {:<12} {:<12} {}\n", row.name, row.value, row.fallback, row.origin,
               row.description);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Fused communication and compute operators for mixture-of-experts inference",
               "penstock"};
  app.set_version_flag("--version", std::string(penstock::version()));
  app.require_subcommand(1);
  bool json = false;
  CLI::App* env =
      app.add_subcommand("env", "Print each environment variable: name, value, default, origin");
  env->add_flag("--json", json, "Print JSON");
  try {
    app.parse(argc, argv);
    if (env->parsed()) return print_env(json);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "penstock: {}\n", error.what());
    return 1;
  }
  return 0;
}
