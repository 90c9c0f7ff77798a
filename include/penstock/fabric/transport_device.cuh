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

// Posts one put. Called by one thread, after the data at src_offset is complete and ordered before
// this thread (same thread, or __syncthreads(), or an acquire of the producers' counter). Order:
// everything ordered before this call is visible to the copy (st.release.sys on the slot's
// sequence). The data must stay as it is until the put is done.
//
// A full ring is waited for until the guard's deadline, then reported (FaultCause::kRingFull) with
// this position as `expected` and the ring's tail as `seen`. A position is claimed only when there
// is room for it, by compare-and-swap, so a producer that gives up leaves no hole and the consumer
// never waits for a slot that nobody will fill.
__device__ inline WaitStatus post(const RingView& ring, const PutDescriptor& put,
                                  const Guard& guard, const WaitSite& site) {
  ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_device> head(*ring.head);
  ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_device> tail_seen(*ring.tail_seen);
  std::uint64_t position = head.load(::cuda::memory_order_relaxed);
  WaitClock clock;
  while (true) {
    // tail_seen first: it is in L2, the consumer's own word may be across PCIe.
    if (!ring_has_room(position, tail_seen.load(::cuda::memory_order_acquire), ring.capacity)) {
      const std::uint64_t tail = load_acquire<Scope::kSystem>(ring.tail);
      tail_seen.fetch_max(tail, ::cuda::memory_order_release);
      if (!ring_has_room(position, tail, ring.capacity)) {
        if (const WaitStatus status = guard.poll(clock); status != WaitStatus::kArrived) {
          return guard.fail(status, clock, site, position, tail, FaultCause::kRingFull);
        }
        position = head.load(::cuda::memory_order_relaxed);
        continue;
      }
    }
    if (head.compare_exchange_weak(position, position + 1, ::cuda::memory_order_relaxed)) break;
  }
  const std::uint64_t index = ring_index(position, ring.capacity);
  ring.signal_cells[index] = put.signal_epoch;
  // Three 16-byte stores instead of seven: each is a transaction of its own across PCIe.
  const auto* from = reinterpret_cast<const uint4*>(&put);
  auto* to = reinterpret_cast<uint4*>(&ring.slots[index].put);
  static_assert(sizeof(PutDescriptor) == 3 * sizeof(uint4));
#pragma unroll
  for (int i = 0; i < 3; ++i) to[i] = from[i];
  store_release<Scope::kSystem>(&ring.slots[index].sequence, position + 1);
  return WaitStatus::kArrived;
}

}  // namespace penstock::device
