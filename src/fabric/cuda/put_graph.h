// The put kernel as a graph of one node. Setting the node's arguments and launching the graph costs
// the host 2.0 us where a kernel launch costs 3.7 (H200, driver 580; the spread is a third, too),
// and a put between ranks of one GPU is mostly that.
#pragma once

#include <cuda_runtime_api.h>

#include "fabric/cuda/put_sm90.h"

namespace penstock::cuda {

class PutGraph {
 public:
  // For `stream` of the current device: builds the graph, uploads it and runs it once with nothing
  // to do, since a first launch may wait for the GPU to be idle (see DeviceRank::prepare). Waits
  // for what is in the stream.
  explicit PutGraph(cudaStream_t stream);
  ~PutGraph();
  PutGraph(const PutGraph&) = delete;
  PutGraph& operator=(const PutGraph&) = delete;

  // As launch_sm_put(), on the stream given above. Launches that are under way keep their
  // arguments.
  cudaError_t launch(const SmPut& put, int blocks, int threads) noexcept;

 private:
  void build();
  void release() noexcept;

  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  cudaGraphNode_t node_ = nullptr;
};

}  // namespace penstock::cuda
