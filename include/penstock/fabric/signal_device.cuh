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

// Elements first, first + stride, ... of `count`, eight loads in flight a thread.
template <typename T>
__device__ inline void put_elements(T* to, const T* from, std::uint64_t count, std::uint64_t first,
                                    std::uint64_t stride) {
  constexpr int kInFlight = 8;
  std::uint64_t i = first;
  for (; i + (kInFlight - 1) * stride < count; i += kInFlight * stride) {
    T value[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) value[k] = from[i + k * stride];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) to[i + k * stride] = value[k];
  }
  for (; i < count; i += stride) to[i] = from[i];
}

// Copies `bytes` from src to dst with threads first, first + stride, ... of any group; dst may be a
// peer's window. Any size and alignment is right; 16-byte accesses when both pointers are multiples
// of 16 (the rest of the size goes byte by byte), 4-byte ones when pointers and size are multiples
// of 4, else single bytes, which a link carries a quarter as fast and worse. No order: a signal
// must follow.
__device__ inline void put_threads(std::byte* dst, const std::byte* src, std::uint64_t bytes,
                                   std::uint64_t first, std::uint64_t stride) {
  const auto both = reinterpret_cast<std::uint64_t>(dst) | reinterpret_cast<std::uint64_t>(src);
  if (both % sizeof(uint4) == 0) {
    const std::uint64_t whole = bytes / sizeof(uint4);
    put_elements(reinterpret_cast<uint4*>(dst), reinterpret_cast<const uint4*>(src), whole, first,
                 stride);
    put_elements(dst + whole * sizeof(uint4), src + whole * sizeof(uint4), bytes % sizeof(uint4),
                 first, stride);
  } else if ((both | bytes) % sizeof(std::uint32_t) == 0) {
    put_elements(reinterpret_cast<std::uint32_t*>(dst), reinterpret_cast<const std::uint32_t*>(src),
                 bytes / sizeof(std::uint32_t), first, stride);
  } else {
    put_elements(dst, src, bytes, first, stride);
  }
}

// put_threads with all threads of a one-dimensional CTA.
__device__ inline void put_block(std::byte* dst, const std::byte* src, std::uint64_t bytes) {
  put_threads(dst, src, bytes, threadIdx.x, blockDim.x);
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
