#include "ops/moe_stage2/bench.h"

namespace penstock::moe_stage2 {

std::string_view to_string(StageVariant variant) {
  switch (variant) {
    case StageVariant::kCopyEngine:
      return "copy_engine";
    case StageVariant::kSm:
      return "sm";
    case StageVariant::kDirect:
      return "direct";
    case StageVariant::kUnfused:
      return "unfused";
    case StageVariant::kNccl:
      return "nccl";
    case StageVariant::kGemm:
      return "gemm";
    case StageVariant::kCombine:
      return "combine";
    case StageVariant::kPlan:
      return "plan";
  }
  return "unknown";
}

}  // namespace penstock::moe_stage2
