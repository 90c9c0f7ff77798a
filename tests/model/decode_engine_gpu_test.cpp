// The engine over the decode_layer kernel, on tiny-glm. Run from the repository's root: the models
// are read from there.
#include "core/cuda/check.h"
#include "fabric/gpu.h"
#include "model/decode_engine_support.h"

namespace penstock {
namespace {

using namespace engine_test;

class DecodeEngineGpu : public testing::TestWithParam<int> {};
// Two ranks: virtual ranks of one GPU, or one rank a GPU where there are two.
INSTANTIATE_TEST_SUITE_P(Ranks, DecodeEngineGpu, testing::Values(1, 2));

TEST_P(DecodeEngineGpu, GreedyRunsEqualTokenForToken) {
  Engine engine(tiny(), decode_options(cuda_decode_layers, GetParam()));
  // Measured on one H200: at 1 rank one token, 0.043 apart; at 2 ranks none.
  const int ties = expect_golden_tokens(engine, 4, 64, 0.05F);
  std::printf("ranks %d: 256 golden tokens, %d of them other than transformers' (near ties)\n",
              GetParam(), ties);
  EXPECT_LE(ties, 2);
}

TEST_P(DecodeEngineGpu, PredictsAsWellAsTheCpu) {
  const std::vector<Tokens> texts = chapters(47, 128);
  static const double want = [&] {
    Engine own(tiny(), {.threads = 4});
    return bits_per_byte(own, texts);
  }();
  Engine engine(tiny(), decode_options(cuda_decode_layers, GetParam()));
  const double got = bits_per_byte(engine, texts);
  RecordProperty("cpu_engine", std::to_string(want));
  RecordProperty("kernel", std::to_string(got));
  std::printf("bits per byte, context 128: CPU engine %.6f, kernel at %d ranks %.6f\n", want,
              GetParam(), got);
  EXPECT_LE(std::abs(got - want), 0.01);
}

TEST_P(DecodeEngineGpu, ChunksAndNeighboursChangeNoBit) {
  EngineOptions options = decode_options(cuda_decode_layers, GetParam());
  options.pages = 4;
  Engine engine(tiny(), options);
  expect_chunks_change_no_bit(engine, 128 / 2);
}

}  // namespace
}  // namespace penstock

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const std::string refusal = penstock::gpu_unavailable();
  if (!refusal.empty()) {
    std::printf("skipped: %s\n", refusal.c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
