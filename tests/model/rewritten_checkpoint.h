// tiny-glm in other storage formats, in a directory that goes with the test.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "model/engine_test_support.h"

namespace penstock::engine_test {

// A directory that goes with the test.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "penstock-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string path(const std::string& name = {}) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

// tiny-glm with each FP8 matrix written as `rewrite` says; its config.json names the official FP8
// form or none.
using Bytes = std::vector<std::byte>;
inline void rewrite_checkpoint(
    const std::string& directory,
    const std::function<void(const std::string& name, const Weight& weight,
                             std::vector<NamedTensor>& out, std::vector<Bytes>& storage)>& rewrite,
    bool official = false) {
  std::filesystem::create_directory(directory);
  std::vector<NamedTensor> out;
  std::vector<Bytes> storage;
  storage.reserve(4096);
  const std::string suffix = ".weight_scale_inv";
  for (const std::string& name : tiny().names()) {
    if (name.ends_with(suffix)) continue;
    const std::string stem = name.ends_with(".weight") ? name.substr(0, name.size() - 7) : name;
    if (tiny().has(stem + suffix)) {
      rewrite(stem, tiny().weight(stem), out, storage);
    } else {
      out.push_back({name, tiny().tensor(name)});
    }
  }
  write_safetensors(directory + "/model.safetensors", out);
  std::ifstream config(tiny().directory() + "/config.json");
  nlohmann::json json = nlohmann::json::parse(config);
  if (!official) json.erase("quantization_config");
  std::ofstream(directory + "/config.json") << json.dump(1);
}

inline TensorView view_of(const Bytes& bytes, DType dtype, std::int64_t rows, std::int64_t cols) {
  TensorView view;
  view.data = bytes.data();
  view.dtype = dtype;
  view.rank = 2;
  view.shape[0] = rows;
  view.shape[1] = cols;
  return view;
}

// Attention with one scale a row, all others as they are: another model than tiny-glm (each row has
// its first block's scale times a factor of its own), and as good an input for both sides of a
// comparison.
inline void write_channel_attention(const std::string& directory) {
  const auto rewrite = [](const std::string& name, const Weight& weight,
                          std::vector<NamedTensor>& out, std::vector<Bytes>& storage) {
    out.push_back({name + ".weight", weight.data});
    bool attention = false;
    for (const char* which :
         {"q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj"}) {
      attention = attention || name.ends_with(std::string("self_attn.") + which);
    }
    if (!attention) {
      out.push_back({name + ".weight_scale_inv", weight.scale});
      return;
    }
    Bytes& scales = storage.emplace_back(static_cast<std::size_t>(weight.rows * 4));
    for (std::int64_t row = 0; row < weight.rows; ++row) {
      reinterpret_cast<float*>(scales.data())[row] =
          weight.scale.as<float>()[row / 128 * weight.scale.dim(1)] *
          (0.75F + 0.05F * static_cast<float>(row % 11));
    }
    out.push_back({name + ".weight_scale", view_of(scales, DType::kF32, weight.rows, 1)});
  };
  rewrite_checkpoint(directory, rewrite, true);
}

}  // namespace penstock::engine_test
