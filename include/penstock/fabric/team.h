// A team: the ranks that work together, and the only way in which they find, count and fail each
// other. Ranks are threads of one process or processes of one host; everything above is the same.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/core/error.h"
#include "penstock/fabric/protocol.h"

namespace penstock {

class Team;
using TeamHandle = std::shared_ptr<Team>;

// What takes part in rearm() besides the team itself: windows, transports, operators with device
// state. Registered per rank; called on the rank's thread inside rearm(), in registration order.
class RearmHook {
 public:
  virtual ~RearmHook() = default;
  // Stop and drain: when this returns, nothing that this rank started before still reads or writes
  // any window. Must end within the team's deadline; throws Fault otherwise.
  virtual void quiesce() = 0;
  // Highest epoch that this rank may have published anywhere.
  virtual std::uint64_t highest_epoch() const = 0;
  // Called on every rank when all are quiet, with the largest highest_epoch() of all ranks and
  // hooks: continue from `floor` (the next call is floor + 1), and set words in this rank's window
  // by which others are allowed to reuse buffers ("consumed") to `floor`.
  virtual void resume(std::uint64_t floor) = 0;
};

// Owns one file descriptor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) noexcept : fd_(fd) {}
  ~UniqueFd() { reset(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = other.release();
    }
    return *this;
  }
  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  int release() noexcept {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset() noexcept;

 private:
  int fd_ = -1;
};

// One rank's membership of a team.
//
// Collective calls (marked so) must be made by every rank in the same order, by one thread of a
// rank at a time; two ranks that meet in different calls get InvalidArgument on every rank, naming
// both calls. All of them wait no longer than deadline() and then throw Fault, whose text names the
// ranks that are missing. After a fault every collective call throws that fault until rearm(). The
// other calls are safe from any thread.
class Team {
 public:
  // Leaves the team: peers that wait for this rank from now on fail at once instead of at their
  // deadline. Not collective, never blocks, never throws.
  virtual ~Team() = default;
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  // Rank among the processes of this host; for in-process teams, rank().
  virtual int local_rank() const noexcept = 0;
  // True if all ranks share this address space.
  virtual bool in_process() const noexcept = 0;
  // Where rank and size came from: "in-process", "flags", "torchrun", "mpi", "slurm".
  virtual std::string_view source() const noexcept = 0;
  // Longest time that any wait of this team lasts.
  virtual std::chrono::nanoseconds deadline() const noexcept = 0;

  // ---- collective ----

  // Returns when all ranks have called it. What a rank wrote to shared memory before is visible to
  // all after (release / acquire).
  virtual void barrier() = 0;
  // Every rank gives mine[n]; all[size * n] receives them in rank order. n must be equal on all
  // ranks: InvalidArgument on every rank with both sizes otherwise. n == 0 is a barrier.
  virtual void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) = 0;
  // The same for byte strings of different lengths.
  virtual std::vector<std::vector<std::byte>> all_gather_varying(
      std::span<const std::byte> mine) = 0;
  // True on every rank if every rank says true, else false on every rank.
  virtual bool agree(bool mine) = 0;
  // Every rank gives one open descriptor and gets one for each rank (its own duplicated), usable
  // in this process. The argument stays the caller's. fd == -1: "none", received as an empty one.
  virtual std::vector<UniqueFd> all_gather_descriptor(int fd) = 0;
  // In-process teams only (Unsupported otherwise): every rank gives one shared pointer and gets all
  // of them, so that memory of one rank lives as long as any rank's view of it.
  virtual std::vector<std::shared_ptr<void>> all_gather_shared(std::shared_ptr<void> mine) = 0;
  // The next operator number, equal on every rank; FaultRecord::op carries it. Not a wait.
  virtual std::int32_t next_operator() = 0;

  // ---- faults ----

  // Generation of rearms: starts at kFirstGeneration.
  virtual std::uint64_t generation() const noexcept = 0;
  // True once any rank has raised a fault in this generation. One relaxed load: cheap enough for
  // wait loops.
  virtual bool faulted() const noexcept = 0;
  // The first cause, equal on every rank, if faulted.
  virtual std::optional<FaultRecord> fault() const = 0;
  // Throws Fault with the first cause if faulted; otherwise does nothing.
  virtual void check() const = 0;
  // Makes the fault known to every rank; all waits of this generation end. The first record of a
  // generation wins, later ones are dropped. Returns the winning record. Waits for no rank
  // but the winner, whose record is a few stores away: at most 100 ms should it die between them.
  virtual FaultRecord raise(const FaultRecord& record) noexcept = 0;
  // Whether this rank is known to be gone for good (its process died or it left the team).
  virtual bool gone(int rank) const noexcept = 0;
  // Brings the team back after a fault without a new process. Collective over all ranks, faulted or
  // not: every rank must call it, within the deadline. Runs the hooks (quiesce on every rank, then
  // resume on every rank), raises generation(); afterwards collectives and operators work as if
  // new, with epochs above all earlier ones. If a rank is gone: throws Fault (kPeerDead) naming it,
  // on every survivor, and the team stays faulted. If a rank does not come: Fault (kDeadline).
  virtual void rearm() = 0;
  virtual void add_hook(RearmHook* hook) = 0;
  virtual void remove_hook(RearmHook* hook) noexcept = 0;

  // ---- for waits (guard.h, transports); not for operators ----

  // Address of this rank's abort word: 8 bytes in host memory, written by any rank, readable with
  // acquire loads. A device back end mirrors it into its windows.
  virtual const std::uint64_t* abort_word() const noexcept = 0;
  // Publishes which rank this rank waits for (-1: none), so that a peer whose own deadline expires
  // can blame the rank at the end of the chain rather than its neighbour. Relaxed store.
  virtual void set_waiting_for(int peer) noexcept = 0;
  // Follows the published chain from `peer`, and prefers a rank whose process shows no heart-beat
  // for most of `waited`. Returns the rank to blame.
  virtual int blame(int peer, std::chrono::nanoseconds waited) const noexcept = 0;

 protected:
  Team() = default;
};

// ---- in-process teams -----------------------------------------------------------------------

struct LocalTeamOptions {
  std::chrono::nanoseconds deadline{0};  // 0: Env::deadline_s()
};
// size handles, element r for rank r; give each to the thread that plays the rank. size in [1,
// kMaxRanks], InvalidArgument otherwise. Not collective: one thread calls it. Owns no thread, no
// descriptor.
std::vector<TeamHandle> make_local_teams(int size, const LocalTeamOptions& options = {});

// Runs body(team) on `size` threads, one a rank, and joins them. If ranks threw, rethrows: the
// first exception that is no Fault if there is one (a cause), else that of the lowest rank.
void run_local_team(int size, const std::function<void(const TeamHandle&)>& body,
                    const LocalTeamOptions& options = {});

// ---- multi-process teams --------------------------------------------------------------------

struct TeamOptions {
  int rank = -1;                         // -1: discover
  int size = -1;                         // -1: discover
  int local_rank = -1;                   // -1: discover, else rank
  std::string address;                   // rank 0's IPv4 address or name; empty: discover
  int port = 0;                          // rank 0's TCP port; 0: discover
  std::chrono::nanoseconds deadline{0};  // 0: Env::deadline_s()
};

// Where this process stands. Every field is set.
struct Discovery {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  std::string address;
  int port = 0;
  std::string source;  // "flags", "torchrun", "mpi", "slurm", "none" (one rank, alone)
};

// Default port when neither flags nor MASTER_PORT give one.
inline constexpr int kDefaultPort = 29477;

// Order: flags (rank and size given), torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
// MASTER_PORT), MPI (OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, or PMI_RANK, PMI_SIZE), SLURM
// (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID); none of them: one rank, alone. Address and port:
// flags, then MASTER_ADDR and MASTER_PORT, then 127.0.0.1 and kDefaultPort. A source that is there
// but malformed (a rank without a size, no number, rank >= size) is refused with InvalidArgument
// naming the variable and its value; it is never skipped in favour of the next. `lookup` returns a
// variable's value or nullptr and defaults to the process environment.
Discovery discover(const TeamOptions& options,
                   const std::function<const char*(const char*)>& lookup = {});
// One line: "rank 1 of 4 (local rank 1) from torchrun, rendezvous at 127.0.0.1:29500".
std::string describe(const Discovery& discovery);

// Joins the team of processes that discover() describes. Collective over the processes: rank 0
// listens on the TCP port, the others connect (retrying until the deadline), and after the exchange
// only Unix sockets in the abstract namespace and anonymous memory remain: nothing that a killed
// process could leave behind. Owns one thread, which watches the peers and shows this rank's
// heart-beat. Errors, on every rank that can be reached: Fault naming the missing ranks at the
// deadline; InvalidArgument when sizes differ or a rank comes twice; Backend when the port is taken
// or a system call fails; Unsupported when ranks are on different hosts.
TeamHandle connect_team(const TeamOptions& options = {});

// ---- helpers --------------------------------------------------------------------------------

// Collective: runs `body` on this rank; if it threw an Error on any rank, throws on every rank an
// Error of the lowest failing rank's kind whose text lists each failing rank's message. This is how
// a construction is refused by all or by none.
void collectively(Team& team, const std::function<void()>& body);

}  // namespace penstock
