// The mirror of a2a_gemm: a GEMM whose result leaves by all-to-all, piece by piece as it is
// computed. Sequence-parallel attention begins like this: every rank projects its rows, and rank d
// goes on with the heads d of all rows.
//
//   out_d [rows of all ranks, N]: rows of rank s = X_s [rows[s], K] x W[d] [N, K]^T
//
// The same Shape, read from the other side: rows[s] is what rank s holds, depth its K, columns what
// each destination gets. The same plan: in step j rank s computes for rank s - j and sends, its own
// part last, so that the wire is busy from the first piece on and the last ones travel under it.
#pragma once

#include <memory>

#include "penstock/ops/a2a_gemm/a2a_gemm.h"

namespace penstock::a2a_gemm {

// One rank's operator; as A2aGemm where nothing else is said.
class GemmA2a {
 public:
  virtual ~GemmA2a() = default;

  // Collective. Of Operands: x [rows of this rank, depth] with x_scales [scale_blocks,
  // x_scale_stride], x_scale_stride >= rows of this rank; w [ranks, columns, depth] (slab d is what
  // rank d gets); out [total_rows, columns] bf16, rows in rank order. Deterministic: every element
  // is one sum over K in a fixed order. On cuda the call only enqueues, may be captured, and leaves
  // two calls in flight, as A2aGemm::run(): device memory, 16-byte aligned.
  virtual void run(Stream stream, const Operands& operands) = 0;
  // cuda, as A2aGemm's; nothing on cpu.
  virtual void prepare(Stream stream) { (void)stream; }
  virtual void track(Stream stream) { (void)stream; }

  virtual const Shape& shape() const noexcept = 0;
  virtual const Layout& layout() const noexcept = 0;
  virtual TransportCounters counters() const noexcept = 0;
};

// The unfused result of `rank` from all ranks' operands; what the CPU operator returns, bit for
// bit.
void mirror_reference(const Shape& shape, std::int32_t rank, const Operands* all, void* out);

// Collective. Of Options: transport, fuse (kNever: everything is computed before anything leaves),
// row_block_rows, deadline, engine; kAuto fuses where there is more than one rank. Errors as
// make_cpu_a2a_gemm(); InvalidArgument for quantise_x and arrival order, which have no meaning
// here.
std::unique_ptr<GemmA2a> make_cpu_gemm_a2a(TeamHandle team, const Shape& shape,
                                           const Options& options = {});

// Collective. The same on the rank's GPU: the GEMM hands every piece over when its last tile is
// written, to the copy engine, to `copy_ctas` SMs beside it (sm), or by the stores of its epilogue
// (direct). Also throws Unsupported: no Hopper GPU, a build without CUDA.
std::unique_ptr<GemmA2a> make_cuda_gemm_a2a(TeamHandle team, const Shape& shape,
                                            const Options& options = {});

}  // namespace penstock::a2a_gemm
