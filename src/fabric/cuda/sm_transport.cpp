#include "fabric/cuda/sm_transport.h"

#include <fmt/format.h>

#include <chrono>
#include <thread>

#include "core/cuda/check.h"
#include "fabric/cuda/window_backend.h"
#include "fabric/transport_checks.h"
#include "penstock/core/error.h"

namespace penstock::cuda {

DeviceSmTransport::DeviceSmTransport(TransportKind kind, std::shared_ptr<DeviceRank> rank,
                                     std::shared_ptr<Window> window, int blocks)
    : kind_(kind),
      rank_(std::move(rank)),
      window_(std::move(window)),
      blocks_(blocks),
      op_(rank_->team()->next_operator()),
      guard_(rank_->team(), op_),
      merger_(rank_->team()->size()) {
  require(kind != TransportKind::kCopyEngine, ErrorKind::kInvalidArgument,
          [] { return std::string("transport copy_engine is DeviceCopyEngine"); });
  require(blocks >= 1 && blocks <= rank_->sms(), ErrorKind::kInvalidArgument, [&] {
    return fmt::format("{} copy CTAs: rank {} may use 1 to {}", blocks, rank_->team()->rank(),
                       rank_->sms());
  });
  require(device_mapping(*window_)->device() == rank_->device(), ErrorKind::kInvalidArgument, [&] {
    return fmt::format("the window is not on GPU {}, where its rank is", rank_->device());
  });
  const ScopedDevice scope(rank_->device());
  PENSTOCK_CUDA_CHECK(load_sm_put());
  arrivals_ = DeviceBuffer<std::uint32_t>(1);
  zero_device(arrivals_.data(), arrivals_.bytes());
  stream_.emplace();
  event_.emplace();
  PENSTOCK_CUDA_CHECK(launch_nothing(stream_->handle));  // see DeviceRank::prepare
  stream_->wait();
  hook_.emplace(rank_->team(), this);
  user_.emplace(window_, this);
}

DeviceSmTransport::~DeviceSmTransport() {
  user_.reset();
  hook_.reset();
  // Copies wait for nobody: they end.
  (void)cudaStreamSynchronize(stream_->handle);
}

void DeviceSmTransport::put(const PutDescriptor& descriptor) {
  detail::check_put(*window_, descriptor, to_string(kind_));
  require(kind_ == TransportKind::kSm || descriptor.bytes == 0, ErrorKind::kInvalidArgument, [&] {
    return fmt::format(
        "transport direct moves no data for the host: {} bytes must be stored by the producing "
        "kernel",
        descriptor.bytes);
  });
  rank_->team()->check();
  merger_.push(descriptor);
}

void DeviceSmTransport::flush() {
  const ScopedDevice scope(rank_->device());
  while (!merger_.empty()) {
    const MergedCopy copy = merger_.next();
    std::byte* base = window_->base(copy.peer);
    SmPut put;
    put.dst = base + copy.dst_offset;
    put.src = window_->local() + copy.src_offset;
    put.bytes = copy.bytes;
    put.arrivals = arrivals_.data();
    // The first signal rides with the data; stream order puts the others behind it.
    std::size_t next = 0;
    do {
      if (next < copy.signals.size()) {
        put.word = reinterpret_cast<std::uint64_t*>(base + copy.signals[next].first);
        put.epoch = copy.signals[next].second;
      }
      PENSTOCK_CUDA_CHECK(launch_sm_put(put, put.bytes == 0 ? 1 : blocks_, stream_->handle));
      put.bytes = 0;
      ++next;
    } while (next < copy.signals.size());
    pending_.puts += copy.puts;
    pending_.copies += copy.bytes == 0 ? 0 : 1;
    pending_.bytes += copy.bytes;
    pending_.signals += copy.signals.size();
  }
}

void DeviceSmTransport::quiet() {
  flush();
  const ScopedDevice scope(rank_->device());
  event_->record(stream_->handle);
  guard_.wait_until(
      [&] {
        const cudaError_t status = cudaEventQuery(event_->get());
        if (status != cudaErrorNotReady) check(status, "cudaEventQuery");
        return status == cudaSuccess;
      },
      [] { return std::uint64_t{0}; }, pending_.puts, {.peer = -1, .op = op_});
  settle();
}

void DeviceSmTransport::quiesce() {
  merger_.clear();
  const ScopedDevice scope(rank_->device());
  event_->record(stream_->handle);
  const auto give_up = std::chrono::steady_clock::now() + rank_->team()->deadline();
  while (true) {
    const cudaError_t status = cudaEventQuery(event_->get());
    if (status == cudaSuccess) break;
    if (status != cudaErrorNotReady) check(status, "cudaEventQuery");
    if (std::chrono::steady_clock::now() > give_up) {
      FaultRecord record;
      record.rank = record.peer = rank_->team()->rank();
      record.op = op_;
      record.expected = pending_.puts;
      record.waited_ns = static_cast<std::uint64_t>(rank_->team()->deadline().count());
      record.cause = static_cast<std::uint32_t>(FaultCause::kTransport);
      record.valid = 1;
      throw Fault(record, "copies of this rank did not end");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  settle();
}

void DeviceSmTransport::resume(std::uint64_t floor) {
  (void)floor;  // keeps no epochs of its own
}

void DeviceSmTransport::settle() noexcept {
  puts_ += pending_.puts;
  copies_ += pending_.copies;
  bytes_ += pending_.bytes;
  signals_ += pending_.signals;
  pending_ = {};
}

TransportCounters DeviceSmTransport::counters() const noexcept {
  return {puts_.load(), copies_.load(), bytes_.load(), direct_bytes_.load(), signals_.load()};
}

}  // namespace penstock::cuda
