// Stage D of the reference: SwiGLU, router, mixture of experts.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "model/reference_shape.h"
#include "penstock/model/reference.h"

namespace penstock::reference {

namespace {

// The `keep` best of `scores` by falling score; ties go to the smaller index.
std::vector<std::int32_t> best(std::span<const float> scores, std::int64_t keep) {
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  // A stable sort by score alone leaves equal scores in index order.
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  order.resize(static_cast<std::size_t>(keep));
  return order;
}

}  // namespace

template <typename T>
Route<T> route(const ModelConfig& config, std::span<const T> logits, std::span<const float> bias) {
  const std::int64_t experts = config.experts, groups = config.groups;
  require_size("router logits", logits.size(), experts);
  require_size("e_score_correction_bias", bias.size(), experts);
  require(groups >= 1 && experts % groups == 0 && config.top_groups >= 1 &&
              config.top_groups <= groups && config.top_k >= 1 &&
              config.top_k <= config.top_groups * (experts / groups),
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format(
                "reference: {} of {} experts in {} groups of which {} remain is no valid routing",
                config.top_k, experts, groups, config.top_groups);
          });

  std::vector<T> r(logits.size());
  std::vector<float> choice(logits.size());
  for (std::size_t e = 0; e < r.size(); ++e) {
    require(!std::isnan(logits[e]), ErrorKind::kInvalidArgument,
            [&] { return fmt::format("reference: the router logit of expert {} is NaN", e); });
    r[e] = T{1} / (T{1} + std::exp(-logits[e]));
    choice[e] = static_cast<float>(r[e]) + bias[e];
  }

  if (groups > 1) {
    const std::int64_t size = experts / groups;
    std::vector<float> group_scores;
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::span<const float> members(choice.data() + g * size,
                                           static_cast<std::size_t>(size));
      float score = 0;
      for (const std::int32_t e : best(members, std::min<std::int64_t>(2, size))) {
        score += members[static_cast<std::size_t>(e)];
      }
      group_scores.push_back(score);
    }
    std::vector<bool> kept(static_cast<std::size_t>(groups), false);
    for (const std::int32_t g : best(group_scores, config.top_groups)) {
      kept[static_cast<std::size_t>(g)] = true;
    }
    for (std::size_t e = 0; e < choice.size(); ++e) {
      if (!kept[e / static_cast<std::size_t>(size)]) {
        choice[e] = -std::numeric_limits<float>::infinity();
      }
    }
  }

  Route<T> out;
  out.experts = best(choice, config.top_k);
  T total = 0;
  for (const std::int32_t e : out.experts) total += r[static_cast<std::size_t>(e)];
  const T divisor = config.norm_top_k ? total + static_cast<T>(1e-20) : T{1};
  for (const std::int32_t e : out.experts) {
    out.weights.push_back(static_cast<T>(config.routed_scale) * r[static_cast<std::size_t>(e)] /
                          divisor);
  }
  return out;
}

template <typename T>
Array<T> swiglu(const MlpWeights& weights, const Array<T>& x, Range range,
                const Roundings& roundings, const ParallelFor& parallel) {
  const std::int64_t hidden = weights.gate.cols, intermediate = weights.gate.rows;
  require_shape("up_proj", weights.up, intermediate, hidden);
  require_shape("down_proj", weights.down, hidden, intermediate);
  require_range("the range of intermediate columns", range, intermediate);
  Array<T> h = linear<T>(weights.gate, range, {0, hidden}, x, parallel);
  const Array<T> up = linear<T>(weights.up, range, {0, hidden}, x, parallel);
  for (std::size_t i = 0; i < h.data.size(); ++i) {
    const T gate = h.data[i];
    h.data[i] = gate / (T{1} + std::exp(-gate)) * up.data[i];  // silu(gate) * up
  }
  round_rows<T>(roundings.hidden, range.size(), h.data);
  return linear<T>(weights.down, {0, hidden}, range, h, parallel);
}

template <typename T>
MoeOutput<T> mixture_of_experts(const ModelConfig& config, const MoeWeights& weights,
                                const Array<T>& m, std::int64_t shard, std::int64_t shards,
                                const Roundings& roundings, const ParallelFor& parallel) {
  const std::int64_t rows = m.shape.empty() ? 0 : m.dim(0), hidden = config.hidden;
  require_shape("m", m, {rows, hidden});
  require_shape("router", weights.router, config.experts, hidden);
  require_size("experts", weights.experts.size(), config.experts);
  require(shards >= 1 && shard >= 0 && shard < shards, ErrorKind::kInvalidArgument,
          [&] { return fmt::format("reference: shard {} of {} does not exist", shard, shards); });
  const auto part = [&](const MlpWeights& mlp) {
    return Range{shard * mlp.gate.rows / shards, (shard + 1) * mlp.gate.rows / shards};
  };

  MoeOutput<T> out;
  out.router_logits = linear<T>(weights.router, {0, config.experts}, {0, hidden}, m, parallel);
  out.experts = Array<std::int32_t>({rows, config.top_k});
  out.weights = Array<T>({rows, config.top_k});
  for (std::int64_t s = 0; s < rows; ++s) {
    const std::span<const T> logits(out.router_logits.row(s),
                                    static_cast<std::size_t>(config.experts));
    const Route<T> chosen = route<T>(config, logits, weights.bias);
    std::copy(chosen.experts.begin(), chosen.experts.end(), out.experts.row(s));
    std::copy(chosen.weights.begin(), chosen.weights.end(), out.weights.row(s));
  }

  out.y = swiglu<T>(weights.shared, m, part(weights.shared), roundings, parallel);
  for (std::int64_t e = 0; e < config.experts; ++e) {
    // The rows that chose this expert, and with what weight.
    std::vector<std::int64_t> members;
    std::vector<T> gains;
    for (std::int64_t s = 0; s < rows; ++s) {
      for (std::int64_t i = 0; i < config.top_k; ++i) {
        if (out.experts.row(s)[i] == e) {
          members.push_back(s);
          gains.push_back(out.weights.row(s)[i]);
        }
      }
    }
    if (members.empty()) continue;
    Array<T> gathered({static_cast<std::int64_t>(members.size()), hidden});
    for (std::size_t i = 0; i < members.size(); ++i) {
      std::copy_n(m.row(members[i]), hidden, gathered.row(static_cast<std::int64_t>(i)));
    }
    const MlpWeights& expert = weights.experts[static_cast<std::size_t>(e)];
    const Array<T> y = swiglu<T>(expert, gathered, part(expert), roundings, parallel);
    for (std::size_t i = 0; i < members.size(); ++i) {
      const T* from = y.row(static_cast<std::int64_t>(i));
      T* to = out.y.row(members[i]);
      for (std::int64_t c = 0; c < hidden; ++c) to[c] += gains[i] * from[c];
    }
  }
  return out;
}

#define PENSTOCK_INSTANTIATE(T)                                                               \
  template Route<T> route<T>(const ModelConfig&, std::span<const T>, std::span<const float>); \
  template Array<T> swiglu<T>(const MlpWeights&, const Array<T>&, Range, const Roundings&,    \
                              const ParallelFor&);                                            \
  template MoeOutput<T> mixture_of_experts<T>(const ModelConfig&, const MoeWeights&,          \
                                              const Array<T>&, std::int64_t, std::int64_t,    \
                                              const Roundings&, const ParallelFor&);
PENSTOCK_INSTANTIATE(float)
PENSTOCK_INSTANTIATE(double)
#undef PENSTOCK_INSTANTIATE

}  // namespace penstock::reference
