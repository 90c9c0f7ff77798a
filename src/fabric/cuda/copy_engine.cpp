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

// What a copy is expected to take, for the decision when to submit the next: measured on H200
// (peer: 2.4 us + bytes / 390 GB/s over NVLink; within a GPU 3.7 us + bytes / 2000 GB/s). An
// estimate that is too short costs merging, one that is too long a gap.
constexpr std::chrono::nanoseconds kPeerStart{2400};
constexpr double kPeerBytesPerNs = 390.0;
constexpr std::chrono::nanoseconds kLocalStart{3700};
constexpr double kLocalBytesPerNs = 2000.0;
// Between ranks that share a GPU the driver's copies are kernels too (none starts while every
// thread slot is taken), so up to this size the proxy launches one of its own, which carries the
// signal and the mark of its end: one launch instead of a copy, a write that waits for it and an
// event. Small CTAs, to fit beside others.
constexpr std::uint64_t kLocalLaunchBytes = 1 << 20;
constexpr int kLocalThreads = 128;
constexpr std::uint64_t kLocalBytesPerBlock = 16 * kSmPutAtOnce * kLocalThreads;
// A done word that never comes (the device has failed) is found by asking the stream this often.
constexpr std::chrono::milliseconds kCheckEvery{1};
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
  done_ = PinnedMemory(sizeof(std::uint64_t));
  words_ = DeviceBuffer<std::uint64_t>(kLines * kWordsPerLine + options.ring_slots);
  zero_device(words_.data(), words_.bytes());
  for (Batch& batch : batches_) batch.event.emplace();
  local_put_.emplace(rank_->proxy()->stream());
  taken_.reserve(kTakeAtOnce);
  hook_.emplace(rank_->team(), this);
  user_.emplace(window_, this);
  place_.emplace(rank_->proxy(), static_cast<ProxyClient*>(this));
}

DeviceCopyEngine::~DeviceCopyEngine() {
  place_.reset();
  // What was submitted completes by itself; its sources and targets are the window's, which its
  // mapping keeps alive until the stream is past them.
  if (submitted_ != retired_) (void)cudaStreamSynchronize(rank_->proxy()->stream());
}

RingView DeviceCopyEngine::ring_view() const {
  RingView view;
  view.slots = kernels_.slots();
  view.tail = &kernels_.control()->tail;
  view.head = words_.data() + kHeadLine * kWordsPerLine;
  view.tail_seen = words_.data() + kTailSeenLine * kWordsPerLine;
  view.signal_cells = words_.data() + kLines * kWordsPerLine;
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
  read_device(&posted, words_.data() + kHeadLine * kWordsPerLine,
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

bool DeviceCopyEngine::serve(TimePoint now) noexcept {
  bool progress = retire(now);
  // The ring that was served last comes second: with one free place in batches_, a ring of kernels
  // that is never empty would otherwise keep the host's puts out.
  Ring* const first = first_;
  Ring* const second = first == &kernels_ ? &host_ : &kernels_;
  if (take(*first, now)) {
    first_ = second;
    progress = true;
  }
  if (take(*second, now)) {
    first_ = first;
    progress = true;
  }
  busy_.store(submitted_ != retired_, std::memory_order_relaxed);
  return progress;
}

// A failed batch has ended, too.
bool DeviceCopyEngine::ended(const Batch& batch, TimePoint now) noexcept {
  cudaError_t status = cudaSuccess;
  if (batch.by_word) {
    if (load_signal(done_.as<std::uint64_t>()) >= batch.number) return true;
    if (now - checked_ < kCheckEvery) return false;
    checked_ = now;
    status = cudaStreamQuery(rank_->proxy()->stream());
    // Nothing is left to run, or other work is: the word is there or will come.
    if (status == cudaSuccess || status == cudaErrorNotReady) return false;
  } else {
    status = cudaEventQuery(batch.event->get());
    if (status == cudaErrorNotReady) return false;
  }
  if (status != cudaSuccess) {
    fail(-1, batch.position, batch.ring->next, cudaGetErrorString(status));
  }
  return true;
}

bool DeviceCopyEngine::retire(TimePoint now) noexcept {
  bool progress = false;
  while (retired_ != submitted_) {
    const Batch& batch = batches_[(retired_ + 1) % batches_.size()];
    if (!ended(batch, now)) break;
    puts_ += batch.add.puts;
    copies_ += batch.add.copies;
    bytes_ += batch.add.bytes;
    signals_ += batch.add.signals;
    publish(*batch.ring, batch.position);
    ++retired_;
    if (retired_ == submitted_) busy_until_ = {};
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

bool DeviceCopyEngine::ready(const Ring& ring) const noexcept {
  const RingSlot& slot = ring.slots()[ring_index(ring.next, options_.ring_slots)];
  return load_signal(&slot.sequence) == ring.next + 1;
}

// Hands what is ready to the merger; what no window would take becomes a fault.
void DeviceCopyEngine::collect(Ring& ring) {
  taken_.clear();
  for (std::size_t count = 0; count < kTakeAtOnce && ready(ring); ++count) {
    const RingSlot& slot = ring.slots()[ring_index(ring.next, options_.ring_slots)];
    const std::uint64_t position = ring.next++;
    try {
      detail::check_put(*window_, slot.put, "copy_engine");
    } catch (const Error& error) {  // a kernel cannot be thrown at: its team gets the fault, the
                                    // log the words
      fail(slot.put.peer, position, 0, error.what());
      continue;
    }
    taken_.push_back({slot.put, position});
    merger_.push(slot.put);
  }
}

void DeviceCopyEngine::expect_busy(const MergedCopy& copy, TimePoint now) {
  const bool local = mapping_->same_device(copy.peer);
  const double transfer =
      static_cast<double>(copy.bytes) / (local ? kLocalBytesPerNs : kPeerBytesPerNs);
  busy_until_ = std::max(busy_until_, now) + (local ? kLocalStart : kPeerStart) +
                std::chrono::nanoseconds(static_cast<std::int64_t>(transfer));
}

void DeviceCopyEngine::submit_all(Ring& ring, Batch& batch, TimePoint now) {
  collect(ring);
  // After a failure nothing may pass for delivered: descriptors are taken, so that nobody waits for
  // room, and dropped.
  while (!merger_.empty() && !failed_.load(std::memory_order_relaxed)) {
    const MergedCopy copy = merger_.next();
    batch.by_word = is_local(copy) && copy_locally(copy, batch);
    if (!is_local(copy)) submit(copy, ring, batch.add);
    expect_busy(copy, now);
  }
}

bool DeviceCopyEngine::take(Ring& ring, TimePoint now) noexcept {
  if (submitted_ - retired_ == batches_.size() || !ready(ring)) return false;
  if (submitted_ != retired_ && now + options_.lead < busy_until_) return false;
  const std::uint64_t number = submitted_ + 1;
  Batch& batch = batches_[number % batches_.size()];
  batch.by_word = false;
  batch.number = number;
  batch.ring = &ring;
  batch.add = {};
  try {
    submit_all(ring, batch, now);
  } catch (const std::exception& error) {
    // The host is out of memory, or the merger refuses. What was taken from the ring is lost and
    // on record as such, but it still retires below: a rearm waits for that.
    batch.by_word = false;
    fail(-1, 0, 0, error.what());
  }
  merger_.clear();
  batch.position = ring.next;
  // Should the record fail, the event is of an earlier batch and done.
  if (!batch.by_word)
    (void)succeeded(cudaEventRecord(batch.event->get(), rank_->proxy()->stream()), -1);
  submitted_ = number;
  return true;
}

bool DeviceCopyEngine::is_local(const MergedCopy& copy) const {
  return mapping_->same_device(copy.peer) && copy.bytes != 0 && copy.bytes <= kLocalLaunchBytes &&
         copy.signals.size() <= 1;
}

// Whether the end of this copy will be stored as the end of its batch. A failure is on record.
bool DeviceCopyEngine::copy_locally(const MergedCopy& copy, Batch& batch) {
  std::byte* base = window_->base(copy.peer);
  SmPut put;
  put.dst = base + copy.dst_offset;
  put.src = window_->local() + copy.src_offset;
  put.bytes = copy.bytes;
  if (!copy.signals.empty()) {
    put.word = reinterpret_cast<std::uint64_t*>(base + copy.signals[0].first);
    put.epoch = copy.signals[0].second;
  }
  if (merger_.empty()) {  // the last of its batch
    put.done = done_.as<std::uint64_t>();
    put.done_value = batch.number;
  }
  put.arrivals = reinterpret_cast<std::uint32_t*>(words_.data() + kArrivalsLine * kWordsPerLine);
  const auto blocks =
      static_cast<int>((copy.bytes + kLocalBytesPerBlock - 1) / kLocalBytesPerBlock);
  if (!succeeded(local_put_->launch(put, blocks, kLocalThreads), copy.peer)) {
    return false;
  }
  batch.add.puts += copy.puts;
  batch.add.copies += 1;
  batch.add.bytes += copy.bytes;
  batch.add.signals += copy.signals.size();
  return put.done != nullptr;
}

void DeviceCopyEngine::submit(const MergedCopy& copy, const Ring& ring, TransportCounters& add) {
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
    } else if (&ring == &kernels_) {
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
      const std::uint64_t* cells = words_.data() + kLines * kWordsPerLine + first;
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
  fail(peer, 0, static_cast<std::uint64_t>(status), cudaGetErrorString(status));
  return false;
}

bool DeviceCopyEngine::succeeded(CUresult status, int peer) noexcept {
  return succeeded(status == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown, peer);
}

void DeviceCopyEngine::fail(int peer, std::uint64_t expected, std::uint64_t seen,
                            std::string_view words) noexcept {
  failed_.store(true);
  try {
    log(LogLevel::kError, fmt::format("rank {}: a copy on GPU {} for rank {} failed: {}",
                                      rank_->team()->rank(), rank_->device(), peer, words));
  } catch (const std::exception&) {  // the host is out of memory
    log(LogLevel::kError, words);
  }
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
