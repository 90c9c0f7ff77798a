#include "penstock/ops/decode_layer/decode_layer.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "core/cuda/check.h"
#include "ops/decode_layer/cuda/launch.h"
#include "penstock/core/env.h"
#include "penstock/core/error.h"

namespace penstock::decode {
namespace {

struct DeviceLimits {
  int sms;
  int smem;
};

DeviceLimits device_limits(const DecodeOptions& options) {
  cuda::require_sm90(options.device);
  DeviceLimits limits{};
  PENSTOCK_CUDA_CHECK(
      cudaDeviceGetAttribute(&limits.sms, cudaDevAttrMultiProcessorCount, options.device));
  PENSTOCK_CUDA_CHECK(cudaDeviceGetAttribute(&limits.smem, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                             options.device));
  require(options.sm_budget >= 0 && options.sm_budget <= limits.sms, ErrorKind::kInvalidArgument,
          [&] {
            return fmt::format("decode_layer: an SM budget of {}, device {} has {}",
                               options.sm_budget, options.device, limits.sms);
          });
  if (options.sm_budget > 0) limits.sms = options.sm_budget;
  return limits;
}

template <typename T>
T* allocate(std::int64_t count) {
  void* p = nullptr;
  const auto bytes = static_cast<std::size_t>(count) * sizeof(T);
  if (cudaMalloc(&p, bytes) != cudaSuccess) {
    cudaGetLastError();
    throw_error(ErrorKind::kResourceExhausted,
                fmt::format("decode_layer: {} bytes of device memory are not to be had", bytes));
  }
  return static_cast<T*>(p);
}

}  // namespace

struct DecodeLayer::State {
  DecodeShape shape;
  DecodeOptions options;
  std::vector<DecodePlan> plans;  // [rows - 1]
  int per_launch = 1;
  int present = 1;
  DecodeArguments arguments{};
  LayerArguments* table = nullptr;
  int layers = 0;
  int table_capacity = 0;
  std::int64_t timeline_capacity = 0;
  FaultRecord* fault = nullptr;  // pinned
  bool connected = false;

  ~State() {
    cudaFree(table);
    cudaFree(arguments.boxes);
    cudaFree(arguments.window);
    cudaFree(arguments.counter);
    cudaFree(arguments.timeline);
    cudaFreeHost(fault);
  }
};

DecodeLayer::DecodeLayer(const DecodeShape& shape, const DecodeOptions& options)
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.shape = shape;
  s.options = options;
  const DeviceLimits limits = device_limits(options);
  PENSTOCK_CUDA_CHECK(cudaSetDevice(options.device));
  s.per_launch = decode::rows_per_launch(shape, limits.sms, limits.smem);
  s.present = options.present == 0 ? shape.ranks : options.present;
  require(s.present > shape.rank && s.present <= shape.ranks &&
              !(options.self_loop && options.present != 0),
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format(
                "decode_layer: {} ranks present: rank {} of {} must be one of them, and self_loop "
                "is for a rank without any",
                options.present, shape.rank, shape.ranks);
          });
  for (int rows = 1; rows <= s.per_launch; ++rows) {
    s.plans.push_back(make_plan(shape, limits.sms, limits.smem, rows));
    s.plans.back().ranks = s.present;  // the kernel's all-reduces; shards and window are shape's
  }
  const DecodePlan& plan = s.plans[0];
  DecodeArguments& a = s.arguments;
  a.weights = weight_layout(shape);
  a.kv_format = shape.kv_format;
  a.self_loop = options.self_loop;
  // A dense layer's router weights are zeros, every score is 1/2: twice that is weight 1.
  a.norm_topk = shape.dense ? false : shape.norm_topk;
  a.eps = shape.eps;
  a.eps_latent = shape.eps_latent;
  a.routed_scale = shape.dense ? 2.0F : shape.routed_scale;
  for (int i = 0; i < kRope / 2; ++i) {
    a.frequency[i] = rope_frequency(shape.rope_theta, i);
  }
  const double deadline = options.deadline_s > 0 ? options.deadline_s : Env::deadline_s();
  a.deadline_ns = static_cast<std::uint64_t>(deadline * 1e9);
  a.by_up_gate_tiles = divisor(plan.up_gate.tiles);
  a.boxes = allocate<std::uint8_t>(2 * plan.box_packets * 16);
  a.window = allocate<std::uint8_t>(2 * plan.win_packets * 16);
  a.counter = allocate<std::uint32_t>(4);
  PENSTOCK_CUDA_CHECK(cudaHostAlloc(reinterpret_cast<void**>(&s.fault), sizeof(FaultRecord),
                                    cudaHostAllocMapped | cudaHostAllocPortable));
  PENSTOCK_CUDA_CHECK(cudaHostGetDevicePointer(reinterpret_cast<void**>(&a.fault), s.fault, 0));
  if (s.present == 1 || options.self_loop) {
    std::fill(std::begin(a.peers), std::end(a.peers), a.window);
    s.connected = true;
  }
  rearm();
}

DecodeLayer::~DecodeLayer() = default;

std::int64_t DecodeLayer::window_bytes(const DecodeShape& shape, const DecodeOptions& options) {
  const DeviceLimits limits = device_limits(options);
  return 2 * make_plan(shape, limits.sms, limits.smem, 1).win_packets * 16;
}

std::int64_t DecodeLayer::workspace_bytes(const DecodeShape& shape, const DecodeOptions& options) {
  const DeviceLimits limits = device_limits(options);
  return 2 * make_plan(shape, limits.sms, limits.smem, 1).box_packets * 16 + 16;
}

void* DecodeLayer::window() const noexcept { return state_->arguments.window; }

void DecodeLayer::connect(std::span<void* const> windows) {
  State& s = *state_;
  require(
      windows.size() == static_cast<std::size_t>(s.present) &&
          windows[static_cast<std::size_t>(s.shape.rank)] == s.arguments.window,
      ErrorKind::kInvalidArgument, [&] {
        return fmt::format(
            "decode_layer: connect() got {} windows; it takes those of all {} ranks, at place {} "
            "this rank's own",
            windows.size(), s.present, s.shape.rank);
      });
  for (std::size_t i = 0; i < windows.size(); ++i) {
    s.arguments.peers[i] = static_cast<std::uint8_t*>(windows[i]);
  }
  s.connected = true;
}

void DecodeLayer::set_layers(std::span<const LayerBinding> layers) {
  State& s = *state_;
  std::vector<LayerArguments> table;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerBinding& l = layers[i];
    const auto misaligned = [](const void* p, std::uintptr_t to) {
      return p == nullptr || reinterpret_cast<std::uintptr_t>(p) % to != 0;
    };
    require(!misaligned(l.weights, 256) && !misaligned(l.cache, 16) && l.page_stride % 16 == 0 &&
                l.page_stride >= kPageTokens * kv_row_bytes(s.shape.kv_format) &&
                l.pick_offsets != nullptr && l.picks != nullptr,
            ErrorKind::kInvalidArgument, [&] {
              return fmt::format(
                  "decode_layer: layer {}: weights {} must be 256-byte aligned, cache {} 16-byte "
                  "aligned, page stride {} a multiple of 16 and at least {}, picks not null",
                  i, l.weights, l.cache, l.page_stride,
                  kPageTokens * kv_row_bytes(s.shape.kv_format));
            });
    table.push_back({static_cast<const std::uint8_t*>(l.weights),
                     static_cast<std::uint8_t*>(l.cache), l.page_stride, l.pick_offsets, l.picks});
  }
  PENSTOCK_CUDA_CHECK(cudaSetDevice(s.options.device));
  const int count = static_cast<int>(table.size());
  if (count > s.table_capacity) {
    cudaFree(s.table);
    s.table = allocate<LayerArguments>(count);
    s.table_capacity = count;
  }
  const std::int64_t events = static_cast<std::int64_t>(count) * s.plans[0].grid * kTimelineEvents;
  if (s.options.timeline && events > s.timeline_capacity) {
    cudaFree(s.arguments.timeline);
    s.arguments.timeline = nullptr;
    s.arguments.timeline = allocate<std::int64_t>(events);
    s.timeline_capacity = events;
  }
  s.layers = count;
  PENSTOCK_CUDA_CHECK(cudaMemcpy(s.table, table.data(), table.size() * sizeof(LayerArguments),
                                 cudaMemcpyHostToDevice));
}

int DecodeLayer::rows_per_launch() const noexcept { return state_->per_launch; }
int DecodeLayer::launches(int rows) const noexcept { return ceil_div(rows, state_->per_launch); }

void DecodeLayer::run(Stream stream, const DecodeStep& step, int first, int count) {
  State& s = *state_;
  require(step.rows >= 1 && step.rows <= s.shape.rows, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("decode_layer: {} rows, this operator was made for 1 to {}", step.rows,
                       s.shape.rows);
  });
  require(first >= 0 && count >= 1 && first + count <= s.layers, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("decode_layer: layers {} to {} asked for, {} are set", first, first + count,
                       s.layers);
  });
  require(step.x_in != nullptr && step.x_out != nullptr && step.positions != nullptr &&
              step.slots != nullptr,
          ErrorKind::kInvalidArgument,
          [] { return std::string("decode_layer: a null pointer among x, positions, slots"); });
  require(s.connected, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("decode_layer: {} ranks but connect() was not called", s.present);
  });
  DecodeArguments a = s.arguments;
  a.layer = s.table + first;
  a.layers = count;
  for (int row = 0; row < step.rows; row += s.per_launch) {
    const int rows = std::min(s.per_launch, step.rows - row);
    a.plan = s.plans[static_cast<std::size_t>(rows - 1)];
    a.row_begin = row;
    a.x_in = step.x_in + static_cast<std::int64_t>(row) * s.shape.hidden;
    a.x_out = step.x_out + static_cast<std::int64_t>(row) * s.shape.hidden;
    a.positions = step.positions + row;
    a.slots = step.slots + row;
    cuda::check(static_cast<cudaError_t>(launch_decode_sm90(a, stream.handle)),
                "launch of the decode layer kernel");
  }
}

void DecodeLayer::set_stall(const DecodeStall& stall) {
  State& s = *state_;
  const int grid = s.plans[0].grid;
  require(stall.stage >= 0 && stall.stage < kStageCount && stall.cta >= -1 && stall.cta < grid &&
              stall.seconds >= 0 && stall.seconds <= 3600,
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format(
                "decode_layer: a stall before stage {} of CTA {} for {} s; stages are 0 to {}, "
                "CTAs -1 (all) to {}, seconds 0 to 3600",
                stall.stage, stall.cta, stall.seconds, static_cast<int>(kStageCount) - 1, grid - 1);
          });
  s.arguments.stall_stage = stall.stage;
  s.arguments.stall_cta = stall.cta;
  s.arguments.stall_ns = static_cast<std::uint64_t>(stall.seconds * 1e9);
}

void DecodeLayer::check() const {
  const auto* valid = static_cast<const volatile std::uint32_t*>(&state_->fault->valid);
  if (*valid != 0) throw Fault(*state_->fault, "decode_layer (op: layer, region: CTA)");
}

void DecodeLayer::rearm() {
  State& s = *state_;
  PENSTOCK_CUDA_CHECK(cudaSetDevice(s.options.device));
  PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
  const DecodePlan& p = s.plans[0];
  *s.fault = FaultRecord{};
  PENSTOCK_CUDA_CHECK(
      cudaMemset(s.arguments.boxes, 0, static_cast<std::size_t>(2 * p.box_packets * 16)));
  PENSTOCK_CUDA_CHECK(
      cudaMemset(s.arguments.window, 0, static_cast<std::size_t>(2 * p.win_packets * 16)));
  PENSTOCK_CUDA_CHECK(cudaMemset(s.arguments.counter, 0, 16));
  PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
}

const DecodePlan& DecodeLayer::plan(int rows) const {
  return state_->plans.at(static_cast<std::size_t>(rows - 1));
}

std::vector<std::uint32_t> DecodeLayer::mailboxes(int parity) const {
  const DecodePlan& p = state_->plans[0];
  std::vector<std::uint32_t> words(static_cast<std::size_t>(p.box_packets * 4));
  PENSTOCK_CUDA_CHECK(cudaMemcpy(words.data(),
                                 state_->arguments.boxes + parity * p.box_packets * 16,
                                 words.size() * 4, cudaMemcpyDeviceToHost));
  return words;
}

std::vector<std::uint32_t> DecodeLayer::window_words(int parity) const {
  const DecodePlan& p = state_->plans[0];
  std::vector<std::uint32_t> words(static_cast<std::size_t>(p.win_packets * 4));
  PENSTOCK_CUDA_CHECK(cudaMemcpy(words.data(),
                                 state_->arguments.window + parity * p.win_packets * 16,
                                 words.size() * 4, cudaMemcpyDeviceToHost));
  return words;
}

std::vector<std::int64_t> DecodeLayer::timeline(int rows, int layers) const {
  const DecodePlan& p = plan(rows);
  if (state_->arguments.timeline == nullptr) return {};
  std::vector<std::int64_t> events(static_cast<std::size_t>(layers * p.grid * kTimelineEvents));
  PENSTOCK_CUDA_CHECK(cudaMemcpy(events.data(), state_->arguments.timeline, events.size() * 8,
                                 cudaMemcpyDeviceToHost));
  return events;
}

const std::vector<std::string>& DecodeLayer::stage_names() {
  static const std::vector<std::string> names = {"input",
                                                 "qkv_a",
                                                 "q_b",
                                                 "uk",
                                                 "kv",
                                                 "attention",
                                                 "uv",
                                                 "o",
                                                 "reduce_attention",
                                                 "norm",
                                                 "router",
                                                 "shared",
                                                 "routing",
                                                 "up_gate",
                                                 "mid",
                                                 "down",
                                                 "reduce_experts"};
  return names;
}

}  // namespace penstock::decode
