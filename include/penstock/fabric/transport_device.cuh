// Producer side of transport copy_engine and sm in kernels: one thread posts a descriptor, somebody
// else moves the bytes. transport direct has no descriptors: see put_block and signal_block in
// signal_device.cuh.
#pragma once

#include <cstdint>
#include <cuda/atomic>

#include "penstock/fabric/device_views.h"
#include "penstock/fabric/guard_device.cuh"
#include "penstock/fabric/protocol.h"

namespace penstock::device {

namespace detail {

// Claims `count` positions from `position` on, by compare-and-swap once there is room for all of
// them, so that a producer that gives up leaves no hole. A full ring is waited for until the
// guard's deadline, then reported (FaultCause::kRingFull) with the position as `expected` and the
// ring's tail as `seen`.
__device__ inline WaitStatus claim(const RingView& ring, std::uint64_t count, const Guard& guard,
                                   const WaitSite& site, std::uint64_t& position) {
  ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_device> head(*ring.head);
  ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_device> tail_seen(*ring.tail_seen);
  position = head.load(::cuda::memory_order_relaxed);
  WaitClock clock;
  while (true) {
    // tail_seen first: it is in L2, the consumer's own word may be across PCIe.
    const std::uint64_t last = position + (count - 1);
    if (!ring_has_room(last, tail_seen.load(::cuda::memory_order_acquire), ring.capacity)) {
      const std::uint64_t tail = load_acquire<Scope::kSystem>(ring.tail);
      tail_seen.fetch_max(tail, ::cuda::memory_order_release);
      if (!ring_has_room(last, tail, ring.capacity)) {
        if (const WaitStatus status = guard.poll(clock); status != WaitStatus::kArrived) {
          return guard.fail(status, clock, site, position, tail, FaultCause::kRingFull);
        }
        position = head.load(::cuda::memory_order_relaxed);
        continue;
      }
    }
    if (head.compare_exchange_weak(position, position + count, ::cuda::memory_order_relaxed)) {
      return WaitStatus::kArrived;
    }
  }
}

// Everything of a slot but its sequence.
__device__ inline void write_slot(const RingView& ring, std::uint64_t position,
                                  const PutDescriptor& put) {
  const std::uint64_t index = ring_index(position, ring.capacity);
  ring.signal_cells[index] = put.signal_epoch;
  // Three 16-byte stores instead of seven: each is a transaction of its own across PCIe.
  const auto* from = reinterpret_cast<const uint4*>(&put);
  auto* to = reinterpret_cast<uint4*>(&ring.slots[index].put);
  static_assert(sizeof(PutDescriptor) == 3 * sizeof(uint4));
#pragma unroll
  for (int i = 0; i < 3; ++i) to[i] = from[i];
}

}  // namespace detail

// Posts one put. Called by one thread, after the data at src_offset is complete and ordered before
// this thread (same thread, or __syncthreads(), or an acquire of the producers' counter). Order:
// everything ordered before this call is visible to the copy (st.release.sys on the slot's
// sequence). The data must stay as it is until the put is done. A full ring ends at the guard's
// deadline (FaultCause::kRingFull).
__device__ inline WaitStatus post(const RingView& ring, const PutDescriptor& put,
                                  const Guard& guard, const WaitSite& site) {
  std::uint64_t position = 0;
  if (const WaitStatus status = detail::claim(ring, 1, guard, site, position);
      status != WaitStatus::kArrived) {
    return status;
  }
  detail::write_slot(ring, position, put);
  store_release<Scope::kSystem>(&ring.slots[ring_index(position, ring.capacity)].sequence,
                                position + 1);
  return WaitStatus::kArrived;
}

// Posts put_at(0) ... put_at(count - 1), 1 <= count <= ring.capacity, in that order, all or none:
// one claim and one fence instead of `count` of them, and the proxy finds them together and merges
// what is adjacent. Called by one thread; otherwise as post().
template <typename PutAt>
__device__ inline WaitStatus post_many(const RingView& ring, int count, const PutAt& put_at,
                                       const Guard& guard, const WaitSite& site) {
  std::uint64_t position = 0;
  if (const WaitStatus status =
          detail::claim(ring, static_cast<std::uint64_t>(count), guard, site, position);
      status != WaitStatus::kArrived) {
    return status;
  }
  for (int i = 0; i < count; ++i) {
    detail::write_slot(ring, position + static_cast<std::uint64_t>(i), put_at(i));
  }
  ::cuda::atomic_thread_fence(::cuda::memory_order_release, ::cuda::thread_scope_system);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t at = position + static_cast<std::uint64_t>(i);
    store_relaxed<Scope::kSystem>(&ring.slots[ring_index(at, ring.capacity)].sequence, at + 1);
  }
  return WaitStatus::kArrived;
}

}  // namespace penstock::device
