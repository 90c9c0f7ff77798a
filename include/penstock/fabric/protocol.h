// The fabric's protocol as plain data and constexpr arithmetic: epochs, tags, packets, mailboxes,
// the descriptor ring, the abort word. Included by host code, by device code and by nothing that
// throws, allocates or logs; spec/fabric.pml models what is written here and a test ties the two.
//
// Rules that everything else rests on:
//   epochs      64 bits, start at 1 (0 means never), only grow, are compared with >=, are never
//               reset. One writer a word.
//   buffers     kCallsInFlight copies of what a call rewrites, chosen by parity_of(epoch). A
//               producer writes the buffer of epoch e only after its consumer has published
//               consumed >= reuse_epoch(e).
//   order       data, then signal (release); signal (acquire), then data.
//   abort       an abort word holds the highest aborted generation; a wait armed in generation g
//               ends as soon as the word at its own rank is >= g. Rearming raises the generation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "penstock/core/host_device.h"

namespace penstock {

// Ranks that one team can have: the fabric is for the GPUs (or CPU ranks) of one host.
inline constexpr int kMaxRanks = 64;

// ---- epochs ---------------------------------------------------------------------------------

inline constexpr std::uint64_t kNoEpoch = 0;
inline constexpr std::uint64_t kCallsInFlight = 2;

PENSTOCK_HOST_DEVICE constexpr bool epoch_reached(std::uint64_t seen, std::uint64_t expected) {
  return seen >= expected;
}
// Which of the kCallsInFlight buffers the call of this epoch uses.
PENSTOCK_HOST_DEVICE constexpr std::uint32_t parity_of(std::uint64_t epoch) {
  return static_cast<std::uint32_t>(epoch % kCallsInFlight);
}
// The consumed epoch that a producer must have seen before it may write the buffer of `epoch`.
PENSTOCK_HOST_DEVICE constexpr std::uint64_t reuse_epoch(std::uint64_t epoch) {
  return epoch > kCallsInFlight ? epoch - kCallsInFlight : kNoEpoch;
}
// Rebuilds a 64-bit epoch from its low half, for transports that can only write 4 bytes at once:
// the value congruent to `low` that lies nearest to `near` (exact while they differ by < 2^31).
PENSTOCK_HOST_DEVICE constexpr std::uint64_t widen_epoch(std::uint32_t low, std::uint64_t near) {
  const std::uint32_t ahead = low - static_cast<std::uint32_t>(near);
  if (ahead < 0x80000000u) return near + ahead;
  const std::uint64_t behind = 0x100000000ULL - ahead;
  return near >= behind ? near - behind : near + ahead;
}

// ---- abort ----------------------------------------------------------------------------------

// Generations start at 1, so that a zeroed abort word means "none aborted".
inline constexpr std::uint64_t kFirstGeneration = 1;
PENSTOCK_HOST_DEVICE constexpr bool generation_aborted(std::uint64_t abort_word,
                                                       std::uint64_t generation) {
  return abort_word >= generation;
}

// How a wait ended. Device waits return it; host waits turn the last two into Fault.
enum class WaitStatus : std::uint32_t { kArrived = 0, kDeadline = 1, kAborted = 2 };

// ---- packets --------------------------------------------------------------------------------

// 12 bytes of payload and the tag that proves them, stored and loaded as one unit on the device
// (one 16-byte access) and as two 8-byte halves on the CPU, the half with the tag last (release)
// and first (acquire). A receiver polls the payload itself: no flag, no second trip.
struct alignas(16) Packet {
  std::uint32_t payload[3];
  std::uint32_t tag;
};
static_assert(sizeof(Packet) == 16);
inline constexpr std::uint64_t kPacketPayloadBytes = 12;

PENSTOCK_HOST_DEVICE constexpr std::uint64_t packets_for(std::uint64_t bytes) {
  return (bytes + kPacketPayloadBytes - 1) / kPacketPayloadBytes;
}

// Tags run through 1 .. 2^32 - 1; 0 is the empty mailbox. Everything else that tells two packets
// apart (source, position, phase, parity) is in the address, so the tag needs the epoch alone.
inline constexpr std::uint64_t kTagPeriod = 0xffffffffULL;
PENSTOCK_HOST_DEVICE constexpr std::uint32_t tag_of(std::uint64_t epoch) {
  return static_cast<std::uint32_t>(epoch % kTagPeriod) + 1;
}
// The last epoch up to `near` that has this tag; 0 for an empty mailbox. For fault records.
PENSTOCK_HOST_DEVICE constexpr std::uint64_t epoch_of_tag(std::uint32_t tag, std::uint64_t near) {
  if (tag == 0) return kNoEpoch;
  const std::uint64_t back = (near % kTagPeriod + kTagPeriod - (tag - 1)) % kTagPeriod;
  return near >= back ? near - back : kNoEpoch;
}
// A tag comes back after kTagPeriod epochs, about an hour of back-to-back calls. A packet that a
// large call left and no smaller call overwrote must be gone by then: whenever this is true, the
// receiver zeroes its whole mailbox of parity_of(epoch) after it consumed `epoch` and before it
// publishes anything of epoch + 1 (no sender can be ahead: it needs that publication first).
inline constexpr std::uint64_t kSweepPeriod = 1ULL << 30;
PENSTOCK_HOST_DEVICE constexpr bool sweep_due(std::uint64_t epoch) {
  return epoch % kSweepPeriod < kCallsInFlight;
}

// Mailbox of the one-shot all-reduce, at every rank: [parity][source][packet].
PENSTOCK_HOST_DEVICE constexpr std::uint64_t one_shot_slot(std::uint64_t epoch, int source,
                                                           std::uint64_t packet, int ranks,
                                                           std::uint64_t capacity) {
  return (parity_of(epoch) * static_cast<std::uint64_t>(ranks) +
          static_cast<std::uint64_t>(source)) *
             capacity +
         packet;
}
PENSTOCK_HOST_DEVICE constexpr std::uint64_t one_shot_packets(int ranks, std::uint64_t capacity) {
  return kCallsInFlight * static_cast<std::uint64_t>(ranks) * capacity;
}
// Two-shot: rank r owns the packets [slice_begin(r), slice_begin(r + 1)), sums them in rank order
// and sends the sums to all. Phase 0 mailbox [parity][source][packet of my slice], phase 1 mailbox
// [parity][packet] (its source is the slice's owner).
PENSTOCK_HOST_DEVICE constexpr std::uint64_t slice_begin(std::uint64_t packets, int ranks,
                                                         int rank) {
  return packets * static_cast<std::uint64_t>(rank) / static_cast<std::uint64_t>(ranks);
}
PENSTOCK_HOST_DEVICE constexpr std::uint64_t slice_capacity(std::uint64_t capacity, int ranks) {
  return capacity / static_cast<std::uint64_t>(ranks) + 1;
}
PENSTOCK_HOST_DEVICE constexpr std::uint64_t two_shot_reduce_slot(std::uint64_t epoch, int source,
                                                                  std::uint64_t packet, int ranks,
                                                                  std::uint64_t capacity) {
  return one_shot_slot(epoch, source, packet, ranks, slice_capacity(capacity, ranks));
}
PENSTOCK_HOST_DEVICE constexpr std::uint64_t two_shot_reduce_packets(int ranks,
                                                                     std::uint64_t capacity) {
  return one_shot_packets(ranks, slice_capacity(capacity, ranks));
}
PENSTOCK_HOST_DEVICE constexpr std::uint64_t two_shot_gather_slot(std::uint64_t epoch,
                                                                  std::uint64_t packet,
                                                                  std::uint64_t capacity) {
  return parity_of(epoch) * capacity + packet;
}
PENSTOCK_HOST_DEVICE constexpr std::uint64_t two_shot_gather_packets(std::uint64_t capacity) {
  return kCallsInFlight * capacity;
}

// ---- puts and the descriptor ring -----------------------------------------------------------

inline constexpr std::uint64_t kNoSignal = ~0ULL;

// One put: bytes from this rank's window into a peer's, then (if signal_offset != kNoSignal) the
// value signal_epoch into the 8-byte word at signal_offset of the peer's window, visible no earlier
// than the data. Offsets and sizes in bytes. bytes == 0 sends the signal alone.
struct PutDescriptor {
  std::int32_t peer = -1;
  std::uint32_t flags = 0;  // reserved, 0
  std::uint64_t src_offset = 0;
  std::uint64_t dst_offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t signal_offset = kNoSignal;
  std::uint64_t signal_epoch = 0;
};
static_assert(sizeof(PutDescriptor) == 48);

// A ring slot, one 64-byte line of host memory. Producers (many threads, on a device or the host)
// wait until position - tail < capacity (deadline: FaultCause::kRingFull) and only then claim the
// position, by compare-and-swap on a counter of their own, so that one that gives up leaves no
// hole; they write `put`, then `sequence` = position + 1 with release at system scope. The single
// consumer takes position p when slot[p % capacity].sequence == p + 1 and stores RingControl::tail
// = p + 1 (release) once the slot may be reused. Sequences are 64-bit and never reset, so no slot
// is ever cleared.
struct alignas(64) RingSlot {
  PutDescriptor put;
  std::uint64_t reserved = 0;
  std::uint64_t sequence = 0;
};
static_assert(sizeof(RingSlot) == 64);

// Beside the slots. Each word on a line of its own: head is the producers', the rest the
// consumer's.
struct RingControl {
  alignas(64) std::uint64_t head = 0;  // positions claimed (host producers; kernels keep their own)
  alignas(64) std::uint64_t tail = 0;  // positions taken by the consumer
  alignas(64) std::uint64_t done = 0;  // positions whose data and signal are visible at the peer
  alignas(64) std::uint64_t abort_word = 0;  // generation aborted; producers give up when >= theirs
};

PENSTOCK_HOST_DEVICE constexpr std::uint64_t ring_index(std::uint64_t position,
                                                        std::uint64_t capacity) {
  return position & (capacity - 1);  // capacity is a power of two
}
PENSTOCK_HOST_DEVICE constexpr bool ring_has_room(std::uint64_t position, std::uint64_t tail,
                                                  std::uint64_t capacity) {
  return position - tail < capacity;
}

}  // namespace penstock
