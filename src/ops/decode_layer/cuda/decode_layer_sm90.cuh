// One GLM-5 MoE decoder layer (or several in a row) as one persistent launch on sm_90a.
//
// One CTA an SM, 8 warps that compute, one that copies and three that prepare the new cache rows:
// 384 threads, so that each may have 168 registers. (A thread's spills go to an L1 of 29 KB that
// 227 KB of shared memory leave, i.e. to L2: with 17 to 20 warps and 96 registers they made every
// gather of 8 rows 20 us long.)
// Weights come through a ring of slots of 8 units, a unit a warp, which the producer warp fills
// from the CTA's static list, so weights of later stages arrive while the CTA waits for data; only
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
constexpr int kRowWarps = 3;  // prepare the new cache rows
constexpr int kBlock = kThreads + 32 + 32 * kRowWarps;
constexpr int kOutPitch = 64;                       // columns of a block, 4 tiles
constexpr int kProbabilityPitch = kSplitPicks + 8;  // bf16
constexpr int kMaxPairs = 8 * (kMaxTopK + 1);
constexpr int kMaxActive = 8 * kMaxTopK + 1;

// A run of units of `bytes` bytes each, contiguous in memory.
struct Segment {
  const std::uint8_t* base;
  int units;  // 0: the stream has no more
  int bytes;
};

struct Fixed {
  DecodeArguments arguments;  // for functions of their own, to which the kernel's are far memory
  std::uint64_t full[kMaxRingSlots];
  std::uint32_t consumed[kWarps];  // slots, by each warp for the producer
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

// At the start of shared memory. A function of its own, so that the compiler knows what memory it
// is.
__device__ __forceinline__ Fixed& fixed_part() {
  extern __shared__ __align__(128) std::uint8_t shared[];
  return *reinterpret_cast<Fixed*>(shared);
}

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
__device__ __noinline__ std::uint64_t give_up(std::uint64_t start, int layer, int stage, int index,
                                              std::uint32_t expected, std::uint32_t seen,
                                              int peer = -1) {
  Fixed& f = fixed_part();
  const DecodeArguments& a = f.arguments;
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

// All N packets, every load of a round in flight at once, all again until none is late: a round
// that polls one late packet only and then the rest costs a trip more (1.55 us instead of 0.91 for
// 1024 packets from 128 CTAs).
template <int N, bool kSystem = false>
__device__ __forceinline__ void poll_packets(const DecodeArguments& a, Fixed& f, int layer,
                                             std::uint32_t tag, const uint4* const (&from)[N],
                                             uint4 (&to)[N], int stage) {
  std::uint32_t rounds = 0;
  std::uint64_t start = 0;
  while (true) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      to[i] = kSystem ? load_system_packet(from[i]) : load_local_packet(from[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) all = all && to[i].w == tag;
    if (all) return;
    if ((++rounds & 127U) != 0) continue;
    int late = 0;
#pragma unroll
    for (int i = N - 1; i >= 0; --i) late = to[i].w == tag ? late : i;
    const uint4* of = from[0];
    std::uint32_t seen = to[0].w;
#pragma unroll
    for (int i = 1; i < N; ++i) {
      of = i == late ? from[i] : of;
      seen = i == late ? to[i].w : seen;
    }
    const std::uint8_t* base = kSystem ? a.window : a.boxes;
    start = give_up(start, layer, stage,
                    static_cast<int>((reinterpret_cast<const std::uint8_t*>(of) - base) / 16), tag,
                    seen, kSystem ? min(late, a.plan.ranks - 1) : -1);
    if (start == kGiveUp) return;
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

// Norms (kNorm) or powers of two of all rows from per-thread sums of squares (or maxima): lane s
// has row s's. f.row_up gets what undoes the power of two.
template <int R, bool kNorm>
__device__ __forceinline__ float row_factors(Fixed& f, float (&v)[R], int columns, float eps) {
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
#pragma unroll
  for (int s = 0; s < R; ++s) {
    v[s] = kNorm ? warp_sum(v[s]) : warp_max(v[s]);
    if (lane == 0) f.reduce[tid / 32][s] = v[s];
  }
  sync_compute();
  float all = f.reduce[0][lane % R];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    const float of_warp = f.reduce[w][lane % R];
    all = kNorm ? all + of_warp : fmaxf(all, of_warp);
  }
  if constexpr (kNorm) return rsqrtf(all / static_cast<float>(columns) + eps);
  float down;
  float up;
  row_scale(all, down, up);
  if (tid < R) f.row_up[tid] = up;
  return down;
}
__device__ __forceinline__ float add_eight(float v, const uint4& x) {
  return add_pair<true>(add_pair<true>(add_pair<true>(add_pair<true>(v, x.x), x.y), x.z), x.w);
}
template <bool kNorm>
__device__ __forceinline__ std::uint32_t finish_pair(std::uint32_t x, float factor, float gain_low,
                                                     float gain_high) {
  float low = bf16_low(x) * factor;
  float high = bf16_high(x) * factor;
  if constexpr (kNorm) {
    const std::uint32_t rounded = pack_bf16(low * gain_low, high * gain_high);
    low = bf16_low(rounded);
    high = bf16_high(rounded);
  }
  return pack_f16(low, high);
}

template <bool kNorm>
__device__ __forceinline__ uint4 finish_eight(uint4 x, float factor, const float4& g0,
                                              const float4& g1) {
  x.x = finish_pair<kNorm>(x.x, factor, g0.x, g0.y);
  x.y = finish_pair<kNorm>(x.y, factor, g0.z, g0.w);
  x.z = finish_pair<kNorm>(x.z, factor, g1.x, g1.y);
  x.w = finish_pair<kNorm>(x.w, factor, g1.z, g1.w);
  return x;
}
// A norm's gains of this thread's first column groups, asked for before the wait for the rows.
constexpr int kHeldGroups = 3;
struct Gains {
  float4 g[kHeldGroups][2];
};
__device__ __forceinline__ void load_gains(Gains& gains, const float* from, int columns) {
#pragma unroll
  for (int k = 0; k < kHeldGroups; ++k) {
    const int i = static_cast<int>(threadIdx.x) + k * kThreads;
    gains.g[k][0] = gains.g[k][1] = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    if (i < columns / 8) {
      gains.g[k][0] = __ldg(reinterpret_cast<const float4*>(from) + 2 * i);
      gains.g[k][1] = __ldg(reinterpret_cast<const float4*>(from) + 2 * i + 1);
    }
  }
}

// Second half of a row gather: bf16 rows in `act` become f16 rows, normalised, or scaled by a power
// of two from per-thread maxima v. A thread has groups of 8 columns; squares are added in an order
// that follows the columns, so that it does not depend on how the rows came, i.e. on the number of
// CTAs.
template <int R, bool kNorm>
__device__ __forceinline__ void finish_rows(const DecodePlan& p, Fixed& f, std::uint8_t* act,
                                            float (&v)[R], int columns, int stride,
                                            const Gains& gains, const float* gain, float eps) {
  const int tid = static_cast<int>(threadIdx.x);
  const int groups = columns / 8;
  constexpr int kHeld = R <= 4 ? kHeldGroups : 0;
  uint4 held[kHeld > 0 ? kHeld : 1][R];
  if constexpr (kNorm) {
    sync_compute();
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int i = tid + k * kThreads;
      if (i >= groups) continue;
#pragma unroll
      for (int s = 0; s < R; ++s) {
        if (s >= p.rows) break;
        held[k][s] = *(reinterpret_cast<const uint4*>(act + s * stride) + i);
        v[s] = add_eight(v[s], held[k][s]);
      }
    }
#pragma unroll 1
    for (int i = tid + kHeld * kThreads; i < groups; i += kThreads) {
#pragma unroll
      for (int s = 0; s < R; ++s) {
        if (s >= p.rows) break;
        v[s] = add_eight(v[s], *(reinterpret_cast<const uint4*>(act + s * stride) + i));
      }
    }
  }
  const float mine = row_factors<R, kNorm>(f, v, columns, eps);
  float factor[R];
#pragma unroll
  for (int s = 0; s < R; ++s) factor[s] = __shfl_sync(kFullMask, mine, s);
  if constexpr (kNorm) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int i = tid + k * kThreads;
      if (i >= groups) continue;
#pragma unroll
      for (int s = 0; s < R; ++s) {
        if (s >= p.rows) break;
        *(reinterpret_cast<uint4*>(act + s * stride) + i) =
            finish_eight<true>(held[k][s], factor[s], gains.g[k][0], gains.g[k][1]);
      }
    }
  }
#pragma unroll 1
  for (int i = tid + (kNorm ? kHeld : 0) * kThreads; i < groups; i += kThreads) {
    float4 g0 = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    float4 g1 = g0;
    if constexpr (kNorm) {
      g0 = __ldg(reinterpret_cast<const float4*>(gain) + 2 * i);
      g1 = __ldg(reinterpret_cast<const float4*>(gain) + 2 * i + 1);
    }
#pragma unroll
    for (int s = 0; s < R; ++s) {
      if (s >= p.rows) break;
      auto* at = reinterpret_cast<uint4*>(act + s * stride) + i;
      *at = finish_eight<kNorm>(*at, factor[s], g0, g1);
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
__device__ __noinline__ void gather_rows(std::uint8_t* act, const RowGather& q0) {
  Fixed& f = fixed_part();
  const DecodeArguments& a = f.arguments;
  const RowGather q = q0;
  const DecodePlan& p = a.plan;
  // Packets a row in flight: 8 in all, or all four of one row.
  constexpr int kPlaces = R == 1 ? 4 : R == 8 ? 1 : 8 / R;
  Gains gains;
  if constexpr (kNorm && R <= 4) load_gains(gains, q.gain, q.columns);
  float v[R];
#pragma unroll
  for (int s = 0; s < R; ++s) v[s] = 0.0F;
  const int total = q.used_blocks * q.packets;
  const int pitch = q.blocks * q.packets;
#pragma unroll 1
  for (int base = static_cast<int>(threadIdx.x); base < total; base += kPlaces * kThreads) {
    const uint4* from[kPlaces * R];
    uint4 got[kPlaces * R];
#pragma unroll
    for (int i = 0; i < kPlaces * R; ++i) {
      const int at = base + i / R * kThreads;
      from[i] = q.box + min(i % R, p.rows - 1) * pitch + (at < total ? at : base);
    }
    poll_packets<kPlaces * R>(a, f, q.layer, q.tag, from, got, q.stage);
#pragma unroll
    for (int k = 0; k < kPlaces; ++k) {
      const int at = base + k * kThreads;
      if (at >= total) continue;
      const int block = at / q.packets;
      const int first = (at - block * q.packets) * kPacketValues;
      const int column = block * q.block_columns + first;
      const int n = min(q.block_columns - first, q.columns - column);
      if (n <= 0) continue;
#pragma unroll
      for (int s = 0; s < R; ++s) {
        if (s >= p.rows) break;
        const uint4 x = got[k * R + s];
        auto* to = reinterpret_cast<std::uint32_t*>(act + s * q.stride + column * 2);
        to[0] = x.x;
        if (n > 2) to[1] = x.y;
        if (n > 4) to[2] = x.z;
        if constexpr (!kNorm) {
          v[s] = add_pair<false>(v[s], x.x);
          if (n > 2) v[s] = add_pair<false>(v[s], x.y);
          if (n > 4) v[s] = add_pair<false>(v[s], x.z);
        }
      }
    }
  }
  finish_rows<R, kNorm>(p, f, act, v, q.columns, q.stride, gains, q.gain, q.eps);
}

// The launch's input rows, from memory.
template <int R>
__device__ __noinline__ void load_input(std::uint8_t* act, int stride) {
  Fixed& f = fixed_part();
  const DecodeArguments& a = f.arguments;
  const DecodePlan& p = a.plan;
  const int tid = static_cast<int>(threadIdx.x);
  const int cta = static_cast<int>(blockIdx.x);
  float v[R];
#pragma unroll
  for (int s = 0; s < R; ++s) v[s] = 0.0F;
  for (int i = tid; i < p.hidden / 8; i += kThreads) {
#pragma unroll
    for (int s = 0; s < R; ++s) {
      if (s >= p.rows) break;
      const uint4 x = __ldg(
          reinterpret_cast<const uint4*>(a.x_in + static_cast<std::int64_t>(s) * p.hidden) + i);
      *(reinterpret_cast<uint4*>(act + s * stride) + i) = x;
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
  const auto* gain = reinterpret_cast<const float*>(a.layer[0].weights + a.weights.norm_input);
  Gains gains;
  if constexpr (R <= 4) load_gains(gains, gain, p.hidden);
  finish_rows<R, true>(p, f, act, v, p.hidden, stride, gains, gain, a.eps);
}

// All-reduce of this CTA's columns (f.out) over the ranks plus the residual (f.own): bf16
// partials, summed in rank order in f32. The new residual is published to `to` (or stored as the
// launch's result) and kept in f.own.
__device__ __noinline__ void reduce_columns(int layer, std::uint32_t tag, std::int64_t window,
                                            uint4* to, bool last, int stage) {
  Fixed& f = fixed_part();
  const DecodeArguments& a = f.arguments;
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
__device__ __noinline__ void publish_block(uint4* box, std::uint32_t tag, int blocks, int block,
                                           int packets, int columns) {
  Fixed& f = fixed_part();
  const DecodeArguments& a = f.arguments;
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
// A stream is a sequence of segments. A job is what lies in slots of its own: a segment, or all of
// a stream's segments one behind the other (kRouted, kDown). Warp w takes the units w, w + 8, ...
// of a job.
__device__ __forceinline__ Segment block_segment(const DecodePlan& p, const std::uint8_t* weights,
                                                 int segment, const MatrixPlan& m) {
  const int cta = static_cast<int>(blockIdx.x);
  const int block = cta + segment * p.grid;
  if (block >= m.blocks) return {nullptr, 0, 0};
  const int tile = block * m.block_tiles;
  return {weights + static_cast<std::int64_t>(tile) * m.units * m.unit_bytes(),
          min(m.block_tiles, m.tiles - tile) * m.units, m.unit_bytes()};
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
      if (task >= p.uv_tasks(p.rows)) return {nullptr, 0, 0};
      return {weights + a.weights.uv +
                  static_cast<std::int64_t>(task % (p.heads * p.uv_parts)) * p.uv_part_tiles() *
                      p.uv.units * bytes,
              p.uv_part_tiles() * p.uv.units, bytes};
    }
    case kO:
      return block_segment(p, weights + a.weights.o, c.segment, p.o);
    case kRouter: {
      bytes = p.router_unit_k * 2;
      const int first = cta * p.router_rows;
      if (c.segment > 0 || first >= p.experts) return {nullptr, 0, 0};
      return {
          weights + a.weights.router + static_cast<std::int64_t>(first) * p.router_chunks * bytes,
          min(p.router_rows, p.experts - first) * p.router_chunks, bytes};
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
        if (begin >= end) return {nullptr, 0, 0};
        expert = f.active[1 + index];
      } else if (c.segment > 0) {
        return {nullptr, 0, 0};
      }
      return {weights + a.weights.up_gate +
                  (static_cast<std::int64_t>(expert) * p.up_gate.tiles + begin) * p.up_gate.units *
                      bytes,
              (end - begin) * p.up_gate.units, bytes};
    }
    default: {
      bytes = p.down.unit_bytes();
      if (c.segment >= f.active_count) return {nullptr, 0, 0};
      const int tile = cta * p.down.block_tiles;
      return {weights + a.weights.down +
                  (static_cast<std::int64_t>(f.active[c.segment]) * p.down.tiles + tile) *
                      p.down.units * bytes,
              min(p.down.block_tiles, p.down.tiles - tile) * p.down.units, bytes};
    }
  }
}
// The producer warp: fills the ring from the CTA's list. One bulk copy brings up to 8 units: a copy
// a unit (2 KB) cost the producer 32 instructions, 230 cycles, each, i.e. 9 bytes a cycle.
__device__ __noinline__ void produce(std::uint32_t ring) {
  Fixed& f = fixed_part();
  const DecodeArguments& a = f.arguments;
  const DecodePlan& p = a.plan;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto slots = static_cast<std::uint32_t>(p.ring_slots);
  const std::uint32_t barriers = shared_address(&f.full[0]);
  const std::uint32_t consumed = shared_address(&f.consumed[lane % kWarps]);
  const std::uint64_t policy = evict_first_policy();
  volatile int* dead = &f.dead;
  volatile int* routed_layer = &f.routed_layer;
  std::uint32_t filled = 0;  // slots closed so far
  std::uint32_t slot = 0;
  int in_slot = 0;  // units in the slot that is being filled
  const auto close = [&] {
    if (in_slot == 0) return;
    if (lane == 0) barrier_arrive(barriers + slot * 8U);
    in_slot = 0;
    ++filled;
    if (++slot == slots) slot = 0;
  };
  for (Cursor c{0, 0, 0}; c.layer < a.layers && *dead == 0;) {
    if (c.stream == kRouted) {
      while (*routed_layer < c.layer && *dead == 0) __nanosleep(20);
      __threadfence_block();
    }
    Segment s = next_segment(a, f, c);
    if (s.units == 0) {
      close();
      c.segment = 0;
      if (++c.stream == kStreams) {
        c.stream = 0;
        ++c.layer;
        if (lane == 0) *const_cast<volatile int*>(&f.listed_layer) = c.layer;
      }
      continue;
    }
    ++c.segment;
    while (s.units > 0) {
      if (in_slot == 0) {
        while (filled - __reduce_min_sync(kFullMask, load_acquire_shared(consumed)) >= slots &&
               *dead == 0) {
        }
        if (*dead != 0) break;
      }
      const int n = min(s.units, kWarps - in_slot);
      if (lane == 0) {
        bulk_load(ring + slot * kSlotBytes + static_cast<std::uint32_t>(in_slot * s.bytes), s.base,
                  static_cast<std::uint32_t>(n * s.bytes), barriers + slot * 8U, policy);
      }
      s.base += static_cast<std::int64_t>(n) * s.bytes;
      s.units -= n;
      in_slot += n;
      if (in_slot == kWarps) close();
    }
    if (c.stream < kRouted) close();
  }
  close();
  // Copies still under way (after a fault nobody waits for them) must not outlive the CTA.
  for (std::uint32_t u = filled > slots ? filled - slots : 0; u < filled; ++u) {
    while (!barrier_try_wait(barriers + u % slots * 8U, u / slots & 1U)) {
    }
  }
}

// A warp's place in the ring.
struct RingPlace {
  std::uint32_t base, barriers, consumed;  // shared addresses; base: of slot 0
  int slots;
  int slot;
  std::uint32_t parity;
  std::uint32_t used;  // slots so far
};

// Address of this warp's unit in the next slot, arrived.
__device__ __forceinline__ std::uint32_t acquire(const DecodeArguments& a, Fixed& f, int layer,
                                                 const RingPlace& r, int unit_bytes) {
  const std::uint32_t barrier = r.barriers + static_cast<std::uint32_t>(r.slot) * 8U;
  std::uint32_t rounds = 0;
  std::uint64_t start = 0;
  while (!barrier_try_wait(barrier, r.parity)) {
    if ((++rounds & 127U) == 0) {
      start = give_up(start, layer, kStageCount, r.slot, 0, 0);
      if (start == kGiveUp) break;
    }
  }
  return r.base + static_cast<std::uint32_t>(r.slot) * kSlotBytes +
         threadIdx.x / 32U * static_cast<std::uint32_t>(unit_bytes);
}
// Hands the slot back, as far as this warp is concerned.
__device__ __forceinline__ void release(RingPlace& r) {
  __syncwarp();
  ++r.used;
  if (threadIdx.x % 32 == 0) store_release_shared(r.consumed, r.used);
  if (++r.slot == r.slots) {
    r.slot = 0;
    r.parity ^= 1U;
  }
}
// The end of a job of `units` units: the last slot may hold none for this warp.
__device__ __forceinline__ void finish_job(RingPlace& r, int units) {
  const int last = units % kWarps;
  if (last != 0 && static_cast<int>(threadIdx.x) / 32 >= last) release(r);
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

// A unit in registers.
struct UnitCodes {
  uint4 w[4];
  float4 scale;
};
template <bool kWide>
__device__ __forceinline__ UnitCodes take_unit(const DecodeArguments& a, Fixed& f, int layer,
                                               RingPlace& ring) {
  constexpr std::uint32_t kCodes = kTileRows * (kWide ? kUnitColumns : 64);
  const std::uint32_t base = acquire(a, f, layer, ring, kCodes + kScaleBytes);
  const std::uint32_t unit = base + threadIdx.x % 32U * 16U;
  UnitCodes u;
  u.scale = take_shared_f32(base + kCodes);
#pragma unroll
  for (int i = 0; i < (kWide ? 4 : 2); ++i) {
    u.w[i] = take_shared(unit + static_cast<std::uint32_t>(i * 512));
  }
  release(ring);
  return u;
}
template <bool kWide>
__device__ __forceinline__ void add_unit(float (&sum)[4], const UnitCodes& u, std::uint32_t row) {
  add_group(sum, u.w[0], u.w[1], row, u.scale.x, u.scale.y);
  if constexpr (kWide) add_group(sum, u.w[2], u.w[3], row + 128U, u.scale.z, u.scale.w);
}
template <bool kWide>
__device__ __forceinline__ int add_units(const DecodeArguments& a, Fixed& f, int layer,
                                         RingPlace& ring, int k, int units, std::uint32_t row,
                                         float (&sum)[4]) {
  constexpr std::uint32_t kBytes = (kWide ? kUnitColumns : 64) * 2;
  row = pin(row);
  // Two at a time: the second one's loads run beside the first one's products.
#pragma unroll 1
  for (; k + kWarps < units; k += 2 * kWarps) {
    const UnitCodes u0 = take_unit<kWide>(a, f, layer, ring);
    const UnitCodes u1 = take_unit<kWide>(a, f, layer, ring);
    add_unit<kWide>(sum, u0, row + static_cast<std::uint32_t>(k) * kBytes);
    add_unit<kWide>(sum, u1, row + static_cast<std::uint32_t>(k + kWarps) * kBytes);
  }
  if (k < units) {
    const UnitCodes u = take_unit<kWide>(a, f, layer, ring);
    add_unit<kWide>(sum, u, row + static_cast<std::uint32_t>(k) * kBytes);
    k += kWarps;
  }
  return k;
}
// Adds this warp's units k, k + 8, ... of a tile from the ring and returns the next k: output rows
// lane / 4 (sum[0], sum[1]) and lane / 4 + 8 (sum[2], sum[3]) for activation rows 2 (lane % 4) and
// the next. `row`: where in shared memory activation row lane / 4 has the tile's first column of
// this lane (16 (lane % 4)). f32 within 64 columns, then scaled sums in column order.
__device__ __forceinline__ int add_tile(const DecodeArguments& a, Fixed& f, int layer,
                                        RingPlace& ring, int k, const MatrixPlan& m,
                                        std::uint32_t row, float (&sum)[4]) {
  return m.unit_k == kUnitColumns ? add_units<true>(a, f, layer, ring, k, m.units, row, sum)
                                  : add_units<false>(a, f, layer, ring, k, m.units, row, sum);
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

// One job: `tiles` tiles of m.units units times `rows` activation rows from shared address `from`
// on. Leaves the sums, in chunk order, in f.out[row][tile * 16 + output row], times f.row_up[row]
// if `scaled`. Not inlined, for the instruction cache's sake.
struct BlockJob {
  int tiles, rows, stride, layer;
  std::uint32_t from;
  bool scaled;
};
template <int R>
__device__ __noinline__ RingPlace block_product(float* partial, const MatrixPlan& m,
                                                const BlockJob job, RingPlace ring) {
  Fixed& f = fixed_part();
  const DecodeArguments& a = f.arguments;
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int units = m.units;
  const int chunks = m.chunks;
  constexpr int kTileSums = kTileRows * R;
  const std::uint32_t row =
      job.from +
      static_cast<std::uint32_t>(min(lane / 4, job.rows - 1) * job.stride + lane % 4 * 32);
  const int wave_tiles = kWaveChunks / chunks;
  int k = tid / 32;  // unit of the tile
  int tile = 0;
  while (k >= units) {
    k -= units;
    ++tile;
  }
  for (int tile0 = 0; tile0 < job.tiles; tile0 += wave_tiles) {
    const int count = min(wave_tiles, job.tiles - tile0);
    while (tile < tile0 + count) {
      float* to = partial + ((tile - tile0) * chunks + k % kWarps) * kTileSums;
      float sum[4] = {0.0F, 0.0F, 0.0F, 0.0F};
      k = add_tile(a, f, job.layer, ring, k, m, row, sum);
      store_chunk<R>(to, sum);
      while (k >= units) {
        k -= units;
        ++tile;
      }
    }
    sync_compute();
    for (int v = tid; v < count * kTileSums; v += kThreads) {
      const int s = v & (R - 1);
      if (s >= job.rows) continue;
      const int of = v / kTileSums;
      const float* from = partial + of * chunks * kTileSums + v % kTileSums;
      float sum = 0.0F;
#pragma unroll 8
      for (int c = 0; c < chunks; ++c) sum += from[c * kTileSums];
      if (job.scaled) sum *= f.row_up[s];
      f.out[s * kOutPitch + (tile0 + of) * kTileRows + v / R % kTileRows] = sum;
    }
    sync_compute();
  }
  finish_job(ring, job.tiles * units);
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
__device__ __noinline__ void produce_rows(std::uint8_t* fresh) {
  Fixed& f = fixed_part();
  const DecodeArguments& a = f.arguments;
  const DecodePlan& p = a.plan;
  const int index = static_cast<int>(threadIdx.x) / 32 - kWarps - 1;
  const std::uint32_t done = *static_cast<volatile std::uint32_t*>(a.counter);
  volatile int* wanted = &f.rows_wanted;
  volatile int* dead = &f.dead;
  for (int layer = 0; layer < a.layers; ++layer) {
    const std::uint32_t tag = (done + static_cast<std::uint32_t>(layer)) | 0x80000000U;
    while (*wanted <= layer && *dead == 0) __nanosleep(500);
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

// Until row warp s % 3 has this layer's new row s.
__device__ __forceinline__ void await_row(Fixed& f, int layer, int s) {
  volatile int* ready = &f.rows_ready[s % kRowWarps];
  std::uint32_t rounds = 0;
  std::uint64_t start = 0;
  while (*ready <= layer) {
    if ((++rounds & 127U) == 0) {
      start = give_up(start, layer, kStageKv, s, static_cast<std::uint32_t>(layer + 1),
                      static_cast<std::uint32_t>(*ready));
      if (start == kGiveUp) break;
    }
  }
  __threadfence_block();
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
    renew();
    act_address = shared_address(act);
    ring = {shared_address(ring_base),
            shared_address(&f.full[0]),
            shared_address(&f.consumed[warp]),
            p.ring_slots,
            0,
            0,
            0};
  }

  // Who this thread is, in a way that keeps the compiler from computing in front of the layer loop
  // what follows from it: that lies in local memory then.
  __device__ __forceinline__ void renew() {
    tid = static_cast<int>(threadIdx.x);
    cta = static_cast<int>(blockIdx.x);
    asm volatile("" : "+r"(tid), "+r"(cta));
    warp = tid / 32;
    lane = tid % 32;
    g = lane / 4;
    t = lane % 4;
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
  __device__ __forceinline__ void product(const MatrixPlan& m, int tiles, int rows, int stride,
                                          bool scaled) {
    ring = block_product<R>(partial, m, {tiles, rows, stride, layer, act_address, scaled}, ring);
  }
  // Rows of the residual stream from all CTAs' columns, normalised.
  __device__ __forceinline__ void gather_hidden(const uint4* from, std::uint32_t of_tag,
                                                std::int64_t gain, int stage) {
    gather_rows<R, true>(
        act, {from, of_tag, p.grid, p.grid, p.o.packets, p.o.block_tiles * kTileRows, p.hidden,
              2 * p.hidden + 16, stage, layer, parameters(gain), a.eps});
  }

  __device__ __forceinline__ void qkv_a() {
    const MatrixPlan& m = p.qkv_a;
    const int stride = 2 * p.hidden + 16;
    for (int block = cta; block < m.blocks; block += p.grid) {
      product(m, min(m.block_tiles, m.tiles - block * m.block_tiles), p.rows, stride, false);
      publish_block(box + p.box_qkv_a, tag, m.blocks, block, m.packets, m.block_tiles * kTileRows);
    }
    // The row warps may look for the new cache rows from here on: before, they would only poll.
    if (tid == 0 && f.picks_fresh != 0) {
      *const_cast<volatile int*>(&f.rows_wanted) = layer + 1;
    }
  }

  __device__ __forceinline__ void q_b() {
    const int stride = 2 * p.q_lora + 16;
    const int in_columns = p.qkv_a.block_tiles * kTileRows;
    gather_rows<R, true>(act,
                         {box + p.box_qkv_a, tag, p.qkv_a.blocks, ceil_div(p.q_lora, in_columns),
                          p.qkv_a.packets, in_columns, p.q_lora, stride, kStageQB, layer,
                          parameters(a.weights.norm_q), a.eps_latent});
    const MatrixPlan& m = p.q_b;
    for (int block = cta; block < m.blocks; block += p.grid) {
      product(m, min(m.block_tiles, m.tiles - block * m.block_tiles), p.rows, stride, false);
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
      publish_block(box + p.box_q_b, tag, m.blocks, block, m.packets, columns);
    }
  }

  __device__ __forceinline__ void uk() {
    const MatrixPlan& m = p.uk;
    constexpr int kStride = 2 * kNope + 16;
    const int head_blocks = kQueryHead / (p.q_b.block_tiles * kTileRows);
    const int nope_packets = kNope / (p.q_b.block_tiles * kTileRows) * p.q_b.packets;
    for (int block = cta; block < m.blocks; block += p.grid) {
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
      product(m, m.block_tiles, p.rows, kStride, true);
      publish_block(box + p.box_uk, tag, m.blocks, block, m.packets, m.block_tiles * kTileRows);
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

  // 0: no row, 1: from the cache, 2 + k: new row k of this step.
  __device__ __forceinline__ int key_state(std::int64_t slot) const {
    int state = slot >= 0 ? 1 : 0;
#pragma unroll
    for (int i = 0; i < R; ++i) state = slot >= 0 && f.slot[i] == slot ? 2 + i : state;
    return state;
  }
  // The keys of one attention task, at most 64, as bf16 rows; zero beyond the end. A thread has a
  // sixteenth of a row; of FP8 rows four are on their way at once.
  __device__ __forceinline__ void load_keys(int s, int first, int picks) {
    constexpr int kPassRows = kThreads / 16;
    constexpr int kPasses = kSplitPicks / kPassRows;
    const LayerArguments& l = a.layer[layer];
    const std::int32_t* list = l.picks + l.pick_offsets[a.row_begin + s] + first;
    const int part = tid % 16;
    std::uint8_t* keys = act + kKeysAt + tid / 16 * kKeyPitch;
    if (a.kv_format == KvFormat::kBf16) {
#pragma unroll 1
      for (int k = 0; k < kPasses; ++k, keys += kPassRows * kKeyPitch) {
        const int r = k * kPassRows + tid / 16;
        const std::int64_t slot = r < picks ? list[r] : -1;
        const int state = key_state(slot);
        if (state == 1) {
          copy_key(keys, cache_row(a, layer, slot), part);
        } else {
          other_key(keys, state, part);
        }
      }
      return;
    }
    const bool scaled = a.kv_format == KvFormat::kFp8Scaled;
    int state[kPasses];
    const std::uint8_t* row[kPasses];
#pragma unroll
    for (int k = 0; k < kPasses; ++k) {
      const int r = k * kPassRows + tid / 16;
      const std::int64_t slot = r < picks ? list[r] : -1;
      state[k] = key_state(slot);
      row[k] = state[k] == 1 ? cache_row(a, layer, slot) : nullptr;
    }
    uint4 x[kPasses][2];
    uint2 rope[kPasses];
    float unit[kPasses][2];
#pragma unroll
    for (int k = 0; k < kPasses; ++k) {
      x[k][0] = x[k][1] = make_uint4(0U, 0U, 0U, 0U);
      rope[k] = make_uint2(0U, 0U);
      unit[k][0] = unit[k][1] = 1.0F;
      if (row[k] == nullptr) continue;
      x[k][0] = __ldcg(reinterpret_cast<const uint4*>(row[k]) + part);
      x[k][1] = __ldcg(reinterpret_cast<const uint4*>(row[k]) + 16 + part);
      if (scaled) {
        unit[k][0] = __ldcg(reinterpret_cast<const float*>(row[k] + kLatent) + part / 8);
        unit[k][1] = __ldcg(reinterpret_cast<const float*>(row[k] + kLatent) + 2 + part / 8);
        rope[k] = __ldcg(reinterpret_cast<const uint2*>(row[k] + kLatent + 16) + part);
      } else {
        rope[k].x = __ldcg(reinterpret_cast<const std::uint32_t*>(row[k] + kLatent) + part);
      }
    }
#pragma unroll
    for (int k = 0; k < kPasses; ++k, keys += kPassRows * kKeyPitch) {
      if (state[k] != 1) {
        other_key(keys, state[k], part);
        continue;
      }
      *(reinterpret_cast<uint2*>(keys + 2 * kLatent) + part) =
          scaled ? rope[k]
                 : make_uint2(widen_to_bf16(rope[k].x, 1.0F), widen_to_bf16(rope[k].x >> 16, 1.0F));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 v = x[k][i];
        const float u = unit[k][i];
        auto* to = reinterpret_cast<uint4*>(keys) + (i * 16 + part) * 2;
        to[0] = make_uint4(widen_to_bf16(v.x, u), widen_to_bf16(v.x >> 16, u),
                           widen_to_bf16(v.y, u), widen_to_bf16(v.y >> 16, u));
        to[1] = make_uint4(widen_to_bf16(v.z, u), widen_to_bf16(v.z >> 16, u),
                           widen_to_bf16(v.w, u), widen_to_bf16(v.w >> 16, u));
      }
    }
  }
  // This thread's sixteenth of a bf16 row.
  static __device__ __forceinline__ void copy_key(std::uint8_t* to, const std::uint8_t* from,
                                                  int part) {
    uint4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = reinterpret_cast<const uint4*>(from)[i * 16 + part];
    const uint2 rope = reinterpret_cast<const uint2*>(from + 2 * kLatent)[part];
#pragma unroll
    for (int i = 0; i < 4; ++i) reinterpret_cast<uint4*>(to)[i * 16 + part] = x[i];
    reinterpret_cast<uint2*>(to + 2 * kLatent)[part] = rope;
  }
  // A key that is not in the cache: zeros, or a new row of this step.
  __device__ __forceinline__ void other_key(std::uint8_t* to, int state, int part) {
    if (state >= 2) {
      await_row(f, layer, state - 2);
      copy_key(to, fresh + (state - 2) * kKeyPitch, part);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      reinterpret_cast<uint4*>(to)[i * 16 + part] = make_uint4(0U, 0U, 0U, 0U);
    }
    reinterpret_cast<uint2*>(to + 2 * kLatent)[part] = make_uint2(0U, 0U);
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
    constexpr int kFlight = 4;
    for (int q0 = tid; q0 < total; q0 += kFlight * kThreads) {
      const uint4* from[kFlight];
      uint4 got[kFlight];
      int at[kFlight];
      int n[kFlight];
#pragma unroll
      for (int k = 0; k < kFlight; ++k) {
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
      for (int k = 0; k < kFlight; ++k) {
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
    {  // 4 tiles of 16 picks x 2 halves of the 576 columns, two sums each
      const int tile = warp & 3;
      const int half = warp >> 2;
      float d[2][4] = {{0.0F, 0.0F, 0.0F, 0.0F}, {0.0F, 0.0F, 0.0F, 0.0F}};
      const std::uint32_t keys =
          act_address + static_cast<std::uint32_t>(kKeysAt + (tile * 16 + lane % 16) * kKeyPitch +
                                                   (lane / 16) * 16 + half * 576);
      const std::uint8_t* query = act + kQueryAt + g * kKeyPitch + half * 576 + t * 4;
#pragma unroll
      for (int k = 0; k < 18; ++k) {
        std::uint32_t m[4];
        load_matrix(m, keys + static_cast<std::uint32_t>(k * 32));
        mma_bf16(d[k / 9], m, *reinterpret_cast<const std::uint32_t*>(query + k * 32),
                 *reinterpret_cast<const std::uint32_t*>(query + k * 32 + 16));
      }
      sync_compute();
      float* to = reinterpret_cast<float*>(act + kQueryAt) +
                  (half * kSplitPicks + tile * 16 + g) * kHeadGroup + 2 * t;
      *reinterpret_cast<float2*>(to) = make_float2(d[0][0] + d[1][0], d[0][1] + d[1][1]);
      *reinterpret_cast<float2*>(to + 8 * kHeadGroup) =
          make_float2(d[0][2] + d[1][2], d[0][3] + d[1][3]);
    }
    sync_compute();
    static_assert(kWarps == kHeadGroup);
    {  // a warp a head, two picks a lane
      float x[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float* l =
            reinterpret_cast<const float*>(act + kQueryAt) + (lane + 32 * k) * kHeadGroup + warp;
        x[k] = (l[0] + l[kSplitPicks * kHeadGroup]) * 0.0625F;
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
    constexpr int kLatentTiles = kLatent / 16 / kWarps;
    float o[kLatentTiles][4];
#pragma unroll
    for (int m = 0; m < kLatentTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[m][i] = 0.0F;
    }
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
      for (int m = 0; m < kLatentTiles; ++m) {  // 16 latents x 8 heads each
        std::uint32_t v[4];
        // Transposed 8x8 matrices: {latents 0-7, picks 0-7}, {8-15, 0-7}, {0-7, 8-15}, {8-15,
        // 8-15}.
        load_matrix_transposed(
            v, act_address + static_cast<std::uint32_t>(
                                 kKeysAt + (k * 16 + (lane / 16) * 8 + lane % 8) * kKeyPitch +
                                 ((warp * kLatentTiles + m) * 16 + (lane / 8 % 2) * 8) * 2));
        mma_bf16(o[m], v, high0, high1);
        mma_bf16(o[m], v, low0, low1);
      }
    }
    // f16 (three bits more than bf16) in place of the queries, then packets.
    auto* out = reinterpret_cast<__half*>(act + kQueryAt);
    const float n0 = 1.0F / f.split_sum[2 * t];
    const float n1 = 1.0F / f.split_sum[2 * t + 1];
#pragma unroll
    for (int m = 0; m < kLatentTiles; ++m) {
      const int latent = (warp * kLatentTiles + m) * 16 + g;
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
      load_keys(s, split * kSplitPicks, picks);
      attention_task(s, split, group, picks);
    }
    // The rows that this CTA stores must be on their way before the next request.
    if (tid == 0 && f.picks_fresh != 0) {
      for (int s = 0; s < min(p.rows, kRowWarps); ++s) await_row(f, layer, s);
    }
  }

  // Merges the splits of one head and row, then W_UV: o = W_UV o_lat.
  __device__ __forceinline__ void uv() {
    const int tiles = p.uv_part_tiles();
    for (int task = cta; task < p.uv_tasks(p.rows); task += p.grid) {
      const int s = task / (p.heads * p.uv_parts);
      const int head_part = task - s * p.heads * p.uv_parts;
      const int head = head_part / p.uv_parts;
      const int splits = ceil_div(pick_count(s), kSplitPicks);
      const uint4* base =
          box + p.box_partial +
          (static_cast<std::int64_t>(s) * p.heads + head) * kMaxSplits * kPartialPackets;
      constexpr int kGroups = 2;
      constexpr int kGroupThreads = kPartialPackets - 1;
      constexpr int kOfGroup = (kMaxSplits + kGroups - 1) / kGroups;
      static_assert(kGroups * kGroupThreads <= kThreads - 32);
      auto* sums = reinterpret_cast<float*>(act + 2 * kLatent + 16);
      const int group = tid / kGroupThreads;
      const int j = tid - group * kGroupThreads;
      static_assert(kOfGroup == 16);
      uint4 got[2][8];  // in two batches
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
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint4* from[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) {
              const int at = group + (half * 8 + k) * kGroups;
              from[k] = base + (at < splits ? at : group) * kPartialPackets + j;
            }
            poll(from, got[half], kStageUv);
          }
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
          const uint4 of = got[k / 8][k % 8];
          const std::uint32_t x[3] = {of.x, of.y, of.z};
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
        const float2 y0 = reinterpret_cast<const float2*>(sums)[tid];
        const float2 y1 = reinterpret_cast<const float2*>(sums + kLatent)[tid];
        static_assert(kGroups == 2 && kLatent == 2 * kThreads);
        reinterpret_cast<std::uint32_t*>(act)[tid] = pack_f16(y0.x + y1.x, y0.y + y1.y);
      }
      sync_compute();
      product(p.uv, tiles, 1, 0, false);
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
    gather_rows<R, false>(
        act, {box + p.box_o, tag, blocks, blocks, p.uv_part_packets(), kValue / p.uv_parts, columns,
              stride, kStageO, layer, nullptr, 0.0F});
    product(m, min(m.block_tiles, m.tiles - cta * m.block_tiles), p.rows, stride, true);
  }

  __device__ __forceinline__ void router() {
    const int stride = 2 * p.hidden + 16;
    const int experts = min(p.router_rows, p.experts - cta * p.router_rows);
    const int units = max(0, experts) * p.router_chunks;
    for (int u = warp; u < units; u += kWarps) {
      const int row = u / p.router_chunks;
      const int chunk = u - row * p.router_chunks;
      const std::uint32_t unit = pin(acquire(a, f, layer, ring, p.router_unit_k * 2));
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
    finish_job(ring, units);
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
          start = give_up(start, layer, kStageRouting, -1, 0, 0);
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
    const int units = m.units;
    const int chunks = m.chunks;
    constexpr int kTileSums = kTileRows * R;
    const int wave = min(kWaveChunks / chunks, kThreads / (8 * R));
    const std::uint32_t row =
        act_address + static_cast<std::uint32_t>(min(g, p.rows - 1) * stride + t * 32);
    int k = warp;  // unit of the tile
    int mine = begin;
    while (k >= units) {
      k -= units;
      ++mine;
    }
    for (int tile0 = begin; tile0 < end; tile0 += wave) {
      const int tiles = min(wave, end - tile0);
      while (mine < tile0 + tiles) {
        float* to = partial + ((mine - tile0) * chunks + k % kWarps) * kTileSums;
        float sum[4] = {0.0F, 0.0F, 0.0F, 0.0F};
        k = add_tile(a, f, layer, ring, k, m, row, sum);
        store_chunk<R>(to, sum);
        while (k >= units) {
          k -= units;
          ++mine;
        }
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
        for (int c = 0; c < chunks; ++c) {
          gate += from[c * kTileSums];
          up += from[c * kTileSums + 8 * R];
        }
        mid = gate / (1.0F + __expf(-gate)) * up;
      }
      const float m1 = __shfl_down_sync(kFullMask, mid, 1);
      const float m2 = __shfl_down_sync(kFullMask, mid, 2);
      const float m3 = __shfl_down_sync(kFullMask, mid, 3);
      if (tile < tiles && (tid & 3) == 0 && s < p.rows) {
        const int at = tile0 + tile;
        const int index = quotient(at, a.by_up_gate_tiles);
        const int of = f.position[(index0 + index) * 8 + s];
        if (of > 0 || (index0 == 0 && f.slot[s] >= 0)) {
          const int pair = s * (p.top_k + 1) + (index0 == 0 ? 0 : of - 1);
          store_local_packet(box + p.box_mid + static_cast<std::int64_t>(pair) * p.mid_packets() +
                                 (at - index * m.tiles) * 2 + value / 4,
                             pack_bf16(mid, m1), pack_bf16(m2, m3), 0U, tag);
        }
      }
      sync_compute();
    }
    finish_job(ring, (end - begin) * units);
  }

  __device__ __forceinline__ void down() {
    const int stride = 2 * p.inter + 16;
    const int per_row = p.top_k + 1;
    const int pairs = p.rows * per_row;
    const int packets = p.mid_packets();
    // A warp a (row, expert) pair, several pairs at a time: values, their maximum, f16 with a
    // power-of-two scale that the pair's weight undoes.
    constexpr int kPairs = R == 1 ? 2 : 4;
    for (int pair0 = warp; pair0 < pairs; pair0 += kPairs * kWarps) {
      float amax[kPairs];
#pragma unroll
      for (int k = 0; k < kPairs; ++k) amax[k] = 0.0F;
      // Pairs of padding rows never come: a live pair of the batch stands in for them.
      int live = -1;
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        const int pair = pair0 + k * kWarps;
        if (pair < pairs && f.slot[pair / per_row] >= 0) live = pair;
      }
      if (live < 0) continue;
      for (int q0 = lane; q0 < packets; q0 += 64) {
        const uint4* from[2 * kPairs];
        uint4 got[2 * kPairs];
#pragma unroll
        for (int i = 0; i < 2 * kPairs; ++i) {
          const int pair = pair0 + i / 2 * kWarps;
          const int of = pair < pairs && f.slot[pair / per_row] >= 0 ? pair : live;
          from[i] = box + p.box_mid + static_cast<std::int64_t>(of) * packets +
                    min(q0 + i % 2 * 32, packets - 1);
        }
        poll(from, got, kStageMid);
#pragma unroll
        for (int i = 0; i < 2 * kPairs; ++i) {
          const int pair = pair0 + i / 2 * kWarps;
          const int q = q0 + i % 2 * 32;
          if (pair >= pairs || q >= packets) continue;
          reinterpret_cast<uint2*>(act + pair * stride)[q] = make_uint2(got[i].x, got[i].y);
          amax[i / 2] = add_pair<false>(add_pair<false>(amax[i / 2], got[i].x), got[i].y);
        }
      }
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        const int pair = pair0 + k * kWarps;
        if (pair >= pairs || f.slot[pair / per_row] < 0) continue;
        float down_scale;
        float up_scale;
        row_scale(warp_max(amax[k]), down_scale, up_scale);
        if (lane == 0) f.pair_weight[pair] *= up_scale;
        auto* to = reinterpret_cast<uint2*>(act + pair * stride);
        for (int q = lane; q < packets; q += 32) {
          const uint2 x = to[q];
          to[q] = make_uint2(pack_f16(bf16_low(x.x) * down_scale, bf16_high(x.x) * down_scale),
                             pack_f16(bf16_low(x.y) * down_scale, bf16_high(x.y) * down_scale));
        }
      }
    }
    for (int i = tid; i < stride / 4; i += kThreads)
      reinterpret_cast<std::uint32_t*>(act + pairs * stride)[i] = 0U;
    sync_compute();
    mark(kStageMid);
    const MatrixPlan& m = p.down;
    const int tiles = min(m.block_tiles, m.tiles - cta * m.block_tiles);
    const int units = m.units;
    const int chunks = m.chunks;
    // Partial sums behind the activations, where there is more room than in their own region: 15
    // waves of 4 experts would cost 8 rows 20 us of barriers.
    float* sums = partial;
    int wave = kWaveChunks / (tiles * chunks);  // experts
    const int used = (pairs + 1) * stride;
    const int room = (p.act_bytes - used) / (kTileRows * R * 4) / (tiles * chunks);
    if (room > wave) {
      wave = room;
      sums = reinterpret_cast<float*>(act + used);
    }
    constexpr int kTileSums = kTileRows * R;
    constexpr int kTotals = (4 * kTileSums + kThreads - 1) / kThreads;
    float total[kTotals];
#pragma unroll
    for (int i = 0; i < kTotals; ++i) total[i] = 0.0F;
    int k = warp;  // unit of the tile, tile of the expert, expert
    int tile = 0;
    int index = 0;
    const auto step = [&] {
      while (k >= units) {
        k -= units;
        if (++tile == tiles) {
          tile = 0;
          ++index;
        }
      }
    };
    step();
    for (int index0 = 0; index0 < f.active_count; index0 += wave) {
      const int count = min(wave, f.active_count - index0);
      while (index < index0 + count) {
        float* to = sums + (((index - index0) * tiles + tile) * chunks + k % kWarps) * kTileSums;
        const std::uint8_t* position = &f.position[index * 8];
        const int of_row = g < p.rows ? position[g] : 0;
        const int pair = of_row > 0 ? g * per_row + of_row - 1 : pairs;  // the last one is zero
        const std::uint32_t row = act_address + static_cast<std::uint32_t>(pair * stride + t * 32);
        float sum[4] = {0.0F, 0.0F, 0.0F, 0.0F};
        k = add_tile(a, f, layer, ring, k, m, row, sum);
        // Routing weights of activation rows 2 t and 2 t + 1.
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int of = 2 * t + r < p.rows ? position[2 * t + r] : 0;
          const float w = of > 0 ? f.pair_weight[(2 * t + r) * per_row + of - 1] : 0.0F;
          sum[r] = of > 0 ? sum[r] * w : 0.0F;
          sum[r + 2] = of > 0 ? sum[r + 2] * w : 0.0F;
        }
        store_chunk<R>(to, sum);
        step();
      }
      sync_compute();
#pragma unroll
      for (int i = 0; i < kTotals; ++i) {
        const int v = tid + i * kThreads;
        if (v >= tiles * kTileSums) continue;
        const float* from = sums + v / kTileSums * chunks * kTileSums + v % kTileSums;
        for (int e = 0; e < count; ++e) {
          for (int c = 0; c < chunks; ++c) total[i] += from[c * kTileSums];
          from += tiles * chunks * kTileSums;
        }
      }
      sync_compute();
    }
    finish_job(ring, f.active_count * tiles * units);
#pragma unroll
    for (int i = 0; i < kTotals; ++i) {
      const int v = tid + i * kThreads;
      const int s = v & (R - 1);
      if (v < tiles * kTileSums && s < p.rows) {
        f.out[s * kOutPitch + v / kTileSums * kTileRows + v / R % kTileRows] = total[i];
      }
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
      renew();
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
        load_input<R>(act, stride);
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
      reduce_columns(layer, tag, window_at + p.win_attention, box + p.box_a, false,
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
      reduce_columns(layer, tag, window_at + p.win_experts, box + p.box_x, layer + 1 == a.layers,
                     kStageReduceExperts);
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
  const DecodePlan& p = arguments.plan;
  Fixed& fixed = fixed_part();
  auto* shared = reinterpret_cast<std::uint8_t*>(&fixed);
  // Fixed | activations | new cache rows | partial sums | ring
  std::uint8_t* act = shared + kFixedBytes;
  std::uint8_t* fresh = act + p.act_bytes;
  std::uint8_t* partial = fresh + R * kKeyPitch;
  std::uint8_t* ring = partial + kWaveChunks * kTileRows * R * 4;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (unsigned i = threadIdx.x; i < sizeof(DecodeArguments) / 8; i += kBlock) {
    reinterpret_cast<std::uint64_t*>(&fixed.arguments)[i] =
        reinterpret_cast<const std::uint64_t*>(&arguments)[i];
  }
  static_assert(sizeof(DecodeArguments) % 8 == 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.ring_slots; ++i) barrier_init(shared_address(&fixed.full[i]));
    for (int w = 0; w < kWarps; ++w) fixed.consumed[w] = 0;
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
    produce(shared_address(ring));
  } else if (warp > kWarps) {
    produce_rows(fresh);
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
