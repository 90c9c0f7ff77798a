// Ranks on GPUs for the operator's tests: one thread a rank, sharing a GPU or spread over all.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "core/cuda/check.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/memory.h"
#include "ops/moe_stage2/cuda/operator.h"
#include "penstock/ops/moe_stage2/moe_stage2.h"

namespace penstock::moe_stage2 {

inline constexpr std::chrono::seconds kDeadline{5};

// Before gtest_main makes the first CUDA call.
[[maybe_unused]] inline const bool kPrepared = [] {
  cuda::prepare_process();
  return true;
}();

struct ScopedStream {
  ScopedStream() { PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~ScopedStream() { (void)cudaStreamDestroy(handle); }
  void wait() const { PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(handle)); }
  Stream get() const { return {handle}; }
  cudaStream_t handle = nullptr;
};

struct Variant {
  const char* name;
  TransportKind transport;
  bool fuse;
};
inline constexpr Variant kVariants[] = {
    {"copy_engine", TransportKind::kCopyEngine, true},
    {"sm", TransportKind::kSm, true},
    {"direct", TransportKind::kDirect, true},
    {"unfused", TransportKind::kCopyEngine, false},
    {"unfused_sm", TransportKind::kSm, false},
};

struct Placement {
  int ranks;
  bool spread;
};
inline std::string name_of(const testing::TestParamInfo<Placement>& info) {
  return std::to_string(info.param.ranks) + (info.param.spread ? "RanksSpread" : "RanksOneGpu");
}

inline Shape make_shape(int ranks, int local, int top_k, std::int64_t tokens, double slack,
                        WireFormat wire) {
  Shape s;
  s.ranks = ranks;
  s.experts = ranks * local;
  s.top_k = top_k;
  s.hidden = 384;  // two column tiles, the second half empty
  s.intermediate = 256;
  s.max_tokens_per_rank = tokens;
  s.row_slack = slack;
  s.wire = wire;
  return s;
}

inline Options options_of(const Variant& v, int tiles_per_chunk = 2) {
  Options o;
  o.transport = v.transport;
  o.fuse = v.fuse;
  o.tiles_per_chunk = tiles_per_chunk;
  o.copy_ctas = 2;
  return o;
}

class GpuTeamTest : public testing::TestWithParam<Placement> {
 protected:
  void SetUp() override {
    ASSERT_GT(cuda::device_count(), 0) << cuda::unavailable_reason();
    if (GetParam().spread && cuda::device_count() < 2) GTEST_SKIP() << "one GPU only";
  }
  static int device_of(int rank) { return GetParam().spread ? rank % cuda::device_count() : 0; }
  static int ranks() { return GetParam().ranks; }
  // body(team, device rank) on one thread a rank.
  static void run(
      const std::function<void(const TeamHandle&, const std::shared_ptr<cuda::DeviceRank>&)>& body,
      std::chrono::nanoseconds deadline = kDeadline) {
    run_local_team(ranks(),
                   [&](const TeamHandle& team) {
                     const int device = device_of(team->rank());
                     const cuda::ScopedDevice scope(device);
                     const auto rank = cuda::DeviceRank::create(team, device);
                     body(team, rank);
                     team->barrier();
                   },
                   {.deadline = deadline});
  }
};

inline auto placements() {
  return testing::Values(Placement{1, false}, Placement{2, false}, Placement{4, false},
                         Placement{8, false}, Placement{2, true}, Placement{8, true});
}

}  // namespace penstock::moe_stage2
