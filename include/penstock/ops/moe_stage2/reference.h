// moe_stage2's oracle: plain loops over the operands, in f64, and a twin of the device's f32 steps.
#pragma once

#include <cstdint>

#include "penstock/numerics/formats.h"
#include "penstock/ops/moe_stage2/plan.h"
#include "penstock/ops/moe_stage2/shape.h"

namespace penstock::moe_stage2 {

// Operands of the down projection on the host, laid out as the kernels take them.
struct GemmOperands {
  const E4M3* act = nullptr;             // [rows, intermediate]
  const float* act_scales = nullptr;     // [intermediate / 128, act_scale_stride]
  std::int64_t act_scale_stride = 0;     // rows
  const E4M3* weight = nullptr;          // [experts, hidden, intermediate]
  const float* weight_scales = nullptr;  // [experts, hidden / 128, intermediate / 128]
  std::int32_t hidden = 0;
  std::int32_t intermediate = 0;
};

// y[row, column] = sum over k of act * act_scale * weight * weight_scale in f64: products and sums
// are exact to 2^-53 of the largest term.
double gemm_element_f64(const GemmOperands& op, std::int64_t row, std::int32_t expert,
                        std::int32_t column);

// The kernels' steps in f32: each block of 128 products summed, rounded once to f32, then sum =
// fma(act_scale * weight_scale, block, sum). Tensor cores align and truncate inside a block, so
// this twin equals the device bit for bit where every block's partial sums fit their accumulator
// (about 14 bits below the largest product): small integers, for example. Elsewhere it is within
// the error bound of docs/moe-stage2.md.
float gemm_element_f32(const GemmOperands& op, std::int64_t row, std::int32_t expert,
                       std::int32_t column);

// One row of y, f32 steps as above, as the wire bytes that leave the epilogue. `bytes` has
// wire_row_bytes(); bytes past the format's own (alignment) are not touched.
void write_row(const GemmOperands& op, std::int64_t row, std::int32_t expert, WireFormat wire,
               unsigned char* bytes);

// Column `column` of a wire row, exactly.
float read_row(const unsigned char* bytes, std::int32_t hidden, WireFormat wire,
               std::int32_t column);

// The combine: bit for bit what the kernels write, in slot order sum = fma(weight, y, sum), on the
// fp8 wire fma(weight * 2^e, element, sum). rows [top_k] are wire rows, null where a slot has none.
Bf16 combine_element(const unsigned char* const* rows, const float* weight, std::int32_t top_k,
                     std::int32_t hidden, WireFormat wire, std::int32_t column);

}  // namespace penstock::moe_stage2
