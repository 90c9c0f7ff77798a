// Transports sm and direct on CUDA, as the host posts to them.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "core/cuda/device_buffer.h"
#include "core/cuda/stream.h"
#include "fabric/cuda/attachments.h"
#include "fabric/cuda/device_rank.h"
#include "fabric/cuda/put_sm90.h"
#include "penstock/fabric/guard.h"
#include "penstock/fabric/transport.h"

namespace penstock::cuda {

// sm: every put is a launch of copy CTAs. direct: kernels store by themselves (put_block,
// signal_block), this object keeps the books; put() with data is refused. Kernels that copy with
// CTAs of their own use the same device functions and report through count_direct().
class DeviceSmTransport : public Transport, public RearmHook {
 public:
  // Not collective. kind: kSm or kDirect. blocks: CTAs of one copy, 1 .. rank->sms().
  DeviceSmTransport(TransportKind kind, std::shared_ptr<DeviceRank> rank,
                    std::shared_ptr<Window> window, int blocks = kSmPutBlocks);
  ~DeviceSmTransport() override;

  TransportKind kind() const noexcept override { return kind_; }
  const std::shared_ptr<Window>& window() const noexcept override { return window_; }
  void put(const PutDescriptor& descriptor) override;
  void flush() override;
  void quiet() override;
  void count_direct(std::uint64_t bytes) noexcept override { direct_bytes_.fetch_add(bytes); }
  TransportCounters counters() const noexcept override;

  // RearmHook: what was launched ends (copies wait for nobody) and is counted; what was held back
  // to be merged belongs to the fault and is dropped.
  void quiesce() override;
  std::uint64_t highest_epoch() const override { return kNoEpoch; }
  void resume(std::uint64_t floor) override;

 private:
  void settle() noexcept;  // what was launched is done: into the books

  TransportKind kind_;
  std::shared_ptr<DeviceRank> rank_;
  std::shared_ptr<Window> window_;
  int blocks_;
  std::int32_t op_;
  Guard guard_;
  DescriptorMerger merger_;
  DeviceBuffer<std::uint32_t> arrivals_;
  std::optional<OwnedStream> stream_;
  std::optional<OwnedEvent> event_;
  TransportCounters pending_;  // launched, not known to be done
  std::atomic<std::uint64_t> puts_{0}, copies_{0}, bytes_{0}, direct_bytes_{0}, signals_{0};
  // Last, since these make the object visible to others.
  std::optional<HookPlace> hook_;
  std::optional<UserPlace> user_;
};

}  // namespace penstock::cuda
