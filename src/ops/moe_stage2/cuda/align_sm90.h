// A barrier of all ranks on the device, so that a measurement starts at the same time everywhere.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "penstock/fabric/device_views.h"
#include "penstock/fabric/region_table.h"

namespace penstock::moe_stage2 {

struct AlignShape {
  std::uint64_t ranks = 1;
};
inline constexpr std::uint64_t kAlignLineBytes = 128;
inline constexpr RegionTable<AlignShape, 1> kAlignTable{
    "align",
    {// [source] u64 epochs
     {"came", [](const AlignShape& s) { return s.ranks * kAlignLineBytes; }, kAlignLineBytes,
      Access::kAll, Access::kOwner}}};

struct AlignArgs {
  GuardView guard;
  WindowView window;
  std::uint64_t* epoch = nullptr;  // calls so far, device memory
};

// Ends on every rank within a flag's way of the last rank's coming.
cudaError_t launch_align_sm90(const AlignArgs& args, cudaStream_t stream);
cudaError_t load_align_sm90();

}  // namespace penstock::moe_stage2
