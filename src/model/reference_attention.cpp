// Stages A (attention input), B (indexer) and C (sparse MLA, absorbed) of the reference.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "model/reference_shape.h"
#include "penstock/model/reference.h"

namespace penstock::reference {

// ---- A ----

template <typename T>
AttentionInput<T> attention_input(const ModelConfig& config, const LayerWeights& weights,
                                  const Array<T>& x, std::span<const std::int64_t> positions,
                                  Range heads, const Roundings& roundings,
                                  const ParallelFor& parallel) {
  const std::int64_t rows = static_cast<std::int64_t>(positions.size());
  const std::int64_t nope = config.nope, rope = config.rope, qk = config.qk_dim();
  require_shape("x", x, {rows, config.hidden});
  require_range("the range of heads", heads, config.heads);
  require_shape("q_a", weights.q_a, config.q_lora, config.hidden);
  require_shape("kv_a", weights.kv_a, config.cache_dim(), config.hidden);
  require_shape("q_b", weights.q_b, config.heads * qk, config.q_lora);

  AttentionInput<T> out;
  out.n = rms_norm<T>(x, weights.input_norm, config.rms_eps);
  round_rows<T>(roundings.norm, config.hidden, out.n.data);

  // c_q = RMS(W_qa n), (c_kv | k_pe) = W_kva n with RMS on c_kv alone
  out.c_q =
      rms_norm<T>(linear<T>(weights.q_a, {0, config.q_lora}, {0, config.hidden}, out.n, parallel),
                  weights.q_a_norm, config.latent_eps);
  round_rows<T>(roundings.latent, config.q_lora, out.c_q.data);
  out.c_kv =
      rms_norm<T>(linear<T>(weights.kv_a, {0, config.kv_lora}, {0, config.hidden}, out.n, parallel),
                  weights.kv_a_norm, config.latent_eps);
  round_rows<T>(roundings.cache, config.kv_lora, out.c_kv.data);
  out.k_pe = linear<T>(weights.kv_a, {config.kv_lora, config.cache_dim()}, {0, config.hidden},
                       out.n, parallel);
  for (std::int64_t s = 0; s < rows; ++s) {
    rotate(out.k_pe.row(s), rope, positions[static_cast<std::size_t>(s)], config.rope_theta);
  }
  round_rows<T>(roundings.cache_rope, rope, out.k_pe.data);

  // q = W_qb c_q; a head's rows are (nope | rope)
  const Array<T> q = linear<T>(weights.q_b, {heads.begin * qk, heads.end * qk}, {0, config.q_lora},
                               out.c_q, parallel);
  out.q_nope = Array<T>({rows, heads.size(), nope});
  out.q_pe = Array<T>({rows, heads.size(), rope});
  for (std::int64_t s = 0; s < rows; ++s) {
    for (std::int64_t h = 0; h < heads.size(); ++h) {
      const T* head = q.row(s) + h * qk;
      T* pe = out.q_pe.row(s) + h * rope;
      std::copy_n(head, nope, out.q_nope.row(s) + h * nope);
      std::copy_n(head + nope, rope, pe);
      rotate(pe, rope, positions[static_cast<std::size_t>(s)], config.rope_theta);
    }
  }
  round_rows<T>(roundings.query, nope, out.q_nope.data);
  round_rows<T>(roundings.query, rope, out.q_pe.data);
  return out;
}

// ---- B ----

template <typename T>
IndexerInput<T> indexer_input(const ModelConfig& config, const IndexerWeights& weights,
                              const Array<T>& n, const Array<T>& c_q,
                              std::span<const std::int64_t> positions, const Roundings& roundings,
                              const ParallelFor& parallel) {
  const std::int64_t rows = static_cast<std::int64_t>(positions.size());
  const std::int64_t heads = config.index_heads, dim = config.index_dim;
  require_shape("n", n, {rows, config.hidden});
  require_shape("c_q", c_q, {rows, config.q_lora});
  require_shape("indexer.q", weights.q, heads * dim, config.q_lora);
  require_shape("indexer.k", weights.k, dim, config.hidden);
  require_shape("indexer.w", weights.w, heads, config.hidden);
  require(config.rope <= dim, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("reference: rope {} exceeds the indexer's head dim {}", config.rope, dim);
  });

  IndexerInput<T> out;
  out.q = linear<T>(weights.q, {0, heads * dim}, {0, config.q_lora}, c_q, parallel);
  out.q.shape = {rows, heads, dim};
  out.k = layer_norm<T>(linear<T>(weights.k, {0, dim}, {0, config.hidden}, n, parallel),
                        weights.gamma, weights.beta, config.index_norm_eps);
  out.w = linear<T>(weights.w, {0, heads}, {0, config.hidden}, n, parallel);
  // Here the rotated part comes first; in attention it comes last.
  for (std::int64_t s = 0; s < rows; ++s) {
    const std::int64_t position = positions[static_cast<std::size_t>(s)];
    for (std::int64_t h = 0; h < heads; ++h) {
      rotate(out.q.row(s) + h * dim, config.rope, position, config.rope_theta);
    }
    rotate(out.k.row(s), config.rope, position, config.rope_theta);
  }
  round_rows<T>(roundings.index_q, dim, out.q.data);
  round_rows<T>(roundings.index_k, dim, out.k.data);
  return out;
}

template <typename T>
std::vector<T> indexer_scores(const ModelConfig& config, const T* q, const T* w, const Array<T>& k,
                              std::int64_t count) {
  const std::int64_t heads = config.index_heads, dim = config.index_dim;
  require(k.shape.size() == 2 && k.dim(1) == dim && count >= 0 && count <= k.dim(0),
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format("reference: index keys have shape {}, needed are {} rows of {}",
                               describe_shape(k.shape), count, dim);
          });
  const T scale = static_cast<T>(1.0 / std::sqrt(static_cast<double>(dim * heads)));
  std::vector<T> scores(static_cast<std::size_t>(count));
  for (std::int64_t t = 0; t < count; ++t) {
    T score = 0;
    for (std::int64_t h = 0; h < heads; ++h) {
      // relu on the product, before a weight that may be negative; the comparison lets NaN through
      const T product = dot(q + h * dim, k.row(t), dim);
      score += w[h] * (product < T{0} ? T{0} : product);
    }
    scores[static_cast<std::size_t>(t)] = score * scale;
  }
  return scores;
}

template <typename T>
std::vector<std::int32_t> select_picks(std::span<const T> scores, std::int64_t top_k) {
  for (std::size_t t = 0; t < scores.size(); ++t) {
    require(!std::isnan(scores[t]), ErrorKind::kInvalidArgument,
            [&] { return fmt::format("reference: the index score of position {} is NaN", t); });
  }
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const std::size_t keep = std::min(scores.size(), static_cast<std::size_t>(top_k));
  const auto before = [&](std::int32_t a, std::int32_t b) {
    const T score_a = scores[static_cast<std::size_t>(a)];
    const T score_b = scores[static_cast<std::size_t>(b)];
    return score_a != score_b ? score_a > score_b : a < b;
  };
  std::sort(order.begin(), order.end(), before);
  order.resize(keep);
  std::sort(order.begin(), order.end());
  return order;
}

template <typename T>
Array<std::int32_t> indexer_picks(const ModelConfig& config, const IndexerInput<T>& input,
                                  const Array<T>& context_k,
                                  std::span<const std::int64_t> positions,
                                  const ParallelFor& parallel, std::vector<T>* last_scores) {
  const std::int64_t rows = static_cast<std::int64_t>(positions.size());
  require_shape("indexer q", input.q, {rows, config.index_heads, config.index_dim});
  require_shape("indexer w", input.w, {rows, config.index_heads});
  Array<std::int32_t> picks({rows, config.index_top_k}, -1);
  parallel(rows, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t s = begin; s < end; ++s) {
      std::vector<T> scores = indexer_scores<T>(config, input.q.row(s), input.w.row(s), context_k,
                                                positions[static_cast<std::size_t>(s)] + 1);
      const auto chosen = select_picks<T>(scores, config.index_top_k);
      std::copy(chosen.begin(), chosen.end(), picks.row(s));
      if (last_scores != nullptr && s + 1 == rows) *last_scores = std::move(scores);
    }
  });
  return picks;
}

// ---- C ----

namespace {

void require_kv_b(const ModelConfig& config, const Weight& kv_b, Range heads) {
  require_range("the range of heads", heads, config.heads);
  require_shape("kv_b", kv_b, config.heads * (config.nope + config.v_dim), config.kv_lora);
}

}  // namespace

template <typename T>
Array<T> absorb_query(const ModelConfig& config, const Weight& kv_b, const Array<T>& q_nope,
                      Range heads, const Roundings& roundings, const ParallelFor& parallel) {
  require_kv_b(config, kv_b, heads);
  const std::int64_t rows = q_nope.shape.empty() ? 0 : q_nope.dim(0);
  require_shape("q_nope", q_nope, {rows, heads.size(), config.nope});
  const std::int64_t head_rows = config.nope + config.v_dim, lora = config.kv_lora;
  Array<T> q_lat({rows, heads.size(), lora});
  parallel(heads.size(), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> weight(static_cast<std::size_t>(lora));
    for (std::int64_t h = begin; h < end; ++h) {
      for (std::int64_t i = 0; i < config.nope; ++i) {
        dequantise_row(kv_b, (heads.begin + h) * head_rows + i, weight.data());
        for (std::int64_t s = 0; s < rows; ++s) {
          const T q = q_nope.row(s)[h * config.nope + i];
          T* out = q_lat.row(s) + h * lora;
          for (std::int64_t c = 0; c < lora; ++c) {
            out[c] += q * static_cast<T>(weight[static_cast<std::size_t>(c)]);
          }
        }
      }
    }
  });
  round_rows<T>(roundings.q_lat, lora, q_lat.data);
  return q_lat;
}

template <typename T>
Array<T> sparse_attention(const ModelConfig& config, const Array<T>& q_lat, const Array<T>& q_pe,
                          const Array<T>& c_kv, const Array<T>& k_pe,
                          const Array<std::int32_t>& picks, const Roundings& roundings,
                          const ParallelFor& parallel) {
  const std::int64_t lora = config.kv_lora, rope = config.rope;
  require(q_lat.shape.size() == 3, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("reference: q_lat has shape {}, needed is [rows, heads, {}]",
                       describe_shape(q_lat.shape), lora);
  });
  const std::int64_t rows = q_lat.dim(0), heads = q_lat.dim(1);
  const std::int64_t context = c_kv.shape.empty() ? 0 : c_kv.dim(0);
  require_shape("q_lat", q_lat, {rows, heads, lora});
  require_shape("q_pe", q_pe, {rows, heads, rope});
  require_shape("c_kv", c_kv, {context, lora});
  require_shape("k_pe", k_pe, {context, rope});
  const std::int64_t width = picks.shape.size() == 2 ? picks.dim(1) : 0;
  require_shape("picks", picks, {rows, width});

  const T scale = static_cast<T>(1.0 / std::sqrt(static_cast<double>(config.qk_dim())));
  Array<T> o_lat({rows, heads, lora});
  parallel(rows, [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::int64_t> positions;
    std::vector<T> p;
    for (std::int64_t s = begin; s < end; ++s) {
      positions.clear();
      for (std::int64_t i = 0; i < width; ++i) {
        const std::int32_t t = picks.row(s)[i];
        if (t == -1) continue;
        require(t >= 0 && t < context, ErrorKind::kInvalidArgument, [&] {
          return fmt::format("reference: row {} picks position {} of a context of {}", s, t,
                             context);
        });
        positions.push_back(t);
      }
      require(!positions.empty(), ErrorKind::kInvalidArgument,
              [&] { return fmt::format("reference: row {} has no picks", s); });
      p.resize(positions.size());
      for (std::int64_t h = 0; h < heads; ++h) {
        T largest = -std::numeric_limits<T>::infinity();
        for (std::size_t i = 0; i < p.size(); ++i) {
          p[i] = scale * (dot(q_lat.row(s) + h * lora, c_kv.row(positions[i]), lora) +
                          dot(q_pe.row(s) + h * rope, k_pe.row(positions[i]), rope));
          largest = std::max(largest, p[i]);
        }
        T total = 0;
        for (T& value : p) total += value = std::exp(value - largest);
        T* out = o_lat.row(s) + h * lora;
        for (std::size_t i = 0; i < p.size(); ++i) {
          const T weight = p[i] / total;
          const T* value = c_kv.row(positions[i]);
          for (std::int64_t c = 0; c < lora; ++c) out[c] += weight * value[c];
        }
      }
    }
  });
  round_rows<T>(roundings.o_lat, lora, o_lat.data);
  return o_lat;
}

template <typename T>
Array<T> expand_values(const ModelConfig& config, const Weight& kv_b, const Array<T>& o_lat,
                       Range heads, const Roundings& roundings, const ParallelFor& parallel) {
  require_kv_b(config, kv_b, heads);
  const std::int64_t rows = o_lat.shape.empty() ? 0 : o_lat.dim(0);
  require_shape("o_lat", o_lat, {rows, heads.size(), config.kv_lora});
  const std::int64_t head_rows = config.nope + config.v_dim, lora = config.kv_lora;
  Array<T> o({rows, heads.size(), config.v_dim});
  parallel(heads.size(), [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> weight(static_cast<std::size_t>(lora));
    for (std::int64_t h = begin; h < end; ++h) {
      for (std::int64_t i = 0; i < config.v_dim; ++i) {
        dequantise_row(kv_b, (heads.begin + h) * head_rows + config.nope + i, weight.data());
        for (std::int64_t s = 0; s < rows; ++s) {
          o.row(s)[h * config.v_dim + i] = dot(weight.data(), o_lat.row(s) + h * lora, lora);
        }
      }
    }
  });
  round_rows<T>(roundings.o, heads.size() * config.v_dim, o.data);
  return o;
}

template <typename T>
Array<T> attention_output(const ModelConfig& config, const Weight& o_weight, const Array<T>& o,
                          Range heads, const ParallelFor& parallel) {
  require_range("the range of heads", heads, config.heads);
  require_shape("o_proj", o_weight, config.hidden, config.heads * config.v_dim);
  const std::int64_t rows = o.shape.empty() ? 0 : o.dim(0);
  require_shape("o", o, {rows, heads.size(), config.v_dim});
  Array<T> flat = o;
  flat.shape = {rows, heads.size() * config.v_dim};
  return linear<T>(o_weight, {0, config.hidden},
                   {heads.begin * config.v_dim, heads.end * config.v_dim}, flat, parallel);
}

#define PENSTOCK_INSTANTIATE(T)                                                                    \
  template AttentionInput<T> attention_input<T>(const ModelConfig&, const LayerWeights&,           \
                                                const Array<T>&, std::span<const std::int64_t>,    \
                                                Range, const Roundings&, const ParallelFor&);      \
  template IndexerInput<T> indexer_input<T>(                                                       \
      const ModelConfig&, const IndexerWeights&, const Array<T>&, const Array<T>&,                 \
      std::span<const std::int64_t>, const Roundings&, const ParallelFor&);                        \
  template std::vector<T> indexer_scores<T>(const ModelConfig&, const T*, const T*,                \
                                            const Array<T>&, std::int64_t);                        \
  template std::vector<std::int32_t> select_picks<T>(std::span<const T>, std::int64_t);            \
  template Array<std::int32_t> indexer_picks<T>(const ModelConfig&, const IndexerInput<T>&,        \
                                                const Array<T>&, std::span<const std::int64_t>,    \
                                                const ParallelFor&, std::vector<T>*);              \
  template Array<T> absorb_query<T>(const ModelConfig&, const Weight&, const Array<T>&, Range,     \
                                    const Roundings&, const ParallelFor&);                         \
  template Array<T> sparse_attention<T>(                                                           \
      const ModelConfig&, const Array<T>&, const Array<T>&, const Array<T>&, const Array<T>&,      \
      const Array<std::int32_t>&, const Roundings&, const ParallelFor&);                           \
  template Array<T> expand_values<T>(const ModelConfig&, const Weight&, const Array<T>&, Range,    \
                                     const Roundings&, const ParallelFor&);                        \
  template Array<T> attention_output<T>(const ModelConfig&, const Weight&, const Array<T>&, Range, \
                                        const ParallelFor&);
PENSTOCK_INSTANTIATE(float)
PENSTOCK_INSTANTIATE(double)
#undef PENSTOCK_INSTANTIATE

}  // namespace penstock::reference
