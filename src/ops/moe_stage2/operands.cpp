#include "ops/moe_stage2/operands.h"

#include <fmt/format.h>

#include "penstock/core/error.h"

namespace penstock::moe_stage2 {

void check_operands(const Operands& o, const Shape& shape) {
  const auto need = [](bool ok, const char* what) {
    require(ok, ErrorKind::kInvalidArgument, [&] { return fmt::format("moe_stage2: {}", what); });
  };
  require(o.tokens >= 0 && o.tokens <= shape.max_tokens_per_rank, ErrorKind::kInvalidArgument, [&] {
    return fmt::format(
        "moe_stage2: {} tokens; the operator was built for 0 to {} (max_tokens_per_rank)", o.tokens,
        shape.max_tokens_per_rank);
  });
  const std::int64_t capacity = worst_padded_rows_per_rank(shape) / kTileRows;
  require(o.tiles >= 0 && o.tiles <= capacity, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("moe_stage2: {} tiles; the operator was built for 0 to {}", o.tiles,
                       capacity);
  });
  need(o.expert_rows != nullptr, "expert_rows is null");
  need(o.tiles == 0 ||
           (o.origin != nullptr && o.gemm.act != nullptr && o.gemm.act_scales != nullptr),
       "origin, act or act_scales is null");
  need(o.tiles == 0 || (o.gemm.weight != nullptr && o.gemm.weight_scales != nullptr),
       "weight or weight_scales of the experts is null");
  need(o.tokens == 0 || (o.weight != nullptr && o.out != nullptr), "weight or out is null");
  require(o.gemm.hidden == shape.hidden && o.gemm.intermediate == shape.intermediate,
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format(
                "moe_stage2: operands are {} x {}, the operator was built for {} x {}",
                o.gemm.hidden, o.gemm.intermediate, shape.hidden, shape.intermediate);
          });
}

}  // namespace penstock::moe_stage2
