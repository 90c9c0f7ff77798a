#include "penstock/model/checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "model/json_text.h"
#include "model/tensor_list.h"
#include "penstock/core/error.h"
#include "penstock/model/safetensors.h"
#include "penstock/numerics/block.h"
#include "penstock/numerics/formats.h"

namespace penstock {
namespace {

using model::printable;
using model::TensorClass;
using model::TensorSpec;
using nlohmann::json;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
// GLM-5.2-FP8's index of 118,629 tensors has about 12 MB.
constexpr std::size_t kMaxIndexBytes = std::size_t{256} << 20;
constexpr std::size_t kNamedProblems = 10;

[[noreturn]] void invalid(const std::string& text) {
  throw_error(ErrorKind::kInvalidArgument, text);
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// What kept a weight from being resolved: a tensor that is not there, or one that is wrong.
struct Problem {
  bool missing = false;
  std::string text;
};

// The first ten of a list, and how many there are.
std::string first_of(const std::vector<std::string>& all) {
  const std::size_t shown = std::min(all.size(), kNamedProblems);
  std::string text = fmt::format("{}", fmt::join(all.begin(), all.begin() + shown, ", "));
  if (shown < all.size()) text += fmt::format(", ... ({} in all)", all.size());
  return text;
}

}  // namespace

std::string_view to_string(WeightFormat format) {
  switch (format) {
    case WeightFormat::kPlain:
      return "plain";
    case WeightFormat::kFp8Block:
      return "fp8_block";
    case WeightFormat::kFp8Channel:
      return "fp8_channel";
    case WeightFormat::kMxfp4:
      return "mxfp4";
  }
  return "unknown";
}

struct Checkpoint::State {
  ModelConfig config;
  std::string directory;
  std::vector<SafetensorsFile> files;
  // Keys point into the files' own name strings.
  std::unordered_map<std::string_view, const TensorView*> by_name;
  std::vector<std::string> surplus;

  const TensorView* find(std::string_view name) const {
    const auto it = by_name.find(name);
    return it == by_name.end() ? nullptr : it->second;
  }
  void open_single();
  void open_sharded();
  void add_file(const std::string& name);
  std::optional<Problem> resolve(std::string_view name, Weight& out,
                                 std::vector<std::string>* used) const;
  std::optional<Problem> resolve_e4m3(const std::string& name, Weight& out,
                                      std::vector<std::string>* used) const;
  std::optional<Problem> resolve_mxfp4(const std::string& name, const std::string& data_name,
                                       Weight& out, std::vector<std::string>* used) const;
  std::optional<Problem> check(const TensorSpec& spec, std::vector<std::string>* used) const;
  void validate();
};

void Checkpoint::State::add_file(const std::string& name) {
  files.emplace_back(directory + "/" + name);
}

void Checkpoint::State::open_single() {
  add_file(kSingleFile);
  for (const NamedTensor& t : files.back().tensors()) by_name.emplace(t.name, &t.view);
}

void Checkpoint::State::open_sharded() {
  const std::string path = directory + "/" + kIndexFile;
  const json index = model::parse_json(model::read_text_file(path, kMaxIndexBytes), path);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    invalid(fmt::format("{}: the object 'weight_map' is missing", path));
  }
  // Files in the order of their names, so that names() does not depend on the index's order.
  std::map<std::string, std::size_t> listed;
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    if (!file.is_string()) {
      invalid(fmt::format("{}: '{}' must name a file, not {}", path, printable(tensor),
                          model::kind_of(file)));
    }
    const auto& name = file.get_ref<const std::string&>();
    // Only plain names: an index must not reach outside of its directory.
    if (name.empty() || name == "." || name == ".." ||
        name.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
      invalid(
          fmt::format("{}: '{}' points to '{}'; only a file name inside the directory is "
                      "accepted",
                      path, printable(tensor), printable(name)));
    }
    ++listed[name];
  }
  files.reserve(listed.size());
  for (const auto& [name, count] : listed) {
    add_file(name);
    const SafetensorsFile& file = files.back();
    for (const NamedTensor& t : file.tensors()) {
      const auto it = index["weight_map"].find(t.name);
      if (it == index["weight_map"].end()) {
        invalid(fmt::format("{}: does not list tensor '{}', which {} holds; rebuild the index",
                            path, printable(t.name), name));
      }
      if (*it != name) {
        invalid(
            fmt::format("{}: places tensor '{}' in {}, but {} holds one of that name too; "
                        "remove one of them",
                        path, printable(t.name), printable(it->get<std::string>()), name));
      }
      by_name.emplace(t.name, &t.view);
    }
  }
  std::vector<std::string> absent;
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    if (!by_name.contains(tensor)) {
      absent.push_back(fmt::format("{} (in {})", printable(tensor),
                                   printable(file.get_ref<const std::string&>())));
    }
  }
  if (!absent.empty()) {
    invalid(
        fmt::format("{}: lists tensors that their files do not hold: {}", path, first_of(absent)));
  }
}

// ---- storage formats ---------------------------------------------------------------------------

// NAME.weight (or NAME.weight_packed) and the scale beside it. `used` collects the names taken.
std::optional<Problem> Checkpoint::State::resolve(std::string_view prefix, Weight& out,
                                                  std::vector<std::string>* used) const {
  const std::string name(prefix);
  const std::string plain = name + ".weight";
  const std::string packed = name + ".weight_packed";
  const TensorView* view = find(plain);
  if (find(packed) != nullptr) {
    if (view != nullptr) {
      return Problem{false, fmt::format("{} and {} are both present", plain, packed)};
    }
    return resolve_mxfp4(name, packed, out, used);
  }
  if (view == nullptr) return Problem{true, plain};
  if (view->dtype == DType::kE2M1 || view->dtype == DType::kU8) {
    return resolve_mxfp4(name, plain, out, used);
  }
  if (view->dtype == DType::kE4M3) return resolve_e4m3(name, out, used);
  if (view->dtype != DType::kBF16 && view->dtype != DType::kF32) {
    return Problem{false, fmt::format("{} is {}; BF16, F32, F8_E4M3 and F4 are supported", plain,
                                      describe(*view))};
  }
  if (view->rank != 1 && view->rank != 2) {
    return Problem{false, fmt::format("{} is {}, not a matrix", plain, describe(*view))};
  }
  out = Weight{};
  out.data = *view;
  out.rows = view->rank == 2 ? view->dim(0) : 1;
  out.cols = view->dim(view->rank - 1);
  if (used != nullptr) used->push_back(plain);
  return std::nullopt;
}

std::optional<Problem> Checkpoint::State::resolve_e4m3(const std::string& name, Weight& out,
                                                       std::vector<std::string>* used) const {
  const std::string plain = name + ".weight";
  const TensorView& view = *find(plain);
  if (view.rank != 2) {
    return Problem{false, fmt::format("{} is {}, not a matrix", plain, describe(view))};
  }
  out = Weight{};
  out.data = view;
  out.rows = view.dim(0);
  out.cols = view.dim(1);
  const std::string block = name + ".weight_scale_inv";
  const std::string channel = name + ".weight_scale";
  const TensorView* block_scale = find(block);
  const TensorView* channel_scale = find(channel);
  if (block_scale != nullptr && channel_scale != nullptr) {
    return Problem{false, fmt::format("{} and {} are both present", block, channel)};
  }
  if (block_scale == nullptr && channel_scale == nullptr) {
    return Problem{true, fmt::format("{} or {}", block, channel)};
  }
  const bool by_block = block_scale != nullptr;
  const std::string& scale_name = by_block ? block : channel;
  out.scale = by_block ? *block_scale : *channel_scale;
  if (out.scale.dtype != DType::kF32) {
    return Problem{false,
                   fmt::format("{} is {}; scales must be F32", scale_name, describe(out.scale))};
  }
  const bool block_shape =
      out.scale.has_shape({ceil_div(out.rows, kFp8BlockSize), ceil_div(out.cols, kFp8BlockSize)});
  const bool channel_shape = out.scale.has_shape({out.rows}) || out.scale.has_shape({out.rows, 1});
  if (block_shape && (by_block || !channel_shape)) {
    // compressed-tensors' block strategy stores the same numbers under the channel scale's name.
    out.format = WeightFormat::kFp8Block;
  } else if (!by_block && channel_shape) {
    out.format = WeightFormat::kFp8Channel;
  } else {
    return Problem{false, fmt::format("{} is {}, which does not fit {} {}", scale_name,
                                      describe(out.scale), plain, describe(view))};
  }
  if (used != nullptr) {
    used->push_back(plain);
    used->push_back(scale_name);
  }
  return std::nullopt;
}

// Elements as F4 [rows, cols] or, as published checkpoints pack them, as U8 [rows, cols / 2] with
// the even column in the low nibble; scales as F8_E8M0 or U8 [rows, cols / 32].
std::optional<Problem> Checkpoint::State::resolve_mxfp4(const std::string& name,
                                                        const std::string& data_name, Weight& out,
                                                        std::vector<std::string>* used) const {
  const TensorView& view = *find(data_name);
  const std::string scale_name = name + ".weight_scale";
  if (view.rank != 2 || (view.dtype != DType::kE2M1 && view.dtype != DType::kU8)) {
    return Problem{false, fmt::format("{} is {}; a matrix of F4, or of U8 with two values a byte, "
                                      "is expected",
                                      data_name, describe(view))};
  }
  const TensorView* scale = find(scale_name);
  if (scale == nullptr) return Problem{true, scale_name};
  out = Weight{};
  out.format = WeightFormat::kMxfp4;
  out.rows = view.dim(0);
  out.cols = view.dtype == DType::kU8 ? 2 * view.dim(1) : view.dim(1);
  out.data = view;
  out.data.dtype = DType::kE2M1;
  out.data.shape[1] = out.cols;
  out.scale = *scale;
  out.scale.dtype = DType::kE8M0;
  if (out.cols % kMxBlockSize != 0 ||
      (scale->dtype != DType::kE8M0 && scale->dtype != DType::kU8) ||
      !scale->has_shape({out.rows, out.cols / kMxBlockSize})) {
    return Problem{false, fmt::format("{} is {}, which does not fit {} {}: MXFP4 has one F8_E8M0 "
                                      "or U8 scale for 32 columns",
                                      scale_name, describe(*scale), data_name, describe(view))};
  }
  if (used != nullptr) {
    used->push_back(data_name);
    used->push_back(scale_name);
  }
  return std::nullopt;
}

// ---- validation --------------------------------------------------------------------------------

std::optional<Problem> Checkpoint::State::check(const TensorSpec& spec,
                                                std::vector<std::string>* used) const {
  if (!spec.is_matrix()) {
    const TensorView* view = find(spec.name);
    if (view == nullptr) return Problem{true, spec.name};
    used->push_back(spec.name);
    if (!view->has_shape({spec.shape[0]})) {
      return Problem{false, fmt::format("{} is {}, expected {}", spec.name, describe(*view),
                                        describe_shape(spec.shape))};
    }
    const bool f32_only = spec.kind == TensorClass::kRouterBias;
    if (view->dtype != DType::kF32 && (f32_only || view->dtype != DType::kBF16)) {
      return Problem{false, fmt::format("{} is {}; {} is supported", spec.name, describe(*view),
                                        f32_only ? "only F32" : "BF16 or F32")};
    }
    return std::nullopt;
  }
  Weight weight;
  if (auto problem = resolve(spec.name, weight, used)) return problem;
  if (weight.data.rank != 2 || weight.rows != spec.shape[0] || weight.cols != spec.shape[1]) {
    return Problem{false, fmt::format("{} is {}, expected {}", spec.name + ".weight",
                                      describe(weight.data), describe_shape(spec.shape))};
  }
  if (weight.format != WeightFormat::kPlain && !spec.may_be_quantised()) {
    return Problem{false, fmt::format("{} is stored as {}; only BF16 and F32 are supported for it",
                                      spec.name + ".weight", to_string(weight.format))};
  }
  if (spec.kind == TensorClass::kRoutedExpert && !config.experts_format.empty()) {
    const auto want =
        config.experts_format == "mxfp4" ? WeightFormat::kMxfp4 : WeightFormat::kFp8Block;
    if (weight.format != want) {
      return Problem{false, fmt::format("{} is stored as {}, but config.json says experts_format "
                                        "'{}'",
                                        spec.name + ".weight", to_string(weight.format),
                                        config.experts_format)};
    }
  }
  return std::nullopt;
}

void Checkpoint::State::validate() {
  std::vector<std::string> missing;
  std::vector<std::string> wrong;
  std::vector<std::string> used;
  for (const TensorSpec& spec : model::list_tensors(config)) {
    if (auto problem = check(spec, &used)) {
      (problem->missing ? missing : wrong).push_back(std::move(problem->text));
    }
  }
  if (!missing.empty() || !wrong.empty()) {
    std::string text = fmt::format("{} does not fit its config.json", directory);
    if (!missing.empty()) text += fmt::format("; missing tensors: {}", first_of(missing));
    if (!wrong.empty()) text += fmt::format("; wrong tensors: {}", first_of(wrong));
    invalid(text);
  }
  // The multi-token-prediction layer stands behind the stack and is not run.
  const std::string mtp = model::layer_prefix(config.layers);
  const std::unordered_set<std::string_view> taken(used.begin(), used.end());
  for (const SafetensorsFile& file : files) {
    for (const NamedTensor& t : file.tensors()) {
      if (!taken.contains(t.name) && !t.name.starts_with(mtp)) surplus.push_back(t.name);
    }
  }
}

Checkpoint::Checkpoint(const std::string& directory) : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.directory = directory;
  std::error_code ignored;
  require(std::filesystem::is_directory(directory, ignored), ErrorKind::kInvalidArgument, [&] {
    return fmt::format(
        "'{}' is not a directory; a checkpoint is a directory with config.json and "
        "{} or {}",
        printable(directory), kSingleFile, kIndexFile);
  });
  s.config = load_config(directory);
  const bool single = std::filesystem::exists(directory + "/" + kSingleFile, ignored);
  const bool sharded = std::filesystem::exists(directory + "/" + kIndexFile, ignored);
  if (single && sharded) {
    invalid(
        fmt::format("{} holds {} and {}; remove one of them", directory, kSingleFile, kIndexFile));
  }
  if (!single && !sharded) {
    invalid(fmt::format("{} holds neither {} nor {}", directory, kSingleFile, kIndexFile));
  }
  if (single) {
    s.open_single();
  } else {
    s.open_sharded();
  }
  s.validate();
}

Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

const ModelConfig& Checkpoint::config() const noexcept { return state_->config; }
const std::string& Checkpoint::directory() const noexcept { return state_->directory; }
const std::vector<std::string>& Checkpoint::surplus() const noexcept { return state_->surplus; }

bool Checkpoint::has(std::string_view name) const noexcept { return state_->find(name) != nullptr; }

const TensorView& Checkpoint::tensor(std::string_view name) const {
  const TensorView* view = state_->find(name);
  require(view != nullptr, ErrorKind::kInvalidArgument,
          [&] { return fmt::format("{} has no tensor '{}'", state_->directory, printable(name)); });
  return *view;
}

Weight Checkpoint::weight(std::string_view name) const {
  Weight out;
  if (const auto problem = state_->resolve(name, out, nullptr)) {
    invalid(problem->missing
                ? fmt::format("{} has no tensor '{}'", state_->directory, printable(problem->text))
                : fmt::format("{}: {}", state_->directory, problem->text));
  }
  return out;
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> out;
  for (const SafetensorsFile& file : state_->files) {
    for (const NamedTensor& t : file.tensors()) out.push_back(t.name);
  }
  return out;
}

void Checkpoint::release(const TensorView& view) const noexcept {
  for (const SafetensorsFile& file : state_->files) file.release(view);
}

// ---- rows as f32 -------------------------------------------------------------------------------

void dequantise_row(const Weight& weight, std::int64_t row, float* out) {
  require(row >= 0 && row < weight.rows, ErrorKind::kInvalidArgument,
          [&] { return fmt::format("row {} of a weight with {} rows", row, weight.rows); });
  const std::int64_t cols = weight.cols;
  switch (weight.format) {
    case WeightFormat::kPlain:
      if (weight.data.dtype == DType::kF32) {
        std::copy_n(weight.data.as<float>() + row * cols, cols, out);
        return;
      }
      require(weight.data.dtype == DType::kBF16, ErrorKind::kUnsupported, [&] {
        return fmt::format("a plain weight is {}; BF16 and F32 are supported",
                           describe(weight.data));
      });
      for (std::int64_t c = 0; c < cols; ++c) {
        out[c] = weight.data.as<Bf16>()[row * cols + c].to_float();
      }
      return;
    case WeightFormat::kFp8Block: {
      const E4M3* q = weight.data.as<E4M3>() + row * cols;
      const float* s =
          weight.scale.as<float>() + row / kFp8BlockSize * ceil_div(cols, kFp8BlockSize);
      for (std::int64_t c = 0; c < cols; ++c) out[c] = dequantise_fp8(q[c], s[c / kFp8BlockSize]);
      return;
    }
    case WeightFormat::kFp8Channel: {
      const E4M3* q = weight.data.as<E4M3>() + row * cols;
      const float s = weight.scale.as<float>()[row];
      for (std::int64_t c = 0; c < cols; ++c) out[c] = dequantise_fp8(q[c], s);
      return;
    }
    case WeightFormat::kMxfp4: {
      const std::uint8_t* pairs = weight.data.as<std::uint8_t>() + row * cols / 2;
      const E8M0* s = weight.scale.as<E8M0>() + row * (cols / kMxBlockSize);
      for (std::int64_t c = 0; c < cols; c += kMxBlockSize) {
        dequantise_mxfp4_block(pairs + c / 2, s[c / kMxBlockSize], out + c);
      }
      return;
    }
  }
}

}  // namespace penstock
