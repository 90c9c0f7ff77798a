#include "fabric/team_base.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <thread>

#include "penstock/core/env.h"
#include "penstock/fabric/guard.h"

namespace penstock::detail {
namespace {

std::string_view name_of(std::uint32_t call) {
  switch (static_cast<Collective>(call)) {
    case Collective::kNone:
      return "nothing";
    case Collective::kBarrier:
      return "barrier";
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kAllGatherVarying:
      return "all_gather_varying";
    case Collective::kAgree:
      return "agree";
    case Collective::kDescriptor:
      return "all_gather_descriptor";
  }
  return "an unknown call";
}

}  // namespace

std::chrono::nanoseconds deadline_or_default(std::chrono::nanoseconds deadline) {
  require(deadline.count() >= 0, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("deadline of {} ns: give a positive time, or 0 for PENSTOCK_DEADLINE_S",
                       deadline.count());
  });
  if (deadline.count() > 0) return deadline;
  return std::chrono::nanoseconds(static_cast<std::int64_t>(Env::deadline_s() * 1e9));
}

std::uint64_t steady_ns() noexcept {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

TeamBase::TeamBase(TeamControl* control, int rank, int size, std::chrono::nanoseconds deadline)
    : control_(control), rank_(rank), size_(size), deadline_(deadline) {}

void TeamBase::join() noexcept {
  store(cell(rank_).state, static_cast<std::uint64_t>(RankState::kJoined));
}

void TeamBase::leave() noexcept {
  store(cell(rank_).state, static_cast<std::uint64_t>(RankState::kLeft), std::memory_order_seq_cst);
}

void TeamBase::report_dead(int peer) noexcept {
  std::atomic_ref<std::uint64_t> state(cell(peer).state);
  std::uint64_t seen = state.load();
  while (seen != static_cast<std::uint64_t>(RankState::kLeft) &&
         seen != static_cast<std::uint64_t>(RankState::kDead)) {
    if (state.compare_exchange_weak(seen, static_cast<std::uint64_t>(RankState::kDead))) break;
  }
  if (state.load() == static_cast<std::uint64_t>(RankState::kLeft)) return;
  FaultRecord record;
  record.rank = rank_;
  record.peer = peer;
  record.cause = static_cast<std::uint32_t>(FaultCause::kPeerDead);
  raise(record);
}

TeamBase::Entry::Entry(TeamBase& team, Collective call) : team_(team) {
  std::uint32_t idle = 0;
  if (!team.busy_.compare_exchange_strong(idle, static_cast<std::uint32_t>(call))) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("rank {} entered {} while another of its threads is in {}: collective "
                            "calls of one rank must follow each other",
                            team.rank_, name_of(static_cast<std::uint32_t>(call)), name_of(idle)));
  }
}

void TeamBase::exchange(Collective call, std::uint32_t piece, std::uint64_t must_match,
                        std::span<const std::byte> payload) {
  check();
  const std::uint64_t sequence = sequence_ + 1;
  ExchangeSlot& mine = cell(rank_).slot[sequence & 1];
  mine.call = static_cast<std::uint32_t>(call);
  mine.piece = piece;
  mine.bytes = must_match;
  if (!payload.empty()) std::memcpy(mine.payload, payload.data(), payload.size());
  store(cell(rank_).arrived, sequence);
  sequence_ = sequence;

  const Guard guard(TeamHandle(std::shared_ptr<void>(), this));
  WaitSite site;
  int next = 0;
  const auto ready = [&] {
    while (next < size_ && epoch_reached(load(cell(next).arrived), sequence)) ++next;
    site.peer = next < size_ ? next : -1;
    return next == size_;
  };
  const auto seen = [&] { return load(cell(std::min(next, size_ - 1)).arrived); };
  const WaitStatus status = guard.try_wait_until(ready, seen, sequence, site);
  if (status != WaitStatus::kArrived) {
    std::vector<int> missing;
    for (int r = 0; r < size_; ++r) {
      if (!epoch_reached(load(cell(r).arrived), sequence)) missing.push_back(r);
    }
    const auto record = fault().value_or(FaultRecord{});
    throw Fault(record, missing.empty()
                            ? fmt::format("{} at rank {}", name_of(mine.call), rank_)
                            : fmt::format("{} at rank {}, missing: rank {}", name_of(mine.call),
                                          rank_, fmt::join(missing, ", ")));
  }
  // A rank that gave up just before the last one came has raised the fault: all or none.
  check();
  for (int r = 0; r < size_; ++r) {
    const ExchangeSlot& theirs = slot(r);
    if (theirs.call == slot(0).call && theirs.piece == slot(0).piece &&
        theirs.bytes == slot(0).bytes) {
      continue;
    }
    // Every rank sees the same slots, so every rank throws, and with the same text.
    throw Error(
        ErrorKind::kInvalidArgument,
        fmt::format("collective calls differ: rank 0 is in {} of {} bytes, rank {} in {} "
                    "of {} bytes; every rank must make the same calls in the same order",
                    name_of(slot(0).call), slot(0).bytes, r, name_of(theirs.call), theirs.bytes));
  }
}

void TeamBase::barrier() {
  const Entry entry(*this, Collective::kBarrier);
  exchange(Collective::kBarrier, 0, 0, {});
}

void TeamBase::all_gather(std::span<const std::byte> mine, std::span<std::byte> all) {
  require(all.size() == mine.size() * static_cast<std::size_t>(size_), ErrorKind::kInvalidArgument,
          [&] {
            return fmt::format("all_gather of {} bytes on {} ranks needs room for {}, got {}",
                               mine.size(), size_, mine.size() * static_cast<std::size_t>(size_),
                               all.size());
          });
  const Entry entry(*this, Collective::kAllGather);
  std::size_t done = 0;
  std::uint32_t piece = 0;
  do {
    const std::size_t part = std::min(mine.size() - done, kSlotBytes);
    exchange(Collective::kAllGather, piece++, mine.size(), mine.subspan(done, part));
    for (int r = 0; r < size_ && part > 0; ++r) {
      std::memcpy(all.data() + static_cast<std::size_t>(r) * mine.size() + done, slot(r).payload,
                  part);
    }
    done += part;
  } while (done < mine.size());
}

std::vector<std::vector<std::byte>> TeamBase::all_gather_varying(std::span<const std::byte> mine) {
  const Entry entry(*this, Collective::kAllGatherVarying);
  const std::uint64_t length = mine.size();
  exchange(Collective::kAllGatherVarying, 0, 0, std::as_bytes(std::span(&length, 1)));
  std::vector<std::vector<std::byte>> all(static_cast<std::size_t>(size_));
  std::vector<std::uint64_t> lengths(static_cast<std::size_t>(size_));
  std::uint64_t longest = 0;
  for (int r = 0; r < size_; ++r) {
    auto& theirs = lengths[static_cast<std::size_t>(r)];
    std::memcpy(&theirs, slot(r).payload, sizeof theirs);
    longest = std::max(longest, theirs);
  }
  for (int r = 0; r < size_; ++r) {
    all[static_cast<std::size_t>(r)].resize(lengths[static_cast<std::size_t>(r)]);
  }
  std::uint32_t piece = 1;
  for (std::uint64_t done = 0; done < longest; done += kSlotBytes) {
    const auto part_of = [&](std::uint64_t whole) {
      return static_cast<std::size_t>(
          whole > done ? std::min<std::uint64_t>(whole - done, kSlotBytes) : 0);
    };
    exchange(Collective::kAllGatherVarying, piece++, longest,
             mine.subspan(std::min<std::size_t>(done, mine.size()), part_of(length)));
    for (int r = 0; r < size_; ++r) {
      const auto i = static_cast<std::size_t>(r);
      const std::size_t part = part_of(lengths[i]);
      if (part > 0) std::memcpy(all[i].data() + done, slot(r).payload, part);
    }
  }
  return all;
}

bool TeamBase::agree(bool mine) {
  const Entry entry(*this, Collective::kAgree);
  const auto vote = static_cast<std::byte>(mine ? 1 : 0);
  exchange(Collective::kAgree, 0, 0, std::span(&vote, 1));
  bool all = true;
  for (int r = 0; r < size_; ++r) all = all && slot(r).payload[0] == std::byte{1};
  return all;
}

bool TeamBase::faulted() const noexcept {
  return generation_aborted(load(cell(rank_).abort_word, std::memory_order_relaxed),
                            generation_.load(std::memory_order_relaxed));
}

std::optional<FaultRecord> TeamBase::fault() const {
  if (!faulted()) return std::nullopt;
  const std::uint64_t wanted = generation();
  // The winner publishes within microseconds of its claim; should it have died in between, the
  // fault is real but its words are lost.
  const std::uint64_t start = steady_ns();
  while (load(control_->published) < wanted) {
    if (steady_ns() - start > 100'000'000) {
      FaultRecord lost;
      lost.rank = rank_;
      lost.cause = static_cast<std::uint32_t>(FaultCause::kPeerAborted);
      lost.valid = 1;
      return lost;
    }
    std::this_thread::yield();
  }
  std::uint64_t words[sizeof(FaultRecord) / 8];
  for (std::size_t i = 0; i < std::size(words); ++i) {
    words[i] = load(control_->record[i], std::memory_order_relaxed);
  }
  FaultRecord record;
  std::memcpy(&record, words, sizeof record);
  return record;
}

void TeamBase::check() const {
  const auto record = fault();
  if (record) throw Fault(*record);
}

FaultRecord TeamBase::raise(const FaultRecord& record) noexcept {
  const std::uint64_t mine = generation();
  std::atomic_ref<std::uint64_t> claim(control_->claim);
  std::uint64_t seen = claim.load();
  bool won = false;
  while (seen < mine && !won) won = claim.compare_exchange_weak(seen, mine);
  FaultRecord out = record;
  out.valid = 1;
  if (won) {
    std::uint64_t words[sizeof(FaultRecord) / 8];
    std::memcpy(words, &out, sizeof out);
    for (std::size_t i = 0; i < std::size(words); ++i) {
      store(control_->record[i], words[i], std::memory_order_relaxed);
    }
    store(control_->published, mine);
  }
  // The loser does this too: the winner may die before it comes here.
  for (int r = 0; r < size_; ++r) store_max(cell(r).abort_word, mine);
  return won ? out : fault().value_or(out);
}

bool TeamBase::gone(int rank) const noexcept {
  const auto state = static_cast<RankState>(load(cell(rank).state, std::memory_order_seq_cst));
  return state == RankState::kLeft || state == RankState::kDead;
}

void TeamBase::set_waiting_for(int peer) noexcept {
  store(cell(rank_).waiting_for, static_cast<std::uint64_t>(peer) + 1, std::memory_order_relaxed);
}

int TeamBase::blame(int peer, std::chrono::nanoseconds waited) const noexcept {
  if (peer < 0) return peer;
  // A stopped process shows no heart-beat; nothing that its peers say about each other matters
  // then. A loaded machine delays heart-beats too, hence both bounds.
  const auto bound =
      static_cast<std::uint64_t>(std::max<std::int64_t>(waited.count() / 2, 250'000'000));
  const std::uint64_t now = steady_ns();
  int stalest = -1;
  std::uint64_t longest = bound;
  for (int r = 0; r < size_; ++r) {
    const std::uint64_t beat = load(cell(r).heart_beat_ns, std::memory_order_relaxed);
    if (r == rank_ || beat == 0 || now <= beat) continue;
    if (now - beat > longest) {
      longest = now - beat;
      stalest = r;
    }
  }
  if (stalest >= 0) return stalest;
  int at = peer;
  for (int hops = 0; hops < size_; ++hops) {
    const auto next = static_cast<int>(load(cell(at).waiting_for, std::memory_order_relaxed)) - 1;
    if (next < 0 || next == at) return at;
    if (next == rank_) return peer;  // a circle through this rank: nobody is at its end
    at = next;
  }
  return peer;
}

void TeamBase::add_hook(RearmHook* hook) {
  const std::scoped_lock lock(hooks_mutex_);
  hooks_.push_back(hook);
}

void TeamBase::remove_hook(RearmHook* hook) noexcept {
  const std::scoped_lock lock(hooks_mutex_);
  hooks_.erase(std::remove(hooks_.begin(), hooks_.end(), hook), hooks_.end());
}

void TeamBase::throw_gone() {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || !gone(r)) continue;
    FaultRecord record;
    record.rank = rank_;
    record.peer = r;
    record.cause = static_cast<std::uint32_t>(FaultCause::kPeerDead);
    record.valid = 1;
    raise(record);
    throw Fault(record, fmt::format("rank {} is gone, so the team cannot be rearmed: start its "
                                    "process again and make a new team",
                                    r));
  }
  check();
  throw Error(ErrorKind::kBackend, "rearm failed although no rank is gone");
}

// Waits until all ranks have come (decided == false: may still give up) or until all have reached
// the new generation (true).
void TeamBase::wait_for_rearm(bool decided) {
  const std::uint64_t old = decided ? generation() - 1 : generation();
  const std::uint64_t all = size_ == 64 ? ~0ULL : (1ULL << size_) - 1;
  std::atomic_ref<std::uint64_t> mask(control_->rearm_mask[old & 1]);
  const std::uint64_t bit = 1ULL << rank_;
  const auto start = std::chrono::steady_clock::now();
  auto pause = std::chrono::microseconds(1);
  std::uint64_t came = 0;
  while (true) {
    std::uint64_t there = 0;
    if (decided) {
      for (int r = 0; r < size_; ++r) {
        if (load(cell(r).rearm_done) > old) there |= 1ULL << r;
      }
    } else {
      there = mask.load();
    }
    if (there == all) return;
    // A rank that came and has given up since is not the one to blame.
    came |= there;
    const int missing = std::countr_zero(~(came == all ? there : came));
    const auto waited = std::chrono::steady_clock::now() - start;
    bool lost = false;
    for (int r = 0; r < size_; ++r) lost = lost || ((there >> r & 1) == 0 && gone(r));
    if (lost || waited > deadline_) {
      if (!decided) {
        std::uint64_t seen = mask.load();
        while (seen != all && !mask.compare_exchange_weak(seen, seen & ~bit)) {
        }
        if (seen == all) return;  // the last rank came after all
      }
      if (lost) throw_gone();
      FaultRecord record;
      record.rank = rank_;
      record.peer = missing;
      record.waited_ns = static_cast<std::uint64_t>(waited.count());
      record.cause = static_cast<std::uint32_t>(FaultCause::kDeadline);
      record.valid = 1;
      if (decided) raise(record);
      throw Fault(record, fmt::format("rearm at rank {}: rank {} did not come", rank_, missing));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(500));
  }
}

void TeamBase::rearm() {
  const Entry entry(*this, Collective::kBarrier);
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && gone(r)) throw_gone();
  }
  const std::uint64_t old = generation();
  // A rank that asks for a rearm while others still work must stop them first.
  if (!faulted()) {
    FaultRecord record;
    record.rank = rank_;
    record.cause = static_cast<std::uint32_t>(FaultCause::kPeerAborted);
    raise(record);
  }
  std::vector<RearmHook*> hooks;
  {
    const std::scoped_lock lock(hooks_mutex_);
    hooks = hooks_;
  }
  std::uint64_t highest = kNoEpoch;
  for (RearmHook* hook : hooks) {
    hook->quiesce();
    highest = std::max(highest, hook->highest_epoch());
  }
  store(cell(rank_).rearm_epoch, highest);
  store(cell(rank_).rearm_sequence, sequence_);
  // The other word serves the next generation, in which nobody can be before this one is decided.
  if (rank_ == 0) store(control_->rearm_mask[(old + 1) & 1], 0);
  std::atomic_ref<std::uint64_t>(control_->rearm_mask[old & 1]).fetch_or(1ULL << rank_);
  wait_for_rearm(false);

  std::uint64_t floor = kNoEpoch;
  std::uint64_t sequence = 0;
  for (int r = 0; r < size_; ++r) {
    floor = std::max(floor, load(cell(r).rearm_epoch));
    sequence = std::max(sequence, load(cell(r).rearm_sequence));
  }
  sequence_ = sequence;
  for (RearmHook* hook : hooks) hook->resume(floor);
  generation_.store(old + 1, std::memory_order_seq_cst);
  store(cell(rank_).rearm_done, old + 1);
  wait_for_rearm(true);
  // A death that was noticed while the generation changed was raised in the old one.
  for (int r = 0; r < size_; ++r) {
    if (static_cast<RankState>(load(cell(r).state, std::memory_order_seq_cst)) ==
        RankState::kDead) {
      throw_gone();
    }
  }
}

}  // namespace penstock::detail
