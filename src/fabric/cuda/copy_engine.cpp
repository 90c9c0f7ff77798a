#include "fabric/cuda/copy_engine.h"

#include <cuda.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <thread>

#include "core/cuda/check.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/put_sm90.h"
#include "fabric/transport_checks.h"
#include "penstock/core/error.h"
#include "penstock/core/log.h"
#include "penstock/fabric/signal.h"

namespace penstock::cuda {
namespace {

using Clock = std::chrono::steady_clock;

// Batches submitted and not known to be done. Two keep the engine busy; what becomes ready behind
// them waits here, where it still merges, rather than in the stream, where each chunk pays the
// engine's start (2.4 us a copy).
constexpr std::size_t kEvents = 2;
// What a copy is expected to take, for the decision when to submit the next: measured on H200
// (peer: 2.4 us + bytes / 390 GB/s over NVLink; within a GPU 3.7 us + bytes / 2000 GB/s). An
// estimate that is too short costs merging, one that is too long a gap.
constexpr std::chrono::nanoseconds kPeerStart{2400};
constexpr double kPeerBytesPerNs = 390.0;
constexpr std::chrono::nanoseconds kLocalStart{3700};
constexpr double kLocalBytesPerNs = 2000.0;
// Between ranks that share a GPU the driver's copies are kernels too (none starts while every
// thread slot is taken), so up to this size the proxy launches one of its own, which carries the
// signal: one launch instead of a copy and a write that waits for it. Small CTAs, to fit beside
// others.
constexpr std::uint64_t kLocalLaunchBytes = 1 << 20;
constexpr int kLocalThreads = 128;
constexpr std::uint64_t kLocalBytesPerBlock = 16 << 10;
constexpr std::size_t kHeadLine = 0, kTailSeenLine = 1, kArrivalsLine = 2, kLines = 3;
// Descriptors taken at once: what becomes ready while one submission is made (about 2 us a copy).
constexpr std::size_t kTakeAtOnce = 64;
constexpr std::size_t kWordsPerLine = kDeviceLineBytes / sizeof(std::uint64_t);

}  // namespace

DeviceCopyEngine::DeviceCopyEngine(std::shared_ptr<DeviceRank> rank, std::shared_ptr<Window> window,
                                   const CopyEngineOptions& options)
    : rank_(std::move(rank)),
      window_(std::move(window)),
      mapping_(device_mapping(*window_)),
      options_(options),
      op_(rank_->team()->next_operator()),
      guard_(rank_->team(), op_),
      merger_(rank_->team()->size(), options.max_merge_bytes) {
  require(std::has_single_bit(options.ring_slots) && options.ring_slots >= 2 &&
              options.ring_slots <= 65536,
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format("a ring of {} slots: give a power of two from 2 to 65536",
                               options.ring_slots);
          });
  require(mapping_->device() == rank_->device(), ErrorKind::kInvalidArgument, [&] {
    return fmt::format("a window on GPU {} was given to a rank on GPU {}", mapping_->device(),
                       rank_->device());
  });
  const ScopedDevice scope(rank_->device());
  PENSTOCK_CUDA_CHECK(load_sm_put());
  const std::size_t ring_bytes = sizeof(RingControl) + options.ring_slots * sizeof(RingSlot);
  for (Ring* ring : {&kernels_, &host_}) ring->memory = PinnedMemory(ring_bytes);
  const std::size_t words = kLines * kWordsPerLine + options.ring_slots;
  PENSTOCK_CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&words_), words * sizeof(std::uint64_t)));
  zero_device(words_, words * sizeof(std::uint64_t));
  for (std::size_t i = 0; i < kEvents; ++i) {
    cudaEvent_t event = nullptr;
    PENSTOCK_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    free_events_.push_back(event);
  }
  taken_.reserve(kTakeAtOnce);
  rank_->team()->add_hook(this);
  window_->add_user(this);
  rank_->proxy()->attach(this);
}

DeviceCopyEngine::~DeviceCopyEngine() {
  rank_->proxy()->detach(this);
  window_->remove_user(this);
  rank_->team()->remove_hook(this);
  // What was submitted completes by itself; its sources and targets are the window's, which its
  // mapping keeps alive until the stream is past them.
  if (!in_flight_.empty()) (void)cudaEventSynchronize(in_flight_.back().event);
  for (const Batch& batch : in_flight_) (void)cudaEventDestroy(batch.event);
  for (cudaEvent_t event : free_events_) (void)cudaEventDestroy(event);
  if (words_ != nullptr) (void)cudaFree(words_);
}

RingView DeviceCopyEngine::ring_view() const {
  RingView view;
  view.slots = kernels_.slots();
  view.tail = &kernels_.control()->tail;
  view.head = words_ + kHeadLine * kWordsPerLine;
  view.tail_seen = words_ + kTailSeenLine * kWordsPerLine;
  view.signal_cells = words_ + kLines * kWordsPerLine;
  view.capacity = options_.ring_slots;
  return view;
}

TransportCounters DeviceCopyEngine::counters() const noexcept {
  return {puts_.load(), copies_.load(), bytes_.load(), direct_bytes_.load(), signals_.load()};
}

// ---- the rank's thread: post and wait ---------------------------------------------------------

void DeviceCopyEngine::put(const PutDescriptor& descriptor) {
  detail::check_put(*window_, descriptor, "copy_engine");
  rank_->team()->check();  // what is posted behind a fault would be delivered by the rearm
  RingControl* control = host_.control();
  const std::uint64_t position = control->head;
  const auto give_up = Clock::now() + rank_->team()->deadline();
  while (!ring_has_room(position, load_signal(&control->tail), options_.ring_slots)) {
    rank_->team()->check();
    if (Clock::now() > give_up) {
      FaultRecord record;
      record.rank = rank_->team()->rank();
      record.peer = descriptor.peer;
      record.op = op_;
      record.expected = position;
      record.seen = load_signal(&control->tail);
      record.waited_ns = static_cast<std::uint64_t>(rank_->team()->deadline().count());
      record.cause = static_cast<std::uint32_t>(FaultCause::kRingFull);
      record.valid = 1;
      throw Fault(rank_->team()->raise(record), "the copy engine's ring stayed full");
    }
    std::this_thread::yield();
  }
  control->head = position + 1;
  RingSlot& slot = host_.slots()[ring_index(position, options_.ring_slots)];
  slot.put = descriptor;
  store_signal(&slot.sequence, position + 1);
  rank_->proxy()->wake();
}

std::uint64_t DeviceCopyEngine::posted_by_kernels() {
  const ScopedDevice scope(rank_->device());
  std::uint64_t posted = 0;
  read_device(&posted, words_ + kHeadLine * kWordsPerLine,
              sizeof(posted));  // one word by a copy engine: waits for no kernel
  return posted;
}

void DeviceCopyEngine::quiet() {
  const std::uint64_t kernels = posted_by_kernels();
  const std::uint64_t host = host_.control()->head;
  rank_->proxy()->wake();
  guard_.wait_until([&] { return done_up_to(kernels, host); },
                    [&] { return load_signal(&kernels_.control()->done); }, kernels,
                    {.peer = -1, .op = op_});
  rank_->team()->check();  // a failed copy retires its descriptors too
}

bool DeviceCopyEngine::done_up_to(std::uint64_t kernels, std::uint64_t host) const {
  return load_signal(&kernels_.control()->done) >= kernels &&
         load_signal(&host_.control()->done) >= host;
}

void DeviceCopyEngine::quiesce() {
  // DeviceRank's hook ran before: no kernel of this rank posts any more.
  const std::uint64_t kernels = posted_by_kernels();
  const std::uint64_t host = host_.control()->head;
  const auto give_up = Clock::now() + rank_->team()->deadline();
  while (!done_up_to(kernels, host)) {
    rank_->proxy()->wake();
    if (Clock::now() > give_up) {
      FaultRecord record;
      record.rank = record.peer = rank_->team()->rank();
      record.op = op_;
      record.expected = kernels;
      record.seen = load_signal(&kernels_.control()->done);
      record.waited_ns = static_cast<std::uint64_t>(rank_->team()->deadline().count());
      record.cause = static_cast<std::uint32_t>(FaultCause::kTransport);
      record.valid = 1;
      throw Fault(record, "copies of this rank did not end");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void DeviceCopyEngine::resume(std::uint64_t floor) {
  (void)floor;  // ring positions go on counting: a claimed position is always filled, so there is
                // no hole to skip
  failed_.store(false);
}

// ---- the proxy's thread -----------------------------------------------------------------------

bool DeviceCopyEngine::serve() noexcept {
  try {
    bool progress = retire();
    progress = take(kernels_, true) || progress;
    progress = take(host_, false) || progress;
    busy_.store(!in_flight_.empty(), std::memory_order_relaxed);
    return progress;
  } catch (const std::exception& error) {  // the host is out of memory, or the merger refuses
    log(LogLevel::kError, error.what());
    fail(-1, 0, 0);
    return true;
  }
}

bool DeviceCopyEngine::retire() {
  bool progress = false;
  while (!in_flight_.empty()) {
    const Batch& batch = in_flight_.front();
    const cudaError_t status = cudaEventQuery(batch.event);
    if (status == cudaErrorNotReady) break;
    if (status != cudaSuccess) {
      log(LogLevel::kError,
          fmt::format("GPU {}: copies failed: {}", rank_->device(), cudaGetErrorString(status)));
      fail(-1, batch.position, batch.ring->next);
    }
    puts_ += batch.add.puts;
    copies_ += batch.add.copies;
    bytes_ += batch.add.bytes;
    signals_ += batch.add.signals;
    publish(*batch.ring, batch.position);
    free_events_.push_back(batch.event);
    in_flight_.pop_front();
    if (in_flight_.empty()) busy_until_ = {};
    progress = true;
  }
  return progress;
}

void DeviceCopyEngine::publish(Ring& ring, std::uint64_t position) noexcept {
  // The signal cells of a slot are read by the engine until its batch is done, so a slot is given
  // back only then.
  store_signal(&ring.control()->done, position);
  store_signal(&ring.control()->tail, position);
}

bool DeviceCopyEngine::ready(const Ring& ring) const {
  const RingSlot& slot = ring.slots()[ring_index(ring.next, options_.ring_slots)];
  return load_signal(&slot.sequence) == ring.next + 1;
}

// Hands what is ready to the merger; returns how many descriptors were refused.
std::size_t DeviceCopyEngine::collect(Ring& ring) {
  taken_.clear();
  std::size_t bad = 0;
  while (taken_.size() < kTakeAtOnce && ready(ring)) {
    const RingSlot& slot = ring.slots()[ring_index(ring.next, options_.ring_slots)];
    const std::uint64_t position = ring.next++;
    try {
      detail::check_put(*window_, slot.put, "copy_engine");
    } catch (const Error& error) {  // a kernel cannot be thrown at: its team gets the fault, the
                                    // log the words
      log(LogLevel::kError, fmt::format("rank {}: {}", rank_->team()->rank(), error.what()));
      fail(slot.put.peer, position, 0);
      ++bad;
      continue;
    }
    taken_.push_back({slot.put, position});
    merger_.push(slot.put);
  }
  return bad;
}

void DeviceCopyEngine::expect_busy(const MergedCopy& copy) {
  const bool local = mapping_->same_device(copy.peer);
  const double transfer =
      static_cast<double>(copy.bytes) / (local ? kLocalBytesPerNs : kPeerBytesPerNs);
  busy_until_ = std::max(busy_until_, Clock::now()) + (local ? kLocalStart : kPeerStart) +
                std::chrono::nanoseconds(static_cast<std::int64_t>(transfer));
}

bool DeviceCopyEngine::take(Ring& ring, bool from_kernels) {
  if (free_events_.empty() || !ready(ring)) return false;
  if (!in_flight_.empty() && Clock::now() + options_.lead < busy_until_) return false;
  const std::size_t bad = collect(ring);
  if (taken_.empty() && bad == 0) return false;
  Batch batch;
  batch.ring = &ring;
  batch.position = ring.next;
  // After a failure nothing may pass for delivered: descriptors are taken, so that nobody waits for
  // room, and dropped.
  while (!merger_.empty() && !failed_.load(std::memory_order_relaxed)) {
    const MergedCopy copy = merger_.next();
    submit(copy, ring, from_kernels, batch.add);
    expect_busy(copy);
  }
  merger_.clear();
  batch.event = free_events_.back();
  free_events_.pop_back();
  in_flight_.push_back(batch);
  (void)succeeded(cudaEventRecord(batch.event, rank_->proxy()->stream()), -1);
  return true;
}

// Whether the copy was one for copy_locally(); a failure is on record then.
bool DeviceCopyEngine::copy_locally(const MergedCopy& copy, TransportCounters& add) {
  if (!mapping_->same_device(copy.peer) || copy.bytes == 0 || copy.bytes > kLocalLaunchBytes ||
      copy.signals.size() > 1) {
    return false;
  }
  std::byte* base = window_->base(copy.peer);
  SmPut put;
  put.dst = base + copy.dst_offset;
  put.src = window_->local() + copy.src_offset;
  put.bytes = copy.bytes;
  if (!copy.signals.empty()) {
    put.word = reinterpret_cast<std::uint64_t*>(base + copy.signals[0].first);
    put.epoch = copy.signals[0].second;
  }
  put.arrivals = reinterpret_cast<std::uint32_t*>(words_ + kArrivalsLine * kWordsPerLine);
  const auto blocks =
      static_cast<int>((copy.bytes + kLocalBytesPerBlock - 1) / kLocalBytesPerBlock);
  if (!succeeded(launch_sm_put(put, blocks, rank_->proxy()->stream(), kLocalThreads), copy.peer)) {
    return true;
  }
  add.puts += copy.puts;
  add.copies += 1;
  add.bytes += copy.bytes;
  add.signals += copy.signals.size();
  return true;
}

void DeviceCopyEngine::submit(const MergedCopy& copy, const Ring& ring, bool from_kernels,
                              TransportCounters& add) {
  if (copy_locally(copy, add)) return;
  std::byte* base = window_->base(copy.peer);
  const bool local = mapping_->same_device(copy.peer);
  Proxy& proxy = *rank_->proxy();
  if (copy.bytes != 0) {
    if (!succeeded(proxy.copy(base + copy.dst_offset, window_->local() + copy.src_offset,
                              copy.bytes, local),
                   copy.peer)) {
      return;
    }
    add.puts += copy.puts;
    add.copies += 1;
    add.bytes += copy.bytes;
  }
  const bool write = rank_->signal_probe(copy.peer).chosen == SignalMethod::kStreamWrite;
  for (std::size_t i = 0; i < copy.signals.size();) {
    const auto [offset, epoch] = copy.signals[i];
    std::size_t run = 1;
    bool sent = false;
    if (write) {
      sent = succeeded(driver().stream_write_value64(reinterpret_cast<CUstream>(proxy.stream()),
                                                     reinterpret_cast<CUdeviceptr>(base + offset),
                                                     epoch, CU_STREAM_WRITE_VALUE_DEFAULT),
                       copy.peer);
    } else if (from_kernels) {
      // Chunks that became ready together usually have neighbouring signal words and neighbouring
      // cells: one copy.
      const std::uint64_t first =
          ring_index(position_of(copy.peer, offset, epoch), options_.ring_slots);
      while (i + run < copy.signals.size() &&
             copy.signals[i + run].first == offset + run * sizeof(epoch) &&
             ring_index(
                 position_of(copy.peer, copy.signals[i + run].first, copy.signals[i + run].second),
                 options_.ring_slots) == first + run) {
        ++run;
      }
      const std::uint64_t* cells = words_ + kLines * kWordsPerLine + first;
      sent = succeeded(proxy.copy(base + offset, cells, run * sizeof(epoch), local), copy.peer);
    } else {
      // The host's own puts have no device cell: the pinned slot is the source.
      const RingSlot& slot =
          ring.slots()[ring_index(position_of(copy.peer, offset, epoch), options_.ring_slots)];
      sent = succeeded(cudaMemcpyAsync(base + offset, &slot.put.signal_epoch, sizeof(epoch),
                                       cudaMemcpyHostToDevice, proxy.stream()),
                       copy.peer);
    }
    if (!sent) return;
    add.signals += run;
    i += run;
  }
}

std::uint64_t DeviceCopyEngine::position_of(int peer, std::uint64_t offset,
                                            std::uint64_t epoch) const {
  for (auto taken = taken_.rbegin(); taken != taken_.rend(); ++taken) {
    if (taken->put.peer == peer && taken->put.signal_offset == offset &&
        taken->put.signal_epoch == epoch) {
      return taken->position;
    }
  }
  throw_error(ErrorKind::kBackend,
              fmt::format("no descriptor for the signal at offset {} of rank {}", offset, peer));
}

bool DeviceCopyEngine::succeeded(cudaError_t status, int peer) noexcept {
  if (status == cudaSuccess) return true;
  log(LogLevel::kError, fmt::format("GPU {}: a copy to rank {} failed: {}", rank_->device(), peer,
                                    cudaGetErrorString(status)));
  fail(peer, 0, static_cast<std::uint64_t>(status));
  return false;
}

bool DeviceCopyEngine::succeeded(CUresult status, int peer) noexcept {
  return succeeded(status == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown, peer);
}

void DeviceCopyEngine::fail(int peer, std::uint64_t expected, std::uint64_t seen) noexcept {
  failed_.store(true);
  FaultRecord record;
  record.rank = rank_->team()->rank();
  record.peer = peer;
  record.op = op_;
  record.expected = expected;
  record.seen = seen;
  record.cause = static_cast<std::uint32_t>(FaultCause::kTransport);
  record.valid = 1;
  (void)rank_->team()->raise(record);
}

}  // namespace penstock::cuda
