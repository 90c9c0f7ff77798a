// Transport copy_engine on CUDA: puts posted by kernels or by the host, moved by the GPU's copy
// engine, which the proxy thread drives.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/cuda/device_buffer.h"
#include "core/cuda/stream.h"
#include "fabric/cuda/attachments.h"
#include "fabric/cuda/device_rank.h"
#include "fabric/cuda/put_graph.h"
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
  // Submitted, not yet known to be done: everything up to `position` of `ring`. What marks the end
  // is the done word where the last copy is a kernel of our own, which stores it, and else an event
  // (whose queries cost the proxy 0.4 us each, 0.8 us of the next put's latency).
  struct Batch {
    std::optional<OwnedEvent> event;
    bool by_word = false;
    std::uint64_t number = 0;
    Ring* ring = nullptr;
    std::uint64_t position = 0;
    TransportCounters add;
  };
  struct Taken {
    PutDescriptor put;
    std::uint64_t position = 0;
  };
  using TimePoint = std::chrono::steady_clock::time_point;

  bool serve(TimePoint now) noexcept override;
  bool busy() const noexcept override { return busy_.load(std::memory_order_relaxed); }
  bool retire(TimePoint now) noexcept;
  bool ended(const Batch& batch, TimePoint now) noexcept;
  bool ready(const Ring& ring) const noexcept;
  bool take(Ring& ring, TimePoint now) noexcept;
  void submit_all(Ring& ring, Batch& batch, TimePoint now);
  void collect(Ring& ring);
  void expect_busy(const MergedCopy& copy, TimePoint now);
  bool is_local(const MergedCopy& copy) const;
  bool copy_locally(const MergedCopy& copy, Batch& batch);
  void submit(const MergedCopy& copy, const Ring& ring, TransportCounters& add);
  static void publish(Ring& ring, std::uint64_t position) noexcept;
  std::uint64_t position_of(int peer, std::uint64_t offset, std::uint64_t epoch) const;
  bool succeeded(cudaError_t status, int peer) noexcept;
  bool succeeded(CUresult status, int peer) noexcept;
  // Puts the team into a fault and `words` into the log.
  void fail(int peer, std::uint64_t expected, std::uint64_t seen, std::string_view words) noexcept;
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
  PinnedMemory done_;  // the word that local copies store
  std::optional<PutGraph> local_put_;
  // Device: head, tail_seen and the arrivals of local copies (a line each), then the signal cells.
  DeviceBuffer<std::uint64_t> words_;
  DescriptorMerger merger_;
  std::vector<Taken> taken_;
  // Two keep the engine busy; what becomes ready behind them waits in the ring, where it still
  // merges, rather than in the stream, where each chunk pays the engine's start (2.4 us a copy).
  std::array<Batch, 2> batches_;
  std::uint64_t submitted_ = 0;  // batches, each at its number's place in batches_
  std::uint64_t retired_ = 0;
  Ring* first_ = &kernels_;  // served before the other ring
  TimePoint busy_until_{};   // estimate for what is in flight
  TimePoint checked_{};      // when the stream was last asked for an error
  std::atomic<bool> busy_{false};
  std::atomic<bool> failed_{false};
  std::atomic<std::uint64_t> puts_{0}, copies_{0}, bytes_{0}, direct_bytes_{0}, signals_{0};
  // Last, since these make the object visible to others.
  std::optional<HookPlace> hook_;
  std::optional<UserPlace> user_;
  std::optional<ProxyPlace> place_;
};

}  // namespace penstock::cuda
