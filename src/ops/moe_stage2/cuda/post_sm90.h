// How finished chunks of the grouped GEMM leave for their ranks. What the kernel gets by value;
// post_sm90.cuh has the device side.
#pragma once

#include <cstddef>
#include <cstdint>

#include "penstock/fabric/device_views.h"
#include "penstock/ops/moe_stage2/layout.h"
#include "penstock/ops/moe_stage2/plan.h"

namespace penstock::moe_stage2 {

// Who moves the rows of a chunk once its last tile is written.
enum class PostKind : std::int32_t {
  kNone,        // nobody here: copy CTAs look at the chunk counters, or a later kernel posts
  kCopyEngine,  // descriptors into the proxy's ring, then a signal behind the last chunk
  kDirect,      // the epilogue stored the rows at their peer; the last chunk signals
};

struct ChunkPost {
  PostKind kind = PostKind::kNone;
  std::int32_t ranks = 0;
  std::int32_t rank = -1;
  GuardView guard;
  WindowView window;
  RingView ring;  // kCopyEngine only
  WindowIndex index;
  const std::int32_t* prefix = nullptr;  // the plan's, see PlanOutputs
  const std::uint64_t* epoch = nullptr;  // of this call, device memory
  const std::uint32_t* stop = nullptr;   // not 0: this call has failed, nothing is announced
  std::uint32_t* chunks_done = nullptr;  // 0 at launch
};

}  // namespace penstock::moe_stage2
