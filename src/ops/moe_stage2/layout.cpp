#include "penstock/ops/moe_stage2/layout.h"

#include <fmt/format.h>

namespace penstock::moe_stage2 {

WindowShape window_shape(const Shape& shape, bool staged) {
  WindowShape window;
  const std::int64_t reserved = reserved_rows(shape);
  const std::int64_t pair = worst_rows_per_pair(shape);
  window.ranks = static_cast<std::uint64_t>(shape.ranks);
  window.row_bytes = static_cast<std::uint64_t>(wire_row_bytes(shape.hidden, shape.wire));
  window.reserved = static_cast<std::uint64_t>(reserved);
  window.staged = staged ? window.reserved : 0;
  window.spill = static_cast<std::uint64_t>(pair - reserved);
  window.table_rows = static_cast<std::uint64_t>(pair);
  return window;
}

WindowIndex window_index(const WindowShape& shape) { return {shape, kWindowTable.at(shape)}; }

Layout window_layout(const Shape& shape, bool staged) {
  validate(shape);
  return Layout::from(
      kWindowTable, window_shape(shape, staged),
      fmt::format(
          "ranks={} experts={} top_k={} hidden={} intermediate={} tokens={} slack={} wire={} "
          "staged={}",
          shape.ranks, shape.experts, shape.top_k, shape.hidden, shape.intermediate,
          shape.max_tokens_per_rank, shape.row_slack,
          shape.wire == WireFormat::kFp8 ? "fp8" : "bf16", staged));
}

}  // namespace penstock::moe_stage2
