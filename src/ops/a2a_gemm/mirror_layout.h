// The window of the mirror: results on their way out, and where they land.
#pragma once

#include <cstdint>

#include "penstock/core/host_device.h"
#include "penstock/fabric/layout.h"
#include "penstock/ops/a2a_gemm/layout.h"

namespace penstock::a2a_gemm {

struct MirrorShape {
  std::uint64_t ranks = 1;
  std::uint64_t max_rows = 0;    // of any rank
  std::uint64_t row_bytes = 0;   // of a row of the result, bf16
  std::uint64_t row_blocks = 1;  // that a rank's rows are announced in
  bool staged = true;            // puts start inside the window
};

enum MirrorRegion : int { kMirrorSend = 0, kMirrorLanding, kMirrorArrived, kMirrorConsumed };

inline constexpr RegionTable<MirrorShape, 4> kMirrorTable{
    "gemm_a2a",
    {// [slot][destination][rows][N]
     {"send",
      [](const MirrorShape& s) {
        return s.staged ? kSlots * s.ranks * s.max_rows * s.row_bytes : 0;
      },
      1024, Access::kOwner, Access::kOwner},
     // [slot][source][rows][N]; the owner's own place stays empty
     {"landing", [](const MirrorShape& s) { return kSlots * s.ranks * s.max_rows * s.row_bytes; },
      1024, Access::kPeers, Access::kOwner},
     // [slot][source][row block] u64 epochs, written by the source
     {"arrived",
      [](const MirrorShape& s) { return kSlots * s.ranks * arrival_stride(s.row_blocks); },
      kLineBytes, Access::kPeers, Access::kOwner},
     // [slot][peer] u64 epochs: `peer` has read everything that this rank sent in that epoch
     {"consumed", [](const MirrorShape& s) { return kSlots * s.ranks * kLineBytes; }, kLineBytes,
      Access::kPeers, Access::kOwner}}};

struct MirrorIndex {
  MirrorShape shape;
  LayoutOffsets<4> at;

  PENSTOCK_HOST_DEVICE constexpr std::uint64_t send(std::uint32_t slot, int destination,
                                                    std::uint64_t row) const {
    return at.offset[kMirrorSend] + place(slot, destination, row);
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t landing(std::uint32_t slot, int source,
                                                       std::uint64_t row) const {
    return at.offset[kMirrorLanding] + place(slot, source, row);
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t arrived(std::uint32_t slot, int source,
                                                       std::uint64_t row_block) const {
    return at.offset[kMirrorArrived] +
           (slot * shape.ranks + static_cast<std::uint64_t>(source)) *
               arrival_stride(shape.row_blocks) +
           row_block * 8;
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t consumed(std::uint32_t slot, int peer) const {
    return at.offset[kMirrorConsumed] +
           (slot * shape.ranks + static_cast<std::uint64_t>(peer)) * kLineBytes;
  }

 private:
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t place(std::uint32_t slot, int rank,
                                                     std::uint64_t row) const {
    return ((slot * shape.ranks + static_cast<std::uint64_t>(rank)) * shape.max_rows + row) *
           shape.row_bytes;
  }
};

// `staged`: results wait in the window for whoever moves them.
MirrorIndex mirror_index(const Shape& shape, std::int32_t row_block_rows, bool staged);
// For allocation and digests.
Layout mirror_layout(const Shape& shape, std::int32_t row_block_rows, bool staged);

}  // namespace penstock::a2a_gemm
