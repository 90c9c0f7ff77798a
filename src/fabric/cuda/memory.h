// Device and host memory that other ranks or the host reach: physical allocations by the virtual
// memory management interface, mapped once per accessor, passed between processes as POSIX file
// descriptors. Legacy IPC handles and NVLink multicast are never used.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace penstock::cuda {

// Makes `device` current for the scope and puts the caller's device back.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device);
  ~ScopedDevice();
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  int previous_ = 0;
};

// Bytes of one granule on `device`: every allocation and mapping is a whole number of them (2 MiB
// on an H200). A mapping that is shorter makes a peer fault on the words after its last whole
// granule.
std::size_t granule_bytes(int device);

// `bytes` rounded up to whole granules. Throws Error(kInvalidArgument) for 0 and for sizes whose
// rounding overflows.
std::size_t whole_granules(std::size_t bytes, int device);

// Whether a kernel on `accessor` can load, store and do 64-bit atomics in memory of `owner` (the
// packet protocol needs all three). The same device always can.
struct PeerAccess {
  bool load_store = false;
  bool native_atomics = false;
};
PeerAccess peer_access(int accessor, int owner);

// The process's stream for small host-to-device and device-to-host words on the current device:
// set-up, abort words, ring heads. Nothing on it ever waits for a kernel. One for all ranks,
// because streams are a scarce thing: two that share a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS)
// run one behind the other, and a copy behind a kernel that waits for it never runs.
cudaStream_t word_stream();

// Small transfers on word_stream(), returning when done.
void zero_device(void* data, std::size_t bytes);
void write_device(void* data, const void* from, std::size_t bytes);
void read_device(void* to, const void* data, std::size_t bytes);

// Owned physical memory of one device. Move-only; releasing it while a mapping lives is safe (the
// driver keeps the pages until the last mapping goes).
class Allocation {
 public:
  Allocation() = default;
  ~Allocation();
  Allocation(Allocation&& other) noexcept { swap(other); }
  Allocation& operator=(Allocation&& other) noexcept {
    swap(other);
    return *this;
  }

  // At least `bytes` of memory of `device`, in whole granules, exportable as a descriptor. The
  // content is undefined: whoever relies on zeros clears it. Throws kResourceExhausted when the
  // device has not enough.
  static Allocation create(std::size_t bytes, int device);
  // The memory behind a descriptor that another process exported, seen from `device` (any device of
  // this process that may access it). The descriptor stays the caller's: close it when this
  // returns. `bytes` is the exporter's bytes(). Throws kBackend when the descriptor is no such
  // memory.
  static Allocation import(int descriptor, std::size_t bytes, int device);

  // A new file descriptor of this memory, close-on-exec; the caller closes it.
  int export_descriptor() const;

  std::size_t bytes() const { return bytes_; }
  CUmemGenericAllocationHandle handle() const { return handle_; }
  explicit operator bool() const { return bytes_ != 0; }

 private:
  void swap(Allocation& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(bytes_, other.bytes_);
  }
  CUmemGenericAllocationHandle handle_ = 0;
  std::size_t bytes_ = 0;
};

// One address range over an Allocation with access for exactly one device. Each accessor gets a
// mapping of its own, so granting a peer access never touches the owner's page attributes.
// Move-only. The range must be idle (no kernel or copy in flight) when it is destroyed: the window
// sees to that.
class Mapping {
 public:
  Mapping() = default;
  ~Mapping();
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }
  static Mapping create(const Allocation& memory, int accessor);

  std::byte* data() const { return reinterpret_cast<std::byte*>(base_); }
  std::size_t bytes() const { return bytes_; }

 private:
  void swap(Mapping& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
  }
  CUdeviceptr base_ = 0;
  std::size_t bytes_ = 0;
};

// Pinned host memory at the same address for host and kernels of every device, zeroed. Move-only.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(std::size_t bytes);
  ~PinnedMemory();
  PinnedMemory(PinnedMemory&& other) noexcept { swap(other); }
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  void swap(PinnedMemory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace penstock::cuda
