#include "penstock/model/checkpoint.h"

#include <gtest/gtest.h>

#include <cmath>

#include "model/expect_error.h"
#include "model/temp_dir.h"
#include "penstock/model/safetensors.h"

namespace penstock {
namespace {

using testing::expect_error;
using testing::TempDir;

const std::string kTinyGlm = PENSTOCK_TEST_MODELS "/tiny-glm";

TEST(CheckpointTest, OpensTinyGlm) {
  const Checkpoint checkpoint(kTinyGlm);
  EXPECT_EQ(checkpoint.config().layers, 4);
  EXPECT_TRUE(checkpoint.surplus().empty());
  EXPECT_EQ(checkpoint.names().size(), 398U);  // 194 + 204, without the two __metadata__
  const Weight down = checkpoint.weight("model.layers.0.mlp.down_proj");
  EXPECT_EQ(down.format, WeightFormat::kFp8Block);
  EXPECT_EQ(down.rows, 256);
  EXPECT_EQ(down.cols, 512);
  EXPECT_TRUE(down.scale.has_shape({2, 4}));
  const Weight head = checkpoint.weight("lm_head");
  EXPECT_EQ(head.format, WeightFormat::kPlain);
  EXPECT_EQ(head.data.dtype, DType::kBF16);
}

TEST(CheckpointTest, NamesATensorThatIsNotThere) {
  const Checkpoint checkpoint(kTinyGlm);
  EXPECT_FALSE(checkpoint.has("model.layers.9.nothing"));
  expect_error(ErrorKind::kInvalidArgument, {"model.layers.9.nothing"},
               [&] { checkpoint.tensor("model.layers.9.nothing"); });
  expect_error(ErrorKind::kInvalidArgument, {"model.layers.9.nothing.weight"},
               [&] { checkpoint.weight("model.layers.9.nothing"); });
}

TEST(CheckpointTest, DequantisesRowsAcrossBlocks) {
  const Checkpoint checkpoint(kTinyGlm);
  const Weight weight = checkpoint.weight("model.layers.0.self_attn.kv_a_proj_with_mqa");
  ASSERT_EQ(weight.rows, 576);  // the last block of rows is partial
  std::vector<float> row(static_cast<std::size_t>(weight.cols));
  for (const std::int64_t r : {std::int64_t{0}, std::int64_t{127}, std::int64_t{128}, 575L}) {
    dequantise_row(weight, r, row.data());
    const float* scale = weight.scale.as<float>() + r / 128 * 2;
    const unsigned char* codes = weight.data.as<unsigned char>() + r * weight.cols;
    for (std::int64_t c = 0; c < weight.cols; ++c) {
      // E4M3 written out: sign, 4 bits of exponent with bias 7, 3 bits of mantissa.
      const int exponent = codes[c] >> 3 & 15;
      const int mantissa = codes[c] & 7;
      const double magnitude =
          exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
      const double want = (codes[c] & 128 ? -magnitude : magnitude) * double{scale[c / 128]};
      ASSERT_EQ(row[static_cast<std::size_t>(c)], static_cast<float>(want)) << r << ", " << c;
    }
  }
  expect_error(ErrorKind::kInvalidArgument, {"row 576"},
               [&] { dequantise_row(weight, 576, row.data()); });
}

}  // namespace
}  // namespace penstock
