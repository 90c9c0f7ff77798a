// FP8: the scales of the rows that leave, stored into the peers' windows ahead of the pieces.
#include <cuda_runtime.h>

#include <algorithm>

#include "ops/a2a_gemm/cuda/call_kernels.h"

namespace penstock::a2a_gemm {
namespace {

constexpr int kThreads = 256;
constexpr int kScalesAtOnce = 4;  // 16 bytes: rows and strides are multiples of 16

__global__ void __launch_bounds__(kThreads)
    push_scales_sm90(const __grid_constant__ SendArgs args, int ranks) {
  // Only into slots that their readers have left.
  if (*args.open != *args.epoch) return;
  const std::uint64_t first = blockIdx.x * static_cast<std::uint64_t>(kThreads) + threadIdx.x;
  const std::uint64_t step = gridDim.x * static_cast<std::uint64_t>(kThreads);
  const auto slot = static_cast<std::uint32_t>(args.slot);
  for (int s = 1; s < ranks; ++s) {
    const int peer = destination_of_step(args.rank, s, ranks);
    const auto groups = static_cast<std::uint64_t>(args.rows[peer]) / kScalesAtOnce;
    const float* from = args.x_scales + args.row_offset[peer];
    for (std::uint64_t i = first; i < args.index.shape.scale_blocks * groups; i += step) {
      const std::uint64_t block = i / groups;
      const std::uint64_t row = i % groups * kScalesAtOnce;
      *reinterpret_cast<uint4*>(args.base[peer] +
                                args.index.chunk_scale(slot, args.rank, block, row)) =
          *reinterpret_cast<const uint4*>(
              from + static_cast<std::int64_t>(block) * args.x_scale_stride + row);
    }
  }
  // The signals are written by another engine behind this kernel.
  __threadfence_system();
}

}  // namespace

cudaError_t load_push_scales_sm90() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, push_scales_sm90);
}

cudaError_t launch_push_scales_sm90(const SendArgs& args, int ctas, cudaStream_t stream) {
  std::uint64_t rows = 0;
  const auto ranks = static_cast<int>(args.index.shape.ranks);
  for (int r = 0; r < ranks; ++r) {
    if (r != args.rank) rows += static_cast<std::uint64_t>(args.rows[r]);
  }
  const std::uint64_t groups = args.index.shape.scale_blocks * rows / kScalesAtOnce;
  const std::uint64_t wanted = (groups + kThreads - 1) / kThreads;
  const auto grid = static_cast<unsigned>(std::min<std::uint64_t>(
      std::max<std::uint64_t>(wanted, 1), static_cast<std::uint64_t>(ctas)));
  push_scales_sm90<<<grid, kThreads, 0, stream>>>(args, ranks);
  return cudaGetLastError();
}

}  // namespace penstock::a2a_gemm
