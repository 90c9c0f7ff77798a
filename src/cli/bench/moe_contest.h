// moe_stage2's contest: unfused, each transport, and the floors, on one back end.
#pragma once

#include <memory>
#include <vector>

#include "cli/bench/contest.h"
#include "cli/bench/moe_problem.h"
#include "cli/bench/trace.h"

namespace penstock::bench {

// Names of the variants. Operators carry their transport's.
inline constexpr const char* kGemmAlone = "gemm alone";
inline constexpr const char* kCombineAlone = "combine alone";
inline constexpr const char* kUnfused = "unfused";
inline constexpr const char* kUnfusedNccl = "unfused nccl";

struct MoeContestOptions {
  std::vector<TransportKind> transports{TransportKind::kCopyEngine, TransportKind::kSm,
                                        TransportKind::kDirect};
};

// Collective: one rank's side. Windows and operands of all variants are held at once. `gemm alone`
// computes this rank's rows into its own memory, `combine alone` reads rows of its own memory,
// `unfused` sends everything after the last tile by copy engine.
std::unique_ptr<Contestant> make_cpu_moe_contest(const TeamHandle& team, const MoeProblem& problem,
                                                 const MoeContestOptions& options);
// Collective: what happens when in one call of the CPU operator on `transport`, after one that
// warms up. Rank 0 gets the trace.
Trace trace_cpu_moe(const TeamHandle& team, const MoeProblem& problem, TransportKind transport);
// Host memory that one rank of it needs, bytes.
std::uint64_t cpu_moe_contest_bytes(const MoeProblem& problem, int rank,
                                    const MoeContestOptions& options);

// Collective: the relative error of the CUDA operator on each transport (by the number of its
// TransportKind), the worst rank's, against f64 over samples of the problem's results. Throws what
// the operator throws.
std::vector<double> cuda_moe_errors(const TeamHandle& team, int device, const MoeProblem& problem);

}  // namespace penstock::bench
