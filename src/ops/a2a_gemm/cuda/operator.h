// The CUDA operator on a rank that exists already. Internal: models, tests and benchmarks that hold
// several operators on one DeviceRank.
#pragma once

#include <memory>

#include "fabric/cuda/device_rank.h"
#include "penstock/ops/a2a_gemm/a2a_gemm.h"
#include "penstock/ops/a2a_gemm/mirror.h"

namespace penstock::a2a_gemm {

// Collective. As the public factory; options.device is ignored, the rank has one.
std::unique_ptr<A2aGemm> make_cuda_a2a_gemm(std::shared_ptr<cuda::DeviceRank> rank,
                                            const Shape& shape, const Options& options = {});
std::unique_ptr<GemmA2a> make_cuda_gemm_a2a(std::shared_ptr<cuda::DeviceRank> rank,
                                            const Shape& shape, const Options& options = {});

// What both operators settle. CTAs that the rank's GEMM may have beside `copy_ctas` of SMs that
// copy: all SMs of its share but those, and but a few where ranks share a GPU, since copies inside
// a GPU may be done by SMs. `asked` is Options::copy_ctas. Throws InvalidArgument, Unsupported.
std::int32_t gemm_ctas(const cuda::DeviceRank& rank, std::int32_t copy_ctas, std::int32_t asked,
                       const char* what);
// Whether other ranks have a share of this rank's GPU.
bool shares_gpu(const cuda::DeviceRank& rank);
// Throws InvalidArgument unless x, w, out (fp8: x_scales) lie on 16 bytes.
void check_alignment(const Operands& o, bool scales, const char* what);
// Collective. Options::device, -1 resolved; Unsupported on every rank where one has no GPU.
int settle_device(Team& team, int device, const char* what);

}  // namespace penstock::a2a_gemm
