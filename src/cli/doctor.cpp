// penstock doctor: what this machine and build can do, and a self-test of every transport.
#include "penstock/fabric/doctor.h"

#include <fmt/format.h>
#include <sys/sysinfo.h>

#include <thread>

#include "cli/command.h"
#include "cli/ranks.h"
#include "fabric/gpu.h"
#include "penstock/core/version.h"

namespace penstock::cli {
namespace {

struct Options {
  RankOptions ranks;
  SelfTestOptions test;
};

struct Findings {
  std::vector<TransportReport> cpu;
  std::string gpu_refusal;
  GpuMachine machine;
  GpuSelfTest gpu;
  bool ok() const {
    bool all = !cpu.empty() || !gpu.transports.empty();
    for (const auto* side : {&cpu, &gpu.transports}) {
      for (const TransportReport& report : *side) all = all && report.ok;
    }
    return all;
  }
};

Findings examine(const Ranks& ranks, const Options& options) {
  Findings out;
  out.gpu_refusal = ranks.gpu_refusal();
  if (options.ranks.backend != "cuda") {
    ranks.run([&](const TeamHandle& team) {
      auto mine = self_test(team, cpu_fabric_backend(), options.test);
      if (team->rank() == 0) out.cpu = std::move(mine);
    });
  }
  if (!out.gpu_refusal.empty()) return out;
  if (ranks.leads()) out.machine = describe_gpus();
  ranks.run([&](const TeamHandle& team) {
    auto mine = gpu_self_test(team, gpu_of_rank(team->local_rank()), options.test);
    if (team->rank() == 0) out.gpu = std::move(mine);
  });
  return out;
}

Json to_json(const TransportReport& report, std::string_view backend) {
  Json pairs = Json::array();
  for (const PairReport& pair : report.pairs) {
    pairs.push_back(
        {{"from", pair.from}, {"to", pair.to}, {"ok", pair.ok}, {"reason", pair.reason}});
  }
  return {{"backend", backend},
          {"transport", to_string(report.kind)},
          {"ok", report.ok},
          {"reason", report.reason},
          {"asked_bytes", report.asked_bytes},
          {"moved_bytes", report.moved_bytes},
          {"pairs", pairs}};
}

Json gpus_json(const Findings& found) {
  if (!found.gpu_refusal.empty()) return {{"usable", false}, {"reason", found.gpu_refusal}};
  Json cards = Json::array();
  for (const GpuCard& card : found.machine.cards) {
    cards.push_back({{"device", card.device},
                     {"name", card.name},
                     {"pci_bus_id", card.pci_bus_id},
                     {"compute_capability", card.compute_capability},
                     {"sms", card.sms},
                     {"memory_bytes", card.memory_bytes},
                     {"sm_clock_mhz", card.sm_clock_mhz},
                     {"nvlinks_active", card.nvlinks_active},
                     {"problem", card.problem}});
  }
  Json links = Json::array();
  for (const GpuLink& link : found.machine.links) {
    links.push_back({{"from", link.from},
                     {"to", link.to},
                     {"load_store", link.load_store},
                     {"native_atomics", link.native_atomics}});
  }
  Json signals = Json::array();
  for (const SignalPath& path : found.gpu.signals) {
    signals.push_back({{"from", path.from},
                       {"to", path.to},
                       {"chosen", path.chosen},
                       {"device_copy_us", path.device_copy_us},
                       {"stream_write_us", path.stream_write_us}});
  }
  return {{"usable", true},
          {"driver", found.machine.driver},
          {"cuda", found.machine.cuda_version},
          {"cards", cards},
          {"links", links},
          {"proxy_signals", signals}};
}

std::uint64_t memory_bytes() {
  struct sysinfo info {};
  return ::sysinfo(&info) == 0 ? static_cast<std::uint64_t>(info.totalram) * info.mem_unit : 0;
}

std::string_view yes(bool is) { return is ? "yes" : "NO"; }

std::string gpu_text(const Findings& found) {
  if (!found.gpu_refusal.empty()) return fmt::format("GPUs: not used: {}\n", found.gpu_refusal);
  std::string text =
      fmt::format("driver {}, CUDA {}.{}\n", found.machine.driver,
                  found.machine.cuda_version / 1000, found.machine.cuda_version % 1000 / 10);
  for (const GpuCard& card : found.machine.cards) {
    text += fmt::format(
        "GPU {}: {} at {}, compute capability {}, {} SMs, {:.1f} GiB{}{}\n", card.device, card.name,
        card.pci_bus_id, card.compute_capability, card.sms,
        static_cast<double>(card.memory_bytes) / (1ULL << 30),
        card.nvlinks_active >= 0 ? fmt::format(", {} NVLinks active", card.nvlinks_active) : "",
        card.problem.empty() ? "" : "; " + card.problem);
  }
  for (const GpuLink& link : found.machine.links) {
    text += fmt::format("GPU {} -> GPU {}: loads and stores {}, native atomics {}\n", link.from,
                        link.to, yes(link.load_store), yes(link.native_atomics));
  }
  for (const SignalPath& path : found.gpu.signals) {
    if (path.from == path.to) continue;
    text += fmt::format(
        "proxy, rank {} -> rank {}: signals by {} (copy {:.1f} us, write {})\n", path.from, path.to,
        path.chosen, path.device_copy_us,
        path.stream_write_us < 0 ? "refused" : fmt::format("{:.1f} us", path.stream_write_us));
  }
  return text;
}

std::string test_text(const std::vector<TransportReport>& reports, std::string_view where,
                      const Ranks& ranks, const Options& options) {
  if (reports.empty()) return {};
  std::string text = fmt::format(
      "\nself-test on {} {} ranks ({}), {} rounds of {} bytes between every pair:\n"
      "  {:<12} {:>6} {:>16} {:>16}  {}\n",
      ranks.size(), where, ranks.kind(), options.test.rounds, options.test.bytes, "transport",
      "pairs", "asked bytes", "moved bytes", "result");
  for (const TransportReport& report : reports) {
    text += fmt::format("  {:<12} {:>6} {:>16} {:>16}  {}\n", to_string(report.kind),
                        report.pairs.size(), report.asked_bytes, report.moved_bytes,
                        report.ok ? "ok, signals follow data" : "FAILED: " + report.reason);
  }
  return text;
}

int run(const Command& command, const Options& options) {
  const Ranks ranks(options.ranks);
  const Findings found = examine(ranks, options);
  const int code = found.ok() ? kExitOk : kExitFault;
  if (!ranks.leads()) return kExitOk;  // rank 0 says it for all
  if (command.json) {
    Json transports = Json::array();
    for (const TransportReport& report : found.cpu) transports.push_back(to_json(report, "cpu"));
    for (const TransportReport& report : found.gpu.transports) {
      transports.push_back(to_json(report, "cuda"));
    }
    print_json({{"version", version()},
                {"built_with_cuda", built_with_cuda()},
                {"cores", std::thread::hardware_concurrency()},
                {"memory_bytes", memory_bytes()},
                {"ranks", ranks.size()},
                {"rank_kind", ranks.kind()},
                {"rank_source", ranks.source()},
                {"gpus", gpus_json(found)},
                {"self_test", transports},
                {"ok", found.ok()}});
    return code;
  }
  write_stdout(fmt::format("penstock {}, CUDA back end {}\n{} cores, {:.1f} GiB of memory\n",
                           version(), built_with_cuda() ? "compiled in" : "not compiled in",
                           std::thread::hardware_concurrency(),
                           static_cast<double>(memory_bytes()) / (1ULL << 30)) +
               gpu_text(found) + test_text(found.cpu, "CPU", ranks, options) +
               test_text(found.gpu.transports, "GPU", ranks, options));
  return code;
}

}  // namespace

void add_doctor(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand(
      "doctor", "Say what this machine can do, and prove that each transport moves bytes");
  const auto options = std::make_shared<Options>();
  add_rank_options(*sub, options->ranks, 1);
  sub->add_option("--bytes", options->test.bytes, "Bytes of a message, a multiple of 8")
      ->check(CLI::Range(std::uint64_t{8}, std::uint64_t{1} << 28))
      ->capture_default_str();
  sub->add_option("--rounds", options->test.rounds, "Rounds, each with other data")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  bind(*sub, command, [&command, options] { return run(command, *options); });
}

}  // namespace penstock::cli
