// The ranks of one engine as threads, which run and fail together.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "penstock/fabric/team.h"

namespace penstock::engine {

// Rank 0 is the caller's thread; the others sleep between jobs. One caller at a time.
class RankGroup {
 public:
  // Throws ResourceExhausted if the system refuses threads.
  explicit RankGroup(int ranks);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  int ranks() const noexcept { return static_cast<int>(teams_.size()); }
  const TeamHandle& team(int rank) const noexcept { return teams_[static_cast<std::size_t>(rank)]; }

  // Calls body(rank) on every rank and returns when all have ended. A rank that throws raises a
  // fault in the team, which ends the waits of the others; the first cause is rethrown (the lowest
  // rank's exception that is no Fault, else the lowest rank's). The next run rearms the team.
  void run(const std::function<void(int rank)>& body);

 private:
  void call(int rank) noexcept;
  void work(int rank);
  void stop();

  std::vector<TeamHandle> teams_;
  std::mutex mutex_;
  std::condition_variable posted_;
  std::condition_variable ended_;
  const std::function<void(int)>* body_ = nullptr;
  bool rearm_ = false;
  std::uint64_t job_ = 0;
  int running_ = 0;
  bool stop_ = false;
  std::vector<std::exception_ptr> errors_;
  std::vector<std::thread> threads_;
};

}  // namespace penstock::engine
