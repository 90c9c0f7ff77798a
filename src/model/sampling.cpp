#include "penstock/model/sampling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "penstock/core/error.h"

namespace penstock {

std::int32_t greedy_token(std::span<const float> logits) {
  require(!logits.empty(), ErrorKind::kInvalidArgument,
          [] { return "no logits to choose a token from"; });
  std::size_t best = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    require(!std::isnan(logits[i]), ErrorKind::kInvalidArgument, [&] {
      return fmt::format("the logit of token {} is NaN: the model's output cannot be sampled", i);
    });
    if (logits[i] > logits[best]) best = i;
  }
  return static_cast<std::int32_t>(best);
}

Sampler::Sampler(const SamplingOptions& options) : options_(options), generator_(options.seed) {
  require(std::isfinite(options.temperature) && options.temperature >= 0.0,
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format("temperature {} is not a finite number >= 0", options.temperature);
          });
  require(options.top_p > 0.0 && options.top_p <= 1.0, ErrorKind::kInvalidArgument,
          [&] { return fmt::format("top-p {} is not in (0, 1]", options.top_p); });
}

std::int32_t Sampler::next(std::span<const float> logits) {
  const std::int32_t best = greedy_token(logits);
  if (options_.temperature == 0.0) return best;
  const double largest = static_cast<double>(logits[static_cast<std::size_t>(best)]);
  require(std::isfinite(largest), ErrorKind::kInvalidArgument, [&] {
    return fmt::format("the largest logit is {}: there is no distribution to draw from", largest);
  });

  candidates_.clear();
  double total = 0.0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double weight =
        std::exp((static_cast<double>(logits[i]) - largest) / options_.temperature);
    candidates_.emplace_back(weight, static_cast<std::int32_t>(i));
    total += weight;
  }
  std::size_t kept = candidates_.size();
  if (options_.top_p < 1.0) {
    std::sort(candidates_.begin(), candidates_.end(), [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first > b.first : a.second < b.second;
    });
    const double wanted = options_.top_p * total;
    total = 0.0;
    for (kept = 0; kept < candidates_.size() && total < wanted; ++kept) {
      total += candidates_[kept].first;
    }
  }

  // 53 random bits in [0, 1). std::uniform_real_distribution may differ between libraries.
  const double draw = static_cast<double>(generator_() >> 11) * 0x1.0p-53 * total;
  double sum = 0.0;
  std::int32_t chosen = best;
  for (std::size_t i = 0; i < kept; ++i) {
    if (candidates_[i].first <= 0.0) continue;
    sum += candidates_[i].first;
    chosen = candidates_[i].second;  // the last one also when rounding leaves sum below draw
    if (draw < sum) break;
  }
  return chosen;
}

}  // namespace penstock
