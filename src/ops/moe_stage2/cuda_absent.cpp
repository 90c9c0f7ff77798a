// Stands in for the CUDA operator in builds without CUDA.
#include "ops/moe_stage2/bench.h"
#include "penstock/core/error.h"
#include "penstock/ops/moe_stage2/moe_stage2.h"

namespace penstock::moe_stage2 {

namespace {

[[noreturn]] void refuse() {
  throw_error(ErrorKind::kUnsupported,
              "moe_stage2: this build has no CUDA back end; build with PENSTOCK_CUDA=ON");
}

}  // namespace

std::unique_ptr<MoeStage2> make_cuda_moe_stage2(TeamHandle, const Shape&, const Options&) {
  refuse();
}

StageBench gpu_bench_stage2(const TeamHandle&, int, const StageBenchOptions&) { refuse(); }

}  // namespace penstock::moe_stage2
