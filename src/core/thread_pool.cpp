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

// A job is a number of parts, each run once by whoever claims it: the caller claims too, so a job
// never waits for a worker that the system has not scheduled yet (on a busy machine that made a
// decode step 20 times slower).
struct ThreadPool::State {
  // What is there to claim, in one word, so that no claim can mix two jobs: job number (high 32
  // bits), its number of parts (16), the next unclaimed part (16). Count 0: nothing.
  static constexpr std::uint64_t kPartBits = 16;
  static constexpr std::uint64_t kPartMask = (1U << kPartBits) - 1;
  static constexpr std::uint64_t kJobShift = 2 * kPartBits;
  static constexpr std::uint64_t kJobMask = 0xffffffffU;

  int threads = 1;
  const std::function<void(int)>* body = nullptr;  // valid while a claimed part is not done
  std::atomic<std::uint64_t> next{0};              // see above
  std::atomic<std::uint64_t> done{0};              // parts finished
  std::atomic<std::uint64_t> epoch{0};             // job number; workers sleep on it
  std::atomic<bool> stop{false};
  std::mutex error_mutex;
  std::exception_ptr error;
  std::vector<std::thread> workers;

  void call(int part) {
    try {
      (*body)(part);
    } catch (...) {
      const std::scoped_lock lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }

  // Runs parts of job `job` until none is left to claim.
  void take_parts(std::uint64_t job) {
    std::uint64_t seen = next.load(std::memory_order_acquire);
    while (true) {
      const std::uint64_t part = seen & kPartMask;
      const std::uint64_t count = (seen >> kPartBits) & kPartMask;
      if (seen >> kJobShift != (job & kJobMask) || part >= count) return;
      // Success means that this job is not over: its caller waits for the part that is now ours.
      if (!next.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
        continue;
      }
      call(static_cast<int>(part));
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == count) done.notify_one();
      seen = next.load(std::memory_order_acquire);
    }
  }

  void work() {
    std::uint64_t seen = 0;
    while (true) {
      const auto ready = [&] { return epoch.load(std::memory_order_acquire) != seen; };
      if (!spin_until(ready)) epoch.wait(seen, std::memory_order_acquire);
      seen = epoch.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_acquire)) return;
      take_parts(seen);
    }
  }

  void run(int count, const std::function<void(int)>& job_body) {
    body = &job_body;
    error = nullptr;
    done.store(0, std::memory_order_relaxed);
    const std::uint64_t job = epoch.load(std::memory_order_relaxed) + 1;
    next.store((job & kJobMask) << kJobShift | static_cast<std::uint64_t>(count) << kPartBits,
               std::memory_order_release);
    epoch.store(job, std::memory_order_release);
    epoch.notify_all();
    take_parts(job);
    const auto all = static_cast<std::uint64_t>(count);
    const auto finished = [&] { return done.load(std::memory_order_acquire) == all; };
    while (!spin_until(finished)) {
      const std::uint64_t so_far = done.load(std::memory_order_acquire);
      if (so_far != all) done.wait(so_far, std::memory_order_acquire);
    }
    if (error) std::rethrow_exception(error);
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
  state_->workers.reserve(static_cast<std::size_t>(threads - 1));
  try {
    for (int t = 1; t < threads; ++t) {
      state_->workers.emplace_back([state = state_.get()] { state->work(); });
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
  if (state_->threads == 1) {
    body(0);
  } else {
    state_->run(state_->threads, body);
  }
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
  state_->run(static_cast<int>(parts), [&](int part) {
    const auto p = static_cast<std::size_t>(part);
    const std::size_t begin = std::min(count, grains * p / parts * per_grain);
    const std::size_t end = std::min(count, grains * (p + 1) / parts * per_grain);
    if (begin < end) body(begin, end, part);
  });
}

}  // namespace penstock
