// Posting finished chunks from inside the grouped GEMM: no thread, warp or SM of its own. The
// addition that completes a chunk's counter does it, in the warp that counts.
#pragma once

#include "ops/moe_stage2/cuda/post_sm90.h"
#include "penstock/fabric/signal_device.cuh"
#include "penstock/fabric/transport_device.cuh"

namespace penstock::moe_stage2 {

// Stages of this operator's waits, for fault records.
enum WaitStage : std::int32_t {
  kStageReuse = 0,    // a peer has not consumed what the slot held before
  kStageArrived = 1,  // a peer's rows have not come
  kStageTable = 2,    // a peer's row table has not come
  kStagePost = 3,     // the proxy's ring stayed full
  kStageChunk = 4,    // a copy CTA waits for the GEMM's tiles
};

// Right neighbour first, so that not everybody starts with rank 0.
__device__ __forceinline__ int peer_after(const ChunkPost& post, int step) {
  const int peer = post.rank + step;
  return peer < post.ranks ? peer : peer - post.ranks;
}

// Rows of tiles [first, last) for `peer` that have a reserved place, as one put.
__device__ __forceinline__ PutDescriptor chunk_put(const ChunkPost& post, std::uint32_t slot,
                                                   int peer, int first, int last) {
  const auto reserved = static_cast<std::int32_t>(post.index.shape.reserved);
  const RowRange range = rows_of_tiles(post.prefix, first, last, peer);
  const std::int32_t end = range.end < reserved ? range.end : reserved;
  PutDescriptor put;
  put.peer = peer;
  if (range.begin >= end) return put;
  put.src_offset = post.index.send(slot, peer, static_cast<std::uint64_t>(range.begin));
  put.dst_offset = post.index.landing(slot, post.rank, static_cast<std::uint64_t>(range.begin));
  put.bytes = static_cast<std::uint64_t>(end - range.begin) * post.index.shape.row_bytes;
  return put;
}

// Stores the signal that all rows of this call are there at every peer. Called by one thread, after
// everything that it announces is ordered before it.
__device__ __forceinline__ void announce_rows(const ChunkPost& post, std::uint64_t epoch) {
  if (*post.stop != 0) return;
  const std::uint64_t word = post.index.arrived(parity_of(epoch), post.rank);
#pragma unroll 1
  for (int step = 1; step < post.ranks; ++step) {
    device::store_release<device::Scope::kSystem>(
        reinterpret_cast<std::uint64_t*>(post.window.bases[peer_after(post, step)] +
                                         post.window.mapping_offset + word),
        epoch);
  }
}

// Adds a finished tile to its chunk's counter; true for the addition that makes it `full`. Release
// at GPU scope: whoever posts or signals the chunk is on this GPU, comes behind all additions, and
// releases at system scope, which covers what it has acquired. The acquire is made once a chunk,
// not once a tile, because it empties the SM's L1.
__device__ __forceinline__ bool count_tile(std::uint32_t* counter, std::uint32_t full) {
  ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_device> count(*counter);
  if (count.fetch_add(1, ::cuda::memory_order_release) + 1 != full) return false;
  ::cuda::atomic_thread_fence(::cuda::memory_order_acq_rel, ::cuda::thread_scope_device);
  return true;
}

// Counts a posted chunk; true for the last one of the call.
__device__ __forceinline__ bool last_chunk(const ChunkPost& post, int chunks) {
  ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_system> done(*post.chunks_done);
  return done.fetch_add(1, ::cuda::memory_order_acq_rel) + 1 == static_cast<std::uint32_t>(chunks);
}

// Transport copy_engine: the rows of tiles [first, last) as one put a peer, and behind the last of
// `chunks` chunks the signals. Both pass through one call of post_many: the code is part of the
// GEMM's, whose loops share the instruction cache with it.
__device__ __forceinline__ void post_to_engine(const ChunkPost& post, std::uint64_t epoch,
                                               int first, int last, int chunks) {
  const device::Guard guard(post.guard);
  const std::uint32_t slot = parity_of(epoch);
  bool signals = chunks == 0;
#pragma unroll 1
  while (true) {
    // Bit s: something for the peer s steps on.
    unsigned steps = 0;
#pragma unroll 1
    for (int step = 1; step < post.ranks; ++step) {
      if (signals || chunk_put(post, slot, peer_after(post, step), first, last).bytes != 0) {
        steps |= 1u << step;
      }
    }
    unsigned left = steps;
    const auto next = [&](int) {  // called for 0, 1, ... in order
      const int peer = peer_after(post, __ffs(static_cast<int>(left)) - 1);
      left &= left - 1;
      if (!signals) return chunk_put(post, slot, peer, first, last);
      PutDescriptor put;
      put.peer = peer;
      put.signal_offset = post.index.arrived(slot, post.rank);
      put.signal_epoch = epoch;
      return put;
    };
    if (signals && *post.stop != 0) return;
    if (steps != 0 &&
        device::post_many(post.ring, __popc(steps), next, guard,
                          {post.rank, kStagePost, kSend, first}) != WaitStatus::kArrived) {
      return;  // the chunk is never counted, so nobody is told that everything is there
    }
    // Positions are claimed in order: the signals stand behind all chunks' rows.
    if (signals || !last_chunk(post, chunks)) return;
    signals = true;
  }
}

// Called by the one thread whose addition completed the chunk of tiles [first, last)
// (count_tile), so all rows of the chunk are ordered before this call. `chunks` is the number of
// chunks of the call; 0 for a rank without a single tile, whose launch calls it once.
__device__ __forceinline__ void chunk_completed(const ChunkPost& post, int first, int last,
                                                int chunks) {
  if (post.kind == PostKind::kNone) return;
  const std::uint64_t epoch = device::load_relaxed<device::Scope::kDevice>(post.epoch);
  if (post.kind == PostKind::kCopyEngine) {
    post_to_engine(post, epoch, first, last, chunks);
  } else if (chunks == 0 || last_chunk(post, chunks)) {
    announce_rows(post, epoch);
  }
}

// For a rank without a single tile: called by one thread of the launch.
__device__ __forceinline__ void no_chunks(const ChunkPost& post) { chunk_completed(post, 0, 0, 0); }

}  // namespace penstock::moe_stage2
