// A window of a stored weight matrix, as the CPU products read it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock::cpu {

// Columns that share a scale in the block format, and rows that do.
inline constexpr std::int64_t kScaleBlock = 128;
// Columns that share a scale in MXFP4; windows start at multiples of it in every format.
inline constexpr std::int64_t kWindowColumns = 32;

enum class MatrixFormat : std::uint8_t {
  kF32,
  kBf16,
  kFp8Block,    // E4M3, f32 scale per 128 x 128
  kFp8Channel,  // E4M3, f32 scale per row
  kMxfp4,       // E2M1, two a byte, low nibble first; E8M0 scale per 32 columns
};

// [rows, cols] = [outputs, inputs], row-major; an element is code x scale, one f32 rounding. A
// window keeps the stored matrix's origin, because scale blocks count from there: rows 192.. of a
// 448-row head start inside a block.
struct Matrix {
  MatrixFormat format = MatrixFormat::kF32;
  const std::byte* data = nullptr;  // stored element [0, 0]
  const void* scales = nullptr;     // stored scale 0
  std::int64_t row_bytes = 0;       // of a stored row
  std::int64_t scale_stride = 0;    // scales of a stored row (or of a row of blocks)
  std::int64_t row0 = 0;            // window's origin; col0 a multiple of kWindowColumns
  std::int64_t col0 = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;

  Matrix row_window(std::int64_t begin, std::int64_t count) const {
    Matrix window = *this;
    window.row0 += begin;
    window.rows = count;
    return window;
  }
  Matrix col_window(std::int64_t begin, std::int64_t count) const {
    Matrix window = *this;
    window.col0 += begin;
    window.cols = count;
    return window;
  }
  bool quantised() const { return format != MatrixFormat::kF32 && format != MatrixFormat::kBf16; }
};

}  // namespace penstock::cpu
