#include "penstock/ops/moe_stage2/heuristics.h"

#include <algorithm>
#include <cmath>

namespace penstock::moe_stage2 {

std::int32_t choose_tiles_per_chunk(const Shape& shape) {
  const double to_one_peer = static_cast<double>(wire_row_bytes(shape.hidden, shape.wire)) *
                             kTileRows / static_cast<double>(shape.ranks);
  return static_cast<std::int32_t>(std::clamp(std::ceil(kChunkBytes / to_one_peer), 1.0, 64.0));
}

std::int32_t choose_copy_ctas(const Shape& shape) {
  if (shape.ranks == 1) return 0;
  const double row_seconds = 2.0 * shape.hidden * shape.intermediate / kGemmFlops;
  const double remote = static_cast<double>(shape.ranks - 1) / shape.ranks;
  const double bytes = remote * static_cast<double>(wire_row_bytes(shape.hidden, shape.wire));
  const double pairs = std::ceil(bytes / row_seconds / kCopyCtaBytes / 2.0);
  return 2 * static_cast<std::int32_t>(std::clamp(pairs, 1.0, kMostCopyCtas / 2.0));
}

TransportKind choose_transport(const Shape& shape) {
  return shape.max_tokens_per_rank < kCopyEngineFromTokens ? TransportKind::kDirect
                                                           : TransportKind::kCopyEngine;
}

}  // namespace penstock::moe_stage2
