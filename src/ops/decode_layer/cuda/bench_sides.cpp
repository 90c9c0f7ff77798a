#include "ops/decode_layer/cuda/bench_sides.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <numeric>
#include <random>

#include "core/cuda/check.h"
#include "ops/decode_layer/cuda/bench_fill.h"
#include "penstock/core/error.h"
#include "penstock/numerics/formats.h"

namespace penstock::decode {

using cuda::DeviceBuffer;

namespace {

constexpr std::int64_t kPageStride =
    kPageTokens * static_cast<std::int64_t>(kv_row_bytes(KvFormat::kFp8Scaled));

}  // namespace

BenchRows::BenchRows(const DecodeBenchOptions& o, int count) : rows(count) {
  std::mt19937 random(9);
  std::vector<std::int32_t> offsets_host = {0};
  std::vector<std::int32_t> picks_host;
  std::vector<std::int64_t> slots_host;
  for (int s = 0; s < rows; ++s) {
    std::vector<std::int32_t> all(static_cast<std::size_t>(o.context));
    std::iota(all.begin(), all.end(), s * o.context);
    std::shuffle(all.begin(), all.end(), random);
    picks_host.insert(picks_host.end(), all.begin(), all.begin() + o.picks);
    offsets_host.push_back(static_cast<std::int32_t>(picks_host.size()));
    slots_host.push_back(all[0]);
  }
  std::normal_distribution<float> unit;
  std::vector<std::uint16_t> x_host(static_cast<std::size_t>(rows) *
                                    static_cast<std::size_t>(o.shape.hidden));
  for (auto& v : x_host) v = Bf16::from_float(unit(random)).bits;
  offsets = DeviceBuffer<std::int32_t>(offsets_host);
  picks = DeviceBuffer<std::int32_t>(picks_host);
  positions = DeviceBuffer<std::int32_t>(
      std::vector<std::int32_t>(static_cast<std::size_t>(rows), o.context - 1));
  slots = DeviceBuffer<std::int64_t>(slots_host);
  x = DeviceBuffer<std::uint16_t>(x_host);
  out = DeviceBuffer<std::uint16_t>(x_host.size());
}

BenchSets::BenchSets(const DecodeBenchOptions& o) {
  const std::int64_t slots = static_cast<std::int64_t>(o.context) * o.shape.rows;
  const std::int64_t bytes = weight_layout(o.shape).bytes;
  std::size_t free = 0;
  std::size_t total = 0;
  PENSTOCK_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const std::int64_t needed = o.sets * (bytes + slots / kPageTokens * kPageStride);
  require(needed < static_cast<std::int64_t>(free), ErrorKind::kResourceExhausted, [&] {
    return fmt::format(
        "decode benchmark: {} sets of weights and caches take {} MB, the GPU has {}: "
        "use fewer --sets",
        o.sets, needed >> 20, free >> 20);
  });
  for (int i = 0; i < o.sets; ++i) {
    weights.emplace_back(static_cast<std::size_t>(bytes));
    caches.emplace_back(static_cast<std::size_t>(slots / kPageTokens * kPageStride));
    PENSTOCK_CUDA_CHECK(fill_decode_weights(o.shape, weights.back().data(),
                                            1000U * static_cast<unsigned>(i + 1), nullptr));
    PENSTOCK_CUDA_CHECK(fill_decode_cache(caches.back().data(), slots, kPageStride,
                                          5U + static_cast<unsigned>(i), nullptr));
  }
  PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
}

std::vector<LayerBinding> BenchSets::bindings(const DecodeBenchOptions& o,
                                              const BenchRows& rows) const {
  std::vector<LayerBinding> layers;
  for (int i = 0; i < o.layers; ++i) {
    const auto set = static_cast<std::size_t>(i % o.sets);
    layers.push_back({weights[set].data(), caches[set].data(), kPageStride, rows.offsets.data(),
                      rows.picks.data()});
  }
  return layers;
}

std::vector<float> BenchSets::bias(const DecodeShape& shape, std::size_t set) const {
  std::vector<float> values(static_cast<std::size_t>(shape.experts));
  PENSTOCK_CUDA_CHECK(cudaMemcpy(values.data(), weights[set].data() + weight_layout(shape).bias,
                                 values.size() * sizeof(float), cudaMemcpyDeviceToHost));
  return values;
}

// The `count` best of score + bias, the lower index before an equal one.
std::vector<int> best_experts(std::span<const float> scores, std::span<const float> bias,
                              int count) {
  std::vector<int> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int x, int y) {
    const auto a = static_cast<std::size_t>(x);
    const auto b = static_cast<std::size_t>(y);
    return scores[a] + bias[a] > scores[b] + bias[b];
  });
  order.resize(static_cast<std::size_t>(count));
  return order;
}

double bench_bytes(const DecodeBenchOptions& o, int rows, double distinct) {
  const WeightLayout w = weight_layout(o.shape);
  const double expert = static_cast<double>(w.norm_input - w.up_gate) / (o.shape.experts + 1);
  return static_cast<double>(w.up_gate) + expert * (1.0 + distinct) +
         static_cast<double>(kv_row_bytes(o.shape.kv_format)) * o.picks * rows;
}

void validate_bench(const DecodeBenchOptions& o) {
  validate(o.shape);
  require(!o.shape.dense && o.shape.kv_format == KvFormat::kFp8Scaled, ErrorKind::kUnsupported, [] {
    return std::string("the decode benchmark runs MoE layers over cache rows of 656 bytes");
  });
  require(o.layers >= 2 && o.sets >= 1 && o.samples >= 1 && o.picks >= 1 && o.picks <= kMaxPicks &&
              o.picks <= o.context && o.context % kPageTokens == 0,
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format(
                "decode benchmark: {} layers, {} sets, {} samples, {} picks of a context of {}: at "
                "least 2 layers, 1 set and sample, picks from 1 to {} and to the context, which is "
                "a multiple of {}",
                o.layers, o.sets, o.samples, o.picks, o.context, kMaxPicks, kPageTokens);
          });
}

}  // namespace penstock::decode
