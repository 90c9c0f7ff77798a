// a2a_gemm's contest: unfused, each transport fused, and the GEMM alone, on one back end.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cli/bench/contest.h"
#include "cli/bench/trace.h"
#include "cli/bench/values.h"
#include "ops/a2a_gemm/bench.h"
#include "penstock/ops/a2a_gemm/a2a_gemm.h"

namespace penstock::bench {

// The same on every rank. Values come from streams, as in MoeProblem.
struct A2aProblem {
  a2a_gemm::Shape shape;
  std::uint64_t seed = 1;
  std::int32_t row_block_rows = 0;  // 0: by the shape
  bool mirror = false;              // the GEMM whose result leaves; X: the first rows[rank] rows

  // [total rows, depth] of a rank and [ranks, columns, depth] of all: bf16 or E4M3 by the shape
  ValueStream x(int rank) const { return stream_of(seed, 16, rank); }
  ValueStream w() const { return stream_of(seed, 17, 0); }
  // FP8: [scale blocks, stride] and [ranks, column blocks, scale blocks]
  float x_scale(int rank, std::uint64_t i) const {
    return stream_of(seed, 18, rank).uniform(i, 0.005f, 0.02f);
  }
  float w_scale(std::uint64_t i) const { return stream_of(seed, 19, 0).uniform(i, 1e-4f, 4e-4f); }
};

// One rank's operands in host memory.
struct A2aHostOperands {
  A2aHostOperands(const A2aProblem& problem, int rank);
  a2a_gemm::Operands view(Bf16* out) const;

  a2a_gemm::Shape shape;
  std::int64_t scale_stride = 0;
  std::vector<std::byte> x, w;
  std::vector<float> x_scales, w_scales;
};

// Relative error, ||out - f64|| / ||f64||, over `samples` random elements of the rank's
// out [rows, columns] (mirror: of all ranks). 0 for a rank without rows. Computes other ranks'
// operands from the problem.
double sampled_error(const A2aProblem& problem, int rank, const std::vector<Bf16>& out,
                     int samples);

inline constexpr const char* kA2aGemmAlone = "gemm alone";
inline constexpr const char* kA2aUnfused = "unfused";
inline constexpr const char* kA2aAuto = "auto";

// Collective: one rank's side. `gemm alone` multiplies chunks that are there, `unfused` waits for
// all of them first, the transports' variants multiply as pieces arrive, `auto` fuses where the
// heuristics say so.
std::unique_ptr<Contestant> make_cpu_a2a_contest(const TeamHandle& team, const A2aProblem& problem);
// Collective: what happens when in one call of the CPU operator by copy engine, after one that
// warms up: arrivals of pieces and starts of the products that wait for them. Rank 0 gets the
// trace.
Trace trace_cpu_a2a(const TeamHandle& team, const A2aProblem& problem);
// Collective: the same of the CUDA operator: on each cluster's track its tiles, in them chunks and
// the waits for them.
Trace trace_cuda_a2a(const TeamHandle& team, int device, const A2aProblem& problem);
// Host memory that one rank of it needs, bytes.
std::uint64_t cpu_a2a_contest_bytes(const A2aProblem& problem);

// cuBLASLt's GEMM as the CUDA back end's baseline, from the library of that name or
// libcublasLt.so.13. Empty in a build without CUDA.
a2a_gemm::DenseFactory cublaslt_baseline(const std::string& library);

// Collective: the relative error of the CUDA operator by copy engine and by SMs, the worst rank's,
// against f64 over samples of the problem's results. Throws what the operator throws.
std::vector<double> cuda_a2a_errors(const TeamHandle& team, int device, const A2aProblem& problem);

}  // namespace penstock::bench
