// The CUDA back end as the self-test sees it.
#pragma once

#include <memory>

#include "fabric/cuda/device_rank.h"
#include "penstock/fabric/doctor.h"

namespace penstock::cuda {

// For the thread of `rank`, whose device must be current: device windows and all three transports.
// Patterns are written by kernels; receive() waits and compares in one kernel, so that data which
// come after their signal show. The functions keep `rank` alive.
FabricBackend fabric_backend(std::shared_ptr<DeviceRank> rank);

}  // namespace penstock::cuda
