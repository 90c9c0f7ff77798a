// The CPU's copy engine: one thread that drains the same descriptor ring as the CUDA host proxy,
// merges the same way, and keeps the same order, with timings as bad as a test asks for.
#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>
#include <system_error>
#include <thread>

#include "fabric/cpu/transports.h"
#include "fabric/transport_checks.h"
#include "penstock/core/error.h"
#include "penstock/fabric/guard.h"
#include "penstock/fabric/signal.h"

namespace penstock::detail {
namespace {

class CpuCopyEngine final : public Transport, public RearmHook {
 public:
  CpuCopyEngine(std::shared_ptr<Window> window, const CpuEngineOptions& options)
      : window_(std::move(window)),
        options_(options),
        guard_(window_->team()),
        ring_(options.ring_slots),
        merger_(window_->team()->size(), options.max_merge_bytes),
        random_(options.seed) {
    try {
      thread_ = std::thread([this] { serve(); });
    } catch (const std::system_error& error) {
      throw Error(ErrorKind::kResourceExhausted,
                  fmt::format("could not start the copy engine's thread: {}", error.what()));
    }
    window_->add_user(this);
    window_->team()->add_hook(this);
  }

  ~CpuCopyEngine() override {
    window_->team()->remove_hook(this);
    window_->remove_user(this);
    {
      const std::scoped_lock lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  TransportKind kind() const noexcept override { return TransportKind::kCopyEngine; }
  const std::shared_ptr<Window>& window() const noexcept override { return window_; }

  void put(const PutDescriptor& put) override {
    check_put(*window_, put, "copy_engine");
    window_->team()->check();
    const std::uint64_t position = control_.head;
    WaitSite site;
    site.peer = put.peer;
    site.cause = FaultCause::kRingFull;
    guard_.wait_until(
        [&] { return ring_has_room(position, load_signal(&control_.tail), options_.ring_slots); },
        [&] { return load_signal(&control_.tail); }, position + 1 - options_.ring_slots, site);
    RingSlot& slot = ring_[ring_index(position, options_.ring_slots)];
    slot.put = put;
    control_.head = position + 1;
    store_signal(&slot.sequence, position + 1);
    // The lock pairs with the engine's look at the ring before it sleeps: no wake-up is lost.
    { const std::scoped_lock lock(mutex_); }
    wake_.notify_one();
  }

  void flush() override {}  // nothing is held back: the engine takes whatever the ring holds

  void quiet() override {
    // A peer that has left is not waited for: its memory stays mapped and the engine still
    // delivers.
    WaitSite site;
    const auto name_peer = [&] {
      const int busy = busy_with_.load(std::memory_order_relaxed);
      site.peer = busy >= 0 && !window_->team()->gone(busy) ? busy : -1;
    };
    name_peer();
    guard_.wait_until(
        [&] {
          name_peer();
          return epoch_reached(load_signal(&control_.done), control_.head);
        },
        [&] { return load_signal(&control_.done); }, control_.head, site);
    window_->team()->check();
  }

  void count_direct(std::uint64_t bytes) noexcept override {
    TransportCounters done;
    done.direct_bytes = bytes;
    counters_.add(done);
  }
  TransportCounters counters() const noexcept override { return counters_.read(); }

  // Throws away what is queued and waits for the copy in progress.
  void quiesce() override {
    std::unique_lock lock(mutex_);
    discard_ = true;
    wake_.notify_all();
    const auto limit = window_->team()->deadline();
    if (!idle_.wait_for(lock, limit, [&] { return discarded_; })) {
      FaultRecord record;
      record.rank = window_->team()->rank();
      record.peer = busy_with_.load(std::memory_order_relaxed);
      record.waited_ns = static_cast<std::uint64_t>(limit.count());
      record.cause = static_cast<std::uint32_t>(FaultCause::kTransport);
      record.valid = 1;
      throw Fault(record, "the copy engine did not stop for a rearm");
    }
  }
  std::uint64_t highest_epoch() const override { return kNoEpoch; }  // it makes none of its own
  void resume(std::uint64_t) override {
    const std::scoped_lock lock(mutex_);
    store_signal(&control_.done, control_.head);
    discard_ = discarded_ = false;
    options_.fail_after_copies = -1;
    options_.stall_after_copies = -1;
    wake_.notify_all();
  }

 private:
  bool ring_ready() {
    return load_signal(&ring_[ring_index(control_.tail, options_.ring_slots)].sequence) ==
           control_.tail + 1;
  }
  bool stalled() const {
    return options_.stall_after_copies >= 0 && copies_ >= options_.stall_after_copies;
  }

  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      // A stalled engine looks at nothing but stop and rearm.
      wake_.wait(lock, [&] {
        return stop_ || (discard_ && !discarded_) ||
               (!discard_ && !stalled() && (ring_ready() || !merger_.empty()));
      });
      if (stop_) return;
      if (discard_) {
        drop_all();
        discarded_ = true;
        idle_.notify_all();
        continue;
      }
      lock.unlock();
      drain_ring();
      if (!merger_.empty()) execute(pick());
      lock.lock();
    }
  }

  void drain_ring() {
    while (ring_ready()) {
      merger_.push(ring_[ring_index(control_.tail, options_.ring_slots)].put);
      store_signal(&control_.tail, control_.tail + 1);
    }
  }

  // Only with the producer inside quiesce().
  void drop_all() {
    while (ring_ready()) store_signal(&control_.tail, control_.tail + 1);
    merger_.clear();
  }

  MergedCopy pick() {
    if (!options_.reorder_peers) return merger_.next();
    const int ranks = window_->team()->size();
    int peer = static_cast<int>(random_() % static_cast<std::uint64_t>(ranks));
    while (!merger_.has(peer)) peer = (peer + 1) % ranks;
    return merger_.next_for(peer);
  }

  // Sleeps in pieces, so that a fault or the end does not wait for a long delay.
  void delay() {
    if (options_.max_delay.count() <= 0) return;
    auto left = std::chrono::nanoseconds(static_cast<std::int64_t>(
        random_() % static_cast<std::uint64_t>(options_.max_delay.count() + 1)));
    while (left.count() > 0 && !window_->team()->faulted()) {
      {
        const std::scoped_lock lock(mutex_);
        if (stop_) return;
      }
      const auto nap = std::min<std::chrono::nanoseconds>(left, std::chrono::milliseconds(10));
      std::this_thread::sleep_for(nap);
      left -= nap;
    }
  }

  void execute(const MergedCopy& copy) {
    Team& team = *window_->team();
    busy_with_.store(copy.peer, std::memory_order_relaxed);
    delay();
    if (options_.fail_after_copies >= 0 && copies_ >= options_.fail_after_copies) {
      FaultRecord record;
      record.rank = team.rank();
      record.peer = copy.peer;
      record.region = window_->layout().region_at(copy.dst_offset);
      record.cause = static_cast<std::uint32_t>(FaultCause::kTransport);
      team.raise(record);
    }
    // Nothing of a faulted call is published: neither data into a window that may be given back,
    // nor a signal for data that did not come.
    if (!team.faulted()) {
      TransportCounters done;
      std::byte* peer = window_->base(copy.peer);
      if (copy.bytes > 0) {
        std::memmove(peer + copy.dst_offset, window_->local() + copy.src_offset, copy.bytes);
        done.puts = copy.puts;
        done.copies = 1;
        done.bytes = copy.bytes;
        ++copies_;
      }
      for (const auto& [offset, epoch] : copy.signals) {
        store_signal(reinterpret_cast<std::uint64_t*>(peer + offset), epoch);
      }
      done.signals = copy.signals.size();
      counters_.add(done);
    }
    busy_with_.store(-1, std::memory_order_relaxed);
    store_signal(&control_.done, control_.done + copy.positions);
  }

  std::shared_ptr<Window> window_;
  CpuEngineOptions options_;
  Guard guard_;
  RingControl control_;
  std::vector<RingSlot> ring_;
  DescriptorMerger merger_;  // engine thread only
  std::mt19937_64 random_;   // engine thread only
  std::int64_t copies_ = 0;  // engine thread only
  std::atomic<int> busy_with_{-1};
  SharedCounters counters_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  bool stop_ = false;
  bool discard_ = false;
  bool discarded_ = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Transport> make_cpu_copy_engine(std::shared_ptr<Window> window,
                                                const CpuEngineOptions& options) {
  const std::uint64_t slots = options.ring_slots;
  require(
      slots >= 2 && slots <= 65536 && (slots & (slots - 1)) == 0, ErrorKind::kInvalidArgument,
      [&] { return fmt::format("a ring of {} slots: give a power of two, 2 to 65536", slots); });
  require(options.max_merge_bytes >= 1, ErrorKind::kInvalidArgument,
          [] { return std::string("max_merge_bytes is 0: give at least 1"); });
  require(options.max_delay.count() >= 0, ErrorKind::kInvalidArgument,
          [] { return std::string("max_delay is negative: give 0 or more"); });
  return std::make_unique<CpuCopyEngine>(std::move(window), options);
}

}  // namespace penstock::detail
