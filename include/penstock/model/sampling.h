// From logits to the next token: greedy, temperature, nucleus (top-p).
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace penstock {

struct SamplingOptions {
  double temperature = 0.0;  // 0: greedy; otherwise finite and positive
  // Nucleus: the shortest head of the tokens, by falling probability, whose sum reaches top_p.
  // (0, 1]; 1 keeps all.
  double top_p = 1.0;
  std::uint64_t seed = 0;
};

// The largest logit; ties go to the smaller id. logits [vocab]. Throws InvalidArgument for an empty
// span and for a NaN (its position is named), which would otherwise hide behind any comparison.
std::int32_t greedy_token(std::span<const float> logits);

// Draws tokens of one sequence. The same options and logits give the same tokens on every platform:
// the generator is std::mt19937_64, whose numbers the standard fixes, probabilities are f64, and
// one number is drawn per token (none when greedy).
class Sampler {
 public:
  // Throws InvalidArgument naming the option and its range.
  explicit Sampler(const SamplingOptions& options);
  // logits [vocab]; -Inf never wins while anything else is there. Throws InvalidArgument for an
  // empty span, a NaN and, when drawing, +Inf or nothing but -Inf.
  std::int32_t next(std::span<const float> logits);

 private:
  SamplingOptions options_;
  std::mt19937_64 generator_;
  std::vector<std::pair<double, std::int32_t>> candidates_;  // (probability * constant, id)
};

}  // namespace penstock
