#include "penstock/core/tensor.h"

#include <fmt/format.h>

#include <algorithm>

namespace penstock {

std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return "F64";
    case DType::kF32:
      return "F32";
    case DType::kBF16:
      return "BF16";
    case DType::kF16:
      return "F16";
    case DType::kE4M3:
      return "F8_E4M3";
    case DType::kE5M2:
      return "F8_E5M2";
    case DType::kE8M0:
      return "F8_E8M0";
    case DType::kE2M1:
      return "F4";
    case DType::kI64:
      return "I64";
    case DType::kI32:
      return "I32";
    case DType::kI16:
      return "I16";
    case DType::kI8:
      return "I8";
    case DType::kU8:
      return "U8";
    case DType::kBool:
      return "BOOL";
  }
  return "?";
}

bool TensorView::has_shape(std::initializer_list<std::int64_t> want) const {
  return static_cast<std::size_t>(rank) == want.size() &&
         std::equal(want.begin(), want.end(), shape.begin());
}

std::string describe_shape(std::span<const std::int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape.begin(), shape.end(), ", "));
}

std::string describe(const TensorView& view) {
  return fmt::format("{} {}",
                     describe_shape({view.shape.data(), static_cast<std::size_t>(view.rank)}),
                     to_string(view.dtype));
}

}  // namespace penstock
