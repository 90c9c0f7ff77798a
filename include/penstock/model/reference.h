// The oracle: GLM-5's decoder as plain loops in f32 or f64, one function per stage of the model's
// math. Every other implementation (CPU operator, kernels) is held against this one.
//
// Two ways to use it:
//   - ReferenceModel runs a whole sequence without a cache, as the golden files were made, and can
//     hand out every stage's output by name;
//   - the stage functions below take their own inputs, so that a kernel's test feeds them what the
//     kernel was fed. Each takes a range of heads or of intermediate columns and then returns that
//     tensor-parallel rank's partial sum: adding the ranks in rank order gives the all-reduce.
//
// Everything runs on the host, is deterministic, does not depend on the number of threads, and
// rounds nothing beyond its own arithmetic unless Roundings asks for it. Weights are read a row at
// a time in their stored format (dequantise_row), which costs time and no memory, and takes scales
// per row: W_kv_b's heads of 192 + 256 rows do not align with its 128-row FP8 blocks.
//
// T is float or double. Shapes: S query rows, C context rows (positions 0..C-1 of one sequence).
// All functions throw InvalidArgument naming the array whose shape does not fit.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "penstock/core/tensor.h"
#include "penstock/model/checkpoint.h"
#include "penstock/model/config.h"

namespace penstock::reference {

// A dense row-major array that owns its values.
template <typename T>
struct Array {
  std::vector<std::int64_t> shape;
  std::vector<T> data;

  Array() = default;
  explicit Array(std::vector<std::int64_t> dims, T fill = T{}) : shape(std::move(dims)) {
    std::int64_t n = 1;
    for (const std::int64_t d : shape) n *= d;
    data.assign(static_cast<std::size_t>(n), fill);
  }
  std::int64_t dim(std::size_t i) const { return shape.at(i); }
  // Elements below one index of the first dimension.
  std::int64_t stride() const {
    std::int64_t n = 1;
    for (std::size_t i = 1; i < shape.size(); ++i) n *= shape[i];
    return n;
  }
  T* row(std::int64_t i) { return data.data() + i * stride(); }
  const T* row(std::int64_t i) const { return data.data() + i * stride(); }
};

// [begin, end): the heads or the intermediate columns of one tensor-parallel rank.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

// Runs body(begin, end) over disjoint parts that cover [0, count). Results never depend on the
// split.
using ParallelFor = std::function<void(
    std::int64_t count, const std::function<void(std::int64_t begin, std::int64_t end)>& body)>;
// The whole range on the calling thread.
ParallelFor serial();

// How a stored value is rounded.
enum class Round : std::uint8_t {
  kNone,      // kept in T
  kBF16,      // to nearest even
  kFp8Token,  // E4M3 per row and 128 columns: s = max(amax, 1e-4) / 448 (f32)
  kFp8Ue8m0,  // the same with s raised to a power of two: the index cache's rule
};
std::string_view to_string(Round round);

// Named places where a kernel stores a narrower value than the oracle. Default: none anywhere.
// A test of a kernel sets what the kernel does and nothing else.
struct Roundings {
  Round residual = Round::kNone;    // the stream x after each add, and the embedding
  Round norm = Round::kNone;        // n, m and the final norm's output
  Round latent = Round::kNone;      // c_q after its norm
  Round query = Round::kNone;       // q_nope and q_pe, a row per head
  Round cache = Round::kNone;       // c_kv after its norm
  Round cache_rope = Round::kNone;  // k_pe after rotation
  Round index_q = Round::kNone;     // q_I after rotation, a row per head
  Round index_k = Round::kNone;     // k_I after rotation
  Round q_lat = Round::kNone;       // a row per head
  Round o_lat = Round::kNone;       // a row per head
  Round o = Round::kNone;           // the input of W_o: concat(o_h)
  Round hidden = Round::kNone;      // silu(gate) * up, the input of W_down
};

// One SwiGLU: gate and up [intermediate, hidden], down [hidden, intermediate].
struct MlpWeights {
  Weight gate, up, down;
};

struct IndexerWeights {
  Weight q;                  // W_iq [index_heads * index_dim, q_lora]
  Weight k;                  // W_ik [index_dim, hidden]
  Weight w;                  // W_iw [index_heads, hidden]
  std::vector<float> gamma;  // k_norm.weight [index_dim]
  std::vector<float> beta;   // k_norm.bias [index_dim]
};

struct MoeWeights {
  Weight router;            // W_r [experts, hidden]
  std::vector<float> bias;  // e_score_correction_bias [experts], f32
  std::vector<MlpWeights> experts;
  MlpWeights shared;
};

// Views into a checkpoint (which must outlive them) or into a test's own buffers.
struct LayerWeights {
  std::vector<float> input_norm, q_a_norm, kv_a_norm, post_norm;
  Weight q_a;   // [q_lora, hidden]
  Weight kv_a;  // [kv_lora + rope, hidden]
  Weight q_b;   // [heads * (nope + rope), q_lora]
  Weight kv_b;  // [heads * (nope + v), kv_lora]
  Weight o;     // [hidden, heads * v]
  std::optional<IndexerWeights> indexer;
  std::optional<MlpWeights> dense;
  std::optional<MoeWeights> moe;
};
LayerWeights load_layer(const Checkpoint& checkpoint, std::int64_t layer);
// A vector tensor (f32 or bf16) as f32; throws InvalidArgument for other types.
std::vector<float> load_vector(const TensorView& view);

// ---- Building blocks
// --------------------------------------------------------------------------------

// Rounds each row [columns] in place.
template <typename T>
void round_rows(Round round, std::int64_t columns, std::span<T> values);

// sum_i a[i] * b[i] in T, as eight partial sums (term i goes to sum i mod 8) added in a fixed
// order: the error of a 2048-term f32 sum stays near that of a 256-term one.
template <typename A, typename T>
T dot(const A* a, const T* b, std::int64_t n) {
  T sums[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += static_cast<T>(a[i + j]) * b[i + j];
  }
  for (int j = 0; i + j < n; ++j) sums[j] += static_cast<T>(a[i + j]) * b[i + j];
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// out [S, rows] = x [S, columns] W[rows, columns]^T.
template <typename T>
Array<T> linear(const Weight& weight, Range rows, Range columns, const Array<T>& x,
                const ParallelFor& parallel);

// x * rsqrt(mean(x^2) + eps) * gain over the last dimension of x [S, n].
template <typename T>
Array<T> rms_norm(const Array<T>& x, std::span<const float> gain, double eps);

// (x - mean) * rsqrt(var + eps) * gamma + beta, biased variance, over x [S, n].
template <typename T>
Array<T> layer_norm(const Array<T>& x, std::span<const float> gamma, std::span<const float> beta,
                    double eps);

// Rotates `dims` (even) values in place: pairs (2i, 2i + 1) by position * theta^(-2i / dims).
// The result stays interleaved (pairs adjacent), which is also the order of our cache rows.
// Frequency and angle are rounded to f32 for either T, then sine and cosine are exact: the model
// was trained and is served that way (transformers, vLLM), and it is not a detail. At position 1500
// an f32 angle is off by up to 3e-5; exact angles move tiny-glm's layer outputs by 9e-6 (relative
// L2) from the golden ones, f32 angles agree to 4e-7.
template <typename T>
void rotate(T* values, std::int64_t dims, std::int64_t position, double theta);

// ---- A. Attention input
// ----------------------------------------------------------------------------

template <typename T>
struct AttentionInput {
  Array<T> n;       // [S, hidden] RMS(x)
  Array<T> c_q;     // [S, q_lora], normalised
  Array<T> c_kv;    // [S, kv_lora], normalised: the cache row's first part
  Array<T> k_pe;    // [S, rope], rotated: the cache row's second part
  Array<T> q_nope;  // [S, heads of the range, nope]
  Array<T> q_pe;    // [S, heads of the range, rope], rotated
};
// x [S, hidden], positions [S].
template <typename T>
AttentionInput<T> attention_input(const ModelConfig& config, const LayerWeights& weights,
                                  const Array<T>& x, std::span<const std::int64_t> positions,
                                  Range heads, const Roundings& roundings,
                                  const ParallelFor& parallel);

// ---- B. Indexer
// ------------------------------------------------------------------------------------

template <typename T>
struct IndexerInput {
  Array<T> q;  // [S, index_heads, index_dim], rotated in its first `rope` values
  Array<T> k;  // [S, index_dim], normalised and rotated likewise: the index cache's row
  Array<T> w;  // [S, index_heads]
};
template <typename T>
IndexerInput<T> indexer_input(const ModelConfig& config, const IndexerWeights& weights,
                              const Array<T>& n, const Array<T>& c_q,
                              std::span<const std::int64_t> positions, const Roundings& roundings,
                              const ParallelFor& parallel);

// Scores of one query row against context rows 0..count-1: sum_h w_h relu(q_h . k_t) *
// index_dim^-1/2
// * index_heads^-1/2. q [index_heads * index_dim], w [index_heads], k [C, index_dim], count <= C.
template <typename T>
std::vector<T> indexer_scores(const ModelConfig& config, const T* q, const T* w, const Array<T>& k,
                              std::int64_t count);

// The min(top_k, scores.size()) largest as ascending positions; ties go to the smaller position.
// Throws InvalidArgument on a NaN score, which no order can hold.
template <typename T>
std::vector<std::int32_t> select_picks(std::span<const T> scores, std::int64_t top_k);

// Picks of every row: [S, index_top_k], ascending, unused entries -1. positions[s] < C.
// `last_scores`, if not null, receives the last row's scores.
template <typename T>
Array<std::int32_t> indexer_picks(const ModelConfig& config, const IndexerInput<T>& input,
                                  const Array<T>& context_k,
                                  std::span<const std::int64_t> positions,
                                  const ParallelFor& parallel,
                                  std::vector<T>* last_scores = nullptr);

// ---- C. Sparse MLA, absorbed
// -----------------------------------------------------------------------

// q_lat_h = W_UK,h^T q_nope_h: q_nope [S, heads of the range, nope] -> [S, heads of the range,
// kv_lora].
template <typename T>
Array<T> absorb_query(const ModelConfig& config, const Weight& kv_b, const Array<T>& q_nope,
                      Range heads, const Roundings& roundings, const ParallelFor& parallel);

// o_lat_h = softmax((q_lat_h . c_kv(t) + q_pe_h . k_pe(t)) / sqrt(nope + rope)) c_kv over the picks
// of each row. c_kv [C, kv_lora], k_pe [C, rope], picks [S, any]: -1 entries are skipped, a row
// without picks is an error. -> [S, heads of the range, kv_lora].
template <typename T>
Array<T> sparse_attention(const ModelConfig& config, const Array<T>& q_lat, const Array<T>& q_pe,
                          const Array<T>& c_kv, const Array<T>& k_pe,
                          const Array<std::int32_t>& picks, const Roundings& roundings,
                          const ParallelFor& parallel);

// o_h = W_UV,h o_lat_h -> [S, heads of the range, v].
template <typename T>
Array<T> expand_values(const ModelConfig& config, const Weight& kv_b, const Array<T>& o_lat,
                       Range heads, const Roundings& roundings, const ParallelFor& parallel);

// y = W_o[:, heads of the range] concat(o_h) -> [S, hidden], the rank's partial sum.
template <typename T>
Array<T> attention_output(const ModelConfig& config, const Weight& o_weight, const Array<T>& o,
                          Range heads, const ParallelFor& parallel);

// ---- D. Feed-forward
// -------------------------------------------------------------------------------

// Where one row goes.
template <typename T>
struct Route {
  std::vector<std::int32_t> experts;  // [top_k], by falling choice, ties to the smaller id
  std::vector<T> weights;             // [top_k], routed_scale and normalisation applied
};
// r = sigmoid(logits); choice = r + bias is formed in f32 for either T, because the model defines
// it so: at a bias of 34 its step is 3.8e-6 and ties within it go to the smaller id. With groups >
// 1 a group's score is the sum of its two best choices and the best top_groups groups remain (ties
// to the smaller group). Weights come from r, not from choice. Throws InvalidArgument on NaN.
template <typename T>
Route<T> route(const ModelConfig& config, std::span<const T> logits, std::span<const float> bias);

// SwiGLU over intermediate columns `range`: x [S, hidden] -> [S, hidden], the rank's partial sum.
template <typename T>
Array<T> swiglu(const MlpWeights& weights, const Array<T>& x, Range range,
                const Roundings& roundings, const ParallelFor& parallel);

template <typename T>
struct MoeOutput {
  Array<T> router_logits;       // [S, experts]
  Array<std::int32_t> experts;  // [S, top_k], as Route
  Array<T> weights;             // [S, top_k]
  Array<T> y;                   // [S, hidden], the rank's partial sum
};
// m [S, hidden]. `shard` of `shards` takes its even part of every expert's intermediate columns,
// the shared expert's included (columns split at i * n / shards). Contributions are added in expert
// order after the shared expert's.
template <typename T>
MoeOutput<T> mixture_of_experts(const ModelConfig& config, const MoeWeights& weights,
                                const Array<T>& m, std::int64_t shard, std::int64_t shards,
                                const Roundings& roundings, const ParallelFor& parallel);

// ---- The whole model
// -------------------------------------------------------------------------------

// Receives a stage's output: kF32, kF64 or kI32, valid during the call. Names:
//   embed; layer{i}.attn.{n, c_q, c_kv, k_pe, q_nope, q_pe, q_lat, o_lat, o, y};
//   layer{i}.index.{q, k, w, picks, last_scores} (picks on shared layers too);
//   layer{i}.mlp.{m, y} and on MoE layers layer{i}.mlp.{router_logits, experts, weights};
//   layer{i}.out; final.n; logits.
using Capture = std::function<void(std::string_view name, const TensorView& view)>;

struct ReferenceOptions {
  int threads = 1;
  Roundings roundings;
  // Called in stage order from the calling thread; empty: nothing is captured.
  Capture capture;
};

// One model at T precision. Holds views, no weights of its own: besides the activations of a
// sequence it needs one matrix row per thread.
template <typename T>
class ReferenceModel {
 public:
  // The checkpoint must outlive the model. Throws InvalidArgument if threads < 1.
  ReferenceModel(const Checkpoint& checkpoint, ReferenceOptions options);
  ~ReferenceModel();
  ReferenceModel(ReferenceModel&&) noexcept;
  ReferenceModel& operator=(ReferenceModel&&) noexcept;

  // Runs tokens [S] as one sequence from position 0 and returns logits [S, vocab]. Throws
  // InvalidArgument for an empty sequence, one longer than max_positions or a token outside the
  // vocabulary. Not thread-safe: one call at a time.
  Array<T> forward(std::span<const std::int32_t> tokens);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Natural-log loss of predicting tokens[i + 1] from logits row i: [S - 1], computed in f64.
template <typename T>
std::vector<double> negative_log_likelihood(const Array<T>& logits,
                                            std::span<const std::int32_t> tokens);

}  // namespace penstock::reference
