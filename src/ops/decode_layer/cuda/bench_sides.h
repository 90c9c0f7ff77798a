// What the decode benchmark's two forms share: the rows of a point and the sets of weights on one
// GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/cuda/device_buffer.h"
#include "ops/decode_layer/bench.h"
#include "penstock/ops/decode_layer/decode_layer.h"

namespace penstock::decode {

inline double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

// The rows of one point on the current device.
struct BenchRows {
  int rows;
  cuda::DeviceBuffer<std::int32_t> offsets, picks, positions;
  cuda::DeviceBuffer<std::int64_t> slots;
  cuda::DeviceBuffer<std::uint16_t> x, out;

  BenchRows(const DecodeBenchOptions& options, int count);
};

// Sets of prepared weights and caches on the current device: the same on every one.
struct BenchSets {
  std::vector<cuda::DeviceBuffer<std::uint8_t>> weights, caches;

  BenchSets() = default;
  // Throws ResourceExhausted where they do not fit.
  explicit BenchSets(const DecodeBenchOptions& options);
  // All layers, the sets in turn.
  std::vector<LayerBinding> bindings(const DecodeBenchOptions& options,
                                     const BenchRows& rows) const;
  // Of one set's router, copied from the device.
  std::vector<float> bias(const DecodeShape& shape, std::size_t set) const;
};

// The `count` best of score + bias, the lower index before an equal one.
std::vector<int> best_experts(std::span<const float> scores, std::span<const float> bias,
                              int count);

// Bytes that a layer of `rows` rows must read if they go to `distinct` routed experts.
double bench_bytes(const DecodeBenchOptions& options, int rows, double distinct);

// Throws as make_gpu_decode_bench does for options that cannot be run.
void validate_bench(const DecodeBenchOptions& options);

// options.gpus ranks, each on a GPU of its own or sharing those that are there.
std::unique_ptr<DecodeBench> make_group_decode_bench(const DecodeBenchOptions& options);

}  // namespace penstock::decode
