// Options::quantise_x: bf16 rows to E4M3 with a scale per 1 x 128, transposed as the GEMM reads
// them.
#include <cuda_runtime.h>

#include "ops/a2a_gemm/cuda/call_kernels.h"
#include "ops/sm90/ptx.cuh"
#include "penstock/numerics/block.h"

namespace penstock::a2a_gemm {
namespace {

// A warp a row and block; a CTA's rows follow each other, so that their scales fill a line.
constexpr int kRowsAtOnce = 32;
constexpr int kAtOnce = 4;  // elements of a lane
static_assert(kAtOnce * 32 == kScaleBlock);

__global__ void __launch_bounds__(32 * kRowsAtOnce)
    quantise_x_sm90(const __grid_constant__ QuantiseArgs args) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * kRowsAtOnce + static_cast<int>(threadIdx.x) / 32;
  const int block = static_cast<int>(blockIdx.y);
  const int column = block * kScaleBlock + lane * kAtOnce;
  if (row >= args.rows) return;
  const bool inside = column < args.depth;  // depth is a multiple of 16: a lane's four or none
  const std::int64_t at = row * args.depth + column;
  const uint2 raw = inside ? *reinterpret_cast<const uint2*>(args.x + at) : uint2{0, 0};
  const std::uint32_t bits[kAtOnce] = {raw.x << 16, raw.x & 0xffff0000u, raw.y << 16,
                                       raw.y & 0xffff0000u};
  std::uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) amax = max(amax, bits[i] & 0x7fffffffu);
  amax = __reduce_max_sync(0xffffffffu, amax);
  const float scale = fp8_activation_scale(amax);
  if (inside) {
    float q[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) q[i] = __fdiv_rn(__uint_as_float(bits[i]), scale);
    const std::uint32_t low = sm90::pack_e4m3(q[0], q[1]);
    const std::uint32_t high = sm90::pack_e4m3(q[2], q[3]);
    *reinterpret_cast<std::uint32_t*>(args.q + at) = (low & 0xffffu) | high << 16;
  }
  if (lane == 0) args.scales[block * args.scale_stride + row] = scale;
}

}  // namespace

cudaError_t load_quantise_x_sm90() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, quantise_x_sm90);
}

cudaError_t launch_quantise_x_sm90(const QuantiseArgs& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((args.rows + kRowsAtOnce - 1) / kRowsAtOnce),
                  static_cast<unsigned>((args.depth + kScaleBlock - 1) / kScaleBlock));
  quantise_x_sm90<<<grid, 32 * kRowsAtOnce, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace penstock::a2a_gemm
