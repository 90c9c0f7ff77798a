// A stream and a pair of events with an owner, for the link benchmark.
#pragma once

#include <cuda_runtime_api.h>

#include "core/cuda/check.h"

namespace penstock::cuda {

struct LinkStream {
  LinkStream() { PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~LinkStream() { (void)cudaStreamDestroy(handle); }
  LinkStream(const LinkStream&) = delete;
  LinkStream& operator=(const LinkStream&) = delete;
  void wait() const { PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(handle)); }
  cudaStream_t handle = nullptr;
};

struct LinkTimer {
  LinkTimer() {
    PENSTOCK_CUDA_CHECK(cudaEventCreate(&start));
    PENSTOCK_CUDA_CHECK(cudaEventCreate(&stop));
  }
  ~LinkTimer() {
    (void)cudaEventDestroy(start);
    (void)cudaEventDestroy(stop);
  }
  LinkTimer(const LinkTimer&) = delete;
  LinkTimer& operator=(const LinkTimer&) = delete;
  // Seconds that what `enqueue` puts on `stream` takes there.
  template <typename Enqueue>
  double seconds(cudaStream_t stream, Enqueue&& enqueue) const {
    PENSTOCK_CUDA_CHECK(cudaEventRecord(start, stream));
    enqueue();
    PENSTOCK_CUDA_CHECK(cudaEventRecord(stop, stream));
    PENSTOCK_CUDA_CHECK(cudaEventSynchronize(stop));
    return elapsed();
  }
  double elapsed() const {
    float ms = 0.0F;
    PENSTOCK_CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
    return static_cast<double>(ms) * 1e-3;
  }
  cudaEvent_t start = nullptr;
  cudaEvent_t stop = nullptr;
};

}  // namespace penstock::cuda
