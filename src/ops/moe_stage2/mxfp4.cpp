#include "penstock/ops/moe_stage2/mxfp4.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "penstock/core/error.h"
#include "penstock/numerics/block.h"
#include "penstock/ops/moe_stage2/shape.h"

namespace penstock::moe_stage2 {
namespace {

constexpr std::int32_t kGroup = kMxBlockSize;
constexpr std::int32_t kGroupsPerBlock = kScaleBlock / kGroup;
constexpr std::int32_t kPairsPerGroup = kGroup / 2;

// One 128 x 128 block of one expert, in the caller's arrays.
struct Block {
  const std::uint8_t* pairs;  // of its first row's first group
  const E8M0* scales;
  E4M3* weight;
  std::int64_t intermediate;

  const std::uint8_t* group_pairs(std::int64_t row, std::int64_t group) const {
    return pairs + row * (intermediate / 2) + group * kPairsPerGroup;
  }
  E8M0 group_scale(std::int64_t row, std::int64_t group) const {
    return scales[row * (intermediate / kGroup) + group];
  }
};

// Magnitude code (0 to 7) of a group's largest element: codes order as values.
int largest_code(const std::uint8_t* pairs) {
  int largest = 0;
  for (int i = 0; i < kPairsPerGroup; ++i) {
    largest = std::max({largest, pairs[i] & 0x7, (pairs[i] >> 4) & 0x7});
  }
  return largest;
}

// The least b for which every element of the block is at most 448 * 2^b, not below that of the
// smallest normal f32. Without a nonzero element: 0.
int block_exponent(const Block& block) {
  constexpr int kLeast = -126;
  bool any = false;
  int needed = kLeast;
  for (std::int64_t row = 0; row < kScaleBlock; ++row) {
    for (std::int64_t g = 0; g < kGroupsPerBlock; ++g) {
      const E8M0 scale = block.group_scale(row, g);
      const int code = largest_code(block.group_pairs(row, g));
      if (code == 0 || scale.bits == E8M0::kNanBits) continue;
      const float largest = E2M1::from_bits(static_cast<std::uint8_t>(code)).to_float();
      // 448 = 1.75 * 2^8 and largest = 1 or 1.5 times 2^x: largest * 2^(8 - x) is the last that
      // fits.
      any = true;
      needed = std::max(needed, scale.bits - 127 + std::ilogb(largest) - E4M3::kEmax);
    }
  }
  return any ? needed : 0;
}

// The sixteen E2M1 codes times 2^shift in E4M3, and which of them are exact (bit c).
struct Codes {
  std::array<E4M3, 16> code;
  std::uint32_t exact = 0;
};

// Shifts past either end have no exact element but zero, or cannot be: the block's largest fits.
constexpr int kLeastShift = -12;
constexpr int kMostShift = 9;

std::array<Codes, kMostShift - kLeastShift + 1> make_table() {
  std::array<Codes, kMostShift - kLeastShift + 1> table;
  for (int shift = kLeastShift; shift <= kMostShift; ++shift) {
    Codes& codes = table[static_cast<std::size_t>(shift - kLeastShift)];
    for (std::uint8_t c = 0; c < 16; ++c) {
      const float value = std::ldexp(E2M1::from_bits(c).to_float(), shift);
      codes.code[c] = E4M3::from_float(value);
      if (codes.code[c].to_float() == value) codes.exact |= 1u << c;
    }
  }
  return table;
}

}  // namespace

void repack_mxfp4(std::span<const std::uint8_t> pairs, std::span<const E8M0> scales,
                  std::int64_t experts, std::int32_t hidden, std::int32_t intermediate,
                  std::span<E4M3> weight, std::span<float> weight_scales) {
  require(experts >= 0 && hidden > 0 && intermediate > 0 && hidden % kScaleBlock == 0 &&
              intermediate % kScaleBlock == 0,
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format(
                "repack_mxfp4: {} experts of {} x {}; both sizes have to be multiples of {}",
                experts, hidden, intermediate, kScaleBlock);
          });
  const std::int64_t elements = experts * hidden * intermediate;
  const auto check_size = [&](std::size_t size, std::int64_t want, const char* what) {
    require(static_cast<std::int64_t>(size) == want, ErrorKind::kInvalidArgument, [&] {
      return fmt::format("repack_mxfp4: {} holds {} entries; {} experts of {} x {} have {}", what,
                         size, experts, hidden, intermediate, want);
    });
  };
  check_size(pairs.size(), elements / 2, "pairs");
  check_size(scales.size(), elements / kGroup, "scales");
  check_size(weight.size(), elements, "weight");
  check_size(weight_scales.size(), elements / (kScaleBlock * kScaleBlock), "weight_scales");

  static const auto table = make_table();
  const std::int64_t block_rows = hidden / kScaleBlock;
  const std::int64_t block_columns = intermediate / kScaleBlock;
  for (std::int64_t at = 0; at < experts * block_rows * block_columns; ++at) {
    const std::int64_t first_row = at / block_columns * kScaleBlock;  // of all experts' rows
    const std::int64_t first_column = at % block_columns * kScaleBlock;
    const std::int64_t first = first_row * intermediate + first_column;
    const Block block{pairs.data() + first / 2, scales.data() + first / kGroup,
                      weight.data() + first, intermediate};
    const int b = block_exponent(block);
    weight_scales[static_cast<std::size_t>(at)] = std::ldexp(1.0f, b);
    for (std::int64_t row = 0; row < kScaleBlock; ++row) {
      for (std::int64_t g = 0; g < kGroupsPerBlock; ++g) {
        E4M3* out = block.weight + row * intermediate + g * kGroup;
        const E8M0 scale = block.group_scale(row, g);
        if (scale.bits == E8M0::kNanBits) {
          std::fill_n(out, kGroup, E4M3::from_float(std::nanf("")));
          continue;
        }
        const std::uint8_t* in = block.group_pairs(row, g);
        std::uint32_t used = 0;
        for (int i = 0; i < kPairsPerGroup; ++i) used |= 1u << (in[i] & 0xF) | 1u << (in[i] >> 4);
        const int exponent = scale.bits - 127;
        const Codes& codes = table[static_cast<std::size_t>(
            std::clamp(exponent - b, kLeastShift, kMostShift) - kLeastShift)];
        require((used & ~codes.exact) == 0, ErrorKind::kUnsupported, [&] {
          const std::int64_t expert = first_row / hidden;
          const std::int64_t expert_row = first_row % hidden;
          return fmt::format(
              "repack_mxfp4: expert {}, rows {} to {}, columns {} to {}: a group of exponent {} in "
              "row {} stands too far below the block's largest element (block exponent {}); E4M3 "
              "holds multiples of 2^-9 up to 448 beside each other. Requantise the block, or "
              "give these weights as FP8",
              expert, expert_row, expert_row + kScaleBlock - 1, first_column,
              first_column + kScaleBlock - 1, exponent, expert_row + row, b);
        });
        for (int i = 0; i < kPairsPerGroup; ++i) {
          out[2 * i] = codes.code[in[i] & 0xF];
          out[2 * i + 1] = codes.code[in[i] >> 4];
        }
      }
    }
  }
}

}  // namespace penstock::moe_stage2
