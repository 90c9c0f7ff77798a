#include "ops/sm90/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/cuda/check.h"
#include "penstock/core/error.h"

namespace penstock::sm90 {
namespace {

// The driver's encoder, found at run time: the binary has to start without a driver.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  PENSTOCK_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                       cudaEnableDefault, &found));
  require(found == cudaDriverEntryPointSuccess && entry != nullptr, ErrorKind::kBackend, [] {
    return std::string(
        "the driver has no cuTensorMapEncodeTiled; a driver for CUDA 12.0 or newer is needed");
  });
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
}

}  // namespace

CUtensorMap make_byte_map(const void* base, std::initializer_list<std::uint64_t> sizes,
                          std::initializer_list<std::uint32_t> box) {
  const PFN_cuTensorMapEncodeTiled_v12000 encode = encoder();
  std::array<std::uint64_t, 5> size{};
  std::array<std::uint64_t, 4> stride{};
  std::array<std::uint32_t, 5> boxes{};
  std::array<std::uint32_t, 5> steps{1, 1, 1, 1, 1};
  std::copy(sizes.begin(), sizes.end(), size.begin());
  std::copy(box.begin(), box.end(), boxes.begin());
  std::uint64_t bytes = 1;
  for (std::size_t i = 0; i + 1 < sizes.size(); ++i) stride[i] = bytes *= size[i];
  CUtensorMap map;
  const CUresult status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, static_cast<cuuint32_t>(sizes.size()),
             const_cast<void*>(base), size.data(), stride.data(), boxes.data(), steps.data(),
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(status == CUDA_SUCCESS, ErrorKind::kBackend, [&] {
    return fmt::format("cuTensorMapEncodeTiled refused a {}-dimensional map at {} with code {}",
                       sizes.size(), base, static_cast<int>(status));
  });
  return map;
}

}  // namespace penstock::sm90
