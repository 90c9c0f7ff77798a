// Transports: how bytes get from one rank's window into another's. One interface, three kinds, each
// of which counts what it moved, so that no path can pass for another.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/fabric/protocol.h"
#include "penstock/fabric/window.h"

namespace penstock {

enum class TransportKind : std::uint8_t {
  kCopyEngine,  // cuda: copy engines driven by a host proxy; cpu: a DMA thread
  kSm,          // cuda: CTAs that copy; cpu: the calling thread copies
  kDirect,  // stores by the producer itself; put() is refused, put_signal() carries signals only
};
std::string_view to_string(TransportKind kind);  // "copy_engine", "sm", "direct"
// InvalidArgument naming the three words otherwise.
TransportKind parse_transport(std::string_view text);

// What a transport has done since its creation, on this rank. Completed work only.
struct TransportCounters {
  std::uint64_t puts = 0;          // descriptors with data
  std::uint64_t copies = 0;        // copies after merging; copies <= puts
  std::uint64_t bytes = 0;         // moved by the transport itself
  std::uint64_t direct_bytes = 0;  // announced by producers through count_direct()
  std::uint64_t signals = 0;       // signal words written
};

// One rank's transport on one window. Calls from one thread of the rank at a time unless said
// otherwise. Errors: InvalidArgument for a peer, range or alignment outside the window, naming it;
// Fault as everywhere.
//
// Order. Puts to one peer arrive in the order of their calls; puts to different peers in any order.
// A signal becomes visible (release) after the data of its own put and of every earlier put to that
// peer. Sources may be rewritten after quiet() or after the receiver's answer.
class Transport : public WindowUser {
 public:
  virtual TransportKind kind() const noexcept = 0;
  virtual const std::shared_ptr<Window>& window() const noexcept = 0;

  // Enqueues one put (see PutDescriptor) and returns. May hold it back to merge it with adjacent
  // ones; flush() or any wait on this transport sends it. Throws Fault (kRingFull) if the queue
  // stays full until the deadline.
  virtual void put(const PutDescriptor& descriptor) = 0;
  // Hands on everything held back, so that it proceeds without further calls. Does not wait.
  virtual void flush() = 0;
  // Waits until every earlier put of this rank is visible at its peer, signals included. After it
  // the sources may be rewritten. Throws Fault at the deadline, or kTransport if a copy failed.
  virtual void quiet() = 0;
  // Bytes that the producer stored itself (kDirect), for the books. Any thread.
  virtual void count_direct(std::uint64_t bytes) noexcept = 0;
  // Any thread.
  virtual TransportCounters counters() const noexcept = 0;

  // put() of a signal alone: `epoch` into the word at signal_offset of peer's window, after every
  // earlier put to that peer. On kDirect: release after this thread's own earlier stores.
  void signal(int peer, std::uint64_t signal_offset, std::uint64_t epoch);

  void drain() override { quiet(); }
};

// Settings of the CPU copy engine. The defaults move bytes at once; tests make timing hostile.
struct CpuEngineOptions {
  std::uint64_t ring_slots = 1024;          // power of two, 2 .. 65536
  std::uint64_t max_merge_bytes = 8 << 20;  // a merged copy never exceeds it
  std::chrono::nanoseconds max_delay{0};    // each copy is delayed by 0 .. this, at random
  bool reorder_peers = false;               // serve peers in random order (never within a peer)
  std::uint64_t seed = 1;                   // of delays and orders
  std::int64_t fail_after_copies = -1;      // >= 0: the copy after that many fails (kTransport)
  std::int64_t stall_after_copies = -1;     // >= 0: serves nothing after that many, until rearm
};

// A transport on a CPU window. kCopyEngine owns one thread, which sleeps when idle; destruction
// completes nothing and waits for nothing but the copy in progress. Not collective. InvalidArgument
// if the window is not a CPU window or an option is out of range.
std::unique_ptr<Transport> make_cpu_transport(TransportKind kind, std::shared_ptr<Window> window,
                                              const CpuEngineOptions& engine = {});

// ---- merging, shared by the CPU engine and the CUDA host proxy --------------------------------

// One copy made of adjacent puts, with the signals that follow it.
struct MergedCopy {
  std::int32_t peer = -1;
  std::uint64_t src_offset = 0;
  std::uint64_t dst_offset = 0;
  std::uint64_t bytes = 0;      // 0: signals alone
  std::uint32_t puts = 0;       // descriptors with data that it covers
  std::uint32_t positions = 0;  // descriptors that it covers
  std::vector<std::pair<std::uint64_t, std::uint64_t>> signals;  // (offset, epoch), one a word
};

// Sorts ready descriptors by peer and merges neighbours: two puts to one peer become one copy when
// source and destination both continue and the sum stays within max_merge_bytes. A signal moves
// behind the merged copy, never before its data; two signals to one word keep the larger epoch.
// Host only, single-threaded, allocates.
class DescriptorMerger {
 public:
  explicit DescriptorMerger(int ranks, std::uint64_t max_merge_bytes = 8 << 20);
  void push(const PutDescriptor& descriptor);
  bool empty() const noexcept { return pending_ == 0; }
  std::size_t pending() const noexcept { return pending_; }
  // Takes the next copy, rotating over the peers that have work. empty() must be false.
  MergedCopy next();
  // The same for one peer that has work.
  MergedCopy next_for(int peer);
  bool has(int peer) const;
  void clear();

 private:
  std::uint64_t max_merge_bytes_;
  std::vector<std::vector<PutDescriptor>> queue_;  // [ranks]
  std::vector<std::size_t> front_;                 // [ranks] consumed entries of queue_
  std::size_t pending_ = 0;
  int turn_ = 0;
};

}  // namespace penstock
