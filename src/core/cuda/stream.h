// Streams and events with an owner, so that a constructor that throws leaves nothing behind.
#pragma once

#include <cuda_runtime_api.h>

#include "core/cuda/check.h"

namespace penstock::cuda {

inline bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  PENSTOCK_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// A stream that does not synchronise with the legacy one.
struct OwnedStream {
  OwnedStream() { PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  explicit OwnedStream(int priority) {
    PENSTOCK_CUDA_CHECK(cudaStreamCreateWithPriority(&handle, cudaStreamNonBlocking, priority));
  }
  ~OwnedStream() { (void)cudaStreamDestroy(handle); }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  void wait() const { PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(handle)); }
  cudaStream_t handle = nullptr;
};

// An event for order alone, or (cudaEventDefault) one that also takes the time.
class OwnedEvent {
 public:
  explicit OwnedEvent(unsigned flags = cudaEventDisableTiming) {
    PENSTOCK_CUDA_CHECK(cudaEventCreateWithFlags(&event_, flags));
  }
  ~OwnedEvent() { (void)cudaEventDestroy(event_); }
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;
  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) const { PENSTOCK_CUDA_CHECK(cudaEventRecord(event_, stream)); }
  // What follows on `stream` comes behind what was recorded; nothing if nothing was.
  void hold(cudaStream_t stream) const {
    PENSTOCK_CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0));
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace penstock::cuda
