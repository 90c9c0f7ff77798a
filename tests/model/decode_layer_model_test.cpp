// decode_layer's CPU operator against the model's oracle on a trained checkpoint: decode steps of
// tiny-glm's layers, dense and MoE, with the oracle's own residual stream, cache and picks as
// inputs. What differs is the operator's bf16 roundings.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "model/decode_weights.h"
#include "model/rewritten_checkpoint.h"
#include "penstock/model/checkpoint.h"
#include "penstock/model/reference.h"
#include "penstock/model/safetensors.h"
#include "penstock/numerics/formats.h"
#include "penstock/ops/decode_layer/reference.h"

namespace penstock {
namespace {

constexpr int kRows = 4;  // the last positions, as rows of one step
// Measured 3.2e-3 to 5.1e-3: about ten bf16 roundings of 1.1e-3 each in a row (reference.h), which
// the oracle does not do.
constexpr double kTolerance = 7e-3;

// Decode steps of the last rows of `tokens_read` tokens (more than the indexer's 128 picks).
void compare_layers(const Checkpoint& checkpoint, std::size_t tokens_read,
                    std::initializer_list<int> layers) {
  const ModelConfig& config = checkpoint.config();
  const SafetensorsFile golden(PENSTOCK_TEST_MODELS "/tiny-glm/golden.safetensors");
  const auto* document = golden.at("doc.tokens").as<std::int32_t>();
  const std::vector<std::int32_t> tokens(document, document + tokens_read);

  std::map<std::string, std::vector<double>> values;
  std::map<std::string, std::vector<std::int32_t>> indices;
  reference::ReferenceOptions options;
  options.threads = 2;
  options.capture = [&](std::string_view name, const TensorView& view) {
    if (view.dtype == DType::kI32) {
      indices[std::string(name)] = {view.as<std::int32_t>(),
                                    view.as<std::int32_t>() + view.elements()};
    } else if (name == "embed" || name.ends_with(".out") || name.ends_with("attn.c_kv") ||
               name.ends_with("attn.k_pe")) {
      values[std::string(name)] = {view.as<double>(), view.as<double>() + view.elements()};
    }
  };
  reference::ReferenceModel<double>(checkpoint, options).forward(tokens);

  const auto hidden = static_cast<std::size_t>(config.hidden);
  for (const int layer : layers) {
    decode::DecodeShape shape = engine::decode_layer_shape(checkpoint, layer, 1);
    shape.rows = kRows;
    const std::string at = "layer" + std::to_string(layer) + ".";
    const auto& x = values.at(layer == 0 ? "embed" : "layer" + std::to_string(layer - 1) + ".out");
    const auto& want = values.at(at + "out");
    const auto& c_kv = values.at(at + "attn.c_kv");
    const auto& k_pe = values.at(at + "attn.k_pe");
    const auto& picks = indices.at(at + "index.picks");
    const std::size_t picks_a_row = picks.size() / tokens_read;

    // Cache slot = position; the rows of this step are not there yet.
    const std::size_t pages = (tokens_read + decode::kPageTokens - 1) / decode::kPageTokens;
    constexpr std::int64_t kStride = decode::kPageTokens * 1152;
    std::vector<std::uint8_t> cache(pages * kStride, 0xFF);
    for (std::size_t t = 0; t < tokens_read - kRows; ++t) {
      for (std::size_t i = 0; i < decode::kKvRow; ++i) {
        const double v = i < decode::kLatent ? c_kv[t * decode::kLatent + i]
                                             : k_pe[t * decode::kRope + i - decode::kLatent];
        const std::uint16_t bits = Bf16::from_float(static_cast<float>(v)).bits;
        std::memcpy(cache.data() + t * 1152 + i * 2, &bits, 2);
      }
    }
    std::vector<std::int32_t> positions;
    std::vector<std::int64_t> slots;
    std::vector<std::int32_t> offsets = {0};
    std::vector<std::int32_t> picked;
    std::vector<std::uint16_t> in;
    for (std::size_t t = tokens_read - kRows; t < tokens_read; ++t) {
      positions.push_back(static_cast<std::int32_t>(t));
      slots.push_back(static_cast<std::int64_t>(t));
      for (std::size_t i = 0; i < picks_a_row; ++i) {
        if (picks[t * picks_a_row + i] >= 0) picked.push_back(picks[t * picks_a_row + i]);
      }
      offsets.push_back(static_cast<std::int32_t>(picked.size()));
      for (std::size_t i = 0; i < hidden; ++i) {
        in.push_back(Bf16::from_float(static_cast<float>(x[t * hidden + i])).bits);
      }
    }
    ASSERT_EQ(picked.size(), kRows * 128U);
    const decode::LayerTensors tensors = engine::decode_layer_tensors(checkpoint, layer);
    const auto error_of = [&](const decode::DecodeShape& with) {
      std::vector<std::uint8_t> own = cache;
      std::vector<std::uint16_t> out(in.size());
      decode::run_reference_layer(with, tensors, {positions, slots, offsets, picked},
                                  {own.data(), kStride, decode::KvFormat::kBf16},
                                  static_cast<std::int64_t>(tokens_read), in, out);
      double error = 0;
      double size = 0;
      for (std::size_t i = 0; i < out.size(); ++i) {
        const double w = want[(tokens_read - kRows) * hidden + i];
        const double d = static_cast<double>(Bf16::from_bits(out[i]).to_float()) - w;
        error += d * d;
        size += w * w;
      }
      return std::sqrt(error / size);
    };
    for (const int ranks : {1, 2, 4}) {
      shape.ranks = ranks;
      const double error = error_of(shape);
      EXPECT_LE(error, kTolerance) << "layer " << layer << ", " << ranks << " ranks";
      testing::Test::RecordProperty(
          "layer" + std::to_string(layer) + "_ranks" + std::to_string(ranks),
          std::to_string(error));
    }
    // The tolerance tells a slightly different layer apart.
    decode::DecodeShape wrong = shape;
    wrong.rope_theta = 2e4;
    testing::Test::RecordProperty("layer" + std::to_string(layer) + "_theta",
                                  std::to_string(error_of(wrong)));
    EXPECT_GT(error_of(wrong), kTolerance);
    if (shape.dense) continue;
    wrong = shape;
    wrong.routed_scale = 2.6F;
    testing::Test::RecordProperty("layer" + std::to_string(layer) + "_scale",
                                  std::to_string(error_of(wrong)));
    EXPECT_GT(error_of(wrong), kTolerance);
  }
}

TEST(DecodeLayerModel, StepsOfATrainedModelMatchTheOracle) {
  compare_layers(Checkpoint(PENSTOCK_TEST_MODELS "/tiny-glm"), 300, {0, 1, 2, 3});  // 0 is dense
}

TEST(DecodeLayerModel, AttentionScaledPerChannelMatchesTheOracle) {
  const engine_test::Folder folder;
  engine_test::write_channel_attention(folder.path("channel"));
  const Checkpoint checkpoint(folder.path("channel"));
  ASSERT_EQ(engine::decode_layer_shape(checkpoint, 0, 1).attention_scales,
            decode::AttentionScales::kChannel);
  compare_layers(checkpoint, 140, {0, 1});
}

}  // namespace
}  // namespace penstock
