// What numerics_gpu.cu offers to numerics_gpu_test.cpp: the number formats run on the device. All
// pointers are device memory; launches go to the legacy default stream and return the launch's
// status.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "penstock/numerics/block.h"

namespace penstock::gpu_test {

// Everything that one f32 converts to. The same function fills it on host and device.
struct Conversions {
  Bf16 bf16;
  E4M3 e4m3, e4m3_no_saturate;
  E5M2 e5m2, e5m2_no_saturate;
  E2M1 e2m1;
  E8M0 e8m0_ceil, e8m0_floor;
  // Scales with |x| as amax.
  E8M0 e4m3_ocp, e4m3_ceil, e2m1_ocp, e2m1_ceil, index;
  std::uint16_t padding;  // named, so that bytes may be compared
  std::uint32_t weight_scale_bits, activation_scale_bits;
};
static_assert(sizeof(Conversions) == 24);

PENSTOCK_HOST_DEVICE constexpr Conversions convert_all(float x) {
  const std::uint32_t amax = abs_bits(x);
  return Conversions{Bf16::from_float(x),
                     E4M3::from_float(x),
                     E4M3::from_float_no_saturate(x),
                     E5M2::from_float(x),
                     E5M2::from_float_no_saturate(x),
                     E2M1::from_float(x),
                     E8M0::from_float_ceil(x),
                     E8M0::from_float_floor(x),
                     mx_scale<E4M3>(amax, MxScaleRule::kOcpFloor),
                     mx_scale<E4M3>(amax, MxScaleRule::kCeil),
                     mx_scale<E2M1>(amax, MxScaleRule::kOcpFloor),
                     mx_scale<E2M1>(amax, MxScaleRule::kCeil),
                     ue8m0_index_scale(amax),
                     0,
                     float_bits(fp8_weight_scale(amax)),
                     float_bits(fp8_activation_scale(amax))};
}

// Every code of every format as f32 bits.
struct Decoded {
  std::uint32_t e4m3[256], e5m2[256], e8m0[256], e2m1[16];
  std::uint32_t bf16[1 << 16];
};

// One row of 32 * blocks columns in all MX forms.
struct MxRow {
  static constexpr int kBlocks = 9;
  static constexpr int kColumns = kBlocks * kMxBlockSize;
  std::uint8_t pairs[2][kColumns / 2];  // MXFP4 by kOcpFloor, kCeil
  E8M0 pair_scales[2][kBlocks];
  E4M3 q[2][kColumns];  // MXFP8 by kOcpFloor, kCeil
  E8M0 q_scales[2][kBlocks];
  std::uint8_t wire[kColumns + kBlocks];
  E4M3 activation[kColumns];
  std::uint32_t activation_scale_bits[3];
  std::uint32_t dequantised_bits[2][kColumns];  // of q
};

// Our conversions that CUDA has too, in hardware on sm_90 or in its headers.
enum Check : int {
  kBf16Hardware,  // cvt.rn.bf16.f32, NaN included
  kE4M3Hardware,  // cvt.rn.satfinite.e4m3x2.f32, NaN included
  kE5M2Hardware,  // cvt.rn.satfinite.e5m2x2.f32
  kE5M2HardwareNan,
  kE4M3NoSaturateHeader,  // the rest: cuda_fp8.h and cuda_fp4.h
  kE5M2NoSaturateHeader,
  kE2M1Header,
  kE8M0CeilHeader,
  kE8M0FloorHeader,
  kChecks
};
struct Mismatches {
  unsigned long long count[kChecks];
  std::uint32_t smallest_bits[kChecks];  // the smallest differing input, where count > 0
};

// x [count] -> out [count].
cudaError_t launch_convert(const float* x, std::int64_t count, Conversions* out);
cudaError_t launch_decode(Decoded* out);
// The same by the hardware's e4m3x2 / e5m2x2 -> f16x2 and f16 -> f32; fills e4m3 and e5m2 only.
cudaError_t launch_decode_hardware(Decoded* out);
// quantise_fp8(x[i], scale[i]) -> out[i], i < count.
cudaError_t launch_divide(const float* x, const float* scale, std::int64_t count, E4M3* out);
// x [rows, MxRow::kColumns] -> out [rows].
cudaError_t launch_blocks(const float* x, int rows, MxRow* out);
// All 2^32 inputs against CUDA's conversions; `result` starts with counts 0 and smallest_bits ~0.
cudaError_t launch_sweep(Mismatches* result);

// One row of launch_blocks, for host and device.
PENSTOCK_HOST_DEVICE constexpr void convert_row(const float* x, MxRow& out) {
  for (int r = 0; r < 2; ++r) {
    const MxScaleRule rule = r == 0 ? MxScaleRule::kOcpFloor : MxScaleRule::kCeil;
    for (int b = 0; b < MxRow::kBlocks; ++b) {
      const int at = b * kMxBlockSize;
      out.pair_scales[r][b] = quantise_mxfp4_block(x + at, rule, out.pairs[r] + at / 2);
      out.q_scales[r][b] = quantise_mxfp8_block(x + at, rule, out.q[r] + at);
      for (int i = at; i < at + kMxBlockSize; ++i) {
        out.dequantised_bits[r][i] = float_bits(dequantise_mx(out.q[r][i], out.q_scales[r][b]));
      }
    }
  }
  write_wire_row(x, MxRow::kColumns, out.wire);
  for (int g = 0; g < 3; ++g) {
    const int begin = g * kFp8BlockSize;
    const int width =
        MxRow::kColumns - begin < kFp8BlockSize ? MxRow::kColumns - begin : kFp8BlockSize;
    const float scale = fp8_activation_scale(amax_bits(x + begin, width));
    out.activation_scale_bits[g] = float_bits(scale);
    for (int i = begin; i < begin + width; ++i) out.activation[i] = quantise_fp8(x[i], scale);
  }
}

}  // namespace penstock::gpu_test
