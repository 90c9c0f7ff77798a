// A pair of events that takes times, for the link benchmark.
#pragma once

#include "core/cuda/stream.h"

namespace penstock::cuda {

struct LinkTimer {
  // Seconds that what `enqueue` puts on `stream` takes there.
  template <typename Enqueue>
  double seconds(cudaStream_t stream, Enqueue&& enqueue) const {
    start.record(stream);
    enqueue();
    stop.record(stream);
    PENSTOCK_CUDA_CHECK(cudaEventSynchronize(stop.get()));
    return elapsed();
  }
  double elapsed() const {
    float ms = 0.0F;
    PENSTOCK_CUDA_CHECK(cudaEventElapsedTime(&ms, start.get(), stop.get()));
    return static_cast<double>(ms) * 1e-3;
  }
  OwnedEvent start{cudaEventDefault};
  OwnedEvent stop{cudaEventDefault};
};

}  // namespace penstock::cuda
