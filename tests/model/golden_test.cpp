// The reference against golden.safetensors: Hugging Face transformers' outputs for tiny-glm.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "penstock/model/reference.h"
#include "penstock/model/safetensors.h"

namespace penstock::reference {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(NDEBUG)
constexpr bool kSlowBuild = true;
#else
constexpr bool kSlowBuild = false;
#endif
// Beyond the indexer's top-k of 128 either way. The picks of the last position need the whole text.
constexpr std::int64_t kDocTokens = kSlowBuild ? 200 : 1500;
// Measured: 5e-7 in f32 and f64 alike. Exact instead of f32 RoPE angles would already give 9e-6.
constexpr double kTolerance = 2e-6;

const SafetensorsFile& golden() {
  static const SafetensorsFile file(PENSTOCK_TEST_MODELS "/tiny-glm/golden.safetensors");
  return file;
}

const Checkpoint& tiny() {
  static const Checkpoint checkpoint(PENSTOCK_TEST_MODELS "/tiny-glm");
  return checkpoint;
}

std::vector<std::int32_t> tokens_of(const std::string& name) {
  const TensorView& view = golden().at(name);
  return {view.as<std::int32_t>(), view.as<std::int32_t>() + view.elements()};
}

std::vector<double> widen(const TensorView& view) {
  std::vector<double> out;
  for (std::int64_t i = 0; i < view.elements(); ++i) {
    out.push_back(view.dtype == DType::kF64 ? view.as<double>()[i]
                                            : static_cast<double>(view.as<float>()[i]));
  }
  return out;
}

// |got - want| / |want| in the Euclidean norm.
double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
  EXPECT_EQ(got.size(), want.size());
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(difference / size);
}

template <typename T>
class GoldenTest : public testing::Test {};
using Precisions = testing::Types<float, double>;
struct PrecisionNames {
  template <typename T>
  static std::string GetName(int) {
    return std::is_same_v<T, float> ? "F32" : "F64";
  }
};
TYPED_TEST_SUITE(GoldenTest, Precisions, PrecisionNames);

TYPED_TEST(GoldenTest, DocumentMatchesLayerByLayer) {
  const ModelConfig& config = tiny().config();
  std::vector<std::int32_t> tokens = tokens_of("doc.tokens");
  ASSERT_EQ(tokens.size(), 1500U);
  tokens.resize(static_cast<std::size_t>(kDocTokens));

  std::map<std::string, std::vector<double>> outs;
  std::map<std::string, std::vector<double>> logits;
  std::map<std::string, std::vector<std::int32_t>> indices;
  ReferenceOptions options;
  options.threads = 2;
  options.capture = [&](std::string_view name, const TensorView& view) {
    if (name.ends_with(".out")) outs[std::string(name)] = widen(view);
    if (name.ends_with("router_logits") || name.ends_with("last_scores")) {
      logits[std::string(name)] = widen(view);
    }
    if (view.dtype == DType::kI32) {
      indices[std::string(name)] = {view.as<std::int32_t>(),
                                    view.as<std::int32_t>() + view.elements()};
    }
  };
  ReferenceModel<TypeParam> model(tiny(), options);
  const Array<TypeParam> got = model.forward(tokens);

  // Rows at the golden positions that this run reached.
  const TensorView& positions = golden().at("doc.positions");
  const auto gather = [&](auto row_of, std::int64_t width, const TensorView& want) {
    std::vector<double> a, b;
    for (std::int64_t i = 0; i < positions.elements(); ++i) {
      const std::int64_t position = positions.as<std::int32_t>()[i];
      if (position >= kDocTokens) continue;
      for (std::int64_t c = 0; c < width; ++c) {
        a.push_back(static_cast<double>(row_of(position)[c]));
        b.push_back(static_cast<double>(want.as<float>()[i * width + c]));
      }
    }
    EXPECT_FALSE(a.empty());
    return relative_error(a, b);
  };
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    const std::string name = "layer" + std::to_string(layer) + ".out";
    const double error =
        gather([&](std::int64_t s) { return outs.at(name).data() + s * config.hidden; },
               config.hidden, golden().at("doc." + name));
    EXPECT_LT(error, kTolerance) << name;
    this->RecordProperty(name, fmt::format("{:.2e}", error));
  }
  const double logits_error =
      gather([&](std::int64_t s) { return got.row(s); }, config.vocab, golden().at("doc.logits"));
  EXPECT_LT(logits_error, kTolerance);
  this->RecordProperty("logits", fmt::format("{:.2e}", logits_error));

  const auto nll = negative_log_likelihood<TypeParam>(got, tokens);
  std::vector<double> want_nll = widen(golden().at("doc.nll"));
  want_nll.resize(nll.size());
  EXPECT_LT(relative_error(nll, want_nll), kTolerance);
  double mean = 0, want_mean = 0;
  for (std::size_t i = 0; i < nll.size(); ++i) {
    mean += nll[i] / static_cast<double>(nll.size());
    want_mean += want_nll[i] / static_cast<double>(nll.size());
    EXPECT_NEAR(nll[i], want_nll[i], 1e-3) << i;
  }
  EXPECT_NEAR(mean, want_mean, 1e-5);

  // Router: logits agree, and so do the choices made from golden's own logits, as sets.
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    if (!config.sparse_mlp[static_cast<std::size_t>(layer)]) continue;
    const std::string prefix = "layer" + std::to_string(layer);
    std::vector<double> want = widen(golden().at("doc." + prefix + ".router_logits"));
    want.resize(static_cast<std::size_t>(kDocTokens * config.experts));
    EXPECT_LT(relative_error(logits.at(prefix + ".mlp.router_logits"), want), kTolerance);
    const LayerWeights weights = load_layer(tiny(), layer);
    const auto& mine = indices.at(prefix + ".mlp.experts");
    for (std::int64_t s = 0; s < kDocTokens; ++s) {
      const std::vector<float> row(want.begin() + s * config.experts,
                                   want.begin() + (s + 1) * config.experts);
      const auto chosen = route<float>(config, row, weights.moe->bias).experts;
      const std::set<std::int32_t> a(chosen.begin(), chosen.end());
      const std::set<std::int32_t> b(mine.begin() + s * config.top_k,
                                     mine.begin() + (s + 1) * config.top_k);
      ASSERT_EQ(a, b) << prefix << " position " << s;
    }
  }

  // Picks at the last position: equal, except between positions whose scores tie within 1e-5 of
  // the last pick's.
  for (std::int64_t layer = 0; layer < config.layers && kDocTokens == 1500; ++layer) {
    if (!config.full_indexer[static_cast<std::size_t>(layer)]) continue;
    const std::string prefix = "layer" + std::to_string(layer);
    const auto want = tokens_of("doc." + prefix + ".topk_last");
    const auto& all = indices.at(prefix + ".index.picks");
    const std::vector<std::int32_t> mine(all.end() - config.index_top_k, all.end());
    const auto& scores = logits.at(prefix + ".index.last_scores");
    ASSERT_EQ(scores.size(), 1500U);
    double smallest = scores[static_cast<std::size_t>(mine[0])];
    for (const std::int32_t t : mine) {
      smallest = std::min(smallest, scores[static_cast<std::size_t>(t)]);
    }
    std::vector<std::int32_t> differing;
    std::set_symmetric_difference(mine.begin(), mine.end(), want.begin(), want.end(),
                                  std::back_inserter(differing));
    for (const std::int32_t t : differing) {
      EXPECT_NEAR(scores[static_cast<std::size_t>(t)], smallest, 1e-5) << prefix << " at " << t;
    }
  }
}

TYPED_TEST(GoldenTest, GreedyRunsFollowTheGoldenLogits) {
  ReferenceOptions options;
  options.threads = 2;
  ReferenceModel<TypeParam> model(tiny(), options);
  for (int run = 0; run < (kSlowBuild ? 1 : 4); ++run) {
    const std::string name = "greedy." + std::to_string(run);
    const auto tokens = tokens_of(name + ".tokens");
    const std::vector<double> want = widen(golden().at(name + ".logits"));
    const std::size_t prompt = tokens.size() - 160;
    // Causal: one run over prompt and continuation shows every step's logits.
    const Array<TypeParam> all = model.forward(std::span(tokens).first(prompt + 31));
    const auto begin = all.data.begin() + static_cast<std::ptrdiff_t>((prompt - 1) * 256);
    const std::vector<double> got(begin, all.data.end());
    ASSERT_EQ(got.size(), want.size());
    const double error = relative_error(got, want);
    EXPECT_LT(error, kTolerance) << name;
    this->RecordProperty(name, fmt::format("{:.2e}", error));
    for (std::size_t step = 0; step < 32; ++step) {
      const auto row = got.begin() + static_cast<std::ptrdiff_t>(step * 256);
      EXPECT_EQ(std::max_element(row, row + 256) - row, tokens[prompt + step])
          << name << " step " << step;
    }
  }
}

}  // namespace
}  // namespace penstock::reference
