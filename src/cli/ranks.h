// Where the ranks of doctor and bench link live, and which back ends they are asked to use.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "penstock/fabric/team.h"

namespace penstock::cli {

struct RankOptions {
  std::string backend = "auto";  // auto, cpu, cuda
  int ranks = 2;
  bool processes = false;
  double deadline_s = 0;
};

// Adds --backend, --ranks (at least `least`), --processes and --deadline.
void add_rank_options(CLI::App& subcommand, RankOptions& options, int least);

// The ranks of one command: threads of this process, or processes of which this is one.
class Ranks {
 public:
  // With --processes: joins the team that torchrun, MPI or SLURM variables describe, and each
  // process says on standard error who it is and which of them won. Prepares the process for CUDA
  // unless the CPU alone was asked for.
  explicit Ranks(const RankOptions& options);

  int size() const { return size_; }
  // Whether this process holds rank 0, which prints.
  bool leads() const { return team_ == nullptr || team_->rank() == 0; }
  // "threads" or "processes".
  std::string kind() const { return team_ == nullptr ? "threads" : "processes"; }
  // Where rank and size were found: "in-process", or the winner of the variables, e.g. "torchrun".
  std::string source() const {
    return team_ == nullptr ? "in-process" : std::string(team_->source());
  }
  // Why GPUs take no part; empty if they do. Equal on every rank. Throws Unsupported with the
  // reason if --backend cuda demands them.
  const std::string& gpu_refusal() const { return gpu_refusal_; }
  // Runs body on every rank of this process.
  void run(const std::function<void(const TeamHandle&)>& body) const;

 private:
  RankOptions options_;
  TeamHandle team_;  // of processes
  int size_;
  std::string gpu_refusal_;
};

}  // namespace penstock::cli
