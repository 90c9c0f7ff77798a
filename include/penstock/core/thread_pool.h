// A fork-join pool for one rank's compute threads.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace penstock {

// Runs the parts of a job on a fixed set of threads, the calling thread among them. Whoever is free
// claims the next part, so a job never waits for a worker that the system has not scheduled yet. A
// part must therefore not wait for another part. Workers spin for a short time (about 50 us)
// between jobs and then sleep, so that a decode step's many small jobs do not pay a wake-up each.
// One caller at a time: a pool belongs to one rank. An exception in a part is rethrown to the
// caller after all parts ended.
class ThreadPool {
 public:
  // threads >= 1 including the caller; throws InvalidArgument otherwise, ResourceExhausted if the
  // system refuses.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const noexcept;
  // Calls body(part) once for each part in [0, threads()); parts run at most at the same time as
  // each other, never twice, so `part` can index scratch memory. Returns when all have returned.
  void run(const std::function<void(int part)>& body);
  // Splits [0, count) into contiguous ranges of at least `grain` and calls body(begin, end, part),
  // part in [0, threads()). The ranges are fixed by (count, grain, threads()), so that a reduction
  // over parts is reproducible.
  void parallel_for(std::size_t count, std::size_t grain,
                    const std::function<void(std::size_t begin, std::size_t end, int part)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace penstock
