// The top-k combine, sm_90a, as a template over how it waits for a source's rows.
//
// Memory-bound: of T tokens it reads T * top_k rows once and writes T * H bf16. A CTA takes one
// token at a time. One warp copies its rows whole (bulk copies, no register, one instruction a row)
// into a ring in shared memory, as far ahead as the ring is long; the other warps add them, 16
// columns a thread. Two CTAs of an SM have about 150 KB on their way; with the same loads into
// registers, 50 KB in bursts, this wire stayed at 75% of the memory's rate, because converting E4M3
// keeps the warps too busy to load.
#pragma once

#include "ops/moe_stage2/cuda/combine_sm90.h"
#include "ops/sm90/ptx.cuh"
#include "penstock/numerics/block.h"

namespace penstock::moe_stage2 {

// Everything is there already.
struct NoWait {
  // Waits until all rows from `source` have arrived; false if they never will. Called by one
  // thread.
  __device__ bool operator()(int source) const { return true; }
};

// E8M0::to_float() without branches; a test compares them for every code.
__device__ __forceinline__ float wire_scale_value(std::uint32_t code) {
  const std::uint32_t bits = code == 0 ? 0x00400000u : code << 23;
  return __uint_as_float(code == E8M0::kNanBits ? kF32NanBits : bits);
}

// What a thread reads of one row: fp8 columns 16 t to 16 t + 15; bf16 columns 8 t to 8 t + 7 of
// either half of the segment, so that a warp's stores are whole lines.
template <WireFormat kWire>
struct RowPiece {
  static constexpr int kLoads = kWire == WireFormat::kFp8 ? 1 : 2;
  uint4 data[kLoads];
  std::uint32_t code;  // the scale's, fp8 only
};

// sum[i] = fma(weight, y[i], sum[i]) over the columns of one piece. On the fp8 wire y is element *
// 2^e and the power goes into the weight: the product is the same, and sixteen multiplications a
// piece become one. A row that is not there has zeros and weight 0: it adds +0 to a sum that is
// never -0.
template <WireFormat kWire>
__device__ __forceinline__ void accumulate_piece(float (&sum)[kCombineColumns],
                                                 const RowPiece<kWire>& piece, float weight) {
#pragma unroll
  for (int load = 0; load < RowPiece<kWire>::kLoads; ++load) {
    const std::uint32_t words[4] = {piece.data[load].x, piece.data[load].y, piece.data[load].z,
                                    piece.data[load].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kWire == WireFormat::kFp8) {
        std::uint32_t pair[2];
        sm90::unpack_e4m3x4(pair[0], pair[1], words[i]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 q = sm90::half2_to_float2(pair[half]);
          sum[4 * i + 2 * half] = fmaf(weight, q.x, sum[4 * i + 2 * half]);
          sum[4 * i + 2 * half + 1] = fmaf(weight, q.y, sum[4 * i + 2 * half + 1]);
        }
      } else {
        float* to = sum + 8 * load + 2 * i;
        to[0] = fmaf(weight, __uint_as_float(words[i] << 16), to[0]);
        to[1] = fmaf(weight, __uint_as_float(words[i] & 0xffff0000u), to[1]);
      }
    }
  }
}

// Addresses of the ring in shared memory.
struct RingMemory {
  std::uint32_t rows;   // [units, unit_rows, slot_bytes]
  std::uint32_t facts;  // [units, kCombineUnitRows] weight, present
  std::uint32_t full;   // [units] barriers: a unit's rows are there
  std::uint32_t empty;  // [units] barriers: all adding warps have read it

  __device__ __forceinline__ RingMemory(std::uint32_t base, const CombineRing& ring)
      : rows(base),
        facts(base + static_cast<std::uint32_t>(ring.units * ring.unit_rows * ring.slot_bytes)),
        full(facts + static_cast<std::uint32_t>(ring.units * kCombineFactsBytes)),
        empty(full + static_cast<std::uint32_t>(ring.units * 8)) {}
};

// A place in the ring, and the parity of its barriers there.
struct RingCursor {
  std::int32_t unit = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void advance(std::int32_t units) {
    if (++unit == units) {
      unit = 0;
      parity ^= 1;
    }
  }
};

// `present` of a row's facts.
inline constexpr std::uint32_t kRowAbsent = 0;
inline constexpr std::uint32_t kRowPresent = 1;
inline constexpr std::uint32_t kRowsEnd =
    2;  // of a unit's first row: a wait failed, nothing follows

// What the copying warp knows of a token: lane k holds slot k's row and weight. A slot without a
// row has weight 0.
struct SlotFacts {
  RowPlace place;
  float weight = 0.0f;
};
__device__ __forceinline__ SlotFacts read_slot(const CombineArgs& args, std::int64_t token,
                                               int lane) {
  SlotFacts slot;
  if (lane < args.top_k && token < args.tokens) {
    const int index = slot_index(static_cast<std::int32_t>(token), lane, args.top_k);
    slot.place = args.inverse[index];
    if (slot.place.run >= 0) slot.weight = args.weight[index];
  }
  return slot;
}

// The copying warp. `address` gives the bytes of a RowPlace. `wait` is asked once per CTA and
// source, and only for sources that a token of this CTA needs.
template <WireFormat kWire, class Address, class Wait>
__device__ __forceinline__ void copy_rows(const CombineArgs& args, const CombineRing& ring,
                                          const RingMemory& memory, const Address& address,
                                          const Wait& wait) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  constexpr int kBytes = kWire == WireFormat::kFp8 ? 1 : 2;
  const int lane = static_cast<int>(threadIdx.x % 32);
  unsigned arrived = 0;  // bit s: rows from source s may be read
  RingCursor at;
  at.parity = 1;  // a fresh barrier passes a wait for the phase before its first
  // Items are (token, segment); read ahead by one, because the rows' addresses depend on it.
  const std::int64_t items = static_cast<std::int64_t>(args.tokens) * ring.segments;
  SlotFacts slot = read_slot(args, blockIdx.x / ring.segments, lane);
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const SlotFacts next = read_slot(args, (item + gridDim.x) / ring.segments, lane);
    const int segment = static_cast<int>(item % ring.segments);
    const unsigned needed =
        ~arrived &
        __reduce_or_sync(kAllLanes, slot.place.run >= 0 ? 1u << (slot.place.run % kMaxRanks) : 0u);
    bool failed = false;
    if (needed != 0) {
      const bool asked = lane < kMaxRanks && (needed >> lane & 1u) != 0;
      failed = __any_sync(kAllLanes, asked && !wait(lane)) != 0;
      arrived |= needed;
      // What the wait has acquired is read by copies, which are another proxy.
      asm volatile("fence.proxy.async.global;" ::: "memory");
    }
    const unsigned present = __ballot_sync(kAllLanes, slot.place.run >= 0);
    const int first_column = segment * ring.segment_columns;
    const int columns = min(ring.segment_columns, args.hidden - first_column);
    const auto payload = static_cast<std::uint32_t>(columns * kBytes);
    const std::uint32_t scales =
        kWire == WireFormat::kFp8
            ? static_cast<std::uint32_t>((columns / kWireBlock + 15) / 16 * 16)
            : 0;
    for (int begin = 0; begin < args.top_k; begin += ring.unit_rows) {
      const int row = lane - begin;
      const bool mine = row >= 0 && row < ring.unit_rows && lane < args.top_k;
      const unsigned unit_lanes = ((1u << ring.unit_rows) - 1u) << begin;
      const std::uint32_t full = memory.full + at.unit * 8;
      sm90::barrier_wait(memory.empty + at.unit * 8, at.parity);
      if (mine) {
        const std::uint32_t fact = failed                ? kRowsEnd
                                   : slot.place.run >= 0 ? kRowPresent
                                                         : kRowAbsent;
        sm90::store_shared_v2(memory.facts + at.unit * kCombineFactsBytes + row * 8,
                              __float_as_uint(slot.weight), fact);
      }
      __syncwarp();
      if (row == 0) {
        const int rows = failed ? 0 : __popc(present & unit_lanes);
        sm90::barrier_arrive_expect(full, static_cast<std::uint32_t>(rows) * (payload + scales));
      }
      if (failed) return;
      __syncwarp();
      if (mine && slot.place.run >= 0) {
        const unsigned char* from = address(slot.place);
        const std::uint32_t to = memory.rows + (at.unit * ring.unit_rows + row) *
                                                   static_cast<std::uint32_t>(ring.slot_bytes);
        if (ring.segments == 1) {  // scales stand behind the payload
          sm90::load_bulk(to, from, payload + scales, full);
        } else {
          sm90::load_bulk(to, from + first_column * kBytes, payload, full);
          if constexpr (kWire == WireFormat::kFp8) {
            sm90::load_bulk(to + payload, from + args.hidden + first_column / kWireBlock, scales,
                            full);
          }
        }
      }
      at.advance(ring.units);
    }
    slot = next;
  }
}

// The adding warps.
template <WireFormat kWire>
__device__ __forceinline__ void add_rows(const CombineArgs& args, const CombineRing& ring,
                                         const RingMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  RingCursor at;
  const std::int64_t items = static_cast<std::int64_t>(args.tokens) * ring.segments;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int first_column = static_cast<int>(item % ring.segments) * ring.segment_columns;
    const int columns = min(ring.segment_columns, args.hidden - first_column);
    const int busy = columns / kCombineColumns;  // threads
    const bool own = thread < busy;
    float sum[kCombineColumns];
#pragma unroll
    for (float& x : sum) x = 0.0f;
    for (int begin = 0; begin < args.top_k; begin += ring.unit_rows) {
      const int rows = min(ring.unit_rows, args.top_k - begin);
      const std::uint32_t unit_rows =
          memory.rows + at.unit * ring.unit_rows * static_cast<std::uint32_t>(ring.slot_bytes);
      sm90::barrier_wait(memory.full + at.unit * 8, at.parity);
      RowPiece<kWire> piece[kCombineUnitRows];
      float weight[kCombineUnitRows];
#pragma unroll
      for (int j = 0; j < kCombineUnitRows; ++j) {
        std::uint32_t present = kRowAbsent;
        weight[j] = 0.0f;
        if (j < rows) {
          const uint2 facts = sm90::load_shared_v2(memory.facts + at.unit * kCombineFactsBytes +
                                                   static_cast<std::uint32_t>(j) * 8);
          weight[j] = __uint_as_float(facts.x);
          present = facts.y;
        }
        if (j == 0 && present == kRowsEnd) return;
        const bool wanted = own && present == kRowPresent;
        const std::uint32_t row = unit_rows + j * static_cast<std::uint32_t>(ring.slot_bytes);
        piece[j].data[0] = sm90::load_shared_v4_if(wanted, row + thread * 16);
        if constexpr (kWire == WireFormat::kFp8) {
          piece[j].code = sm90::load_shared_u8_if(
              wanted, row + columns + thread / (kWireBlock / kCombineColumns));
        } else {
          piece[j].data[1] = sm90::load_shared_v4_if(wanted, row + (thread + busy) * 16);
        }
      }
      __syncwarp();
      if (lane == 0) sm90::barrier_arrive(memory.empty + at.unit * 8);
#pragma unroll
      for (int j = 0; j < kCombineUnitRows; ++j) {
        if constexpr (kWire == WireFormat::kFp8) weight[j] *= wire_scale_value(piece[j].code);
        accumulate_piece<kWire>(sum, piece[j], weight[j]);
      }
      at.advance(ring.units);
    }
    uint4 packed[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* s = sum + 8 * half;
      packed[half] = make_uint4(sm90::pack_bf16(s[0], s[1]), sm90::pack_bf16(s[2], s[3]),
                                sm90::pack_bf16(s[4], s[5]), sm90::pack_bf16(s[6], s[7]));
    }
    const std::int64_t token = item / ring.segments;
    std::uint16_t* out = args.out + token * args.hidden + first_column;
    if constexpr (kWire == WireFormat::kFp8) {
      // Neighbours exchange halves, so that each store of a pair fills a 32-byte sector.
      const bool odd = (lane & 1) != 0;
      const uint4 give = odd ? packed[0] : packed[1];
      const uint4 got = make_uint4(
          __shfl_xor_sync(0xffffffffu, give.x, 1), __shfl_xor_sync(0xffffffffu, give.y, 1),
          __shfl_xor_sync(0xffffffffu, give.z, 1), __shfl_xor_sync(0xffffffffu, give.w, 1));
      std::uint16_t* pair = out + (thread & ~1) * kCombineColumns + (odd ? 8 : 0);
      sm90::store_global_v4_if(own, pair, odd ? got : packed[0]);
      sm90::store_global_v4_if(own, pair + kCombineColumns, odd ? packed[1] : got);
    } else {
      sm90::store_global_v4_if(own, out + thread * 8, packed[0]);
      sm90::store_global_v4_if(own, out + (thread + busy) * 8, packed[1]);
    }
  }
}

// The whole combine of a CTA of ring.threads threads with ring.shared_bytes of shared memory from
// `storage` on (16-byte aligned).
template <WireFormat kWire, class Address, class Wait>
__device__ __forceinline__ void combine_tokens(const CombineArgs& args, const CombineRing& ring,
                                               const void* storage, const Address& address,
                                               const Wait& wait) {
  const RingMemory memory(sm90::shared_address(storage), ring);
  const int adding = static_cast<int>(blockDim.x) - 32;
  if (threadIdx.x == 0) {
    for (int u = 0; u < ring.units; ++u) {
      sm90::barrier_init(memory.full + u * 8, 1);
      sm90::barrier_init(memory.empty + u * 8, static_cast<std::uint32_t>(adding / 32));
    }
    sm90::barrier_init_fence();
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= adding) {
    copy_rows<kWire>(args, ring, memory, address, wait);
  } else {
    add_rows<kWire>(args, ring, memory);
  }
}

}  // namespace penstock::moe_stage2
