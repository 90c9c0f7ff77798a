// Random prepared weights of the decode layer, made on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "penstock/ops/decode_layer/plan.h"

namespace penstock::decode {

// Fills one rank's prepared weights (weight_layout(shape).bytes at `out`): E4M3 codes over five
// binades with random signs, scales that keep unit variance, gains of 1, routers of unit logits.
cudaError_t fill_decode_weights(const DecodeShape& shape, unsigned char* out, std::uint32_t seed,
                                cudaStream_t stream);

// rows cache rows of 656 bytes, `stride` bytes apart in pages of 64.
cudaError_t fill_decode_cache(unsigned char* out, std::int64_t rows, std::int64_t page_stride,
                              std::uint32_t seed, cudaStream_t stream);

}  // namespace penstock::decode
