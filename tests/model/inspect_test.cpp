#include "penstock/model/inspect.h"

#include <gtest/gtest.h>

#include <limits>

#include "model/expect_error.h"
#include "model/glm5_config.h"
#include "penstock/core/error.h"

namespace penstock {
namespace {

using testing::expect_error;
using testing::glm52_json;
using testing::glm5_json;

const std::string kTinyGlm = PENSTOCK_TEST_MODELS "/tiny-glm";

ModelConfig glm5() { return parse_config(glm5_json().dump()); }
ModelConfig glm52() { return parse_config(glm52_json().dump()); }

DecodeFloor floor_at(const ModelConfig& config, bool mxfp4, int ranks, std::int64_t rows) {
  WeightFormats formats;
  if (mxfp4) formats.shared_experts = formats.routed_experts = WeightFormat::kMxfp4;
  DecodeShape shape;
  shape.ranks = ranks;
  shape.rows = rows;
  return decode_floor(config, formats, shape);
}

struct TableRow {
  bool mxfp4;
  int ranks;
  double megabytes[4];     // rows 1, 2, 4, 8
  double microseconds[4];  // at 4484 GB/s
};

// The project's table of compulsory bytes of a GLM-5 MoE layer without indexer, worked out by hand
// and apart from this code.
constexpr TableRow kTable[] = {
    {false, 8, {81.7, 119.6, 192.1, 324.4}, {18.2, 26.7, 42.8, 72.3}},
    {false, 4, {142.8, 217.3, 359.5, 618.7}, {31.8, 48.5, 80.2, 138}},
    {false, 2, {265, 412.6, 694.4, 1207}, {59.1, 92.0, 155, 269}},
    {true, 8, {61.8, 82.6, 122.3, 195.1}, {13.8, 18.4, 27.3, 43.5}},
    {true, 4, {103, 143.2, 220, 360.1}, {23.0, 31.9, 49.1, 80.3}},
    {true, 2, {185.3, 264.4, 415.3, 690.3}, {41.3, 59.0, 92.6, 154}},
};

TEST(InspectTest, MoeLayerBytesAgreeWithTheTableWithinOnePercent) {
  const ModelConfig config = glm52();
  ASSERT_FALSE(config.full_indexer[3]);
  for (const TableRow& want : kTable) {
    for (int i = 0; i < 4; ++i) {
      const DecodeFloor floor = floor_at(config, want.mxfp4, want.ranks, 1 << i);
      const double bytes = floor.layers[3].total();
      EXPECT_NEAR(bytes / 1e6, want.megabytes[i], want.megabytes[i] * 0.01)
          << want.mxfp4 << " TP" << want.ranks << " rows " << (1 << i);
      EXPECT_NEAR(floor_us(bytes, 4484), want.microseconds[i], want.microseconds[i] * 0.01);
    }
  }
}

TEST(InspectTest, PartsOfALayerAgreeWithTheTable) {
  const DecodeFloor floor = floor_at(glm52(), false, 8, 1);
  const DecodeBytes& layer = floor.layers[3];
  const auto near = [&](DecodePart part, double megabytes) {
    EXPECT_NEAR(layer[part] / 1e6, megabytes, 0.06) << to_string(part);
  };
  near(DecodePart::kQkvA, 16.1);
  near(DecodePart::kQB, 4.2);
  near(DecodePart::kUkUv, 1.8);
  near(DecodePart::kO, 12.6);
  near(DecodePart::kRouter, 3.1);
  near(DecodePart::kKv, 1.3);
  EXPECT_NEAR((layer[DecodePart::kRoutedExperts] + layer[DecodePart::kSharedExperts]) / 1e6, 42.5,
              0.06);
  EXPECT_NEAR(layer[DecodePart::kRoutedExperts] / layer[DecodePart::kSharedExperts], 8.0, 1e-9);
  EXPECT_EQ(layer[DecodePart::kIndexer], 0.0);
  EXPECT_EQ(layer[DecodePart::kIndexCache], 0.0);
  EXPECT_EQ(layer[DecodePart::kDenseMlp], 0.0);
}

TEST(InspectTest, IndexerCostsItsWeightsAndTheContext) {
  DecodeShape shape;
  shape.ranks = 8;
  shape.rows = 3;
  shape.context = 60000;
  const DecodeFloor floor = decode_floor(glm5(), {}, shape);
  const DecodeBytes& layer = floor.layers[3];
  EXPECT_NEAR(layer[DecodePart::kIndexer] / 1e6, 9.6, 0.05);
  EXPECT_EQ(layer[DecodePart::kIndexCache], 132.0 * 60000 * 3);
  // Below the indexer's top-k every cached row is picked.
  shape.context = 100;
  EXPECT_EQ(decode_floor(glm5(), {}, shape).layers[3][DecodePart::kKv], 656.0 * 100 * 3);
}

TEST(InspectTest, StepIsTheSumOfItsLayersAndEnds) {
  const DecodeFloor floor = floor_at(glm52(), false, 8, 2);
  ASSERT_EQ(floor.layers.size(), 78U);
  double layers = 0.0;
  for (const DecodeBytes& layer : floor.layers) layers += layer.total();
  const double head = 154880.0 * 6144 * 2 / 8;
  EXPECT_NEAR(floor.step.total(), layers + head + 2 * 6144 * 2 + 6144 * 2, 1.0);
  EXPECT_NEAR(floor.step[DecodePart::kLmHead], head, 1e-3);
  EXPECT_NEAR(floor.step[DecodePart::kEmbedding], 2 * 6144 * 2, 1e-3);
  EXPECT_GT(floor.layers[0][DecodePart::kDenseMlp], 28e6);  // 3 x 12288 x 6144 / 8
  EXPECT_EQ(floor.layers[0][DecodePart::kRoutedExperts], 0.0);
}

TEST(InspectTest, ExpectedDistinctExperts) {
  EXPECT_NEAR(expected_distinct_experts(256, 8, 1), 8.0, 1e-9);
  EXPECT_NEAR(expected_distinct_experts(256, 8, 2), 15.75, 1e-9);
  EXPECT_NEAR(expected_distinct_experts(256, 8, 4), 30.5, 0.05);
  EXPECT_NEAR(expected_distinct_experts(256, 8, 8), 57.4, 0.05);
  EXPECT_NEAR(expected_distinct_experts(16, 16, 5), 16.0, 1e-9);
}

TEST(InspectTest, CacheRows) {
  const ModelConfig config = glm52();
  EXPECT_EQ(kv_row_bytes(config, KvFormat::kBf16), 1152);
  EXPECT_EQ(kv_row_bytes(config, KvFormat::kFp8Scaled), 656);
  EXPECT_EQ(kv_row_bytes(config, KvFormat::kFp8Plain), 576);
  EXPECT_EQ(index_row_bytes(config), 132);
  EXPECT_EQ(cache_bytes_per_token(config, KvFormat::kFp8Scaled), 78 * 656 + 21 * 132);
  EXPECT_EQ(cache_bytes_per_token(glm5(), KvFormat::kBf16), 78 * (1152 + 132));
  auto odd = glm5_json();
  odd["kv_lora_rank"] = 500;
  const ModelConfig odd_config = parse_config(odd.dump());
  EXPECT_EQ(kv_row_bytes(odd_config, KvFormat::kBf16), 1128);
  expect_error(ErrorKind::kInvalidArgument, {"kv_lora_rank 500", "128"},
               [&] { kv_row_bytes(odd_config, KvFormat::kFp8Scaled); });
}

TEST(InspectTest, ParametersOfGlm5AreThePublishedOnes) {
  // Published as 744B in all, 40B active.
  const ParameterCount count = count_parameters(glm5());
  EXPECT_NEAR(static_cast<double>(count.total) / 1e9, 744.0, 2.0);
  EXPECT_NEAR(static_cast<double>(count.active) / 1e9, 40.0, 1.0);
}

TEST(InspectTest, SummaryOfTinyGlmAddsUpToItsFiles) {
  const Checkpoint checkpoint(kTinyGlm);
  const CheckpointSummary summary = summarise(checkpoint);
  std::int64_t stored = 0;
  for (const std::string& name : checkpoint.names()) stored += checkpoint.tensor(name).bytes();
  EXPECT_EQ(summary.bytes, stored);
  EXPECT_EQ(summary.bytes, 22434280);  // metadata.total_size of its index
  EXPECT_EQ(summary.mtp_bytes, 0);
  EXPECT_EQ(summary.surplus_bytes, 0);
  EXPECT_NEAR(static_cast<double>(summary.parameters.total) / 1e6, 22.3, 0.05);
  for (const auto* groups : {&summary.by_format, &summary.by_purpose}) {
    std::int64_t bytes = 0;
    std::int64_t parameters = 0;
    for (const StorageGroup& group : *groups) {
      bytes += group.bytes;
      parameters += group.parameters;
    }
    EXPECT_EQ(bytes, summary.bytes);
    EXPECT_EQ(parameters, summary.parameters.total);
  }
  ASSERT_EQ(summary.by_format.size(), 3U);  // BF16, fp8_block, F32 (router bias)
  EXPECT_EQ(summary.by_format[0].name, "BF16");
  EXPECT_EQ(summary.by_format[1].name, "fp8_block");
  EXPECT_EQ(summary.by_format[2].name, "F32");
  EXPECT_EQ(summary.by_format[2].parameters, 3 * 16);
}

TEST(InspectTest, CheckpointAndFormulaAgree) {
  const Checkpoint checkpoint(kTinyGlm);
  DecodeShape shape;
  shape.ranks = 4;
  shape.rows = 2;
  shape.context = 500;
  const DecodeFloor stored = decode_floor(checkpoint, shape);
  const DecodeFloor formula = decode_floor(checkpoint.config(), {}, shape);
  for (int part = 0; part < kDecodeParts; ++part) {
    const auto p = static_cast<DecodePart>(part);
    EXPECT_NEAR(stored.step[p], formula.step[p], 1e-6 * formula.step[p]) << to_string(p);
  }
  EXPECT_EQ(stored.layers[2][DecodePart::kIndexCache], 0.0);
  EXPECT_GT(stored.layers[3][DecodePart::kIndexCache], 0.0);
}

TEST(InspectTest, RefusesShapesThatDoNotDivide) {
  const ModelConfig config = glm5();
  const auto with = [&](int ranks, std::int64_t rows, std::int64_t context) {
    return [&config, ranks, rows, context] {
      DecodeShape shape;
      shape.ranks = ranks;
      shape.rows = rows;
      shape.context = context;
      decode_floor(config, {}, shape);
    };
  };
  expect_error(ErrorKind::kInvalidArgument, {"3 ranks", "num_attention_heads 64"}, with(3, 1, 1));
  expect_error(ErrorKind::kInvalidArgument, {"ranks is 0"}, with(0, 1, 1));
  expect_error(ErrorKind::kInvalidArgument, {"rows is 0"}, with(1, 0, 1));
  expect_error(ErrorKind::kInvalidArgument, {"context is -1"}, with(1, 1, -1));
  expect_error(ErrorKind::kInvalidArgument, {"bandwidth is 0"}, [] { floor_us(1.0, 0.0); });
  expect_error(ErrorKind::kInvalidArgument, {"bandwidth"},
               [] { floor_us(1.0, std::numeric_limits<double>::quiet_NaN()); });
}

}  // namespace
}  // namespace penstock
