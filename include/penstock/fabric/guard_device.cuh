// The guard in kernels: deadlines in time, the first cause in host-visible memory, abort words at
// every rank. Nothing traps; a failed wait is a status that the kernel carries to its end.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "penstock/core/fault_record.h"
#include "penstock/fabric/device_views.h"
#include "penstock/fabric/protocol.h"

namespace penstock::device {

enum class Scope { kDevice, kSystem };

template <Scope kScope>
inline constexpr ::cuda::thread_scope kThreadScope =
    kScope == Scope::kSystem ? ::cuda::thread_scope_system : ::cuda::thread_scope_device;

// ld.relaxed: LD.64.STRONG.{GPU,SYS}. Served by the L2 of the GPU that holds the word.
template <Scope kScope>
__device__ inline std::uint64_t load_relaxed(const std::uint64_t* word) {
  return ::cuda::atomic_ref<std::uint64_t, kThreadScope<kScope>>(*const_cast<std::uint64_t*>(word))
      .load(::cuda::memory_order_relaxed);
}
// ld.acquire: the load, then CCTL.IVALL (later loads of this SM miss its L1).
template <Scope kScope>
__device__ inline std::uint64_t load_acquire(const std::uint64_t* word) {
  return ::cuda::atomic_ref<std::uint64_t, kThreadScope<kScope>>(*const_cast<std::uint64_t*>(word))
      .load(::cuda::memory_order_acquire);
}
// st.relaxed: ST.64.STRONG.{GPU,SYS}.
template <Scope kScope>
__device__ inline void store_relaxed(std::uint64_t* word, std::uint64_t value) {
  ::cuda::atomic_ref<std::uint64_t, kThreadScope<kScope>>(*word).store(
      value, ::cuda::memory_order_relaxed);
}
// st.release: MEMBAR.ALL.{GPU,SYS}, then the store.
template <Scope kScope>
__device__ inline void store_release(std::uint64_t* word, std::uint64_t value) {
  ::cuda::atomic_ref<std::uint64_t, kThreadScope<kScope>>(*word).store(
      value, ::cuda::memory_order_release);
}

// Nanoseconds of the GPU's wall clock: common to all SMs, monotonic, coarse (it ticks in steps of
// up to 1 us), which is fine for deadlines.
__device__ inline std::uint64_t global_timer_ns() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Where a wait stands, for the record; the operator's number comes from the view.
struct WaitSite {
  std::int32_t peer = -1;
  std::int32_t stage = -1;
  std::int32_t region = -1;
  std::int32_t index = -1;
};

// State of one wait in progress.
struct WaitClock {
  std::uint32_t polls = 0;
  std::uint64_t start_ns = 0;
};

// A guard armed for one launch: reads the generation once. Build it at the start of a kernel, after
// the launch's first grid-wide point of order if the same stream rearms (stream order is enough).
class Guard {
 public:
  __device__ explicit Guard(const GuardView& view)
      : view_(view), generation_(load_relaxed<Scope::kDevice>(view.generation)) {}

  __device__ const GuardView& view() const { return view_; }
  __device__ std::uint64_t generation() const { return generation_; }

  // Whether this rank was told that the generation is over. One load from L2.
  __device__ bool aborted() const {
    return generation_aborted(load_relaxed<Scope::kSystem>(view_.abort_word), generation_);
  }

  // Called after each unsuccessful poll. kArrived: keep polling. Looks at the abort word and the
  // clock only every kPollsPerLook polls, so that a wait that ends soon costs no load but its own.
  __device__ WaitStatus poll(WaitClock& clock) const {
    if ((++clock.polls & (kPollsPerLook - 1)) != 0) return WaitStatus::kArrived;
    if (aborted()) return WaitStatus::kAborted;
    const std::uint64_t now = global_timer_ns();
    if (clock.start_ns == 0) {
      clock.start_ns = now;
    } else if (now - clock.start_ns > view_.deadline_ns) {
      return WaitStatus::kDeadline;
    }
    return WaitStatus::kArrived;
  }

  // Ends a wait: the first failed wait of the generation on this rank writes the record and, if it
  // failed by itself rather than because a peer said so, raises the abort word at every rank.
  // Record first: who sees the word may look at the record. Returns `status`.
  __device__ WaitStatus fail(WaitStatus status, const WaitClock& clock, const WaitSite& site,
                             std::uint64_t expected, std::uint64_t seen,
                             FaultCause cause = FaultCause::kDeadline) const {
    ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_device> claim(*view_.record_claim);
    if (claim.fetch_max(generation_, ::cuda::memory_order_relaxed) >= generation_) return status;
    if (status == WaitStatus::kAborted) cause = FaultCause::kPeerAborted;
    write_record(clock, site, expected, seen, cause);
    if (status != WaitStatus::kAborted) raise();
    return status;
  }

  // Tells every rank that this generation is over. Idempotent; a maximum, so that a late kernel of
  // an old generation cannot lower a newer word. Order: what this thread did before is visible to
  // who sees the word.
  __device__ void raise() const {
    ::cuda::atomic_thread_fence(::cuda::memory_order_release, ::cuda::thread_scope_system);
#pragma unroll 1
    for (int k = 1; k <= view_.ranks; ++k) {
      std::uint64_t* word = view_.abort_words[(view_.rank + k) % view_.ranks];
      ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_system>(*word).fetch_max(
          generation_, ::cuda::memory_order_relaxed);
    }
  }

 private:
  static constexpr std::uint32_t kPollsPerLook = 64;

  __device__ void write_record(const WaitClock& clock, const WaitSite& site, std::uint64_t expected,
                               std::uint64_t seen, FaultCause cause) const {
    FaultRecord& record = *view_.record;
    record.rank = view_.rank;
    record.peer = site.peer;
    record.op = view_.op;
    record.stage = site.stage;
    record.region = site.region;
    record.index = site.index;
    record.expected = expected;
    record.seen = seen;
    record.waited_ns = clock.start_ns == 0 ? 0 : global_timer_ns() - clock.start_ns;
    record.cause = static_cast<std::uint32_t>(cause);
    ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_system>(record.valid)
        .store(1, ::cuda::memory_order_release);
  }

  const GuardView& view_;
  std::uint64_t generation_;
};

}  // namespace penstock::device
