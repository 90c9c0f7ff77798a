#include "device_fill.h"
#include "ops/sm90/ptx.cuh"

namespace penstock::bench {
namespace {

constexpr int kThreads = 256;
constexpr int kCtas = 132 * 8;

// SplitMix64 of (seed, index): every element on its own.
__device__ std::uint64_t hash(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t z =
      seed * 0xd1342543de82ef95ull + index * 0x9e3779b97f4a7c15ull + 0x632be59bd9b4e019ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
__device__ float unit(std::uint32_t bits) {
  return (static_cast<float>(bits >> 8) + 0.5f) * 0x1p-24f;
}

// Two normal deviates (Box-Muller) as two E4M3.
__device__ std::uint16_t normal_pair(std::uint64_t seed, std::uint64_t index) {
  const std::uint64_t h = hash(seed, index);
  const float radius = 100.0f * sqrtf(-2.0f * logf(unit(static_cast<std::uint32_t>(h))));
  float s;
  float c;
  sincospif(2.0f * unit(static_cast<std::uint32_t>(h >> 32)), &s, &c);
  return sm90::pack_e4m3(radius * c, radius * s);
}

__global__ void fill_pairs(std::uint16_t* out, std::size_t pairs, std::uint64_t seed) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < pairs;
       i += step) {
    out[i] = normal_pair(seed, i);
  }
}

__global__ void fill_floats(float* out, std::size_t count, float low, float high,
                            std::uint64_t seed) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    out[i] = low + (high - low) * unit(static_cast<std::uint32_t>(hash(seed, i)));
  }
}

__global__ void fill_rows(unsigned char* out, std::size_t rows, std::int64_t row_bytes,
                          std::int32_t hidden, std::uint64_t seed) {
  for (std::size_t r = blockIdx.x; r < rows; r += gridDim.x) {
    unsigned char* row = out + static_cast<std::int64_t>(r) * row_bytes;
    for (int i = threadIdx.x; i < hidden / 2; i += blockDim.x) {
      reinterpret_cast<std::uint16_t*>(row)[i] = normal_pair(seed, r * 8192 + i);
    }
    for (int i = threadIdx.x; i < hidden / 32; i += blockDim.x) {
      row[hidden + i] = static_cast<unsigned char>(119 + hash(seed + 1, r * 8192 + i) % 4);
    }
  }
}

__global__ void read_pieces(const uint4* data, std::size_t count) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    // Volatile, or ptxas drops a load whose result nobody uses.
    asm volatile(
        "{\n.reg .b32 w<4>;\nld.volatile.global.v4.b32 {w0, w1, w2, w3}, [%0];\n}" ::"l"(data + i)
        : "memory");
  }
}

}  // namespace

cudaError_t fill_e4m3_normal(void* out, std::size_t count, std::uint64_t seed,
                             cudaStream_t stream) {
  fill_pairs<<<kCtas, kThreads, 0, stream>>>(static_cast<std::uint16_t*>(out), count / 2, seed);
  return cudaGetLastError();
}

cudaError_t fill_uniform(float* out, std::size_t count, float low, float high, std::uint64_t seed,
                         cudaStream_t stream) {
  fill_floats<<<kCtas, kThreads, 0, stream>>>(out, count, low, high, seed);
  return cudaGetLastError();
}

cudaError_t fill_wire_rows(unsigned char* out, std::size_t rows, std::int64_t row_bytes,
                           std::int32_t hidden, std::uint64_t seed, cudaStream_t stream) {
  fill_rows<<<kCtas, kThreads, 0, stream>>>(out, rows, row_bytes, hidden, seed);
  return cudaGetLastError();
}

cudaError_t read_all(const void* data, std::size_t bytes, cudaStream_t stream) {
  read_pieces<<<kCtas, kThreads, 0, stream>>>(static_cast<const uint4*>(data),
                                              bytes / sizeof(uint4));
  return cudaGetLastError();
}

}  // namespace penstock::bench
