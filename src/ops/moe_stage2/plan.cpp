#include "penstock/ops/moe_stage2/plan.h"

#include <algorithm>
#include <array>

namespace penstock::moe_stage2 {

void plan_on_host(const PlanInputs& in, const PlanOutputs& out) {
  std::int64_t tiles = 0;
  for (std::int32_t e = 0; e < in.experts; ++e) tiles += tiles_of(in.expert_rows[e]);
  if (tiles > in.tile_capacity) {
    *out.tile_count = 0;
    *out.fault |= kPlanTilesOverCapacity;
    return;
  }
  *out.tile_count = static_cast<std::int32_t>(tiles);

  std::array<std::int32_t, kMaxRanks> next{};  // rows that each destination has so far
  std::int64_t tile = 0;
  for (std::int32_t e = 0; e < in.experts; ++e) {
    for (std::int32_t done = 0; done < in.expert_rows[e]; done += kTileRows, ++tile) {
      out.tile_expert[tile] = e;
      const std::int32_t rows = std::min(kTileRows, in.expert_rows[e] - done);
      out.tile_rows[tile] = rows;
      out.tile_mate[tile] =
          mate_of(static_cast<std::int32_t>(tile), done / kTileRows, in.expert_rows[e]);
      std::copy(next.begin(), next.end(), out.prefix + tile * kMaxRanks);
      for (std::int32_t i = 0; i < kTileRows; ++i) {
        const RowOrigin origin = in.origin[tile * kTileRows + i];
        RowPlace place;
        const std::int32_t fault = check_origin(origin, i, rows, in.ranks, in.top_k);
        *out.fault |= fault;
        if (i < rows && fault == kPlanWhole) {
          const std::int32_t rank = next[static_cast<std::size_t>(origin.rank)]++;
          if (rank < out.row_table_stride) {
            place = place_of(origin.rank, rank, in.reserved);
            out.row_table[origin.rank * out.row_table_stride + rank] =
                slot_index(origin.token, origin.slot, in.top_k);
          } else {
            *out.fault |= kPlanTableOverflow;
          }
        }
        out.place[tile * kTileRows + i] = place;
      }
    }
  }
  std::copy(next.begin(), next.end(), out.prefix + tiles * kMaxRanks);
}

std::int32_t invert_on_host(const std::int32_t* table, std::int64_t rows, std::int32_t source,
                            std::int64_t reserved, RowPlace* inverse, std::int64_t slots) {
  std::int32_t fault = kPlanWhole;
  for (std::int64_t i = 0; i < rows; ++i) {
    if (table[i] < 0 || table[i] >= slots) {
      fault = kPlanBadOrigin;
      continue;
    }
    inverse[table[i]] = place_of(source, i, reserved);
  }
  return fault;
}

std::string describe_plan_fault(std::int32_t bits) {
  std::string text;
  const auto add = [&](std::int32_t bit, const char* words) {
    if ((bits & bit) == 0) return;
    if (!text.empty()) text += "; ";
    text += words;
  };
  add(kPlanTilesOverCapacity,
      "the experts' rows need more tiles than the operator was built for: raise "
      "max_tokens_per_rank");
  add(kPlanBadOrigin,
      "a valid row's origin is out of range: rank, slot and token have to be inside the shape");
  add(kPlanTableOverflow,
      "one rank has more rows for another than max_tokens_per_rank * top_k: an origin appears "
      "twice "
      "or max_tokens_per_rank is too small");
  add(kPlanBadPadding,
      "a padding row does not carry rank -1: clear the origins past an expert's rows");
  return text;
}

}  // namespace penstock::moe_stage2
