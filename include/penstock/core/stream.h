// A stream as an opaque handle, so that no public header mentions a CUDA type.
#pragma once

namespace penstock {

// On cuda: a cudaStream_t (nullptr is the legacy default stream). On cpu: ignored, calls run on the
// calling thread.
struct Stream {
  void* handle = nullptr;
};

// Where an operator runs.
enum class Backend : unsigned char { kCpu, kCuda };

}  // namespace penstock
