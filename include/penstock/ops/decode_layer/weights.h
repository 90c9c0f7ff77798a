// From checkpoint tensors to the decode kernel's weight units, and back.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "penstock/core/tensor.h"
#include "penstock/ops/decode_layer/plan.h"
#include "penstock/ops/decode_layer/shape.h"

namespace penstock::decode {

// A matrix [rows, cols] = [outputs, inputs] as official FP8 checkpoints hold it: E4M3 data and f32
// scales [ceil(rows / 128), ceil(cols / 128)], w = q * s. Attention matrices may have one scale a
// row instead, [rows] or [rows, 1] (`weight_scale` of per-channel checkpoints), if
// DecodeShape::attention_scales says so.
struct Fp8Matrix {
  TensorView data;
  TensorView scale;
};
constexpr bool per_channel(const Fp8Matrix& m) {
  return m.scale.rank == 1 ||
         (m.scale.rank == 2 && m.scale.shape[1] == 1 && m.scale.shape[0] == m.data.shape[0]);
}

// All tensors of one decoder layer, whole (not sharded); `shape` says which part a rank takes. A
// MoE layer leaves dense_* empty, a dense layer all of router, bias, experts and shared_*.
struct LayerTensors {
  Fp8Matrix q_a;   // [q_lora, hidden]
  Fp8Matrix kv_a;  // [576, hidden]
  Fp8Matrix q_b;   // [heads * 256, q_lora]
  Fp8Matrix kv_b;  // [heads * 448, 512]: of each head 192 rows W_UK, 256 rows W_UV
  Fp8Matrix o;     // [hidden, heads * 256]
  TensorView norm_input, norm_q, norm_kv, norm_post;  // bf16 [hidden], [q_lora], [512], [hidden]
  TensorView router;                                  // bf16 [experts, hidden]
  TensorView bias;                                    // f32 [experts]
  std::vector<Fp8Matrix> gate, up;                    // [experts], each [intermediate, hidden]
  std::vector<Fp8Matrix> down;                        // [experts], each [hidden, intermediate]
  Fp8Matrix shared_gate, shared_up, shared_down;
  Fp8Matrix dense_gate, dense_up;  // [shape.dense_width(), hidden]
  Fp8Matrix dense_down;            // [hidden, shape.dense_width()]
};

// Where expert `expert` (experts: the shared one) lies: its matrices and the first intermediate
// column in them. Of a dense layer: slice `expert`.
struct ExpertTensors {
  const Fp8Matrix* gate;
  const Fp8Matrix* up;
  const Fp8Matrix* down;
  std::int64_t first;
};
ExpertTensors expert_tensors(const DecodeShape& shape, const LayerTensors& tensors, int expert);

// Throws InvalidArgument (shape, missing data) or Unsupported (dtype, NaN weights) naming the
// tensor and what is accepted. Reads every byte of the rank's share.
void validate(const DecodeShape& shape, const LayerTensors& tensors);

// Writes one rank's share of a layer, weight_layout(shape).bytes bytes, in the kernel's layout:
//   qkv_a    tiles of q_a's rows, then kv_a's; units as plan.h describes
//   q_b      the rank's heads' rows
//   uk       per head 512 rows (latents) x 192 columns: W_UK transposed, scales per 64 columns,
//            because a head's 448 rows do not align with the checkpoint's 128-row blocks
//   uv       per head 256 rows x 512
//   o        hidden rows x the rank's heads' columns
//   router   bf16 as in the checkpoint; dense: zeros (as bias). A sigmoid router that reads them
//            scores all slices exactly 1/2, so it chooses all, with weight 1 if the routed scale is
//            2 and weights are not normalised: a kernel may run the router or leave it out.
//   up_gate  per expert (the shared one last; dense: slice after slice) 2 * inter rows: row 16 t +
//   i
//            is gate row 8 t + i of the rank's slice, row 16 t + 8 + i up row 8 t + i (i < 8)
//   down     per expert (the shared one last) hidden rows x the rank's slice of columns
//   norms, bias   f32
// Values are moved, never re-rounded. `out` needs no alignment on the host; the kernel wants 256
// bytes. Throws as validate() does, InvalidArgument for a wrong size of `out`.
void prepare_weights(const DecodeShape& shape, const LayerTensors& tensors,
                     std::span<std::uint8_t> out);

// The inverse, one element: its E4M3 code and the scale that belongs to it.
enum class WeightPart : std::uint8_t { kQkvA, kQB, kUk, kUv, kO, kUpGate, kDown };
struct WeightElement {
  std::uint8_t code;
  float scale;
};
// Row and column as prepare_weights lists them; `expert` counts for kUpGate and kDown (experts: the
// shared one) and must be 0 otherwise. Throws InvalidArgument outside the matrix.
WeightElement prepared_element(const DecodeShape& shape, std::span<const std::uint8_t> prepared,
                               WeightPart part, int expert, int row, int column);

}  // namespace penstock::decode
