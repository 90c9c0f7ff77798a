// The engine on checkpoints of other storage formats, and with FP8 activations.
#include "model/engine_test_support.h"
#include "model/rewritten_checkpoint.h"
#include "penstock/model/convert.h"
#include "penstock/model/reference.h"

namespace penstock {
namespace {

using namespace engine_test;

EngineOptions options(ActivationFormat activations = ActivationFormat::kF32, int ranks = 1) {
  EngineOptions options;
  options.threads = 2 / ranks;
  options.ranks = ranks;
  options.activations = activations;
  options.max_context = 2048;
  return options;
}

const std::vector<Tokens>& texts() {
  static const std::vector<Tokens> out = chapters(kSanitized ? 1 : 4, kSanitized ? 200 : 1024);
  return out;
}

TEST(EngineFormats, Fp8ActivationsCostAtMostAHundredthOfABit) {
  Engine f32(tiny(), options());
  Engine fp8(tiny(), options(ActivationFormat::kFp8));
  const double exact = bits_per_byte(f32, texts());
  const double rounded = bits_per_byte(fp8, texts());
  EXPECT_GT(exact, 1.0);
  EXPECT_LT(exact, 2.0);
  EXPECT_NE(exact, rounded);
  EXPECT_LT(rounded - exact, 0.01) << exact << " and " << rounded << " bits per byte";
}

TEST(EngineFormats, Mxfp4ExpertsMatchTheReferenceAndCostAtMostATwentiethOfABit) {
  Folder folder;
  ConvertOptions convert;
  convert.experts = ExpertsFormat::kMxfp4;
  convert.threads = 2;
  convert_experts(tiny(), folder.path("mxfp4"), convert);
  const Checkpoint checkpoint(folder.path("mxfp4"));
  ASSERT_EQ(checkpoint.weight("model.layers.1.mlp.experts.0.up_proj").format, WeightFormat::kMxfp4);
  const Tokens tokens = document(kSanitized ? 60 : 160);
  reference::ReferenceModel<float> oracle(checkpoint, {});
  const reference::Array<float> want = oracle.forward(tokens);
  for (const int ranks : {1, 8}) {
    Engine engine(checkpoint, options(ActivationFormat::kF32, ranks));
    EXPECT_LT(relative_error(all_logits(engine, tokens), want.data), 1e-5) << ranks << " ranks";
  }
  Engine fp8(tiny(), options());
  Engine mxfp4(checkpoint, options());
  const double before = bits_per_byte(fp8, texts());
  const double after = bits_per_byte(mxfp4, texts());
  EXPECT_NE(before, after);
  EXPECT_LT(after - before, 0.05) << before << " and " << after << " bits per byte";
}

// An FP8 weight is code x scale, rounded once to f32: stored as that f32, nothing changes, not even
// a bit. That holds every decoder against the plainest one.
TEST(EngineFormats, F32CopiesOfTheWeightsGiveTheSameBits) {
  Folder folder;
  rewrite_checkpoint(folder.path("f32"), [](const std::string& name, const Weight& weight,
                                            std::vector<NamedTensor>& out,
                                            std::vector<Bytes>& storage) {
    Bytes& bytes = storage.emplace_back(static_cast<std::size_t>(weight.rows * weight.cols * 4));
    for (std::int64_t row = 0; row < weight.rows; ++row) {
      dequantise_row(weight, row, reinterpret_cast<float*>(bytes.data()) + row * weight.cols);
    }
    out.push_back({name + ".weight", view_of(bytes, DType::kF32, weight.rows, weight.cols)});
  });
  const Checkpoint checkpoint(folder.path("f32"));
  ASSERT_EQ(checkpoint.weight("model.layers.0.self_attn.q_a_proj").format, WeightFormat::kPlain);
  const Tokens tokens = document(kSanitized ? 70 : 200);
  for (const int ranks : {1, 2}) {
    Engine stored(tiny(), options(ActivationFormat::kF32, ranks));
    Engine plain(checkpoint, options(ActivationFormat::kF32, ranks));
    EXPECT_TRUE(same_bits(all_logits(plain, tokens), all_logits(stored, tokens)));
  }
}

// Per-channel scales, made of each row's first block scale: another model than tiny-glm, and as
// good an input for both sides.
TEST(EngineFormats, ChannelScalesMatchTheReference) {
  Folder folder;
  rewrite_checkpoint(
      folder.path("channel"), [](const std::string& name, const Weight& weight,
                                 std::vector<NamedTensor>& out, std::vector<Bytes>& storage) {
        const auto* codes = weight.data.as<std::byte>();
        Bytes& copy = storage.emplace_back(codes, codes + weight.rows * weight.cols);
        out.push_back({name + ".weight", view_of(copy, DType::kE4M3, weight.rows, weight.cols)});
        Bytes& scales = storage.emplace_back(static_cast<std::size_t>(weight.rows * 4));
        for (std::int64_t row = 0; row < weight.rows; ++row) {
          reinterpret_cast<float*>(scales.data())[row] =
              weight.scale.as<float>()[row / 128 * weight.scale.dim(1)];
        }
        out.push_back({name + ".weight_scale", view_of(scales, DType::kF32, weight.rows, 1)});
      });
  const Checkpoint checkpoint(folder.path("channel"));
  ASSERT_EQ(checkpoint.weight("model.layers.0.self_attn.q_a_proj").format,
            WeightFormat::kFp8Channel);
  const Tokens tokens = document(kSanitized ? 60 : 160);
  reference::ReferenceModel<float> oracle(checkpoint, {});
  const reference::Array<float> want = oracle.forward(tokens);
  Engine engine(checkpoint, options());
  EXPECT_LT(relative_error(all_logits(engine, tokens), want.data), 1e-5);
}

}  // namespace
}  // namespace penstock
