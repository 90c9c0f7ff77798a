// The engine against golden.safetensors: Hugging Face transformers' outputs for tiny-glm.
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "model/engine_test_support.h"

namespace penstock {
namespace {

using namespace engine_test;

// The contract is 1e-3. Measured: 3.1e-7 for the logits, less for the layers.
constexpr double kTolerance = 5e-6;
constexpr double kTie = 1e-5;

class EngineRanks : public testing::TestWithParam<int> {
 protected:
  EngineOptions options() const {
    EngineOptions options;
    options.ranks = GetParam();
    options.threads = 2;
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, EngineRanks, testing::Values(1, 2, 4, 8));

TEST_P(EngineRanks, GreedyRunsEqualTokenForToken) {
  constexpr std::size_t kGenerated = 160;
  constexpr std::size_t kSteps = kSanitized ? 20 : kGenerated;
  constexpr std::size_t kLogitSteps = 32;
  Engine engine(tiny(), options());
  for (int run = 0; run < (kSanitized ? 1 : 4); ++run) {
    const std::string name = "greedy." + std::to_string(run);
    Tokens want = golden_tokens(name + ".tokens");
    want.resize(want.size() - kGenerated + kSteps);
    const float* want_logits = golden().at(name + ".logits").as<float>();
    const auto vocab = static_cast<std::size_t>(engine.config().vocab);
    const SequenceId sequence = engine.create_sequence();
    Tokens got(want.begin(), want.end() - static_cast<std::ptrdiff_t>(kSteps));
    StepResult result = engine.step({{sequence, got}});
    for (std::size_t step = 0; step < kSteps; ++step) {
      if (step < kLogitSteps) {
        ASSERT_LT(relative_error(result.row(0), {want_logits + step * vocab, vocab}), kTolerance)
            << name << " step " << step;
      }
      got.push_back(argmax(result.row(0)));
      if (step + 1 < kSteps) result = engine.step({{sequence, {got.back()}}});
    }
    EXPECT_EQ(got, want) << name;
    engine.remove_sequence(sequence);
  }
}

// What the hook saw, by (stage, layer), position by position.
struct Seen {
  std::map<std::pair<std::string, std::int64_t>, std::vector<std::vector<float>>> values;
  std::map<std::pair<std::string, std::int64_t>, std::vector<Tokens>> indices;
};

TEST_P(EngineRanks, DocumentMatchesLayerByLayer) {
  // Chunks of 100 rows: page boundaries and chunk boundaries fall apart. Without the sanitizers'
  // limit, 1500 positions over a top-k of 128.
  EngineOptions given = options();
  given.max_rows = 100;
  Engine engine(tiny(), given);
  const Tokens tokens = document(kSanitized ? 130 : 1500);
  Seen seen;
  engine.set_capture([&](const Capture& capture) {
    const std::pair key(std::string(capture.stage), capture.layer);
    ASSERT_EQ(static_cast<std::size_t>(capture.position), seen.values[key].size());
    seen.values[key].emplace_back(capture.values.begin(), capture.values.end());
    seen.indices[key].emplace_back(capture.indices.begin(), capture.indices.end());
  });
  const std::vector<float> logits = all_logits(engine, tokens);

  const auto vocab = static_cast<std::size_t>(engine.config().vocab);
  const auto hidden = static_cast<std::size_t>(engine.config().hidden);
  const Tokens positions = golden_tokens("doc.positions");
  std::size_t compared = 0;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const auto position = static_cast<std::size_t>(positions[i]);
    if (position >= tokens.size()) continue;
    ++compared;
    EXPECT_LT(relative_error({logits.data() + position * vocab, vocab},
                             {golden().at("doc.logits").as<float>() + i * vocab, vocab}),
              kTolerance)
        << "logits at " << position;
    for (std::int64_t layer = 0; layer < engine.config().layers; ++layer) {
      const float* want =
          golden().at("doc.layer" + std::to_string(layer) + ".out").as<float>() + i * hidden;
      EXPECT_LT(relative_error(seen.values.at({"layer.out", layer})[position], {want, hidden}),
                kTolerance)
          << "layer " << layer << " at " << position;
    }
  }
  EXPECT_GE(compared, kSanitized ? 7U : 16U);

  // Router choices of every position: the golden logits' best four with the bias added in f32.
  const auto experts = static_cast<std::size_t>(engine.config().experts);
  const auto top_k = static_cast<std::size_t>(engine.config().top_k);
  for (const std::int64_t layer : {1, 2, 3}) {
    const std::string number = std::to_string(layer);
    const float* want = golden().at("doc.layer" + number + ".router_logits").as<float>();
    const float* bias =
        tiny().tensor("model.layers." + number + ".mlp.gate.e_score_correction_bias").as<float>();
    for (std::size_t position = 0; position < tokens.size(); ++position) {
      const std::span<const float> row(want + position * experts, experts);
      ASSERT_LT(relative_error(seen.values.at({"router.logits", layer})[position], row), 1e-4);
      std::vector<float> choice;
      for (std::size_t e = 0; e < experts; ++e) {
        choice.push_back(1.0f / (1.0f + std::exp(-row[e])) + bias[e]);
      }
      Tokens order(experts);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
        return choice[static_cast<std::size_t>(a)] > choice[static_cast<std::size_t>(b)];
      });
      const Tokens& got = seen.indices.at({"router.choice", layer})[position];
      ASSERT_EQ(got.size(), top_k);
      for (std::size_t i = 0; i < top_k; ++i) {
        const double gap = double{choice[static_cast<std::size_t>(order[i])]} -
                           double{choice[static_cast<std::size_t>(got[i])]};
        ASSERT_LE(std::abs(gap), got[i] == order[i] ? 0.0 : kTie)
            << "layer " << layer << " position " << position << " choice " << i;
      }
    }
  }

  // Picks: all that there is below the top-k; at the golden file's last position, its picks.
  for (const std::int64_t layer : {0, 1, 3}) {
    const std::vector<Tokens>& picks = seen.indices.at({"indexer.picks", layer});
    ASSERT_EQ(picks.size(), tokens.size());
    for (std::size_t position = 0; position < picks.size(); ++position) {
      ASSERT_EQ(picks[position].size(), std::min<std::size_t>(128, position + 1));
      ASSERT_TRUE(std::is_sorted(picks[position].begin(), picks[position].end()));
      ASSERT_LE(picks[position].back(), static_cast<std::int32_t>(position));
    }
    if (tokens.size() == 1500) {
      EXPECT_EQ(picks.back(), golden_tokens("doc.layer" + std::to_string(layer) + ".topk_last"));
    }
  }
  EXPECT_EQ(seen.indices.count({"indexer.picks", 2}), 0U);
}

}  // namespace
}  // namespace penstock
