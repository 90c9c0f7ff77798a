// Stands in for the CUDA side of the benchmarks in builds without CUDA.
#include "cli/bench/a2a_contest.h"
#include "cli/bench/moe_contest.h"
#include "penstock/core/error.h"

namespace penstock::bench {

namespace {

[[noreturn]] void refuse() {
  throw_error(ErrorKind::kUnsupported,
              "this build has no CUDA back end; build with PENSTOCK_CUDA=ON");
}

}  // namespace

std::vector<double> cuda_moe_errors(const TeamHandle&, int, const MoeProblem&) { refuse(); }
std::vector<double> cuda_a2a_errors(const TeamHandle&, int, const A2aProblem&) { refuse(); }
Trace trace_cuda_a2a(const TeamHandle&, int, const A2aProblem&) { refuse(); }
a2a_gemm::DenseFactory cublaslt_baseline(const std::string&) { return {}; }

}  // namespace penstock::bench
