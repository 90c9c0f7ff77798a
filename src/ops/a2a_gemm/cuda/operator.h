// The CUDA operator on a rank that exists already. Internal: models, tests and benchmarks that hold
// several operators on one DeviceRank.
#pragma once

#include <memory>

#include "fabric/cuda/device_rank.h"
#include "penstock/ops/a2a_gemm/a2a_gemm.h"

namespace penstock::a2a_gemm {

// Collective. As the public factory; options.device is ignored, the rank has one.
std::unique_ptr<A2aGemm> make_cuda_a2a_gemm(std::shared_ptr<cuda::DeviceRank> rank,
                                            const Shape& shape, const Options& options = {});

}  // namespace penstock::a2a_gemm
