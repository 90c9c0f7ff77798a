#include "ops/decode_layer/cuda/inspect.h"

#include <cstring>
#include <span>

#include "penstock/numerics/formats.h"

namespace penstock::decode {
namespace {

float bf16_value(std::uint32_t bits) {
  return Bf16::from_bits(static_cast<std::uint16_t>(bits)).to_float();
}

// A box of `blocks` blocks of `packets` packets a row: packet j of a block holds its values 6 j to
// 6 j + 5.
std::vector<float> read_box(std::span<const std::uint32_t> words, std::int64_t at, int rows,
                            int blocks, int packets, int block_columns, int columns) {
  std::vector<float> v;
  v.reserve(static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns));
  for (int s = 0; s < rows; ++s) {
    for (int c = 0; c < columns; ++c) {
      const int block = c / block_columns;
      const int j = c % block_columns / kPacketValues;
      const int i = c % block_columns % kPacketValues;
      const std::uint32_t w = words[static_cast<std::size_t>(
          (at + (static_cast<std::int64_t>(s) * blocks + block) * packets + j) * 4 + i / 2)];
      v.push_back(bf16_value(i % 2 == 0 ? w : w >> 16));
    }
  }
  return v;
}

std::vector<float> scores_of(const DecodePlan& p, const DecodeShape& shape,
                             std::span<const std::uint32_t> box, int rows) {
  std::vector<float> scores;
  for (int s = 0; s < rows; ++s) {
    for (int e = 0; e < shape.experts; ++e) {
      const std::int64_t packet =
          p.box_router +
          (static_cast<std::int64_t>(s) * p.grid + e / p.router_rows) * p.router_packets +
          e % p.router_rows / 3;
      float score;
      std::memcpy(&score, &box[static_cast<std::size_t>(packet * 4 + e % p.router_rows % 3)], 4);
      scores.push_back(score);
    }
  }
  return scores;
}

}  // namespace

std::vector<float> read_scores(const DecodeLayer& op, const DecodeShape& shape, int rows,
                               int parity) {
  return scores_of(op.plan(rows), shape, op.mailboxes(parity), rows);
}

StageValues read_stages(const DecodeLayer& op, const DecodeShape& shape, int rows, int parity) {
  const DecodePlan& p = op.plan(rows);
  const std::vector<std::uint32_t> box = op.mailboxes(parity);
  const std::vector<std::uint32_t> window = op.window_words(parity);
  const auto matrix = [&](std::int64_t at, const MatrixPlan& m, int columns) {
    return read_box(box, at, rows, m.blocks, m.packets, m.block_tiles * kTileRows, columns);
  };
  const auto hidden = [&](std::span<const std::uint32_t> words, std::int64_t at) {
    return read_box(words, at, rows, p.grid, p.o.packets, p.o.block_tiles * kTileRows,
                    shape.hidden);
  };
  const std::int64_t own =
      static_cast<std::int64_t>(shape.rank) * p.capacity * p.grid * p.o.packets;
  StageValues v;
  v.c = matrix(p.box_qkv_a, p.qkv_a, shape.q_lora + kKvRow);
  v.q = matrix(p.box_q_b, p.q_b, p.heads * kQueryHead);
  v.q_lat = matrix(p.box_uk, p.uk, p.heads * kLatent);
  v.o = read_box(box, p.box_o, rows, p.heads * p.uv_parts, p.uv_part_packets(), kValue / p.uv_parts,
                 p.heads * kValue);
  v.y_attention = hidden(window, p.win_attention + own);
  v.a = hidden(box, p.box_a);
  v.y_experts = hidden(window, p.win_experts + own);
  v.scores = scores_of(p, shape, box, rows);
  for (int s = 0; s < rows; ++s) {
    for (int k = 0; k <= shape.top_k; ++k) {
      for (int m = 0; m < p.inter; ++m) {
        const std::int64_t packet =
            p.box_mid + (static_cast<std::int64_t>(s) * (shape.top_k + 1) + k) * p.mid_packets() +
            m / 4;
        const std::uint32_t w = box[static_cast<std::size_t>(packet * 4 + m % 4 / 2)];
        v.mid.push_back(bf16_value(m % 2 == 0 ? w : w >> 16));
      }
    }
  }
  return v;
}

}  // namespace penstock::decode
