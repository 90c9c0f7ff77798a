// What the decode kernel takes, and how hosts start it. Plain data only: device code includes this.
#pragma once

#include <cstdint>

#include "penstock/core/fault_record.h"
#include "penstock/ops/decode_layer/plan.h"

namespace penstock::decode {

// One layer of a launch; an array of these lies in device memory.
struct LayerArguments {
  const std::uint8_t* weights;  // prepared, see WeightLayout
  std::uint8_t* kv;  // paged cache; row of slot n: kv + n / 64 * page_stride + n % 64 * row bytes
  std::int64_t page_stride;          // bytes, multiple of 16
  const std::int32_t* pick_offsets;  // [rows + 1]
  const std::int32_t* picks;         // global cache slots
};

// Stages as timeline and fault records name them.
enum DecodeStage : int {
  kStageInput = 0,
  kStageQkvA,
  kStageQB,
  kStageUk,
  kStageKv,
  kStageAttention,
  kStageUv,
  kStageO,
  kStageReduceAttention,
  kStagePostNorm,
  kStageRouter,
  kStageShared,
  kStageRouting,
  kStageUpGate,
  kStageMid,
  kStageDown,
  kStageReduceExperts,
  kStageCount
};
// Events of one CTA and layer: [stage] holds the SM's clock when the CTA left the stage.
inline constexpr int kTimelineEvents = kStageCount + 1;

// x / d for 0 <= x < 2^16 as one multiplication; d = 1 has no 32-bit reciprocal.
struct Divisor {
  std::uint32_t d = 1;
  std::uint32_t reciprocal = 0;
};
constexpr Divisor divisor(int d) {
  return {static_cast<std::uint32_t>(d),
          d == 1 ? 0U
                 : static_cast<std::uint32_t>(
                       (std::uint64_t{1} << 32) / static_cast<std::uint64_t>(d) + 1)};
}

struct DecodeArguments {
  DecodePlan plan;
  WeightLayout weights;
  KvFormat kv_format;
  bool self_loop;  // write all ranks' partials of the window oneself: one shard without its peers
  bool norm_topk;
  float eps, eps_latent, routed_scale;
  int layers;
  int row_begin;                   // of this launch within the step's pick offsets
  const LayerArguments* layer;     // [layers]
  const std::uint16_t* x_in;       // [rows, hidden] bf16
  std::uint16_t* x_out;            // [rows, hidden] bf16; may equal x_in
  const std::int32_t* positions;   // [rows]
  const std::int64_t* slots;       // [rows], -1: padding
  float frequency[kRope / 2];      // rope_frequency()
  std::uint8_t* boxes;             // 2 * box_packets * 16 B, zero before the first launch
  std::uint8_t* window;            // 2 * win_packets * 16 B, zero before the first launch
  std::uint8_t* peers[kMaxRanks];  // windows of all ranks as this GPU reaches them
  std::uint32_t* counter;          // [0] layers done so far, [1] CTAs at the end, [2] abort word
  FaultRecord* fault;
  std::uint64_t deadline_ns;
  std::int64_t* timeline;  // [layers, grid, kTimelineEvents] or null
  Divisor by_up_gate_tiles;
  // DecodeStall: CTA stall_cta (-1: all) waits stall_ns (0: no stall) before stage stall_stage.
  int stall_stage, stall_cta;
  std::uint64_t stall_ns;
};

// Registers, spills and limits of a kernel, for tests and reports.
struct KernelResources {
  int registers, local_bytes, max_threads;
};

// One kernel a row capacity. Enqueue one launch / read the kernel's resources; the cudaError_t as
// int.
int launch_decode_rows1_sm90(const DecodeArguments& arguments, void* stream);
int launch_decode_rows2_sm90(const DecodeArguments& arguments, void* stream);
int launch_decode_rows4_sm90(const DecodeArguments& arguments, void* stream);
int launch_decode_rows8_sm90(const DecodeArguments& arguments, void* stream);
int resources_decode_rows1_sm90(KernelResources* out);
int resources_decode_rows2_sm90(KernelResources* out);
int resources_decode_rows4_sm90(KernelResources* out);
int resources_decode_rows8_sm90(KernelResources* out);

// By the number of rows.
inline int launch_decode_sm90(const DecodeArguments& arguments, void* stream) {
  const int rows = arguments.plan.rows;
  return rows == 1   ? launch_decode_rows1_sm90(arguments, stream)
         : rows == 2 ? launch_decode_rows2_sm90(arguments, stream)
         : rows <= 4 ? launch_decode_rows4_sm90(arguments, stream)
                     : launch_decode_rows8_sm90(arguments, stream);
}
inline int decode_kernel_resources(int rows, KernelResources* out) {
  return rows == 1   ? resources_decode_rows1_sm90(out)
         : rows == 2 ? resources_decode_rows2_sm90(out)
         : rows <= 4 ? resources_decode_rows4_sm90(out)
                     : resources_decode_rows8_sm90(out);
}

}  // namespace penstock::decode
