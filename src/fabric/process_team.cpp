#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>

#include "fabric/rendezvous.h"
#include "fabric/sockets.h"
#include "fabric/team_base.h"
#include "penstock/core/log.h"

namespace penstock {
namespace {

using detail::TeamControl;

constexpr int kBeatMs = 50;

// The control block in a memfd that rank 0 made.
class SharedControl {
 public:
  // fd stays the caller's.
  SharedControl(int fd, bool create) {
    if (create && ::ftruncate(fd, sizeof(TeamControl)) != 0) {
      detail::throw_system("could not size the team's control block");
    }
    void* base = ::mmap(nullptr, sizeof(TeamControl), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) detail::throw_system("could not map the team's control block");
    control_ = create ? new (base) TeamControl() : static_cast<TeamControl*>(base);
  }
  ~SharedControl() { ::munmap(control_, sizeof(TeamControl)); }
  SharedControl(const SharedControl&) = delete;
  SharedControl& operator=(const SharedControl&) = delete;
  TeamControl* get() const noexcept { return control_; }

 private:
  TeamControl* control_;
};

class ProcessTeam final : public detail::TeamBase {
 public:
  ProcessTeam(std::unique_ptr<SharedControl> control, const Discovery& discovery,
              std::chrono::nanoseconds deadline, detail::Meeting meeting)
      : TeamBase(control->get(), discovery.rank, discovery.size, deadline),
        control_(std::move(control)),
        discovery_(discovery),
        meeting_(std::move(meeting)),
        stop_(::eventfd(0, EFD_CLOEXEC)) {
    if (!stop_) detail::throw_system("eventfd");
    beat();
    join();
    try {
      watcher_ = std::thread([this] { watch(); });
    } catch (const std::system_error& error) {
      leave();
      throw Error(ErrorKind::kResourceExhausted,
                  fmt::format("could not start the team's watcher thread: {}", error.what()));
    }
  }

  ~ProcessTeam() override {
    leave();
    stopping_.store(true);
    const std::uint64_t one = 1;
    // An eventfd with room accepts 8 bytes; nothing else ever writes it.
    (void)!::write(stop_.get(), &one, sizeof one);
    watcher_.join();
  }

  int local_rank() const noexcept override { return discovery_.local_rank; }
  bool in_process() const noexcept override { return size() == 1; }
  std::string_view source() const noexcept override { return discovery_.source; }

  std::vector<UniqueFd> all_gather_descriptor(int fd) override {
    std::vector<UniqueFd> out(static_cast<std::size_t>(size()));
    barrier();  // a rank that is in another call shows here, not in a half-read socket
    collectively(*this, [&] { pass(fd, out); });
    return out;
  }

  std::vector<std::shared_ptr<void>> all_gather_shared(std::shared_ptr<void> mine) override {
    require(size() == 1, ErrorKind::kUnsupported, [] {
      return std::string("ranks are processes: they cannot share a pointer, pass a descriptor");
    });
    return {std::move(mine)};
  }

 private:
  struct Note {
    std::uint64_t sequence = 0;
    std::uint64_t has_descriptor = 0;
  };

  void pass(int fd, std::vector<UniqueFd>& out) {
    const auto until = std::chrono::steady_clock::now() + deadline();
    // Numbered by exchange, not by note: a fault can come between two ranks' notes, and rearm()
    // aligns the exchanges.
    Note note{exchanges(), fd >= 0 ? 1u : 0u};
    if (fd >= 0) {
      out[static_cast<std::size_t>(rank())] = UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
      if (!out[static_cast<std::size_t>(rank())]) detail::throw_system("could not duplicate");
    }
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      if (!detail::send_packet(meeting_.peer[static_cast<std::size_t>(r)].get(),
                               std::as_bytes(std::span(&note, 1)), fd)) {
        lost(r, FaultCause::kPeerDead);
      }
    }
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      Note theirs;
      // Packets of a call that a fault cut short are still queued: skip them.
      do {
        out[static_cast<std::size_t>(r)].reset();
        const auto received = detail::receive_packet(
            meeting_.peer[static_cast<std::size_t>(r)].get(),
            std::as_writable_bytes(std::span(&theirs, 1)), out[static_cast<std::size_t>(r)], until,
            [this] { return faulted(); });
        if (received == detail::Received::kHungUp) lost(r, FaultCause::kPeerDead);
        if (received == detail::Received::kDeadline) lost(r, FaultCause::kDeadline);
      } while (theirs.sequence < note.sequence);
      require((theirs.has_descriptor != 0) == static_cast<bool>(out[static_cast<std::size_t>(r)]),
              ErrorKind::kBackend,
              [&] { return fmt::format("rank {}'s descriptor was lost on the way", r); });
    }
  }

  [[noreturn]] void lost(int peer, FaultCause cause) {
    check();
    FaultRecord record;
    record.rank = rank();
    record.peer = cause == FaultCause::kDeadline ? blame(peer, deadline()) : peer;
    record.waited_ns = static_cast<std::uint64_t>(deadline().count());
    record.cause = static_cast<std::uint32_t>(cause);
    throw Fault(raise(record), "all_gather_descriptor");
  }

  void beat() noexcept {
    detail::store(cell(rank()).heart_beat_ns, detail::steady_ns(), std::memory_order_relaxed);
  }

  // Sees hang-ups at once: the kernel closes a killed process's sockets. Its own stop shows to the
  // peers as a heart-beat that stays away.
  void watch() noexcept {
    std::vector<pollfd> entries;
    std::vector<int> ranks;
    entries.push_back({stop_.get(), POLLIN, 0});
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      entries.push_back({meeting_.peer[static_cast<std::size_t>(r)].get(), POLLRDHUP, 0});
      ranks.push_back(r);
    }
    while (!stopping_.load()) {
      beat();
      const int ready = ::poll(entries.data(), entries.size(), kBeatMs);
      if (ready < 0 && errno != EINTR) {
        // May last (no memory, or a limit on descriptors that somebody lowered): neither burn a
        // core nor miss the end. A dead peer is then found by its heart-beat.
        std::this_thread::sleep_for(std::chrono::milliseconds(kBeatMs));
      }
      if (ready <= 0) continue;
      if (entries[0].revents != 0) return;
      for (std::size_t i = 1; i < entries.size();) {
        if (entries[i].revents == 0) {
          ++i;
          continue;
        }
        report_dead(ranks[i - 1]);
        entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(i));
        ranks.erase(ranks.begin() + static_cast<std::ptrdiff_t>(i - 1));
      }
    }
  }

  std::unique_ptr<SharedControl> control_;
  Discovery discovery_;
  detail::Meeting meeting_;
  UniqueFd stop_;
  std::atomic<bool> stopping_{false};  // beside stop_, which a failing poll cannot see
  std::thread watcher_;
};

// Rank 0 makes the control block and passes it on.
std::unique_ptr<SharedControl> share_control(const Discovery& me, const detail::Meeting& meeting,
                                             detail::TimePoint until) {
  if (me.rank == 0) {
    const UniqueFd memory(::memfd_create("penstock-team", MFD_CLOEXEC));
    if (!memory) detail::throw_system("memfd_create");
    auto control = std::make_unique<SharedControl>(memory.get(), true);
    control->get()->size = static_cast<std::uint64_t>(me.size);
    for (int r = 1; r < me.size; ++r) {
      const std::uint64_t magic = detail::kControlMagic;
      // A peer that died already is found by the first barrier.
      (void)detail::send_packet(meeting.peer[static_cast<std::size_t>(r)].get(),
                                std::as_bytes(std::span(&magic, 1)), memory.get());
    }
    return control;
  }
  std::uint64_t magic = 0;
  UniqueFd memory;
  const auto received = detail::receive_packet(
      meeting.peer[0].get(), std::as_writable_bytes(std::span(&magic, 1)), memory, until, {});
  if (received != detail::Received::kPacket || magic != detail::kControlMagic || !memory) {
    FaultRecord record;
    record.rank = me.rank;
    record.peer = 0;
    record.cause = static_cast<std::uint32_t>(
        received == detail::Received::kDeadline ? FaultCause::kDeadline : FaultCause::kPeerDead);
    record.valid = 1;
    throw Fault(record, "rank 0 did not hand over the team's control block");
  }
  return std::make_unique<SharedControl>(memory.get(), false);
}

}  // namespace

TeamHandle connect_team(const TeamOptions& options) {
  const Discovery me = discover(options);
  log(LogLevel::kInfo, describe(me));
  const auto deadline = detail::deadline_or_default(options.deadline);
  const auto until = std::chrono::steady_clock::now() + deadline;
  detail::Meeting meeting;
  if (me.size > 1) {
    meeting = detail::rendezvous(me, until);
  } else {
    meeting.peer.resize(1);
  }
  auto control = share_control(me, meeting, until);
  auto team = std::make_shared<ProcessTeam>(std::move(control), me, deadline, std::move(meeting));
  team->barrier();
  return team;
}

}  // namespace penstock
