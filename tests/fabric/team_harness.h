// Starts the ranks of a test: threads of this process, or processes of fabric_rank.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

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

// A port that nobody listens at just now.
int free_port();

// One started process with its standard output.
class RankProcess {
 public:
  RankProcess(const std::vector<std::string>& arguments,
              const std::vector<std::string>& environment = {});
  ~RankProcess();  // kills it if it still runs
  RankProcess(RankProcess&& other) noexcept;
  RankProcess& operator=(RankProcess&&) = delete;
  RankProcess(const RankProcess&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  // Waits until the output holds `text`; false after `limit` or at the output's end.
  bool wait_for_output(const std::string& text, std::chrono::milliseconds limit);
  // Waits for the end; -1 after `limit`, 128 + n for signal n.
  int wait(std::chrono::milliseconds limit);
  const std::string& output() const { return output_; }

 private:
  bool read_some(std::chrono::milliseconds limit);
  pid_t pid_ = -1;
  int fd_ = -1;
  std::string output_;
};

std::vector<RankProcess> start_ranks(const std::string& name, const RunOptions& options, int port);

}  // namespace penstock::testing
