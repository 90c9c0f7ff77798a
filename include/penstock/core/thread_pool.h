// A fork-join pool for one rank's compute threads.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace penstock {

// Runs index ranges on a fixed set of threads; the calling thread is thread 0. Workers spin for a
// short time (about 50 us) between jobs and then sleep, so that a decode step's many small jobs do
// not pay a wake-up each. One caller at a time: a pool belongs to one rank. An exception in a job
// is rethrown to the caller after all ended.
class ThreadPool {
 public:
  // threads >= 1 including the caller; throws InvalidArgument otherwise, ResourceExhausted if the
  // system refuses.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const noexcept;
  // Calls body(thread) once on each thread, thread in [0, threads()). Returns when all have
  // returned.
  void run(const std::function<void(int thread)>& body);
  // Splits [0, count) into contiguous parts of at least `grain` and calls body(begin, end, thread).
  // Which thread takes which part is fixed by (count, grain, threads()), so that a reduction over
  // parts is reproducible.
  void parallel_for(
      std::size_t count, std::size_t grain,
      const std::function<void(std::size_t begin, std::size_t end, int thread)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace penstock
