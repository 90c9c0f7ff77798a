#include "core/cuda/check.h"

#include <fmt/format.h>

#include "penstock/core/error.h"

namespace penstock::cuda {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw_error(ErrorKind::kBackend,
              fmt::format("{} failed: {} ({}: {})", call, static_cast<int>(status),
                          cudaGetErrorName(status), cudaGetErrorString(status)));
}

int device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();  // "no device" is an answer here, not a fault of a later call
    return 0;
  }
  return count;
}

std::string unavailable_reason() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    return fmt::format("no usable NVIDIA GPU: {}", cudaGetErrorString(status));
  }
  return count == 0 ? "no NVIDIA GPU in this machine" : "";
}

void require_sm90(int ordinal) {
  const int count = device_count();
  if (ordinal < 0 || ordinal >= count) {
    const std::string reason = unavailable_reason();
    throw_error(
        ErrorKind::kUnsupported,
        reason.empty()
            ? fmt::format("GPU {} does not exist: this machine has {}", ordinal, count)
            : fmt::format("GPU {} cannot be used: {}; use the cpu back end", ordinal, reason));
  }
  int major = 0;
  int minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal),
        "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal),
        "cudaDeviceGetAttribute");
  if (major != 9 || minor != 0) {
    throw_error(ErrorKind::kUnsupported,
                fmt::format("GPU {} has compute capability {}.{}: the kernels need 9.0 (Hopper)",
                            ordinal, major, minor));
  }
}

}  // namespace penstock::cuda
