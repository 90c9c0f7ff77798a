#include "cli/ranks.h"

#include <fmt/format.h>

#include "cli/command.h"
#include "fabric/gpu.h"
#include "penstock/core/error.h"

namespace penstock::cli {
namespace {

std::chrono::nanoseconds deadline_of(const RankOptions& options) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(options.deadline_s * 1e9));
}

}  // namespace

void add_rank_options(CLI::App& subcommand, RankOptions& options, int least) {
  subcommand
      .add_option("--backend", options.backend,
                  "cpu, cuda, or auto: GPUs where there are usable ones")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  CLI::Option* ranks =
      subcommand
          .add_option("--ranks", options.ranks,
                      "Ranks, threads of this process; on GPUs, rank r takes GPU r "
                      "modulo their number")
          ->check(CLI::Range(least, kMaxRanks))
          ->capture_default_str();
  subcommand
      .add_flag("--processes", options.processes,
                "This process is one rank of the team that torchrun, MPI or SLURM variables "
                "describe; rank 0 prints")
      ->excludes(ranks);
  subcommand
      .add_option("--deadline", options.deadline_s,
                  "Longest wait, seconds; 0 means PENSTOCK_DEADLINE_S")
      ->check(CLI::Range(0.0, 86400.0));
}

Ranks::Ranks(const RankOptions& options) : options_(options), size_(options.ranks) {
  gpu_refusal_ = options.backend == "cpu" ? "--backend cpu" : gpu_unavailable();
  if (options.processes) {
    TeamOptions team;
    team.deadline = deadline_of(options);
    print_log("penstock: " + describe(discover(team)));
    team_ = connect_team(team);
    size_ = team_->size();
    if (!team_->agree(gpu_refusal_.empty()) && gpu_refusal_.empty()) {
      gpu_refusal_ = "another rank has no usable GPU";
    }
  }
  require(options.backend != "cuda" || gpu_refusal_.empty(), ErrorKind::kUnsupported,
          [&] { return fmt::format("--backend cuda: {}", gpu_refusal_); });
}

void Ranks::run(const std::function<void(const TeamHandle&)>& body) const {
  if (team_ != nullptr) {
    body(team_);
    return;
  }
  run_local_team(size_, body, {.deadline = deadline_of(options_)});
}

}  // namespace penstock::cli
