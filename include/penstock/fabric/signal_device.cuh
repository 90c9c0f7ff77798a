// Signals in kernels: loads and stores of 64-bit words with the memory order in the name, waits
// with a deadline, and put / put_signal by the calling threads. Orders are those of the PTX memory
// model; the instructions they become on sm_90a (checked in the disassembly) stand beside each.
//
// The pattern of every hand-over:
//   producer CTA:  all threads store data; __syncthreads(); one thread store_release(word, epoch)
//   consumer CTA:  one thread wait_epoch(word, epoch); __syncthreads(); all threads load data
// bar.sync is part of causality order, so the one thread's release covers the CTA's stores and its
// acquire the CTA's loads. Scope kSystem when a peer GPU, a copy engine or the host is on the other
// side, kDevice inside one GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda/atomic>

#include "penstock/fabric/device_views.h"
#include "penstock/fabric/guard_device.cuh"
#include "penstock/fabric/protocol.h"

namespace penstock::device {

// Waits until *word >= expected. Order: acquire at `scope`. Polls relaxed and acquires once at the
// end: an acquire in the loop would throw the L1 away at every poll (CCTL.IVALL). Called by one
// thread; returns how the wait ended and never blocks past the guard's deadline. On kDeadline the
// record is written and every rank is told; on kDeadline and kAborted the caller publishes nothing
// derived from the data and leaves.
template <Scope kScope>
__device__ inline WaitStatus wait_epoch(const std::uint64_t* word, std::uint64_t expected,
                                        const Guard& guard, const WaitSite& site) {
  WaitClock clock;
  while (!epoch_reached(load_relaxed<kScope>(word), expected)) {
    if (const WaitStatus status = guard.poll(clock); status != WaitStatus::kArrived) {
      const std::uint64_t seen = load_relaxed<kScope>(word);
      if (epoch_reached(seen, expected)) break;  // arrived while the clock was read
      return guard.fail(status, clock, site, expected, seen);
    }
  }
  (void)load_acquire<kScope>(word);
  return WaitStatus::kArrived;
}

// The same without acquire: for words that order nothing but themselves (counters, progress shown
// to the host).
template <Scope kScope>
__device__ inline WaitStatus wait_epoch_relaxed(const std::uint64_t* word, std::uint64_t expected,
                                                const Guard& guard, const WaitSite& site) {
  WaitClock clock;
  while (!epoch_reached(load_relaxed<kScope>(word), expected)) {
    if (const WaitStatus status = guard.poll(clock); status != WaitStatus::kArrived) {
      const std::uint64_t seen = load_relaxed<kScope>(word);
      if (epoch_reached(seen, expected)) break;
      return guard.fail(status, clock, site, expected, seen);
    }
  }
  return WaitStatus::kArrived;
}

// wait_epoch for a whole CTA: thread 0 waits, every thread gets the status and may read the data.
// Has two barriers' worth of synchronisation; all threads of the CTA must call it.
template <Scope kScope>
__device__ inline WaitStatus wait_epoch_block(const std::uint64_t* word, std::uint64_t expected,
                                              const Guard& guard, const WaitSite& site) {
  WaitStatus status = WaitStatus::kArrived;
  if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
    status = wait_epoch<kScope>(word, expected, guard, site);
  }
  return static_cast<WaitStatus>(__syncthreads_or(static_cast<int>(status)));
}

// Copies `bytes` from src to dst with the CTA's threads, 16 bytes a thread and access, eight in
// flight. dst may be a peer's window. Pointers and size: multiples of 16; any other size is
// finished byte by byte by the first threads. No order: follow with signal_block.
__device__ inline void put_block(std::byte* dst, const std::byte* src, std::uint64_t bytes) {
  constexpr int kInFlight = 8;
  const std::uint64_t whole = bytes / sizeof(uint4);
  const auto* from = reinterpret_cast<const uint4*>(src);
  auto* to = reinterpret_cast<uint4*>(dst);
  const std::uint64_t stride = blockDim.x;
  std::uint64_t i = threadIdx.x;
  for (; i + (kInFlight - 1) * stride < whole; i += kInFlight * stride) {
    uint4 value[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) value[k] = from[i + k * stride];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) to[i + k * stride] = value[k];
  }
  for (; i < whole; i += stride) to[i] = from[i];
  const std::uint64_t rest = bytes % sizeof(uint4);
  if (threadIdx.x < rest)
    dst[whole * sizeof(uint4) + threadIdx.x] = src[whole * sizeof(uint4) + threadIdx.x];
}

// Publishes `epoch` in a peer's word behind everything that this CTA stored before: barrier, then
// one st.release.sys (MEMBAR.ALL.SYS + ST.STRONG.SYS). All threads call it.
__device__ inline void signal_block(std::uint64_t* word, std::uint64_t epoch) {
  __syncthreads();
  if (threadIdx.x == 0) store_release<Scope::kSystem>(word, epoch);
}

// put_block, then signal_block: transport `direct` for a whole chunk. `word` may be nullptr (no
// signal).
__device__ inline void put_signal_block(std::byte* dst, const std::byte* src, std::uint64_t bytes,
                                        std::uint64_t* word, std::uint64_t epoch) {
  put_block(dst, src, bytes);
  if (word != nullptr) signal_block(word, epoch);
}

// Ends a chunk that several CTAs produce: each CTA calls it once after its last store; the last of
// `producers` CTAs publishes `epoch` in `word` (a peer's or its own). `arrivals` is a device word
// that only this chunk's producers touch; it counts on across calls (epoch k ends at k *
// producers), so it is never reset and replays of a graph need no clearing. `calls` is the number
// of calls before this one. Order: every CTA's stores, then the signal. Returns true in every
// thread of the CTA that signalled.
__device__ inline bool signal_after_all(std::uint64_t* arrivals, std::uint64_t producers,
                                        std::uint64_t calls, std::uint64_t* word,
                                        std::uint64_t epoch) {
  __syncthreads();
  int last = 0;
  if (threadIdx.x == 0) {
    ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_device> counter(*arrivals);
    last = counter.fetch_add(1, ::cuda::memory_order_acq_rel) + 1 == (calls + 1) * producers;
    if (last) store_release<Scope::kSystem>(word, epoch);
  }
  return __syncthreads_or(last) != 0;
}

}  // namespace penstock::device
