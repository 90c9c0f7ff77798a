#include "penstock/model/convert.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>
#include <unordered_map>

#include "model/atomic_file.h"
#include "model/json_text.h"
#include "model/tensor_list.h"
#include "penstock/core/error.h"
#include "penstock/core/thread_pool.h"
#include "penstock/model/safetensors.h"
#include "penstock/numerics/quantise.h"

namespace penstock {
namespace {

using model::TensorClass;
using model::TensorSpec;

constexpr std::array<std::string_view, 3> kProjections = {"gate_proj", "up_proj", "down_proj"};
// What a tokenizer or a chat needs beside the weights.
constexpr std::array<const char*, 8> kCompanions = {"tokenizer.json",
                                                    "tokenizer_config.json",
                                                    "special_tokens_map.json",
                                                    "added_tokens.json",
                                                    "vocab.json",
                                                    "merges.txt",
                                                    "generation_config.json",
                                                    "chat_template.jinja"};

[[noreturn]] void invalid(const std::string& text) {
  throw_error(ErrorKind::kInvalidArgument, text);
}

std::size_t as_size(std::int64_t n) { return static_cast<std::size_t>(n); }

WeightFormat storage_of(ExpertsFormat format) {
  return format == ExpertsFormat::kMxfp4 ? WeightFormat::kMxfp4 : WeightFormat::kFp8Block;
}

// One thing that is written: a tensor copied as it is, or a matrix that becomes data and scale.
struct Unit {
  std::string name;     // the tensor's, or the matrix's without ".weight"
  TensorView view;      // copied
  Weight source;        // converted
  int projection = -1;  // index in kProjections; -1: copied
  std::int64_t bytes = 0;

  bool converted() const { return projection >= 0; }
};

// A converted matrix and what the conversion lost.
struct Converted {
  std::vector<std::uint8_t> data;
  std::vector<std::uint8_t> codes;  // E8M0
  std::vector<float> scales;        // FP8
  double error = 0.0;               // sum (new - old)^2
  double norm = 0.0;                // sum old^2
  std::int64_t saturated = 0;
};

// Removes what was written unless the conversion ran to its end.
class Cleanup {
 public:
  Cleanup(std::string directory, bool created)
      : directory_(std::move(directory)), created_(created) {}
  Cleanup(const Cleanup&) = delete;
  Cleanup& operator=(const Cleanup&) = delete;
  ~Cleanup() {
    if (done_) return;
    for (const std::string& file : files_) ::unlink(file.c_str());
    if (created_) ::rmdir(directory_.c_str());
  }
  // Returns the full path of a file that is about to be written.
  std::string add(std::string_view name) {
    files_.push_back(fmt::format("{}/{}", directory_, name));
    return files_.back();
  }
  void done() { done_ = true; }

 private:
  std::string directory_;
  bool created_;
  bool done_ = false;
  std::vector<std::string> files_;
};

std::int64_t converted_bytes(const Weight& w, ExpertsFormat format) {
  if (format == ExpertsFormat::kMxfp4) return w.rows * (w.cols / 2 + w.cols / kMxBlockSize);
  return w.rows * w.cols + 4 * fp8_blocks(w.rows) * fp8_blocks(w.cols);
}

// All units in the source's file order.
std::vector<Unit> plan_units(const Checkpoint& source, ExpertsFormat format) {
  // Every tensor that belongs to a routed expert that changes -> its matrix.
  std::unordered_map<std::string, Unit> changing;
  bool any_expert = false;
  for (const TensorSpec& spec : model::list_tensors(source.config())) {
    if (spec.kind != TensorClass::kRoutedExpert) continue;
    any_expert = true;
    const Weight weight = source.weight(spec.name);
    if (weight.format == storage_of(format)) continue;
    if (format == ExpertsFormat::kMxfp4 && weight.cols % kMxBlockSize != 0) {
      invalid(fmt::format("{} has {} columns; MXFP4 needs a multiple of {}", spec.name, weight.cols,
                          kMxBlockSize));
    }
    Unit unit;
    unit.name = spec.name;
    unit.source = weight;
    unit.bytes = converted_bytes(weight, format);
    for (std::size_t i = 0; i < kProjections.size(); ++i) {
      if (spec.name.ends_with(kProjections[i])) unit.projection = static_cast<int>(i);
    }
    changing.emplace(spec.name, std::move(unit));
  }
  if (!any_expert) invalid(fmt::format("{} has no routed experts", source.directory()));
  if (changing.empty()) {
    invalid(fmt::format("the routed experts of {} are stored as {} already; nothing to convert",
                        source.directory(), to_string(format)));
  }
  std::vector<Unit> units;
  for (const std::string& name : source.names()) {
    const auto dot = name.rfind('.');
    const std::string_view suffix = std::string_view(name).substr(dot + 1);
    const auto it = dot == std::string::npos ? changing.end() : changing.find(name.substr(0, dot));
    const bool data = suffix == "weight" || suffix == "weight_packed";
    const bool scale = suffix == "weight_scale" || suffix == "weight_scale_inv";
    if (it == changing.end() || (!data && !scale)) {
      Unit unit;
      unit.name = name;
      unit.view = source.tensor(name);
      unit.bytes = unit.view.bytes();
      units.push_back(std::move(unit));
      continue;
    }
    // The data takes the matrix's place in the order; old scales are dropped.
    if (data) units.push_back(it->second);
  }
  return units;
}

Converted convert_matrix(const Unit& unit, ExpertsFormat format) {
  const Weight& source = unit.source;
  const std::int64_t rows = source.rows;
  const std::int64_t cols = source.cols;
  std::vector<float> old(as_size(rows * cols));
  for (std::int64_t r = 0; r < rows; ++r) dequantise_row(source, r, old.data() + r * cols);

  Converted out;
  Weight fresh;
  fresh.format = storage_of(format);
  fresh.rows = rows;
  fresh.cols = cols;
  std::int64_t broken = 0;
  if (format == ExpertsFormat::kMxfp4) {
    out.data.resize(as_size(rows * cols / 2));
    out.codes.resize(as_size(rows * cols / kMxBlockSize));
    std::vector<E8M0> scales(out.codes.size());
    broken = quantise_mxfp4(old, rows, cols, MxScaleRule::kOcpFloor, out.data, scales);
    for (std::size_t i = 0; i < scales.size(); ++i) out.codes[i] = scales[i].bits;
    fresh.scale.data = out.codes.data();
  } else {
    out.data.resize(old.size());
    out.scales.resize(as_size(fp8_blocks(rows) * fp8_blocks(cols)));
    std::vector<E4M3> q(old.size());
    broken = quantise_fp8_block(old, rows, cols, q, out.scales);
    for (std::size_t i = 0; i < q.size(); ++i) out.data[i] = q[i].bits;
    fresh.scale.data = out.scales.data();
  }
  if (broken > 0) {
    invalid(fmt::format("{}.weight holds NaN or Inf in {} blocks; such a model cannot be converted",
                        unit.name, broken));
  }
  fresh.data.data = out.data.data();

  std::vector<float> row(as_size(cols));
  for (std::int64_t r = 0; r < rows; ++r) {
    dequantise_row(fresh, r, row.data());
    for (std::int64_t c = 0; c < cols; ++c) {
      const double want = old[as_size(r * cols + c)];
      const double difference = double{row[as_size(c)]} - want;
      out.error += difference * difference;
      out.norm += want * want;
      double largest = 0.0;
      if (format == ExpertsFormat::kMxfp4) {
        const E8M0 scale{out.codes[as_size((r * cols + c) / kMxBlockSize)]};
        largest = double{E2M1::kMax} * double{scale.to_float()};
      } else {
        // amax / 448 is rounded to f32, so 448 times it may miss amax by an ulp: not a saturation.
        const std::int64_t block = r / kFp8BlockSize * fp8_blocks(cols) + c / kFp8BlockSize;
        largest = double{E4M3::kMax} * double{out.scales[as_size(block)]} * (1.0 + 0x1p-20);
      }
      if (std::abs(want) > largest) ++out.saturated;
    }
  }
  return out;
}

NamedTensor named(std::string name, DType dtype, std::initializer_list<std::int64_t> shape,
                  const void* data) {
  NamedTensor t;
  t.name = std::move(name);
  t.view.dtype = dtype;
  t.view.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), t.view.shape.begin());
  t.view.data = data;
  return t;
}

void append_tensors(const Unit& unit, const Converted& converted, std::vector<NamedTensor>& out) {
  if (!unit.converted()) {
    out.push_back({unit.name, unit.view});
    return;
  }
  const std::int64_t rows = unit.source.rows;
  const std::int64_t cols = unit.source.cols;
  if (!converted.codes.empty()) {
    out.push_back(
        named(unit.name + ".weight_packed", DType::kU8, {rows, cols / 2}, converted.data.data()));
    out.push_back(named(unit.name + ".weight_scale", DType::kU8, {rows, cols / kMxBlockSize},
                        converted.codes.data()));
  } else {
    out.push_back(named(unit.name + ".weight", DType::kE4M3, {rows, cols}, converted.data.data()));
    out.push_back(named(unit.name + ".weight_scale_inv", DType::kF32,
                        {fp8_blocks(rows), fp8_blocks(cols)}, converted.scales.data()));
  }
}

std::string new_config(const Checkpoint& source, ExpertsFormat format) {
  using json = nlohmann::ordered_json;
  const std::string path = source.directory() + "/config.json";
  // Keys keep their order: the file is also read by people.
  json root = json::parse(model::read_text_file(path, std::size_t{16} << 20));
  root["experts_format"] = std::string(to_string(format));
  return root.dump(1) + "\n";
}

// Checks the target and creates it; true if it was created.
bool prepare_directory(const std::string& directory) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status status = fs::status(directory, error);
  if (fs::exists(status)) {
    if (!fs::is_directory(status)) invalid(fmt::format("{} exists and is no directory", directory));
    if (!fs::is_empty(directory, error) || error) {
      invalid(fmt::format("{} exists and is not empty; name a new directory", directory));
    }
    return false;
  }
  if (!fs::create_directory(directory, error)) {
    throw_error(ErrorKind::kBackend,
                fmt::format("create directory {}: {}", directory, error.message()));
  }
  return true;
}

}  // namespace

std::string_view to_string(ExpertsFormat format) {
  return format == ExpertsFormat::kMxfp4 ? "mxfp4" : "fp8";
}

ExpertsFormat parse_experts_format(std::string_view text) {
  if (text == "mxfp4") return ExpertsFormat::kMxfp4;
  if (text == "fp8") return ExpertsFormat::kFp8;
  invalid(
      fmt::format("experts format '{}'; 'mxfp4' and 'fp8' are accepted", model::printable(text)));
}

ConvertReport convert_experts(const Checkpoint& source, const std::string& directory,
                              const ConvertOptions& options) {
  if (options.max_shard_bytes < 1) {
    invalid(fmt::format("max_shard_bytes is {}; at least 1 is needed", options.max_shard_bytes));
  }
  if (options.threads < 0) {
    invalid(fmt::format("threads is {}; 0 (all) or more is needed", options.threads));
  }
  const std::vector<Unit> units = plan_units(source, options.experts);
  ConvertReport report;
  report.experts = options.experts;
  for (const std::string& name : source.names()) report.bytes_before += source.tensor(name).bytes();
  for (const Unit& unit : units) report.bytes_after += unit.bytes;

  // Shards are planned before anything is written: their names hold their number.
  std::vector<std::pair<std::size_t, std::size_t>> shards;
  for (std::size_t begin = 0; begin < units.size();) {
    std::size_t end = begin;
    std::int64_t bytes = 0;
    while (end < units.size() &&
           (end == begin || units[end].bytes <= options.max_shard_bytes - bytes)) {
      bytes += units[end++].bytes;
    }
    shards.emplace_back(begin, end);
    begin = end;
  }

  const int threads = options.threads > 0
                          ? options.threads
                          : static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  ThreadPool pool(threads);
  std::array<ConvertQuality, kProjections.size()> quality;
  std::array<double, kProjections.size()> error{};
  std::array<double, kProjections.size()> norm{};
  nlohmann::json weight_map = nlohmann::json::object();
  Cleanup cleanup(directory, prepare_directory(directory));
  std::int64_t written = 0;
  for (std::size_t s = 0; s < shards.size(); ++s) {
    const auto [begin, end] = shards[s];
    std::vector<Converted> converted(end - begin);
    pool.parallel_for(end - begin, 1, [&, first = begin](std::size_t from, std::size_t to, int) {
      for (std::size_t i = from; i < to; ++i) {
        if (units[first + i].converted()) {
          converted[i] = convert_matrix(units[first + i], options.experts);
        }
      }
    });
    std::vector<NamedTensor> tensors;
    for (std::size_t i = begin; i < end; ++i) {
      const Unit& unit = units[i];
      const Converted& c = converted[i - begin];
      append_tensors(unit, c, tensors);
      written += unit.bytes;
      if (!unit.converted()) continue;
      // Added in file order, so the sums do not depend on the threads.
      const auto p = static_cast<std::size_t>(unit.projection);
      ++quality[p].tensors;
      quality[p].elements += unit.source.rows * unit.source.cols;
      quality[p].saturated += c.saturated;
      error[p] += c.error;
      norm[p] += c.norm;
    }
    // Wide elements first: then every tensor is aligned and readers can map the file.
    std::stable_sort(tensors.begin(), tensors.end(),
                     [](const NamedTensor& a, const NamedTensor& b) {
                       return bits_of(a.view.dtype) > bits_of(b.view.dtype);
                     });
    const std::string file = fmt::format("model-{:05}-of-{:05}.safetensors", s + 1, shards.size());
    write_safetensors(cleanup.add(file), tensors, {{"format", "pt"}});
    for (const NamedTensor& t : tensors) weight_map[t.name] = file;
    report.files.push_back(file);
    for (std::size_t i = begin; i < end; ++i) {
      source.release(units[i].converted() ? units[i].source.data : units[i].view);
    }
    if (options.progress) options.progress(written, report.bytes_after);
  }

  const nlohmann::json index = {{"metadata", {{"total_size", report.bytes_after}}},
                                {"weight_map", std::move(weight_map)}};
  const auto write_text = [&](std::string_view name, std::string_view text) {
    model::AtomicFile file(cleanup.add(name));
    file.write(text);
    file.commit();
  };
  write_text("model.safetensors.index.json", index.dump(1) + "\n");
  for (const char* name : kCompanions) {
    const std::string path = source.directory() + "/" + name;
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) continue;
    write_text(name, model::read_text_file(path, std::size_t{256} << 20));
  }
  write_text("config.json", new_config(source, options.experts));
  cleanup.done();

  for (std::size_t p = 0; p < kProjections.size(); ++p) {
    if (quality[p].tensors == 0) continue;
    quality[p].name = fmt::format("experts.{}", kProjections[p]);
    quality[p].relative_l2 = norm[p] > 0.0 ? std::sqrt(error[p] / norm[p]) : 0.0;
    quality[p].snr_db = error[p] > 0.0 ? 10.0 * std::log10(norm[p] / error[p])
                                       : std::numeric_limits<double>::infinity();
    report.quality.push_back(quality[p]);
  }
  return report;
}

}  // namespace penstock
