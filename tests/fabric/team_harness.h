// Starts the ranks of a test: threads of this process, or processes of fabric_rank.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "fabric/rank_process.h"
#include "fabric/scenarios.h"

namespace penstock::testing {

enum class TeamKind { kThreads, kProcesses };

struct RunOptions {
  int size = 2;
  std::chrono::milliseconds deadline{5000};
  ScenarioArgs args;
};

// How each rank ended: empty if well, else its words.
std::vector<std::string> run_scenario(TeamKind kind, const std::string& name,
                                      const RunOptions& options);

// A process of fabric_rank.
RankProcess start_rank(const std::vector<std::string>& arguments,
                       const std::vector<std::string>& environment = {});
std::vector<RankProcess> start_ranks(const std::string& name, const RunOptions& options, int port);

}  // namespace penstock::testing
