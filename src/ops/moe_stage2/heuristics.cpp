#include "penstock/ops/moe_stage2/heuristics.h"

#include <algorithm>
#include <cmath>

namespace penstock::moe_stage2 {

std::int32_t choose_tiles_per_chunk(const Shape& shape) {
  const double to_one_peer = static_cast<double>(wire_row_bytes(shape.hidden, shape.wire)) *
                             kTileRows / static_cast<double>(shape.ranks);
  return static_cast<std::int32_t>(std::clamp(std::ceil(kChunkBytes / to_one_peer), 1.0, 64.0));
}

TransportKind choose_transport(const Shape& shape) {
  return shape.max_tokens_per_rank < kCopyEngineFromTokens ? TransportKind::kDirect
                                                           : TransportKind::kCopyEngine;
}

}  // namespace penstock::moe_stage2
