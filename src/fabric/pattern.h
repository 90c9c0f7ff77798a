// The data of self-tests and benchmarks: every 8-byte word is a function of seed and position.
#pragma once

#include <cstdint>

#include "penstock/core/host_device.h"

namespace penstock {

// 8-byte word i of the pattern: differs between seeds, positions and after shifts.
PENSTOCK_HOST_DEVICE constexpr std::uint64_t pattern_word(std::uint64_t seed, std::uint64_t i) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15ULL + i * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ x >> 31) * 0x94d049bb133111ebULL;
  return x ^ x >> 29;
}

}  // namespace penstock
