// All ranks' operands of one call, and what each rank has to get, made without plan or window.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "penstock/ops/moe_stage2/moe_stage2.h"
#include "penstock/ops/moe_stage2/routing.h"

namespace penstock::moe_stage2 {

// What the operands look like.
enum class Values {
  kNormal,    // normal, as E4M3
  kIntegers,  // small integers: tensor cores sum a block of K without truncation
};

class World {
 public:
  struct Rank {
    SourceRows rows;
    std::vector<E4M3> act, weight;
    std::vector<float> act_scales, weight_scales, slot_weight;
    std::vector<Bf16> out;
  };

  // `scale` multiplies the rows' scales: a power of two changes every call's data and no rounding.
  World(const Shape& shape, Pattern pattern, std::uint64_t seed, int call,
        Values kind = Values::kNormal, float scale = 1.0f)
      : shape_(shape), routing_(make_routing(shape, pattern, seed, call)) {
    std::mt19937_64 random(seed + 977 * static_cast<std::uint64_t>(call));
    std::normal_distribution<float> normal;
    const auto values = [&](std::size_t count) {
      std::vector<E4M3> list(count);
      for (auto& x : list) {
        x = E4M3::from_float(kind == Values::kNormal
                                 ? 100.0f * normal(random)
                                 : static_cast<float>(static_cast<int>(random() % 9) - 4));
      }
      return list;
    };
    const auto scales = [&](std::size_t count) {
      std::vector<float> list(count);
      for (auto& x : list) x = std::exp(normal(random));
      return list;
    };
    const auto k = static_cast<std::size_t>(shape.intermediate);
    const auto h = static_cast<std::size_t>(shape.hidden);
    const auto experts = static_cast<std::size_t>(shape.experts_per_rank());
    for (int r = 0; r < shape.ranks; ++r) {
      Rank& rank = ranks_.emplace_back();
      rank.rows = rows_at(routing_, r);
      rank.act = values(rank.rows.origin.size() * k);
      rank.act_scales = scales(rank.rows.origin.size() * (k / 128));
      for (float& x : rank.act_scales) x *= scale;
      rank.weight = values(experts * h * k);
      rank.weight_scales = scales(experts * (h / 128) * (k / 128));
      rank.slot_weight = scales(static_cast<std::size_t>(routing_.tokens(r) * shape.top_k));
      rank.out.assign(static_cast<std::size_t>(routing_.tokens(r)) * h, Bf16::from_bits(0xA5A5));
    }
  }

  const Rank& rank(int r) const { return ranks_[static_cast<std::size_t>(r)]; }
  int tokens(int r) const { return routing_.tokens(r); }
  const Shape& shape() const { return shape_; }

  Operands operands(int r) {
    Rank& rank = ranks_[static_cast<std::size_t>(r)];
    Operands o;
    o.gemm = gemm(rank);
    o.expert_rows = rank.rows.expert_rows.data();
    o.origin = rank.rows.origin.data();
    o.tiles = rank.rows.tiles();
    o.weight = rank.slot_weight.data();
    o.tokens = routing_.tokens(r);
    o.out = rank.out.data();
    return o;
  }

  // What rank r has to get, [tokens, hidden].
  std::vector<Bf16> expected(int r) const {
    // (token, slot) -> wire row, straight from the sources' origins.
    std::map<std::pair<int, int>, std::vector<unsigned char>> rows;
    for (const Rank& source : ranks_) {
      std::size_t row = 0;
      for (std::size_t e = 0; e < source.rows.expert_rows.size(); ++e) {
        for (std::int32_t i = 0; i < source.rows.expert_rows[e]; ++i, ++row) {
          const RowOrigin origin = source.rows.origin[row];
          if (origin.rank != r) continue;
          auto& bytes = rows[{origin.token, origin.slot}];
          bytes.resize(static_cast<std::size_t>(wire_row_bytes(shape_.hidden, shape_.wire)));
          write_row(gemm(source), static_cast<std::int64_t>(row), static_cast<std::int32_t>(e),
                    shape_.wire, bytes.data());
        }
        row = (row + kTileRows - 1) / kTileRows * kTileRows;
      }
    }
    const Rank& rank = ranks_[static_cast<std::size_t>(r)];
    std::vector<Bf16> out;
    std::vector<const unsigned char*> slots(static_cast<std::size_t>(shape_.top_k));
    for (int t = 0; t < routing_.tokens(r); ++t) {
      for (int k = 0; k < shape_.top_k; ++k) {
        slots[static_cast<std::size_t>(k)] = rows.at({t, k}).data();
      }
      for (int c = 0; c < shape_.hidden; ++c) {
        out.push_back(combine_element(slots.data(), rank.slot_weight.data() + t * shape_.top_k,
                                      shape_.top_k, shape_.hidden, shape_.wire, c));
      }
    }
    return out;
  }

  void expect_right(int r, const std::string& what) {
    const std::vector<Bf16> want = expected(r);
    const std::vector<Bf16>& got = ranks_[static_cast<std::size_t>(r)].out;
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(got[i].bits, want[i].bits)
          << what << ": rank " << r << " token " << i / static_cast<std::size_t>(shape_.hidden)
          << " column " << i % static_cast<std::size_t>(shape_.hidden);
    }
  }

 private:
  GemmOperands gemm(const Rank& rank) const {
    return {rank.act.data(),
            rank.act_scales.data(),
            static_cast<std::int64_t>(rank.rows.origin.size()),
            rank.weight.data(),
            rank.weight_scales.data(),
            shape_.hidden,
            shape_.intermediate};
  }
  Shape shape_;
  Routing routing_;
  std::vector<Rank> ranks_;
};

}  // namespace penstock::moe_stage2
