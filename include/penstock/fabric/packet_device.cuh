// Packets in kernels: 16 bytes that carry 12 bytes of payload and the tag that proves them, and the
// all-reduce built on them. A receiver polls the payload itself: no flag, no fence, no second trip.
//
// Atomicity. One ld/st.relaxed.sys.b128 is a single memory operation of the PTX model (PTX ISA 8.3,
// sm_70 and later), unlike .v4.b32, which is ordered only element by element. On sm_90a it becomes
// exactly one LDG.E.128.STRONG.SYS or STG.E.128.STRONG.SYS (read in the disassembly, CUDA 13.0).
// Over NVLink the 16 bytes stay one unit; the host refuses packets between GPUs without native peer
// atomics, i.e. over PCIe.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "penstock/fabric/device_views.h"
#include "penstock/fabric/guard_device.cuh"
#include "penstock/fabric/protocol.h"

namespace penstock::device {

// Six bf16, or any 12 bytes.
struct Payload {
  std::uint32_t word[3];
};

// Relaxed, system scope. The slot is in this GPU's memory (a receiver never polls across the link).
__device__ inline Packet load_packet(const Packet* slot) {
  std::uint64_t low;
  std::uint64_t high;
  asm volatile(
      "{\n\t.reg .b128 packet;\n\t"
      "ld.relaxed.sys.global.b128 packet, [%2];\n\t"
      "mov.b128 {%0, %1}, packet;\n\t}"
      : "=l"(low), "=l"(high)
      : "l"(slot)
      : "memory");
  return {{static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32),
           static_cast<std::uint32_t>(high)},
          static_cast<std::uint32_t>(high >> 32)};
}

// Relaxed, system scope; the slot may be a peer's. Orders nothing but itself.
__device__ inline void store_packet(Packet* slot, const Payload& payload, std::uint32_t tag) {
  const std::uint64_t low = payload.word[0] | static_cast<std::uint64_t>(payload.word[1]) << 32;
  const std::uint64_t high = payload.word[2] | static_cast<std::uint64_t>(tag) << 32;
  asm volatile(
      "{\n\t.reg .b128 packet;\n\t"
      "mov.b128 packet, {%1, %2};\n\t"
      "st.relaxed.sys.global.b128 [%0], packet;\n\t}"
      :
      : "l"(slot), "l"(low), "l"(high)
      : "memory");
}

// The sum of kRanks payloads of six bf16 each: ((x_0 + x_1) + x_2) + ... in f32, in rank order,
// rounded to bf16 once (nearest, ties to even). Every rank computes it from the same bits in the
// same order, so all ranks agree bit for bit.
template <int kRanks>
__device__ inline Payload sum_bf16(const Payload (&x)[kRanks]) {
  Payload out;
#pragma unroll
  for (int w = 0; w < 3; ++w) {
    float low = 0.0F;
    float high = 0.0F;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const float x_low = __uint_as_float(x[r].word[w] << 16);
      const float x_high = __uint_as_float(x[r].word[w] & 0xffff0000U);
      low = r == 0 ? x_low : low + x_low;
      high = r == 0 ? x_high : high + x_high;
    }
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(low, high);
    out.word[w] = *reinterpret_cast<const std::uint32_t*>(&rounded);
  }
  return out;
}

// All-reduce of `count` packets of bf16 over the ranks of a team, inside a kernel. One instance a
// thread, made at the start of the kernel.
//
// Who calls: every thread that takes part, on every rank, with the same epoch and count; thread
// `first` of `stride` handles packets first, first + stride, ... (in all phases, so that one
// thread's program order is all the order the protocol needs). `first` and `stride` may differ
// between ranks but not between calls of a rank, unless a point of order over the rank's whole grid
// (a grid barrier, a kernel boundary) lies between the two calls; two_shot asks the same where
// `count` changes. load(p): Payload of packet p of this rank. store(p, sum): takes the result. Both
// are called by the thread that handles p, store only after every rank's packet p has arrived.
// Epochs: consecutive, from 1 or from a rearm's floor + 1. Mailboxes alternate by parity; a rank
// can send epoch e + 2 only after it received e + 1 from every rank, so nobody overwrites what is
// still being read. Returns kArrived, or how the wait failed; then some results were not stored,
// nothing derived from this call may be published, and the kernel goes to its end. Deterministic:
// yes, and equal for one_shot and two_shot. Capture: yes if the epoch comes from device memory.
template <int kRanks>
class PacketAllReduce {
 public:
  __device__ PacketAllReduce(const PacketView& view, const Guard& guard, std::int32_t stage = -1)
      : view_(view), guard_(guard), stage_(stage) {
#pragma unroll
    for (int r = 0; r < kRanks; ++r) one_shots_[r] = view.one_shots[r];
  }

  // One hop: everybody sends everything to everybody. Bytes sent: (kRanks - 1) * count * 16.
  template <typename Load, typename Store>
  __device__ WaitStatus one_shot(std::uint64_t epoch, std::uint64_t first, std::uint64_t stride,
                                 std::uint64_t count, Load&& load, Store&& store) const {
    const std::uint32_t tag = tag_of(epoch);
    const std::uint64_t out = one_shot_slot(epoch, view_.rank, 0, kRanks, view_.capacity);
    for (std::uint64_t p = first; p < count; p += stride) {
      const Payload mine = load(p);
#pragma unroll
      for (int k = 0; k < kRanks; ++k) {
        // Unrolled over all ranks so that the pointers stay in registers; the own mailbox is
        // skipped.
        if (k != view_.rank) store_packet(one_shots_[k] + out + p, mine, tag);
      }
    }
    for (std::uint64_t p = first; p < count; p += stride) {
      Payload x[kRanks];
      const Packet* in = view_.one_shot + one_shot_slot(epoch, 0, p, kRanks, view_.capacity);
      const WaitStatus status = receive(in, view_.capacity, tag, epoch, 0, p, x);
      if (status != WaitStatus::kArrived) return status;
      put_own(x, load(p));
      store(p, sum_bf16<kRanks>(x));
    }
    return WaitStatus::kArrived;
  }

  // Two hops: rank r sums slice r and sends the sums. Bytes sent: 2 * (kRanks - 1) / kRanks * count
  // * 16. Less traffic from 4 ranks and several rows on, one hop more of latency.
  template <typename Load, typename Store>
  __device__ WaitStatus two_shot(std::uint64_t epoch, std::uint64_t first, std::uint64_t stride,
                                 std::uint64_t count, Load&& load, Store&& store) const {
    const std::uint32_t tag = tag_of(epoch);
    const std::uint64_t slots = slice_capacity(view_.capacity, kRanks);
    const std::uint64_t begin = slice_begin(count, kRanks, view_.rank);
    const std::uint64_t end = slice_begin(count, kRanks, view_.rank + 1);
    const std::uint64_t out = two_shot_reduce_slot(epoch, view_.rank, 0, kRanks, view_.capacity);
    for (std::uint64_t p = first; p < count; p += stride) {
      const int owner = owner_of(p, count);
      if (owner == view_.rank) continue;
      store_packet(view_.reduces[owner] + out + (p - slice_begin(count, kRanks, owner)), load(p),
                   tag);
    }
    for (std::uint64_t p = begin + first; p < end; p += stride) {
      Payload x[kRanks];
      const Packet* in =
          view_.reduce + two_shot_reduce_slot(epoch, 0, p - begin, kRanks, view_.capacity);
      const WaitStatus status = receive(in, slots, tag, epoch, 1, p, x);
      if (status != WaitStatus::kArrived) return status;
      put_own(x, load(p));
      const Payload sum = sum_bf16<kRanks>(x);
      const std::uint64_t gather = two_shot_gather_slot(epoch, p, view_.capacity);
      for (int k = 1; k < kRanks; ++k) {
        store_packet(view_.gathers[(view_.rank + k) % kRanks] + gather, sum, tag);
      }
      store(p, sum);
    }
    for (std::uint64_t p = first; p < count; p += stride) {
      const int owner = owner_of(p, count);
      if (owner == view_.rank) continue;
      const Packet* in = view_.gather + two_shot_gather_slot(epoch, p, view_.capacity);
      WaitClock clock;
      Packet got = load_packet(in);
      while (got.tag != tag) {
        if (const WaitStatus status = guard_.poll(clock); status != WaitStatus::kArrived) {
          return guard_.fail(status, clock, {owner, stage_, 2, static_cast<std::int32_t>(p)}, epoch,
                             got.tag);
        }
        got = load_packet(in);
      }
      store(p, Payload{{got.payload[0], got.payload[1], got.payload[2]}});
    }
    return WaitStatus::kArrived;
  }

  // Zeroes this rank's mailboxes of the epoch's parity. Call it when sweep_due(epoch), after the
  // whole grid of this rank has consumed `epoch` and before any thread of it sends epoch + 1 (a
  // grid barrier on both sides); once in 2^30 calls, it keeps a tag from coming back before the
  // packet that carried it last is gone.
  __device__ void sweep(std::uint64_t epoch, std::uint64_t first, std::uint64_t stride) const {
    const std::uint64_t parity = parity_of(epoch);
    const std::uint64_t one_shot = one_shot_packets(kRanks, view_.capacity) / kCallsInFlight;
    const std::uint64_t reduce = two_shot_reduce_packets(kRanks, view_.capacity) / kCallsInFlight;
    clear(view_.one_shot + parity * one_shot, one_shot, first, stride);
    clear(view_.reduce + parity * reduce, reduce, first, stride);
    clear(view_.gather + parity * view_.capacity, view_.capacity, first, stride);
  }

 private:
  // Inverse of slice_begin: the largest r with count * r / kRanks <= p.
  __device__ static int owner_of(std::uint64_t p, std::uint64_t count) {
    return static_cast<int>((static_cast<std::uint32_t>(p + 1) * kRanks - 1) /
                            static_cast<std::uint32_t>(count));
  }

  __device__ static void clear(Packet* slots, std::uint64_t count, std::uint64_t first,
                               std::uint64_t stride) {
    for (std::uint64_t i = first; i < count; i += stride) store_packet(slots + i, Payload{}, 0);
  }

  // Polls packet p of all other ranks (slots of one rank lie `pitch` apart), all loads of a round
  // in flight at once.
  __device__ WaitStatus receive(const Packet* in, std::uint64_t pitch, std::uint32_t tag,
                                std::uint64_t epoch, std::int32_t region, std::uint64_t p,
                                Payload (&x)[kRanks]) const {
    WaitClock clock;
    while (true) {
      std::uint32_t wrong = 0;
      int late = 0;
      std::uint32_t seen = 0;
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (r == view_.rank) continue;
        const Packet got = load_packet(in + static_cast<std::uint64_t>(r) * pitch);
        x[r] = Payload{{got.payload[0], got.payload[1], got.payload[2]}};
        if (got.tag != tag) {
          late = r;
          seen = got.tag;
        }
        wrong |= got.tag ^ tag;
      }
      if (wrong == 0) return WaitStatus::kArrived;
      if (const WaitStatus status = guard_.poll(clock); status != WaitStatus::kArrived) {
        return guard_.fail(status, clock, {late, stage_, region, static_cast<std::int32_t>(p)},
                           epoch, seen);
      }
    }
  }

  __device__ void put_own(Payload (&x)[kRanks], const Payload& mine) const {
    // Selects, not a guarded store: that became x[rank] with a run-time index, i.e. local memory.
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
#pragma unroll
      for (int w = 0; w < 3; ++w) x[r].word[w] = r == view_.rank ? mine.word[w] : x[r].word[w];
    }
  }

  const PacketView& view_;
  const Guard& guard_;
  Packet* one_shots_[kRanks];
  std::int32_t stage_;
};

}  // namespace penstock::device
