#include "fabric/team_harness.h"

#include <fmt/format.h>

#include <thread>

namespace penstock::testing {
namespace {

std::vector<std::string> run_threads(const std::string& name, const RunOptions& options) {
  LocalTeamOptions local;
  local.deadline = options.deadline;
  std::vector<TeamHandle> teams = make_local_teams(options.size, local);
  std::vector<std::string> ended(teams.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < teams.size(); ++r) {
    threads.emplace_back([&, r] {
      const TeamHandle team = std::move(teams[r]);
      try {
        scenarios().at(name)(team, options.args);
      } catch (const std::exception& error) {
        ended[r] = error.what();
        if (ended[r].empty()) ended[r] = "an exception without words";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ended;
}

std::vector<std::string> run_processes(const std::string& name, const RunOptions& options) {
  auto ranks = start_ranks(name, options, free_port());
  std::vector<std::string> ended(ranks.size());
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const int code = ranks[r].wait(std::chrono::seconds(300));
    if (code != 0 || ranks[r].output().find("END\n") == std::string::npos) {
      ended[r] = fmt::format("exit code {}: {}", code, ranks[r].output());
    }
  }
  return ended;
}

}  // namespace

RankProcess start_rank(const std::vector<std::string>& arguments,
                       const std::vector<std::string>& environment) {
  return RankProcess(PENSTOCK_FABRIC_RANK, arguments, environment);
}

std::vector<RankProcess> start_ranks(const std::string& name, const RunOptions& options, int port) {
  std::vector<RankProcess> ranks;
  for (int r = 0; r < options.size; ++r) {
    ranks.push_back(
        start_rank({name, std::to_string(r), std::to_string(options.size), std::to_string(port),
                    std::to_string(options.deadline.count()), std::to_string(options.args.rounds),
                    std::to_string(options.args.seed),
                    options.args.option.empty() ? std::string("none") : options.args.option}));
  }
  return ranks;
}

std::vector<std::string> run_scenario(TeamKind kind, const std::string& name,
                                      const RunOptions& options) {
  return kind == TeamKind::kThreads ? run_threads(name, options) : run_processes(name, options);
}

}  // namespace penstock::testing
