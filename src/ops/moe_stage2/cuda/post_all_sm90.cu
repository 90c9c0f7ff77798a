// Everything at once behind the GEMM: the operator without overlap.
#include "ops/moe_stage2/cuda/operator_kernels.h"
#include "ops/moe_stage2/cuda/post_sm90.cuh"

namespace penstock::moe_stage2 {
namespace {

__global__ void __launch_bounds__(32) post_all_sm90(const __grid_constant__ ShipArgs a) {
  if (threadIdx.x != 0 || a.state->stop != 0) return;
  const int tiles = *a.tile_count;
  if (tiles == 0) {
    no_chunks(a.post);
  } else {
    chunk_completed(a.post, 0, tiles, 1);
  }
}

}  // namespace

cudaError_t launch_post_all_sm90(const ShipArgs& args, cudaStream_t stream) {
  post_all_sm90<<<1, 32, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t load_post_all_sm90() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, post_all_sm90);
}

}  // namespace penstock::moe_stage2
