#include "penstock/ops/a2a_gemm/layout.h"

#include <fmt/format.h>

#include "ops/a2a_gemm/mirror_layout.h"
#include "penstock/core/error.h"
#include "penstock/ops/a2a_gemm/plan.h"

namespace penstock::a2a_gemm {

WindowShape window_shape(const Shape& shape, std::int32_t row_block_rows, bool staged) {
  WindowShape window;
  window.ranks = static_cast<std::uint64_t>(shape.ranks);
  window.staged_rows = staged ? static_cast<std::uint64_t>(total_rows(shape)) : 0;
  window.max_rows = static_cast<std::uint64_t>(max_rows(shape));
  window.row_bytes = static_cast<std::uint64_t>(shape.row_bytes());
  window.scale_blocks = static_cast<std::uint64_t>(shape.scale_blocks());
  window.row_blocks = static_cast<std::uint64_t>(row_block_count(max_rows(shape), row_block_rows));
  return window;
}

WindowIndex window_index(const WindowShape& shape) { return {shape, kWindowTable.at(shape)}; }

Layout window_layout(const Shape& shape, std::int32_t row_block_rows, bool staged) {
  validate(shape);
  return Layout::from(
      kWindowTable, window_shape(shape, row_block_rows, staged),
      fmt::format("{} row_block={} staged={}", describe(shape), row_block_rows, staged));
}

MirrorIndex mirror_index(const Shape& shape, std::int32_t row_block_rows, bool staged) {
  MirrorIndex index;
  index.shape.ranks = static_cast<std::uint64_t>(shape.ranks);
  index.shape.max_rows = static_cast<std::uint64_t>(max_rows(shape));
  index.shape.row_bytes = static_cast<std::uint64_t>(shape.columns) * 2;  // bf16
  index.shape.row_blocks =
      static_cast<std::uint64_t>(row_block_count(max_rows(shape), row_block_rows));
  index.shape.staged = staged;
  index.at = kMirrorTable.at(index.shape);
  return index;
}

Layout mirror_layout(const Shape& shape, std::int32_t row_block_rows, bool staged) {
  validate(shape);
  return Layout::from(
      kMirrorTable, mirror_index(shape, row_block_rows, staged).shape,
      fmt::format("{} row_block={} staged={}", describe(shape), row_block_rows, staged));
}

}  // namespace penstock::a2a_gemm
