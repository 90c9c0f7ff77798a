// What kernels get of the fabric, by value: pointers and sizes, filled in by the host once a team
// is built. Plain data, no CUDA types, so that host code can build these structs; the functions
// that use them are in *_device.cuh.
//
// Everything that changes between two launches of a captured graph (generation, epochs, ring heads)
// is behind a pointer to device memory; what is here stays valid for the life of the team.
#pragma once

#include <cstddef>
#include <cstdint>

#include "penstock/core/fault_record.h"
#include "penstock/fabric/protocol.h"

namespace penstock {

// One rank's side of the guard. Words are 8-byte aligned.
struct GuardView {
  // This rank's generation, device memory; rearming raises it between launches.
  const std::uint64_t* generation = nullptr;
  // Highest aborted generation as this rank was told, device memory; written by every rank and by
  // this rank's host.
  std::uint64_t* abort_word = nullptr;
  // [ranks] this rank's mappings of all ranks' abort words, its own included; the array lies in
  // device memory.
  std::uint64_t* const* abort_words = nullptr;
  // Highest generation for which `record` was written, device memory: the first failed wait of a
  // generation wins.
  std::uint64_t* record_claim = nullptr;
  // Pinned host memory, this rank's.
  FaultRecord* record = nullptr;
  std::uint64_t deadline_ns = 0;  // of every single wait, from its first slow poll
  std::int32_t rank = -1;
  std::int32_t ranks = 0;
  std::int32_t op = -1;  // operator instance, for the record
};

// The windows of one operator as one rank sees them. Rank r's window starts at bases[r] +
// mapping_offset.
struct WindowView {
  std::byte* base = nullptr;  // own window
  std::byte* const* bases =
      nullptr;  // [ranks] mappings, own included; the array lies in device memory
  std::uint64_t mapping_offset = 0;  // of this slice in a pooled mapping
  std::uint64_t bytes = 0;
  std::int32_t rank = -1;
  std::int32_t ranks = 0;
};

// Producer side of a descriptor ring. The slots lie in pinned host memory when the host proxy
// consumes them (transport copy_engine), in device memory when copy CTAs do (transport sm); posting
// is the same.
struct RingView {
  RingSlot* slots = nullptr;            // [capacity]
  const std::uint64_t* tail = nullptr;  // RingControl::tail, written by the consumer
  std::uint64_t* head = nullptr;        // positions claimed, device memory
  std::uint64_t* tail_seen =
      nullptr;  // last tail a producer read, device memory: spares the trip to the host
  std::uint64_t* signal_cells =
      nullptr;  // [capacity] device memory: source of the signal copy behind the data
  std::uint64_t capacity = 0;  // a power of two
};

// Mailboxes of the packet all-reduce, one-shot and two-shot. `capacity` counts packets of one
// rank's largest message.
struct PacketView {
  Packet* one_shot = nullptr;          // own, one_shot_packets(ranks, capacity)
  Packet* reduce = nullptr;            // own, two_shot_reduce_packets(ranks, capacity)
  Packet* gather = nullptr;            // own, two_shot_gather_packets(capacity)
  Packet* const* one_shots = nullptr;  // [ranks] mappings; the arrays lie in device memory
  Packet* const* reduces = nullptr;
  Packet* const* gathers = nullptr;
  std::uint64_t capacity = 0;
  std::int32_t rank = -1;
  std::int32_t ranks = 0;
};

}  // namespace penstock
