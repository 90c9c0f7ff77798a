// What a model weighs: parameters and bytes by format, cache bytes per token, and the bytes that a
// decode step cannot avoid reading.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/model/checkpoint.h"
#include "penstock/model/config.h"

namespace penstock {

// ---- parameters
// ----------------------------------------------------------------------------------

// Weights of the model itself, scales not counted.
struct ParameterCount {
  std::int64_t total = 0;
  // Multiplied for one token: total without the embedding table and without the routed experts that
  // are not chosen.
  std::int64_t active = 0;
};
ParameterCount count_parameters(const ModelConfig& config);

// Tensors that share a storage format, or a purpose.
struct StorageGroup {
  std::string name;             // "fp8_block", "BF16", ... or "routed_experts", "attention", ...
  std::int64_t tensors = 0;     // weights; a weight and its scale count once
  std::int64_t parameters = 0;  // elements, scales not counted
  std::int64_t bytes = 0;       // with scales
};

struct CheckpointSummary {
  ParameterCount parameters;
  std::int64_t bytes = 0;                // all tensors of the model, with scales
  std::vector<StorageGroup> by_format;   // in order of first use
  std::vector<StorageGroup> by_purpose;  // likewise
  std::int64_t mtp_bytes = 0;            // the multi-token-prediction layer, which is not run
  std::int64_t surplus_bytes = 0;        // tensors that nothing here reads
};
CheckpointSummary summarise(const Checkpoint& checkpoint);

// ---- caches
// --------------------------------------------------------------------------------------

// How a row of the latent cache is stored.
enum class KvFormat : std::uint8_t {
  kBf16,       // 1152 B for GLM-5: (kv_lora + rope) BF16
  kFp8Scaled,  // 656 B: kv_lora E4M3, one f32 scale per 128 of them, rope BF16
  kFp8Plain,   // 576 B: (kv_lora + rope) E4M3, no scale
};
std::string_view to_string(KvFormat format);
// Bytes of one token in one layer. Throws InvalidArgument for kFp8Scaled where kv_lora is no
// multiple of 128.
std::int64_t kv_row_bytes(const ModelConfig& config, KvFormat format);
// Bytes of one token in the index cache of one full layer: index_dim E4M3 and one f32 scale (132
// B).
std::int64_t index_row_bytes(const ModelConfig& config);
// Bytes of one token in all layers: latent rows everywhere, index rows in full layers.
std::int64_t cache_bytes_per_token(const ModelConfig& config, KvFormat format);

// ---- the floor of a decode step
// ------------------------------------------------------------------

// What one tensor-parallel rank must read from memory in one step, by part. Activations, the
// all-reduce and written cache rows are not counted: they are small or travel elsewhere.
enum class DecodePart : std::uint8_t {
  kQkvA,           // W_qa and W_kva, replicated on all ranks
  kQB,             // W_qb, heads sharded
  kUkUv,           // W_kv_b, heads sharded
  kO,              // W_o, split along its inputs
  kIndexer,        // wq_b, wk, weights_proj of full layers, replicated
  kIndexCache,     // every cached index row of every request, full layers
  kKv,             // the picked latent rows of every request; each rank reads all of them
  kRouter,         // replicated
  kRoutedExperts,  // the expected distinct experts, intermediate sharded
  kSharedExperts,  // intermediate sharded
  kDenseMlp,       // intermediate sharded
  kNorms,          // norm weights, router bias
  kEmbedding,      // one row a token
  kLmHead,         // vocabulary sharded
};
inline constexpr int kDecodeParts = 14;
std::string_view to_string(DecodePart part);

struct DecodeBytes {
  std::array<double, kDecodeParts> parts{};

  double& operator[](DecodePart part) { return parts[static_cast<std::size_t>(part)]; }
  double operator[](DecodePart part) const { return parts[static_cast<std::size_t>(part)]; }
  double total() const {
    double sum = 0.0;
    for (const double bytes : parts) sum += bytes;
    return sum;
  }
  DecodeBytes& operator+=(const DecodeBytes& other) {
    for (std::size_t i = 0; i < parts.size(); ++i) parts[i] += other.parts[i];
    return *this;
  }
};

struct DecodeShape {
  int ranks = 1;          // tensor-parallel; must divide heads, intermediate sizes, vocabulary
  std::int64_t rows = 1;  // tokens in the step, each of its own request
  std::int64_t context =
      8192;  // cached tokens of each request; min(context, index_top_k) are picked
  KvFormat kv = KvFormat::kFp8Scaled;
};

// How the weights are stored where no checkpoint says it. Plain means BF16.
struct WeightFormats {
  WeightFormat attention = WeightFormat::kFp8Block;
  WeightFormat indexer = WeightFormat::kFp8Block;
  WeightFormat dense_mlp = WeightFormat::kFp8Block;
  WeightFormat shared_experts = WeightFormat::kFp8Block;
  WeightFormat routed_experts = WeightFormat::kFp8Block;
};

struct DecodeFloor {
  DecodeShape shape;
  double distinct_experts = 0.0;    // expected, of one MoE layer, shared experts not counted
  std::vector<DecodeBytes> layers;  // [layers]
  DecodeBytes step;                 // all layers, embedding, final norm, lm_head
};

// Expected number of distinct routed experts that `rows` tokens choose, if each chose its top_k at
// random: E (1 - (1 - k / E)^rows). Real routing is more alike within a text, so fewer.
double expected_distinct_experts(std::int64_t experts, std::int64_t top_k, std::int64_t rows);

// Bytes per rank. Throws InvalidArgument naming what the ranks do not divide, or rows or context
// below 1.
DecodeFloor decode_floor(const ModelConfig& config, const WeightFormats& formats,
                         const DecodeShape& shape);
// The same with the bytes that the checkpoint's tensors really have.
DecodeFloor decode_floor(const Checkpoint& checkpoint, const DecodeShape& shape);

// Time to read `bytes` at `gb_per_s` (1e9 bytes a second), microseconds. Throws InvalidArgument
// where the bandwidth is not a positive finite number.
double floor_us(double bytes, double gb_per_s);

}  // namespace penstock
