// Stands in for the CUDA side of the benchmarks in builds without CUDA.
#include "cli/bench/moe_contest.h"
#include "penstock/core/error.h"

namespace penstock::bench {

std::vector<double> cuda_moe_errors(const TeamHandle&, int, const MoeProblem&) {
  throw_error(ErrorKind::kUnsupported,
              "this build has no CUDA back end; build with PENSTOCK_CUDA=ON");
}

}  // namespace penstock::bench
