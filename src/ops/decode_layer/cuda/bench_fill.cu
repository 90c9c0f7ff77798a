#include <cuda_bf16.h>

#include "ops/decode_layer/cuda/bench_fill.h"

namespace penstock::decode {
namespace {

__device__ std::uint32_t hash(std::uint64_t x, std::uint32_t seed) {
  x = (x + seed) * 0x9E3779B97F4A7C15ULL;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9ULL;
  return static_cast<std::uint32_t>(x >> 32);
}
// E4M3 with exponents 2^-3 .. 2^1; root mean square 1.53.
__device__ std::uint32_t code(std::uint32_t h) {
  return (h & 0x80U) | (4U + (h >> 8 & 0xffU) * 5U / 256U) << 3 | (h & 7U);
}
__device__ std::uint32_t four_codes(std::uint64_t i, std::uint32_t seed) {
  std::uint32_t w = 0;
  for (int b = 0; b < 4; ++b) w |= code(hash(4 * i + static_cast<unsigned>(b), seed)) << (8 * b);
  return w;
}
__device__ float uniform(std::uint64_t i, std::uint32_t seed) {
  return static_cast<float>(hash(i, seed)) * 4.6566129e-10F - 1.0F;
}

__global__ void fill_units(std::uint32_t* out, std::uint64_t words, std::uint32_t unit_words,
                           float scale, std::uint32_t seed) {
  for (std::uint64_t i = blockIdx.x * static_cast<std::uint64_t>(blockDim.x) + threadIdx.x;
       i < words; i += static_cast<std::uint64_t>(gridDim.x) * blockDim.x) {
    out[i] = i % unit_words < unit_words - 4 ? four_codes(i, seed) : __float_as_uint(scale);
  }
}
__global__ void fill_bf16(__nv_bfloat16* out, std::uint64_t count, float range,
                          std::uint32_t seed) {
  for (std::uint64_t i = blockIdx.x * static_cast<std::uint64_t>(blockDim.x) + threadIdx.x;
       i < count; i += static_cast<std::uint64_t>(gridDim.x) * blockDim.x) {
    out[i] = __float2bfloat16(uniform(i, seed) * range);
  }
}
__global__ void fill_f32(float* out, std::uint64_t count, float middle, float range,
                         std::uint32_t seed) {
  for (std::uint64_t i = blockIdx.x * static_cast<std::uint64_t>(blockDim.x) + threadIdx.x;
       i < count; i += static_cast<std::uint64_t>(gridDim.x) * blockDim.x) {
    out[i] = middle + uniform(i, seed) * range;
  }
}
__global__ void fill_cache(unsigned char* out, std::int64_t rows, std::int64_t page_stride,
                           std::uint32_t seed) {
  for (std::int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    auto* row = reinterpret_cast<std::uint32_t*>(out + r / kPageTokens * page_stride +
                                                 r % kPageTokens * 656);
    for (int w = static_cast<int>(threadIdx.x); w < 164; w += static_cast<int>(blockDim.x)) {
      const std::uint64_t i = static_cast<std::uint64_t>(r) * 164 + static_cast<unsigned>(w);
      if (w < 128) {
        row[w] = four_codes(i, seed);
      } else if (w < 132) {
        row[w] = __float_as_uint(0.5F);
      } else {
        const __nv_bfloat162 v =
            __floats2bfloat162_rn(uniform(2 * i, seed), uniform(2 * i + 1, seed));
        row[w] = *reinterpret_cast<const std::uint32_t*>(&v);
      }
    }
  }
}

}  // namespace

cudaError_t fill_decode_weights(const DecodeShape& shape, unsigned char* out, std::uint32_t seed,
                                cudaStream_t stream) {
  const WeightLayout w = weight_layout(shape);
  const int heads = shape.local_heads();
  const int inter = shape.local_intermediate();
  const auto units = [&](std::int64_t at, const MatrixPlan& m, int columns, int copies) {
    const float scale = 1.0F / (1.53F * sqrtf(static_cast<float>(columns)));
    fill_units<<<1056, 256, 0, stream>>>(
        reinterpret_cast<std::uint32_t*>(out + at),
        static_cast<std::uint64_t>(m.bytes()) * static_cast<unsigned>(copies) / 4,
        static_cast<std::uint32_t>(m.unit_bytes() / 4), scale,
        seed + static_cast<std::uint32_t>(at));
  };
  units(w.qkv_a, matrix_plan(shape.q_lora + kKvRow, shape.hidden, 1), shape.hidden, 1);
  units(w.q_b, matrix_plan(heads * kQueryHead, shape.q_lora, 1), shape.q_lora, 1);
  units(w.uk, matrix_plan(heads * kLatent, kNope, 1), kNope, 1);
  units(w.uv, matrix_plan(heads * kValue, kLatent, 1), kLatent, 1);
  units(w.o, matrix_plan(shape.hidden, heads * kValue, 1), heads * kValue, 1);
  units(w.up_gate, matrix_plan(2 * inter, shape.hidden, 1), shape.hidden, shape.experts + 1);
  units(w.down, matrix_plan(shape.hidden, inter, 1), inter, shape.experts + 1);
  fill_bf16<<<264, 256, 0, stream>>>(
      reinterpret_cast<__nv_bfloat16*>(out + w.router),
      static_cast<std::uint64_t>(shape.experts) * static_cast<unsigned>(shape.hidden),
      sqrtf(3.0F / static_cast<float>(shape.hidden)), seed + 1);
  const auto gains = [&](std::int64_t at, int n, float middle, float range) {
    fill_f32<<<32, 256, 0, stream>>>(reinterpret_cast<float*>(out + at),
                                     static_cast<std::uint64_t>(n), middle, range, seed + 2);
  };
  gains(w.norm_input, shape.hidden, 1.0F, 0.25F);
  gains(w.norm_q, shape.q_lora, 1.0F, 0.25F);
  gains(w.norm_kv, kLatent, 1.0F, 0.25F);
  gains(w.norm_post, shape.hidden, 1.0F, 0.25F);
  gains(w.bias, shape.experts, 34.0F, 0.01F);
  return cudaGetLastError();
}

cudaError_t fill_decode_cache(unsigned char* out, std::int64_t rows, std::int64_t page_stride,
                              std::uint32_t seed, cudaStream_t stream) {
  fill_cache<<<1056, 192, 0, stream>>>(out, rows, page_stride, seed);
  return cudaGetLastError();
}

}  // namespace penstock::decode
