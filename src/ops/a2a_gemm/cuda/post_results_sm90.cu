// The mirror unfused: all pieces handed over at once, behind the GEMM.
#include <cuda_runtime.h>

#include "ops/a2a_gemm/cuda/post_results_sm90.cuh"

namespace penstock::a2a_gemm {
namespace {

__global__ void __launch_bounds__(1) post_results_sm90(const __grid_constant__ ResultSend send) {
  for (std::int32_t i = 0; i < send.grid.pieces(); ++i) post_result(send, i);
}

}  // namespace

cudaError_t load_post_results_sm90() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, post_results_sm90);
}

cudaError_t launch_post_results_sm90(const ResultSend& send, cudaStream_t stream) {
  post_results_sm90<<<1, 1, 0, stream>>>(send);
  return cudaGetLastError();
}

}  // namespace penstock::a2a_gemm
