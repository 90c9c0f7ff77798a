// Stands in for the CUDA operator and its benchmark in builds without CUDA.
#include "ops/a2a_gemm/bench.h"
#include "penstock/core/error.h"
#include "penstock/ops/a2a_gemm/a2a_gemm.h"
#include "penstock/ops/a2a_gemm/mirror.h"

namespace penstock::a2a_gemm {

namespace {
constexpr const char* kAbsent =
    "a2a_gemm: this build has no CUDA back end; build with PENSTOCK_CUDA=ON";
}

std::unique_ptr<A2aGemm> make_cuda_a2a_gemm(TeamHandle, const Shape&, const Options&) {
  throw_error(ErrorKind::kUnsupported, kAbsent);
}
std::unique_ptr<GemmA2a> make_cuda_gemm_a2a(TeamHandle, const Shape&, const Options&) {
  throw_error(ErrorKind::kUnsupported, kAbsent);
}
BenchResult gpu_bench_a2a_gemm(const TeamHandle&, int, const BenchOptions&) {
  throw_error(ErrorKind::kUnsupported, kAbsent);
}

}  // namespace penstock::a2a_gemm
