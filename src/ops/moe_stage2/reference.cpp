#include "penstock/ops/moe_stage2/reference.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "penstock/numerics/block.h"

namespace penstock::moe_stage2 {
namespace {

// Exact: each product is a multiple of 2^-18 below 2^18, and 128 of them need 43 bits.
double block_sum(const GemmOperands& op, std::int64_t row, std::int32_t expert, std::int32_t column,
                 std::int32_t block) {
  const E4M3* a = op.act + row * op.intermediate + block * kScaleBlock;
  const E4M3* w = op.weight +
                  (static_cast<std::int64_t>(expert) * op.hidden + column) * op.intermediate +
                  block * kScaleBlock;
  double sum = 0.0;
  for (int k = 0; k < kScaleBlock; ++k) {
    sum += static_cast<double>(a[k].to_float()) * static_cast<double>(w[k].to_float());
  }
  return sum;
}

float act_scale(const GemmOperands& op, std::int64_t row, std::int32_t block) {
  return op.act_scales[block * op.act_scale_stride + row];
}

float weight_scale(const GemmOperands& op, std::int32_t expert, std::int32_t column,
                   std::int32_t block) {
  const std::int64_t scale_row =
      static_cast<std::int64_t>(expert) * (op.hidden / kScaleBlock) + column / kScaleBlock;
  return op.weight_scales[scale_row * (op.intermediate / kScaleBlock) + block];
}

}  // namespace

double gemm_element_f64(const GemmOperands& op, std::int64_t row, std::int32_t expert,
                        std::int32_t column) {
  double sum = 0.0;
  for (std::int32_t b = 0; b < op.intermediate / kScaleBlock; ++b) {
    sum += block_sum(op, row, expert, column, b) * static_cast<double>(act_scale(op, row, b)) *
           static_cast<double>(weight_scale(op, expert, column, b));
  }
  return sum;
}

float gemm_element_f32(const GemmOperands& op, std::int64_t row, std::int32_t expert,
                       std::int32_t column) {
  float sum = 0.0f;
  for (std::int32_t b = 0; b < op.intermediate / kScaleBlock; ++b) {
    const auto block = static_cast<float>(block_sum(op, row, expert, column, b));
    sum = std::fmaf(act_scale(op, row, b) * weight_scale(op, expert, column, b), block, sum);
  }
  return sum;
}

void write_row(const GemmOperands& op, std::int64_t row, std::int32_t expert, WireFormat wire,
               unsigned char* bytes) {
  std::vector<float> y(static_cast<std::size_t>(op.hidden));
  for (std::int32_t c = 0; c < op.hidden; ++c) {
    y[static_cast<std::size_t>(c)] = gemm_element_f32(op, row, expert, c);
  }
  if (wire == WireFormat::kFp8) {
    write_wire_row(y.data(), op.hidden, bytes);
    return;
  }
  for (std::size_t c = 0; c < y.size(); ++c) {
    const Bf16 value = Bf16::from_float(y[c]);
    std::memcpy(bytes + 2 * c, &value, sizeof(value));
  }
}

float read_row(const unsigned char* bytes, std::int32_t hidden, WireFormat wire,
               std::int32_t column) {
  if (wire == WireFormat::kFp8) return read_wire_element(bytes, hidden, column);
  Bf16 value{};
  std::memcpy(&value, bytes + 2 * static_cast<std::int64_t>(column), sizeof(value));
  return value.to_float();
}

Bf16 combine_element(const unsigned char* const* rows, const float* weight, std::int32_t top_k,
                     std::int32_t hidden, WireFormat wire, std::int32_t column) {
  float sum = 0.0f;
  for (std::int32_t k = 0; k < top_k; ++k) {
    if (rows[k] == nullptr) continue;
    if (wire == WireFormat::kFp8) {
      const float scale = E8M0{rows[k][wire_scale_offset(hidden, column)]}.to_float();
      sum = std::fmaf(weight[k] * scale, E4M3{rows[k][column]}.to_float(), sum);
    } else {
      sum = std::fmaf(weight[k], read_row(rows[k], hidden, wire, column), sum);
    }
  }
  return Bf16::from_float(sum);
}

}  // namespace penstock::moe_stage2
