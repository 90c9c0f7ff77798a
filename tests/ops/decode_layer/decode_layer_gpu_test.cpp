// decode_layer on a GPU against the reference: every stage fed with the kernel's own inputs, read
// back from its mailboxes; the layer as a whole. Ranks are virtual: all on one GPU.
#include "fabric/cuda/driver.h"
#include "ops/decode_layer/gpu_rig.h"

namespace penstock::decode::test {
namespace {

// Sizes that every number of ranks can share.
DecodeShape group_shape(int ranks) {
  DecodeShape s = tiny_shape();
  s.intermediate = 512;
  s.ranks = ranks;
  return s;
}

DecodeShape glm5_shard(int rows) {
  DecodeShape s;
  s.rows = rows;
  s.ranks = 8;
  s.rank = 3;
  s.experts = 32;  // geometry of GLM-5; fewer experts keep the test's memory and time down
  return s;
}

std::vector<int> pick_counts(int rows) {
  const std::vector<int> all = {2048, 1,    64, 65, 2000, 33, 1024, 500,
                                2,    2047, 96, 63, 128,  -1, 1,    777};
  return {all.begin(), all.begin() + rows};
}

const char* name_of(KvFormat format) {
  return format == KvFormat::kBf16 ? "bf16" : format == KvFormat::kFp8Scaled ? "656 B" : "576 B";
}

TEST(DecodeLayerGpu, KernelResources) {
  for (const int rows : {1, 2, 4, 8}) {
    KernelResources r{};
    ASSERT_EQ(decode_kernel_resources(rows, &r), 0);
    fmt::print("rows {}: {} registers, {} B local\n", rows, r.registers, r.local_bytes);
    // Stack: spills go to L2, because shared memory leaves 29 KB of L1 (docs/decode-layer.md).
    EXPECT_LE(r.local_bytes, rows == 4 ? 552 : 352);
  }
}

class DecodeLayerGroup : public testing::TestWithParam<std::tuple<int, KvFormat>> {};
INSTANTIATE_TEST_SUITE_P(RanksAndFormats, DecodeLayerGroup,
                         testing::Combine(testing::Values(1, 2, 4, 8),
                                          testing::Values(KvFormat::kBf16, KvFormat::kFp8Scaled,
                                                          KvFormat::kFp8)));

// Cache rows of 656 bytes: all row counts; the other formats: some of them. Row 14 is padding;
// picks from 1 to 2048; a correction bias between 33.9 and 34.1.
TEST_P(DecodeLayerGroup, StagesMatchTheReferenceForEveryRowCount) {
  const auto [ranks, format] = GetParam();
  DecodeShape s = group_shape(ranks);
  s.rows = kMaxRows;
  s.kv_format = format;
  const RandomLayer layer(s, 21);
  const RandomCache cache(format, 64, 77);
  Group group(s, layer, cache);
  Comparison all;
  for (int rows = 1; rows <= kMaxRows; ++rows) {
    if (format != KvFormat::kFp8Scaled && rows != 1 && rows != 3 && rows != 8 && rows != 16)
      continue;
    DecodeShape now = s;
    now.rows = rows;
    const RandomStep step(now, cache.slots(), pick_counts(rows),
                          100U + static_cast<unsigned>(rows));
    compare(all, group, step, rows, fmt::format("{} ranks, {} rows", ranks, rows));
  }
  expect_close(all, fmt::format("{} ranks, kv {}, 1 to 16 rows", ranks, name_of(format)));
}

// Sequences of 1 to 200,000 tokens whose pages lie anywhere in a cache that spans more than 4 GB:
// pages a layer stack apart, as caches of whole models have them.
TEST_P(DecodeLayerGroup, LongContextsOverScatteredPages) {
  const auto [ranks, format] = GetParam();
  if (ranks != 1 && ranks != 8) GTEST_SKIP() << "the fewest and the most ranks are enough here";
  DecodeShape s = group_shape(ranks);
  s.rows = 8;
  s.kv_format = format;
  const RandomLayer layer(s, 31);
  const RandomCache cache(format, 3700, 78, 61);
  const std::int64_t stride = ranks == 1 ? 1 << 21 : cache.page_bytes();
  Group group(s, layer, cache, 1, {}, stride);
  const std::vector<int> contexts = {200'000, 1, 64, 65, 2049, 2048, 30'001, 127};
  const RandomStep step = RandomStep::paged(s, cache.pages(), contexts, 32);
  Comparison all;
  compare(all, group, step, 8, fmt::format("{} ranks, long contexts", ranks));
  expect_close(all, fmt::format("{} ranks, kv {}, contexts 1 to 200,000", ranks, name_of(format)));
}

class DecodeLayerRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DecodeLayerRanks, testing::Values(1, 2, 4, 8));

// Wider than the other tests' shape: several units a matrix, 64 experts, top 8.
TEST_P(DecodeLayerRanks, WiderLayersMatchTheReference) {
  const int ranks = GetParam();
  DecodeShape s;
  s.hidden = 1024;
  s.q_lora = 512;
  s.heads = 16;
  s.experts = 64;
  s.intermediate = 1024;
  s.ranks = ranks;
  s.rows = 8;
  const RandomLayer layer(s, 33, 3);
  const RandomCache cache(s.kv_format, 64, 79);
  Group group(s, layer, cache);
  Comparison all;
  for (const int rows : {1, 3, 8}) {
    DecodeShape now = s;
    now.rows = rows;
    const RandomStep step(now, cache.slots(), pick_counts(rows),
                          210U + static_cast<unsigned>(rows));
    compare(all, group, step, rows, fmt::format("{} ranks, {} rows", ranks, rows));
  }
  expect_close(all, fmt::format("{} ranks, hidden 1024", ranks));
}

// Exact ties go to the lower index, whatever CTA, rank or launch asks.
TEST_P(DecodeLayerRanks, RouterTiesGoToTheLowerIndex) {
  const int ranks = GetParam();
  DecodeShape s = group_shape(ranks);
  s.rows = 8;
  s.top_k = 5;  // odd: one pair is cut
  for (const bool all_tied : {false, true}) {
    RandomLayer layer(s, 34);
    if (all_tied) {
      layer.tie_all();
    } else {
      layer.tie_pairs();
    }
    const RandomCache cache(s.kv_format, 16, 80);
    Group group(s, layer, cache);
    Comparison all;
    const RandomStep step(s, cache.slots(), {40, 1, 64, 65, 3, 33, 90, 128}, 35);
    compare(all, group, step, 8, "ties");
    expect_close(all, fmt::format("{} ranks, {} tied", ranks, all_tied ? "all" : "pairs"));
    // The mid rows above were compared in the order of the choice; here the choice itself.
    const StageValues v = read_stages(group[0].op, group[0].shape, 8, 0);
    const ReferenceStages ref(group[0].shape, layer.tensors);
    for (std::size_t i = 0; i < 8; ++i) {
      const auto scores = row_of(v.scores, i, 16);
      const std::vector<int> chosen = ref.route(scores).experts;
      for (std::size_t e = 0; e < 16; e += 2) {
        EXPECT_EQ(scores[e], scores[e + 1]) << "row " << i << ": not a tie";
      }
      if (all_tied) {
        EXPECT_EQ(chosen, (std::vector<int>{0, 1, 2, 3, 4})) << "row " << i;
      } else {
        EXPECT_EQ(chosen[4] % 2, 0) << "row " << i;
      }
    }
  }
}

// Few and small launches: what compute-sanitizer runs (tools/gpu_sanitize.sh).
TEST(DecodeLayerGpu, OneLaunchOfEveryKernelAndFormat) {
  for (const int ranks : {1, 2}) {
    for (const KvFormat format : {KvFormat::kBf16, KvFormat::kFp8Scaled, KvFormat::kFp8}) {
      DecodeShape s = group_shape(ranks);
      s.rows = 8;
      s.kv_format = format;
      const RandomLayer layer(s, 36);
      const RandomCache cache(format, 16, 81);
      Group group(s, layer, cache);
      Comparison all;
      for (const int rows : {1, 2, 4, 8}) {
        if (rows != 1 && format != KvFormat::kFp8Scaled) continue;
        DecodeShape now = s;
        now.rows = rows;
        const std::vector<int> counts = {65, -1, 1, 64, 3, 33, 200, 90};
        const RandomStep step(now, cache.slots(), {counts.begin(), counts.begin() + rows}, 37);
        compare(all, group, step, rows, "small");
      }
      expect_close(all, fmt::format("{} ranks, kv {}, small", ranks, name_of(format)));
    }
  }
}

TEST(DecodeLayerGpu, Glm5ShardStagesMatchTheReference) {
  DecodeShape s = glm5_shard(8);
  const RandomLayer layer(s, 22, 3);
  const RandomCache cache(s.kv_format, 64, 77);
  DecodeOptions options;
  options.self_loop = true;
  Group group(s, layer, cache, 1, options);
  for (const int rows : {1, 2, 4, 8}) {
    DecodeShape now = s;
    now.rows = rows;
    const RandomStep step(now, cache.slots(), pick_counts(rows),
                          200U + static_cast<unsigned>(rows));
    Comparison c;
    compare(c, group, step, rows, fmt::format("glm5 tp8 rows {}", rows));
    expect_close(c, fmt::format("glm5 tp8 rows {}", rows));
  }
}

TEST(DecodeLayerGpu, DenseLayersMatchTheReference) {
  for (const int width : {512, 1536}) {  // 1 and 5 slices beside the first
    DecodeShape s = dense_shape(tiny_shape(), width);
    s.rows = 8;
    const RandomLayer layer(s, 28);
    const RandomCache cache(s.kv_format, 64, 77);
    Group group(s, layer, cache);
    Comparison all;
    for (const int rows : {1, 2, 8}) {
      DecodeShape now = s;
      now.rows = rows;
      const RandomStep step(now, cache.slots(), pick_counts(rows),
                            500U + static_cast<unsigned>(rows));
      compare(all, group, step, rows, fmt::format("dense {}, {} rows", width, rows));
    }
    expect_close(all, fmt::format("dense {}", width));
  }
}

}  // namespace
}  // namespace penstock::decode::test

int main(int argc, char** argv) {
  // Kernels of ranks that wait for each other need hardware queues of their own.
  penstock::cuda::prepare_process();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
