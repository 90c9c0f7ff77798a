#include "fabric/cuda/memory.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <fmt/format.h>

#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <string>

#include "core/cuda/check.h"
#include "core/cuda/stream.h"
#include "fabric/cuda/driver.h"
#include "penstock/core/error.h"

namespace penstock::cuda {
namespace {

CUmemAllocationProp properties_of(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

}  // namespace

cudaStream_t word_stream() {
  static std::mutex mutex;
  // For the life of the process: never destroyed, since the driver may be gone before static
  // objects are.
  static auto& streams = *new std::map<int, OwnedStream>;
  int device = 0;
  PENSTOCK_CUDA_CHECK(cudaGetDevice(&device));
  const std::lock_guard lock(mutex);
  const auto at = streams.find(device);
  if (at != streams.end()) return at->second.handle;
  int least = 0;
  int greatest = 0;
  PENSTOCK_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  return streams.try_emplace(device, greatest).first->second.handle;
}

void zero_device(void* data, std::size_t bytes) {
  PENSTOCK_CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, word_stream()));
  PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(word_stream()));
}

void write_device(void* data, const void* from, std::size_t bytes) {
  PENSTOCK_CUDA_CHECK(cudaMemcpyAsync(data, from, bytes, cudaMemcpyDefault, word_stream()));
  PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(word_stream()));
}

void read_device(void* to, const void* data, std::size_t bytes) {
  PENSTOCK_CUDA_CHECK(cudaMemcpyAsync(to, data, bytes, cudaMemcpyDefault, word_stream()));
  PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(word_stream()));
}

ScopedDevice::ScopedDevice(int device) {
  PENSTOCK_CUDA_CHECK(cudaGetDevice(&previous_));
  PENSTOCK_CUDA_CHECK(cudaSetDevice(device));
}

ScopedDevice::~ScopedDevice() { (void)cudaSetDevice(previous_); }

std::size_t granule_bytes(int device) {
  const CUmemAllocationProp properties = properties_of(device);
  std::size_t granule = 0;
  PENSTOCK_DRIVER_CHECK(
      mem_get_allocation_granularity(&granule, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  return granule;
}

std::size_t whole_granules(std::size_t bytes, int device) {
  require(bytes != 0, ErrorKind::kInvalidArgument,
          [] { return std::string("a window of 0 bytes was asked for: ask for at least 1"); });
  const std::size_t granule = granule_bytes(device);
  require(bytes <= std::numeric_limits<std::size_t>::max() - granule, ErrorKind::kInvalidArgument,
          [&] {
            return fmt::format("{} bytes cannot be rounded up to granules of {}", bytes, granule);
          });
  return (bytes + granule - 1) / granule * granule;
}

PeerAccess peer_access(int accessor, int owner) {
  if (accessor == owner) return {.load_store = true, .native_atomics = true};
  int access = 0;
  int atomics = 0;
  PENSTOCK_CUDA_CHECK(
      cudaDeviceGetP2PAttribute(&access, cudaDevP2PAttrAccessSupported, accessor, owner));
  PENSTOCK_CUDA_CHECK(
      cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, accessor, owner));
  return {.load_store = access != 0, .native_atomics = atomics != 0};
}

Allocation::~Allocation() {
  if (bytes_ != 0) (void)driver().mem_release(handle_);
}

Allocation Allocation::create(std::size_t bytes, int device) {
  const ScopedDevice scope(device);
  PENSTOCK_CUDA_CHECK(
      cudaFree(nullptr));  // the primary context must exist before the driver maps into it
  const std::size_t whole = whole_granules(bytes, device);
  const CUmemAllocationProp properties = properties_of(device);
  CUmemGenericAllocationHandle handle = 0;
  const CUresult status = driver().mem_create(&handle, whole, &properties, 0);
  if (status == CUDA_ERROR_OUT_OF_MEMORY) {
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    PENSTOCK_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    throw_error(ErrorKind::kResourceExhausted,
                fmt::format("GPU {} has no {} bytes for a window: {} of {} bytes are free; use a "
                            "smaller shape or share one window between layers",
                            device, whole, free_bytes, total_bytes));
  }
  check(status, "mem_create");
  Allocation allocation;
  allocation.handle_ = handle;
  allocation.bytes_ = whole;
  return allocation;
}

Allocation Allocation::import(int descriptor, std::size_t bytes, int device) {
  const ScopedDevice scope(device);
  PENSTOCK_CUDA_CHECK(cudaFree(nullptr));
  const std::size_t granule = granule_bytes(device);
  require(bytes != 0 && bytes % granule == 0, ErrorKind::kInvalidArgument, [&] {
    return fmt::format(
        "a peer's window of {} bytes is not a whole number of granules of {}: both "
        "sides must use the exporter's size",
        bytes, granule);
  });
  CUmemGenericAllocationHandle handle = 0;
  PENSTOCK_DRIVER_CHECK(mem_import(&handle,
                                   reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
                                   CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  Allocation allocation;
  allocation.handle_ = handle;
  allocation.bytes_ = bytes;
  return allocation;
}

int Allocation::export_descriptor() const {
  int descriptor = -1;
  PENSTOCK_DRIVER_CHECK(
      mem_export(&descriptor, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  // A child process of the application must not keep a rank's window alive.
  (void)fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  return descriptor;
}

Mapping::~Mapping() {
  if (base_ == 0) return;
  (void)driver().mem_unmap(base_, bytes_);
  (void)driver().mem_address_free(base_, bytes_);
}

Mapping Mapping::create(const Allocation& memory, int accessor) {
  require(static_cast<bool>(memory), ErrorKind::kInvalidArgument,
          [] { return std::string("an empty allocation cannot be mapped"); });
  const ScopedDevice scope(accessor);
  PENSTOCK_CUDA_CHECK(cudaFree(nullptr));
  CUdeviceptr base = 0;
  PENSTOCK_DRIVER_CHECK(mem_address_reserve(&base, memory.bytes(), granule_bytes(accessor), 0, 0));
  if (const CUresult status = driver().mem_map(base, memory.bytes(), 0, memory.handle(), 0);
      status != CUDA_SUCCESS) {
    (void)driver().mem_address_free(base, memory.bytes());
    check(status, "mem_map");
  }
  Mapping mapping;  // from here on its destructor cleans up
  mapping.base_ = base;
  mapping.bytes_ = memory.bytes();
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = accessor;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const CUresult status = driver().mem_set_access(base, memory.bytes(), &access, 1);
  require(status == CUDA_SUCCESS, ErrorKind::kUnsupported, [&] {
    return fmt::format(
        "GPU {} may not access the peer's memory (driver status {}): the GPUs need "
        "NVLink or another peer-to-peer path",
        accessor, static_cast<int>(status));
  });
  return mapping;
}

PinnedMemory::PinnedMemory(std::size_t bytes) {
  PENSTOCK_CUDA_CHECK(cudaHostAlloc(&data_, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
  bytes_ = bytes;
  std::memset(data_, 0, bytes);
}

PinnedMemory::~PinnedMemory() {
  if (data_ != nullptr) (void)cudaFreeHost(data_);
}

}  // namespace penstock::cuda
