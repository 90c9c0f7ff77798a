#include "penstock/fabric/guard.h"

#include <algorithm>
#include <thread>

#include "penstock/fabric/signal.h"

namespace penstock {
namespace {

// A peer that runs on another core answers within a few microseconds: spin that long, then let
// other ranks of an oversubscribed machine run, then stop burning the core.
constexpr std::uint32_t kSpins = 64;
constexpr auto kYieldFor = std::chrono::microseconds(50);
constexpr auto kLongestSleep = std::chrono::microseconds(200);

void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

Guard::Guard(TeamHandle team, std::int32_t op, std::chrono::nanoseconds deadline)
    : team_(std::move(team)),
      op_(op),
      deadline_(deadline.count() > 0 ? deadline : team_->deadline()) {}

Guard::Pace::~Pace() {
  if (published_ >= 0) guard_.team_->set_waiting_for(-1);
}

std::chrono::nanoseconds Guard::Pace::waited() const noexcept { return now_ - start_; }

bool Guard::Pace::step() {
  Team& team = *guard_.team_;
  if (steps_ == 0) start_ = now_ = std::chrono::steady_clock::now();
  if (team.faulted()) return false;
  if (++steps_ <= kSpins) {
    relax();
    return true;
  }
  if (site_.peer >= 0 && team.gone(site_.peer)) {
    gone_ = true;
    return false;
  }
  if (site_.peer != published_) {
    team.set_waiting_for(site_.peer);
    published_ = site_.peer;
  }
  now_ = std::chrono::steady_clock::now();
  const auto elapsed = now_ - start_;
  if (elapsed >= guard_.deadline_) {
    expired_ = true;
    return false;
  }
  if (elapsed < kYieldFor) {
    std::this_thread::yield();
  } else {
    const auto nap = std::min<std::chrono::nanoseconds>(elapsed / 8, kLongestSleep);
    std::this_thread::sleep_for(
        std::min<std::chrono::nanoseconds>(nap, guard_.deadline_ - elapsed));
  }
  return true;
}

WaitStatus Guard::raise(const Pace& pace, const WaitSite& site, std::uint64_t expected,
                        std::uint64_t seen) const {
  if (!pace.expired() && !pace.peer_gone()) return WaitStatus::kAborted;
  FaultRecord record;
  record.rank = team_->rank();
  record.peer = pace.peer_gone() ? site.peer : team_->blame(site.peer, pace.waited());
  record.op = site.op >= 0 ? site.op : op_;
  record.stage = site.stage;
  record.region = site.region;
  record.index = site.index;
  record.expected = expected;
  record.seen = seen;
  record.waited_ns = static_cast<std::uint64_t>(pace.waited().count());
  record.cause = static_cast<std::uint32_t>(pace.peer_gone() ? FaultCause::kPeerDead : site.cause);
  team_->raise(record);
  return WaitStatus::kDeadline;
}

WaitStatus Guard::try_wait(const std::uint64_t* word, std::uint64_t epoch,
                           const WaitSite& site) const {
  return try_wait_until([&] { return epoch_reached(load_signal(word), epoch); },
                        [&] { return load_signal(word); }, epoch, site);
}

void Guard::wait(const std::uint64_t* word, std::uint64_t epoch, const WaitSite& site) const {
  finish(try_wait(word, epoch, site));
}

void Guard::throw_fault() const {
  team_->check();
  throw Error(ErrorKind::kBackend, "a wait ended without a fault on record");
}

}  // namespace penstock
