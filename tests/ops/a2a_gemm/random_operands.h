// Operands of all ranks, in host memory.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "penstock/numerics/block.h"
#include "penstock/ops/a2a_gemm/reference.h"

namespace penstock::a2a_gemm {

enum class Data {
  kSmallIntegers,  // every sum is exact in f32 in any order
  kRandom,
};

// Buffers of one rank and the view of them.
struct RankData {
  std::vector<std::byte> x;
  std::vector<float> x_scales;
  std::vector<std::byte> out;
  Operands operands;
};

class World {
 public:
  World(const Shape& shape, Data data, std::uint64_t seed) : shape_(shape), ranks_(kMaxRanks) {
    std::mt19937_64 random(seed);
    const auto rows = static_cast<std::size_t>(total_rows(shape));
    const auto blocks = static_cast<std::size_t>(shape.scale_blocks());
    const std::size_t stride = (rows + 15) / 16 * 16 + 16;
    w_ = elements(static_cast<std::size_t>(shape.ranks) * static_cast<std::size_t>(shape.columns) *
                      static_cast<std::size_t>(shape.depth),
                  data, random);
    w_scales_ = scales(static_cast<std::size_t>(shape.ranks) *
                           static_cast<std::size_t>(shape.column_scale_blocks()) * blocks,
                       data, random);
    for (std::int32_t r = 0; r < shape.ranks; ++r) {
      RankData& rank = ranks_[static_cast<std::size_t>(r)];
      rank.x = elements(rows * static_cast<std::size_t>(shape.depth), data, random);
      rank.x_scales = scales(blocks * stride, data, random);
      rank.out.assign(static_cast<std::size_t>(shape.rows[static_cast<std::size_t>(r)]) *
                          static_cast<std::size_t>(shape.columns) * 2,
                      std::byte{0xA5});
      rank.operands = {rank.x.data(),
                       shape.format == Format::kFp8 ? rank.x_scales.data() : nullptr,
                       static_cast<std::int64_t>(stride),
                       w_.data(),
                       shape.format == Format::kFp8 ? w_scales_.data() : nullptr,
                       rank.out.data()};
      operands_.push_back(rank.operands);
    }
  }

  const Shape& shape() const { return shape_; }
  RankData& rank(int r) { return ranks_[static_cast<std::size_t>(r)]; }
  const std::vector<Operands>& operands() const { return operands_; }
  const std::vector<std::byte>& w() const { return w_; }
  const std::vector<float>& w_scales() const { return w_scales_; }
  // fp8: takes bf16 rows as every rank's X instead, quantised by quantise_x(), and returns them
  // ([rank][total rows, depth]) for Options::quantise_x.
  std::vector<std::vector<Bf16>> take_bf16_rows(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    std::vector<std::vector<Bf16>> rows;
    for (std::int32_t r = 0; r < shape_.ranks; ++r) {
      RankData& rank = ranks_[static_cast<std::size_t>(r)];
      std::vector<Bf16> x(rank.x.size());
      for (Bf16& v : x) v = Bf16::from_float(normal(random));
      quantise_x(shape_, x.data(), reinterpret_cast<E4M3*>(rank.x.data()), rank.x_scales.data(),
                 rank.operands.x_scale_stride);
      rows.push_back(std::move(x));
    }
    return rows;
  }
  void poison() {
    for (RankData& rank : ranks_) rank.out.assign(rank.out.size(), std::byte{0xA5});
  }
  std::size_t expected_bytes(int r) const { return ranks_[static_cast<std::size_t>(r)].out.size(); }
  std::vector<std::byte> expected(int r) const {
    std::vector<std::byte> out(expected_bytes(r));
    reference(shape_, r, operands_.data(), out.data());
    return out;
  }

 private:
  std::vector<std::byte> elements(std::size_t count, Data data, std::mt19937_64& random) const {
    std::vector<std::byte> bytes(count * static_cast<std::size_t>(shape_.element_bytes()));
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < count; ++i) {
      const float value = data == Data::kRandom
                              ? normal(random)
                              : static_cast<float>(static_cast<int>(random() % 5) - 2);
      if (shape_.format == Format::kBf16) {
        reinterpret_cast<Bf16*>(bytes.data())[i] = Bf16::from_float(value);
      } else {
        reinterpret_cast<E4M3*>(bytes.data())[i] = E4M3::from_float(value);
      }
    }
    return bytes;
  }
  std::vector<float> scales(std::size_t count, Data data, std::mt19937_64& random) const {
    std::vector<float> values(count);
    for (float& v : values) {
      v = data == Data::kRandom ? 0.25f + static_cast<float>(random() % 1024) / 1024.0f
                                : static_cast<float>(1 << (random() % 2));
    }
    return values;
  }

  Shape shape_;
  std::vector<std::byte> w_;
  std::vector<float> w_scales_;
  std::vector<RankData> ranks_;
  std::vector<Operands> operands_;
};

}  // namespace penstock::a2a_gemm
