// Mailboxes of the packet all-reduce in a device window.
#pragma once

#include <cstdint>
#include <memory>

#include "core/cuda/device_buffer.h"
#include "fabric/cuda/device_rank.h"
#include "penstock/fabric/all_reduce.h"
#include "penstock/fabric/device_views.h"

namespace penstock::cuda {

class DevicePackets {
 public:
  // Collective. `capacity`: packets (12 bytes of payload each) of the largest call, e.g. rows *
  // hidden / 6 for bf16.
  DevicePackets(std::shared_ptr<DeviceRank> rank, std::uint64_t capacity);
  DevicePackets(const DevicePackets&) = delete;
  DevicePackets& operator=(const DevicePackets&) = delete;

  const PacketView& view() const noexcept { return view_; }
  const std::shared_ptr<Window>& window() const noexcept { return window_; }
  const std::shared_ptr<DeviceRank>& rank() const noexcept { return rank_; }

 private:
  std::shared_ptr<DeviceRank> rank_;
  std::shared_ptr<Window> window_;
  DeviceBuffer<Packet*> tables_;  // [3 regions][ranks]
  PacketView view_;
};

}  // namespace penstock::cuda
