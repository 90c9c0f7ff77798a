#include "penstock/model/checkpoint.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "model/expect_error.h"
#include "model/small_model.h"
#include "model/temp_dir.h"
#include "penstock/model/safetensors.h"
#include "penstock/numerics/formats.h"

namespace penstock {
namespace {

using testing::expect_error;
using testing::OwnedTensor;
using testing::SmallModel;
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

// ---- directories --------------------------------------------------------------------------------

void refuses(const std::string& directory, std::initializer_list<std::string_view> words) {
  expect_error(ErrorKind::kInvalidArgument, words, [&] { Checkpoint{directory}; });
}

TEST(CheckpointTest, OpensOneFileOrManyAlike) {
  const SmallModel model;
  const TempDir one;
  const TempDir many;
  model.write(one);
  model.write_sharded(many);
  const Checkpoint single(one.path());
  Checkpoint sharded(many.path());
  const Checkpoint* const both[] = {&single, &sharded};
  EXPECT_EQ(single.directory(), one.path());
  EXPECT_EQ(single.names().size(), model.tensors.size());
  EXPECT_EQ(sharded.names().size(), model.tensors.size());
  for (const auto& [name, want] : model.tensors) {
    for (const Checkpoint* checkpoint : both) {
      const TensorView& view = checkpoint->tensor(name);
      ASSERT_EQ(describe(view), describe(want.view())) << name;
      ASSERT_EQ(std::memcmp(view.data, want.bytes.data(), want.bytes.size()), 0) << name;
    }
  }
  EXPECT_EQ(sharded.names().front().find("model.layers.0."), 0U);  // file by file
  const Checkpoint moved = std::move(sharded);
  EXPECT_TRUE(moved.has("lm_head.weight"));
}

TEST(CheckpointTest, RefusesWhatIsNoCheckpointDirectory) {
  const TempDir dir;
  refuses(dir.file("absent"), {"absent", "not a directory"});
  refuses(dir.write("file", ""), {"not a directory"});
  refuses(dir.path(), {"config.json", "No such file"});
  const SmallModel model;
  dir.write("config.json", model.config.dump());
  refuses(dir.path(), {"neither", "model.safetensors", "model.safetensors.index.json"});
  model.write_sharded(dir);
  model.write(dir);
  refuses(dir.path(), {"model.safetensors", "index.json", "remove one"});
}

TEST(CheckpointTest, RefusesAnIndexThatIsWrong) {
  const SmallModel model;
  const auto with_index = [&](const std::function<void(nlohmann::json&)>& change,
                              std::initializer_list<std::string_view> words) {
    const TempDir dir;
    model.write_sharded(dir, change);
    refuses(dir.path(), words);
  };
  with_index([](auto& index) { index["weight_map"]["lm_head.weight"] = "three.safetensors"; },
             {"three.safetensors", "No such file"});
  with_index([](auto& index) { index["weight_map"]["lm_head.weight"] = "one.safetensors"; },
             {"lm_head.weight", "one.safetensors", "two.safetensors"});
  with_index([](auto& index) { index["weight_map"]["ghost"] = "one.safetensors"; },
             {"ghost (in one.safetensors)"});
  with_index([](auto& index) { index["weight_map"].erase("lm_head.weight"); },
             {"does not list", "lm_head.weight", "two.safetensors"});
  with_index([](auto& index) { index["weight_map"]["lm_head.weight"] = 2; },
             {"lm_head.weight", "must name a file"});
  with_index([](auto& index) { index = nlohmann::json::array(); }, {"weight_map"});
  with_index([](auto& index) { index.erase("weight_map"); }, {"weight_map"});
  for (const char* path : {"../two.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "",
                           "..\\two.safetensors"}) {
    with_index([&](auto& index) { index["weight_map"]["lm_head.weight"] = path; },
               {"lm_head.weight", "file name inside the directory"});
  }
  const TempDir dir;
  model.write_sharded(dir);
  dir.write("model.safetensors.index.json",
            R"({"weight_map":{"a":"one.safetensors","a":"two.safetensors"}})");
  refuses(dir.path(), {"'a'", "twice"});
}

// ---- tensors ------------------------------------------------------------------------------------

TEST(CheckpointTest, EveryTensorIsNeededAndNamedWhenMissing) {
  const SmallModel whole;
  for (const auto& [name, tensor] : whole.tensors) {
    SmallModel model;
    model.tensors.erase(name);
    const TempDir dir;
    model.write(dir);
    refuses(dir.path(), {"missing tensors: " + name});
  }
}

TEST(CheckpointTest, ManyMissingTensorsAreCounted) {
  SmallModel model;
  std::erase_if(model.tensors,
                [](const auto& item) { return item.first.find("experts.") != std::string::npos; });
  const TempDir dir;
  model.write(dir);
  // 2 layers x (4 routed + 1 shared) x 3.
  refuses(dir.path(), {"model.layers.1.mlp.experts.0.gate_proj.weight",
                       "model.layers.1.mlp.experts.3.gate_proj.weight, ... (30 in all)"});
}

TEST(CheckpointTest, EveryWrongShapeIsNamed) {
  const SmallModel whole;
  for (const auto& [name, tensor] : whole.tensors) {
    SmallModel model;
    std::vector<std::int64_t> shape = tensor.shape;
    ++shape.back();
    model.tensors[name] = OwnedTensor(tensor.dtype, shape);
    const TempDir dir;
    model.write(dir);
    refuses(dir.path(), {"wrong tensors: " + name, describe_shape(shape), "expected"});
  }
}

TEST(CheckpointTest, RefusesDtypesThatNothingReads) {
  const auto with = [](const std::string& name, DType dtype,
                       std::initializer_list<std::string_view> words) {
    SmallModel model;
    model.tensors[name] = OwnedTensor(dtype, model.tensors[name].shape);
    const TempDir dir;
    model.write(dir);
    refuses(dir.path(), words);
  };
  with("lm_head.weight", DType::kF16, {"lm_head.weight", "F16"});
  with("model.norm.weight", DType::kI32, {"model.norm.weight", "I32"});
  with("model.layers.1.mlp.gate.e_score_correction_bias", DType::kBF16,
       {"e_score_correction_bias", "only F32"});
  with("model.layers.0.mlp.up_proj.weight", DType::kF64, {"up_proj.weight", "F64"});
}

TEST(CheckpointTest, SurplusTensorsAreNamedAndTheMtpLayerIsNot) {
  SmallModel model;
  model.tensors["model.layers.3.eh_proj.weight"] = OwnedTensor(DType::kBF16, {4, 4});
  model.tensors["model.layers.30.extra"] = OwnedTensor(DType::kF32, {1});
  // Layer 1 shares layer 0's picks: an indexer of its own is not read.
  model.tensors["model.layers.1.self_attn.indexer.wk.weight"] = OwnedTensor(DType::kBF16, {16, 64});
  // A scale beside a weight that has none.
  model.tensors["lm_head.weight_scale_inv"] = OwnedTensor(DType::kF32, {1, 1});
  const TempDir dir;
  model.write(dir);
  const Checkpoint checkpoint(dir.path());
  std::vector<std::string> surplus = checkpoint.surplus();
  std::sort(surplus.begin(), surplus.end());
  EXPECT_EQ(surplus, (std::vector<std::string>{"lm_head.weight_scale_inv",
                                               "model.layers.1.self_attn.indexer.wk.weight",
                                               "model.layers.30.extra"}));
  EXPECT_TRUE(checkpoint.has("model.layers.3.eh_proj.weight"));
  EXPECT_EQ(checkpoint.names().size(), model.tensors.size());
}

// ---- formats ------------------------------------------------------------------------------------

const std::string kUp = "model.layers.0.mlp.up_proj";  // [96, 64]

TEST(CheckpointTest, Fp8PerChannel) {
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{96}, std::vector<std::int64_t>{96, 1}}) {
    SmallModel model;
    model.tensors[kUp + ".weight"] = OwnedTensor(DType::kE4M3, {96, 64});
    OwnedTensor scale(DType::kF32, shape);
    for (std::size_t i = 0; i < 96; ++i) {
      const float value = std::ldexp(1.0F, static_cast<int>(i) - 40);
      std::memcpy(scale.bytes.data() + 4 * i, &value, 4);
    }
    model.tensors[kUp + ".weight_scale"] = scale;
    const TempDir dir;
    model.write(dir);
    const Checkpoint checkpoint(dir.path());
    EXPECT_TRUE(checkpoint.surplus().empty());
    const Weight weight = checkpoint.weight(kUp);
    EXPECT_EQ(weight.format, WeightFormat::kFp8Channel);
    std::vector<float> row(64);
    dequantise_row(weight, 95, row.data());
    const std::vector<std::uint8_t>& codes = model.tensors[kUp + ".weight"].bytes;
    for (std::size_t c = 0; c < 64; ++c) {
      const E4M3 code{codes[95 * 64 + c]};
      EXPECT_EQ(row[c], std::ldexp(code.to_float(), 55)) << c;
    }
  }
}

TEST(CheckpointTest, BlockScalesUnderTheChannelName) {
  SmallModel model;
  model.tensors[kUp + ".weight"] = OwnedTensor(DType::kE4M3, {96, 64});
  model.tensors[kUp + ".weight_scale"] = OwnedTensor(DType::kF32, {1, 1});
  const TempDir dir;
  model.write(dir);
  EXPECT_EQ(Checkpoint(dir.path()).weight(kUp).format, WeightFormat::kFp8Block);
}

TEST(CheckpointTest, RefusesFp8WithoutAFittingScale) {
  const auto with = [](const std::function<void(SmallModel&)>& change,
                       std::initializer_list<std::string_view> words) {
    SmallModel model;
    model.tensors[kUp + ".weight"] = OwnedTensor(DType::kE4M3, {96, 64});
    change(model);
    const TempDir dir;
    model.write(dir);
    refuses(dir.path(), words);
  };
  const auto scale = [](const std::string& suffix, DType dtype, std::vector<std::int64_t> shape) {
    return [=](SmallModel& model) { model.tensors[kUp + suffix] = OwnedTensor(dtype, shape); };
  };
  with([](SmallModel&) {}, {"missing tensors", kUp + ".weight_scale_inv"});
  with(scale(".weight_scale_inv", DType::kF32, {2, 1}), {"weight_scale_inv", "does not fit"});
  with(scale(".weight_scale_inv", DType::kF32, {96}), {"weight_scale_inv", "does not fit"});
  with(scale(".weight_scale_inv", DType::kBF16, {1, 1}), {"weight_scale_inv", "must be F32"});
  with(scale(".weight_scale", DType::kF32, {64}), {"weight_scale", "does not fit"});
  with(
      [&](SmallModel& model) {
        scale(".weight_scale", DType::kF32, {96})(model);
        scale(".weight_scale_inv", DType::kF32, {1, 1})(model);
      },
      {"both present"});
}

TEST(CheckpointTest, RefusesQuantisedTensorsWhereTheOperatorsNeedPlainOnes) {
  for (const std::string name : {"lm_head", "model.embed_tokens", "model.layers.1.mlp.gate",
                                 "model.layers.0.self_attn.indexer.weights_proj"}) {
    SmallModel model;
    model.tensors[name + ".weight"] =
        OwnedTensor(DType::kE4M3, model.tensors[name + ".weight"].shape);
    model.tensors[name + ".weight_scale_inv"] = OwnedTensor(DType::kF32, {1, 1});
    const TempDir dir;
    model.write(dir);
    refuses(dir.path(), {name + ".weight", "fp8_block", "only BF16 and F32"});
  }
}

// Expert 2's down_proj is [64, 32]: one MXFP4 block a row.
const std::string kExpert = "model.layers.2.mlp.experts.2.down_proj";

TEST(CheckpointTest, Mxfp4InEverySpelling) {
  struct Spelling {
    const char* data_suffix;
    DType data;
    std::int64_t cols;
    DType scale;
  };
  for (const Spelling& spelling : {Spelling{".weight_packed", DType::kU8, 16, DType::kU8},
                                   Spelling{".weight_packed", DType::kU8, 16, DType::kE8M0},
                                   Spelling{".weight", DType::kU8, 16, DType::kU8},
                                   Spelling{".weight", DType::kE2M1, 32, DType::kE8M0}}) {
    SmallModel model;
    model.tensors.erase(kExpert + ".weight");
    OwnedTensor data(spelling.data, {64, spelling.cols});
    data.bytes[63 * 16 + 0] = 0xF1;   // 0.5, -6
    data.bytes[63 * 16 + 15] = 0x26;  // 4, 1
    OwnedTensor scale(spelling.scale, {64, 1});
    scale.bytes[63] = 130;  // 2^3
    model.tensors[kExpert + spelling.data_suffix] = data;
    model.tensors[kExpert + ".weight_scale"] = scale;
    const TempDir dir;
    model.write(dir);
    const Checkpoint checkpoint(dir.path());
    EXPECT_TRUE(checkpoint.surplus().empty());
    const Weight weight = checkpoint.weight(kExpert);
    EXPECT_EQ(weight.format, WeightFormat::kMxfp4);
    EXPECT_EQ(describe(weight.data), "[64, 32] F4");
    EXPECT_EQ(describe(weight.scale), "[64, 1] F8_E8M0");
    EXPECT_EQ(weight.rows, 64);
    EXPECT_EQ(weight.cols, 32);
    float row[32];
    dequantise_row(weight, 63, row);
    EXPECT_EQ(row[0], 4.0F);
    EXPECT_EQ(row[1], -48.0F);
    EXPECT_EQ(row[30], 32.0F);
    EXPECT_EQ(row[31], 8.0F);
  }
}

TEST(CheckpointTest, RefusesMxfp4ThatDoesNotFit) {
  const auto with = [](std::vector<std::int64_t> data, std::vector<std::int64_t> scale,
                       DType scale_type, bool keep_plain,
                       std::initializer_list<std::string_view> words) {
    SmallModel model;
    if (!keep_plain) model.tensors.erase(kExpert + ".weight");
    model.tensors[kExpert + ".weight_packed"] = OwnedTensor(DType::kU8, std::move(data));
    if (!scale.empty()) {
      model.tensors[kExpert + ".weight_scale"] = OwnedTensor(scale_type, std::move(scale));
    }
    const TempDir dir;
    model.write(dir);
    refuses(dir.path(), words);
  };
  with({64, 16}, {}, DType::kU8, false, {"missing tensors", kExpert + ".weight_scale"});
  with({64, 16}, {64, 2}, DType::kU8, false, {"weight_scale", "does not fit"});
  with({64, 16}, {64, 1}, DType::kF32, false, {"weight_scale", "F32", "does not fit"});
  with({64, 15}, {64, 1}, DType::kU8, false, {"weight_scale", "does not fit"});
  with({64, 32}, {64, 2}, DType::kU8, false, {kExpert, "[64, 64]", "expected [64, 32]"});
  with({64, 16}, {64, 1}, DType::kU8, true, {"both present"});
}

TEST(CheckpointTest, ExpertsFormatOfTheConfigIsHeldAgainstTheTensors) {
  SmallModel model;
  model.config["experts_format"] = "mxfp4";
  const TempDir dir;
  model.write(dir);
  refuses(dir.path(), {"experts.0.gate_proj.weight", "plain", "experts_format 'mxfp4'"});
}

TEST(CheckpointTest, PlainRowsInBf16AndF32) {
  SmallModel model;
  model.tensors[kUp + ".weight"] = OwnedTensor(DType::kF32, {96, 64});
  const TempDir dir;
  model.write(dir);
  const Checkpoint checkpoint(dir.path());
  float row[64];
  dequantise_row(checkpoint.weight(kUp), 5, row);
  EXPECT_EQ(std::memcmp(row, model.tensors[kUp + ".weight"].bytes.data() + 5 * 256, 256), 0);
  // A norm reads as a matrix of one row.
  const Weight norm = checkpoint.weight("model.norm");
  EXPECT_EQ(norm.rows, 1);
  EXPECT_EQ(norm.cols, 64);
  dequantise_row(norm, 0, row);
  std::uint16_t bits = 0;
  std::memcpy(&bits, model.tensors["model.norm.weight"].bytes.data() + 2 * 9, 2);
  EXPECT_EQ(row[9], Bf16{bits}.to_float());
}

// ---- memory -------------------------------------------------------------------------------------

std::int64_t resident_file_kb() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssFile:")) return std::stoll(line.substr(8));
  }
  return -1;
}

TEST(CheckpointTest, OpeningReadsNoWeightsAndReleaseGivesThemBack) {
  const std::int64_t before = resident_file_kb();
  ASSERT_GT(before, 0);
  const Checkpoint checkpoint(kTinyGlm);
  // 22.5 MB of files: only the headers (and the kernel's read-ahead around them) may be there.
  // Pages of the program itself count as well, and instrumented code has more of them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr std::int64_t kBoundKb = 6144;
#else
  constexpr std::int64_t kBoundKb = 2048;
#endif
  EXPECT_LT(resident_file_kb() - before, kBoundKb);
  double sum = 0.0;
  std::vector<float> row(4096);
  std::int64_t peak = 0;
  for (const std::string& name : checkpoint.names()) {
    if (!name.ends_with("_proj.weight")) continue;
    const Weight weight = checkpoint.weight(name.substr(0, name.rfind('.')));
    for (std::int64_t r = 0; r < weight.rows; ++r) {
      dequantise_row(weight, r, row.data());
      sum += double{row[0]};
    }
    peak = std::max(peak, resident_file_kb() - before);
    checkpoint.release(weight.data);
  }
  EXPECT_TRUE(std::isfinite(sum));
  // The largest matrix has 1.8 MB; pages at tensors' edges stay.
  EXPECT_LT(peak, (8 << 10) + kBoundKb);
}

// Any subset of tensors missing: every one of the first ten is named, and their number is right.
RC_GTEST_PROP(CheckpointProperty, CountsWhatIsMissing, ()) {
  SmallModel model;
  std::vector<std::string> names;
  for (const auto& [name, tensor] : model.tensors) names.push_back(name);
  const auto gone =
      *rc::gen::unique<std::vector<std::size_t>>(rc::gen::inRange<std::size_t>(0, names.size()));
  RC_PRE(!gone.empty());
  for (const std::size_t i : gone) model.tensors.erase(names[i]);
  const TempDir dir;
  model.write(dir);
  try {
    Checkpoint{dir.path()};
    RC_FAIL("opened");
  } catch (const Error& e) {
    const std::string text = e.what();
    std::size_t named = 0;
    for (const std::size_t i : gone) {
      named += text.find(names[i] + ",") != std::string::npos || text.ends_with(names[i]);
    }
    RC_ASSERT(named == std::min<std::size_t>(gone.size(), 10));
    const std::string count = "(" + std::to_string(gone.size()) + " in all)";
    RC_ASSERT((text.find(count) != std::string::npos) == (gone.size() > 10));
  }
}

}  // namespace
}  // namespace penstock
