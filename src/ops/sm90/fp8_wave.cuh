// What the FP8 GEMMs with f32 promotion share: one warpgroup's wave of m64n128 over a 128 deep
// block of K, and the two consumer warpgroups' turns at the tensor cores. Left to themselves their
// instructions share the pipe, both waves end at the same time and the pipe idles while both
// promote: 63% busy instead of over 80% (docs/moe-stage2.md).
#pragma once

#include "ops/sm90/mma.cuh"
#include "ops/sm90/ptx.cuh"

namespace penstock::sm90 {

// Named barrier kTurnBarrier + g opens warpgroup g's turn. Warpgroup 1 arrives at kTurnBarrier
// before its first wave, warpgroup 0 syncs there after its last, so that no barrier is left half
// full.
inline constexpr std::uint32_t kTurnBarrier = 1;
inline constexpr std::uint32_t kTurnThreads = 256;
// Instructions of a wave after whose end the other warpgroup may start: 1, 2, 3 of 4 take 1,198,
// 1,211, 1,252 thousand cycles for the 33,132 x 6144 x 2048 problem.
inline constexpr int kTurnSplit = 1;

// a and b are descriptor low words of K-major tiles, see mma.cuh. Starts one wave: its first
// kTurnSplit instructions are a group of their own, which can be waited for.
__device__ __forceinline__ void start_wave(float (&d)[64], std::uint32_t a, std::uint32_t b) {
#pragma unroll
  for (int i = 0; i < 64; ++i) mma_pin(d[i]);
  mma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    mma_m64n128k32_e4m3(d, a + 2 * k, b + 2 * k, k != 0);
    if (k + 1 == kTurnSplit) mma_commit();
  }
  mma_commit();
}

// Opens the other warpgroup's turn when the first group is done: its first instruction is then on
// its way when this wave's last ends.
template <int kGroup>
__device__ __forceinline__ void pass_turn(float (&d)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) mma_pin(d[i]);
  mma_wait<1>();
  named_barrier_arrive(kTurnBarrier + (kGroup ^ 1), kTurnThreads);
}
__device__ __forceinline__ void end_wave(float (&d)[64]) {
  mma_wait<0>();
#pragma unroll
  for (int i = 0; i < 64; ++i) mma_pin(d[i]);
}

// sum += scale * d; rows lane / 4 and lane / 4 + 8 of the warp's sixteen have a scale each.
__device__ __forceinline__ void promote(float (&sum)[64], const float (&d)[64], float low,
                                        float high) {
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] = fmaf((i & 2) != 0 ? high : low, d[i], sum[i]);
}

}  // namespace penstock::sm90
