// Host-side CUDA helpers for launchers (.cpp files): errors become Error(kBackend) with call, code
// and the driver's words.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace penstock::cuda {

// Throws Error(kBackend) unless status is cudaSuccess. `call` names what was asked for.
void check(cudaError_t status, const char* call);

// Number of usable devices; 0 when there is no driver or no GPU.
int device_count() noexcept;

// Why no device can be used here, e.g. "no NVIDIA driver: libcuda.so.1 not found"; empty if one
// can.
std::string unavailable_reason();

// Throws Error(kUnsupported) with the reason unless device `ordinal` exists and has compute
// capability 9.0.
void require_sm90(int ordinal);

}  // namespace penstock::cuda

#define PENSTOCK_CUDA_CHECK(call) ::penstock::cuda::check((call), #call)
