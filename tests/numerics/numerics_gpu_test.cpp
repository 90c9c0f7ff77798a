// The number formats on the device: bit for bit what the host computes, and for all 2^32 f32 inputs
// what CUDA's own conversions give.
#include "numerics/numerics_gpu.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "core/cuda/check.h"
#include "numerics/probes.h"

namespace penstock::gpu_test {
namespace {

// Device memory for `count` values of T.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    PENSTOCK_CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T)));
  }
  ~DeviceArray() { static_cast<void>(cudaFree(data_)); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  void set(const T* values) {
    PENSTOCK_CUDA_CHECK(cudaMemcpy(data_, values, count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  void clear() { PENSTOCK_CUDA_CHECK(cudaMemset(data_, 0, count_ * sizeof(T))); }
  std::vector<T> get() const {  // waits for the kernel before it
    std::vector<T> values(count_);
    PENSTOCK_CUDA_CHECK(
        cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  std::size_t count_;
  T* data_ = nullptr;
};

class NumericsGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = cuda::unavailable_reason();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};

template <typename T>
bool same_bytes(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

TEST_F(NumericsGpuTest, ConversionsEqualTheHosts) {
  const std::vector<float> x = probes::all_probes();
  DeviceArray<float> in(x.size());
  DeviceArray<Conversions> out(x.size());
  in.set(x.data());
  PENSTOCK_CUDA_CHECK(launch_convert(in.data(), static_cast<std::int64_t>(x.size()), out.data()));
  const std::vector<Conversions> device = out.get();
  int failures = 0;
  for (std::size_t i = 0; i < x.size() && failures < 5; ++i) {
    if (!same_bytes(device[i], convert_all(x[i]))) {
      ++failures;
      ADD_FAILURE() << "f32 bits 0x" << std::hex << float_bits(x[i]);
    }
  }
}

TEST_F(NumericsGpuTest, EveryCodeDecodesAsOnTheHost) {
  DeviceArray<Decoded> out(1);
  PENSTOCK_CUDA_CHECK(launch_decode(out.data()));
  const std::vector<Decoded> device = out.get();
  for (std::uint32_t i = 0; i < 256; ++i) {
    const auto code = static_cast<std::uint8_t>(i);
    EXPECT_EQ(device[0].e4m3[i], float_bits(E4M3{code}.to_float())) << i;
    EXPECT_EQ(device[0].e5m2[i], float_bits(E5M2{code}.to_float())) << i;
    EXPECT_EQ(device[0].e8m0[i], float_bits(E8M0{code}.to_float())) << i;
    if (i < 16) {
      EXPECT_EQ(device[0].e2m1[i], float_bits(E2M1{code}.to_float())) << i;
    }
  }
  for (std::uint32_t i = 0; i < (1u << 16); ++i) {
    ASSERT_EQ(device[0].bf16[i], i << 16);
  }
}

TEST_F(NumericsGpuTest, EveryFp8CodeDecodesAsInHardware) {
  DeviceArray<Decoded> out(1);
  out.clear();
  PENSTOCK_CUDA_CHECK(launch_decode_hardware(out.data()));
  const std::vector<Decoded> device = out.get();
  const auto is_nan = [](std::uint32_t bits) { return (bits & 0x7FFFFFFFu) > kF32InfBits; };
  for (std::uint32_t i = 0; i < 256; ++i) {
    const E4M3 e4m3{static_cast<std::uint8_t>(i)};
    const E5M2 e5m2{static_cast<std::uint8_t>(i)};
    if (e4m3.is_nan()) {
      EXPECT_TRUE(is_nan(device[0].e4m3[i])) << i;
    } else {
      EXPECT_EQ(device[0].e4m3[i], float_bits(e4m3.to_float())) << i;
    }
    if (e5m2.is_nan()) {
      EXPECT_TRUE(is_nan(device[0].e5m2[i])) << i;
    } else {
      EXPECT_EQ(device[0].e5m2[i], float_bits(e5m2.to_float())) << i;
    }
  }
}

TEST_F(NumericsGpuTest, DividesByTheScaleAsTheHostDoes) {
  std::vector<float> x;
  std::vector<float> scale;
  for (const probes::Quotient& quotient : probes::tie_quotients()) {
    x.push_back(quotient.x);
    scale.push_back(quotient.scale);
  }
  DeviceArray<float> x_in(x.size());
  DeviceArray<float> scale_in(x.size());
  DeviceArray<E4M3> out(x.size());
  x_in.set(x.data());
  scale_in.set(scale.data());
  PENSTOCK_CUDA_CHECK(
      launch_divide(x_in.data(), scale_in.data(), static_cast<std::int64_t>(x.size()), out.data()));
  const std::vector<E4M3> device = out.get();
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(device[i], quantise_fp8(x[i], scale[i])) << x[i] << " / " << scale[i];
  }
}

TEST_F(NumericsGpuTest, BlocksEqualTheHosts) {
  static_assert(MxRow::kColumns == probes::kColumns);
  const std::vector<float> x = probes::block_matrix();
  DeviceArray<float> in(x.size());
  DeviceArray<MxRow> out(probes::kRows);
  in.set(x.data());
  out.clear();  // padding bytes too, as in the host's value-initialised row
  PENSTOCK_CUDA_CHECK(launch_blocks(in.data(), probes::kRows, out.data()));
  const std::vector<MxRow> device = out.get();
  for (std::size_t row = 0; row < probes::kRows; ++row) {
    const auto host = std::make_unique<MxRow>();
    convert_row(x.data() + row * probes::kColumns, *host);
    EXPECT_TRUE(same_bytes(device[row].pairs, host->pairs)) << "MXFP4 codes, row " << row;
    EXPECT_TRUE(same_bytes(device[row].pair_scales, host->pair_scales)) << "row " << row;
    EXPECT_TRUE(same_bytes(device[row].q, host->q)) << "MXFP8 codes, row " << row;
    EXPECT_TRUE(same_bytes(device[row].q_scales, host->q_scales)) << "row " << row;
    EXPECT_TRUE(same_bytes(device[row].wire, host->wire)) << "wire, row " << row;
    EXPECT_TRUE(same_bytes(device[row].activation, host->activation)) << "row " << row;
    EXPECT_TRUE(same_bytes(device[row].activation_scale_bits, host->activation_scale_bits))
        << "row " << row;
    for (int r = 0; r < 2; ++r) {
      for (int i = 0; i < MxRow::kColumns; ++i) {
        const float a = float_from_bits(device[row].dequantised_bits[r][i]);
        const float b = float_from_bits(host->dequantised_bits[r][i]);
        // The payload of a NaN that arithmetic made is the machine's own.
        if (a != a && b != b) continue;
        EXPECT_EQ(float_bits(a), float_bits(b)) << "row " << row << ", column " << i;
      }
    }
  }
}

TEST_F(NumericsGpuTest, AllFloatsConvertAsInCuda) {
  const char* const names[kChecks] = {"Bf16, cvt.rn.bf16.f32",
                                      "E4M3, cvt.rn.satfinite.e4m3x2.f32",
                                      "E5M2, cvt.rn.satfinite.e5m2x2.f32, numbers",
                                      "E5M2, cvt.rn.satfinite.e5m2x2.f32, NaN",
                                      "E4M3 without saturation, cuda_fp8.h",
                                      "E5M2 without saturation, cuda_fp8.h",
                                      "E2M1, cuda_fp4.h",
                                      "E8M0 upward, cuda_fp8.h",
                                      "E8M0 downward, cuda_fp8.h"};
  DeviceArray<Mismatches> out(1);
  Mismatches start{};
  for (std::uint32_t& bits : start.smallest_bits) bits = ~0u;
  out.set(&start);
  PENSTOCK_CUDA_CHECK(launch_sweep(out.data()));
  const std::vector<Mismatches> result = out.get();
  for (int i = 0; i < kChecks; ++i) {
    EXPECT_EQ(result[0].count[i], 0u)
        << names[i] << ": first at f32 bits 0x" << std::hex << result[0].smallest_bits[i];
  }
}

}  // namespace
}  // namespace penstock::gpu_test
