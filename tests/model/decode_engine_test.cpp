// The engine over decode_layer's CPU operator: golden tokens, quality, independence of chunks,
// refusals.
#include "model/decode_engine_support.h"

namespace penstock {
namespace {

using namespace engine_test;

constexpr std::size_t kSteps = kSanitized ? 4 : 64;
constexpr int kPrompts = kSanitized ? 1 : 4;

// A token may differ where the two candidates lie within three times what roundings move margins:
// ranks split sums at other places, nothing else differs between 1 and 2 of them.
TEST(DecodeEngine, GreedyRunsEqualTokenForToken) {
  const GoldenMargins golden(kPrompts, kSteps);
  std::vector<float> margins[2];
  for (const int ranks : {1, 2}) {
    Engine engine(tiny(), decode_options(cpu_decode_layers, ranks));
    margins[ranks - 1] = golden.of(engine);
  }
  const double change = GoldenMargins::change(margins[0], margins[1]);
  RecordProperty("margin_change", std::to_string(change));
  EXPECT_LE(change, 0.04);  // measured: 0.026
  for (const int ranks : {1, 2}) {
    Engine engine(tiny(), decode_options(cpu_decode_layers, ranks));
    EXPECT_EQ(engine.options().max_rows, 16);
    EXPECT_EQ(engine.options().max_context, 128);
    const int ties = expect_golden_tokens(engine, kPrompts, kSteps, static_cast<float>(3 * change));
    RecordProperty("ties_ranks" + std::to_string(ranks), ties);
    EXPECT_LE(ties, 2) << ranks << " ranks";  // measured: 1 of 256 tokens
  }
}

TEST(DecodeEngine, CacheFormatsKeepTheTokens) {
  for (const decode::KvFormat format : {decode::KvFormat::kFp8Scaled, decode::KvFormat::kFp8}) {
    EngineOptions options = decode_options(cpu_decode_layers, 1);
    options.kv_format = format;
    Engine engine(tiny(), options);
    EXPECT_LE(expect_golden_tokens(engine, 1, kSanitized ? 4 : 32, 0.1F), 2);
    const EngineMemory memory = engine.memory();
    EXPECT_EQ(memory.page_bytes, 4 * 64 * decode::kv_row_bytes(format));
    EXPECT_EQ(memory.cache_bytes, 2 * memory.page_bytes);
  }
}

TEST(DecodeEngine, PredictsAsWellAsTheEngine) {
  const std::vector<Tokens> texts = chapters(kSanitized ? 1 : 3, kSanitized ? 20 : 100);
  Engine own(tiny(), {.threads = 1});
  Engine engine(tiny(), decode_options(cpu_decode_layers, 1));
  const double difference = bits_per_byte(engine, texts) - bits_per_byte(own, texts);
  EXPECT_LE(std::abs(difference), 0.01);
  EXPECT_NE(difference, 0.0) << "bf16 hand-offs must show: these are different operators";
}

TEST(DecodeEngine, ChunksAndNeighboursChangeNoBit) {
  EngineOptions options = decode_options(cpu_decode_layers, 1);
  options.pages = 4;
  Engine engine(tiny(), options);
  expect_chunks_change_no_bit(engine, kSanitized ? 18 : 40);
}

TEST(DecodeEngine, HooksSeeEveryLayer) {
  Engine engine(tiny(), decode_options(cpu_decode_layers, 2));
  Engine own(tiny(), {.threads = 1});
  const Tokens tokens = document(5);
  std::vector<std::vector<float>> seen[2];
  const auto keep = [](std::vector<std::vector<float>>& to) {
    return [&to](const Capture& capture) {
      if (capture.stage == "embedding" || capture.stage == "layer.out") {
        to.emplace_back(capture.values.begin(), capture.values.end());
      }
    };
  };
  engine.set_capture(keep(seen[0]));
  own.set_capture(keep(seen[1]));
  all_logits(engine, tokens);
  all_logits(own, tokens);
  ASSERT_EQ(seen[0].size(), 25U);
  ASSERT_EQ(seen[1].size(), 25U);
  for (std::size_t i = 0; i < 25; ++i) {
    // The embedding is bf16 in the checkpoint; behind it roundings add up layer by layer.
    EXPECT_LE(relative_error(seen[0][i], seen[1][i]), i < 5 ? 0.0 : 2e-2) << i;
  }
}

template <typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

TEST(DecodeEngine, RefusesWhatTheOperatorCannotDo) {
  EngineOptions options = decode_options(cpu_decode_layers, 1);
  options.max_context = 129;
  EXPECT_NE(message_of([&] { Engine(tiny(), options); }).find("at most 128 tokens"),
            std::string::npos);
  options = decode_options(cpu_decode_layers, 1);
  options.activations = ActivationFormat::kFp8;
  EXPECT_NE(message_of([&] { Engine(tiny(), options); }).find("kF32"), std::string::npos);
  options = decode_options(cpu_decode_layers, 8);  // 32 columns of an expert a rank
  EXPECT_NE(message_of([&] { Engine(tiny(), options); }).find("8 ranks"), std::string::npos);
}

}  // namespace
}  // namespace penstock
