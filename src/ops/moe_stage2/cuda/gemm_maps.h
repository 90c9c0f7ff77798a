// The grouped GEMM's tensor maps. Host side.
#pragma once

#include "ops/moe_stage2/cuda/grouped_gemm_sm90.h"
#include "ops/sm90/tensor_map.h"

namespace penstock::moe_stage2 {

// act [rows, intermediate] and weight [experts, hidden, intermediate], E4M3, 16-byte aligned device
// memory.
inline GroupedGemmMaps make_gemm_maps(const void* act, std::int64_t rows, const void* weight,
                                      std::int32_t experts, std::int32_t hidden,
                                      std::int32_t intermediate) {
  const auto k = static_cast<std::uint64_t>(intermediate);
  return {
      sm90::make_byte_map(act, {k, static_cast<std::uint64_t>(rows)}, {kScaleBlock, kTileRows / 2}),
      sm90::make_byte_map(
          weight, {k, static_cast<std::uint64_t>(hidden), static_cast<std::uint64_t>(experts)},
          {kScaleBlock, kGemmTileColumns / 2, 1})};
}

}  // namespace penstock::moe_stage2
