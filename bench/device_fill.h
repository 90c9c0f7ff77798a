// Random operands made on the device, so that a benchmark does not upload gigabytes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace penstock::bench {

// count E4M3 from a normal distribution of deviation 100 (what a block scaled to amax 448 looks
// like). Equal seeds give equal bytes.
cudaError_t fill_e4m3_normal(void* out, std::size_t count, std::uint64_t seed, cudaStream_t stream);

// count f32, uniform in [low, high).
cudaError_t fill_uniform(float* out, std::size_t count, float low, float high, std::uint64_t seed,
                         cudaStream_t stream);

// rows wire rows of row_bytes: E4M3 payload as above, E8M0 scales of 2^-8 to 2^-5.
cudaError_t fill_wire_rows(unsigned char* out, std::size_t rows, std::int64_t row_bytes,
                           std::int32_t hidden, std::uint64_t seed, cudaStream_t stream);

// Reads `bytes` (a multiple of 16), and so leaves an L2 that is smaller full of lines that nobody
// has to write back.
cudaError_t read_all(const void* data, std::size_t bytes, cudaStream_t stream);

}  // namespace penstock::bench
