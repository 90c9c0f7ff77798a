// A kernel that holds a stream up.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace penstock::decode::test {

// Waits from 0 to `most_ns`, another time at every call: *calls, in device memory, counts them.
cudaError_t launch_delay(std::uint32_t* calls, std::uint32_t most_ns, cudaStream_t stream);

}  // namespace penstock::decode::test
