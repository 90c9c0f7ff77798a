// Tensor views: a pointer with an element type, a shape and strides. Nothing is owned here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

namespace penstock {

// Storage types. Sub-byte types count in bits: two kE2M1 values share a byte, low nibble first.
enum class DType : std::uint8_t {
  kF64,
  kF32,
  kBF16,
  kF16,
  kE4M3,
  kE5M2,
  kE8M0,
  kE2M1,
  kI64,
  kI32,
  kI16,
  kI8,
  kU8,
  kBool
};

std::string_view to_string(DType dtype);  // safetensors' name: "F32", "BF16", "F8_E4M3", "F4", ...
constexpr int bits_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
      return 64;
    case DType::kF32:
    case DType::kI32:
      return 32;
    case DType::kBF16:
    case DType::kF16:
    case DType::kI16:
      return 16;
    case DType::kE2M1:
      return 4;
    default:
      return 8;
  }
}

inline constexpr int kMaxRank = 6;

// A view of a dense, row-major tensor in somebody else's memory. shape[0] varies slowest. Plain
// data: copy it freely.
struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};

  std::int64_t dim(int i) const { return shape[static_cast<std::size_t>(i)]; }
  std::int64_t elements() const {
    std::int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= dim(i);
    return n;
  }
  std::int64_t bytes() const { return (elements() * bits_of(dtype) + 7) / 8; }
  template <typename T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
  bool has_shape(std::initializer_list<std::int64_t> want) const;
};

// "[256, 1024] F8_E4M3"
std::string describe(const TensorView& view);
std::string describe_shape(std::span<const std::int64_t> shape);

}  // namespace penstock
