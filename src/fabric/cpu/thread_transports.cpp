// The transports that need no engine: `sm`, whose copies the calling thread makes, and `direct`,
// whose data the producer stores itself.
#include <cstring>

#include "fabric/cpu/transports.h"
#include "fabric/transport_checks.h"
#include "penstock/core/error.h"
#include "penstock/fabric/signal.h"

namespace penstock::detail {
namespace {

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(TransportKind kind, std::shared_ptr<Window> window)
      : kind_(kind), window_(std::move(window)) {
    window_->add_user(this);
  }
  ~ThreadTransport() override { window_->remove_user(this); }

  TransportKind kind() const noexcept override { return kind_; }
  const std::shared_ptr<Window>& window() const noexcept override { return window_; }

  void put(const PutDescriptor& put) override {
    check_put(*window_, put, to_string(kind_));
    // A faulted call must not publish anything more.
    window_->team()->check();
    TransportCounters done;
    std::byte* peer = window_->base(put.peer);
    if (put.bytes > 0) {
      require(kind_ == TransportKind::kSm, ErrorKind::kUnsupported, [] {
        return std::string(
            "the direct transport copies nothing: the producer stores into the peer's window and "
            "puts the signal alone; use sm or copy_engine to have bytes moved");
      });
      // A rank may be its own peer, with overlapping ends.
      std::memmove(peer + put.dst_offset, window_->local() + put.src_offset, put.bytes);
      done.puts = done.copies = 1;
      done.bytes = put.bytes;
    }
    if (put.signal_offset != kNoSignal) {
      store_signal(reinterpret_cast<std::uint64_t*>(peer + put.signal_offset), put.signal_epoch);
      done.signals = 1;
    }
    counters_.add(done);
  }
  void flush() override {}
  void quiet() override { window_->team()->check(); }
  void count_direct(std::uint64_t bytes) noexcept override {
    TransportCounters done;
    done.direct_bytes = bytes;
    counters_.add(done);
  }
  TransportCounters counters() const noexcept override { return counters_.read(); }

 private:
  TransportKind kind_;
  std::shared_ptr<Window> window_;
  SharedCounters counters_;
};

}  // namespace

std::unique_ptr<Transport> make_cpu_sm_transport(std::shared_ptr<Window> window) {
  return std::make_unique<ThreadTransport>(TransportKind::kSm, std::move(window));
}

std::unique_ptr<Transport> make_cpu_direct_transport(std::shared_ptr<Window> window) {
  return std::make_unique<ThreadTransport>(TransportKind::kDirect, std::move(window));
}

}  // namespace penstock::detail
