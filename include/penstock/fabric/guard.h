// Waits with deadlines, on the host. Every wait of the fabric and of CPU operators goes through a
// Guard; the device twin (guard_device.cuh) follows the same rules with the same record.
#pragma once

#include <chrono>
#include <cstdint>

#include "penstock/core/error.h"
#include "penstock/fabric/team.h"

namespace penstock {

// What a wait waits for, in the words of a fault record. Unknown fields stay -1.
struct WaitSite {
  std::int32_t peer = -1;
  std::int32_t op = -1;
  std::int32_t stage = -1;
  std::int32_t region = -1;
  std::int32_t index = -1;
  FaultCause cause = FaultCause::kDeadline;  // what the record says when the deadline passes
};

// Waits of one rank. Cheap to make; keeps the team alive. Safe from several threads of the rank.
class Guard {
 public:
  // op: number for the fault records, from Team::next_operator(). deadline 0: the team's.
  explicit Guard(TeamHandle team, std::int32_t op = -1, std::chrono::nanoseconds deadline = {});

  // Returns when the word's value is >= epoch; the load that sees it is an acquire, so data that
  // the writer stored before its release of the word are visible. Spins 64 times (a few us),
  // yields until 50 us have passed, then sleeps an eighth of the time waited so far, at most 200
  // us. Throws Fault with the team's first cause as soon as any rank has raised one; at the
  // deadline raises {site, expected, seen, waited} itself (peer replaced by Team::blame) and throws
  // it; at once (kPeerDead) if site.peer is gone and the word is still short. A value that has
  // arrived wins over an abort that came at the same time.
  void wait(const std::uint64_t* word, std::uint64_t epoch, const WaitSite& site) const;
  // The same without throwing: how it ended. kDeadline has raised the fault.
  WaitStatus try_wait(const std::uint64_t* word, std::uint64_t epoch, const WaitSite& site) const;
  // The same for any condition: ready() returns true when done and must itself load with acquire;
  // seen() fills the record at the deadline. ready() may change the site (who is waited for now).
  template <typename Ready, typename Seen>
  WaitStatus try_wait_until(Ready&& ready, Seen&& seen, std::uint64_t expected,
                            const WaitSite& site) const;
  template <typename Ready, typename Seen>
  void wait_until(Ready&& ready, Seen&& seen, std::uint64_t expected, const WaitSite& site) const {
    finish(try_wait_until(ready, seen, expected, site));
  }

  const TeamHandle& team() const noexcept { return team_; }
  std::int32_t op() const noexcept { return op_; }

 private:
  // One wait in progress: decides between spinning, yielding and sleeping, watches clock and abort.
  class Pace {
   public:
    Pace(const Guard& guard, const WaitSite& site) : guard_(guard), site_(site) {}
    ~Pace();
    Pace(const Pace&) = delete;
    Pace& operator=(const Pace&) = delete;
    // One step of waiting. False: stop, expired() or aborted.
    bool step();
    bool expired() const noexcept { return expired_; }
    bool peer_gone() const noexcept { return gone_; }
    std::chrono::nanoseconds waited() const noexcept;

   private:
    const Guard& guard_;
    const WaitSite& site_;
    std::chrono::steady_clock::time_point start_{};
    std::chrono::steady_clock::time_point now_{};
    std::uint32_t steps_ = 0;
    int published_ = -1;
    bool expired_ = false;
    bool gone_ = false;
  };

  void finish(WaitStatus status) const {
    if (status != WaitStatus::kArrived) throw_fault();
  }
  [[noreturn]] void throw_fault() const;
  WaitStatus raise(const Pace& pace, const WaitSite& site, std::uint64_t expected,
                   std::uint64_t seen) const;

  TeamHandle team_;
  std::int32_t op_;
  std::chrono::nanoseconds deadline_;
};

template <typename Ready, typename Seen>
WaitStatus Guard::try_wait_until(Ready&& ready, Seen&& seen, std::uint64_t expected,
                                 const WaitSite& site) const {
  if (ready()) return WaitStatus::kArrived;
  Pace pace(*this, site);
  while (true) {
    const bool go_on = pace.step();
    if (ready()) return WaitStatus::kArrived;
    if (!go_on) return raise(pace, site, expected, seen());
  }
}

}  // namespace penstock
