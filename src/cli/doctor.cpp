// penstock doctor: what this machine and build can do, and a self-test of every transport.
#include "penstock/fabric/doctor.h"

#include <fmt/format.h>
#include <sys/sysinfo.h>

#include <mutex>
#include <thread>

#include "cli/command.h"
#include "penstock/core/version.h"

namespace penstock::cli {
namespace {

struct Options {
  int ranks = 2;
  std::uint64_t bytes = 1 << 20;
  int rounds = 3;
  double deadline_s = 0;
};

std::vector<TransportReport> test_cpu(const Options& options) {
  LocalTeamOptions local;
  local.deadline = std::chrono::nanoseconds(static_cast<std::int64_t>(options.deadline_s * 1e9));
  SelfTestOptions test;
  test.bytes = options.bytes;
  test.rounds = options.rounds;
  std::vector<TransportReport> out;
  run_local_team(
      options.ranks,
      [&](const TeamHandle& team) {
        auto mine = self_test(team, cpu_fabric_backend(), test);
        if (team->rank() == 0) out = std::move(mine);
      },
      local);
  return out;
}

Json to_json(const TransportReport& report) {
  Json pairs = Json::array();
  for (const PairReport& pair : report.pairs) {
    pairs.push_back(
        {{"from", pair.from}, {"to", pair.to}, {"ok", pair.ok}, {"reason", pair.reason}});
  }
  return {{"backend", "cpu"},
          {"transport", to_string(report.kind)},
          {"ok", report.ok},
          {"reason", report.reason},
          {"asked_bytes", report.asked_bytes},
          {"moved_bytes", report.moved_bytes},
          {"pairs", pairs}};
}

std::uint64_t memory_bytes() {
  struct sysinfo info {};
  return ::sysinfo(&info) == 0 ? static_cast<std::uint64_t>(info.totalram) * info.mem_unit : 0;
}

int run(const Command& command, const Options& options) {
  const auto reports = test_cpu(options);
  bool ok = !reports.empty();
  for (const TransportReport& report : reports) ok = ok && report.ok;
  if (command.json) {
    Json transports = Json::array();
    for (const TransportReport& report : reports) transports.push_back(to_json(report));
    print_json({{"version", version()},
                {"built_with_cuda", built_with_cuda()},
                {"cores", std::thread::hardware_concurrency()},
                {"memory_bytes", memory_bytes()},
                {"ranks", options.ranks},
                {"self_test", transports},
                {"ok", ok}});
    return ok ? kExitOk : kExitFault;
  }
  std::string text = fmt::format(
      "penstock {}, CUDA back end {}\n{} cores, {:.1f} GiB of memory\n\n"
      "self-test on {} CPU ranks, {} rounds of {} bytes between every pair:\n",
      version(), built_with_cuda() ? "compiled in" : "not compiled in",
      std::thread::hardware_concurrency(), static_cast<double>(memory_bytes()) / (1ULL << 30),
      options.ranks, options.rounds, options.bytes);
  text += fmt::format("  {:<12} {:>6} {:>16} {:>16}  {}\n", "transport", "pairs", "asked bytes",
                      "moved bytes", "result");
  for (const TransportReport& report : reports) {
    text += fmt::format("  {:<12} {:>6} {:>16} {:>16}  {}\n", to_string(report.kind),
                        report.pairs.size(), report.asked_bytes, report.moved_bytes,
                        report.ok ? "ok, signals follow data" : "FAILED: " + report.reason);
  }
  write_stdout(text);
  return ok ? kExitOk : kExitFault;
}

}  // namespace

void add_doctor(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand(
      "doctor", "Say what this machine can do, and prove that each transport moves bytes");
  const auto options = std::make_shared<Options>();
  sub->add_option("--ranks", options->ranks, "CPU ranks of the self-test")
      ->check(CLI::Range(1, kMaxRanks))
      ->capture_default_str();
  sub->add_option("--bytes", options->bytes, "Bytes of a message, a multiple of 8")
      ->check(CLI::Range(std::uint64_t{8}, std::uint64_t{1} << 28))
      ->capture_default_str();
  sub->add_option("--rounds", options->rounds, "Rounds, each with other data")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  sub->add_option("--deadline", options->deadline_s,
                  "Longest wait, seconds; 0 means PENSTOCK_DEADLINE_S")
      ->check(CLI::Range(0.0, 86400.0));
  bind(*sub, command, [&command, options] { return run(command, *options); });
}

}  // namespace penstock::cli
