// The inputs behind data/conversion_tables.inc, as tools/make_numerics_tables.py lists them. Shared
// by host and GPU tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "penstock/numerics/formats.h"

namespace penstock::probes {

// Mantissas: each 8-bit leading pattern and its two neighbours. With all exponents and signs these
// hold every tie of every format with the values one ulp to either side, and the ends of each
// binade.
inline constexpr int kMantissas = 256 * 3;
inline constexpr int kBinades = 512;  // sign * 256 + exponent field

constexpr std::uint32_t probe_bits(int binade, int mantissa) {
  const std::int64_t m = (static_cast<std::int64_t>(mantissa / 3) << 15) + mantissa % 3 - 1;
  return (static_cast<std::uint32_t>(binade) << 23) | (static_cast<std::uint32_t>(m) & 0x7FFFFFu);
}

inline std::vector<float> all_probes() {
  std::vector<float> result;
  result.reserve(static_cast<std::size_t>(kBinades) * kMantissas);
  for (int b = 0; b < kBinades; ++b) {
    for (int m = 0; m < kMantissas; ++m) result.push_back(float_from_bits(probe_bits(b, m)));
  }
  return result;
}

// The matrix for block formats: partial FP8 blocks at both edges, 9 MX blocks a row; zeros, signed
// zeros, subnormals, amax around powers of two and around the elements' largest values, near f32's
// largest, one NaN, one Inf.
inline constexpr int kRows = 131;
inline constexpr int kColumns = 288;

constexpr std::uint32_t mix(std::uint32_t i) {
  std::uint32_t h = i * 0x9E3779B1u + 0x7F4A7C15u;
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  return h ^ (h >> 16);
}

inline std::vector<float> block_matrix() {
  std::vector<float> x(static_cast<std::size_t>(kRows) * kColumns);
  const auto at = [&](int row, int column) -> float& {
    return x[static_cast<std::size_t>(row) * kColumns + static_cast<std::size_t>(column)];
  };
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      const std::uint32_t h = mix(static_cast<std::uint32_t>(row * kColumns + column));
      // A 24-bit significand times a power of two: both factors and the product are exact.
      const auto significand = static_cast<float>(static_cast<std::int32_t>(h >> 8) - 0x800000);
      const int exponent = static_cast<int>(h & 0xFFu) % 12 - 6 - 23;
      at(row, column) =
          significand * float_from_bits(static_cast<std::uint32_t>(exponent + 127) << 23);
      if (row == 0) at(row, column) = 0.0f;
      if (row == 1) at(row, column) = float_from_bits(h & 0x80000000u);
      if (row == 2) at(row, column) = float_from_bits(h & 0x807FFFFFu);
      if (row == 128) at(row, column) = float_from_bits((h & 0x807FFFFFu) | 0x7F000000u);
    }
  }
  constexpr std::uint32_t kAroundOne[3] = {1u, 0u, 0x7FFFFFu};
  constexpr std::uint32_t kAround448[3] = {0x600001u, 0x600000u, 0x5FFFFFu};
  constexpr std::uint32_t kAround6[3] = {0x400001u, 0x400000u, 0x3FFFFFu};
  for (int b = 0; b < kColumns / 32; ++b) {
    const auto exponent = static_cast<std::uint32_t>(b);
    at(3, 32 * b) = float_from_bits(((120u + exponent) << 23) | kAroundOne[b % 3]);
    at(4, 32 * b) = float_from_bits(((128u + exponent) << 23) | kAround448[b % 3]);
    at(5, 32 * b) = float_from_bits(((128u + exponent) << 23) | kAround6[b % 3]);
  }
  at(129, 40) = float_from_bits(0x7FC01234u);
  at(130, 200) = float_from_bits(0xFF800000u);
  return x;
}

// Dividends and divisors whose quotient lies at a tie of E4M3 or an ulp beside it: here a division
// and a multiplication by the reciprocal part ways.
struct Quotient {
  float x, scale;
};
inline std::vector<Quotient> tie_quotients() {
  std::vector<Quotient> result;
  for (std::uint32_t i = 0; i < 2048; ++i) {
    const float scale = float_from_bits((120u << 23) | (mix(i) & 0x7FFFFFu));
    for (std::uint32_t tie = 0; tie < 8; ++tie) {  // 1.0001b, 1.0011b, ... times the scale
      const float at = float_from_bits((127u << 23) | (2u * tie + 1u) << 19) * scale;
      for (const std::uint32_t step : {~0u, 0u, 1u}) {
        result.push_back({float_from_bits(float_bits(at) + step), scale});
      }
    }
  }
  return result;
}

// FNV-1a over the `width` low bytes of each value, as in the generator.
class RowDigest {
 public:
  void add(std::uint64_t value, int width) {
    for (int i = 0; i < width; ++i) {
      state_ = (state_ ^ ((value >> (8 * i)) & 0xFFu)) * 0x100000001B3ull;
    }
  }
  std::uint64_t value() const { return state_; }

 private:
  std::uint64_t state_ = 0xCBF29CE484222325ull;
};

}  // namespace penstock::probes
