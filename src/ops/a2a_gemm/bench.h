// The operator on GPUs, timed beside its floors and baselines: what `penstock bench a2a-gemm` and
// the benchmark programs run. Plain C++; a build without CUDA has the same function, which says so.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/fabric/team.h"
#include "penstock/ops/a2a_gemm/a2a_gemm.h"

namespace penstock::a2a_gemm {

// What is timed. Of the mirror: the GEMM first, then the exchange.
enum class BenchVariant : std::uint8_t {
  kCopyEngine,  // whole calls: the gate in the GEMM, copies by copy engine,
  kSm,          // copies by a few SMs,
  kArrival,     // copies by copy engine, chunks in the order in which they come,
  kDirect,      // mirror only: stored by the epilogue,
  kAuto,        // what Fuse::kAuto takes,
  kUnfused,     // copies by copy engine, a kernel that waits for all of them, then the GEMM,
  kNccl,        // NCCL's all-to-all, then the GEMM,
  kNcclDense,   // NCCL's all-to-all, then the library's GEMM over as many bytes
  kGemm,        // floors: the GEMM over chunks that are there,
  kDense,       // the library's GEMM
};
inline constexpr int kBenchVariants = 10;
std::string_view to_string(BenchVariant variant);
// Whether it computes the operator's result from the operands of all ranks.
bool is_whole(BenchVariant variant);

// A library's GEMM d [m, n] bf16 = a [m, k] x b [n, k]^T as the baseline; scales as in Operands,
// one matrix. Its `a` has K of all sources side by side, which no all-to-all delivers: timing only,
// to its favour, as the rearrangement is left out.
class DenseBaseline {
 public:
  virtual ~DenseBaseline() = default;
  virtual void run(const void* a, const float* a_scales, const void* b, const float* b_scales,
                   void* d, Stream stream) = 0;
};
using DenseFactory = std::function<std::unique_ptr<DenseBaseline>(std::int64_t m, std::int64_t n,
                                                                  std::int64_t k, Format format)>;

struct BenchOptions {
  Shape shape;
  std::vector<BenchVariant> variants;  // empty: all
  int rounds = 15;
  int warmup = 3;
  bool graph = false;   // whole calls are captured, two a graph, and replayed
  bool mirror = false;  // the GEMM whose result leaves (mirror.h) instead
  std::int32_t row_block_rows = 0;
  std::int32_t copy_ctas = 8;
  std::uint64_t seed = 2026;
  std::string nccl = "libnccl.so.2";
  DenseFactory dense;  // none: the variants that need it are left out
};

struct BenchTiming {
  BenchVariant variant = BenchVariant::kGemm;
  std::vector<double> us;  // of one call, one a round: the slowest rank's
};

struct BenchResult {
  std::vector<BenchTiming> timings;  // without those that could not run
  Config config;                     // rank 0's
  double flop = 0.0;                 // of the rank with most rows
  double wire_bytes = 0.0;           // it receives
  std::int64_t differing = 0;        // elements of `out` over all ranks, against the first variant
  std::string compared;              // names of the variants that were compared
  std::string left_out;              // which variants did not run, and why
  std::string nccl;                  // version
  std::string machine;
  std::string driver;
  bool shared_gpu = false;
};

// Collective. This rank on `device`. Rounds are interleaved: in each, every variant once, starting
// with another one each time; ranks start a variant together by a barrier on their devices, behind
// a scrub of the L2. Operands are random. Throws what the operator throws.
BenchResult gpu_bench_a2a_gemm(const TeamHandle& team, int device, const BenchOptions& options);

}  // namespace penstock::a2a_gemm
