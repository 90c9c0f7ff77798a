// W2 in MXFP4, repacked once at load into the E4M3 weights and 128 x 128 block scales that the GEMM
// of both back ends takes.
#pragma once

#include <cstdint>
#include <span>

#include "penstock/numerics/formats.h"

namespace penstock::moe_stage2 {

// pairs [experts, hidden, intermediate / 2]: two E2M1 a byte, the element of even k in the low
// nibble; scales [experts, hidden, intermediate / 32] E8M0, one per 32 elements along K (OCP MX).
// weight [experts, hidden, intermediate] E4M3 and weight_scales [experts, hidden / 128,
// intermediate / 128] f32 are written: each block's scale is a power of two 2^b, each element e2m1
// * 2^(e - b) with its group's exponent e, and weight * weight_scales is the MXFP4 value exactly,
// signs of zeros included; a group whose scale is NaN becomes NaNs. So results are those of the
// MXFP4 weights by definition, and neither kernel nor CPU operator knows of the format.
//
// b is chosen so that the block's largest element just fits E4M3 (448), which leaves room for
// groups up to 14 exponents below it. A block that spans more is refused: Error(kUnsupported)
// naming expert, rows, columns and the exponents; nothing is promised of the outputs then.
// InvalidArgument: hidden or intermediate no multiple of 128, or a span of another size. Host
// memory; one pass, deterministic. Costs a byte a weight instead of 17 / 32.
void repack_mxfp4(std::span<const std::uint8_t> pairs, std::span<const E8M0> scales,
                  std::int64_t experts, std::int32_t hidden, std::int32_t intermediate,
                  std::span<E4M3> weight, std::span<float> weight_scales);

}  // namespace penstock::moe_stage2
