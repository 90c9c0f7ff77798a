// safetensors files: one mapped file, its tensors as views. Hostile headers are refused, never
// trusted.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/core/tensor.h"

namespace penstock {

// One tensor of a file: data points into the mapping and lives as long as the file object.
struct NamedTensor {
  std::string name;
  TensorView view;
};

// Parses a header against a file's size. `header` is the JSON text, `data_bytes` the bytes behind
// it. Views get offsets as data pointers relative to `data`. Throws InvalidArgument naming tensor
// and value: overlap, gap, overflow, truncation, duplicate names, dtype x shape against length,
// unknown dtype, rank over kMaxRank.
std::vector<NamedTensor> parse_safetensors_header(std::string_view header, const std::byte* data,
                                                  std::uint64_t data_bytes,
                                                  std::map<std::string, std::string>* metadata);

// A read-only file. Memory-mapped; where a tensor's start is not aligned to its element size, the
// whole file is read into an aligned buffer instead (unaligned fall-back, told by is_mapped()).
// Move-only.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;

  const std::string& path() const noexcept;
  bool is_mapped() const noexcept;
  const std::vector<NamedTensor>& tensors() const noexcept;
  const std::map<std::string, std::string>& metadata() const noexcept;
  // nullptr if there is none of that name.
  const TensorView* find(std::string_view name) const noexcept;
  // Throws InvalidArgument naming the tensor and the file.
  const TensorView& at(std::string_view name) const;
  // Tells the kernel that a tensor's pages will not be read again, so that loading keeps one pass
  // and a small peak.
  void release(const TensorView& view) const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Writes tensors in the given order (data 64-byte aligned), through a temporary name that replaces
// `path` when whole. Throws Backend with the system's words; nothing is left behind on failure.
void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace penstock
