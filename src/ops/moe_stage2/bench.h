// The operator on GPUs, timed beside its floors and baselines: what `penstock bench moe-stage2` and
// the benchmark programs run. Plain C++; a build without CUDA has the same function, which says so.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/fabric/team.h"
#include "penstock/fabric/transport.h"
#include "penstock/ops/moe_stage2/shape.h"

namespace penstock::moe_stage2 {

// What is timed. Each but the last three is a whole call: plan, GEMM, rows home, combine.
enum class StageVariant : std::uint8_t {
  kCopyEngine,
  kSm,
  kDirect,
  kUnfused,  // the same kernels, everything by copy engine behind the GEMM
  kNccl,     // the same plan and GEMM, NCCL's all-to-all of the same wire rows, the same combine;
             // row counts and inverse tables are given to it
  kGemm,     // floors, on local memory: the GEMM alone
  kCombine,
  kPlan,
};
inline constexpr int kStageVariants = 8;
std::string_view to_string(StageVariant variant);

struct StageBenchOptions {
  Shape shape;  // max_tokens_per_rank tokens on every rank; the same on every rank
  double remote_fraction = -1.0;       // of a token's slots; below 0: experts equally likely
  std::vector<StageVariant> variants;  // empty: all
  int rounds = 15;
  int warmup = 3;
  bool graph = false;  // whole calls are captured and replayed
  std::int32_t tiles_per_chunk = 0;
  std::int32_t copy_ctas = 0;  // 0: by the shape
  std::uint64_t seed = 2026;
  std::string nccl = "libnccl.so.2";
};

struct StageTiming {
  StageVariant variant = StageVariant::kGemm;
  std::vector<double> us;      // one a round: the slowest rank's
  TransportCounters per_call;  // rank 0's, of one call
};

struct StageBench {
  std::vector<StageTiming> timings;  // without those that could not run
  std::int64_t rows = 0;             // of rank 0's experts
  std::int64_t tiles = 0;
  std::int64_t sent_rows = 0;  // of these to peers
  std::int64_t spilled_rows = 0;
  double flop = 0;                  // of rank 0's GEMM, valid rows only
  double wire_bytes = 0;            // rank 0 sends
  double combine_bytes = 0;         // rank 0 reads and writes
  std::int64_t differing_rows = 0;  // of `out` over all ranks, each variant against the first
  std::string compared;             // names of the variants that were compared
  std::string nccl;                 // version, or why there is no such timing
  std::string machine;
  std::string driver;
  bool shared_gpu = false;
};

// Collective. This rank on `device`. Rounds are interleaved: in each, every variant once, in a
// random order of its own; ranks start a variant together by a barrier on their devices, behind
// a scrub of the L2. Operands are random E4M3 of deviation 100. Throws what the operator throws.
StageBench gpu_bench_stage2(const TeamHandle& team, int device, const StageBenchOptions& options);

}  // namespace penstock::moe_stage2
