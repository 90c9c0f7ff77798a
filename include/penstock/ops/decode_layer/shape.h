// The decode layer's problem: one GLM-5 decoder layer (attention over given picks, then routed and
// shared experts, or a dense MLP) for a few rows, as one rank of a tensor-parallel group sees it.
#pragma once

#include <cstdint>
#include <string>

namespace penstock::decode {

// Head geometry of GLM-5, compile-time: kv_lora | nope | rope | v.
inline constexpr int kLatent = 512;
inline constexpr int kNope = 192;
inline constexpr int kRope = 64;
inline constexpr int kValue = 256;
inline constexpr int kQueryHead = kNope + kRope;  // rows of q_b per head
inline constexpr int kKvRow = kLatent + kRope;    // values of a cache row
inline constexpr int kPageTokens = 64;
inline constexpr int kMaxRows = 16;
inline constexpr int kMaxPicks = 2048;  // per row
inline constexpr int kMaxRanks = 8;
inline constexpr int kMaxExperts = 256;
inline constexpr int kMaxTopK = 8;
inline constexpr int kMaxIntermediate = 2048;  // of one rank's slice of an expert

// Rows of the paged cache.
//   kBf16       1152 B: 512 latent | 64 rope, bf16
//   kFp8Scaled   656 B: 512 E4M3 latent | 4 f32 scales, one per 128 | 64 bf16 rope
//   kFp8         576 B: 512 latent | 64 rope, E4M3, no scale
// The rope part holds the rotated pairs (2i, 2i + 1) in place (interleaved order).
enum class KvFormat : std::uint8_t { kBf16, kFp8Scaled, kFp8 };
constexpr int kv_row_bytes(KvFormat format) {
  return format == KvFormat::kBf16 ? 1152 : format == KvFormat::kFp8Scaled ? 656 : 576;
}

// Scales of the five attention matrices (q_a, kv_a, q_b, kv_b, o): one a 128x128 block, or one an
// output row of the checkpoint's matrix. Experts always have one a block.
enum class AttentionScales : std::uint8_t { kBlock, kChannel };

// Sizes of the whole model layer and the place of this rank in it. Plain data.
struct DecodeShape {
  int rows = 1;             // S, 1 .. 16
  int hidden = 6144;        // multiple of 256
  int q_lora = 2048;        // multiple of 128
  int heads = 64;           // of all ranks together; multiple of ranks
  int experts = 256;        // routed, 1 .. 256
  int top_k = 8;            // 1 .. 8
  int intermediate = 2048;  // of one expert, all ranks together
  // A dense layer: its MLP is cut into experts + 1 slices of `intermediate` columns, which run as
  // experts do, all of them for every row, with weight 1 and no router. top_k must equal experts.
  bool dense = false;
  int ranks = 1;  // P: 1, 2, 4, 8
  int rank = 0;
  KvFormat kv_format = KvFormat::kFp8Scaled;
  AttentionScales attention_scales = AttentionScales::kBlock;
  float eps = 1e-5F;         // input and post-attention norm
  float eps_latent = 1e-6F;  // q_a and kv_a norm (transformers 1e-6, vLLM and SGLang 1e-5)
  float routed_scale = 2.5F;
  bool norm_topk = true;
  double rope_theta = 1e6;

  constexpr int dense_width() const { return dense ? (experts + 1) * intermediate : 0; }
  constexpr int local_heads() const { return heads / ranks; }
  constexpr int local_intermediate() const { return intermediate / ranks; }
};

// The shape of a dense layer of `width` columns in the same model: slices as wide as `moe`'s
// experts if the width is a multiple of that, else 2 to 9 equal ones. Throws Unsupported if no such
// cut meets validate()'s rules.
DecodeShape dense_shape(const DecodeShape& moe, int width);

// Throws Error(kInvalidArgument or kUnsupported) that names the value, why it cannot be done and
// what can.
void validate(const DecodeShape& shape);

// "16 rows, hidden 6144, ..., rank 3 of 8".
std::string describe(const DecodeShape& shape);

}  // namespace penstock::decode
