// One GLM-5 MoE decoder layer (or several in a row) as one persistent launch on sm_90a.
//
// One CTA an SM, 16 warps that compute, one that copies and three that prepare the new cache rows.
// Every computing warp has a ring of weight units of its own, which the producer warp keeps full
// from the warp's static list, so weights of later stages arrive while the CTA waits for data; only
// the experts' units wait for the routing. Values cross CTAs as packets (12 bytes and their tag),
// polled in place. docs/decode-layer.md has stages, hand-offs and their predicted cost.
//
// Tags. A counter in memory holds the number of layers done; the tag of a layer is that number with
// the top bit set, its low bit picks one of two mailbox halves. Every CTA produces a block of each
// row gather and consumes all of them, so a CTA that writes layer n + 2 knows that every CTA has
// finished layer n.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "ops/decode_layer/cuda/decode_device.cuh"
#include "ops/decode_layer/cuda/launch.h"

namespace penstock::decode {
namespace {

using namespace device;

enum Stream : int { kQkvA, kQB, kUk, kUv, kO, kRouter, kShared, kRouted, kDown, kStreams };

constexpr std::uint32_t kFullMask = 0xffffffffU;
constexpr int kMaxRingSlots = 5;
constexpr int kRowWarps = 3;  // prepare the new cache rows
constexpr int kBlock = kThreads + 32 + 32 * kRowWarps;
constexpr int kOutPitch = 64;                       // columns of a block, 4 tiles
constexpr int kProbabilityPitch = kSplitPicks + 8;  // bf16
constexpr int kMaxPairs = 8 * (kMaxTopK + 1);
constexpr int kMaxActive = 8 * kMaxTopK + 1;

// A run of chunks, each `chunk_units` units of `bytes` bytes, contiguous in memory.
struct Segment {
  const std::uint8_t* base;
  int chunks;  // 0: the stream has no more
  int chunk_units;
  int bytes;
};

struct Fixed {
  std::uint64_t full[kWarps][kMaxRingSlots];
  std::uint32_t consumed[kWarps];  // units, by their warp for the producer
  int routed_layer;                // the routing below is this layer's: for the producer
  int listed_layer;                // the producer has listed all units before this layer
  float2 rotation[8][kRope / 2];   // cos, sin
  float reduce[kWarps][8];
  float row_up[8];
  float out[8 * kOutPitch];
  float own[8 * kOutPitch];  // residual stream, this CTA's columns
  float pair_weight[kMaxPairs];
  float top_weight[8][kMaxTopK];
  int top_expert[8][kMaxTopK];
  std::uint32_t active_bits[kMaxExperts / 32];
  std::uint16_t active[kMaxActive + 1];  // [0] is the shared expert, then routed ones, ascending
  alignas(16) std::uint8_t
      position[kMaxActive * 8];  // [active][row]: 0, or 1 + index among the row's experts
  int active_count;
  int routed_begin, routed_end;  // up/gate tiles of this CTA
  float split_max[kHeadGroup], split_sum[kHeadGroup];
  int rows_wanted;            // 1 + the layer up to which the new cache rows are asked for
  int rows_ready[kRowWarps];  // 1 + the layer whose rows lie ready, by their warp
  int picks_fresh;            // this layer's picks name a new row (or this CTA stores one)
  float split_weight[kMaxSplits];
  std::int64_t slot[8];
  int dead;
};
static_assert(sizeof(Fixed) <= kFixedBytes);

// Barrier of the compute warps; the producer warp never takes part.
__device__ __forceinline__ void sync_compute() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

__device__ __forceinline__ int quotient(int x, const Divisor& d) {
  return d.d == 1 ? x : static_cast<int>(__umulhi(static_cast<std::uint32_t>(x), d.reciprocal));
}

// Called now and then by a wait that does not end. Returns when the wait began, or kGiveUp. The
// first expired wait of a launch writes the record. Free and not inlined: a member would force the
// machine's state out of registers.
constexpr std::uint64_t kGiveUp = ~std::uint64_t{0};
__device__ __noinline__ std::uint64_t give_up(const DecodeArguments& a, Fixed& f,
                                              std::uint64_t start, int layer, int stage, int index,
                                              std::uint32_t expected, std::uint32_t seen,
                                              int peer = -1) {
  volatile int* dead = &f.dead;
  if (*dead != 0) return kGiveUp;
  volatile std::uint32_t* abort_word = a.counter + 2;
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  if (start == 0) start = now;
  // Waits inside the GPU allow a quarter more, so that the wait for a peer, which is the cause,
  // expires first.
  const bool for_peer = stage == kStageReduceAttention || stage == kStageReduceExperts;
  const bool late = now - start > (for_peer ? a.deadline_ns : a.deadline_ns + a.deadline_ns / 4);
  if (*abort_word == 0 && !late) return start;
  *dead = 1;
  if (late && atomicCAS(a.counter + 2, 0U, 1U) == 0U) {
    FaultRecord& r = *a.fault;
    r.rank = a.plan.rank;
    r.peer = peer >= 0 ? peer : a.plan.rank;
    r.op = layer;
    r.stage = stage;
    r.region = static_cast<std::int32_t>(blockIdx.x);
    r.index = index;
    r.expected = expected;
    r.seen = seen;
    r.waited_ns = now - start;
    r.cause = static_cast<std::uint32_t>(FaultCause::kDeadline);
    __threadfence_system();
    *const_cast<volatile std::uint32_t*>(&r.valid) = 1;
  }
  return kGiveUp;
}

__device__ __noinline__ void hold(std::uint64_t ns) {
  std::uint64_t begin;
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    __nanosleep(200);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < ns);
}

// All N packets, every load of a round in flight at once.
template <int N, bool kSystem = false>
__device__ __forceinline__ void poll_packets(const DecodeArguments& a, Fixed& f, int layer,
                                             std::uint32_t tag, const uint4* const (&from)[N],
                                             uint4 (&to)[N], int stage) {
  std::uint32_t rounds = 0;
  std::uint64_t start = 0;
  while (true) {
    const uint4* late = nullptr;
    int which = -1;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      to[i] = kSystem ? load_system_packet(from[i]) : load_local_packet(from[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      late = to[i].w == tag ? late : from[i];
      if constexpr (kSystem) which = to[i].w == tag ? which : min(i, a.plan.ranks - 1);
    }
    if (late == nullptr) return;
    // One late packet stands for the rest: polling them all would take bandwidth from those who
    // compute them.
    while (true) {
      const uint4 x = kSystem ? load_system_packet(late) : load_local_packet(late);
      if (x.w == tag) break;
      if ((++rounds & 127U) == 0) {
        const std::uint8_t* base = kSystem ? a.window : a.boxes;
        start = give_up(a, f, start, layer, stage,
                        static_cast<int>((reinterpret_cast<const std::uint8_t*>(late) - base) / 16),
                        tag, x.w, which);
        if (start == kGiveUp) return;
      }
    }
  }
}

// Adds a pair of bf16 to a sum of squares (kNorm) or a maximum.
template <bool kNorm>
__device__ __forceinline__ float add_pair(float v, std::uint32_t pair) {
  const float x = bf16_low(pair);
  const float y = bf16_high(pair);
  if constexpr (kNorm) return v + (x * x + y * y);
  return fmaxf(v, fmaxf(fabsf(x), fabsf(y)));
}

__device__ __forceinline__ void load_gains(float2 (&gains)[8], const float* from, int columns) {
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const int i = static_cast<int>(threadIdx.x) + k * kThreads;
    gains[k] = i < columns / 2 ? __ldg(reinterpret_cast<const float2*>(from) + i)
                               : make_float2(0.0F, 0.0F);
  }
}

// Second half of a row gather: bf16 rows in `act`, per-thread sums (or maxima) of rows in v; leaves
// f16 rows.
template <int R, bool kNorm>
__device__ __forceinline__ void finish_rows(const DecodePlan& p, Fixed& f, std::uint8_t* act,
                                            float (&v)[R], int columns, int stride,
                                            const float2 (&gains)[8], float eps) {
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
#pragma unroll
  for (int s = 0; s < R; ++s) {
    v[s] = kNorm ? warp_sum(v[s]) : warp_max(v[s]);
    if (lane == 0) f.reduce[warp][s] = v[s];
  }
  sync_compute();
  float total = f.reduce[0][lane % R];  // lane s: row s
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    const float x = f.reduce[w][lane % R];
    total = kNorm ? total + x : fmaxf(total, x);
  }
  float mine;
  if constexpr (kNorm) {
    mine = rsqrtf(total / static_cast<float>(columns) + eps);
  } else {
    float up;
    row_scale(total, mine, up);
    if (tid < R) f.row_up[tid] = up;
  }
#pragma unroll 1
  for (int s = 0; s < p.rows; ++s) {
    const float down = __shfl_sync(kFullMask, mine, s);
    auto* row = reinterpret_cast<std::uint32_t*>(act + s * stride);
    if constexpr (kNorm) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int i = tid + k * kThreads;
        if (i < columns / 2) {
          const std::uint32_t x = row[i];
          row[i] = pack_f16(round_bf16(bf16_low(x) * down * gains[k].x),
                            round_bf16(bf16_high(x) * down * gains[k].y));
        }
      }
    } else {
#pragma unroll 2
      for (int i = tid; i < columns / 2; i += kThreads) {
        const std::uint32_t x = row[i];
        row[i] = pack_f16(bf16_low(x) * down, bf16_high(x) * down);
      }
    }
  }
  sync_compute();
}

// Where a row gather reads, and what it makes of it.
struct RowGather {
  const uint4* box;
  std::uint32_t tag;
  int blocks, used_blocks, packets, block_columns, columns, stride, stage, layer;
  const float* gain;
  float eps;
};

// Gathers rows of `columns` bf16 from a box of `blocks` blocks of `packets` packets
// (`block_columns` values each) and leaves them as f16: normalised with `gain` (kNorm), or scaled
// by a power of two (f.row_up undoes it). Not inlined: a layer runs through all of the kernel's
// code once, so code that is not shared costs instruction fetches.
template <int R, bool kNorm>
__device__ __noinline__ void gather_rows(const DecodeArguments& a, Fixed& f, std::uint8_t* act,
                                         const RowGather& q0) {
  const RowGather q = q0;
  const DecodePlan& p = a.plan;
  const int tid = static_cast<int>(threadIdx.x);
  constexpr int kRowBatch = R < 4 ? R : 4;
  float2 gains[8];
  if constexpr (kNorm) load_gains(gains, q.gain, q.columns);
  float v[R];
#pragma unroll
  for (int s = 0; s < R; ++s) v[s] = 0.0F;
  const int total = q.used_blocks * q.packets;
  const int pitch = q.blocks * q.packets;
#pragma unroll 1
  for (int base = tid; base < total; base += 2 * kThreads) {
    const int second = base + kThreads < total ? base + kThreads : base;
#pragma unroll
    for (int s0 = 0; s0 < R; s0 += kRowBatch) {
      const uint4* from[2 * kRowBatch];
      uint4 got[2 * kRowBatch];
#pragma unroll
      for (int i = 0; i < kRowBatch; ++i) {
        const uint4* row = q.box + min(s0 + i, p.rows - 1) * pitch;
        from[2 * i] = row + base;
        from[2 * i + 1] = row + second;
      }
      poll_packets<2 * kRowBatch>(a, f, q.layer, q.tag, from, got, q.stage);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int at = k == 0 ? base : second;
        const int block = at / q.packets;
        const int first = (at - block * q.packets) * kPacketValues;
        const int column = block * q.block_columns + first;
        const int n =
            k == 1 && second == base ? 0 : min(q.block_columns - first, q.columns - column);
#pragma unroll
        for (int i = 0; i < kRowBatch; ++i) {
          const uint4 x = got[2 * i + k];
          const int s = s0 + i;
          if (s >= p.rows || n <= 0) continue;
          auto* to = reinterpret_cast<std::uint32_t*>(act + s * q.stride + column * 2);
          to[0] = x.x;
          v[s] = add_pair<kNorm>(v[s], x.x);
          if (n > 2) {
            to[1] = x.y;
            v[s] = add_pair<kNorm>(v[s], x.y);
          }
          if (n > 4) {
            to[2] = x.z;
            v[s] = add_pair<kNorm>(v[s], x.z);
          }
        }
      }
    }
  }
  finish_rows<R, kNorm>(p, f, act, v, q.columns, q.stride, gains, q.eps);
}

// The same for at most two packets a thread and row: they stay in registers until the norm is
// known, so that a row is written once, as f16. 8 rows of 1024 packets: 22 us by gather_rows.
template <int R, bool kNorm>
__device__ __noinline__ void gather_held(const DecodeArguments& a, Fixed& f, std::uint8_t* act,
                                         const RowGather& q0) {
  const RowGather q = q0;
  const DecodePlan& p = a.plan;
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
  const int total = q.used_blocks * q.packets;
  const int pitch = q.blocks * q.packets;
  int at[2];
  int column[2];
  int n[2];  // values of the packet that count
  float2 gains[2][3];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int place = tid + k * kThreads;
    at[k] = min(place, total - 1);
    const int block = at[k] / q.packets;
    const int first = (at[k] - block * q.packets) * kPacketValues;
    column[k] = block * q.block_columns + first;
    n[k] = place < total ? min(q.block_columns - first, q.columns - column[k]) : 0;
    if constexpr (kNorm) {
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        gains[k][i] = 2 * i < n[k] ? __ldg(reinterpret_cast<const float2*>(q.gain + column[k]) + i)
                                   : make_float2(0.0F, 0.0F);
      }
    }
  }
  std::uint32_t x[2][R][3];
  float v[R];
#pragma unroll
  for (int s = 0; s < R; ++s) v[s] = 0.0F;
  // 8 packets in flight a thread, or both of each row where there are fewer rows.
  constexpr int kPlaces = R < 8 ? 2 : 1;
#pragma unroll
  for (int k0 = 0; k0 < 2; k0 += kPlaces) {
    const uint4* from[kPlaces * R];
    uint4 got[kPlaces * R];
#pragma unroll
    for (int i = 0; i < kPlaces * R; ++i) {
      from[i] = q.box + min(i % R, p.rows - 1) * pitch + at[k0 + i / R];
    }
    if (k0 == 0 || total > kThreads) {
      poll_packets<kPlaces * R>(a, f, q.layer, q.tag, from, got, q.stage);
    }
#pragma unroll
    for (int i = 0; i < kPlaces * R; ++i) {
      const int k = k0 + i / R;
      const int s = i % R;
      x[k][s][0] = n[k] > 0 ? got[i].x : 0U;
      x[k][s][1] = n[k] > 2 ? got[i].y : 0U;
      x[k][s][2] = n[k] > 4 ? got[i].z : 0U;
#pragma unroll
      for (int j = 0; j < 3; ++j) v[s] = add_pair<kNorm>(v[s], x[k][s][j]);
    }
  }
#pragma unroll
  for (int s = 0; s < R; ++s) {
    v[s] = kNorm ? warp_sum(v[s]) : warp_max(v[s]);
    if (lane == 0) f.reduce[warp][s] = v[s];
  }
  sync_compute();
  float all = f.reduce[0][lane % R];  // lane s: row s
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    const float of_warp = f.reduce[w][lane % R];
    all = kNorm ? all + of_warp : fmaxf(all, of_warp);
  }
  float mine;
  if constexpr (kNorm) {
    mine = rsqrtf(all / static_cast<float>(q.columns) + q.eps);
  } else {
    float up;
    row_scale(all, mine, up);
    if (tid < R) f.row_up[tid] = up;
  }
#pragma unroll
  for (int s = 0; s < R; ++s) {
    if (s >= p.rows) break;
    const float down = __shfl_sync(kFullMask, mine, s);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      auto* to = reinterpret_cast<std::uint32_t*>(act + s * q.stride + column[k] * 2);
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        if (2 * j >= n[k]) continue;
        float low = bf16_low(x[k][s][j]) * down;
        float high = bf16_high(x[k][s][j]) * down;
        if constexpr (kNorm) {
          const std::uint32_t rounded = pack_bf16(low * gains[k][j].x, high * gains[k][j].y);
          low = bf16_low(rounded);
          high = bf16_high(rounded);
        }
        to[j] = pack_f16(low, high);
      }
    }
  }
  sync_compute();
}

template <int R, bool kNorm>
__device__ __forceinline__ void gather(const DecodeArguments& a, Fixed& f, std::uint8_t* act,
                                       const RowGather& q) {
  if (q.used_blocks * q.packets <= 2 * kThreads) {
    gather_held<R, kNorm>(a, f, act, q);
  } else {
    gather_rows<R, kNorm>(a, f, act, q);
  }
}

// The launch's input rows, from memory.
template <int R>
__device__ __noinline__ void load_input(const DecodeArguments& a, Fixed& f, std::uint8_t* act,
                                        int stride) {
  const DecodePlan& p = a.plan;
  const int tid = static_cast<int>(threadIdx.x);
  const int cta = static_cast<int>(blockIdx.x);
  float2 gains[8];
  load_gains(gains, reinterpret_cast<const float*>(a.layer[0].weights + a.weights.norm_input),
             p.hidden);
  float v[R];
#pragma unroll
  for (int s = 0; s < R; ++s) {
    v[s] = 0.0F;
    if (s >= p.rows) continue;
    const auto* from =
        reinterpret_cast<const std::uint32_t*>(a.x_in + static_cast<std::int64_t>(s) * p.hidden);
    for (int i = tid; i < p.hidden / 2; i += kThreads) {
      const std::uint32_t x = from[i];
      *reinterpret_cast<std::uint32_t*>(act + s * stride + i * 4) = x;
      v[s] = add_pair<true>(v[s], x);
    }
  }
  for (int i = tid; i < p.rows * kOutPitch; i += kThreads) {
    const int s = i / kOutPitch;
    const int column = cta * p.o.block_tiles * kTileRows + i % kOutPitch;
    f.own[i] = i % kOutPitch < p.o.block_tiles * kTileRows && column < p.hidden
                   ? __uint_as_float(static_cast<std::uint32_t>(
                                         a.x_in[static_cast<std::int64_t>(s) * p.hidden + column])
                                     << 16)
                   : 0.0F;
  }
  finish_rows<R, true>(p, f, act, v, p.hidden, stride, gains, a.eps);
}

// All-reduce of this CTA's columns (f.out) over the ranks plus the residual (f.own): bf16
// partials, summed in rank order in f32. The new residual is published to `to` (or stored as the
// launch's result) and kept in f.own.
__device__ __noinline__ void reduce_columns(const DecodeArguments& a, Fixed& f, int layer,
                                            std::uint32_t tag, std::int64_t window, uint4* to,
                                            bool last, int stage) {
  const DecodePlan& p = a.plan;
  const int tid = static_cast<int>(threadIdx.x);
  const int cta = static_cast<int>(blockIdx.x);
  const int packets = p.o.packets;
  const int columns = p.o.block_tiles * kTileRows;
  const std::int64_t rank_pitch = static_cast<std::int64_t>(p.capacity) * p.grid * packets;
  for (int i = tid; i < p.rows * packets; i += kThreads) {
    const int s = i / packets;
    const int j = i - s * packets;
    const int n = columns - j * kPacketValues;
    const int at = s * kOutPitch + j * kPacketValues;
    const std::uint32_t w0 = pack_bf16(f.out[at], f.out[at + 1]);
    const std::uint32_t w1 = n > 2 ? pack_bf16(f.out[at + 2], f.out[at + 3]) : 0U;
    const std::uint32_t w2 = n > 4 ? pack_bf16(f.out[at + 4], f.out[at + 5]) : 0U;
    const std::int64_t offset =
        window + (static_cast<std::int64_t>(s) * p.grid + cta) * packets + j;
    for (int k = 0; k < p.ranks; ++k) {
      const int peer = (p.rank + k) % p.ranks;
      uint4* slot = reinterpret_cast<uint4*>(a.self_loop ? a.window : a.peers[peer]) + offset +
                    rank_pitch * (a.self_loop ? peer : p.rank);
      store_system_packet(slot, w0, w1, w2, tag);
    }
    const uint4* mine = reinterpret_cast<const uint4*>(a.window) + offset;
    const uint4* from[kMaxRanks];
    uint4 got[kMaxRanks];
#pragma unroll
    for (int k = 0; k < kMaxRanks; ++k) from[k] = mine + rank_pitch * min(k, p.ranks - 1);
    poll_packets<kMaxRanks, true>(a, f, layer, tag, from, got, stage);
    float y[6] = {0.0F, 0.0F, 0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
    for (int k = 0; k < kMaxRanks; ++k) {
      if (k < p.ranks) {
        y[0] += bf16_low(got[k].x);
        y[1] += bf16_high(got[k].x);
        y[2] += bf16_low(got[k].y);
        y[3] += bf16_high(got[k].y);
        y[4] += bf16_low(got[k].z);
        y[5] += bf16_high(got[k].z);
      }
    }
    std::uint32_t w[3];
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      if (2 * k >= n) {
        w[k] = 0U;
        continue;
      }
      w[k] = pack_bf16(f.own[at + 2 * k] + y[2 * k], f.own[at + 2 * k + 1] + y[2 * k + 1]);
      f.own[at + 2 * k] = bf16_low(w[k]);
      f.own[at + 2 * k + 1] = bf16_high(w[k]);
    }
    if (!last) {
      store_local_packet(to + (static_cast<std::int64_t>(s) * p.grid + cta) * packets + j, w[0],
                         w[1], w[2], tag);
    } else if (f.slot[s] >= 0 && f.dead == 0) {
      const int column = cta * columns + j * kPacketValues;
      auto* out = reinterpret_cast<std::uint32_t*>(
          a.x_out + static_cast<std::int64_t>(s) * p.hidden + column);
#pragma unroll
      for (int k = 0; k < 3; ++k) {
        if (2 * k < n && column + 2 * k < p.hidden) out[k] = w[k];
      }
    }
  }
}

// Publishes `columns` values of each row from f.out as bf16: packet j of (row, block).
__device__ __noinline__ void publish_block(const DecodeArguments& a, const Fixed& f, uint4* box,
                                           std::uint32_t tag, int blocks, int block, int packets,
                                           int columns) {
  const DecodePlan& p = a.plan;
  const int tid = static_cast<int>(threadIdx.x);
  for (int i = tid; i < p.rows * packets; i += kThreads) {
    const int s = i / packets;
    const int j = i - s * packets;
    const float* v = f.out + s * kOutPitch + j * kPacketValues;
    const int n = columns - j * kPacketValues;
    store_local_packet(box + (static_cast<std::int64_t>(s) * blocks + block) * packets + j,
                       pack_bf16(v[0], v[1]), n > 2 ? pack_bf16(v[2], v[3]) : 0U,
                       n > 4 ? pack_bf16(v[4], v[5]) : 0U, tag);
  }
}

struct Cursor {
  int layer, stream, segment;
};
// A stream is a sequence of segments, contiguous chunks; warp w takes the chunks w, w + 16, ... of
// the sequence.
__device__ __forceinline__ Segment block_segment(const DecodePlan& p, const std::uint8_t* weights,
                                                 int segment, const MatrixPlan& m) {
  const int cta = static_cast<int>(blockIdx.x);
  const int block = cta + segment * p.grid;
  if (block >= m.blocks) return {nullptr, 0, 0, 0};
  const int tile = block * m.block_tiles;
  return {weights + static_cast<std::int64_t>(tile) * m.units * m.unit_bytes(),
          min(m.block_tiles, m.tiles - tile) * m.chunks, m.chunk_units, m.unit_bytes()};
}
__device__ __forceinline__ Segment next_segment(const DecodeArguments& a, const Fixed& f,
                                                const Cursor& c) {
  const DecodePlan& p = a.plan;
  const int cta = static_cast<int>(blockIdx.x);
  const std::uint8_t* weights = a.layer[c.layer].weights;
  int bytes;
  switch (c.stream) {
    case kQkvA:
      return block_segment(p, weights + a.weights.qkv_a, c.segment, p.qkv_a);
    case kQB:
      return block_segment(p, weights + a.weights.q_b, c.segment, p.q_b);
    case kUk:
      return block_segment(p, weights + a.weights.uk, c.segment, p.uk);
    case kUv: {
      bytes = p.uv.unit_bytes();
      const int task = cta + c.segment * p.grid;
      if (task >= p.uv_tasks(p.rows)) return {nullptr, 0, 0, 0};
      return {weights + a.weights.uv +
                  static_cast<std::int64_t>(task % (p.heads * p.uv_parts)) * p.uv_part_tiles() *
                      p.uv.units * bytes,
              p.uv_part_tiles() * p.uv.chunks, p.uv.chunk_units, bytes};
    }
    case kO:
      return block_segment(p, weights + a.weights.o, c.segment, p.o);
    case kRouter: {
      bytes = p.router_unit_k * 2;
      const int first = cta * p.router_rows;
      if (c.segment > 0 || first >= p.experts) return {nullptr, 0, 0, 0};
      return {
          weights + a.weights.router + static_cast<std::int64_t>(first) * p.router_chunks * bytes,
          min(p.router_rows, p.experts - first) * p.router_chunks, 1, bytes};
    }
    case kShared:
    case kRouted: {
      bytes = p.up_gate.unit_bytes();
      int begin = cta * p.up_gate.tiles / p.grid;
      int end = (cta + 1) * p.up_gate.tiles / p.grid;
      int expert = p.experts;
      if (c.stream == kRouted) {
        const int index = quotient(f.routed_begin, a.by_up_gate_tiles) + c.segment;
        begin = max(0, f.routed_begin - index * p.up_gate.tiles);
        end = min(p.up_gate.tiles, f.routed_end - index * p.up_gate.tiles);
        if (begin >= end) return {nullptr, 0, 0, 0};
        expert = f.active[1 + index];
      } else if (c.segment > 0) {
        return {nullptr, 0, 0, 0};
      }
      return {weights + a.weights.up_gate +
                  (static_cast<std::int64_t>(expert) * p.up_gate.tiles + begin) * p.up_gate.units *
                      bytes,
              (end - begin) * p.up_gate.chunks, p.up_gate.chunk_units, bytes};
    }
    default: {
      bytes = p.down.unit_bytes();
      if (c.segment >= f.active_count) return {nullptr, 0, 0, 0};
      const int tile = cta * p.down.block_tiles;
      return {weights + a.weights.down +
                  (static_cast<std::int64_t>(f.active[c.segment]) * p.down.tiles + tile) *
                      p.down.units * bytes,
              min(p.down.block_tiles, p.down.tiles - tile) * p.down.chunks, p.down.chunk_units,
              bytes};
    }
  }
}
// The producer warp: lane w walks the list of warp w and keeps its ring full. One warp for all 16
// lists, because the way from one segment to the next (a few hundred instructions a warp and layer)
// stood in the consumers' path: 2260 of 13800 instructions a layer at one row, 7320 at eight.
__device__ __noinline__ void produce(const DecodeArguments& a, Fixed& f, std::uint32_t ring) {
  const DecodePlan& p = a.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int of = min(lane, kWarps - 1);
  const auto slots = static_cast<std::uint32_t>(p.ring_slots);
  ring += static_cast<std::uint32_t>(of) * slots * kSlotBytes;
  const std::uint32_t barriers = shared_address(&f.full[of][0]);
  const std::uint32_t consumed = shared_address(&f.consumed[of]);
  const std::uint64_t policy = evict_first_policy();
  volatile int* dead = &f.dead;
  volatile int* routed_layer = &f.routed_layer;
  volatile int* listed_layer = &f.listed_layer;
  Cursor c{0, 0, 0};
  const std::uint8_t* from = nullptr;
  int skip = lane;  // chunks from the segment at the cursor to the next one of this list
  int left = 0;     // chunks of the current segment from the current one on
  int units = 0;    // of the current chunk, still to copy
  int chunk_units = 0;
  int bytes = 0;
  std::uint32_t issued = 0;
  std::uint32_t slot = 0;
  int listed = 0;
  bool done = lane >= kWarps;
  while (*dead == 0) {
    if (!done && left <= 0) {
      // On to the segment that holds the next chunk.
      while (true) {
        if (c.layer >= a.layers) {
          done = true;
          break;
        }
        if (c.stream >= kRouted && c.layer > *routed_layer) break;
        __threadfence_block();
        const Segment s = next_segment(a, f, c);
        if (s.chunks == 0) {
          c.segment = 0;
          skip = lane;
          if (++c.stream == kStreams) {
            c.stream = 0;
            ++c.layer;
          }
          continue;
        }
        if (c.stream == kDown && skip >= s.chunks) {  // all of its segments are equally long
          c.segment += skip / s.chunks;
          skip %= s.chunks;
          continue;
        }
        ++c.segment;
        if (skip < s.chunks) {
          from = s.base + static_cast<std::int64_t>(skip) * s.chunk_units * s.bytes;
          left = s.chunks - skip;
          chunk_units = s.chunk_units;
          units = chunk_units;
          bytes = s.bytes;
          break;
        }
        skip -= s.chunks;
      }
    }
    if (left > 0 && issued - load_acquire_shared(consumed) < slots) {
      bulk_load(ring + slot * kSlotBytes, from, static_cast<std::uint32_t>(bytes),
                barriers + slot * 8U, policy);
      from += bytes;
      if (--units == 0) {
        units = chunk_units;
        from += (kWarps - 1) * chunk_units * bytes;
        left -= kWarps;
        if (left <= 0) skip = -left;
      }
      ++issued;
      if (++slot == slots) slot = 0;
    }
    __syncwarp();
    const int reached = __reduce_min_sync(kFullMask, done ? a.layers : c.layer);
    if (reached != listed) {
      listed = reached;
      if (lane == 0) *listed_layer = listed;
    }
    if (__all_sync(kFullMask, done)) break;
  }
  // Copies still under way (after a fault nobody waits for them) must not outlive the CTA.
  if (lane >= kWarps) return;
  for (std::uint32_t u = issued > slots ? issued - slots : 0; u < issued; ++u) {
    while (!barrier_try_wait(barriers + u % slots * 8U, u / slots & 1U)) {
    }
  }
}

// A warp's place in its ring.
struct RingPlace {
  std::uint32_t base, barriers, consumed;  // shared addresses
  int slots;
  int slot;
  std::uint32_t parity;
  std::uint32_t used;
};

// Address of the next unit in shared memory, arrived.
__device__ __forceinline__ std::uint32_t acquire(const DecodeArguments& a, Fixed& f, int layer,
                                                 const RingPlace& r) {
  const std::uint32_t barrier = r.barriers + static_cast<std::uint32_t>(r.slot) * 8U;
  std::uint32_t rounds = 0;
  std::uint64_t start = 0;
  while (!barrier_try_wait(barrier, r.parity)) {
    if ((++rounds & 127U) == 0) {
      start = give_up(a, f, start, layer, kStageCount, r.slot, 0, 0);
      if (start == kGiveUp) break;
    }
  }
  return r.base + static_cast<std::uint32_t>(r.slot) * kSlotBytes;
}
__device__ __forceinline__ void release(RingPlace& r) {
  __syncwarp();
  ++r.used;
  if (threadIdx.x % 32 == 0) store_release_shared(r.consumed, r.used);
  if (++r.slot == r.slots) {
    r.slot = 0;
    r.parity ^= 1U;
  }
}

// 16 output rows x 64 columns: weights of rows 0-7 and 8-15, activations of this lane's row.
__device__ __forceinline__ void add_group(float (&sum)[4], const uint4& low, const uint4& high,
                                          std::uint32_t row, float scale_low, float scale_high) {
  const uint4 x0 = load_shared(row);
  const uint4 x1 = load_shared(row + 16U);
  float d[4] = {0.0F, 0.0F, 0.0F, 0.0F};
  mma_f16(d, widen_e4m3(low.x), widen_e4m3(high.x), widen_e4m3(low.x >> 16),
          widen_e4m3(high.x >> 16), x0.x, x0.y);
  mma_f16(d, widen_e4m3(low.y), widen_e4m3(high.y), widen_e4m3(low.y >> 16),
          widen_e4m3(high.y >> 16), x0.z, x0.w);
  mma_f16(d, widen_e4m3(low.z), widen_e4m3(high.z), widen_e4m3(low.z >> 16),
          widen_e4m3(high.z >> 16), x1.x, x1.y);
  mma_f16(d, widen_e4m3(low.w), widen_e4m3(high.w), widen_e4m3(low.w >> 16),
          widen_e4m3(high.w >> 16), x1.z, x1.w);
  sum[0] += scale_low * d[0];
  sum[1] += scale_low * d[1];
  sum[2] += scale_high * d[2];
  sum[3] += scale_high * d[3];
}

// Sum of a chunk, `units` units from the ring: output rows lane / 4 (sum[0], sum[1]) and lane / 4 +
// 8 (sum[2], sum[3]) for activation rows 2 (lane % 4) and the next. `row`: where in shared memory
// activation row lane / 4 has the chunk's first column of this lane (16 (lane % 4)). f32 within 64
// columns, then scaled sums in column order.
__device__ __forceinline__ void chunk_product(const DecodeArguments& a, Fixed& f, int layer,
                                              RingPlace& ring, int units, int unit_k,
                                              std::uint32_t row, float (&sum)[4]) {
  const std::uint32_t lane16 = threadIdx.x % 32U * 16U;
  row = pin(row);
#pragma unroll 1
  for (int u = 0; u < units; ++u) {
    const std::uint32_t unit = acquire(a, f, layer, ring) + lane16;
    const float4 scale =
        take_shared_f32(unit - lane16 + static_cast<std::uint32_t>(kTileRows * unit_k));
    const uint4 w0 = take_shared(unit);
    const uint4 w1 = take_shared(unit + 512U);
    if (unit_k == kUnitColumns) {
      const uint4 w2 = take_shared(unit + 1024U);
      const uint4 w3 = take_shared(unit + 1536U);
      release(ring);
      add_group(sum, w0, w1, row, scale.x, scale.y);
      add_group(sum, w2, w3, row + 128U, scale.z, scale.w);
      row += 256U;
    } else {
      release(ring);
      add_group(sum, w0, w1, row, scale.x, scale.y);
      row += 128U;
    }
  }
}

// A chunk's sums as [output row][activation row].
template <int R>
__device__ __forceinline__ void store_chunk(float* to, const float (&sum)[4]) {
  const int g = static_cast<int>(threadIdx.x) % 32 / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  if constexpr (R == 1) {
    if (t == 0) {
      to[g] = sum[0];
      to[g + 8] = sum[2];
    }
  } else {
    if (2 * t < R) {
      *reinterpret_cast<float2*>(to + g * R + 2 * t) = make_float2(sum[0], sum[1]);
      *reinterpret_cast<float2*>(to + (g + 8) * R + 2 * t) = make_float2(sum[2], sum[3]);
    }
  }
}

// One block: `tiles` tiles x m.chunks chunks, [tile][chunk], whose first has the linear number
// `first` in the warps' lists, times `rows` activation rows from shared address `from` on. Leaves
// the sums, in chunk order, in f.out[row][tile * 16 + output row], times f.row_up[row] if `scaled`.
// Not inlined, for the instruction cache's sake.
struct BlockJob {
  int first, tiles, rows, stride, layer;
  std::uint32_t from;
  bool scaled;
};
template <int R>
__device__ __noinline__ RingPlace block_product(const DecodeArguments& a, Fixed& f, float* partial,
                                                const MatrixPlan& m, const BlockJob job,
                                                RingPlace ring) {
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
  const int chunks = m.chunks;
  const int chunk_bytes = m.chunk_units * m.unit_k * 2;
  const std::uint32_t row =
      job.from +
      static_cast<std::uint32_t>(min(lane / 4, job.rows - 1) * job.stride + lane % 4 * 32);
  const int wave_tiles = min(kWaveChunks / chunks, 4);
  for (int tile0 = 0; tile0 < job.tiles; tile0 += wave_tiles) {
    const int count = min(wave_tiles, job.tiles - tile0);
    int i = (warp - job.first - tile0 * chunks) & (kWarps - 1);
    int chunk = i % chunks;
    for (; i < count * chunks; i += kWarps) {
      float sum[4] = {0.0F, 0.0F, 0.0F, 0.0F};
      chunk_product(a, f, job.layer, ring, m.chunk_units, m.unit_k,
                    row + static_cast<std::uint32_t>(chunk * chunk_bytes), sum);
      store_chunk<R>(partial + i * kTileRows * R, sum);
      chunk += kWarps;
      while (chunk >= chunks) chunk -= chunks;
    }
    sync_compute();
    const int s = tid & (R - 1);
    const int tile = tid / (kTileRows * R);
    if (tile < count && s < job.rows) {
      const float* from = partial + tile * chunks * kTileRows * R + tid % (kTileRows * R);
      float sum = 0.0F;
#pragma unroll 8
      for (int k = 0; k < chunks; ++k) sum += from[k * kTileRows * R];
      if (job.scaled) sum *= f.row_up[s];
      f.out[s * kOutPitch + (tile0 + tile) * kTileRows + tid / R % kTileRows] = sum;
    }
    sync_compute();
  }
  return ring;
}

__device__ __forceinline__ std::uint8_t* cache_row(const DecodeArguments& a, int layer,
                                                   std::int64_t slot) {
  const LayerArguments& l = a.layer[layer];
  return l.kv + slot / kPageTokens * l.page_stride + slot % kPageTokens * kv_row_bytes(a.kv_format);
}

// A new cache row as attention reads it, by one warp; one CTA a row also stores it.
__device__ __forceinline__ void new_row(const DecodeArguments& a, Fixed& f, int layer,
                                        std::uint32_t tag, const uint4* box, int s,
                                        std::uint8_t* fresh) {
  const DecodePlan& p = a.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  auto* row = reinterpret_cast<std::uint32_t*>(fresh + s * kKeyPitch);
  const int in_columns = p.qkv_a.block_tiles * kTileRows;
  const int block0 = p.q_lora / in_columns;
  const int total = (p.qkv_a.blocks - block0) * p.qkv_a.packets;
  const uint4* base = box + p.box_qkv_a +
                      (static_cast<std::int64_t>(s) * p.qkv_a.blocks + block0) * p.qkv_a.packets;
  for (int q0 = lane; q0 < total; q0 += 128) {
    const uint4* from[4];
    uint4 got[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) from[k] = base + min(q0 + 32 * k, total - 1);
    poll_packets<4>(a, f, layer, tag, from, got, kStageKv);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int q = q0 + 32 * k;
      if (q >= total) continue;
      const int b = q / p.qkv_a.packets;
      const int in_block = (q - b * p.qkv_a.packets) * kPacketValues;
      const int column = (block0 + b) * in_columns + in_block - p.q_lora;
      const int n = in_columns - in_block;
      const std::uint32_t w[3] = {got[k].x, got[k].y, got[k].z};
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        if (2 * i < n && column + 2 * i >= 0 && column + 2 * i < kKvRow) row[column / 2 + i] = w[i];
      }
    }
  }
  __syncwarp();
  // Latent: 16 values a lane.
  float v[16];
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t w = row[lane * 8 + i];
    v[2 * i] = bf16_low(w);
    v[2 * i + 1] = bf16_high(w);
    sum += v[2 * i] * v[2 * i] + v[2 * i + 1] * v[2 * i + 1];
  }
  sum = warp_sum(sum);
  const float scale = rsqrtf(sum / static_cast<float>(kLatent) + a.eps_latent);
  const auto* gain = reinterpret_cast<const float*>(a.layer[layer].weights + a.weights.norm_kv);
  float amax = 0.0F;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    v[i] = round_bf16(v[i] * scale * __ldg(gain + lane * 16 + i));
    amax = fmaxf(amax, fabsf(v[i]));
  }
  const std::uint32_t w = row[kLatent / 2 + lane];
  const float2 cs = f.rotation[s][lane];
  float re = round_bf16(bf16_low(w) * cs.x - bf16_high(w) * cs.y);
  float im = round_bf16(bf16_low(w) * cs.y + bf16_high(w) * cs.x);
  const bool writer = static_cast<int>(blockIdx.x) == s % p.grid && f.slot[s] >= 0 && f.dead == 0;
  std::uint8_t* out = writer ? cache_row(a, layer, f.slot[s]) : nullptr;
  if (a.kv_format == KvFormat::kBf16) {
    if (writer) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        reinterpret_cast<std::uint32_t*>(out)[lane * 8 + i] = pack_bf16(v[2 * i], v[2 * i + 1]);
      reinterpret_cast<std::uint32_t*>(out)[kLatent / 2 + lane] = pack_bf16(re, im);
    }
  } else {
    float unit = 1.0F;
    if (a.kv_format == KvFormat::kFp8Scaled) {
      // Scale of 128 values (8 lanes): the smallest power of two that does not saturate.
#pragma unroll
      for (int d = 4; d > 0; d /= 2) amax = fmaxf(amax, __shfl_xor_sync(kFullMask, amax, d));
      const std::uint32_t bits = __float_as_uint(__fdiv_rn(fmaxf(amax, 1e-4F), 448.0F));
      const std::uint32_t e = (bits >> 23) + ((bits & 0x7fffffU) != 0 ? 1U : 0U);
      unit = __uint_as_float(e << 23);
      const float inverse = __uint_as_float((254U - e) << 23);
      if (writer && lane % 8 == 0) reinterpret_cast<float*>(out + kLatent)[lane / 8] = unit;
#pragma unroll
      for (int i = 0; i < 16; ++i) v[i] *= inverse;
      if (writer) reinterpret_cast<std::uint32_t*>(out + kLatent + 16)[lane] = pack_bf16(re, im);
    } else {
      const std::uint16_t q =
          __nv_cvt_float2_to_fp8x2(make_float2(re, im), __NV_SATFINITE, __NV_E4M3);
      if (writer) reinterpret_cast<std::uint16_t*>(out + kLatent)[lane] = q;
      const float2 back = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(q, __NV_E4M3)));
      re = back.x;
      im = back.y;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::uint16_t q =
          __nv_cvt_float2_to_fp8x2(make_float2(v[2 * i], v[2 * i + 1]), __NV_SATFINITE, __NV_E4M3);
      if (writer) reinterpret_cast<std::uint16_t*>(out)[lane * 8 + i] = q;
      const float2 back = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(q, __NV_E4M3)));
      v[2 * i] = back.x * unit;
      v[2 * i + 1] = back.y * unit;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) row[lane * 8 + i] = pack_bf16(v[2 * i], v[2 * i + 1]);
  row[kLatent / 2 + lane] = pack_bf16(re, im);
}

// The row warps: prepare the new cache rows while the others compute the queries.
__device__ __noinline__ void produce_rows(const DecodeArguments& a, Fixed& f, std::uint8_t* fresh) {
  const DecodePlan& p = a.plan;
  const int index = static_cast<int>(threadIdx.x) / 32 - kWarps - 1;
  const std::uint32_t done = *static_cast<volatile std::uint32_t*>(a.counter);
  volatile int* wanted = &f.rows_wanted;
  volatile int* dead = &f.dead;
  for (int layer = 0; layer < a.layers; ++layer) {
    const std::uint32_t tag = (done + static_cast<std::uint32_t>(layer)) | 0x80000000U;
    while (*wanted <= layer && *dead == 0) __nanosleep(100);
    if (*dead != 0) return;
    __threadfence_block();
    // A request for a later layer: nobody wanted this one's.
    if (*wanted > layer + 1) continue;
    const uint4* box = reinterpret_cast<const uint4*>(a.boxes) + (tag & 1U) * p.box_packets;
    for (int s = index; s < p.rows; s += kRowWarps) new_row(a, f, layer, tag, box, s, fresh);
    __syncwarp();
    __threadfence_block();
    if (threadIdx.x % 32 == 0) *const_cast<volatile int*>(&f.rows_ready[index]) = layer + 1;
  }
}

template <int R>
struct Machine {
  const DecodeArguments& a;
  const DecodePlan& p;
  Fixed& f;
  std::uint8_t* act;
  float* partial;
  std::uint8_t* fresh;  // new cache rows
  std::uint32_t act_address;
  RingPlace ring;
  int tid, warp, lane, g, t, cta;
  // Layer
  int layer = 0;
  std::uint32_t tag = 0;
  uint4* box = nullptr;
  std::int64_t window_at = 0;

  __device__ Machine(const DecodeArguments& arguments, Fixed& fixed, std::uint8_t* activations,
                     std::uint8_t* fresh_rows, float* partials, std::uint8_t* ring_base)
      : a(arguments),
        p(arguments.plan),
        f(fixed),
        act(activations),
        partial(partials),
        fresh(fresh_rows) {
    tid = static_cast<int>(threadIdx.x);
    warp = tid / 32;
    lane = tid % 32;
    g = lane / 4;
    t = lane % 4;
    cta = static_cast<int>(blockIdx.x);
    act_address = shared_address(act);
    ring = {
        shared_address(ring_base) + static_cast<std::uint32_t>(warp * p.ring_slots * kSlotBytes),
        shared_address(&f.full[warp][0]),
        shared_address(&f.consumed[warp]),
        p.ring_slots,
        0,
        0,
        0};
  }

  // ---- waiting
  // ----------------------------------------------------------------------------------------------------

  template <int N, bool kSystem = false>
  __device__ __forceinline__ void poll(const uint4* const (&from)[N], uint4 (&to)[N], int stage) {
    poll_packets<N, kSystem>(a, f, layer, tag, from, to, stage);
  }

  // ---- stages
  // -------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ const float* parameters(std::int64_t at) const {
    return reinterpret_cast<const float*>(a.layer[layer].weights + at);
  }
  __device__ __forceinline__ void product(const MatrixPlan& m, int first, int tiles, int rows,
                                          int stride, bool scaled) {
    ring = block_product<R>(a, f, partial, m,
                            {first, tiles, rows, stride, layer, act_address, scaled}, ring);
  }
  // Rows of the residual stream from all CTAs' columns, normalised.
  __device__ __forceinline__ void gather_hidden(const uint4* from, std::uint32_t of_tag,
                                                std::int64_t gain, int stage) {
    gather<R, true>(a, f, act,
                    {from, of_tag, p.grid, p.grid, p.o.packets, p.o.block_tiles * kTileRows,
                     p.hidden, 2 * p.hidden + 16, stage, layer, parameters(gain), a.eps});
  }

  __device__ __forceinline__ void qkv_a() {
    const MatrixPlan& m = p.qkv_a;
    const int stride = 2 * p.hidden + 16;
    int first = 0;
    for (int block = cta; block < m.blocks; block += p.grid, first += m.block_tiles * m.chunks) {
      product(m, first, min(m.block_tiles, m.tiles - block * m.block_tiles), p.rows, stride, false);
      publish_block(a, f, box + p.box_qkv_a, tag, m.blocks, block, m.packets,
                    m.block_tiles * kTileRows);
    }
    // The row warps may look for the new cache rows from here on: before, they would only poll.
    if (tid == 0 && f.picks_fresh != 0) {
      *const_cast<volatile int*>(&f.rows_wanted) = layer + 1;
    }
  }

  __device__ __forceinline__ void q_b() {
    const int stride = 2 * p.q_lora + 16;
    const int in_columns = p.qkv_a.block_tiles * kTileRows;
    gather<R, true>(a, f, act,
                    {box + p.box_qkv_a, tag, p.qkv_a.blocks, ceil_div(p.q_lora, in_columns),
                     p.qkv_a.packets, in_columns, p.q_lora, stride, kStageQB, layer,
                     parameters(a.weights.norm_q), a.eps_latent});
    const MatrixPlan& m = p.q_b;
    int first = 0;
    for (int block = cta; block < m.blocks; block += p.grid, first += m.block_tiles * m.chunks) {
      product(m, first, min(m.block_tiles, m.tiles - block * m.block_tiles), p.rows, stride, false);
      const int columns = m.block_tiles * kTileRows;
      const int in_head = block * columns % kQueryHead;
      if (in_head >= kNope) {  // a block lies in one part of a head
        for (int i = tid; i < p.rows * columns / 2; i += kThreads) {
          const int s = i / (columns / 2);
          const int pair = i - s * (columns / 2);
          const float2 cs = f.rotation[s][(in_head - kNope) / 2 + pair];
          float* v2 = f.out + s * kOutPitch + pair * 2;
          const float x = v2[0];
          const float y = v2[1];
          v2[0] = x * cs.x - y * cs.y;
          v2[1] = x * cs.y + y * cs.x;
        }
        sync_compute();
      }
      publish_block(a, f, box + p.box_q_b, tag, m.blocks, block, m.packets, columns);
    }
  }

  __device__ __forceinline__ void uk() {
    const MatrixPlan& m = p.uk;
    constexpr int kStride = 2 * kNope + 16;
    const int head_blocks = kQueryHead / (p.q_b.block_tiles * kTileRows);
    const int nope_packets = kNope / (p.q_b.block_tiles * kTileRows) * p.q_b.packets;
    int first = 0;
    for (int block = cta; block < m.blocks; block += p.grid, first += m.block_tiles * m.chunks) {
      const int head = block * m.block_tiles * kTileRows / kLatent;
      if (warp < p.rows) {  // a warp a row, at most 48 packets
        const uint4* row =
            box + p.box_q_b +
            (static_cast<std::int64_t>(warp) * p.q_b.blocks + head * head_blocks) * p.q_b.packets;
        const uint4* from[2];
        uint4 got[2];
        from[0] = row + min(lane, nope_packets - 1);
        from[1] = row + min(lane + 32, nope_packets - 1);
        poll(from, got, kStageUk);
        float amax = 0.0F;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          amax = add_pair<false>(amax, got[k].x);
          amax = add_pair<false>(amax, got[k].y);
          amax = add_pair<false>(amax, got[k].z);
        }
        amax = warp_max(amax);
        float down;
        float up;
        row_scale(amax, down, up);
        if (lane == 0) f.row_up[warp] = up;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int q = lane + 32 * k;
          if (q >= nope_packets) continue;
          const int b = q / p.q_b.packets;
          const int in_block = (q - b * p.q_b.packets) * kPacketValues;
          const int n = p.q_b.block_tiles * kTileRows - in_block;
          auto* to = reinterpret_cast<std::uint32_t*>(
              act + warp * kStride + (b * p.q_b.block_tiles * kTileRows + in_block) * 2);
          to[0] = pack_f16(bf16_low(got[k].x) * down, bf16_high(got[k].x) * down);
          if (n > 2) to[1] = pack_f16(bf16_low(got[k].y) * down, bf16_high(got[k].y) * down);
          if (n > 4) to[2] = pack_f16(bf16_low(got[k].z) * down, bf16_high(got[k].z) * down);
        }
      }
      sync_compute();
      product(m, first, m.block_tiles, p.rows, kStride, true);
      publish_block(a, f, box + p.box_uk, tag, m.blocks, block, m.packets,
                    m.block_tiles * kTileRows);
    }
  }

  // Parts of the activation region during attention. Logits take the queries' place.
  static constexpr int kQueryAt = 0;
  static constexpr int kKeysAt = kHeadGroup * kKeyPitch;
  static constexpr int kProbabilitiesAt = kKeysAt + kSplitPicks * kKeyPitch;

  __device__ __forceinline__ int pick_count(int s) const {
    if (f.slot[s] < 0) return 0;
    const std::int32_t* o = a.layer[layer].pick_offsets + a.row_begin + s;
    return min(o[1] - o[0], kMaxPicks);
  }

  // Asks L2 for the gains and biases of a layer, a slice a CTA: read cold they would cost a trip to
  // memory each.
  __device__ __forceinline__ void prefetch_parameters(int of_layer) {
    if (of_layer >= a.layers || tid != 64) return;
    const int bytes = static_cast<int>(a.weights.bytes - a.weights.norm_input);
    const int slice = (bytes / p.grid + 31) / 16 * 16;
    const int begin = cta * slice;
    if (begin < bytes) {
      prefetch_l2(a.layer[of_layer].weights + a.weights.norm_input + begin,
                  static_cast<std::uint32_t>(min(slice, bytes - begin)));
    }
  }

  // Asks L2 for the cache rows of this CTA's attention tasks, and finds out whether it needs the
  // new ones.
  __device__ __forceinline__ void prefetch_keys() {
    const int per_row = kMaxSplits * p.head_groups;
    if (tid < p.rows && tid % p.grid == cta && f.slot[tid] >= 0) f.picks_fresh = 1;  // stores it
    for (int task = cta; task < p.rows * per_row; task += p.grid) {
      const int s = task / per_row;
      const int split = (task - s * per_row) / p.head_groups;
      const int i = split * kSplitPicks + tid;
      if (tid < kSplitPicks && i < pick_count(s)) {
        const std::int64_t slot =
            a.layer[layer].picks[a.layer[layer].pick_offsets[a.row_begin + s] + i];
        prefetch_l2(cache_row(a, layer, slot), kv_row_bytes(a.kv_format));
#pragma unroll
        for (int k = 0; k < R; ++k) {
          if (f.slot[k] == slot) f.picks_fresh = 1;
        }
      }
    }
  }
  // Until row warp s % 3 has this layer's new row s.
  __device__ __forceinline__ void await_row(int s) {
    volatile int* ready = &f.rows_ready[s % kRowWarps];
    std::uint32_t rounds = 0;
    std::uint64_t start = 0;
    while (*ready <= layer) {
      if ((++rounds & 127U) == 0) {
        start = give_up(a, f, start, layer, kStageKv, s, static_cast<std::uint32_t>(layer + 1),
                        static_cast<std::uint32_t>(*ready));
        if (start == kGiveUp) break;
      }
    }
    __threadfence_block();
  }

  // A sixteenth of one of 32 cache rows, on its way to shared memory.
  struct KeyPart {
    uint4 x[4];
    uint2 rope;
    float unit[2];
    int state;  // 0: beyond the end, 1: from the cache, 2 + k: new row k of this step
  };
  __device__ __forceinline__ void fetch_keys(KeyPart& k, int s, int first, int count) {
    const int r = tid / 16;
    const int part = tid % 16;
    k.state = 0;
    if (r >= count) return;
    const std::int64_t slot =
        a.layer[layer].picks[a.layer[layer].pick_offsets[a.row_begin + s] + first + r];
    k.state = 1;
#pragma unroll
    for (int i = 0; i < R; ++i) {
      if (f.slot[i] == slot) k.state = 2 + i;
    }
    if (k.state != 1) return;
    const std::uint8_t* row = cache_row(a, layer, slot);
    if (a.kv_format == KvFormat::kBf16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) k.x[i] = reinterpret_cast<const uint4*>(row)[i * 16 + part];
      k.rope = reinterpret_cast<const uint2*>(row + 2 * kLatent)[part];
      return;
    }
    k.x[0] = reinterpret_cast<const uint4*>(row)[part];
    k.x[1] = reinterpret_cast<const uint4*>(row)[16 + part];
    if (a.kv_format == KvFormat::kFp8Scaled) {
      k.unit[0] = reinterpret_cast<const float*>(row + kLatent)[part / 8];
      k.unit[1] = reinterpret_cast<const float*>(row + kLatent)[2 + part / 8];
      k.rope = reinterpret_cast<const uint2*>(row + kLatent + 16)[part];
    } else {
      k.unit[0] = 1.0F;
      k.unit[1] = 1.0F;
      k.rope.x = reinterpret_cast<const std::uint32_t*>(row + kLatent)[part];
    }
  }
  // Rows past the end become zero.
  __device__ __forceinline__ void store_keys(const KeyPart& k, int first) {
    const int r = first + tid / 16;
    const int part = tid % 16;
    auto* to = reinterpret_cast<uint4*>(act + kKeysAt + r * kKeyPitch);
    auto* rope = reinterpret_cast<uint2*>(act + kKeysAt + r * kKeyPitch + 2 * kLatent) + part;
    if (k.state == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i * 16 + part] = make_uint4(0U, 0U, 0U, 0U);
      *rope = make_uint2(0U, 0U);
    } else if (k.state >= 2) {
      await_row(k.state - 2);
      const std::uint8_t* row = fresh + (k.state - 2) * kKeyPitch;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        to[i * 16 + part] = reinterpret_cast<const uint4*>(row)[i * 16 + part];
      *rope = reinterpret_cast<const uint2*>(row + 2 * kLatent)[part];
    } else if (a.kv_format == KvFormat::kBf16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i * 16 + part] = k.x[i];
      *rope = k.rope;
    } else {
      *rope = a.kv_format == KvFormat::kFp8Scaled
                  ? k.rope
                  : make_uint2(widen_to_bf16(k.rope.x, 1.0F), widen_to_bf16(k.rope.x >> 16, 1.0F));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        to[(i * 16 + part) * 2] = make_uint4(
            widen_to_bf16(k.x[i].x, k.unit[i]), widen_to_bf16(k.x[i].x >> 16, k.unit[i]),
            widen_to_bf16(k.x[i].y, k.unit[i]), widen_to_bf16(k.x[i].y >> 16, k.unit[i]));
        to[(i * 16 + part) * 2 + 1] = make_uint4(
            widen_to_bf16(k.x[i].z, k.unit[i]), widen_to_bf16(k.x[i].z >> 16, k.unit[i]),
            widen_to_bf16(k.x[i].w, k.unit[i]), widen_to_bf16(k.x[i].w >> 16, k.unit[i]));
      }
    }
  }
  static __device__ __forceinline__ std::uint32_t widen_to_bf16(std::uint32_t pair, float unit) {
    const std::uint32_t h = widen_e4m3(pair);
    const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&h));
    return pack_bf16(x.x * unit, x.y * unit);
  }

  // The queries of one row and head group as bf16: q_lat | q_pe, zero for heads that are not there.
  __device__ __forceinline__ void gather_queries(int s, int group) {
    const int heads = min(kHeadGroup, p.heads - group * kHeadGroup);
    const int uk_columns = p.uk.block_tiles * kTileRows;
    const int uk_packets = kLatent / uk_columns * p.uk.packets;  // of one head
    const int q_columns = p.q_b.block_tiles * kTileRows;
    const int pe_packets = kRope / q_columns * p.q_b.packets;
    const int head_packets = uk_packets + pe_packets;
    const int total = heads * head_packets;
    const uint4* uk_box =
        box + p.box_uk +
        (static_cast<std::int64_t>(s) * p.uk.blocks + group * kHeadGroup * (kLatent / uk_columns)) *
            p.uk.packets;
    const uint4* q_box = box + p.box_q_b +
                         (static_cast<std::int64_t>(s) * p.q_b.blocks +
                          group * kHeadGroup * (kQueryHead / q_columns)) *
                             p.q_b.packets;
    for (int q0 = tid; q0 < total; q0 += 2 * kThreads) {
      const uint4* from[2];
      uint4 got[2];
      int at[2];
      int n[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int q = min(q0 + k * kThreads, total - 1);
        const int head = q / head_packets;
        int in_head = q - head * head_packets;
        if (in_head < uk_packets) {
          const int b = in_head / p.uk.packets;
          const int j = in_head - b * p.uk.packets;
          from[k] = uk_box + head * uk_packets + in_head;
          at[k] = head * kKeyPitch + (b * uk_columns + j * kPacketValues) * 2;
          n[k] = uk_columns - j * kPacketValues;
        } else {
          in_head -= uk_packets;
          const int b = in_head / p.q_b.packets;
          const int j = in_head - b * p.q_b.packets;
          from[k] = q_box + head * (kQueryHead / q_columns) * p.q_b.packets +
                    kNope / q_columns * p.q_b.packets + in_head;
          at[k] = head * kKeyPitch + (kLatent + b * q_columns + j * kPacketValues) * 2;
          n[k] = q_columns - j * kPacketValues;
        }
      }
      poll(from, got, kStageAttention);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        auto* to = reinterpret_cast<std::uint32_t*>(act + kQueryAt + at[k]);
        to[0] = got[k].x;
        if (n[k] > 2) to[1] = got[k].y;
        if (n[k] > 4) to[2] = got[k].z;
      }
    }
    for (int i = heads * kKeyPitch / 4 + tid; i < kHeadGroup * kKeyPitch / 4; i += kThreads) {
      reinterpret_cast<std::uint32_t*>(act + kQueryAt)[i] = 0U;
    }
  }

  // One task: up to 64 picks of one row, whose keys are in place, for up to 8 heads; publishes the
  // normalised latent output, maximum and sum.
  __device__ __forceinline__ void attention_task(int s, int split, int group, int picks) {
    gather_queries(s, group);
    sync_compute();
    {  // 4 tiles of 16 picks x 4 quarters of the 576 columns
      const int tile = warp & 3;
      const int quarter = warp >> 2;
      float d[4] = {0.0F, 0.0F, 0.0F, 0.0F};
      const std::uint32_t keys =
          act_address + static_cast<std::uint32_t>(kKeysAt + (tile * 16 + lane % 16) * kKeyPitch +
                                                   (lane / 16) * 16 + quarter * 288);
      const std::uint8_t* query = act + kQueryAt + g * kKeyPitch + quarter * 288 + t * 4;
#pragma unroll
      for (int k = 0; k < 9; ++k) {
        std::uint32_t m[4];
        load_matrix(m, keys + static_cast<std::uint32_t>(k * 32));
        mma_bf16(d, m, *reinterpret_cast<const std::uint32_t*>(query + k * 32),
                 *reinterpret_cast<const std::uint32_t*>(query + k * 32 + 16));
      }
      sync_compute();
      float* to = reinterpret_cast<float*>(act + kQueryAt) +
                  (quarter * kSplitPicks + tile * 16 + g) * kHeadGroup + 2 * t;
      *reinterpret_cast<float2*>(to) = make_float2(d[0], d[1]);
      *reinterpret_cast<float2*>(to + 8 * kHeadGroup) = make_float2(d[2], d[3]);
    }
    sync_compute();
    if (warp < kHeadGroup) {  // a warp a head, two picks a lane
      constexpr int kQuarter = kSplitPicks * kHeadGroup;
      float x[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float* l =
            reinterpret_cast<const float*>(act + kQueryAt) + (lane + 32 * k) * kHeadGroup + warp;
        x[k] = ((l[0] + l[kQuarter]) + (l[2 * kQuarter] + l[3 * kQuarter])) * 0.0625F;
        if (lane + 32 * k >= picks) x[k] = -INFINITY;
      }
      const float top = warp_max(fmaxf(x[0], x[1]));
      float sum = 0.0F;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float e = lane + 32 * k < picks ? __expf(x[k] - top) : 0.0F;
        sum += e;
        // p as the sum of two bf16: one alone would cost 8 bits' worth of error in every latent.
        auto* prob = reinterpret_cast<__nv_bfloat16*>(act + kProbabilitiesAt) +
                     warp * kProbabilityPitch + lane + 32 * k;
        const float high = round_bf16(e);
        prob[0] = __float2bfloat16_rn(high);
        prob[kHeadGroup * kProbabilityPitch] = __float2bfloat16_rn(e - high);
      }
      sum = warp_sum(sum);
      if (lane == 0) {
        f.split_max[warp] = top;
        f.split_sum[warp] = sum;
      }
    }
    sync_compute();
    float o[2][4] = {{0.0F, 0.0F, 0.0F, 0.0F}, {0.0F, 0.0F, 0.0F, 0.0F}};
#pragma unroll
    for (int k = 0; k < kSplitPicks / 16; ++k) {
      const std::uint8_t* prob =
          act + kProbabilitiesAt + (g * kProbabilityPitch + k * 16 + 2 * t) * 2;
      constexpr int kLow = kHeadGroup * kProbabilityPitch * 2;
      const std::uint32_t high0 = *reinterpret_cast<const std::uint32_t*>(prob);
      const std::uint32_t high1 = *reinterpret_cast<const std::uint32_t*>(prob + 16);
      const std::uint32_t low0 = *reinterpret_cast<const std::uint32_t*>(prob + kLow);
      const std::uint32_t low1 = *reinterpret_cast<const std::uint32_t*>(prob + kLow + 16);
#pragma unroll
      for (int m = 0; m < 2; ++m) {  // 16 latents x 8 heads each
        std::uint32_t v[4];
        // Transposed 8x8 matrices: {latents 0-7, picks 0-7}, {8-15, 0-7}, {0-7, 8-15}, {8-15,
        // 8-15}.
        load_matrix_transposed(
            v, act_address + static_cast<std::uint32_t>(
                                 kKeysAt + (k * 16 + (lane / 16) * 8 + lane % 8) * kKeyPitch +
                                 (warp * 32 + m * 16 + (lane / 8 % 2) * 8) * 2));
        mma_bf16(o[m], v, high0, high1);
        mma_bf16(o[m], v, low0, low1);
      }
    }
    // f16 (three bits more than bf16) in place of the queries, then packets.
    auto* out = reinterpret_cast<__half*>(act + kQueryAt);
    const float n0 = 1.0F / f.split_sum[2 * t];
    const float n1 = 1.0F / f.split_sum[2 * t + 1];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int latent = warp * 32 + m * 16 + g;
      out[(2 * t) * (kKeyPitch / 2) + latent] = __float2half_rn(o[m][0] * n0);
      out[(2 * t + 1) * (kKeyPitch / 2) + latent] = __float2half_rn(o[m][1] * n1);
      out[(2 * t) * (kKeyPitch / 2) + latent + 8] = __float2half_rn(o[m][2] * n0);
      out[(2 * t + 1) * (kKeyPitch / 2) + latent + 8] = __float2half_rn(o[m][3] * n1);
    }
    sync_compute();
    const int heads = min(kHeadGroup, p.heads - group * kHeadGroup);
    for (int i = tid; i < heads * kPartialPackets; i += kThreads) {
      const int head = i / kPartialPackets;
      const int j = i - head * kPartialPackets;
      uint4* to =
          box + p.box_partial +
          ((static_cast<std::int64_t>(s) * p.heads + group * kHeadGroup + head) * kMaxSplits +
           split) *
              kPartialPackets +
          j;
      if (j == kPartialPackets - 1) {
        store_local_packet(to, __float_as_uint(f.split_max[head]),
                           __float_as_uint(f.split_sum[head]), 0U, tag);
      } else {
        const auto* w =
            reinterpret_cast<const std::uint32_t*>(act + kQueryAt + head * kKeyPitch + j * 12);
        store_local_packet(to, w[0], j < 85 ? w[1] : 0U, j < 85 ? w[2] : 0U, tag);
      }
    }
    sync_compute();
  }

  __device__ __forceinline__ void attention() {
    const int per_row = kMaxSplits * p.head_groups;
    for (int task = cta; task < p.rows * per_row; task += p.grid) {
      const int s = task / per_row;
      const int split = (task - s * per_row) / p.head_groups;
      const int group = task - s * per_row - split * p.head_groups;
      const int picks = min(kSplitPicks, pick_count(s) - split * kSplitPicks);
      if (picks <= 0) continue;
      KeyPart first;
      KeyPart second;
      fetch_keys(first, s, split * kSplitPicks, picks);
      fetch_keys(second, s, split * kSplitPicks + 32, picks - 32);
      store_keys(first, 0);
      store_keys(second, 32);
      attention_task(s, split, group, picks);
    }
    // The rows that this CTA stores must be on their way before the next request.
    if (tid == 0 && f.picks_fresh != 0) {
      for (int s = 0; s < min(p.rows, kRowWarps); ++s) await_row(s);
    }
  }

  // Merges the splits of one head and row, then W_UV: o = W_UV o_lat.
  __device__ __forceinline__ void uv() {
    const int tiles = p.uv_part_tiles();
    const int per_task = tiles * p.uv.chunks;
    int first = 0;
    for (int task = cta; task < p.uv_tasks(p.rows); task += p.grid, first += per_task) {
      const int s = task / (p.heads * p.uv_parts);
      const int head_part = task - s * p.heads * p.uv_parts;
      const int head = head_part / p.uv_parts;
      const int splits = ceil_div(pick_count(s), kSplitPicks);
      const uint4* base =
          box + p.box_partial +
          (static_cast<std::int64_t>(s) * p.heads + head) * kMaxSplits * kPartialPackets;
      constexpr int kGroups = 5;
      constexpr int kGroupThreads = kPartialPackets - 1;
      constexpr int kOfGroup = (kMaxSplits + kGroups - 1) / kGroups;
      static_assert(kGroups * kGroupThreads <= kThreads - 32);
      auto* sums = reinterpret_cast<float*>(act + 2 * kLatent + 16);
      const int group = tid / kGroupThreads;
      const int j = tid - group * kGroupThreads;
      uint4 got[kOfGroup];
      if (splits > 0) {
        if (warp == kWarps - 1) {
          const uint4* from[1] = {base + min(lane, splits - 1) * kPartialPackets + kGroupThreads};
          uint4 stats[1];
          poll(from, stats, kStageUv);
          const float m = __uint_as_float(stats[0].x);
          const float top = warp_max(m);
          const float w = lane < splits ? __expf(m - top) * __uint_as_float(stats[0].y) : 0.0F;
          f.split_weight[lane] = w / warp_sum(w);
        } else if (group < min(kGroups, splits)) {
          const uint4* from[kOfGroup];
#pragma unroll
          for (int k = 0; k < kOfGroup; ++k) {
            const int at = group + k * kGroups;
            from[k] = base + (at < splits ? at : group) * kPartialPackets + j;
          }
          poll(from, got, kStageUv);
        }
      }
      sync_compute();
      if (group < kGroups) {
        float y[6] = {0.0F, 0.0F, 0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
        for (int k = 0; k < kOfGroup; ++k) {
          const int at = group + k * kGroups;
          if (at >= splits) continue;
          const float w = f.split_weight[at];
          const std::uint32_t x[3] = {got[k].x, got[k].y, got[k].z};
#pragma unroll
          for (int i = 0; i < 3; ++i) {
            const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&x[i]));
            y[2 * i] += w * v.x;
            y[2 * i + 1] += w * v.y;
          }
        }
#pragma unroll
        for (int i = 0; i < 6; ++i) {
          if (j * 6 + i < kLatent) sums[group * kLatent + j * 6 + i] = y[i];
        }
      }
      sync_compute();
      {
        float y = sums[tid];
#pragma unroll
        for (int k = 1; k < kGroups; ++k) y += sums[k * kLatent + tid];
        reinterpret_cast<__half*>(act)[tid] = __float2half_rn(round_bf16(y));
      }
      sync_compute();
      product(p.uv, first, tiles, 1, 0, false);
      const int packets = p.uv_part_packets();
      const int columns = tiles * kTileRows;
      if (tid < packets) {
        const float* w = f.out + tid * kPacketValues;
        const int n = columns - tid * kPacketValues;
        store_local_packet(
            box + p.box_o +
                (static_cast<std::int64_t>(s) * p.heads * p.uv_parts + head_part) * packets + tid,
            pack_bf16(w[0], w[1]), n > 2 ? pack_bf16(w[2], w[3]) : 0U,
            n > 4 ? pack_bf16(w[4], w[5]) : 0U, tag);
      }
      sync_compute();
    }
  }

  __device__ __forceinline__ void o_projection() {
    const MatrixPlan& m = p.o;
    const int columns = p.heads * kValue;
    const int stride = 2 * columns + 16;
    const int blocks = p.heads * p.uv_parts;
    gather<R, false>(a, f, act,
                     {box + p.box_o, tag, blocks, blocks, p.uv_part_packets(), kValue / p.uv_parts,
                      columns, stride, kStageO, layer, nullptr, 0.0F});
    product(m, 0, min(m.block_tiles, m.tiles - cta * m.block_tiles), p.rows, stride, true);
  }

  __device__ __forceinline__ void router() {
    const int stride = 2 * p.hidden + 16;
    const int experts = min(p.router_rows, p.experts - cta * p.router_rows);
    const int units = max(0, experts) * p.router_chunks;
    for (int u = warp; u < units; u += kWarps) {
      const int row = u / p.router_chunks;
      const int chunk = u - row * p.router_chunks;
      const std::uint32_t unit = pin(acquire(a, f, layer, ring));
      float v[R];
#pragma unroll
      for (int s = 0; s < R; ++s) v[s] = 0.0F;
      for (int k = lane * 8; k < p.router_unit_k; k += 256) {
        const uint4 w = load_shared(unit + static_cast<std::uint32_t>(k * 2));
        const float w8[8] = {bf16_low(w.x), bf16_high(w.x), bf16_low(w.y), bf16_high(w.y),
                             bf16_low(w.z), bf16_high(w.z), bf16_low(w.w), bf16_high(w.w)};
#pragma unroll
        for (int s = 0; s < R; ++s) {
          const uint4 x = load_shared(
              pin(act_address) + static_cast<std::uint32_t>(min(s, p.rows - 1) * stride +
                                                            (chunk * p.router_unit_k + k) * 2));
          const std::uint32_t x4[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 y = __half22float2(*reinterpret_cast<const __half2*>(&x4[i]));
            v[s] += w8[2 * i] * y.x;
            v[s] += w8[2 * i + 1] * y.y;
          }
        }
      }
#pragma unroll
      for (int s = 0; s < R; ++s) {
        v[s] = warp_sum(v[s]);
        if (lane == 0) partial[u * R + s] = v[s];
      }
      release(ring);
    }
    sync_compute();
    // Packet j of a row: scores of three experts.
    if (experts > 0 && tid < p.rows * p.router_packets) {
      const int s = tid / p.router_packets;
      const int j = tid - s * p.router_packets;
      float r[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        float sum = 0.0F;
        if (3 * j + i < experts) {
          for (int c = 0; c < p.router_chunks; ++c)
            sum += partial[((3 * j + i) * p.router_chunks + c) * R + s];
        }
        r[i] = 1.0F / (1.0F + expf(-sum));
      }
      store_local_packet(
          box + p.box_router + (static_cast<std::int64_t>(s) * p.grid + cta) * p.router_packets + j,
          __float_as_uint(r[0]), __float_as_uint(r[1]), __float_as_uint(r[2]), tag);
    }
    sync_compute();
  }

  // Picks of every row (one warp a row), then the list of active experts and this CTA's share of
  // their tiles.
  __device__ __forceinline__ void routing() {
    float* scores = partial;  // [rows][256]
    if (tid == kThreads - 1) {
      // The producer may still read the last layer's routing.
      volatile int* listed = &f.listed_layer;
      std::uint32_t rounds = 0;
      std::uint64_t start = 0;
      while (*listed < layer) {
        if ((++rounds & 127U) == 0) {
          start = give_up(a, f, start, layer, kStageRouting, -1, 0, 0);
          if (start == kGiveUp) break;
        }
      }
    }
    if (warp < p.rows && f.slot[warp] >= 0) {
      const int s = warp;
      const int producers = ceil_div(p.experts, p.router_rows);
      const int total = producers * p.router_packets;
      const uint4* base =
          box + p.box_router + static_cast<std::int64_t>(s) * p.grid * p.router_packets;
      const auto* biases = reinterpret_cast<const float*>(a.layer[layer].weights + a.weights.bias);
      float bias[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        bias[i] = lane * 8 + i < p.experts ? __ldg(biases + lane * 8 + i) : 0.0F;
      }
      for (int q0 = lane; q0 < total; q0 += 128) {
        const uint4* from[4];
        uint4 got[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) from[k] = base + min(q0 + 32 * k, total - 1);
        poll(from, got, kStageRouting);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int q = q0 + 32 * k;
          if (q >= total) continue;
          const int producer = q / p.router_packets;
          const int first = (q - producer * p.router_packets) * 3;
          const std::uint32_t w[3] = {got[k].x, got[k].y, got[k].z};
#pragma unroll
          for (int i = 0; i < 3; ++i) {
            const int e = producer * p.router_rows + first + i;
            if (first + i < p.router_rows && e < p.experts)
              scores[s * kMaxExperts + e] = __uint_as_float(w[i]);
          }
        }
      }
      __syncwarp();
      // A lane holds 8 neighbouring experts: among equal keys the lowest lane, then the lowest
      // place in it, is the smaller expert.
      std::uint32_t key[8];  // order of the floats as unsigned integers; 0: not there or taken
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int e = lane * 8 + i;
        key[i] = 0U;
        if (e < p.experts) {
          const std::uint32_t bits = __float_as_uint(scores[s * kMaxExperts + e] + bias[i]);
          key[i] = (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
        }
      }
      int my_expert = 0;
#pragma unroll 1
      for (int k = 0; k < p.top_k; ++k) {
        std::uint32_t best = key[0];
        int at = 0;
#pragma unroll
        for (int i = 1; i < 8; ++i) {
          at = key[i] > best ? i : at;
          best = max(best, key[i]);
        }
        const std::uint32_t top = __reduce_max_sync(kFullMask, best);
        const int winner = __ffs(static_cast<int>(__ballot_sync(kFullMask, best == top))) - 1;
        const int e = __shfl_sync(kFullMask, lane * 8 + at, winner);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (lane == winner && i == at) key[i] = 0U;
        }
        if (lane == k) my_expert = e;
      }
      const float mine = lane < p.top_k ? scores[s * kMaxExperts + my_expert] : 0.0F;
      float sum = 0.0F;  // in the order of the choice
#pragma unroll 1
      for (int k = 0; k < p.top_k; ++k) sum += __shfl_sync(kFullMask, mine, k);
      if (lane < p.top_k) {
        f.top_expert[s][lane] = my_expert;
        f.top_weight[s][lane] =
            a.norm_topk ? a.routed_scale * mine / (sum + 1e-20F) : a.routed_scale * mine;
        atomicOr(&f.active_bits[my_expert / 32], 1U << (my_expert % 32));
      }
    }
    sync_compute();
    for (int i = tid; i < kMaxActive * 8 / 4; i += kThreads) {
      reinterpret_cast<std::uint32_t*>(f.position)[i] = 0U;
    }
    if (tid < kMaxExperts) {
      const int word = tid / 32;
      int before = 0;
      int count = 0;
#pragma unroll
      for (int i = 0; i < kMaxExperts / 32; ++i) {
        const int n = __popc(f.active_bits[i]);
        before += i < word ? n : 0;
        count += n;
      }
      const std::uint32_t bits = f.active_bits[word];
      if ((bits >> (tid % 32) & 1U) != 0) {
        f.active[1 + before + __popc(bits & ((1U << (tid % 32)) - 1U))] =
            static_cast<std::uint16_t>(tid);
      }
      if (tid == 0) {
        f.active[0] = static_cast<std::uint16_t>(p.experts);
        f.active_count = count + 1;
        const int tiles = count * p.up_gate.tiles;
        f.routed_begin = tiles * cta / p.grid;
        f.routed_end = tiles * (cta + 1) / p.grid;
      }
    }
    sync_compute();
    if (tid < p.rows * (p.top_k + 1)) {
      const int s = tid / (p.top_k + 1);
      const int k = tid - s * (p.top_k + 1);
      if (f.slot[s] >= 0) {
        int index = 0;
        float w = 1.0F;
        if (k > 0) {
          const int e = f.top_expert[s][k - 1];
          index = 1;
          for (int i = 0; i < e / 32; ++i) index += __popc(f.active_bits[i]);
          index += __popc(f.active_bits[e / 32] & ((1U << (e % 32)) - 1U));
          w = f.top_weight[s][k - 1];
        }
        f.position[index * 8 + s] = static_cast<std::uint8_t>(k + 1);
        f.pair_weight[s * (p.top_k + 1) + k] = w;
      }
    }
    sync_compute();
    if (tid == 0) {
      __threadfence_block();
      *const_cast<volatile int*>(&f.routed_layer) = layer;
    }
  }

  // Tiles [begin, end) of up/gate; tile / tiles-per-expert counts from active expert `index0`. A
  // tile's rows are 8 gate rows and the 8 up rows that belong to them.
  __device__ __forceinline__ void up_gate(int begin, int end, int index0) {
    const int stride = 2 * p.hidden + 16;
    const MatrixPlan& m = p.up_gate;
    const int chunks = m.chunks;
    const int chunk_bytes = m.chunk_units * m.unit_k * 2;
    constexpr int kTileSums = kTileRows * R;
    const int wave = min(kWaveChunks / chunks, 4);
    const std::uint32_t row =
        act_address + static_cast<std::uint32_t>(min(g, p.rows - 1) * stride + t * 32);
    for (int tile0 = begin; tile0 < end; tile0 += wave) {
      const int tiles = min(wave, end - tile0);
      int i = (warp - (tile0 - begin) * chunks) & (kWarps - 1);
      int chunk = i % chunks;
      for (; i < tiles * chunks; i += kWarps) {
        float sum[4] = {0.0F, 0.0F, 0.0F, 0.0F};
        chunk_product(a, f, layer, ring, m.chunk_units, m.unit_k,
                      row + static_cast<std::uint32_t>(chunk * chunk_bytes), sum);
        store_chunk<R>(partial + i * kTileSums, sum);
        chunk += kWarps;
        while (chunk >= chunks) chunk -= chunks;
      }
      sync_compute();
      // Thread: tile, row s, value i of 8. Four results of lanes side by side make a packet.
      const int value = tid & 7;
      const int s = tid >> 3 & (R - 1);
      const int tile = tid / (8 * R);
      float mid = 0.0F;
      if (tile < tiles) {
        const float* from = partial + tile * chunks * kTileSums + value * R + s;
        float gate = 0.0F;
        float up = 0.0F;
#pragma unroll 4
        for (int k = 0; k < chunks; ++k) {
          gate += from[k * kTileSums];
          up += from[k * kTileSums + 8 * R];
        }
        mid = gate / (1.0F + __expf(-gate)) * up;
      }
      const float m1 = __shfl_down_sync(kFullMask, mid, 1);
      const float m2 = __shfl_down_sync(kFullMask, mid, 2);
      const float m3 = __shfl_down_sync(kFullMask, mid, 3);
      if (tile < tiles && (tid & 3) == 0 && s < p.rows) {
        const int at = tile0 + tile;
        const int index = quotient(at, a.by_up_gate_tiles);
        const int k = f.position[(index0 + index) * 8 + s];
        if (k > 0 || (index0 == 0 && f.slot[s] >= 0)) {
          const int pair = s * (p.top_k + 1) + (index0 == 0 ? 0 : k - 1);
          store_local_packet(box + p.box_mid + static_cast<std::int64_t>(pair) * p.mid_packets() +
                                 (at - index * m.tiles) * 2 + value / 4,
                             pack_bf16(mid, m1), pack_bf16(m2, m3), 0U, tag);
        }
      }
      sync_compute();
    }
  }

  __device__ __forceinline__ void down() {
    const int stride = 2 * p.inter + 16;
    const int per_row = p.top_k + 1;
    const int pairs = p.rows * per_row;
    const int packets = p.mid_packets();
    // A warp a (row, expert) pair: values, their maximum, f16 with a power-of-two scale that the
    // pair's weight undoes.
    for (int pair = warp; pair < pairs; pair += kWarps) {
      if (f.slot[pair / per_row] < 0) continue;
      const uint4* base = box + p.box_mid + static_cast<std::int64_t>(pair) * packets;
      auto* to = reinterpret_cast<uint2*>(act + pair * stride);
      float amax = 0.0F;
      for (int q = lane; q < packets; q += 64) {
        const uint4* from[2] = {base + q, base + (q + 32 < packets ? q + 32 : q)};
        uint4 got[2];
        poll(from, got, kStageMid);
        to[q] = make_uint2(got[0].x, got[0].y);
        if (q + 32 < packets) to[q + 32] = make_uint2(got[1].x, got[1].y);
#pragma unroll
        for (int k = 0; k < 2; ++k)
          amax = add_pair<false>(add_pair<false>(amax, got[k].x), got[k].y);
      }
      amax = warp_max(amax);
      float down_scale;
      float up_scale;
      row_scale(amax, down_scale, up_scale);
      if (lane == 0) f.pair_weight[pair] *= up_scale;
      for (int q = lane; q < packets; q += 32) {
        const uint2 x = to[q];
        to[q] = make_uint2(pack_f16(bf16_low(x.x) * down_scale, bf16_high(x.x) * down_scale),
                           pack_f16(bf16_low(x.y) * down_scale, bf16_high(x.y) * down_scale));
      }
    }
    for (int i = tid; i < stride / 4; i += kThreads)
      reinterpret_cast<std::uint32_t*>(act + pairs * stride)[i] = 0U;
    sync_compute();
    mark(kStageMid);
    const MatrixPlan& m = p.down;
    const int tiles = min(m.block_tiles, m.tiles - cta * m.block_tiles);
    const int chunks = m.chunks;
    const int chunk_bytes = m.chunk_units * m.unit_k * 2;
    const int per_expert = tiles * chunks;
    const int wave = kWaveChunks / per_expert;  // experts
    constexpr int kTileSums = kTileRows * R;
    const int s = tid & (R - 1);
    const int my_tile = tid / kTileSums;
    float total = 0.0F;
    for (int index0 = 0; index0 < f.active_count; index0 += wave) {
      const int count = min(wave, f.active_count - index0);
      int i = (warp - index0 * per_expert) & (kWarps - 1);
      int index = i / per_expert;
      int inner = i - index * per_expert;
      for (; i < count * per_expert; i += kWarps) {
        const int chunk = chunks == 1 ? 0 : inner % chunks;
        const std::uint8_t* position = &f.position[(index0 + index) * 8];
        const int k = g < p.rows ? position[g] : 0;
        const int pair = k > 0 ? g * per_row + k - 1 : pairs;  // the last one is zero
        float sum[4] = {0.0F, 0.0F, 0.0F, 0.0F};
        chunk_product(
            a, f, layer, ring, m.chunk_units, m.unit_k,
            act_address + static_cast<std::uint32_t>(pair * stride + chunk * chunk_bytes + t * 32),
            sum);
        // Routing weights of activation rows 2 t and 2 t + 1.
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int of = 2 * t + r < p.rows ? position[2 * t + r] : 0;
          const float w = of > 0 ? f.pair_weight[(2 * t + r) * per_row + of - 1] : 0.0F;
          sum[r] = of > 0 ? sum[r] * w : 0.0F;
          sum[r + 2] = of > 0 ? sum[r + 2] * w : 0.0F;
        }
        store_chunk<R>(partial + i * kTileSums, sum);
        inner += kWarps;
        while (inner >= per_expert) {
          inner -= per_expert;
          ++index;
        }
      }
      sync_compute();
      if (my_tile < tiles) {
        const float* from = partial + my_tile * chunks * kTileSums + tid % kTileSums;
        for (int e = 0; e < count; ++e) {
          for (int k = 0; k < chunks; ++k) total += from[k * kTileSums];
          from += per_expert * kTileSums;
        }
      }
      sync_compute();
    }
    if (my_tile < tiles && s < p.rows) {
      f.out[s * kOutPitch + my_tile * kTileRows + tid / R % kTileRows] = total;
    }
    sync_compute();
  }

  // The end of a stage: the place where tests let a CTA stall before the next one.
  __device__ __forceinline__ void mark(int stage) {
    if (a.stall_ns != 0 && stage + 1 == a.stall_stage && (a.stall_cta < 0 || a.stall_cta == cta)) {
      hold(a.stall_ns);
    }
    if (a.timeline != nullptr && tid == 0) {
      a.timeline[(static_cast<std::int64_t>(layer) * p.grid + cta) * kTimelineEvents + stage + 1] =
          clock64();
    }
  }

  __device__ __forceinline__ void run() {
    if (tid < 8) f.slot[tid] = tid < p.rows ? a.slots[tid] : -1;
    if (tid < 8 * kRope / 2) {
      const int s = tid / (kRope / 2);
      const int i = tid % (kRope / 2);
      if (s < p.rows) {
        // The angle is an f32 product by definition (rope_frequency); it is reduced exactly, in
        // f64.
        const float angle = __fmul_rn(static_cast<float>(a.positions[s]), a.frequency[i]);
        const double turns = static_cast<double>(angle) * 0.15915494309189533577;
        float sine;
        float cosine;
        sincospif(static_cast<float>((turns - rint(turns)) * 2.0), &sine, &cosine);
        f.rotation[s][i] = make_float2(cosine, sine);
      }
    }
    const std::uint32_t done = *static_cast<volatile std::uint32_t*>(a.counter);
    sync_compute();
    for (layer = 0; layer < a.layers; ++layer) {
      tag = (done + static_cast<std::uint32_t>(layer)) | 0x80000000U;
      const std::uint32_t parity = tag & 1U;
      const uint4* last_x = reinterpret_cast<const uint4*>(a.boxes) + (parity ^ 1U) * p.box_packets;
      box = reinterpret_cast<uint4*>(a.boxes) + parity * p.box_packets;
      window_at = parity * p.win_packets;
      mark(-1);
      prefetch_keys();
      if (layer == 0) prefetch_parameters(0);
      prefetch_parameters(layer + 1);
      if (tid < kMaxExperts / 32) f.active_bits[tid] = 0U;
      const int stride = 2 * p.hidden + 16;
      if (layer == 0) {
        load_input<R>(a, f, act, stride);
      } else {
        // The rows that the previous layer published, under its tag.
        gather_hidden(last_x + p.box_x,
                      (done + static_cast<std::uint32_t>(layer) - 1U) | 0x80000000U,
                      a.weights.norm_input, kStageInput);
      }
      mark(kStageInput);
      qkv_a();
      mark(kStageQkvA);
      q_b();
      mark(kStageQB);
      uk();
      mark(kStageUk);
      sync_compute();
      mark(kStageKv);
      attention();
      mark(kStageAttention);
      uv();
      mark(kStageUv);
      o_projection();
      mark(kStageO);
      reduce_columns(a, f, layer, tag, window_at + p.win_attention, box + p.box_a, false,
                     kStageReduceAttention);
      mark(kStageReduceAttention);
      gather_hidden(box + p.box_a, tag, a.weights.norm_post, kStagePostNorm);
      mark(kStagePostNorm);
      router();
      mark(kStageRouter);
#pragma unroll 1
      for (int pass = 0; pass < 2;
           ++pass) {  // the shared expert under the routing's shadow, then the routed ones
        if (pass == 1) {
          mark(kStageShared);
          routing();
          mark(kStageRouting);
        }
        up_gate(pass == 0 ? cta * p.up_gate.tiles / p.grid : f.routed_begin,
                pass == 0 ? (cta + 1) * p.up_gate.tiles / p.grid : f.routed_end, pass);
      }
      mark(kStageUpGate);
      down();
      mark(kStageDown);
      if (tid == 0) f.picks_fresh = 0;
      reduce_columns(a, f, layer, tag, window_at + p.win_experts, box + p.box_x,
                     layer + 1 == a.layers, kStageReduceExperts);
      sync_compute();
      mark(kStageReduceExperts);
    }
    if (tid == 0) *const_cast<volatile int*>(&f.rows_wanted) = a.layers + 1;
    // The last CTA to come moves the counter on; every other one has read it long before.
    if (tid == 0) {
      __threadfence();
      if (atomicAdd(a.counter + 1, 1U) == static_cast<std::uint32_t>(p.grid) - 1U) {
        a.counter[1] = 0U;
        a.counter[0] = done + static_cast<std::uint32_t>(a.layers);
      }
    }
  }
};

template <int R>
__global__ void __launch_bounds__(kBlock, 1)
    decode_layer_kernel(const __grid_constant__ DecodeArguments arguments) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const DecodePlan& p = arguments.plan;
  // Fixed | activations | new cache rows | partial sums | ring
  std::uint8_t* act = shared + kFixedBytes;
  std::uint8_t* fresh = act + p.act_bytes;
  std::uint8_t* partial = fresh + R * kKeyPitch;
  std::uint8_t* ring = partial + kWaveChunks * kTileRows * R * 4;
  auto& fixed = *reinterpret_cast<Fixed*>(shared);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
    for (int w = 0; w < kWarps; ++w) {
      for (int i = 0; i < p.ring_slots; ++i) barrier_init(shared_address(&fixed.full[w][i]));
      fixed.consumed[w] = 0;
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fixed.routed_layer = -1;
    fixed.listed_layer = 0;
    fixed.rows_wanted = 0;
    for (int i = 0; i < kRowWarps; ++i) fixed.rows_ready[i] = 0;
    fixed.picks_fresh = 0;
    fixed.dead = 0;
  }
  __syncthreads();
  if (warp == kWarps) {
    produce(arguments, fixed, shared_address(ring));
  } else if (warp > kWarps) {
    produce_rows(arguments, fixed, fresh);
  } else {
    Machine<R> machine(arguments, fixed, act, fresh, reinterpret_cast<float*>(partial), ring);
    machine.run();
  }
}

template <int R>
int launch_kernel(const DecodeArguments& arguments, void* stream) {
  const cudaError_t set =
      cudaFuncSetAttribute(decode_layer_kernel<R>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           arguments.plan.smem_bytes);
  if (set != cudaSuccess) return set;
  // Cooperative: refused unless all CTAs can be resident at once, which the hand-offs rely on.
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(arguments.plan.grid));
  config.blockDim = dim3(kBlock);
  config.dynamicSmemBytes = static_cast<std::size_t>(arguments.plan.smem_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, decode_layer_kernel<R>, arguments);
}

template <int R>
int kernel_resources(KernelResources* out) {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, decode_layer_kernel<R>);
  if (status == cudaSuccess) {
    *out = {attributes.numRegs, static_cast<int>(attributes.localSizeBytes),
            attributes.maxThreadsPerBlock};
  }
  return status;
}

}  // namespace
}  // namespace penstock::decode
