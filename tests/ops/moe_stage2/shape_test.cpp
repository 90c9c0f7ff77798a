#include "penstock/ops/moe_stage2/shape.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "penstock/core/error.h"
#include "penstock/ops/moe_stage2/heuristics.h"
#include "penstock/ops/moe_stage2/tuning.h"

namespace penstock::moe_stage2 {
namespace {

Shape glm5() {
  Shape s;
  s.ranks = 8;
  s.experts = 256;
  s.top_k = 8;
  s.hidden = 6144;
  s.intermediate = 2048;
  s.max_tokens_per_rank = 8192;
  return s;
}

TEST(Shape, AcceptsTheModelsAndOddRankCounts) {
  EXPECT_EQ(find_fault(glm5()), "");
  Shape s = glm5();
  s.ranks = 7;
  s.experts = 14;
  s.max_tokens_per_rank = 0;
  EXPECT_EQ(find_fault(s), "");
}

TEST(Shape, NamesValueAndRemedy) {
  const auto fault = [](auto change) {
    Shape s = glm5();
    change(s);
    try {
      validate(s);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
      EXPECT_EQ(error.what(), find_fault(s));
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_NE(fault([](Shape& s) { s.ranks = 9; }).find("ranks is 9"), std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.experts = 250; }).find("250 experts"), std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.top_k = 17; }).find("top_k is 17"), std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.experts = 8, s.ranks = 8, s.top_k = 9; }).find("only 8 experts"),
            std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.hidden = 6100; }).find("multiple of 128"), std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.intermediate = 0; }).find("intermediate is 0"),
            std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.row_slack = 0.9; }).find("row_slack is 0.9"), std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.max_tokens_per_rank = -1; }).find("-1"), std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.max_tokens_per_rank = 1 << 26; }).find("split the batch"),
            std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.experts = 16384; }).find("experts a rank"), std::string::npos);
}

TEST(Shape, BoundsAndRowBytes) {
  EXPECT_EQ(wire_row_bytes(6144, WireFormat::kBf16), 12288);
  EXPECT_EQ(wire_row_bytes(6144, WireFormat::kFp8), 6336);
  EXPECT_EQ(wire_row_bytes(128, WireFormat::kFp8), 144);  // 132 rounded up to 16
  Shape s = glm5();
  EXPECT_EQ(reserved_rows(s), 12288);  // 8192 * 8 / 8 * 1.5
  EXPECT_EQ(worst_rows_per_rank(s), 8 * 8192 * 8);
  s.experts = 16;  // two experts a rank: a token has at most two slots there
  EXPECT_EQ(worst_rows_per_pair(s), 2 * 8192);
  s.max_tokens_per_rank = 1;
  s.ranks = 1;
  s.experts = 200;
  EXPECT_EQ(worst_padded_rows_per_rank(s), 8 * 128);  // eight rows pad eight experts, not 200
  s.max_tokens_per_rank = 0;
  EXPECT_EQ(reserved_rows(s), 1);
}

TEST(Heuristics, ChunksAimAtTheBytesOfOnePeer) {
  Shape shape;
  shape.experts = 256;
  shape.top_k = 8;
  shape.hidden = 6144;
  shape.intermediate = 2048;
  shape.max_tokens_per_rank = 4096;
  for (const WireFormat wire : {WireFormat::kFp8, WireFormat::kBf16}) {
    shape.wire = wire;
    for (const int ranks : {1, 2, 4, 8}) {
      shape.ranks = ranks;
      const std::int32_t tiles = choose_tiles_per_chunk(shape);
      const double peer = static_cast<double>(wire_row_bytes(6144, wire)) * kTileRows / ranks;
      EXPECT_GE(tiles * peer, kChunkBytes) << ranks;
      EXPECT_LT((tiles - 1) * peer, kChunkBytes) << ranks;
    }
  }
  shape.hidden = 128;
  EXPECT_EQ(choose_tiles_per_chunk(shape), 64);
}

TEST(Heuristics, SmallBatchesAreStoredDirectly) {
  Shape shape;
  shape.max_tokens_per_rank = kCopyEngineFromTokens - 1;
  EXPECT_EQ(choose_transport(shape), TransportKind::kDirect);
  shape.max_tokens_per_rank = kCopyEngineFromTokens;
  EXPECT_EQ(choose_transport(shape), TransportKind::kCopyEngine);
}

TEST(Heuristics, RanksThatShareAGpuStoreDirectlyUnlessTuned) {
  const std::string folder = testing::TempDir() + "penstock_auto";
  ASSERT_EQ(setenv("XDG_CONFIG_HOME", folder.c_str(), 1), 0);
  Shape shape;
  shape.ranks = 2;
  shape.hidden = 384;
  shape.max_tokens_per_rank = kCopyEngineFromTokens;
  EXPECT_EQ(choose_transport("some GPU", shape, false), TransportKind::kCopyEngine);
  EXPECT_EQ(choose_transport("some GPU", shape, true), TransportKind::kDirect);
  store_crossover({"some GPU", 2, 384, shape.wire, {{1, TransportKind::kSm}}});
  EXPECT_EQ(choose_transport("some GPU", shape, true), TransportKind::kSm);
  std::filesystem::remove_all(folder);
  ASSERT_EQ(unsetenv("XDG_CONFIG_HOME"), 0);
}

TEST(Heuristics, CopyCtasCarryTheRowsOfTheGemm) {
  Shape shape;  // GLM-5
  shape.hidden = 6144;
  shape.intermediate = 2048;
  shape.ranks = 1;
  EXPECT_EQ(choose_copy_ctas(shape), 0);
  shape.wire = WireFormat::kFp8;
  shape.ranks = 8;  // 24 ns a row, 7/8 of 6336 bytes: 231 GB/s, 5.1 CTAs
  EXPECT_EQ(choose_copy_ctas(shape), 6);
  shape.ranks = 2;  // 132 GB/s, 2.9
  EXPECT_EQ(choose_copy_ctas(shape), 4);
  shape.wire = WireFormat::kBf16;
  shape.ranks = 8;  // 449 GB/s, 10.0 or a little less
  EXPECT_EQ(choose_copy_ctas(shape), 10);
  shape.intermediate = 128;
  EXPECT_EQ(choose_copy_ctas(shape), kMostCopyCtas);
}

}  // namespace
}  // namespace penstock::moe_stage2
