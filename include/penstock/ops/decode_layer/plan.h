// Index arithmetic of the decode layer, the same source for hosts and kernels: how a layer's
// matrices are cut into weight units, how units fall to CTAs, where hand-off packets lie.
#pragma once

#include <cstdint>

#include "penstock/core/host_device.h"
#include "penstock/ops/decode_layer/shape.h"

namespace penstock::decode {

// A weight unit: 16 output rows x unit_k columns (128 or 64) of E4M3 in the order in which a warp's
// tensor-core fragments read them (the A operand), then four f32 scales. Byte (2 j + h) * 512 +
// lane * 16 + i of a unit (j < unit_k / 64, h < 2, lane < 32, i < 16) is row 8 h + lane / 4, column
// 64 j + 16 (lane % 4) + i. Scale 2 j + h belongs to columns 64 j .. 64 j + 63 of rows 8 h .. 8 h +
// 7. A matrix is [tile][unit], tile = row / 16, unit = column / unit_k.
inline constexpr int kTileRows = 16;
inline constexpr int kUnitColumns = 128;
inline constexpr int kScaleBytes = 16;
// The router is bf16 and plain: a unit is up to 1024 columns of one row.
inline constexpr int kRouterColumns = 1024;

inline constexpr int kWarps = 8;
inline constexpr int kThreads = kWarps * 32;
// A slot of the weight ring holds a unit for each warp.
inline constexpr int kSlotBytes = kWarps * (kTileRows * kUnitColumns + kScaleBytes);
inline constexpr int kMaxRingSlots = 12;
inline constexpr int kSplitPicks = 64;  // picks of one attention task, whatever the row count
inline constexpr int kMaxSplits = kMaxPicks / kSplitPicks;
// Bytes of a cache row in shared memory, bf16; 16 mod 128, so that ldmatrix meets no bank twice.
inline constexpr int kKeyPitch = 2 * kKvRow + 16;
inline constexpr int kHeadGroup = 8;     // heads of one attention task: the N of an mma
inline constexpr int kPacketValues = 6;  // bf16 values a 16-byte packet carries beside its tag
inline constexpr int kPartialPackets = (kLatent + kPacketValues - 1) / kPacketValues + 1;
// Chunks whose sums lie in shared memory at once. Chunk c of a tile is its units c, c + 8, ...,
// summed by one warp in registers; the chunks of a tile are added in their order, so bits depend on
// the matrix alone.
inline constexpr int kWaveChunks = 24;
// Shared memory of a CTA beside activations, partial sums and ring: barriers, routing, staging.
inline constexpr int kFixedBytes = 10752;

PENSTOCK_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// One matrix in units.
struct MatrixPlan {
  int tiles = 0;        // rows / 16
  int unit_k = 0;       // columns of a unit
  int units = 0;        // columns / unit_k
  int chunks = 0;       // min(units, kWarps)
  int block_tiles = 0;  // tiles of one block, the unit of work of a CTA
  int blocks = 0;
  int packets = 0;  // packets of one block and row: ceil(16 * block_tiles / 6)

  PENSTOCK_HOST_DEVICE constexpr int unit_bytes() const { return kTileRows * unit_k + kScaleBytes; }
  PENSTOCK_HOST_DEVICE constexpr std::int64_t bytes() const {
    return static_cast<std::int64_t>(tiles) * units * unit_bytes();
  }
};

PENSTOCK_HOST_DEVICE constexpr int unit_columns(int columns) {
  return columns % kUnitColumns == 0 ? kUnitColumns : 64;
}

PENSTOCK_HOST_DEVICE constexpr MatrixPlan matrix_plan(int rows, int columns, int block_tiles) {
  MatrixPlan m;
  m.tiles = rows / kTileRows;
  m.unit_k = unit_columns(columns);
  m.units = columns / m.unit_k;
  m.chunks = m.units < kWarps ? m.units : kWarps;
  m.block_tiles = block_tiles;
  m.blocks = ceil_div(m.tiles, block_tiles);
  m.packets = ceil_div(kTileRows * block_tiles, kPacketValues);
  return m;
}

// Everything that a launch needs to know about sizes. Plain data, passed by value to the kernel.
struct DecodePlan {
  int rows = 0;      // rows of one launch, at most 8
  int capacity = 0;  // rows for which the mailboxes are laid out, at most 8
  int hidden = 0;
  int q_lora = 0;
  int heads = 0;  // of this rank
  int experts = 0;
  int top_k = 0;
  bool dense = false;  // experts 0 .. experts - 1 and the last slice run for every row, weight 1
  int inter = 0;       // of this rank
  int ranks = 0;
  int rank = 0;
  int grid = 0;
  int head_groups = 0;
  MatrixPlan qkv_a, q_b, uk, uv, o, up_gate, down;  // up_gate, down: of one expert
  int router_unit_k = 0;
  int router_chunks = 0;
  int router_rows = 0;     // experts of one CTA
  int router_packets = 0;  // ceil(router_rows / 3)
  int uv_parts = 0;        // UV tasks of one head and row
  int ring_slots = 0;
  int act_bytes = 0;  // shared memory of the activation region
  int smem_bytes = 0;
  // Mailboxes, in packets from the start of one parity's half.
  std::int64_t box_qkv_a = 0, box_q_b = 0, box_uk = 0, box_partial = 0, box_o = 0, box_a = 0;
  std::int64_t box_router = 0, box_mid = 0, box_x = 0, box_packets = 0;
  // Window (written by peers), in packets from the start of one parity's half.
  std::int64_t win_attention = 0, win_experts = 0, win_packets = 0;

  // What a [stage][rows] box is indexed by: ((row * blocks + block) * packets + j).
  PENSTOCK_HOST_DEVICE constexpr int mid_packets() const { return inter / 4; }
  PENSTOCK_HOST_DEVICE constexpr int uv_tasks(int rows_now) const {
    return heads * rows_now * uv_parts;
  }
  PENSTOCK_HOST_DEVICE constexpr int uv_part_tiles() const { return kValue / kTileRows / uv_parts; }
  PENSTOCK_HOST_DEVICE constexpr int uv_part_packets() const {
    return ceil_div(kValue / uv_parts, kPacketValues);
  }
};

// Byte offsets of the parts of one layer's prepared weights; all multiples of 256.
struct WeightLayout {
  std::int64_t qkv_a, q_b, uk, uv, o, router, up_gate, down;
  std::int64_t norm_input, norm_q, norm_kv, norm_post, bias;  // f32
  std::int64_t bytes;
};

// Plan for a shape on a device with `sms` multiprocessors to use and `smem_limit` bytes of shared
// memory a block. `rows_now` rows are laid out (1 .. 8). Throws Unsupported where it cannot fit.
DecodePlan make_plan(const DecodeShape& shape, int sms, int smem_limit, int rows_now);

// Largest number of rows one launch can take: what fits in shared memory, at most 8.
int rows_per_launch(const DecodeShape& shape, int sms, int smem_limit);

// theta^(-2 i / rope) of pair i, in f32: frequency and angle (position * frequency) are rounded to
// f32 before sine and cosine are taken, because models are trained and served that way
// (transformers, vLLM). At position 200000 an f32 angle is off by up to 0.008; exact angles would
// be another model.
float rope_frequency(double theta, int pair);

// Independent of CTA count, rows and device.
WeightLayout weight_layout(const DecodeShape& shape);

}  // namespace penstock::decode
