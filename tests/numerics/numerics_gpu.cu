// The number formats on the device: see numerics_gpu.h.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include "numerics/numerics_gpu.h"

namespace penstock::gpu_test {
namespace {

__global__ void convert_kernel(const float* x, std::int64_t count, Conversions* out) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = convert_all(x[i]);
}

__global__ void decode_kernel(Decoded* out) {
  const std::uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  const auto code = static_cast<std::uint8_t>(i);
  if (i < 256) {
    out->e4m3[i] = float_bits(E4M3{code}.to_float());
    out->e5m2[i] = float_bits(E5M2{code}.to_float());
    out->e8m0[i] = float_bits(E8M0{code}.to_float());
  }
  if (i < 16) out->e2m1[i] = float_bits(E2M1{code}.to_float());
  if (i < (1u << 16)) out->bf16[i] = float_bits(Bf16{static_cast<std::uint16_t>(i)}.to_float());
}

__global__ void decode_hardware_kernel(Decoded* out) {
  const auto code = static_cast<std::uint8_t>(threadIdx.x);
  out->e4m3[code] = float_bits(__half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))));
  out->e5m2[code] = float_bits(__half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E5M2))));
}

__global__ void divide_kernel(const float* x, const float* scale, std::int64_t count, E4M3* out) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = quantise_fp8(x[i], scale[i]);
}

__global__ void blocks_kernel(const float* x, int rows, MxRow* out) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row < rows) {
    convert_row(x + static_cast<std::int64_t>(row) * MxRow::kColumns, out[row]);
  }
}

__device__ void compare(Mismatches* result, Check check, std::uint32_t bits, bool equal) {
  if (equal) return;
  atomicAdd(&result->count[check], 1ull);
  atomicMin(&result->smallest_bits[check], bits);
}

__global__ void sweep_kernel(Mismatches* result) {
  const std::uint64_t stride = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t i = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < (std::uint64_t{1} << 32); i += stride) {
    const auto bits = static_cast<std::uint32_t>(i);
    const float x = float_from_bits(bits);
    const bool nan = (bits & 0x7FFFFFFFu) > kF32InfBits;

    compare(result, kBf16Hardware, bits,
            Bf16::from_float(x).bits == __bfloat16_as_ushort(__float2bfloat16_rn(x)));
    compare(result, kE4M3Hardware, bits,
            E4M3::from_float(x).bits == __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
    compare(result, nan ? kE5M2HardwareNan : kE5M2Hardware, bits,
            E5M2::from_float(x).bits == __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2));

    // CUDA's header keeps sign and payload of a NaN where Penstock writes 0x7F: there any NaN will
    // do.
    const E4M3 e4m3 = E4M3::from_float_no_saturate(x);
    const E4M3 e4m3_header{__nv_cvt_float_to_fp8(x, __NV_NOSAT, __NV_E4M3)};
    compare(result, kE4M3NoSaturateHeader, bits,
            e4m3.is_nan() ? e4m3_header.is_nan() : e4m3 == e4m3_header);
    const E5M2 e5m2 = E5M2::from_float_no_saturate(x);
    const E5M2 e5m2_header{__nv_cvt_float_to_fp8(x, __NV_NOSAT, __NV_E5M2)};
    compare(result, kE5M2NoSaturateHeader, bits,
            e5m2.is_nan() ? e5m2_header.is_nan() : e5m2 == e5m2_header);

    compare(result, kE2M1Header, bits,
            E2M1::from_float(x).bits == __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest));
    compare(result, kE8M0CeilHeader, bits,
            E8M0::from_float_ceil(x).bits ==
                __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundPosInf));
    compare(
        result, kE8M0FloorHeader, bits,
        E8M0::from_float_floor(x).bits == __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundZero));
  }
}

}  // namespace

cudaError_t launch_convert(const float* x, std::int64_t count, Conversions* out) {
  convert_kernel<<<static_cast<unsigned>((count + 255) / 256), 256>>>(x, count, out);
  return cudaGetLastError();
}
cudaError_t launch_decode(Decoded* out) {
  decode_kernel<<<256, 256>>>(out);
  return cudaGetLastError();
}
cudaError_t launch_decode_hardware(Decoded* out) {
  decode_hardware_kernel<<<1, 256>>>(out);
  return cudaGetLastError();
}
cudaError_t launch_divide(const float* x, const float* scale, std::int64_t count, E4M3* out) {
  divide_kernel<<<static_cast<unsigned>((count + 255) / 256), 256>>>(x, scale, count, out);
  return cudaGetLastError();
}
cudaError_t launch_blocks(const float* x, int rows, MxRow* out) {
  blocks_kernel<<<(rows + 31) / 32, 32>>>(x, rows, out);
  return cudaGetLastError();
}
cudaError_t launch_sweep(Mismatches* result) {
  sweep_kernel<<<132 * 8, 256>>>(result);
  return cudaGetLastError();
}

}  // namespace penstock::gpu_test
