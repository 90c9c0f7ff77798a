// The window of a2a_gemm: where chunks land, what announces them, what frees them.
#pragma once

#include <cstdint>

#include "penstock/fabric/layout.h"
#include "penstock/fabric/protocol.h"
#include "penstock/ops/a2a_gemm/shape.h"

namespace penstock::a2a_gemm {

// What the regions' sizes depend on.
struct WindowShape {
  std::uint64_t ranks = 1;
  std::uint64_t staged_rows = 0;   // total rows of X where puts start inside the window, else 0
  std::uint64_t max_rows = 0;      // of any destination
  std::uint64_t row_bytes = 0;     // of one row of a chunk
  std::uint64_t scale_blocks = 0;  // of one row, 0 without scales
  std::uint64_t row_blocks = 1;    // that a chunk is announced in
};

enum WindowRegion : int {
  kSend = 0,
  kSendScales = 1,
  kChunks = 2,
  kChunkScales = 3,
  kArrived = 4,
  kConsumed = 5,
};

inline constexpr std::uint64_t kSlots = kCallsInFlight;
// Words that different ranks write lie on lines of their own.
inline constexpr std::uint64_t kLineBytes = 128;
inline constexpr std::uint64_t kScaleRowUnit = 128;  // rows to which a line of scales is padded

PENSTOCK_HOST_DEVICE constexpr std::uint64_t scale_stride(std::uint64_t rows) {
  return (rows + kScaleRowUnit - 1) / kScaleRowUnit * kScaleRowUnit;
}
// Bytes between the arrival words of two sources.
PENSTOCK_HOST_DEVICE constexpr std::uint64_t arrival_stride(std::uint64_t row_blocks) {
  return (row_blocks * 8 + kLineBytes - 1) / kLineBytes * kLineBytes;
}

inline constexpr RegionTable<WindowShape, 6> kWindowTable{
    "a2a_gemm",
    {// [slot][rows of X][K]: the sender's copy of X, for transports that read from the window
     {"send", [](const WindowShape& s) { return kSlots * s.staged_rows * s.row_bytes; }, 1024,
      Access::kOwner, Access::kOwner},
     // [slot][scale block][staged rows padded] f32
     {"send_scales",
      [](const WindowShape& s) {
        return kSlots * s.scale_blocks * scale_stride(s.staged_rows) * 4;
      },
      1024, Access::kOwner, Access::kOwner},
     // [slot][source][rows][K]; the owner's own chunk is read where it is and its place stays empty
     {"chunks", [](const WindowShape& s) { return kSlots * s.ranks * s.max_rows * s.row_bytes; },
      1024, Access::kPeers, Access::kOwner},
     // [slot][source][scale block][rows padded] f32: transposed, so that the scales of a tile's
     // rows are one piece
     {"chunk_scales",
      [](const WindowShape& s) {
        return kSlots * s.ranks * s.scale_blocks * scale_stride(s.max_rows) * 4;
      },
      1024, Access::kPeers, Access::kOwner},
     // [slot][source][row block] u64 epochs, written by the source
     {"arrived",
      [](const WindowShape& s) { return kSlots * s.ranks * arrival_stride(s.row_blocks); },
      kLineBytes, Access::kPeers, Access::kOwner},
     // [slot][peer] u64 epochs: `peer` has read everything that this rank sent in that epoch
     {"consumed", [](const WindowShape& s) { return kSlots * s.ranks * kLineBytes; }, kLineBytes,
      Access::kPeers, Access::kOwner}}};

// Byte offsets from the window's base. One place for the arithmetic of host and device.
struct WindowIndex {
  WindowShape shape;
  LayoutOffsets<6> at;

  PENSTOCK_HOST_DEVICE constexpr std::uint64_t send(std::uint32_t slot, std::uint64_t row) const {
    return at.offset[kSend] + (slot * shape.staged_rows + row) * shape.row_bytes;
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t send_scale(std::uint32_t slot, std::uint64_t block,
                                                          std::uint64_t row) const {
    return at.offset[kSendScales] +
           ((slot * shape.scale_blocks + block) * scale_stride(shape.staged_rows) + row) * 4;
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t chunk(std::uint32_t slot, int source,
                                                     std::uint64_t row) const {
    return at.offset[kChunks] +
           ((slot * shape.ranks + static_cast<std::uint64_t>(source)) * shape.max_rows + row) *
               shape.row_bytes;
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t chunk_scale(std::uint32_t slot, int source,
                                                           std::uint64_t block,
                                                           std::uint64_t row) const {
    return at.offset[kChunkScales] +
           (((slot * shape.ranks + static_cast<std::uint64_t>(source)) * shape.scale_blocks +
             block) *
                scale_stride(shape.max_rows) +
            row) *
               4;
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t arrived(std::uint32_t slot, int source,
                                                       std::uint64_t row_block) const {
    return at.offset[kArrived] +
           (slot * shape.ranks + static_cast<std::uint64_t>(source)) *
               arrival_stride(shape.row_blocks) +
           row_block * 8;
  }
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t consumed(std::uint32_t slot, int peer) const {
    return at.offset[kConsumed] +
           (slot * shape.ranks + static_cast<std::uint64_t>(peer)) * kLineBytes;
  }
};

// `row_block_rows`: rows that are announced together. `staged`: whether X is copied into the window
// before it is sent.
WindowShape window_shape(const Shape& shape, std::int32_t row_block_rows, bool staged);
WindowIndex window_index(const WindowShape& shape);
// For printing, digests and allocation; throws InvalidArgument when the shape is refused.
Layout window_layout(const Shape& shape, std::int32_t row_block_rows, bool staged);

}  // namespace penstock::a2a_gemm
