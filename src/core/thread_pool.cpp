#include "penstock/core/thread_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "penstock/core/error.h"

namespace penstock {
namespace {

// Long enough to bridge the gap between two stages of a decode step, short enough to leave an idle
// machine idle.
constexpr auto kSpin = std::chrono::microseconds(50);

template <typename Ready>
bool spin_until(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  while (true) {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    if (std::chrono::steady_clock::now() >= end) return false;
  }
}

}  // namespace

struct ThreadPool::State {
  int threads = 1;
  const std::function<void(int)>* body = nullptr;
  std::atomic<std::uint64_t> epoch{0};  // raised by the caller when a job is ready
  std::atomic<int> running{0};          // workers that have not finished the job
  std::atomic<bool> stop{false};
  std::mutex error_mutex;
  std::exception_ptr error;
  std::vector<std::thread> workers;

  void call(int thread) {
    try {
      (*body)(thread);
    } catch (...) {
      const std::scoped_lock lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }

  void work(int thread) {
    std::uint64_t seen = 0;
    while (true) {
      const auto ready = [&] { return epoch.load(std::memory_order_acquire) != seen; };
      if (!spin_until(ready)) epoch.wait(seen, std::memory_order_acquire);
      if (!ready()) continue;
      ++seen;
      if (stop.load(std::memory_order_acquire)) return;
      call(thread);
      if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) running.notify_one();
    }
  }

  void close() {
    stop.store(true, std::memory_order_release);
    epoch.fetch_add(1, std::memory_order_release);
    epoch.notify_all();
    for (std::thread& worker : workers) worker.join();
  }
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  require(threads >= 1 && threads <= 4096, ErrorKind::kInvalidArgument,
          [&] { return fmt::format("thread pool of {} threads: give 1 to 4096", threads); });
  state_->threads = threads;
  try {
    for (int t = 1; t < threads; ++t) {
      state_->workers.emplace_back([state = state_.get(), t] { state->work(t); });
    }
  } catch (const std::system_error& error) {
    state_->close();
    throw Error(ErrorKind::kResourceExhausted,
                fmt::format("could not start thread {} of {}: {}", state_->workers.size() + 1,
                            threads, error.what()));
  }
}

ThreadPool::~ThreadPool() { state_->close(); }

int ThreadPool::threads() const noexcept { return state_->threads; }

void ThreadPool::run(const std::function<void(int)>& body) {
  State& s = *state_;
  s.body = &body;
  s.error = nullptr;
  if (s.threads > 1) {
    s.running.store(s.threads - 1, std::memory_order_relaxed);
    s.epoch.fetch_add(1, std::memory_order_release);
    s.epoch.notify_all();
  }
  s.call(0);
  if (s.threads > 1) {
    const auto done = [&] { return s.running.load(std::memory_order_acquire) == 0; };
    while (!spin_until(done)) {
      const int left = s.running.load(std::memory_order_acquire);
      if (left != 0) s.running.wait(left, std::memory_order_acquire);
    }
  }
  if (s.error) std::rethrow_exception(s.error);
}

void ThreadPool::parallel_for(std::size_t count, std::size_t grain,
                              const std::function<void(std::size_t, std::size_t, int)>& body) {
  if (count == 0) return;
  const std::size_t per_grain = std::max<std::size_t>(grain, 1);
  const std::size_t grains = (count + per_grain - 1) / per_grain;
  const auto parts =
      static_cast<std::size_t>(std::min<std::size_t>(grains, static_cast<std::size_t>(threads())));
  if (parts <= 1) {
    body(0, count, 0);
    return;
  }
  run([&](int thread) {
    const auto t = static_cast<std::size_t>(thread);
    if (t >= parts) return;
    const std::size_t begin = std::min(count, grains * t / parts * per_grain);
    const std::size_t end = std::min(count, grains * (t + 1) / parts * per_grain);
    if (begin < end) body(begin, end, thread);
  });
}

}  // namespace penstock
