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

// What roundings do: the CPU operator's margins at 1 and at 2 ranks, and how far they lie apart
// (0.026 on the golden runs). Ranks split sums at other places, nothing else differs.
struct CpuMargins {
  GoldenMargins golden{4, 64};
  std::vector<float> at_ranks[2];
  double change;
  CpuMargins() {
    for (const int ranks : {1, 2}) {
      Engine engine(tiny(), decode_options(cpu_decode_layers, ranks));
      at_ranks[ranks - 1] = golden.of(engine);
    }
    change = GoldenMargins::change(at_ranks[0], at_ranks[1]);
  }
  static const CpuMargins& get() {
    static const CpuMargins margins;
    return margins;
  }
};

// A token may differ where the two candidates lie within three times what roundings move margins.
TEST_P(DecodeEngineGpu, GreedyRunsEqualTokenForToken) {
  Engine engine(tiny(), decode_options(cuda_decode_layers, GetParam()));
  const double tie = 3 * CpuMargins::get().change;
  const int ties = expect_golden_tokens(engine, 4, 64, static_cast<float>(tie));
  std::printf(
      "ranks %d: 256 golden tokens, %d of them other than transformers' (ties within %.3f)\n",
      GetParam(), ties, tie);
  EXPECT_LE(ties, 2);
}

// The kernel rounds where the CPU operator rounds: its margins lie no further from that operator's
// than a change of its sums' order may move them.
TEST_P(DecodeEngineGpu, MarginsAreTheCpuOperators) {
  const CpuMargins& cpu = CpuMargins::get();
  Engine engine(tiny(), decode_options(cuda_decode_layers, GetParam()));
  const double change = GoldenMargins::change(
      cpu.golden.of(engine), cpu.at_ranks[static_cast<std::size_t>(GetParam() - 1)]);
  std::printf(
      "ranks %d: nine of ten margins within %.4f of the CPU operator's (1 against 2 ranks: "
      "%.4f)\n",
      GetParam(), change, cpu.change);
  EXPECT_LE(change, 2 * cpu.change);
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
