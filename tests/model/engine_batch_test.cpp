// The engine's promises about bits, pages and errors.
#include <atomic>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <utility>

#include "model/engine_test_support.h"
#include "model/rank_group.h"
#include "penstock/core/error.h"

namespace penstock {
namespace {

using namespace engine_test;

constexpr std::size_t kLong = kSanitized ? 150 : 300;  // beyond the top-k of 128, over pages of 64

template <typename Call>
ErrorKind kind_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_GT(std::string(error.what()).size(), 20U);
    return error.kind();
  }
  ADD_FAILURE() << "no error";
  return ErrorKind::kBackend;
}

struct Variant {
  int ranks;
  ActivationFormat activations;
};
class EngineBits : public testing::TestWithParam<Variant> {
 protected:
  EngineOptions options(std::int64_t max_rows = 256, int threads = 1) const {
    EngineOptions options;
    options.ranks = GetParam().ranks;
    options.activations = GetParam().activations;
    options.max_rows = max_rows;
    options.threads = threads;
    options.max_context = 1024;
    options.pages = 32;
    return options;
  }
};
std::vector<Variant> variants() {
  if (kSanitized) return {{2, ActivationFormat::kF32}};
  return {{1, ActivationFormat::kF32},
          {1, ActivationFormat::kFp8},
          {2, ActivationFormat::kF32},
          {8, ActivationFormat::kFp8}};
}
INSTANTIATE_TEST_SUITE_P(Variants, EngineBits, testing::ValuesIn(variants()), [](const auto& test) {
  return "Ranks" + std::to_string(test.param.ranks) +
         (test.param.activations == ActivationFormat::kFp8 ? "Fp8" : "F32");
});

TEST_P(EngineBits, ChunksDecodeAndThreadsChangeNothing) {
  const Tokens tokens = document(kLong);
  Engine whole(tiny(), options(1024));
  const std::vector<float> want = all_logits(whole, tokens);
  for (const auto& [max_rows, threads] : {std::pair{7, 1}, {64, 3}, {101, 2}}) {
    Engine chunked(tiny(), options(max_rows, threads));
    EXPECT_TRUE(same_bits(all_logits(chunked, tokens), want)) << "chunks of " << max_rows;
  }
  // The tail token by token, and by twos and threes: the widths at which kernels change.
  Engine decode(tiny(), options(64, 2));
  const SequenceId sequence = decode.create_sequence();
  std::vector<float> got;
  std::size_t at = kSanitized ? 100 : 120;
  const auto append = [&](std::size_t count) {
    const Tokens part(tokens.begin() + static_cast<std::ptrdiff_t>(at),
                      tokens.begin() + static_cast<std::ptrdiff_t>(at + count));
    const StepResult result = decode.step({{sequence, part}}, LogitRows::kAll);
    got.insert(got.end(), result.logits.begin(), result.logits.end());
    at += count;
  };
  const std::size_t prefix = std::exchange(at, 0);
  append(prefix);
  for (std::size_t i = 0; i < 20; ++i) append(1);
  for (std::size_t width = 2; width <= 6; ++width) append(width);
  EXPECT_TRUE(same_bits(got, std::span(want).first(got.size())));
}

TEST_P(EngineBits, SequencesInOneBatchMatchEachAlone) {
  const std::vector<std::size_t> lengths = kSanitized
                                               ? std::vector<std::size_t>{1, 64, 65}
                                               : std::vector<std::size_t>{1, 63, 64, 65, kLong};
  const Tokens text = document(kLong + 40);
  Engine together(tiny(), options(97, 2));
  std::vector<StepEntry> batch;
  std::vector<Tokens> texts;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    texts.emplace_back(text.begin() + static_cast<std::ptrdiff_t>(i),
                       text.begin() + static_cast<std::ptrdiff_t>(i + lengths[i] + 4));
    const SequenceId sequence = together.create_sequence();
    batch.push_back({sequence, {texts[i].begin(), texts[i].end() - 4}});
  }
  std::vector<std::vector<float>> got(lengths.size());
  const auto run = [&] {
    const StepResult result = together.step(batch);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const auto row = result.row(static_cast<std::int64_t>(i));
      got[i].insert(got[i].end(), row.begin(), row.end());
    }
  };
  run();
  // Decode for all but the third, which gets its four tokens at once: prefill and decode mixed.
  for (std::size_t step = 0; step < 4; ++step) {
    std::vector<StepEntry> next;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const Tokens& t = texts[i];
      if (i == 2 && step > 0) continue;
      next.push_back({batch[i].sequence,
                      i == 2 ? Tokens(t.end() - 4, t.end()) : Tokens{t[t.size() - 4 + step]}});
    }
    const StepResult result = together.step(next);
    std::size_t row = 0;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      if (i == 2 && step > 0) continue;
      const auto values = result.row(static_cast<std::int64_t>(row++));
      got[i].insert(got[i].end(), values.begin(), values.end());
    }
  }
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    Engine alone(tiny(), options());
    const std::vector<float> all = all_logits(alone, texts[i]);
    const std::size_t vocab = 256;
    std::vector<float> want;
    for (std::size_t step = 0; step < 5; ++step) {
      if (i == 2 && step > 0 && step < 4) continue;
      const float* row = all.data() + (lengths[i] - 1 + step) * vocab;
      want.insert(want.end(), row, row + vocab);
    }
    EXPECT_TRUE(same_bits(got[i], want)) << "sequence " << i;
  }
}

TEST_P(EngineBits, ReusedPagesOfPoisonAndAnyOrderChangeNothing) {
  const Tokens tokens = document(kLong);
  Engine fresh(tiny(), options());
  const std::vector<float> want = all_logits(fresh, tokens);
  Engine engine(tiny(), options());
  for (const float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 1e30f}) {
    engine.poison_unused(poison);
    // Interleaved growth scatters the pages; what is left of the others is poisoned again.
    const SequenceId a = engine.create_sequence();
    const SequenceId b = engine.create_sequence();
    for (int i = 0; i < 3; ++i) engine.step({{a, document(50)}, {b, document(70)}});
    engine.remove_sequence(a);
    engine.poison_unused(poison);
    const SequenceId c = engine.create_sequence();
    std::vector<float> got;
    for (std::size_t at = 0; at < tokens.size(); at += 75) {
      const Tokens part(tokens.begin() + static_cast<std::ptrdiff_t>(at),
                        tokens.begin() + static_cast<std::ptrdiff_t>(at + 75));
      const StepResult result = engine.step({{c, part}, {b, {32}}}, LogitRows::kAll);
      got.insert(got.end(), result.logits.begin(), result.logits.end() - 256);
      engine.poison_unused(poison);
    }
    EXPECT_TRUE(same_bits(got, want)) << "poison " << poison;
    engine.remove_sequence(b);
    engine.remove_sequence(c);
    EXPECT_EQ(engine.free_pages(), engine.total_pages());
  }
}

TEST_P(EngineBits, TruncationIsAsIfTheTailHadNeverBeen) {
  const Tokens tokens = document(kLong);
  Engine engine(tiny(), options());
  SequenceId sequence = -1;
  const std::vector<float> want = all_logits(engine, tokens, &sequence);
  for (const std::int64_t keep : {140, 128, 65, 64, 0}) {
    const std::int64_t free = engine.free_pages();
    const std::int64_t pages = (engine.length(sequence) + 63) / 64;
    engine.truncate(sequence, keep);
    EXPECT_EQ(engine.free_pages(), free + pages - (keep + 63) / 64);
    engine.poison_unused(std::numeric_limits<float>::quiet_NaN());
    const Tokens rest(tokens.begin() + keep, tokens.end());
    EXPECT_TRUE(same_bits(engine.step({{sequence, rest}}, LogitRows::kAll).logits,
                          std::span(want).subspan(static_cast<std::size_t>(keep) * 256)))
        << "kept " << keep;
  }
}

EngineOptions small_options(std::int64_t pages) {
  EngineOptions options;
  options.threads = 1;
  options.pages = pages;
  options.max_context = 500;
  return options;
}

TEST(EnginePages, ExhaustionLosesNothing) {
  Engine engine(tiny(), small_options(4));
  const Tokens tokens = document(400);
  const Tokens head(tokens.begin(), tokens.begin() + 130);
  const SequenceId a = engine.create_sequence();
  const SequenceId b = engine.create_sequence();
  engine.step({{a, head}});
  EXPECT_EQ(engine.free_pages(), 1);
  // Needs one page each, one is there: neither grows.
  EXPECT_EQ(kind_of([&] {
              engine.step({{a, document(70)}, {b, document(3)}});
            }),
            ErrorKind::kResourceExhausted);
  EXPECT_EQ(engine.length(a), 130);
  EXPECT_EQ(engine.length(b), 0);
  EXPECT_EQ(engine.free_pages(), 1);
  // What fits still runs, and as if nothing had been refused.
  const std::vector<float> got = engine.step({{a, {tokens[130]}}}).logits;
  Engine other(tiny(), small_options(8));
  const SequenceId c = other.create_sequence();
  other.step({{c, head}});
  EXPECT_TRUE(same_bits(got, other.step({{c, {tokens[130]}}}).logits));
  engine.remove_sequence(a);
  EXPECT_EQ(engine.free_pages(), 4);
  engine.step({{b, document(256)}});
  EXPECT_EQ(engine.free_pages(), 0);
  EXPECT_EQ(kind_of([&] { engine.step({{b, {1}}}); }), ErrorKind::kResourceExhausted);
}

TEST(EngineErrors, BadStepsAreRefusedAndChangeNothing) {
  Engine engine(tiny(), small_options(8));
  const SequenceId a = engine.create_sequence();
  const SequenceId b = engine.create_sequence();
  engine.step({{a, document(10)}});
  const auto refused = [&](const std::vector<StepEntry>& batch) {
    EXPECT_EQ(kind_of([&] { engine.step(batch); }), ErrorKind::kInvalidArgument);
    EXPECT_EQ(engine.length(a), 10);
    EXPECT_EQ(engine.length(b), 0);
    EXPECT_EQ(engine.free_pages(), 7);
  };
  refused({});
  refused({{a, {}}});
  refused({{b, {1}}, {77, {1}}});
  refused({{b, {1}}, {-1, {1}}});
  refused({{a, {1}}, {a, {2}}});
  refused({{b, {1}}, {a, {5, 256}}});
  refused({{b, {1}}, {a, {5, -1}}});
  refused({{b, {1}}, {a, Tokens(491, 32)}});
  EXPECT_EQ(kind_of([&] { engine.truncate(a, 11); }), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind_of([&] { engine.truncate(a, -1); }), ErrorKind::kInvalidArgument);
  engine.remove_sequence(a);
  EXPECT_EQ(kind_of([&] { engine.remove_sequence(a); }), ErrorKind::kInvalidArgument);
  EXPECT_EQ(kind_of([&] { (void)engine.length(a); }), ErrorKind::kInvalidArgument);
  EXPECT_NE(engine.create_sequence(), a);
}

TEST(EngineErrors, BadOptionsAreRefused) {
  const auto refused = [](auto change) {
    EngineOptions options = small_options(8);
    change(options);
    EXPECT_EQ(kind_of([&] { Engine engine(tiny(), options); }), ErrorKind::kInvalidArgument);
  };
  refused([](EngineOptions& o) { o.ranks = 3; });
  refused([](EngineOptions& o) { o.ranks = 0; });
  refused([](EngineOptions& o) { o.ranks = 16; });
  refused([](EngineOptions& o) { o.threads = -1; });
  refused([](EngineOptions& o) { o.pages = -1; });
  refused([](EngineOptions& o) { o.max_rows = 0; });
  refused([](EngineOptions& o) { o.max_context = 8193; });
  refused([](EngineOptions& o) { o.max_context = -5; });
  EngineOptions huge = small_options(std::int64_t{1} << 39);
  EXPECT_EQ(kind_of([&] { Engine engine(tiny(), huge); }), ErrorKind::kResourceExhausted);
}

TEST(EngineErrors, AFailureInOneRankEndsAllAndTheStepCanBeRepeated) {
  for (const int ranks : {1, 4}) {
    EngineOptions options = small_options(8);
    options.ranks = ranks;
    Engine engine(tiny(), options);
    const Tokens tokens = document(kSanitized ? 10 : 90);
    Engine other(tiny(), options);
    const std::vector<float> want = all_logits(other, tokens);
    for (int round = 0; round < (kSanitized ? 1 : 3); ++round) {
      const SequenceId sequence = engine.create_sequence();
      // Rank 0 fails in the middle of layer 1 while the others go on to the next sum.
      engine.set_capture([&](const Capture& capture) {
        if (capture.layer == 1 && capture.stage == "router.choice") {
          throw std::runtime_error("the hook's own error");
        }
      });
      EXPECT_THROW(
          {
            try {
              engine.step({{sequence, tokens}});
            } catch (const std::runtime_error& error) {
              EXPECT_STREQ(error.what(), "the hook's own error");
              throw;
            }
          },
          std::runtime_error);
      EXPECT_EQ(engine.length(sequence), 0);
      EXPECT_EQ(engine.free_pages(), engine.total_pages());
      engine.set_capture({});
      EXPECT_TRUE(same_bits(engine.step({{sequence, tokens}}, LogitRows::kAll).logits, want));
      engine.remove_sequence(sequence);
    }
  }
}

TEST(EngineRankGroup, TheFirstCauseIsThrownAndTheNextRunWorks) {
  engine::RankGroup group(4);
  const auto start = std::chrono::steady_clock::now();
  for (int round = 0; round < 200; ++round) {
    const int failing = round % 4;
    try {
      group.run([&](int rank) {
        if (rank == failing) throw std::out_of_range("rank " + std::to_string(rank));
        group.team(rank)->barrier();
      });
      ADD_FAILURE() << "no error";
    } catch (const std::out_of_range& error) {
      EXPECT_EQ(error.what(), "rank " + std::to_string(failing));
    }
    std::atomic<int> ran{0};
    group.run([&](int rank) {
      group.team(rank)->barrier();
      ++ran;
    });
    EXPECT_EQ(ran.load(), 4);
  }
  // Nobody waited for a deadline (30 s).
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(EngineMemory, IsReported) {
  EngineOptions options = small_options(8);
  options.ranks = 2;
  Engine engine(tiny(), options);
  const EngineMemory memory = engine.memory();
  // 4 layers of 576 floats and 3 index keys of 128, 64 tokens, 2 ranks.
  EXPECT_EQ(memory.page_bytes, 2 * 64 * (4 * 576 + 3 * 128) * 4);
  EXPECT_EQ(memory.cache_bytes, 8 * memory.page_bytes);
  EXPECT_GT(memory.weight_bytes, 22'000'000);
  EXPECT_LT(memory.weight_bytes, 22'500'000);
  EXPECT_GT(memory.scratch_bytes, 0);
  EXPECT_EQ(engine.memory_bytes(), memory.weight_bytes + memory.converted_bytes +
                                       memory.cache_bytes + memory.scratch_bytes);
  EXPECT_EQ(engine.options().max_rows, 256);
  EXPECT_EQ(engine.options().latent_eps, 1e-6);
}

}  // namespace
}  // namespace penstock
