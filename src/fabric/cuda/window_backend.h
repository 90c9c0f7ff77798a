// Windows in device memory. The public interface is Window with the backend made here.
#pragma once

#include <memory>
#include <vector>

#include "fabric/cuda/memory.h"
#include "penstock/fabric/window.h"

namespace penstock::cuda {

// One rank's view of a device window: its own part, and a mapping of each peer's part for its own
// device.
class DeviceWindowMapping : public WindowMapping {
 public:
  std::byte* base(int rank) const noexcept override {
    return bases_[static_cast<std::size_t>(rank)];
  }
  std::uint64_t bytes() const noexcept override { return bytes_; }
  // Device of this rank.
  int device() const noexcept { return device_; }
  // Whether `rank`'s part lies in this rank's own device (always true for the rank itself). Two
  // processes on one GPU count: copies between them are local copies.
  bool same_device(int rank) const noexcept { return same_device_[static_cast<std::size_t>(rank)]; }
  // bases() in device memory, for WindowView: [ranks] addresses valid on device().
  std::byte* const* device_bases() const noexcept { return device_bases_; }

  ~DeviceWindowMapping() override;

 private:
  friend class DeviceWindowBackend;
  DeviceWindowMapping() = default;

  // Physical memory of one rank with the owner's mapping. In-process ranks share it, so that it
  // lives until the last of them is gone.
  struct Part {
    Allocation memory;
    Mapping mapping;
    int device = -1;
  };
  std::vector<std::shared_ptr<Part>> parts_;  // [ranks], in-process teams; own part only otherwise
  std::vector<Allocation> imported_;          // descriptors of other processes
  std::vector<Mapping> mappings_;             // peers' parts, mapped for this device
  std::vector<std::byte*> bases_;             // [ranks]
  std::vector<bool> same_device_;             // [ranks]
  std::byte** device_bases_ = nullptr;
  std::uint64_t bytes_ = 0;
  int device_ = -1;
};

// Windows of this rank in `device`'s memory: VMM allocations of whole granules with POSIX
// descriptors, one mapping for each accessor. Refuses (Unsupported, naming the pair) GPUs that
// cannot reach each other or lack native peer atomics.
std::shared_ptr<WindowBackend> device_window_backend(int device);

// The device mapping behind a window; throws InvalidArgument if the window lives in host memory.
std::shared_ptr<DeviceWindowMapping> device_mapping(const Window& window);

}  // namespace penstock::cuda
