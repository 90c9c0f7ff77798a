#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

#include "ops/cpu/attention.h"

namespace penstock::cpu {
namespace {

// Integers that order as the floats do; NaN below all.
std::uint32_t ordered(float score) {
  if (std::isnan(score)) return 0;
  const auto bits = std::bit_cast<std::uint32_t>(score + 0.0f);  // -0 becomes +0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace

std::int64_t top_k(const float* scores, std::int64_t count, std::int64_t k, std::uint64_t* keys,
                   std::int32_t* picks) {
  const std::int64_t n = std::min(k, count);
  if (n == count) {
    for (std::int64_t i = 0; i < n; ++i) picks[i] = static_cast<std::int32_t>(i);
    return n;
  }
  // One integer a candidate: the score, then the smaller position first. All differ, so the n
  // greatest are one set.
  for (std::int64_t i = 0; i < count; ++i) {
    const auto position = static_cast<std::uint32_t>(i);
    keys[i] = std::uint64_t{ordered(scores[i])} << 32 | (0xFFFFFFFFu - position);
  }
  std::nth_element(keys, keys + n, keys + count, std::greater<>());
  const std::uint64_t* least = std::min_element(keys, keys + n);
  std::int64_t found = 0;
  const auto bound = static_cast<std::uint32_t>(*least >> 32);
  const auto last = 0xFFFFFFFFu - static_cast<std::uint32_t>(*least);
  for (std::int64_t i = 0; i < count && found < n; ++i) {
    const std::uint32_t key = ordered(scores[i]);
    if (key > bound || (key == bound && static_cast<std::uint32_t>(i) <= last)) {
      picks[found++] = static_cast<std::int32_t>(i);
    }
  }
  return found;
}

}  // namespace penstock::cpu
