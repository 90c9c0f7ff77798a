// A checkpoint directory: config.json and one or many safetensors files, checked against the
// geometry.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/core/tensor.h"
#include "penstock/model/config.h"

namespace penstock {

// How a weight is stored. `scale` is empty for plain tensors.
enum class WeightFormat : unsigned char {
  kPlain,       // F32 or BF16, no scale
  kFp8Block,    // E4M3 [rows, cols] with F32 scales [ceil(rows / 128), ceil(cols / 128)]
                // (weight_scale_inv); w = q * s
  kFp8Channel,  // E4M3 [rows, cols] with F32 scales [rows] or [rows, 1] (weight_scale)
  kMxfp4,       // E2M1 [rows, cols], two a byte along cols, with E8M0 scales [rows, cols / 32]
};
std::string_view to_string(WeightFormat format);

// A matrix [rows, cols] = [outputs, inputs] in its stored format; pointers into the checkpoint's
// mapping.
struct Weight {
  WeightFormat format = WeightFormat::kPlain;
  TensorView data;
  TensorView scale;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};

// Opens DIR. Throws InvalidArgument listing missing tensors (first ten and the count) or wrong
// shapes. Surplus tensors (MTP layers excepted) are kept in surplus(). Nothing is copied: one pass
// over the files, by mapping.
class Checkpoint {
 public:
  explicit Checkpoint(const std::string& directory);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  const ModelConfig& config() const noexcept;
  const std::string& directory() const noexcept;
  const std::vector<std::string>& surplus() const noexcept;
  // Any tensor by its checkpoint name; throws InvalidArgument naming it.
  const TensorView& tensor(std::string_view name) const;
  bool has(std::string_view name) const noexcept;
  // The matrix NAME.weight with whatever scale belongs to it; throws InvalidArgument naming it.
  Weight weight(std::string_view name) const;
  // All tensor names in file order, surplus and MTP included.
  std::vector<std::string> names() const;
  // Lets the pages of a tensor go after the last read (see SafetensorsFile::release).
  void release(const TensorView& view) const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// One row of a weight as f32: out [cols]. The scale is applied per element; exact for every format
// (f32 products).
void dequantise_row(const Weight& weight, std::int64_t row, float* out);

}  // namespace penstock
