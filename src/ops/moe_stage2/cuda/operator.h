// The CUDA operator on a rank that exists already. Internal: models, tests and benchmarks that hold
// several operators on one DeviceRank.
#pragma once

#include <memory>

#include "fabric/cuda/device_rank.h"
#include "penstock/ops/moe_stage2/moe_stage2.h"

namespace penstock::moe_stage2 {

// Collective. As the public factory; options.device is ignored, the rank has one.
std::unique_ptr<MoeStage2> make_cuda_moe_stage2(std::shared_ptr<cuda::DeviceRank> rank,
                                                const Shape& shape, const Options& options = {});

}  // namespace penstock::moe_stage2
