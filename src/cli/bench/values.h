// Operands that host and device compute alike from an index, so that gigabytes of them need no
// upload and an oracle no copy.
#pragma once

#include <cstdint>

#include "penstock/core/host_device.h"
#include "penstock/numerics/formats.h"

namespace penstock::bench {

// The values of one tensor. Different seeds give unrelated streams.
struct ValueStream {
  std::uint64_t seed = 0;

  // SplitMix64's finaliser over a counter.
  PENSTOCK_HOST_DEVICE constexpr std::uint64_t bits(std::uint64_t i) const {
    std::uint64_t z = seed + (i + 1) * 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  // Of a deviation of about 100 and never above 357: what a block scaled to the largest E4M3, 448,
  // looks like. The sum of four bytes is near enough to a normal distribution.
  PENSTOCK_HOST_DEVICE constexpr E4M3 e4m3(std::uint64_t i) const {
    return E4M3::from_float(0.7f * static_cast<float>(byte_sum(i)));
  }
  // Of a deviation of about 1.
  PENSTOCK_HOST_DEVICE constexpr Bf16 bf16(std::uint64_t i) const {
    return Bf16::from_float(static_cast<float>(byte_sum(i)) / 148.0f);
  }
  // Uniform in [low, high).
  PENSTOCK_HOST_DEVICE constexpr float uniform(std::uint64_t i, float low, float high) const {
    return low + (high - low) * (static_cast<float>(bits(i) >> 40) * 0x1p-24f);
  }

 private:
  PENSTOCK_HOST_DEVICE constexpr std::int32_t byte_sum(std::uint64_t i) const {
    const std::uint64_t b = bits(i);
    return static_cast<std::int32_t>((b & 0xff) + (b >> 8 & 0xff) + (b >> 16 & 0xff) +
                                     (b >> 24 & 0xff)) -
           510;
  }
};

// The stream of tensor `tensor` of rank `rank` in a run with this seed.
PENSTOCK_HOST_DEVICE constexpr ValueStream stream_of(std::uint64_t seed, int tensor, int rank) {
  return {ValueStream{seed}.bits(static_cast<std::uint64_t>(tensor) * 4096 +
                                 static_cast<std::uint64_t>(rank))};
}

}  // namespace penstock::bench
