#include "penstock/core/thread_pool.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "penstock/core/error.h"

namespace penstock {
namespace {

TEST(ThreadPoolTest, CoversEachIndexOnceForAnyCountAndGrain) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (const std::size_t count : {0U, 1U, 2U, 7U, 64U, 1000U}) {
      for (const std::size_t grain : {0U, 1U, 3U, 128U}) {
        std::vector<std::atomic<int>> hits(count);
        pool.parallel_for(count, grain, [&](std::size_t begin, std::size_t end, int) {
          for (std::size_t i = begin; i < end; ++i) hits[i].fetch_add(1);
        });
        for (const auto& hit : hits) ASSERT_EQ(hit.load(), 1);
      }
    }
  }
}

TEST(ThreadPoolTest, ManySmallJobsNeverLoseOne) {
  ThreadPool pool(4);
  std::atomic<int> sum{0};
  for (int i = 0; i < 20000; ++i)
    pool.run([&](int) { sum.fetch_add(1, std::memory_order_relaxed); });
  EXPECT_EQ(sum.load(), 80000);
}

TEST(ThreadPoolTest, JobsOfChangingSizeRunEachPartOnce) {
  // A worker that comes late to one job must not claim a part of the next, larger one.
  ThreadPool pool(4);
  for (std::size_t i = 0; i < 100000; ++i) {
    const std::size_t count = 2 + i % 3;
    std::array<std::atomic<int>, 4> hits{};
    pool.parallel_for(count, 1, [&](std::size_t begin, std::size_t end, int) {
      for (; begin < end; ++begin) hits[begin].fetch_add(1);
    });
    for (std::size_t k = 0; k < count; ++k) ASSERT_EQ(hits[k].load(), 1);
  }
}

TEST(ThreadPoolTest, WakesSleepingWorkers) {
  ThreadPool pool(3);
  std::atomic<int> sum{0};
  for (int i = 0; i < 3; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    pool.run([&](int thread) { sum.fetch_add(1 + thread); });
  }
  EXPECT_EQ(sum.load(), 18);
}

TEST(ThreadPoolTest, RethrowsAndStaysUsable) {
  ThreadPool pool(4);
  EXPECT_THROW(pool.run([](int thread) {
    if (thread == 2) throw std::runtime_error("two");
  }),
               std::runtime_error);
  std::atomic<int> sum{0};
  pool.run([&](int) { sum.fetch_add(1); });
  EXPECT_EQ(sum.load(), 4);
}

TEST(ThreadPoolTest, PartsAreNotBoundToThreads) {
  // One part holds its thread; the other seven must be finished by the rest.
  ThreadPool pool(8);
  std::atomic<int> finished{0};
  std::atomic<bool> held{false};
  pool.run([&](int part) {
    if (part == 0) {
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (finished.load() != 7 && std::chrono::steady_clock::now() < end) {
        std::this_thread::yield();
      }
      held.store(finished.load() == 7);
      return;
    }
    finished.fetch_add(1);
  });
  EXPECT_TRUE(held.load()) << "parts were bound to threads";
  EXPECT_EQ(finished.load(), 7);
}

TEST(ThreadPoolTest, RefusesNoThreads) { EXPECT_THROW(ThreadPool(0), Error); }

}  // namespace
}  // namespace penstock
