#pragma once

#include <atomic>
#include <memory>

#include "penstock/fabric/transport.h"

namespace penstock::detail {

std::unique_ptr<Transport> make_cpu_copy_engine(std::shared_ptr<Window> window,
                                                const CpuEngineOptions& options);
std::unique_ptr<Transport> make_cpu_sm_transport(std::shared_ptr<Window> window);
std::unique_ptr<Transport> make_cpu_direct_transport(std::shared_ptr<Window> window);

// TransportCounters that several threads add to.
class SharedCounters {
 public:
  void add(const TransportCounters& more) noexcept {
    puts_.fetch_add(more.puts, std::memory_order_relaxed);
    copies_.fetch_add(more.copies, std::memory_order_relaxed);
    bytes_.fetch_add(more.bytes, std::memory_order_relaxed);
    direct_bytes_.fetch_add(more.direct_bytes, std::memory_order_relaxed);
    signals_.fetch_add(more.signals, std::memory_order_relaxed);
  }
  TransportCounters read() const noexcept {
    return {puts_.load(std::memory_order_relaxed), copies_.load(std::memory_order_relaxed),
            bytes_.load(std::memory_order_relaxed), direct_bytes_.load(std::memory_order_relaxed),
            signals_.load(std::memory_order_relaxed)};
  }

 private:
  std::atomic<std::uint64_t> puts_{0};
  std::atomic<std::uint64_t> copies_{0};
  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<std::uint64_t> direct_bytes_{0};
  std::atomic<std::uint64_t> signals_{0};
};

}  // namespace penstock::detail
