// penstock convert: the routed experts in another storage format.
#include "penstock/model/convert.h"

#include <fmt/format.h>

#include "cli/command.h"
#include "penstock/model/checkpoint.h"

namespace penstock::cli {
namespace {

struct Options {
  std::string model, out, experts;
  int threads = 0;
};

int run(const Options& options, const Command& command) {
  const Checkpoint source(options.model);
  Progress progress("convert");
  ConvertOptions convert;
  convert.experts = parse_experts_format(options.experts);
  convert.threads = options.threads;
  convert.progress = [&](std::int64_t done, std::int64_t total) {
    progress.show(static_cast<double>(done) / static_cast<double>(total),
                  fmt::format("{:.1f} of {:.1f} MB", static_cast<double>(done) * 1e-6,
                              static_cast<double>(total) * 1e-6));
  };
  const double start = now_seconds();
  const ConvertReport report = convert_experts(source, options.out, convert);
  const double seconds = now_seconds() - start;

  if (command.json) {
    Json quality = Json::array();
    for (const ConvertQuality& q : report.quality) {
      quality.push_back({{"name", q.name},
                         {"tensors", q.tensors},
                         {"elements", q.elements},
                         {"relative_l2", q.relative_l2},
                         {"snr_db", q.snr_db},
                         {"saturated", q.saturated}});
    }
    print_json({{"model", options.model},
                {"out", options.out},
                {"experts", to_string(report.experts)},
                {"bytes_before", report.bytes_before},
                {"bytes_after", report.bytes_after},
                {"files", report.files},
                {"quality", quality},
                {"seconds", seconds}});
    return kExitOk;
  }
  std::string text = fmt::format("{:<20} {:>8} {:>12} {:>12} {:>8} {:>10}\n", "weights", "tensors",
                                 "elements", "relative L2", "SNR dB", "saturated");
  for (const ConvertQuality& q : report.quality) {
    text += fmt::format("{:<20} {:>8} {:>12} {:>12.6f} {:>8.2f} {:>10}\n", q.name, q.tensors,
                        q.elements, q.relative_l2, q.snr_db, q.saturated);
  }
  text += fmt::format("{}: {} bytes before, {} after, {} file(s), routed experts as {}\n",
                      options.out, report.bytes_before, report.bytes_after, report.files.size(),
                      to_string(report.experts));
  write_stdout(text);
  return kExitOk;
}

}  // namespace

void add_convert(CLI::App& app, Command& command) {
  const auto options = std::make_shared<Options>();
  CLI::App* sub =
      app.add_subcommand("convert", "Write a checkpoint with its routed experts in another format");
  sub->footer(
      "The report holds the new values against the old ones, both as f32. `penstock eval` on both "
      "directories shows what the change costs in bits per byte.");
  sub->add_option("MODEL", options->model, "Checkpoint directory")
      ->required()
      ->check(CLI::ExistingDirectory);
  sub->add_option("OUT", options->out, "Directory to write: new, or there and empty")->required();
  sub->add_option("--experts", options->experts, "Format of the routed experts")
      ->required()
      ->check(CLI::IsMember({"mxfp4", "fp8"}));
  sub->add_option("--threads", options->threads, "Threads that convert; 0: all of the machine")
      ->check(CLI::Range(0, 4096))
      ->type_name("N")
      ->capture_default_str();
  bind(*sub, command, [options, &command] { return run(*options, command); });
}

}  // namespace penstock::cli
