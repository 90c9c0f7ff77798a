// The decode layer in plain loops: the oracle of the kernel, stage by stage, and the CPU operator.
//
// Arithmetic is f64 within a stage; what a stage hands on is rounded as the kernel names it:
//   c (qkv_a's output, before its norms), q (rotated), q_lat, o, mid, the ranks' partial
//   sums of both all-reduces, the residual after each of them: bf16, nearest even. o_lat stays
//   inside a stage (the kernel holds it in f16, three bits more than bf16). Norms: mean of
//   squares in f32 or better, x * rsqrt * gain rounded once to bf16. Router scores, their bias,
//   routing weights, softmax: f32 or better, never bf16. Cache rows: bf16(latent), bf16(rope); FP8
//   formats store E4M3 of these bf16 values. kFp8Scaled: one power of two per 128 values,
//   2^ceil(log2(max(amax, 1e-4) / 448)). What attention reads is bf16(code * scale). Weights: W8A16
//   everywhere, activations are not quantised.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "penstock/ops/decode_layer/shape.h"
#include "penstock/ops/decode_layer/weights.h"

namespace penstock::decode {

// A paged cache in host memory: row of slot n at data + n / 64 * page_stride + n % 64 * row bytes.
struct HostCache {
  std::uint8_t* data = nullptr;
  std::int64_t page_stride = 0;
  KvFormat format = KvFormat::kBf16;
};

// What a step reads beside weights: [rows] each; picks as CSR of global cache slots.
struct StepInput {
  std::span<const std::int32_t> positions;
  std::span<const std::int64_t> slots;  // -1: padding
  std::span<const std::int32_t> pick_offsets;
  std::span<const std::int32_t> picks;
};

// Which experts a row goes to, best first, and how close the choice was: of score + bias, between
// the last expert chosen and the best one that was not (infinite if all are chosen).
struct RowRouting {
  std::vector<int> experts;
  float gap = 0;
};

// One rank's stages. All matrices [rows, n] row-major f32 holding what the kernel would hold in
// bf16 (or f32). Thread-compatible: const calls may run at once.
class ReferenceStages {
 public:
  // The tensors must outlive the object. Throws as validate() does.
  ReferenceStages(const DecodeShape& shape, const LayerTensors& tensors);

  std::vector<float> qkv_a(std::span<const float> x, int rows) const;  // [rows, q_lora + 576]
  std::vector<float> q_b(std::span<const float> c, int rows,
                         std::span<const std::int32_t> positions) const;  // [rows, heads * 256]
  std::vector<float> uk(std::span<const float> q, int rows) const;        // [rows, heads * 512]
  // The row that goes to the cache, as attention will read it back [576]; stored too when `to` is
  // not null.
  std::vector<float> cache_row(std::span<const float> c_row, int position, KvFormat format,
                               std::uint8_t* to) const;
  // o_lat of one row over the picks [heads * 512]; a pick that equals slots[k] reads fresh[k].
  std::vector<float> attention(std::span<const float> q_row, std::span<const float> q_lat_row,
                               std::span<const std::int32_t> picks, const HostCache& cache,
                               std::span<const std::int64_t> slots,
                               const std::vector<std::vector<float>>& fresh) const;
  std::vector<float> uv(std::span<const float> o_lat_row) const;        // [heads * 256]
  std::vector<float> o(std::span<const float> o_rows, int rows) const;  // partial [rows, H]
  std::vector<float> scores(std::span<const float> a, int rows) const;  // [rows, experts]
  // top_k experts of one row, best first, and their weights. Dense layers score every slice 1/2 and
  // give all of them weight 1.
  void select(std::span<const float> score_row, std::vector<int>& experts,
              std::vector<float>& weights) const;
  // The same choice with its gap.
  RowRouting route(std::span<const float> score_row) const;
  // silu(gate) * up of one row for one expert (experts: the shared one) [inter].
  std::vector<float> mid(std::span<const float> a_row, int expert) const;
  // Adds weight * W_down mid to sum [H].
  void down(std::span<const float> mid, int expert, float weight, std::span<double> sum) const;

  const DecodeShape& shape() const { return shape_; }

 private:
  DecodeShape shape_;
  const LayerTensors* tensors_;
};

// Sum of bf16 partials in rank order plus the residual, rounded to bf16.
std::vector<float> reduce(std::span<const float> residual,
                          const std::vector<std::vector<float>>& partials);

// The CPU operator: a whole layer for all ranks of `shape` (its `rank` is ignored), as the ranks
// would compute it. x [rows, H] bf16 in and out (may alias); rows with slot -1 change nothing. New
// cache rows are written. Runs on the calling thread; deterministic; a row's result depends on no
// other row, except through cache rows that its picks name. `routing`, if given, becomes [rows]
// (empty choices for padding).
// Throws InvalidArgument for sizes that do not match, no cache, pages that overlap, positions < 0,
// picks outside [0, slots of the cache) when cache_slots > 0, more than 2048 picks a row.
void run_reference_layer(const DecodeShape& shape, const LayerTensors& tensors,
                         const StepInput& step, const HostCache& cache, std::int64_t cache_slots,
                         std::span<const std::uint16_t> x_in, std::span<std::uint16_t> x_out,
                         std::vector<RowRouting>* routing = nullptr);

}  // namespace penstock::decode
