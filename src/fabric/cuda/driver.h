// The CUDA driver, NVML and NCCL, found at run time: the binary links none of them, so that it
// starts on a machine with neither driver nor GPU and says what is missing when a GPU is asked for.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <string>

namespace penstock::cuda {

// Driver entry points this library calls. Each is asked for at the version whose signature is
// written here, so a newer driver cannot hand back a function with other parameters.
struct Driver {
  int version = 0;  // as cuDriverGetVersion gives it, e.g. 13000
  CUresult (*get_error_string)(CUresult, const char**) = nullptr;
  CUresult (*device_get)(CUdevice*, int) = nullptr;
  CUresult (*device_get_attribute)(int*, CUdevice_attribute, CUdevice) = nullptr;
  CUresult (*mem_get_allocation_granularity)(std::size_t*, const CUmemAllocationProp*,
                                             CUmemAllocationGranularity_flags) = nullptr;
  CUresult (*mem_create)(CUmemGenericAllocationHandle*, std::size_t, const CUmemAllocationProp*,
                         unsigned long long) = nullptr;
  CUresult (*mem_release)(CUmemGenericAllocationHandle) = nullptr;
  CUresult (*mem_address_reserve)(CUdeviceptr*, std::size_t, std::size_t, CUdeviceptr,
                                  unsigned long long) = nullptr;
  CUresult (*mem_address_free)(CUdeviceptr, std::size_t) = nullptr;
  CUresult (*mem_map)(CUdeviceptr, std::size_t, std::size_t, CUmemGenericAllocationHandle,
                      unsigned long long) = nullptr;
  CUresult (*mem_unmap)(CUdeviceptr, std::size_t) = nullptr;
  CUresult (*mem_set_access)(CUdeviceptr, std::size_t, const CUmemAccessDesc*,
                             std::size_t) = nullptr;
  CUresult (*mem_export)(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                         unsigned long long) = nullptr;
  CUresult (*mem_import)(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType) = nullptr;
  CUresult (*stream_write_value64)(CUstream, CUdeviceptr, cuuint64_t, unsigned int) = nullptr;
};

// The driver's functions, looked up once. Throws Error(kUnsupported) naming what is missing: no
// driver, too old a driver, or the entry point. Thread-safe.
const Driver& driver();

// Settings that the driver reads once, when the first CUDA call of the process is made; call this
// before it (the command and the tests do, first thing in main). Sets, where the environment does
// not: CUDA_DEVICE_MAX_CONNECTIONS=32, so that streams of kernels that wait for each other get
// hardware queues of their own, and CUDA_MODULE_LOADING=EAGER, so that no kernel is loaded behind
// one that waits for it. Not thread-safe, like setenv.
void prepare_process();

// Hardware queues that the driver was told to use (CUDA_DEVICE_MAX_CONNECTIONS; 8 if unset, its
// default).
int connections() noexcept;

// Throws Error(kBackend) with the driver's words unless status is CUDA_SUCCESS; out of memory
// becomes Error(kResourceExhausted).
void check(CUresult status, const char* call);

// NVML, for reports only: a machine without it runs, and the report says so.
struct GpuState {
  std::string name;
  std::string pci_bus_id;
  std::string driver_version;
  int sm_clock_mhz = -1;
  int memory_clock_mhz = -1;
  int nvlinks_active = -1;
  std::string problem;  // why fields are missing; empty when NVML answered
};
GpuState gpu_state(int device) noexcept;

// A library opened by name; nullptr with the loader's words in `problem`. Never closed: NCCL and
// NVML keep threads.
void* open_library(const char* name, std::string* problem) noexcept;
void* find_symbol(void* library, const char* name) noexcept;

}  // namespace penstock::cuda

#define PENSTOCK_DRIVER_CHECK(call) ::penstock::cuda::check(::penstock::cuda::driver().call, #call)
