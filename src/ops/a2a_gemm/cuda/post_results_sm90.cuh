// Handing a finished piece of the mirror's result over, by one thread.
#pragma once

#include "ops/a2a_gemm/cuda/mirror_kernels.h"
#include "penstock/fabric/signal_device.cuh"
#include "penstock/fabric/transport_device.cuh"

namespace penstock::a2a_gemm {

// Whether the call's slots are free at all peers (BeginArgs::open).
__device__ __forceinline__ bool is_open(const ResultSend& send) {
  using device::Scope;
  return device::load_relaxed<Scope::kDevice>(send.open) ==
         device::load_relaxed<Scope::kDevice>(send.epoch);
}

// The word that announces the piece, at its destination.
__device__ __forceinline__ std::uint64_t piece_word(const ResultSend& send, const Piece& piece) {
  return send.index.arrived(static_cast<std::uint32_t>(send.slot), send.grid.rank,
                            static_cast<std::uint64_t>(piece.row_block));
}

// By one thread, after every store of the piece is ordered before it. Nothing in a call that was
// not opened.
__device__ __forceinline__ void post_result(const ResultSend& send, std::int32_t index) {
  using device::Scope;
  if (send.post == ResultPost::kNone || !is_open(send)) return;
  const Piece piece = mirror_piece(send.grid, send.rows, index);
  const std::uint64_t epoch = device::load_relaxed<Scope::kDevice>(send.epoch);
  if (send.post == ResultPost::kDirect) {
    device::store_release<Scope::kSystem>(
        reinterpret_cast<std::uint64_t*>(send.base[piece.peer] + piece_word(send, piece)), epoch);
    return;
  }
  const auto slot = static_cast<std::uint32_t>(send.slot);
  const auto row = static_cast<std::uint64_t>(piece.row);
  PutDescriptor put;
  put.peer = piece.peer;
  put.src_offset = send.index.send(slot, piece.peer, row);
  put.dst_offset = send.index.landing(slot, send.grid.rank, row);
  put.bytes = static_cast<std::uint64_t>(piece.rows) * send.index.shape.row_bytes;
  put.signal_offset = piece_word(send, piece);
  put.signal_epoch = epoch;
  const device::Guard guard(send.guard);
  // A ring that stays full is on record; the piece is then announced to nobody.
  (void)device::post(send.ring, put, guard, {piece.peer, 0, kMirrorSend, index});
}

}  // namespace penstock::a2a_gemm
