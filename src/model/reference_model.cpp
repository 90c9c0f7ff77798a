// The reference's whole model: embedding, layers in the order of the model's math, head.
#include <cmath>

#include "model/reference_shape.h"
#include "penstock/core/thread_pool.h"
#include "penstock/model/reference.h"

namespace penstock::reference {

template <typename T>
struct ReferenceModel<T>::State {
  const Checkpoint& checkpoint;
  ReferenceOptions options;
  ThreadPool pool;
  ParallelFor parallel;

  State(const Checkpoint& source, ReferenceOptions given)
      : checkpoint(source), options(std::move(given)), pool(options.threads) {
    parallel = [this](std::int64_t count,
                      const std::function<void(std::int64_t, std::int64_t)>& body) {
      pool.parallel_for(static_cast<std::size_t>(count), 1,
                        [&](std::size_t begin, std::size_t end, int) {
                          body(static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end));
                        });
    };
  }

  template <typename V>
  void capture(const std::string& name, const Array<V>& array) const {
    if (!options.capture) return;
    TensorView view;
    view.data = array.data.data();
    view.dtype = std::is_same_v<V, double>  ? DType::kF64
                 : std::is_same_v<V, float> ? DType::kF32
                                            : DType::kI32;
    view.rank = static_cast<int>(array.shape.size());
    for (std::size_t i = 0; i < array.shape.size(); ++i) view.shape[i] = array.shape[i];
    options.capture(name, view);
  }
};

template <typename T>
ReferenceModel<T>::ReferenceModel(const Checkpoint& checkpoint, ReferenceOptions options)
    : state_(std::make_unique<State>(checkpoint, std::move(options))) {}
template <typename T>
ReferenceModel<T>::~ReferenceModel() = default;
template <typename T>
ReferenceModel<T>::ReferenceModel(ReferenceModel&&) noexcept = default;
template <typename T>
ReferenceModel<T>& ReferenceModel<T>::operator=(ReferenceModel&&) noexcept = default;

namespace {

template <typename T>
void add(Array<T>& to, const Array<T>& from) {
  for (std::size_t i = 0; i < to.data.size(); ++i) to.data[i] += from.data[i];
}

template <typename T>
Array<T> embed(const ModelConfig& config, const Weight& table,
               std::span<const std::int32_t> tokens) {
  Array<T> x({static_cast<std::int64_t>(tokens.size()), config.hidden});
  std::vector<float> row(static_cast<std::size_t>(config.hidden));
  for (std::size_t s = 0; s < tokens.size(); ++s) {
    require(tokens[s] >= 0 && tokens[s] < config.vocab, ErrorKind::kInvalidArgument, [&] {
      return fmt::format("token {} at position {} is outside the vocabulary of {}", tokens[s], s,
                         config.vocab);
    });
    dequantise_row(table, tokens[s], row.data());
    std::copy(row.begin(), row.end(), x.row(static_cast<std::int64_t>(s)));
  }
  return x;
}

}  // namespace

template <typename T>
Array<T> ReferenceModel<T>::forward(std::span<const std::int32_t> tokens) {
  const State& state = *state_;
  const Checkpoint& checkpoint = state.checkpoint;
  const ModelConfig& config = checkpoint.config();
  const Roundings& roundings = state.options.roundings;
  const ParallelFor& parallel = state.parallel;
  const auto rows = static_cast<std::int64_t>(tokens.size());
  require(rows >= 1 && rows <= config.max_positions, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("the reference runs 1 to {} tokens at a time, not {}", config.max_positions,
                       rows);
  });
  std::vector<std::int64_t> positions(tokens.size());
  for (std::size_t s = 0; s < positions.size(); ++s) positions[s] = static_cast<std::int64_t>(s);
  const Range all_heads{0, config.heads};

  Array<T> x = embed<T>(config, checkpoint.weight("model.embed_tokens"), tokens);
  round_rows<T>(roundings.residual, config.hidden, x.data);
  state.capture("embed", x);

  Array<std::int32_t> picks;  // a shared layer finds the newest full layer's here
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    const LayerWeights weights = load_layer(checkpoint, layer);
    const std::string attn = fmt::format("layer{}.attn.", layer);
    const std::string index = fmt::format("layer{}.index.", layer);
    const std::string mlp = fmt::format("layer{}.mlp.", layer);

    // A. Attention input. Without a cache the context is the sequence itself.
    const AttentionInput<T> in =
        attention_input<T>(config, weights, x, positions, all_heads, roundings, parallel);
    state.capture(attn + "n", in.n);
    state.capture(attn + "c_q", in.c_q);
    state.capture(attn + "c_kv", in.c_kv);
    state.capture(attn + "k_pe", in.k_pe);
    state.capture(attn + "q_nope", in.q_nope);
    state.capture(attn + "q_pe", in.q_pe);

    // B. Indexer, on full layers.
    if (weights.indexer) {
      const IndexerInput<T> indexer =
          indexer_input<T>(config, *weights.indexer, in.n, in.c_q, positions, roundings, parallel);
      state.capture(index + "q", indexer.q);
      state.capture(index + "k", indexer.k);
      state.capture(index + "w", indexer.w);
      Array<T> last_scores({rows});
      picks = indexer_picks<T>(config, indexer, indexer.k, positions, parallel, &last_scores.data);
      state.capture(index + "last_scores", last_scores);
    }
    require(!picks.data.empty(), ErrorKind::kInvalidArgument, [&] {
      return fmt::format("layer {} shares picks, but no layer before it runs the indexer", layer);
    });
    state.capture(index + "picks", picks);

    // C. Sparse MLA, absorbed.
    const Array<T> q_lat =
        absorb_query<T>(config, weights.kv_b, in.q_nope, all_heads, roundings, parallel);
    state.capture(attn + "q_lat", q_lat);
    const Array<T> o_lat =
        sparse_attention<T>(config, q_lat, in.q_pe, in.c_kv, in.k_pe, picks, roundings, parallel);
    state.capture(attn + "o_lat", o_lat);
    const Array<T> o =
        expand_values<T>(config, weights.kv_b, o_lat, all_heads, roundings, parallel);
    state.capture(attn + "o", o);
    const Array<T> attn_y = attention_output<T>(config, weights.o, o, all_heads, parallel);
    state.capture(attn + "y", attn_y);
    add(x, attn_y);
    round_rows<T>(roundings.residual, config.hidden, x.data);

    // D. Feed-forward: mixture of experts or one dense SwiGLU.
    Array<T> m = rms_norm<T>(x, weights.post_norm, config.rms_eps);
    round_rows<T>(roundings.norm, config.hidden, m.data);
    state.capture(mlp + "m", m);
    Array<T> y;
    if (weights.moe) {
      MoeOutput<T> moe = mixture_of_experts<T>(config, *weights.moe, m, 0, 1, roundings, parallel);
      state.capture(mlp + "router_logits", moe.router_logits);
      state.capture(mlp + "experts", moe.experts);
      state.capture(mlp + "weights", moe.weights);
      y = std::move(moe.y);
    } else {
      y = swiglu<T>(*weights.dense, m, {0, weights.dense->gate.rows}, roundings, parallel);
    }
    state.capture(mlp + "y", y);
    add(x, y);
    round_rows<T>(roundings.residual, config.hidden, x.data);
    state.capture(fmt::format("layer{}.out", layer), x);
  }

  Array<T> n = rms_norm<T>(x, load_vector(checkpoint.tensor("model.norm.weight")), config.rms_eps);
  round_rows<T>(roundings.norm, config.hidden, n.data);
  state.capture("final.n", n);
  Array<T> logits =
      linear<T>(checkpoint.weight("lm_head"), {0, config.vocab}, {0, config.hidden}, n, parallel);
  state.capture("logits", logits);
  return logits;
}

template <typename T>
std::vector<double> negative_log_likelihood(const Array<T>& logits,
                                            std::span<const std::int32_t> tokens) {
  require(logits.shape.size() == 2 && logits.dim(0) == static_cast<std::int64_t>(tokens.size()),
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format("logits of shape {} do not belong to {} tokens",
                               describe_shape(logits.shape), tokens.size());
          });
  std::vector<double> out;
  for (std::size_t s = 0; s + 1 < tokens.size(); ++s) {
    const std::int32_t target = tokens[s + 1];
    require(target >= 0 && target < logits.dim(1), ErrorKind::kInvalidArgument, [&] {
      return fmt::format("token {} is outside the vocabulary of {}", target, logits.dim(1));
    });
    const std::span<const T> row(logits.row(static_cast<std::int64_t>(s)),
                                 static_cast<std::size_t>(logits.dim(1)));
    double largest = static_cast<double>(row[0]);
    for (const T value : row) largest = std::max(largest, static_cast<double>(value));
    double total = 0;
    for (const T value : row) total += std::exp(static_cast<double>(value) - largest);
    out.push_back(largest + std::log(total) -
                  static_cast<double>(row[static_cast<std::size_t>(target)]));
  }
  return out;
}

template class ReferenceModel<float>;
template class ReferenceModel<double>;
template std::vector<double> negative_log_likelihood<float>(const Array<float>&,
                                                            std::span<const std::int32_t>);
template std::vector<double> negative_log_likelihood<double>(const Array<double>&,
                                                             std::span<const std::int32_t>);

}  // namespace penstock::reference
