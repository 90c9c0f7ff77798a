#include "fabric/cuda/put_graph.h"

#include "core/cuda/check.h"

namespace penstock::cuda {
namespace {

cudaKernelNodeParams node_of(const SmPut& put, int blocks, int threads, void** arguments) {
  arguments[0] = const_cast<SmPut*>(&put);
  cudaKernelNodeParams params{};
  params.func = const_cast<void*>(sm_put_function());
  params.gridDim = dim3(static_cast<unsigned>(blocks));
  params.blockDim = dim3(static_cast<unsigned>(threads));
  params.kernelParams = arguments;
  return params;
}

}  // namespace

PutGraph::PutGraph(cudaStream_t stream) : stream_(stream) {
  try {
    build();
  } catch (...) {
    release();
    throw;
  }
}

PutGraph::~PutGraph() { release(); }

void PutGraph::build() {
  const SmPut nothing;
  void* arguments[1] = {};
  const cudaKernelNodeParams params = node_of(nothing, 1, 1, arguments);
  PENSTOCK_CUDA_CHECK(cudaGraphCreate(&graph_, 0));
  PENSTOCK_CUDA_CHECK(cudaGraphAddKernelNode(&node_, graph_, nullptr, 0, &params));
  PENSTOCK_CUDA_CHECK(cudaGraphInstantiate(&exec_, graph_, 0));
  PENSTOCK_CUDA_CHECK(cudaGraphUpload(exec_, stream_));
  PENSTOCK_CUDA_CHECK(cudaGraphLaunch(exec_, stream_));
  PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream_));
}

void PutGraph::release() noexcept {
  if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
  if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
}

cudaError_t PutGraph::launch(const SmPut& put, int blocks, int threads) noexcept {
  void* arguments[1] = {};
  const cudaKernelNodeParams params = node_of(put, blocks, threads, arguments);
  const cudaError_t status = cudaGraphExecKernelNodeSetParams(exec_, node_, &params);
  return status != cudaSuccess ? status : cudaGraphLaunch(exec_, stream_);
}

}  // namespace penstock::cuda
