#include "penstock/model/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "model/expect_error.h"
#include "model/temp_dir.h"
#include "penstock/core/error.h"
#include "penstock/model/safetensors.h"
#include "penstock/numerics/formats.h"

namespace penstock {
namespace {

using testing::expect_error;
using testing::read_file;
using testing::TempDir;

const std::string kTinyGlm = PENSTOCK_TEST_MODELS "/tiny-glm";
const std::string kExpert = "model.layers.2.mlp.experts.7.down_proj";

ConvertOptions to(ExpertsFormat format) {
  ConvertOptions options;
  options.experts = format;
  options.max_shard_bytes = 4 << 20;
  return options;
}

std::vector<float> values(const Weight& weight) {
  std::vector<float> out(static_cast<std::size_t>(weight.rows * weight.cols));
  for (std::int64_t r = 0; r < weight.rows; ++r) {
    dequantise_row(weight, r, out.data() + r * weight.cols);
  }
  return out;
}

TEST(ConvertTest, WritesACheckpointWithMxfp4Experts) {
  const Checkpoint source(kTinyGlm);
  const TempDir dir;
  const std::string out = dir.file("out");
  ConvertOptions options = to(ExpertsFormat::kMxfp4);
  std::int64_t last = 0;
  int calls = 0;
  options.progress = [&](std::int64_t done, std::int64_t total) {
    EXPECT_GT(done, last);
    EXPECT_LE(done, total);
    last = done;
    ++calls;
  };
  const ConvertReport report = convert_experts(source, out, options);
  const Checkpoint converted(out);
  EXPECT_EQ(converted.config().experts_format, "mxfp4");
  EXPECT_TRUE(converted.config().unknown_keys.empty());
  EXPECT_TRUE(converted.surplus().empty());
  EXPECT_EQ(last, report.bytes_after);
  EXPECT_EQ(calls, static_cast<int>(report.files.size()));
  EXPECT_GT(report.files.size(), 1U);

  const Weight weight = converted.weight(kExpert);
  EXPECT_EQ(weight.format, WeightFormat::kMxfp4);
  EXPECT_EQ(weight.rows, 256);
  EXPECT_EQ(weight.cols, 256);
  EXPECT_TRUE(weight.scale.has_shape({256, 8}));
  EXPECT_EQ(converted.tensor(kExpert + ".weight_packed").dtype, DType::kU8);
  EXPECT_FALSE(converted.has(kExpert + ".weight"));
  EXPECT_FALSE(converted.has(kExpert + ".weight_scale_inv"));

  // 3 layers x 16 experts x 3 matrices of 256 x 256: E4M3 + 4 scales -> 4.25 bits an element.
  const std::int64_t matrices = 3 * 16 * 3;
  EXPECT_EQ(report.bytes_before - report.bytes_after,
            matrices * (65536 + 16 - 65536 / 2 - 65536 / 32));
  std::int64_t stored = 0;
  for (const std::string& name : converted.names()) stored += converted.tensor(name).bytes();
  EXPECT_EQ(stored, report.bytes_after);

  // Everything else is copied byte for byte.
  std::size_t copied = 0;
  for (const std::string& name : source.names()) {
    if (name.find(".experts.") != std::string::npos) continue;
    const TensorView& a = source.tensor(name);
    const TensorView& b = converted.tensor(name);
    ASSERT_EQ(a.dtype, b.dtype) << name;
    ASSERT_EQ(a.shape, b.shape) << name;
    ASSERT_EQ(std::memcmp(a.data, b.data, static_cast<std::size_t>(a.bytes())), 0) << name;
    ++copied;
  }
  EXPECT_EQ(copied, source.names().size() - static_cast<std::size_t>(2 * matrices));
}

TEST(ConvertTest, Mxfp4ValuesFollowTheFloorRuleAndTheReportCountsTheLoss) {
  const Checkpoint source(kTinyGlm);
  const TempDir dir;
  const ConvertReport report = convert_experts(source, dir.file("out"), to(ExpertsFormat::kMxfp4));
  const Checkpoint converted(dir.file("out"));
  ASSERT_EQ(report.quality.size(), 3U);
  for (const ConvertQuality& quality : report.quality) {
    // An independent count over all matrices of the class, with the rule written out again.
    const std::string suffix = quality.name.substr(quality.name.find('.') + 1);
    double error = 0.0;
    double norm = 0.0;
    std::int64_t saturated = 0;
    std::int64_t elements = 0;
    for (int layer = 1; layer < 4; ++layer) {
      for (int e = 0; e < 16; ++e) {
        const std::string name = "model.layers." + std::to_string(layer) + ".mlp.experts." +
                                 std::to_string(e) + "." + suffix;
        const std::vector<float> old = values(source.weight(name));
        const std::vector<float> fresh = values(converted.weight(name));
        for (std::size_t block = 0; block < old.size(); block += 32) {
          double amax = 0.0;
          for (std::size_t i = block; i < block + 32; ++i) {
            amax = std::max(amax, std::abs(double{old[i]}));
          }
          const double scale = amax > 0.0 ? std::exp2(std::floor(std::log2(amax)) - 2) : 0.0;
          for (std::size_t i = block; i < block + 32; ++i) {
            const double x = std::abs(double{old[i]});
            saturated += x > 6 * scale;
            // Nearest grid point, or the end of the grid.
            double best = 1e30;
            for (const double code : {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}) {
              best = std::min(best, std::abs(x - code * scale));
            }
            ASSERT_NEAR(std::abs(double{fresh[i]} - old[i]), best, 1e-12) << name << " " << i;
            error += best * best;
            norm += x * x;
          }
        }
        elements += static_cast<std::int64_t>(old.size());
      }
    }
    EXPECT_EQ(quality.tensors, 48);
    EXPECT_EQ(quality.elements, elements);
    EXPECT_EQ(quality.saturated, saturated);
    EXPECT_GT(quality.saturated, 0);
    EXPECT_NEAR(quality.relative_l2, std::sqrt(error / norm), 1e-9);
    EXPECT_NEAR(quality.snr_db, 10 * std::log10(norm / error), 1e-6);
    EXPECT_GT(quality.relative_l2, 0.05);  // four bits lose something
    EXPECT_LT(quality.relative_l2, 0.20);
  }
}

TEST(ConvertTest, GoesBackToFp8Blocks) {
  const TempDir dir;
  convert_experts(Checkpoint(kTinyGlm), dir.file("mxfp4"), to(ExpertsFormat::kMxfp4));
  const Checkpoint mxfp4(dir.file("mxfp4"));
  const ConvertReport report = convert_experts(mxfp4, dir.file("fp8"), to(ExpertsFormat::kFp8));
  const Checkpoint fp8(dir.file("fp8"));
  EXPECT_EQ(fp8.config().experts_format, "fp8");
  const Weight weight = fp8.weight(kExpert);
  EXPECT_EQ(weight.format, WeightFormat::kFp8Block);
  EXPECT_TRUE(weight.scale.has_shape({2, 2}));
  EXPECT_FALSE(fp8.has(kExpert + ".weight_packed"));
  EXPECT_EQ(report.bytes_after, 22434280);  // the size of the checkpoint that it came from
  for (const ConvertQuality& quality : report.quality) {
    EXPECT_EQ(quality.saturated, 0) << quality.name;
    EXPECT_LT(quality.relative_l2, 0.04) << quality.name;  // E4M3 rounds by at most 1/16
  }
}

TEST(ConvertTest, OutputDoesNotDependOnThreads) {
  const Checkpoint source(kTinyGlm);
  const TempDir dir;
  ConvertOptions options = to(ExpertsFormat::kMxfp4);
  options.threads = 1;
  const ConvertReport one = convert_experts(source, dir.file("one"), options);
  options.threads = 3;
  const ConvertReport three = convert_experts(source, dir.file("three"), options);
  for (const std::string& file : one.files) {
    EXPECT_EQ(read_file(dir.file("one") + "/" + file), read_file(dir.file("three") + "/" + file));
  }
  for (std::size_t i = 0; i < one.quality.size(); ++i) {
    EXPECT_EQ(one.quality[i].relative_l2, three.quality[i].relative_l2);
  }
}

TEST(ConvertTest, ConvertedFilesCanBeMapped) {
  const TempDir dir;
  const ConvertReport report =
      convert_experts(Checkpoint(kTinyGlm), dir.file("out"), to(ExpertsFormat::kMxfp4));
  for (const std::string& file : report.files) {
    EXPECT_TRUE(SafetensorsFile(dir.file("out") + "/" + file).is_mapped()) << file;
  }
}

TEST(ConvertTest, RefusesAFormatThatIsThereAlready) {
  const TempDir dir;
  expect_error(ErrorKind::kInvalidArgument, {"fp8 already"}, [&] {
    convert_experts(Checkpoint(kTinyGlm), dir.file("out"), to(ExpertsFormat::kFp8));
  });
  EXPECT_FALSE(std::filesystem::exists(dir.file("out")));
}

TEST(ConvertTest, RefusesATargetThatHoldsSomething) {
  const Checkpoint source(kTinyGlm);
  const TempDir dir;
  dir.write("letter.txt", "keep me");
  expect_error(ErrorKind::kInvalidArgument, {dir.path(), "not empty"},
               [&] { convert_experts(source, dir.path(), to(ExpertsFormat::kMxfp4)); });
  EXPECT_EQ(dir.entries(), 1U);
  expect_error(ErrorKind::kInvalidArgument, {"letter.txt", "no directory"},
               [&] { convert_experts(source, dir.file("letter.txt"), to(ExpertsFormat::kMxfp4)); });
  EXPECT_EQ(read_file(dir.file("letter.txt")), "keep me");
  expect_error(ErrorKind::kBackend, {"missing/out"}, [&] {
    convert_experts(source, dir.file("missing/out"), to(ExpertsFormat::kMxfp4));
  });
}

TEST(ConvertTest, LeavesNothingBehindWhereAWeightIsNan) {
  const TempDir dir;
  std::filesystem::copy(kTinyGlm, dir.file("broken"));
  // One NaN code in layer 3: shards before it are written by then.
  const std::string shard = dir.file("broken/model-00002-of-00002.safetensors");
  std::string bytes = read_file(shard);
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof header);
  {
    const SafetensorsFile file(shard);
    const auto* first = file.tensors().front().view.as<char>();
    const auto* victim = file.at("model.layers.3.mlp.experts.0.up_proj.weight").as<char>();
    bytes[8 + header + static_cast<std::size_t>(victim - first)] = 0x7f;
  }
  std::filesystem::permissions(shard, std::filesystem::perms::owner_all);
  dir.write("broken/model-00002-of-00002.safetensors", bytes);
  const Checkpoint broken(dir.file("broken"));
  expect_error(ErrorKind::kInvalidArgument, {"model.layers.3.mlp.experts.0.up_proj", "NaN"},
               [&] { convert_experts(broken, dir.file("out"), to(ExpertsFormat::kMxfp4)); });
  EXPECT_FALSE(std::filesystem::exists(dir.file("out")));
}

TEST(ConvertTest, RefusesBadOptions) {
  const Checkpoint source(kTinyGlm);
  const TempDir dir;
  ConvertOptions options = to(ExpertsFormat::kMxfp4);
  options.threads = -1;
  expect_error(ErrorKind::kInvalidArgument, {"threads is -1"},
               [&] { convert_experts(source, dir.file("out"), options); });
  options.threads = 1;
  options.max_shard_bytes = 0;
  expect_error(ErrorKind::kInvalidArgument, {"max_shard_bytes is 0"},
               [&] { convert_experts(source, dir.file("out"), options); });
  expect_error(ErrorKind::kInvalidArgument, {"'int4'", "mxfp4", "fp8"},
               [] { parse_experts_format("int4"); });
  EXPECT_EQ(parse_experts_format("fp8"), ExpertsFormat::kFp8);
}

}  // namespace
}  // namespace penstock
