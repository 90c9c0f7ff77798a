// Signals on the host: loads and stores of 64-bit epoch words, each named after the order it gives.
// The device twin is signal_device.cuh. A word has one writer; values only grow (protocol.h).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "penstock/fabric/protocol.h"

namespace penstock {

// Publishes: everything that this thread wrote before is visible to whoever sees the epoch with
// load_signal(). Release at system scope.
inline void store_signal(std::uint64_t* word, std::uint64_t epoch) noexcept {
  std::atomic_ref<std::uint64_t>(*word).store(epoch, std::memory_order_release);
}
// Orders nothing: for words that carry no data with them (progress counters, hints).
inline void store_signal_relaxed(std::uint64_t* word, std::uint64_t epoch) noexcept {
  std::atomic_ref<std::uint64_t>(*word).store(epoch, std::memory_order_relaxed);
}
// Sees what was published before the epoch that it returns. Acquire at system scope.
inline std::uint64_t load_signal(const std::uint64_t* word) noexcept {
  return std::atomic_ref<std::uint64_t>(*const_cast<std::uint64_t*>(word))
      .load(std::memory_order_acquire);
}
// Orders nothing: for polling; follow the one that hits with load_signal() before reading data.
inline std::uint64_t load_signal_relaxed(const std::uint64_t* word) noexcept {
  return std::atomic_ref<std::uint64_t>(*const_cast<std::uint64_t*>(word))
      .load(std::memory_order_relaxed);
}

// Counts calls: one per window, so that operators that share a window continue each other's epochs.
// One rank, one thread at a time.
class EpochCounter {
 public:
  // The epoch of the next call.
  std::uint64_t next() noexcept { return ++last_; }
  std::uint64_t last() const noexcept { return last_; }
  // Continues above `floor` (after a rearm; in tests near a wrap). Never goes back.
  void advance_to(std::uint64_t floor) noexcept {
    if (floor > last_) last_ = floor;
  }

 private:
  std::uint64_t last_ = kNoEpoch;
};

}  // namespace penstock
