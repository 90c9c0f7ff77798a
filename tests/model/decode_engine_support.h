// The engine with its layers run by decode_layer, on the CPU operator or the kernel: the same
// checks for both.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "model/engine_test_support.h"
#include "penstock/core/error.h"
#include "penstock/model/decode_layers.h"

namespace penstock::engine_test {

inline EngineOptions decode_options(DecodeLayersFactory factory, int ranks) {
  EngineOptions options;
  options.ranks = ranks;
  options.threads = 1;
  options.decode_layers = factory;
  return options;
}

// The first `steps` greedy tokens of each golden prompt, prefill in chunks of rows, then one row a
// step: transformers' tokens. The operator's bf16 hand-offs move logits (GoldenMargins says how
// far; FP8 caches by 0.1), and the golden runs hold choices between two tokens that lie closer:
// where a token differs, the two must lie within `tie` in f32, and the run goes on with the golden
// one. Returns how often.
inline int expect_golden_tokens(Engine& engine, int prompts, std::size_t steps, float tie) {
  constexpr std::size_t kGenerated = 160;
  Engine exact(tiny(), {.threads = 1});
  int ties = 0;
  for (int run = 0; run < prompts; ++run) {
    const std::string name = "greedy." + std::to_string(run);
    Tokens want = golden_tokens(name + ".tokens");
    want.resize(want.size() - kGenerated + steps);
    const auto vocab = static_cast<std::size_t>(engine.config().vocab);
    const std::vector<float> logits = all_logits(exact, want);
    const SequenceId sequence = engine.create_sequence();
    const std::size_t prompt = want.size() - steps;
    StepResult result = engine.step(
        {{sequence, {want.begin(), want.begin() + static_cast<std::ptrdiff_t>(prompt)}}});
    for (std::size_t at = prompt; at < want.size(); ++at) {
      const std::int32_t got = argmax(result.row(0));
      if (got != want[at]) {
        const float* row = logits.data() + (at - 1) * vocab;
        EXPECT_LE(row[want[at]] - row[got], tie)
            << name << " token " << at - prompt << ": " << got << " for " << want[at];
        ++ties;
      }
      if (at + 1 < want.size()) result = engine.step({{sequence, {want[at]}}});
    }
    engine.remove_sequence(sequence);
  }
  return ties;
}

// The margin between the f32 engine's two best tokens, at every generated position of the golden
// runs: what decides a greedy token, and how far an operator's roundings move it.
class GoldenMargins {
 public:
  GoldenMargins(int prompts, std::size_t steps) : steps_(steps) {
    constexpr std::size_t kGenerated = 160;
    Engine exact(tiny(), {.threads = 1});
    vocab_ = static_cast<std::size_t>(exact.config().vocab);
    for (int run = 0; run < prompts; ++run) {
      Tokens text = golden_tokens("greedy." + std::to_string(run) + ".tokens");
      text.resize(text.size() - kGenerated + steps);
      const std::vector<float> logits = all_logits(exact, text);
      for (std::size_t at = text.size() - steps; at < text.size(); ++at) {
        const float* row = logits.data() + (at - 1) * vocab_;
        std::size_t best = 0;
        std::size_t second = 1;
        for (std::size_t v = 1; v < vocab_; ++v) {
          if (row[v] > row[best]) {
            second = best;
            best = v;
          } else if (row[v] > row[second] || second == best) {
            second = v;
          }
        }
        pairs_.emplace_back(best, second);
      }
      texts_.push_back(text);
    }
  }
  // An engine's own margins between these tokens.
  std::vector<float> of(Engine& engine) const {
    std::vector<float> margins;
    for (const Tokens& text : texts_) {
      const std::vector<float> logits = all_logits(engine, text);
      for (std::size_t at = text.size() - steps_; at < text.size(); ++at) {
        const float* row = logits.data() + (at - 1) * vocab_;
        const auto& [best, second] = pairs_[margins.size()];
        margins.push_back(row[best] - row[second]);
      }
    }
    return margins;
  }
  // The change that nine of ten margins stay below. Not the mean square: a row whose routing is a
  // near tie changes its expert and moves logits by 0.4, one position in a hundred.
  static double change(const std::vector<float>& a, const std::vector<float>& b) {
    std::vector<double> moved;
    for (std::size_t i = 0; i < a.size(); ++i) {
      moved.push_back(std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
    }
    std::sort(moved.begin(), moved.end());
    return moved[moved.size() * 9 / 10];
  }

 private:
  std::size_t steps_;
  std::size_t vocab_ = 0;
  std::vector<Tokens> texts_;
  std::vector<std::pair<std::size_t, std::size_t>> pairs_;
};

// Logits of a text fed in chunks of several widths, beside another sequence, over caches whose
// unused slots hold NaN: one row at a time gives the same bits.
inline void expect_chunks_change_no_bit(Engine& engine, std::size_t length) {
  const Tokens tokens = document(length);
  const std::vector<float> whole = all_logits(engine, tokens);
  const SequenceId one = engine.create_sequence();
  const SequenceId other = engine.create_sequence();
  const auto vocab = static_cast<std::size_t>(engine.config().vocab);
  for (std::size_t i = 0; i < length; ++i) {
    engine.poison_unused(0.0F);
    StepResult result;
    if (i % 3 == 1) {
      result = engine.step({{other, {tokens[length - 1 - i]}}, {one, {tokens[i]}}});
    } else {
      result = engine.step({{one, {tokens[i]}}});
    }
    ASSERT_TRUE(same_bits(result.row(result.rows - 1), std::span(whole).subspan(i * vocab, vocab)))
        << "position " << i;
  }
  engine.remove_sequence(one);
  engine.remove_sequence(other);
}

}  // namespace penstock::engine_test
