#include "fabric/cuda/proxy.h"

#include <cuda.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>

#include "core/cuda/check.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/memory.h"
#include "fabric/cuda/put_sm90.h"
#include "penstock/core/error.h"

namespace penstock::cuda {
namespace {

using Clock = std::chrono::steady_clock;

// After this long without work the thread sleeps. Longer than the gap between two layers of a
// prefill, so that a running model finds it awake.
constexpr std::chrono::milliseconds kSpinFor{5};
// The longest nap: what a descriptor posted out of the blue may wait.
constexpr std::chrono::microseconds kNap{50};

void pause_cpu() noexcept { __builtin_ia32_pause(); }

}  // namespace

std::string_view to_string(SignalMethod method) {
  return method == SignalMethod::kDeviceCopy ? "device_copy" : "stream_write";
}

std::shared_ptr<Proxy> Proxy::for_device(int device) {
  static std::mutex registry_mutex;
  static std::map<int, std::weak_ptr<Proxy>> registry;
  require_sm90(device);
  const std::lock_guard lock(registry_mutex);
  if (auto running = registry[device].lock()) return running;
  std::shared_ptr<Proxy> proxy(new Proxy(device));
  registry[device] = proxy;
  return proxy;
}

// The stream of local copies, which are kernels: set up before anybody waits (DeviceRank::prepare).
OwnedStream Proxy::make_stream(int device) {
  const ScopedDevice scope(device);
  (void)driver();  // load now: an entry point that is missing is the creator's error, not the
                   // thread's
  int least = 0;
  int greatest = 0;
  PENSTOCK_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  return OwnedStream(greatest);
}

Proxy::Proxy(int device) : device_(device), stream_(make_stream(device)) {
  const ScopedDevice scope(device);
  PENSTOCK_CUDA_CHECK(launch_nothing(stream()));
  PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream()));
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    throw_error(ErrorKind::kResourceExhausted,
                fmt::format("the proxy thread of GPU {} did not start: {}", device, error.what()));
  }
}

Proxy::~Proxy() {
  stop_.store(true);
  {
    const std::lock_guard lock(mutex_);
    idle_.notify_all();
  }
  thread_.join();
}

void Proxy::attach(ProxyClient* client) {
  wanting_.fetch_add(1);
  const std::lock_guard lock(mutex_);
  wanting_.fetch_sub(1);
  clients_.push_back(client);
  idle_.notify_all();
}

void Proxy::detach(ProxyClient* client) noexcept {
  wanting_.fetch_add(1);
  const std::lock_guard lock(mutex_);
  wanting_.fetch_sub(1);
  std::erase(clients_, client);
}

void Proxy::wake() noexcept {
  wakes_.fetch_add(1, std::memory_order_relaxed);
  idle_.notify_all();
}

void Proxy::run() noexcept {
  (void)cudaSetDevice(device_);
  // Another thread may be capturing a graph: this thread's calls neither belong to it nor may break
  // it.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  Clock::time_point now = Clock::now();
  Clock::time_point active = now;
  std::uint64_t wakes = 0;
  std::unique_lock lock(mutex_);
  while (!stop_.load(std::memory_order_relaxed)) {
    bool progress = false;
    bool busy = false;
    now = Clock::now();
    for (ProxyClient* client : clients_) {
      progress = client->serve(now) || progress;
      busy = busy || client->busy();
    }
    if (wanting_.load(std::memory_order_relaxed) != 0) {
      lock.unlock();
      while (wanting_.load(std::memory_order_relaxed) != 0) std::this_thread::yield();
      lock.lock();
      continue;
    }
    const std::uint64_t woken = wakes_.load(std::memory_order_relaxed);
    if (progress || busy || woken != wakes) {
      wakes = woken;
      active = now;
    } else if (clients_.empty()) {
      idle_.wait(lock, [this] { return stop_.load() || !clients_.empty(); });
    } else if (now - active > kSpinFor) {
      idle_.wait_for(lock, kNap);
    } else {
      pause_cpu();
    }
  }
}

cudaError_t Proxy::copy(void* dst, const void* src, std::size_t bytes, bool same_device) noexcept {
  if (!same_device) return cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, stream());
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  void* const to = dst;
  const void* const from = src;
  std::size_t first = 0;
  return cudaMemcpyBatchAsync(&to, &from, &bytes, 1, &attributes, &first, 1, stream());
}

SignalProbe probe_signal(Proxy& proxy, std::byte* slot, std::byte* source, bool same_device) {
  // Ranks that share a GPU probe at the same time: one after the other, or they time each other.
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  constexpr int kRounds = 64;
  constexpr std::uint64_t kCopied = 0x5eed0001;
  constexpr std::uint64_t kWritten = 0x5eed0002;
  const ScopedDevice scope(proxy.device());
  auto* word = reinterpret_cast<std::uint64_t*>(slot + kProbeDataBytes);
  auto* cell = reinterpret_cast<std::uint64_t*>(source + kProbeDataBytes);
  const auto arrived = [&](std::uint64_t value) {
    std::uint64_t seen = 0;
    read_device(&seen, word, sizeof(seen));
    return seen == value;
  };
  const auto time_us = [&](auto&& signal) {
    PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(proxy.stream()));
    const auto start = Clock::now();
    for (int i = 0; i < kRounds; ++i) {
      check(proxy.copy(slot, source, kProbeDataBytes, same_device), "copy to a peer");
      signal();
    }
    PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(proxy.stream()));
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / kRounds;
  };
  SignalProbe result;
  write_device(cell, &kCopied, sizeof(kCopied));
  const auto by_copy = [&] {
    check(proxy.copy(word, cell, sizeof(*word), same_device), "signal copy");
  };
  (void)time_us(by_copy);
  result.device_copy_us = time_us(by_copy);
  require(arrived(kCopied), ErrorKind::kUnsupported, [&] {
    return fmt::format("GPU {}: an 8-byte copy to a peer reported success and moved nothing",
                       proxy.device());
  });
  const auto write = [&] {
    return driver().stream_write_value64(reinterpret_cast<CUstream>(proxy.stream()),
                                         reinterpret_cast<CUdeviceptr>(word), kWritten,
                                         CU_STREAM_WRITE_VALUE_DEFAULT);
  };
  if (write() != CUDA_SUCCESS) return result;
  PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(proxy.stream()));
  if (!arrived(kWritten)) return result;
  const auto by_write = [&] { check(write(), "stream_write_value64"); };
  (void)time_us(by_write);
  result.stream_write_us = time_us(by_write);
  if (result.stream_write_us < result.device_copy_us) result.chosen = SignalMethod::kStreamWrite;
  return result;
}

}  // namespace penstock::cuda
