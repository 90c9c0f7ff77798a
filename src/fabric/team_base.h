// What both kinds of team have in common: everything that works on the shared control block.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "fabric/team_control.h"
#include "penstock/fabric/team.h"

namespace penstock::detail {

class TeamBase : public Team {
 public:
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  std::chrono::nanoseconds deadline() const noexcept override { return deadline_; }

  void barrier() override;
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override;
  std::vector<std::vector<std::byte>> all_gather_varying(std::span<const std::byte> mine) override;
  bool agree(bool mine) override;
  std::int32_t next_operator() override { return operators_++; }

  std::uint64_t generation() const noexcept override {
    return generation_.load(std::memory_order_acquire);
  }
  bool faulted() const noexcept override;
  std::optional<FaultRecord> fault() const override;
  void check() const override;
  FaultRecord raise(const FaultRecord& record) noexcept override;
  bool gone(int rank) const noexcept override;
  void rearm() override;
  void add_hook(RearmHook* hook) override;
  void remove_hook(RearmHook* hook) noexcept override;
  const std::uint64_t* abort_word() const noexcept override { return &cell(rank_).abort_word; }
  void set_waiting_for(int peer) noexcept override;
  int blame(int peer, std::chrono::nanoseconds waited) const noexcept override;

 protected:
  // The control block must outlive this object; the derived class owns it.
  TeamBase(TeamControl* control, int rank, int size, std::chrono::nanoseconds deadline);

  RankCell& cell(int rank) const noexcept { return control_->cell[rank]; }
  // Marks this rank as joined / left.
  void join() noexcept;
  void leave() noexcept;
  // Notes that a peer's process is gone and raises the fault that names it.
  void report_dead(int peer) noexcept;

  // Enters one exchange: publishes `payload` (<= kSlotBytes) and returns when all ranks have done
  // so; each rank's piece then stands in slot(r) until this rank's next exchange but one.
  void exchange(Collective call, std::uint32_t piece, std::uint64_t must_match,
                std::span<const std::byte> payload);
  const ExchangeSlot& slot(int rank) const noexcept { return cell(rank).slot[sequence_ & 1]; }

  // Exchanges entered: equal on all ranks between two collectives, also after a rearm.
  std::uint64_t exchanges() const noexcept { return sequence_; }

  // Refuses a second thread of the same rank in a collective.
  class Entry {
   public:
    Entry(TeamBase& team, Collective call);
    ~Entry() { team_.busy_.store(0, std::memory_order_release); }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    TeamBase& team_;
  };

 private:
  void wait_for_rearm(bool decided);
  [[noreturn]] void throw_gone();

  TeamControl* control_;
  int rank_;
  int size_;
  std::chrono::nanoseconds deadline_;
  std::uint64_t sequence_ = 0;  // exchanges entered
  std::int32_t operators_ = 0;
  std::atomic<std::uint64_t> generation_{kFirstGeneration};
  std::atomic<std::uint32_t> busy_{0};  // Collective in progress
  std::mutex hooks_mutex_;
  std::vector<RearmHook*> hooks_;
};

std::chrono::nanoseconds deadline_or_default(std::chrono::nanoseconds deadline);
std::uint64_t steady_ns() noexcept;

}  // namespace penstock::detail
