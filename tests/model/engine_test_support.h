// What the engine's tests share: tiny-glm, its golden outputs, runs and comparisons.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "penstock/model/engine.h"
#include "penstock/model/safetensors.h"

namespace penstock::engine_test {

using Tokens = std::vector<std::int32_t>;

// Sanitizers slow the engine down 10 to 30 times: tests then take shorter texts, never fewer
// checks.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

inline const Checkpoint& tiny() {
  static const Checkpoint checkpoint(PENSTOCK_TEST_MODELS "/tiny-glm");
  return checkpoint;
}

inline const SafetensorsFile& golden() {
  static const SafetensorsFile file(PENSTOCK_TEST_MODELS "/tiny-glm/golden.safetensors");
  return file;
}

inline Tokens golden_tokens(const std::string& name) {
  const TensorView& view = golden().at(name);
  return {view.as<std::int32_t>(), view.as<std::int32_t>() + view.elements()};
}

inline Tokens document(std::size_t count) {
  Tokens tokens = golden_tokens("doc.tokens");
  tokens.resize(count);
  return tokens;
}

inline std::int32_t argmax(std::span<const float> row) {
  return static_cast<std::int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
}

// |got - want| / |want| in the Euclidean norm.
inline double relative_error(std::span<const float> got, std::span<const float> want) {
  EXPECT_EQ(got.size(), want.size());
  double difference = 0;
  double size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double d = double{got[i]} - double{want[i]};
    difference += d * d;
    size += double{want[i]} * double{want[i]};
  }
  return std::sqrt(difference / size);
}

// Equal bits, or the first element that differs.
inline testing::AssertionResult same_bits(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) {
    return testing::AssertionFailure() << a.size() << " against " << b.size() << " elements";
  }
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::bit_cast<std::uint32_t>(a[i]) != std::bit_cast<std::uint32_t>(b[i])) {
      return testing::AssertionFailure() << "element " << i << ": " << a[i] << " and " << b[i];
    }
  }
  return testing::AssertionSuccess();
}

// Logits [tokens, vocab] of a new sequence, which stays in the engine if `keep` is given.
inline std::vector<float> all_logits(Engine& engine, const Tokens& tokens,
                                     SequenceId* keep = nullptr) {
  const SequenceId sequence = engine.create_sequence();
  std::vector<float> logits = engine.step({{sequence, tokens}}, LogitRows::kAll).logits;
  if (keep != nullptr) {
    *keep = sequence;
  } else {
    engine.remove_sequence(sequence);
  }
  return logits;
}

// Bits per byte of predicting tokens[1..] from their prefixes.
inline double bits_per_byte(Engine& engine, const std::vector<Tokens>& texts) {
  double bits = 0;
  double count = 0;
  for (const Tokens& text : texts) {
    const std::vector<float> logits = all_logits(engine, text);
    const auto vocab = static_cast<std::size_t>(engine.config().vocab);
    for (std::size_t i = 0; i + 1 < text.size(); ++i) {
      const std::span<const float> row(logits.data() + i * vocab, vocab);
      const double most = *std::max_element(row.begin(), row.end());
      double sum = 0;
      for (const float v : row) sum += std::exp(double{v} - most);
      const double logit = double{row[static_cast<std::size_t>(text[i + 1])]};
      bits += (most + std::log(sum) - logit) / std::log(2.0);
    }
    count += static_cast<double>(text.size() - 1);
  }
  return bits / count;
}

// The first `length` bytes of the first `count` held-out chapters.
inline std::vector<Tokens> chapters(std::size_t count, std::size_t length) {
  std::ifstream file(PENSTOCK_TEST_MODELS "/tiny-glm/heldout.txt", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::vector<Tokens> out;
  for (const char c : text) {
    if (c == '\x02') {
      if (out.size() == count) break;
      out.emplace_back();
    }
    if (!out.empty() && out.back().size() < length) {
      out.back().push_back(static_cast<unsigned char>(c));
    }
  }
  return out;
}

}  // namespace penstock::engine_test
