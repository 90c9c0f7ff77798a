// The window of moe_stage2: where rows land, where they wait to leave, what announces and frees
// them.
#pragma once

#include <cstdint>

#include "penstock/fabric/layout.h"
#include "penstock/fabric/protocol.h"
#include "penstock/ops/moe_stage2/shape.h"

namespace penstock::moe_stage2 {

// What the regions' sizes depend on. Rows of one call and slot.
struct WindowShape {
  std::uint64_t ranks = 1;
  std::uint64_t row_bytes = 0;
  std::uint64_t reserved = 0;  // rows that one source may land here
  std::uint64_t staged = 0;    // `reserved` where transports read from the window, 0 for direct
  // Rows for one destination that wait to be fetched because they passed the reservation: a pair's
  // worst case less the reservation.
  std::uint64_t spill = 0;
  std::uint64_t table_rows = 0;  // entries of one row table: a pair's worst case
};

// Head of a row table, on a line of its own before the entries.
struct TableHead {
  std::int64_t rows = 0;  // of the run, spilled ones included
};

enum WindowRegion : int {
  kSend = 0,
  kSendTable = 1,
  kLanding = 2,
  kLandingTable = 3,
  kSpill = 4,
  kArrived = 5,
  kConsumed = 6,
};

inline constexpr std::uint64_t kSlots = kCallsInFlight;
inline constexpr std::uint64_t kLineBytes =
    128;  // words that different ranks write lie on lines of their own

PENSTOCK_HOST_DEVICE constexpr std::uint64_t table_bytes(const WindowShape& s) {
  return kLineBytes + (s.table_rows * 4 + kLineBytes - 1) / kLineBytes * kLineBytes;
}

inline constexpr RegionTable<WindowShape, 7> kWindowTable{
    "moe_stage2",
    {// [slot][destination][staged rows]: rows on their way to a peer's landing region
     {"send", [](const WindowShape& s) { return kSlots * s.ranks * s.staged * s.row_bytes; }, 1024,
      Access::kOwner, Access::kOwner},
     // [slot][destination] row tables on their way
     {"send_table", [](const WindowShape& s) { return kSlots * s.ranks * table_bytes(s); },
      kLineBytes, Access::kOwner, Access::kOwner},
     // [slot][source][reserved rows]
     {"landing", [](const WindowShape& s) { return kSlots * s.ranks * s.reserved * s.row_bytes; },
      1024, Access::kPeers, Access::kOwner},
     // [slot][source] row tables
     {"landing_table", [](const WindowShape& s) { return kSlots * s.ranks * table_bytes(s); },
      kLineBytes, Access::kPeers, Access::kOwner},
     // [destination][spill rows]: written here, read by the destinations where it is. One slot: a
     // call that spills waits until the call before it is consumed, skew costs time and not memory.
     {"spill", [](const WindowShape& s) { return s.ranks * s.spill * s.row_bytes; }, 1024,
      Access::kOwner, Access::kPeers},
     // [slot][source] u64 epochs: everything of the call from `source` is there; beside it, where
     // tables travel by themselves (cuda), the same for the table alone
     {"arrived", [](const WindowShape& s) { return kSlots * s.ranks * kLineBytes; }, kLineBytes,
      Access::kPeers, Access::kOwner},
     // [slot][peer] u64 epochs: `peer` has read everything that this rank sent or spilled
     {"consumed", [](const WindowShape& s) { return kSlots * s.ranks * kLineBytes; }, kLineBytes,
      Access::kPeers, Access::kOwner}}};

// Byte offsets from the window's base. One place for the arithmetic of host and device.
struct WindowIndex {
  WindowShape shape;
  LayoutOffsets<7> at;

  PENSTOCK_HOST_DEVICE constexpr std::uint64_t pair(std::uint32_t slot, int peer) const {
    return slot * shape.ranks + static_cast<std::uint64_t>(peer);
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t send(std::uint32_t slot, int peer,
                                                    std::uint64_t row) const {
    return at.offset[kSend] + (pair(slot, peer) * shape.staged + row) * shape.row_bytes;
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t landing(std::uint32_t slot, int source,
                                                       std::uint64_t row) const {
    return at.offset[kLanding] + (pair(slot, source) * shape.reserved + row) * shape.row_bytes;
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t spill(int destination, std::uint64_t row) const {
    return at.offset[kSpill] +
           (static_cast<std::uint64_t>(destination) * shape.spill + row) * shape.row_bytes;
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t send_table(std::uint32_t slot, int peer) const {
    return at.offset[kSendTable] + pair(slot, peer) * table_bytes(shape);
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t landing_table(std::uint32_t slot, int source) const {
    return at.offset[kLandingTable] + pair(slot, source) * table_bytes(shape);
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t arrived(std::uint32_t slot, int source) const {
    return at.offset[kArrived] + pair(slot, source) * kLineBytes;
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t table_arrived(std::uint32_t slot, int source) const {
    return arrived(slot, source) + sizeof(std::uint64_t);
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t consumed(std::uint32_t slot, int peer) const {
    return at.offset[kConsumed] + pair(slot, peer) * kLineBytes;
  }
};

// `staged`: whether rows pass through the send region. No spill region where a reservation already
// holds a pair's worst case.
WindowShape window_shape(const Shape& shape, bool staged);
WindowIndex window_index(const WindowShape& shape);
// For printing, digests and allocation; throws InvalidArgument when the shape is refused.
Layout window_layout(const Shape& shape, bool staged);

}  // namespace penstock::moe_stage2
