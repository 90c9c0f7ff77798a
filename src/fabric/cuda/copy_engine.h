// Transport copy_engine on CUDA: puts posted by kernels or by the host, moved by the GPU's copy
// engine, which the proxy thread drives.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "fabric/cuda/device_rank.h"
#include "penstock/fabric/device_views.h"
#include "penstock/fabric/guard.h"
#include "penstock/fabric/transport.h"

namespace penstock::cuda {

struct CopyEngineOptions {
  std::uint64_t ring_slots =
      1024;  // power of two, 2 .. 65536; of the kernels' ring and of the host's
  // A merged copy never exceeds it: it delays other peers' signals, 24 MB by 64 us over NVLink.
  // Holds a burst of 16 chunks of 1.44 MB.
  std::uint64_t max_merge_bytes = 24 << 20;
  // What becomes ready while the engine is busy stays in the ring, where it still merges, until the
  // work in front of it is expected to end within this time: long enough to submit the next copy
  // without a gap, not longer.
  std::chrono::nanoseconds lead{6000};
};

class DeviceCopyEngine : public Transport, public RearmHook, private ProxyClient {
 public:
  // Not collective. `window` must be made with the cuda back end on rank->device().
  DeviceCopyEngine(std::shared_ptr<DeviceRank> rank, std::shared_ptr<Window> window,
                   const CopyEngineOptions& options = {});
  ~DeviceCopyEngine() override;

  TransportKind kind() const noexcept override { return TransportKind::kCopyEngine; }
  const std::shared_ptr<Window>& window() const noexcept override { return window_; }
  // Posts from the host, at once (not in any stream's order): the data must be complete. Does not
  // touch the device.
  void put(const PutDescriptor& descriptor) override;
  void flush() override { rank_->proxy()->wake(); }
  // Also covers what kernels have posted so far.
  void quiet() override;
  void count_direct(std::uint64_t bytes) noexcept override { direct_bytes_.fetch_add(bytes); }
  TransportCounters counters() const noexcept override;

  void quiesce() override;
  std::uint64_t highest_epoch() const override { return kNoEpoch; }
  void resume(std::uint64_t floor) override;

  // For post() in transport_device.cuh.
  RingView ring_view() const;
  std::int32_t op() const noexcept { return op_; }

 private:
  // A ring and what the consumer knows of it.
  struct Ring {
    PinnedMemory memory;  // RingControl, then the slots
    std::uint64_t next = 0;
    RingControl* control() const { return memory.as<RingControl>(); }
    RingSlot* slots() const { return reinterpret_cast<RingSlot*>(control() + 1); }
  };
  // Submitted, not yet known to be done: everything up to `position` of `ring`.
  struct Batch {
    cudaEvent_t event = nullptr;
    Ring* ring = nullptr;
    std::uint64_t position = 0;
    TransportCounters add;
  };
  struct Taken {
    PutDescriptor put;
    std::uint64_t position = 0;
  };

  bool serve() noexcept override;
  bool busy() const noexcept override { return busy_.load(std::memory_order_relaxed); }
  bool retire();
  bool ready(const Ring& ring) const;
  bool take(Ring& ring, bool from_kernels);
  std::size_t collect(Ring& ring);
  void expect_busy(const MergedCopy& copy);
  bool copy_locally(const MergedCopy& copy, TransportCounters& add);
  void submit(const MergedCopy& copy, const Ring& ring, bool from_kernels, TransportCounters& add);
  static void publish(Ring& ring, std::uint64_t position) noexcept;
  std::uint64_t position_of(int peer, std::uint64_t offset, std::uint64_t epoch) const;
  bool succeeded(cudaError_t status, int peer) noexcept;
  bool succeeded(CUresult status, int peer) noexcept;
  void fail(int peer, std::uint64_t expected, std::uint64_t seen) noexcept;
  std::uint64_t posted_by_kernels();
  bool done_up_to(std::uint64_t kernels, std::uint64_t host) const;

  std::shared_ptr<DeviceRank> rank_;
  std::shared_ptr<Window> window_;
  std::shared_ptr<DeviceWindowMapping> mapping_;
  CopyEngineOptions options_;
  std::int32_t op_;
  Guard guard_;
  Ring kernels_;
  Ring host_;
  // Device: head, tail_seen and the arrivals of local copies (a line each), then the signal cells.
  std::uint64_t* words_ = nullptr;
  DescriptorMerger merger_;
  std::vector<Taken> taken_;
  std::deque<Batch> in_flight_;
  std::chrono::steady_clock::time_point busy_until_{};  // estimate for what is in flight
  std::vector<cudaEvent_t> free_events_;
  std::atomic<bool> busy_{false};
  std::atomic<bool> failed_{false};
  std::atomic<std::uint64_t> puts_{0}, copies_{0}, bytes_{0}, direct_bytes_{0}, signals_{0};
};

}  // namespace penstock::cuda
