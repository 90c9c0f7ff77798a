// The penstock command: parses, runs the chosen subcommand, turns errors into exit codes.
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <string_view>

#include "cli/command.h"
#include "penstock/core/error.h"
#include "penstock/core/version.h"

namespace {

namespace cli = penstock::cli;

void print_error(std::string_view kind, const char* message) {
  try {
    cli::print_json({{"error", {{"kind", kind}, {"message", message}}}});
  } catch (const std::exception&) {
    return;  // standard output is what failed: standard error already has the words
  }
}

int report(const cli::Command& command, std::string_view kind, const char* message, int code) {
  cli::print_log(fmt::format("penstock: {}", message));
  if (command.json) print_error(kind, message);
  return code;
}

int run(const cli::Command& command) {
  try {
    return command.run();
  } catch (const cli::ReaderGone&) {
    return cli::kExitOk;
  } catch (const cli::UsageError& error) {
    return report(command, "usage", error.what(), cli::kExitUsage);
  } catch (const penstock::Error& error) {
    const bool skipped = error.kind() == penstock::ErrorKind::kUnsupported;
    return report(command, to_string(error.kind()), error.what(),
                  skipped ? cli::kExitSkipped : cli::kExitFault);
  } catch (const std::exception& error) {
    return report(command, "backend", error.what(), cli::kExitFault);
  }
}

}  // namespace

int main(int argc, char** argv) {
  cli::protect_standard_streams();
  CLI::App app{"Fused communication and compute operators for mixture-of-experts inference",
               "penstock"};
  app.set_version_flag("--version", std::string(penstock::version()));
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 ok, 1 mismatch or fault, 2 usage, 77 skipped (this build or machine cannot do "
      "it; the reason is on standard error). A reader that leaves early (| head) is no fault.");
  cli::Command command;
  cli::add_generate(app, command);
  cli::add_eval(app, command);
  cli::add_info(app, command);
  cli::add_convert(app, command);
  cli::add_env(app, command);
  cli::add_doctor(app, command);
  cli::add_layout(app, command);
  cli::add_bench(app, command);
  cli::add_tune(app, command);
  cli::add_trace(app, command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (app.exit(error) == 0) return cli::kExitOk;
    // Flags are not set yet when parsing fails, so look at the words themselves.
    const auto is_json = [](const char* word) { return std::string_view(word) == "--json"; };
    if (std::any_of(argv + 1, argv + argc, is_json)) {
      print_error("usage", error.what());
    }
    return cli::kExitUsage;
  }
  return run(command);
}
