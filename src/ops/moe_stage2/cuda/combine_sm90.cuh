// The top-k combine, sm_90a, as a template over how it waits for a source's rows.
//
// Memory-bound: of T tokens it reads T * top_k rows once and writes T * H bf16. A CTA takes one
// token at a time, a thread 16 bytes of each row, and all rows of a token are in flight together (8
// x 16 bytes a thread).
#pragma once

#include "ops/moe_stage2/cuda/combine_sm90.h"
#include "ops/sm90/ptx.cuh"
#include "penstock/numerics/block.h"

namespace penstock::moe_stage2 {

// Rows of a token that are loaded before the first is used.
inline constexpr int kCombineBatch = 4;

// Columns that 16 bytes of a row hold.
template <WireFormat kWire>
inline constexpr int kColumnsPerPiece = kWire == WireFormat::kFp8 ? 16 : 8;

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

// A row that is not there reads as zeros and has weight 0: it adds +0 to a sum that is never -0.
// sum[i] = fma(weight, y[i], sum[i]) over the columns of one piece. On the fp8 wire y is element *
// 2^e and the power goes into the weight: the product is the same, and sixteen multiplications a
// piece become one.
template <WireFormat kWire>
__device__ __forceinline__ void accumulate_piece(float (&sum)[kColumnsPerPiece<kWire>], uint4 piece,
                                                 float weight) {
  const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kWire == WireFormat::kFp8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t pair =
            sm90::unpack_e4m3(static_cast<std::uint16_t>(words[i] >> (16 * half)));
        const float2 q = sm90::half2_to_float2(pair);
        sum[4 * i + 2 * half] = fmaf(weight, q.x, sum[4 * i + 2 * half]);
        sum[4 * i + 2 * half + 1] = fmaf(weight, q.y, sum[4 * i + 2 * half + 1]);
      }
    } else {
      sum[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), sum[2 * i]);
      sum[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xffff0000u), sum[2 * i + 1]);
    }
  }
}

// What a warp knows of a token: lane k holds slot k's row and weight. A slot without a row has
// weight 0.
struct SlotFacts {
  RowPlace place;
  float weight = 0.0f;
};
__device__ __forceinline__ SlotFacts read_slot(const CombineArgs& args, int token, int lane) {
  SlotFacts slot;
  if (lane < args.top_k && token < args.tokens) {
    const int index = slot_index(token, lane, args.top_k);
    slot.place = args.inverse[index];
    if (slot.place.run >= 0) slot.weight = args.weight[index];
  }
  return slot;
}

// `wait` is asked once per CTA and source, and only for sources that a token of this CTA needs.
template <WireFormat kWire, class Wait>
__device__ __forceinline__ void combine_tokens(const CombineArgs& args, const Wait& wait) {
  constexpr int kColumns = kColumnsPerPiece<kWire>;
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  const int pieces = args.hidden / kColumns;
  // Whole warps stay together for the shuffles; surplus lanes load and store nothing.
  const int warp_pieces = (pieces + 31) / 32 * 32;
  unsigned arrived = 0;  // bit s: rows from source s may be read
  SlotFacts slot = read_slot(args, blockIdx.x, lane);
  for (int token = static_cast<int>(blockIdx.x); token < args.tokens;
       token += static_cast<int>(gridDim.x)) {
    // Read a token ahead: the rows' addresses depend on it.
    const SlotFacts next = read_slot(args, token + gridDim.x, lane);
    const unsigned needed =
        ~arrived &
        __reduce_or_sync(kAllLanes, slot.place.run >= 0 ? 1u << (slot.place.run % kMaxRanks) : 0u);
    if (needed != 0) {  // the same in every warp of the CTA
      int failed = 0;
      if (threadIdx.x < kMaxRanks && (needed >> threadIdx.x & 1u) != 0) {
        failed = wait(static_cast<int>(threadIdx.x)) ? 0 : 1;
      }
      if (__syncthreads_or(failed) != 0) return;  // the wait has reported it; nothing is published
      arrived |= needed;
    }
    const unsigned long long own_row =
        slot.place.run >= 0 ? reinterpret_cast<unsigned long long>(args.runs.address(slot.place))
                            : 0ull;

    for (int piece = threadIdx.x; piece < warp_pieces; piece += blockDim.x) {
      float sum[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sum[i] = 0.0f;
      for (int begin = 0; begin < args.top_k; begin += kCombineBatch) {
        uint4 data[kCombineBatch];
        std::uint32_t code[kCombineBatch];
#pragma unroll
        for (int j = 0; j < kCombineBatch; ++j) {
          // Lanes from top_k on hold no row; begin + j stays below 32 because top_k is at most 16.
          const auto* row =
              reinterpret_cast<const unsigned char*>(__shfl_sync(kAllLanes, own_row, begin + j));
          const bool wanted = row != nullptr && piece < pieces;
          data[j] = sm90::load_global_once_v4_if(wanted, row + piece * 16);
          if constexpr (kWire == WireFormat::kFp8) {
            code[j] = sm90::load_global_once_u8_if(
                wanted, row + args.hidden + piece / (kWireBlock / kColumns));
          }
        }
#pragma unroll
        for (int j = 0; j < kCombineBatch; ++j) {
          float weight = __shfl_sync(kAllLanes, slot.weight, begin + j);
          if constexpr (kWire == WireFormat::kFp8) weight *= wire_scale_value(code[j]);
          accumulate_piece<kWire>(sum, data[j], weight);
        }
      }
      std::uint16_t* out =
          args.out + static_cast<std::int64_t>(token) * args.hidden + piece * kColumns;
#pragma unroll
      for (int i = 0; i < kColumns; i += 8) {
        sm90::store_global_v4_if(
            piece < pieces, out + i,
            make_uint4(sm90::pack_bf16(sum[i], sum[i + 1]), sm90::pack_bf16(sum[i + 2], sum[i + 3]),
                       sm90::pack_bf16(sum[i + 4], sum[i + 5]),
                       sm90::pack_bf16(sum[i + 6], sum[i + 7])));
      }
    }
    slot = next;
  }
}

inline constexpr int kCombineMaxThreads = 256;

// Threads of a CTA: the fewest whole passes over a row's pieces, at most kCombineMaxThreads threads
// each.
inline int combine_threads(std::int32_t hidden, WireFormat wire) {
  const int pieces = hidden / (wire == WireFormat::kFp8 ? 16 : 8);
  const int passes = (pieces + kCombineMaxThreads - 1) / kCombineMaxThreads;
  return ((pieces + passes - 1) / passes + 31) / 32 * 32;
}

// CTAs of one SM at 80 registers a thread (kCombineMaxThreads, two CTAs by the launch bound).
inline int combine_ctas_per_sm(int threads) { return 65536 / (80 * threads); }

}  // namespace penstock::moe_stage2
