// A decoder layer as fourteen kernels, one a stage: norms fused with the all-reduce before them,
// RoPE with q_b, the cache write with the latent norms, silu with up and gate, the experts' sum
// with down. Weights are read from decode_layer's units by the same tensor-core fragments.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "ops/decode_layer/cuda/chain_sm90.h"
#include "ops/decode_layer/cuda/decode_device.cuh"

namespace penstock::decode {
namespace {

using namespace device;

constexpr int kBlock = 256;
constexpr int kBlockWarps = kBlock / 32;
constexpr int kNormBlock = 1024;
constexpr int kMaxSteps = kUnitColumns / 64;
// Words of a cache row in shared memory: 288 of data, and 4 so that 8 rows fall on different banks.
constexpr int kKeyWords = kKvRow / 2 + 4;
constexpr int kAttentionShared =
    kSplitPicks * kKeyWords * 4 + kHeadGroup * kKvRow * 4 + kSplitPicks * kHeadGroup * 4;

__device__ __forceinline__ float half_value(const std::uint16_t* p) {
  return __half2float(*reinterpret_cast<const __half*>(p));
}
__device__ __forceinline__ std::uint16_t half_of_bf16(float x) {
  return __half_as_ushort(__float2half_rn(round_bf16(x)));
}
__device__ __forceinline__ float bf16_value(std::uint16_t bits) {
  return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
}

template <int kThreadsOfBlock>
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float sums[kThreadsOfBlock / 32];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0.0F;
  for (int i = 0; i < kThreadsOfBlock / 32; ++i) total += sums[i];
  __syncthreads();
  return total;
}

// One unit times up to 8 rows. `row`: this lane's row (lane / 4) of activations from the unit's
// first column on, null for zeros. Adds outputs lane / 4 (sum[0], sum[1]) and lane / 4 + 8 (sum[2],
// sum[3]) of rows 2 (lane % 4) and the next.
struct UnitWeights {
  uint4 codes[kMaxSteps][2];
  float4 scales;
};
__device__ __forceinline__ UnitWeights load_unit(const std::uint8_t* matrix, const MatrixPlan& m,
                                                 int tile, int unit) {
  const std::uint8_t* from =
      matrix + (static_cast<std::int64_t>(tile) * m.units + unit) * m.unit_bytes();
  UnitWeights w;
#pragma unroll
  for (int j = 0; j < kMaxSteps; ++j) {
    if (j * 64 < m.unit_k) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        w.codes[j][h] = __ldcs(
            reinterpret_cast<const uint4*>(from + (2 * j + h) * 512 + threadIdx.x % 32 * 16));
      }
    }
  }
  w.scales = __ldcs(reinterpret_cast<const float4*>(from + kTileRows * m.unit_k));
  return w;
}
__device__ __forceinline__ void unit_product(float (&sum)[4], const UnitWeights& w, int unit_k,
                                             const std::uint16_t* row) {
#pragma unroll
  for (int j = 0; j < kMaxSteps; ++j) {
    if (j * 64 >= unit_k) continue;
    uint4 x0 = {0U, 0U, 0U, 0U};
    uint4 x1 = {0U, 0U, 0U, 0U};
    if (row != nullptr) {
      const auto* x = reinterpret_cast<const uint4*>(row + j * 64 + threadIdx.x % 4 * 16);
      x0 = x[0];
      x1 = x[1];
    }
    float d[4] = {0.0F, 0.0F, 0.0F, 0.0F};
    const uint4 a = w.codes[j][0];
    const uint4 b = w.codes[j][1];
    mma_f16(d, widen_e4m3(a.x), widen_e4m3(b.x), widen_e4m3(a.x >> 16), widen_e4m3(b.x >> 16), x0.x,
            x0.y);
    mma_f16(d, widen_e4m3(a.y), widen_e4m3(b.y), widen_e4m3(a.y >> 16), widen_e4m3(b.y >> 16), x0.z,
            x0.w);
    mma_f16(d, widen_e4m3(a.z), widen_e4m3(b.z), widen_e4m3(a.z >> 16), widen_e4m3(b.z >> 16), x1.x,
            x1.y);
    mma_f16(d, widen_e4m3(a.w), widen_e4m3(b.w), widen_e4m3(a.w >> 16), widen_e4m3(b.w >> 16), x1.z,
            x1.w);
    const float low = j == 0 ? w.scales.x : w.scales.z;
    const float high = j == 0 ? w.scales.y : w.scales.w;
    sum[0] += d[0] * low;
    sum[1] += d[1] * low;
    sum[2] += d[2] * high;
    sum[3] += d[3] * high;
  }
}

// Sums of the warps of each tile; thread 128 t + 16 s + n gets output n of row s of the CTA's tile
// t.
__device__ __forceinline__ float tile_sum(const float (&mine)[4], int warps_a_tile) {
  __shared__ float sums[kBlockWarps][kTileRows * 8];
  const int lane = static_cast<int>(threadIdx.x % 32);
  float* to = sums[threadIdx.x / 32] + lane / 4 * 8 + lane % 4 * 2;
  *reinterpret_cast<float2*>(to) = make_float2(mine[0], mine[1]);
  *reinterpret_cast<float2*>(to + 64) = make_float2(mine[2], mine[3]);
  __syncthreads();
  const int tile = static_cast<int>(threadIdx.x) / 128;
  const int at = static_cast<int>(threadIdx.x % 16 * 8 + threadIdx.x / 16 % 8);
  float total = 0.0F;
  if (tile * warps_a_tile < kBlockWarps) {
    for (int i = 0; i < warps_a_tile; ++i) total += sums[tile * warps_a_tile + i][at];
  }
  return total;
}
__host__ __device__ constexpr int warps_a_tile(const MatrixPlan& m) { return m.units >= 8 ? 8 : 4; }

enum class Product { kQkvA, kQB, kUk, kUv, kO };

template <Product kind>
__global__ void __launch_bounds__(kBlock) chain_product(const __grid_constant__ ChainArguments a) {
  const DecodePlan& p = a.plan;
  const MatrixPlan& m = kind == Product::kQkvA ? p.qkv_a
                        : kind == Product::kQB ? p.q_b
                        : kind == Product::kUk ? p.uk
                        : kind == Product::kUv ? p.uv
                                               : p.o;
  const std::int64_t at = kind == Product::kQkvA ? a.weights.qkv_a
                          : kind == Product::kQB ? a.weights.q_b
                          : kind == Product::kUk ? a.weights.uk
                          : kind == Product::kUv ? a.weights.uv
                                                 : a.weights.o;
  const std::uint8_t* matrix = a.layer.weights + at;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int warps = warps_a_tile(m);
  const int tiles = kBlockWarps / warps;
  const int tile = static_cast<int>(blockIdx.x) * tiles + warp / warps;
  const int lane_row = static_cast<int>(threadIdx.x % 32 / 4);
  const std::uint16_t* row = nullptr;
  if (lane_row < a.rows) {
    if (kind == Product::kQkvA) row = a.n + lane_row * p.hidden;
    if (kind == Product::kQB) row = a.c_q + lane_row * p.q_lora;
    if (kind == Product::kUk) {
      row = a.q + (lane_row * p.heads + tile * kTileRows / kLatent) * kQueryHead;
    }
    if (kind == Product::kUv) {
      row = a.o_lat + (lane_row * p.heads + tile * kTileRows / kValue) * kLatent;
    }
    if (kind == Product::kO) row = a.o + lane_row * p.heads * kValue;
  }
  float sum[4] = {0.0F, 0.0F, 0.0F, 0.0F};
  if (tile < m.tiles) {
    UnitWeights next = load_unit(matrix, m, tile, min(warp % warps, m.units - 1));
    for (int unit = warp % warps; unit < m.units; unit += warps) {
      const UnitWeights w = next;
      if (unit + warps < m.units) next = load_unit(matrix, m, tile, unit + warps);
      unit_product(sum, w, m.unit_k, row == nullptr ? nullptr : row + unit * m.unit_k);
    }
  }
  float v = tile_sum(sum, warps);
  const int s = static_cast<int>(threadIdx.x) / 16 % 8;
  const int out =
      (static_cast<int>(blockIdx.x) * tiles + static_cast<int>(threadIdx.x) / 128) * kTileRows +
      static_cast<int>(threadIdx.x % kTileRows);
  if (kind == Product::kQB) {
    const float other = __shfl_xor_sync(0xffffffffU, v, 1);
    const int in_head = out % kQueryHead;
    if (in_head >= kNope && s < a.rows) {
      float sine;
      float cosine;
      sincosf(static_cast<float>(a.positions[s]) * a.frequency[(in_head - kNope) / 2], &sine,
              &cosine);
      v = out % 2 == 0 ? v * cosine - other * sine : other * sine + v * cosine;
    }
  }
  if (threadIdx.x >= 128 * tiles || s >= a.rows || out >= m.tiles * kTileRows) return;
  const int columns = m.tiles * kTileRows;
  if (kind == Product::kQkvA) a.c[s * columns + out] = half_of_bf16(v);
  if (kind == Product::kQB) a.q[s * columns + out] = half_of_bf16(v);
  if (kind == Product::kUk) a.q_lat[s * columns + out] = half_of_bf16(v);
  if (kind == Product::kUv) a.o[s * columns + out] = half_of_bf16(v);
  if (kind == Product::kO) {
    a.y[s * columns + out] = __bfloat16_as_ushort(__float2bfloat16_rn(v));
  }
}

// x += ranks times y (if there is a y), then n = norm(x).
__global__ void __launch_bounds__(kNormBlock)
    chain_reduce_norm(const __grid_constant__ ChainArguments a, const float* gain, bool reduce) {
  const int hidden = a.plan.hidden;
  std::uint16_t* x = a.x + blockIdx.x * hidden;
  float squares = 0.0F;
  for (int i = static_cast<int>(threadIdx.x); i < hidden; i += kNormBlock) {
    float v = bf16_value(x[i]);
    if (reduce) {
      const float part = bf16_value(a.y[blockIdx.x * hidden + i]);
      float sum = 0.0F;
      for (int r = 0; r < a.plan.ranks; ++r) sum += part;
      v = round_bf16(v + sum);
      x[i] = static_cast<std::uint16_t>(__float_as_uint(v) >> 16);
    }
    squares += v * v;
  }
  squares = block_sum<kNormBlock>(squares);
  const float scale = rsqrtf(squares / static_cast<float>(hidden) + a.eps);
  for (int i = static_cast<int>(threadIdx.x); i < hidden; i += kNormBlock) {
    a.n[blockIdx.x * hidden + i] = half_of_bf16(bf16_value(x[i]) * scale * gain[i]);
  }
}

// Norms of c_q and c_kv, RoPE of k_pe, the cache row.
__global__ void __launch_bounds__(kBlock) chain_latents(const __grid_constant__ ChainArguments a) {
  const DecodePlan& p = a.plan;
  const int s = static_cast<int>(blockIdx.x);
  const int tid = static_cast<int>(threadIdx.x);
  const std::uint16_t* c = a.c + s * (p.q_lora + kKvRow);
  const auto* norm_q = reinterpret_cast<const float*>(a.layer.weights + a.weights.norm_q);
  const auto* norm_kv = reinterpret_cast<const float*>(a.layer.weights + a.weights.norm_kv);
  float squares = 0.0F;
  for (int i = tid; i < p.q_lora; i += kBlock) squares += half_value(c + i) * half_value(c + i);
  squares = block_sum<kBlock>(squares);
  const float scale_q = rsqrtf(squares / static_cast<float>(p.q_lora) + a.eps_latent);
  for (int i = tid; i < p.q_lora; i += kBlock) {
    a.c_q[s * p.q_lora + i] = half_of_bf16(half_value(c + i) * scale_q * norm_q[i]);
  }
  const std::uint16_t* kv = c + p.q_lora;
  squares = 0.0F;
  for (int i = tid; i < kLatent; i += kBlock) squares += half_value(kv + i) * half_value(kv + i);
  squares = block_sum<kBlock>(squares);
  const float scale_kv = rsqrtf(squares / static_cast<float>(kLatent) + a.eps_latent);
  const std::int64_t slot = a.slots[s];
  if (slot < 0) return;
  std::uint8_t* row = a.layer.kv + slot / kPageTokens * a.layer.page_stride +
                      slot % kPageTokens * kv_row_bytes(KvFormat::kFp8Scaled);
  // Warps 0 to 3: 128 latents each, 4 a lane.
  const int warp = tid / 32;
  const int lane = tid % 32;
  if (warp < 4) {
    float v[4];
    float amax = 1e-4F;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = warp * 128 + lane * 4 + i;
      v[i] = round_bf16(half_value(kv + k) * scale_kv * norm_kv[k]);
      amax = fmaxf(amax, fabsf(v[i]));
    }
    amax = warp_max(amax);
    const std::uint32_t bits = __float_as_uint(amax / 448.0F);
    const float scale = __uint_as_float(((bits >> 23) + ((bits & 0x7FFFFFU) != 0 ? 1U : 0U)) << 23);
    std::uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      word |=
          static_cast<std::uint32_t>(__nv_cvt_float_to_fp8(v[i] / scale, __NV_SATFINITE, __NV_E4M3))
          << (8 * i);
    }
    reinterpret_cast<std::uint32_t*>(row)[warp * 32 + lane] = word;
    if (lane == 0) reinterpret_cast<float*>(row + kLatent)[warp] = scale;
  } else if (warp == 4) {
    float sine;
    float cosine;
    sincosf(static_cast<float>(a.positions[s]) * a.frequency[lane], &sine, &cosine);
    const float u = half_value(kv + kLatent + 2 * lane);
    const float v = half_value(kv + kLatent + 2 * lane + 1);
    reinterpret_cast<std::uint32_t*>(row + kLatent + 16)[lane] =
        pack_bf16(u * cosine - v * sine, u * sine + v * cosine);
  }
}

// One split of 64 picks, 8 heads, one row.
__global__ void __launch_bounds__(kBlock)
    chain_attention(const __grid_constant__ ChainArguments a) {
  extern __shared__ std::uint32_t shared[];
  std::uint32_t* keys = shared;                                          // [64][kKeyWords]
  auto* q = reinterpret_cast<float*>(shared + kSplitPicks * kKeyWords);  // [8][576]
  float* weights = q + kHeadGroup * kKvRow;                              // [64][8]
  const DecodePlan& p = a.plan;
  const int split = static_cast<int>(blockIdx.x);
  const int head0 = static_cast<int>(blockIdx.y) * kHeadGroup;
  const int s = static_cast<int>(blockIdx.z);
  const int tid = static_cast<int>(threadIdx.x);
  const int begin = a.layer.pick_offsets[s] + split * kSplitPicks;
  const int count = min(kSplitPicks, a.layer.pick_offsets[s + 1] - begin);
  if (count <= 0) return;
  for (int i = tid; i < kHeadGroup * kKvRow; i += kBlock) {
    const int head = min(head0 + i / kKvRow, p.heads - 1);
    const int k = i % kKvRow;
    q[i] = k < kLatent ? half_value(a.q_lat + (s * p.heads + head) * kLatent + k)
                       : half_value(a.q + (s * p.heads + head) * kQueryHead + kNope + k - kLatent);
  }
  for (int i = tid; i < kSplitPicks * 41; i += kBlock) {  // 41 x 16 bytes a row
    const int pick = i / 41;
    const int part = i % 41;
    const std::int64_t slot = a.layer.picks[begin + min(pick, count - 1)];
    const std::uint8_t* row = a.layer.kv + slot / kPageTokens * a.layer.page_stride +
                              slot % kPageTokens * kv_row_bytes(KvFormat::kFp8Scaled);
    if (part == 32) continue;  // the scales
    const uint4 v = *reinterpret_cast<const uint4*>(row + part * 16);
    std::uint32_t* to = keys + pick * kKeyWords;
    if (part < 32) {
      const float scale = reinterpret_cast<const float*>(row + kLatent)[part / 8];
      const std::uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const std::uint32_t pair = widen_e4m3(w[k / 2] >> (16 * (k % 2)));
        const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&pair));
        to[part * 8 + k] = pack_bf16(f.x * scale, f.y * scale);
      }
    } else {
      *reinterpret_cast<uint4*>(to + kLatent / 2 + (part - 33) * 4) = v;
    }
  }
  __syncthreads();
  {
    const int pick = tid / 4;
    const int quarter = tid % 4;
    float dot[kHeadGroup] = {};
    for (int i = quarter; i < kKvRow / 2; i += 4) {
      const std::uint32_t key = keys[pick * kKeyWords + i];
#pragma unroll
      for (int h = 0; h < kHeadGroup; ++h) {
        const float2 x = *reinterpret_cast<const float2*>(q + h * kKvRow + 2 * i);
        dot[h] += x.x * bf16_low(key) + x.y * bf16_high(key);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeadGroup; ++h) {
      dot[h] += __shfl_xor_sync(0xffffffffU, dot[h], 1);
      dot[h] += __shfl_xor_sync(0xffffffffU, dot[h], 2);
      if (quarter == h % 4) weights[pick * kHeadGroup + h] = dot[h] / 16.0F;
    }
  }
  __syncthreads();
  {
    const int h = tid / 32;
    const int lane = tid % 32;
    const bool second = lane + 32 < count;
    const float x0 = lane < count ? weights[lane * kHeadGroup + h] : -INFINITY;
    const float x1 = second ? weights[(lane + 32) * kHeadGroup + h] : -INFINITY;
    const float top = warp_max(fmaxf(x0, x1));
    const float e0 = expf(x0 - top);
    const float e1 = expf(x1 - top);
    const float sum = warp_sum(e0 + e1);
    weights[lane * kHeadGroup + h] = e0;
    weights[(lane + 32) * kHeadGroup + h] = e1;
    if (lane == 0 && head0 + h < p.heads) {
      float* to = a.softmax + ((s * kMaxSplits + split) * p.heads + head0 + h) * 2;
      to[0] = top;
      to[1] = sum;
    }
  }
  __syncthreads();
  float sum[kHeadGroup][2] = {};
  for (int pick = 0; pick < count; ++pick) {
    const std::uint32_t key = keys[pick * kKeyWords + tid];
#pragma unroll
    for (int h = 0; h < kHeadGroup; ++h) {
      const float w = weights[pick * kHeadGroup + h];
      sum[h][0] += w * bf16_low(key);
      sum[h][1] += w * bf16_high(key);
    }
  }
#pragma unroll
  for (int h = 0; h < kHeadGroup; ++h) {
    if (head0 + h >= p.heads) continue;
    float* to = a.partial +
                (static_cast<std::int64_t>(s * kMaxSplits + split) * p.heads + head0 + h) * kLatent;
    *reinterpret_cast<float2*>(to + 2 * tid) = make_float2(sum[h][0], sum[h][1]);
  }
}

__global__ void __launch_bounds__(kBlock) chain_merge(const __grid_constant__ ChainArguments a) {
  const DecodePlan& p = a.plan;
  const int head = static_cast<int>(blockIdx.x);
  const int s = static_cast<int>(blockIdx.y);
  const int splits = ceil_div(a.layer.pick_offsets[s + 1] - a.layer.pick_offsets[s], kSplitPicks);
  float top = -INFINITY;
  for (int i = 0; i < splits; ++i) {
    top = fmaxf(top, a.softmax[((s * kMaxSplits + i) * p.heads + head) * 2]);
  }
  float total = 0.0F;
  float2 sum = {0.0F, 0.0F};
  for (int i = 0; i < splits; ++i) {
    const int at = (s * kMaxSplits + i) * p.heads + head;
    const float w = expf(a.softmax[at * 2] - top);
    total += w * a.softmax[at * 2 + 1];
    const float2 v = reinterpret_cast<const float2*>(a.partial + static_cast<std::int64_t>(at) *
                                                                     kLatent)[threadIdx.x];
    sum.x += w * v.x;
    sum.y += w * v.y;
  }
  std::uint16_t* to = a.o_lat + (s * p.heads + head) * kLatent + 2 * threadIdx.x;
  to[0] = half_of_bf16(splits == 0 ? 0.0F : sum.x / total);
  to[1] = half_of_bf16(splits == 0 ? 0.0F : sum.y / total);
}

// One expert's score for all rows.
__global__ void __launch_bounds__(kBlock) chain_router(const __grid_constant__ ChainArguments a) {
  const int hidden = a.plan.hidden;
  const auto* w = reinterpret_cast<const __nv_bfloat16*>(a.layer.weights + a.weights.router) +
                  static_cast<std::int64_t>(blockIdx.x) * hidden;
  float sum[kChainRows] = {};
  for (int i = static_cast<int>(threadIdx.x) * 8; i < hidden; i += kBlock * 8) {
    const uint4 packed = __ldcs(reinterpret_cast<const uint4*>(w + i));
    const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int s = 0; s < kChainRows; ++s) {
      if (s >= a.rows) break;
      const uint4 x = *reinterpret_cast<const uint4*>(a.n + s * hidden + i);
      const std::uint32_t halves[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&halves[k]));
        sum[s] += bf16_low(words[k]) * f.x + bf16_high(words[k]) * f.y;
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kChainRows; ++s) {
    if (s >= a.rows) break;
    const float total = block_sum<kBlock>(sum[s]);
    if (threadIdx.x == 0) {
      a.scores[s * a.plan.experts + blockIdx.x] = 1.0F / (1.0F + expf(-total));
    }
  }
}

// Each row's top-k (one warp a row), then the list of active experts.
__global__ void __launch_bounds__(kBlock) chain_routing(const __grid_constant__ ChainArguments a) {
  const DecodePlan& p = a.plan;
  ChainRouting& r = *a.routing;
  __shared__ std::int32_t index_of[kMaxExperts];
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int s = tid / 32;
  const auto* bias = reinterpret_cast<const float*>(a.layer.weights + a.weights.bias);
  if (s < a.rows) {
    float choice[kMaxExperts / 32];
#pragma unroll
    for (int i = 0; i < kMaxExperts / 32; ++i) {
      const int e = lane + 32 * i;
      choice[i] = e < p.experts ? a.scores[s * p.experts + e] + bias[e] : -INFINITY;
    }
    float sum = 0.0F;
    float last = 0.0F;
    for (int k = 0; k <= p.top_k; ++k) {  // one more, for the gap
      float best = -INFINITY;
      int id = kMaxExperts;
#pragma unroll
      for (int i = 0; i < kMaxExperts / 32; ++i) {
        if (choice[i] > best) {
          best = choice[i];
          id = lane + 32 * i;
        }
      }
      for (int d = 16; d > 0; d /= 2) {
        const float other = __shfl_xor_sync(0xffffffffU, best, d);
        const int other_id = __shfl_xor_sync(0xffffffffU, id, d);
        if (other > best || (other == best && other_id < id)) {
          best = other;
          id = other_id;
        }
      }
#pragma unroll
      for (int i = 0; i < kMaxExperts / 32; ++i) {
        if (id == lane + 32 * i) choice[i] = -INFINITY;
      }
      if (k == p.top_k) {
        if (lane == 0) r.gap[s] = last - best;
        break;
      }
      last = best;
      id = min(id, p.experts - 1);  // NaN scores are never greater
      const float score = a.scores[s * p.experts + id];
      sum += score;
      if (lane == 0) {
        r.chosen[s][k] = id;
        r.weight[s][k + 1] = score;
      }
    }
    __syncwarp();
    if (lane < p.top_k) {
      const float score = a.routed_scale * r.weight[s][lane + 1];
      r.weight[s][lane + 1] = a.norm_topk ? score / (sum + 1e-20F) : score;
    }
    if (lane == 0) r.weight[s][0] = 1.0F;
  }
  for (int i = tid; i < kMaxExperts; i += kBlock) index_of[i] = 0;
  for (int i = tid; i < kChainActive * kChainRows; i += kBlock) {
    r.place[i / kChainRows][i % kChainRows] = i < a.rows ? 1 : 0;  // of expert 0: the shared one
  }
  __syncthreads();
  for (int i = tid; i < a.rows * p.top_k; i += kBlock) {
    index_of[r.chosen[i / p.top_k][i % p.top_k]] = 1;
  }
  __syncthreads();
  if (tid == 0) {
    int count = 1;
    r.expert[0] = p.experts;
    for (int e = 0; e < p.experts; ++e) {
      if (index_of[e] == 0) continue;
      r.expert[count] = e;
      index_of[e] = count++;
    }
    r.count = count;
  }
  __syncthreads();
  for (int i = tid; i < a.rows * p.top_k; i += kBlock) {
    const int row = i / p.top_k;
    r.place[index_of[r.chosen[row][i % p.top_k]]][row] = static_cast<std::uint8_t>(i % p.top_k + 2);
  }
}

// A tile of 8 gate and 8 up rows of one active expert.
__global__ void __launch_bounds__(kBlock) chain_up_gate(const __grid_constant__ ChainArguments a) {
  const DecodePlan& p = a.plan;
  const ChainRouting& r = *a.routing;
  const int index = static_cast<int>(blockIdx.y);
  if (index >= r.count) return;
  const std::uint8_t* matrix =
      a.layer.weights + a.weights.up_gate + r.expert[index] * p.up_gate.bytes();
  const int tile = static_cast<int>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane_row = static_cast<int>(threadIdx.x % 32 / 4);
  const std::uint16_t* row = lane_row < a.rows ? a.n + lane_row * p.hidden : nullptr;
  float sum[4] = {0.0F, 0.0F, 0.0F, 0.0F};
  if (warp < p.up_gate.units) {
    UnitWeights next = load_unit(matrix, p.up_gate, tile, warp);
    for (int unit = warp; unit < p.up_gate.units; unit += kBlockWarps) {
      const UnitWeights w = next;
      if (unit + kBlockWarps < p.up_gate.units) {
        next = load_unit(matrix, p.up_gate, tile, unit + kBlockWarps);
      }
      unit_product(sum, w, p.up_gate.unit_k,
                   row == nullptr ? nullptr : row + unit * p.up_gate.unit_k);
    }
  }
  const float v = tile_sum(sum, kBlockWarps);
  const float up = __shfl_down_sync(0xffffffffU, v, 8);
  const int s = static_cast<int>(threadIdx.x) / 16 % 8;
  const int i = static_cast<int>(threadIdx.x % 16);
  if (threadIdx.x >= 128 || i >= 8 || s >= a.rows) return;
  const int place = r.place[index][s];
  if (place == 0) return;
  a.mid[(s * (p.top_k + 1) + place - 1) * p.inter + tile * 8 + i] =
      half_of_bf16(v / (1.0F + expf(-v)) * up);
}

// A tile of 16 hidden columns over all active experts.
__global__ void __launch_bounds__(kBlock) chain_down(const __grid_constant__ ChainArguments a) {
  const DecodePlan& p = a.plan;
  const ChainRouting& r = *a.routing;
  const int tile = static_cast<int>(blockIdx.x);
  const int lane_row = static_cast<int>(threadIdx.x % 32 / 4);
  const int units = p.down.units;
  const int items = r.count * units;
  const std::uint8_t* base = a.layer.weights + a.weights.down;
  const std::int64_t expert_bytes = p.down.bytes();
  const int pair = static_cast<int>(threadIdx.x % 4 * 2);
  float sum[4] = {0.0F, 0.0F, 0.0F, 0.0F};
  int item = static_cast<int>(threadIdx.x / 32);
  if (item < items) {
    UnitWeights next =
        load_unit(base + r.expert[item / units] * expert_bytes, p.down, tile, item % units);
    for (; item < items; item += kBlockWarps) {
      const UnitWeights w = next;
      const int then = item + kBlockWarps;
      if (then < items) {
        next = load_unit(base + r.expert[then / units] * expert_bytes, p.down, tile, then % units);
      }
      const std::uint8_t* places = r.place[item / units];
      const int place = lane_row < a.rows ? places[lane_row] : 0;
      const std::uint16_t* row = place == 0
                                     ? nullptr
                                     : a.mid + (lane_row * (p.top_k + 1) + place - 1) * p.inter +
                                           item % units * p.down.unit_k;
      float d[4] = {0.0F, 0.0F, 0.0F, 0.0F};
      unit_product(d, w, p.down.unit_k, row);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int of = pair + k < a.rows ? places[pair + k] : 0;
        const float weight = of == 0 ? 0.0F : r.weight[pair + k][of - 1];
        sum[k] += weight * d[k];
        sum[k + 2] += weight * d[k + 2];
      }
    }
  }
  const float v = tile_sum(sum, kBlockWarps);
  const int s = static_cast<int>(threadIdx.x) / 16;
  if (s >= a.rows || threadIdx.x >= 128) return;
  a.y[s * p.hidden + tile * kTileRows + static_cast<int>(threadIdx.x % 16)] =
      __bfloat16_as_ushort(__float2bfloat16_rn(v));
}

int blocks_of(const MatrixPlan& m) {
  const int warps = warps_a_tile(m);
  return ceil_div(m.tiles, kBlockWarps / warps);
}

}  // namespace

int launch_chain_norm(const ChainArguments& a, void* stream) {
  const auto* gain = reinterpret_cast<const float*>(a.layer.weights + a.weights.norm_input);
  chain_reduce_norm<<<static_cast<unsigned>(a.rows), kNormBlock, 0,
                      static_cast<cudaStream_t>(stream)>>>(a, gain, false);
  return static_cast<int>(cudaGetLastError());
}

int launch_chain_layer(const ChainArguments& a, void* handle) {
  auto* stream = static_cast<cudaStream_t>(handle);
  const DecodePlan& p = a.plan;
  const auto rows = static_cast<unsigned>(a.rows);
  const auto blocks = [](int n) { return static_cast<unsigned>(n); };
  const cudaError_t status = cudaFuncSetAttribute(
      chain_attention, cudaFuncAttributeMaxDynamicSharedMemorySize, kAttentionShared);
  if (status != cudaSuccess) return static_cast<int>(status);
  chain_product<Product::kQkvA><<<blocks(blocks_of(p.qkv_a)), kBlock, 0, stream>>>(a);
  chain_latents<<<rows, kBlock, 0, stream>>>(a);
  chain_product<Product::kQB><<<blocks(blocks_of(p.q_b)), kBlock, 0, stream>>>(a);
  chain_product<Product::kUk><<<blocks(blocks_of(p.uk)), kBlock, 0, stream>>>(a);
  chain_attention<<<dim3(kMaxSplits, blocks(p.head_groups), rows), kBlock, kAttentionShared,
                    stream>>>(a);
  chain_merge<<<dim3(blocks(p.heads), rows), kBlock, 0, stream>>>(a);
  chain_product<Product::kUv><<<blocks(blocks_of(p.uv)), kBlock, 0, stream>>>(a);
  chain_product<Product::kO><<<blocks(blocks_of(p.o)), kBlock, 0, stream>>>(a);
  const auto* gain = reinterpret_cast<const float*>(a.layer.weights + a.weights.norm_post);
  chain_reduce_norm<<<rows, kNormBlock, 0, stream>>>(a, gain, true);
  chain_router<<<blocks(p.experts), kBlock, 0, stream>>>(a);
  chain_routing<<<1, kBlock, 0, stream>>>(a);
  const int active = 1 + min(p.experts, a.rows * p.top_k);
  chain_up_gate<<<dim3(blocks(p.up_gate.tiles), blocks(active)), kBlock, 0, stream>>>(a);
  chain_down<<<blocks(p.down.tiles), kBlock, 0, stream>>>(a);
  chain_reduce_norm<<<rows, kNormBlock, 0, stream>>>(a, a.next_gain, true);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace penstock::decode
