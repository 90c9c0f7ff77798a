#include "machine_rates.h"

#define HWY_DISABLED_TARGETS HWY_SSSE3
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "machine_rates.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include <algorithm>
#include <chrono>
#include <vector>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace penstock::bench::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A value that depends on every element read.
float read_all(const float* data, std::int64_t count) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto a = hn::Zero(d), b = a, c = a, e = a;
  for (std::int64_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
    a = hn::Add(a, hn::LoadU(d, data + i));
    b = hn::Add(b, hn::LoadU(d, data + i + lanes));
    c = hn::Add(c, hn::LoadU(d, data + i + 2 * lanes));
    e = hn::Add(e, hn::LoadU(d, data + i + 3 * lanes));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(a, b), hn::Add(c, e))));
}

// Runs `rounds` of 12 independent multiply-adds; returns the FLOP and keeps the result alive.
double multiply_add(std::int64_t rounds, float seed, float* result) {
  const hn::ScalableTag<float> d;
  const auto x = hn::Set(d, seed);
  const auto y = hn::Set(d, 0.999f);
  constexpr int kChains = 12;
  decltype(hn::Zero(d)) acc[kChains];
  for (int j = 0; j < kChains; ++j) acc[j] = hn::Set(d, static_cast<float>(j));
  for (std::int64_t i = 0; i < rounds; ++i) {
    for (auto& v : acc) v = hn::MulAdd(v, y, x);
  }
  auto sum = acc[0];
  for (int j = 1; j < kChains; ++j) sum = hn::Add(sum, acc[j]);
  *result = hn::GetLane(hn::SumOfLanes(d, sum));
  return static_cast<double>(rounds) * kChains * 2.0 * static_cast<double>(hn::Lanes(d));
}

}  // namespace penstock::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace penstock::bench {

HWY_EXPORT(read_all);
HWY_EXPORT(multiply_add);

namespace {

constexpr int kPasses = 15;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double read_rate(ThreadPool& pool, std::int64_t bytes) {
  const std::vector<float> data(static_cast<std::size_t>(bytes / 4), 1.0f);
  std::vector<float> sums(static_cast<std::size_t>(pool.threads()));
  double best = 0.0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    pool.parallel_for(data.size(), 1024, [&](std::size_t begin, std::size_t end, int thread) {
      sums[static_cast<std::size_t>(thread)] = HWY_DYNAMIC_DISPATCH(read_all)(
          data.data() + begin, static_cast<std::int64_t>(end - begin));
    });
    best = std::max(best, static_cast<double>(bytes) / seconds_since(start));
  }
  // Reads whose sums nobody looks at could be dropped.
  return *std::max_element(sums.begin(), sums.end()) > 0.0f ? best : 0.0;
}

double fma_rate(ThreadPool& pool) {
  constexpr std::int64_t kRounds = 200000;
  std::vector<double> flop(static_cast<std::size_t>(pool.threads()));
  std::vector<float> results(flop.size());
  double best = 0.0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    pool.run([&](int thread) {
      const auto t = static_cast<std::size_t>(thread);
      flop[t] = HWY_DYNAMIC_DISPATCH(multiply_add)(kRounds, 0.5f, &results[t]);
    });
    const double time = seconds_since(start);
    double total = 0.0;
    for (const double f : flop) total += f;
    best = std::max(best, total / time);
  }
  return *std::max_element(results.begin(), results.end()) > 0.0f ? best : 0.0;
}

}  // namespace penstock::bench
#endif
