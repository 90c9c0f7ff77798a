#include "model/rank_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>

#include "penstock/core/error.h"

namespace penstock::engine {

RankGroup::RankGroup(int ranks)
    : teams_(make_local_teams(ranks)), errors_(static_cast<std::size_t>(ranks)) {
  try {
    for (int rank = 1; rank < ranks; ++rank) {
      threads_.emplace_back([this, rank] { work(rank); });
    }
  } catch (const std::system_error& error) {
    stop();
    throw Error(ErrorKind::kResourceExhausted,
                fmt::format("could not start a thread for rank {} of {}: {}", threads_.size() + 1,
                            ranks, error.what()));
  }
}

RankGroup::~RankGroup() { stop(); }

void RankGroup::stop() {
  {
    const std::scoped_lock lock(mutex_);
    stop_ = true;
  }
  posted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void RankGroup::call(int rank) noexcept {
  const auto index = static_cast<std::size_t>(rank);
  try {
    if (rearm_) teams_[index]->rearm();
    (*body_)(rank);
  } catch (...) {
    errors_[index] = std::current_exception();
    FaultRecord record;
    record.rank = rank;
    record.peer = rank;
    record.cause = static_cast<std::uint32_t>(FaultCause::kPeerAborted);
    record.valid = 1;
    teams_[index]->raise(record);
  }
}

void RankGroup::work(int rank) {
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    posted_.wait(lock, [&] { return stop_ || job_ != seen; });
    if (stop_) return;
    seen = job_;
    lock.unlock();
    call(rank);
    lock.lock();
    if (--running_ == 0) ended_.notify_one();
  }
}

void RankGroup::run(const std::function<void(int)>& body) {
  std::fill(errors_.begin(), errors_.end(), nullptr);
  body_ = &body;
  // Asked once, before the ranks start: one that starts late must not take this run's own fault for
  // an old one.
  rearm_ = teams_[0]->faulted();
  if (!threads_.empty()) {
    {
      const std::scoped_lock lock(mutex_);
      running_ = ranks() - 1;
      ++job_;
    }
    posted_.notify_all();
  }
  call(0);
  if (!threads_.empty()) {
    // Ends: every wait inside body has the team's deadline, and a failed rank ends them all.
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return running_ == 0; });
  }
  std::exception_ptr first;
  for (const std::exception_ptr& error : errors_) {
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const Fault&) {
      if (!first) first = error;
    } catch (...) {
      throw;
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace penstock::engine
