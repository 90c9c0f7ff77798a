// The host proxy of one GPU: a thread that drives the copy engine on behalf of kernels, and carries
// faults between device words and the team. One a GPU and process, shared by every rank and window
// on it.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/cuda/stream.h"

namespace penstock::cuda {

// How a signal word is written behind the data, on the data's stream and in a submission of its
// own.
enum class SignalMethod : std::uint8_t {
  kDeviceCopy,   // 8-byte copy from a device-resident cell: works on every driver
  kStreamWrite,  // cuStreamWriteValue64 to the peer's address: not on drivers from CUDA 13.1 on,
                 // for a peer GPU
};
std::string_view to_string(SignalMethod method);

// Something that the proxy thread serves.
class ProxyClient {
 public:
  virtual ~ProxyClient() = default;
  // Looks for work and does it without waiting; called over and over on the proxy's thread with the
  // device current. `now` was read once for all clients of a round. Returns whether anything was
  // done. Must not throw: a client turns its errors into a fault of its team.
  virtual bool serve(std::chrono::steady_clock::time_point now) noexcept = 0;
  // Work in flight: the proxy keeps spinning instead of sleeping.
  virtual bool busy() const noexcept = 0;
};

class Proxy {
 public:
  // The process's proxy of `device`; started with the first holder, joined with the last. Throws
  // Unsupported without a Hopper GPU.
  static std::shared_ptr<Proxy> for_device(int device);
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  int device() const noexcept { return device_; }
  // The stream of all proxied copies of this GPU. One: a GPU has one useful engine for the
  // direction to its peers.
  cudaStream_t stream() const noexcept { return stream_.handle; }

  // From attach's return to detach's return `client` is served; detach returns when no call is in
  // progress.
  void attach(ProxyClient* client);
  void detach(ProxyClient* client) noexcept;
  // Makes the thread spin for a while: call it before launching a kernel that posts. Cheap, any
  // thread.
  void wake() noexcept;

  // Enqueues a copy on stream(). `same_device` says that both ends lie in this GPU; then the copy
  // asks for the engine (a plain device-local copy is done by SMs and would wait behind a kernel
  // that occupies them all).
  cudaError_t copy(void* dst, const void* src, std::size_t bytes, bool same_device) noexcept;

 private:
  explicit Proxy(int device);
  static OwnedStream make_stream(int device);
  void run() noexcept;

  int device_;
  OwnedStream stream_;
  std::mutex mutex_;  // clients_; held while they are served
  std::condition_variable idle_;
  std::vector<ProxyClient*> clients_;
  std::atomic<int> wanting_{0};  // threads that want mutex_: the spinning thread lets them in
  std::atomic<std::uint64_t> wakes_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// A client's place in the proxy's list, for as long as this object lives.
class ProxyPlace {
 public:
  ProxyPlace(std::shared_ptr<Proxy> proxy, ProxyClient* client)
      : proxy_(std::move(proxy)), client_(client) {
    proxy_->attach(client_);
  }
  ~ProxyPlace() { proxy_->detach(client_); }
  ProxyPlace(const ProxyPlace&) = delete;
  ProxyPlace& operator=(const ProxyPlace&) = delete;

 private:
  std::shared_ptr<Proxy> proxy_;
  ProxyClient* client_;
};

// Outcome of timing both methods on one pair of addresses.
struct SignalProbe {
  SignalMethod chosen = SignalMethod::kDeviceCopy;
  double device_copy_us = 0.0;    // one 4 KB copy + signal, back to back, host cost included
  double stream_write_us = -1.0;  // the same; -1: refused by the driver, or the word did not arrive
};
inline constexpr std::size_t kProbeDataBytes = 4096;
// Writes and times both methods, each behind a copy, and checks that the words arrive; throws
// Unsupported if a copy reports success and moves nothing. `slot` is the peer's, `source` local,
// kProbeDataBytes + 8 bytes each; same_device as for Proxy::copy. Uses the proxy's stream, which
// must be free of other work.
SignalProbe probe_signal(Proxy& proxy, std::byte* slot, std::byte* source, bool same_device);

}  // namespace penstock::cuda
