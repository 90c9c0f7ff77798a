#include "ops/a2a_gemm/bench.h"

namespace penstock::a2a_gemm {

std::string_view to_string(BenchVariant variant) {
  switch (variant) {
    case BenchVariant::kCopyEngine:
      return "copy_engine";
    case BenchVariant::kSm:
      return "sm";
    case BenchVariant::kArrival:
      return "arrival";
    case BenchVariant::kDirect:
      return "direct";
    case BenchVariant::kAuto:
      return "auto";
    case BenchVariant::kUnfused:
      return "unfused";
    case BenchVariant::kNccl:
      return "nccl";
    case BenchVariant::kNcclDense:
      return "nccl_cublaslt";
    case BenchVariant::kGemm:
      return "gemm";
    case BenchVariant::kDense:
      return "cublaslt";
  }
  return "unknown";
}

bool is_whole(BenchVariant variant) { return variant <= BenchVariant::kNccl; }

}  // namespace penstock::a2a_gemm
