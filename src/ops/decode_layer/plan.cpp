#include "penstock/ops/decode_layer/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "penstock/core/error.h"

namespace penstock::decode {
namespace {

constexpr int kMaxBlockTiles = 4;
constexpr int kMinRingSlots = 3;

int power_of_two_at_least(int n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

int activation_bytes(const DecodeShape& shape, int rows) {
  const auto row = [](int columns) { return 2 * columns + 16; };
  // Queries, keys, probabilities.
  const int attention =
      kHeadGroup * kKeyPitch + kSplitPicks * kKeyPitch + 2 * kHeadGroup * (kSplitPicks + 8) * 2;
  const int combine = row(kLatent) + 2 * kLatent * 4;  // two groups of splits
  return std::max({rows * row(shape.hidden), rows * row(shape.q_lora), rows * row(kNope), attention,
                   combine, rows * row(shape.local_heads() * kValue),
                   (rows * (shape.top_k + 1) + 1) * row(shape.local_intermediate())});
}

}  // namespace

DecodePlan make_plan(const DecodeShape& shape, int sms, int smem_limit, int rows_now) {
  validate(shape);
  require(sms >= 1, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("decode_layer: an SM budget of {} leaves nothing to run on", sms);
  });
  require(rows_now >= 1 && rows_now <= 8, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("decode_layer: a launch takes 1 to 8 rows, not {}", rows_now);
  });
  DecodePlan p;
  p.rows = rows_now;
  p.capacity = 8;
  p.hidden = shape.hidden;
  p.q_lora = shape.q_lora;
  p.heads = shape.local_heads();
  p.experts = shape.experts;
  p.top_k = shape.top_k;
  p.dense = shape.dense;
  p.inter = shape.local_intermediate();
  p.ranks = shape.ranks;
  p.rank = shape.rank;
  p.head_groups = ceil_div(p.heads, kHeadGroup);

  // Every CTA owns one block of hidden columns: it is a producer of each row gather, which is what
  // makes two parities of mailboxes enough.
  const int hidden_tiles = p.hidden / kTileRows;
  const int column_tiles = ceil_div(hidden_tiles, std::min(sms, hidden_tiles));
  // The chunks of a CTA's tiles of one expert's down projection share a wave.
  const int most_tiles =
      std::min(kMaxBlockTiles, kWaveChunks / matrix_plan(p.hidden, p.inter, 1).chunks);
  require(column_tiles <= most_tiles, ErrorKind::kUnsupported, [&] {
    return fmt::format(
        "decode_layer: {} multiprocessors for hidden {} and {} intermediate columns a rank leave "
        "{} "
        "tiles of 16 columns to one CTA, at most {} fit: allow at least {} multiprocessors, or use "
        "more ranks",
        sms, p.hidden, p.inter, column_tiles, most_tiles, ceil_div(hidden_tiles, most_tiles));
  });
  p.grid = ceil_div(hidden_tiles, column_tiles);

  const int qkv_rows = p.q_lora + kKvRow;
  p.qkv_a = matrix_plan(qkv_rows, p.hidden,
                        std::min(kMaxBlockTiles, ceil_div(qkv_rows / kTileRows, p.grid)));
  const auto head_blocks = [&](int rows) {
    return std::min(kMaxBlockTiles, power_of_two_at_least(ceil_div(rows / kTileRows, p.grid)));
  };
  p.q_b = matrix_plan(p.heads * kQueryHead, p.q_lora, head_blocks(p.heads * kQueryHead));
  p.uk = matrix_plan(p.heads * kLatent, kNope, head_blocks(p.heads * kLatent));
  p.uv = matrix_plan(p.heads * kValue, kLatent, 1);
  p.o = matrix_plan(p.hidden, p.heads * kValue, column_tiles);
  p.up_gate = matrix_plan(2 * p.inter, p.hidden, 1);
  p.down = matrix_plan(p.hidden, p.inter, column_tiles);
  p.router_unit_k = p.hidden % kRouterColumns == 0 ? kRouterColumns : 256;
  p.router_chunks = p.hidden / p.router_unit_k;
  p.router_rows = ceil_div(p.experts, p.grid);
  p.router_packets = ceil_div(p.router_rows, 3);
  p.uv_parts = 8;
  while (p.uv_parts > 1 && p.heads * rows_now * p.uv_parts > 128) p.uv_parts /= 2;

  p.act_bytes = (activation_bytes(shape, rows_now) + 127) / 128 * 128;
  const int rows_template = power_of_two_at_least(rows_now);
  const int partial_bytes = kWaveChunks * kTileRows * rows_template * 4;
  const int fresh_bytes = rows_template * kKeyPitch;
  const int left = smem_limit - kFixedBytes - p.act_bytes - fresh_bytes - partial_bytes;
  p.ring_slots = std::min(kMaxRingSlots, left / kSlotBytes);
  require(left > 0 && p.ring_slots >= kMinRingSlots, ErrorKind::kUnsupported, [&] {
    return fmt::format(
        "decode_layer: {} rows need {} bytes of activations in shared memory, which leaves {} of "
        "{} "
        "for the weight ring (at least {}): use fewer rows a launch or more ranks",
        rows_now, p.act_bytes, left, smem_limit, kMinRingSlots * kSlotBytes);
  });
  p.smem_bytes =
      kFixedBytes + p.act_bytes + fresh_bytes + partial_bytes + p.ring_slots * kSlotBytes;

  std::int64_t at = 0;
  const auto box = [&](std::int64_t packets_per_row) {
    const std::int64_t begin = at;
    at += packets_per_row * p.capacity;
    return begin;
  };
  p.box_qkv_a = box(static_cast<std::int64_t>(p.qkv_a.blocks) * p.qkv_a.packets);
  p.box_q_b = box(static_cast<std::int64_t>(p.q_b.blocks) * p.q_b.packets);
  p.box_uk = box(static_cast<std::int64_t>(p.uk.blocks) * p.uk.packets);
  p.box_partial = box(static_cast<std::int64_t>(kMaxSplits) * p.heads * kPartialPackets);
  p.box_o = box(static_cast<std::int64_t>(p.heads) * 8 * ceil_div(kValue / 8, kPacketValues));
  p.box_a = box(static_cast<std::int64_t>(p.grid) * p.o.packets);
  p.box_router = box(static_cast<std::int64_t>(p.grid) * p.router_packets);
  p.box_mid = box(static_cast<std::int64_t>(p.top_k + 1) * p.mid_packets());
  p.box_x = box(static_cast<std::int64_t>(p.grid) * p.o.packets);
  p.box_packets = at;
  at = 0;
  p.win_attention = box(static_cast<std::int64_t>(p.ranks) * p.grid * p.o.packets);
  p.win_experts = box(static_cast<std::int64_t>(p.ranks) * p.grid * p.o.packets);
  p.win_packets = at;
  return p;
}

int rows_per_launch(const DecodeShape& shape, int sms, int smem_limit) {
  for (int rows = std::min(8, shape.rows); rows > 1; --rows) {
    try {
      make_plan(shape, sms, smem_limit, rows);
      return rows;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kUnsupported) throw;
    }
  }
  make_plan(shape, sms, smem_limit, 1);
  return 1;
}

float rope_frequency(double theta, int pair) {
  return 1.0F / std::pow(static_cast<float>(theta), static_cast<float>(2 * pair) / kRope);
}

WeightLayout weight_layout(const DecodeShape& shape) {
  validate(shape);
  WeightLayout w{};
  std::int64_t at = 0;
  const auto part = [&](std::int64_t bytes) {
    const std::int64_t begin = at;
    at += (bytes + 255) / 256 * 256;
    return begin;
  };
  const int heads = shape.local_heads();
  const int inter = shape.local_intermediate();
  w.qkv_a = part(matrix_plan(shape.q_lora + kKvRow, shape.hidden, 1).bytes());
  w.q_b = part(matrix_plan(heads * kQueryHead, shape.q_lora, 1).bytes());
  w.uk = part(matrix_plan(heads * kLatent, kNope, 1).bytes());
  w.uv = part(matrix_plan(heads * kValue, kLatent, 1).bytes());
  w.o = part(matrix_plan(shape.hidden, heads * kValue, 1).bytes());
  w.router = part(static_cast<std::int64_t>(shape.experts) * shape.hidden * 2);
  w.up_gate = part((shape.experts + 1) * matrix_plan(2 * inter, shape.hidden, 1).bytes());
  w.down = part((shape.experts + 1) * matrix_plan(shape.hidden, inter, 1).bytes());
  w.norm_input = part(shape.hidden * 4);
  w.norm_q = part(shape.q_lora * 4);
  w.norm_kv = part(kLatent * 4);
  w.norm_post = part(shape.hidden * 4);
  w.bias = part(shape.experts * 4);
  w.bytes = at;
  return w;
}

}  // namespace penstock::decode
