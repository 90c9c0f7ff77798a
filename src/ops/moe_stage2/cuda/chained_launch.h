// Launches that begin while the kernel before them in the stream ends (programmatic dependent
// launch): hides about a microsecond a kernel. The kernel must call wait_for_previous() before it
// reads or writes anything that earlier work touches.
#pragma once

#include <cuda_runtime_api.h>

namespace penstock::moe_stage2 {

// Where a launch goes.
struct LaunchPlace {
  dim3 grid;
  unsigned threads = 0;
  unsigned shared_bytes = 0;
  cudaStream_t stream = nullptr;
};

// May be captured; behind anything that is no kernel it is an ordinary launch.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_chained(void (*kernel)(Parameters...), const LaunchPlace& place,
                           const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = place.grid;
  config.blockDim = dim3(place.threads);
  config.dynamicSmemBytes = place.shared_bytes;
  config.stream = place.stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

#ifdef __CUDACC__
// Returns when the kernels before this one have ended and what they wrote is visible. Nothing in a
// launch without the attribute.
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next launch of the stream begin, if it is a chained one, as soon as every thread block
// of this kernel has said so or ended. What it may touch before its own wait_for_previous() is what
// was complete before this call.
__device__ __forceinline__ void let_next_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#endif

}  // namespace penstock::moe_stage2
