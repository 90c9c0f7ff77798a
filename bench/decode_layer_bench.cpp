// decode_layer on one GPU, one rank's shard: us a layer over many cold layers in a CUDA graph,
// bytes, floor, fraction, and, from the SM clocks that CTAs keep, how long they spend in each
// stage.
//
// Ranks > 1 run as a shard alone: each all-reduce exchanges the same packets with itself
// (DecodeOptions::self_loop). Weights: `--sets` distinct layers used in turn, far more bytes than
// L2 holds. Figures count what a layer must read: weights of attention, router, shared expert and
// the distinct experts that its rows chose, and the picked cache rows.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "cli/bench/rounds.h"
#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "decode_layer_fill.h"
#include "ops/decode_layer/cuda/launch.h"
#include "penstock/core/error.h"
#include "penstock/core/version.h"
#include "penstock/ops/decode_layer/decode_layer.h"

namespace {

using namespace penstock;
using namespace penstock::decode;
using bench::quantile;
using cuda::DeviceBuffer;

constexpr double kBandwidth = 4484e9;  // bytes/s: copy rate of one H200, see docs/performance.md

struct Settings {
  std::vector<int> rows = {1, 2, 4, 8};
  int ranks = 8;
  int layers = 76;
  int sets = 4;
  int picks = 2048;
  int context = 8192;
  int samples = 15;
  int sm_budget = 0;
  bool timeline = false;
  std::string output;
};

struct Bench {
  Settings settings;
  DecodeShape shape;
  std::vector<DeviceBuffer<std::uint8_t>> weights;
  std::vector<DeviceBuffer<std::uint8_t>> caches;
  std::int64_t page_stride = kPageTokens * 656;

  explicit Bench(const Settings& s) : settings(s) {
    shape.ranks = s.ranks;
    shape.rows = std::max(1, *std::max_element(s.rows.begin(), s.rows.end()));
    const std::int64_t slots = static_cast<std::int64_t>(s.context) * shape.rows;
    for (int i = 0; i < s.sets; ++i) {
      weights.emplace_back(static_cast<std::size_t>(weight_layout(shape).bytes));
      caches.emplace_back(static_cast<std::size_t>(slots / kPageTokens * page_stride));
      PENSTOCK_CUDA_CHECK(bench::fill_decode_weights(
          shape, weights.back().data(), 1000U * static_cast<unsigned>(i + 1), nullptr));
      PENSTOCK_CUDA_CHECK(bench::fill_decode_cache(caches.back().data(), slots, page_stride,
                                                   5U + static_cast<unsigned>(i), nullptr));
    }
    PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
  }

  nlohmann::json run(int rows) {
    DecodeOptions options;
    options.self_loop = shape.ranks > 1;
    options.deadline_s = 2;
    options.sm_budget = settings.sm_budget;
    options.timeline = settings.timeline;
    DecodeLayer op(shape, options);
    const auto n = static_cast<std::size_t>(rows);
    std::mt19937 random(9);
    std::vector<std::int32_t> offsets = {0};
    std::vector<std::int32_t> picks;
    std::vector<std::int32_t> positions;
    std::vector<std::int64_t> slots;
    for (int s = 0; s < rows; ++s) {
      std::vector<std::int32_t> all(static_cast<std::size_t>(settings.context));
      std::iota(all.begin(), all.end(), s * settings.context);
      std::shuffle(all.begin(), all.end(), random);
      picks.insert(picks.end(), all.begin(), all.begin() + settings.picks);
      offsets.push_back(static_cast<std::int32_t>(picks.size()));
      positions.push_back(settings.context - 1);
      slots.push_back(all[0]);
    }
    std::vector<std::uint16_t> x_host(n * static_cast<std::size_t>(shape.hidden));
    std::normal_distribution<float> unit;
    for (auto& v : x_host) {
      const float f = unit(random);
      std::uint32_t bits;
      std::memcpy(&bits, &f, 4);
      v = static_cast<std::uint16_t>(bits >> 16);
    }
    const DeviceBuffer<std::int32_t> d_offsets(offsets), d_picks(picks), d_positions(positions);
    const DeviceBuffer<std::int64_t> d_slots(slots);
    const DeviceBuffer<std::uint16_t> x(x_host);
    const DeviceBuffer<std::uint16_t> out(x_host.size());
    std::vector<LayerBinding> bindings;
    for (int i = 0; i < settings.layers; ++i) {
      const auto set = static_cast<std::size_t>(i % settings.sets);
      bindings.push_back(
          {weights[set].data(), caches[set].data(), page_stride, d_offsets.data(), d_picks.data()});
    }
    op.set_layers(bindings);
    const auto step = [&](int first) {
      return DecodeStep{rows, first == 0 ? x.data() : out.data(), out.data(), d_positions.data(),
                        d_slots.data()};
    };
    cudaStream_t stream;
    PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    // Which experts the layers choose, one layer at a time.
    const DecodePlan& plan = op.plan(std::min(rows, op.rows_per_launch()));
    double distinct = 0;
    for (int i = 0; i < settings.layers; ++i) {
      op.run(Stream{stream}, step(i), i, 1);
      PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream));
      op.check();
      const std::vector<std::uint32_t> box = op.mailboxes(i & 1);
      std::set<int> chosen;
      for (int s = 0; s < std::min(rows, op.rows_per_launch()); ++s) {
        std::vector<std::pair<float, int>> order;
        for (int e = 0; e < shape.experts; ++e) {
          const std::int64_t packet =
              plan.box_router +
              (static_cast<std::int64_t>(s) * plan.grid + e / plan.router_rows) *
                  plan.router_packets +
              e % plan.router_rows / 3;
          float v;
          std::memcpy(&v, &box[static_cast<std::size_t>(packet * 4 + e % plan.router_rows % 3)], 4);
          order.emplace_back(-v, e);
        }
        std::sort(order.begin(), order.end());
        for (int k = 0; k < shape.top_k; ++k)
          chosen.insert(order[static_cast<std::size_t>(k)].second);
      }
      distinct += static_cast<double>(chosen.size());
    }
    distinct /= settings.layers;

    const auto time_graph = [&](int per_launch) {
      cudaGraph_t graph;
      cudaGraphExec_t exec;
      PENSTOCK_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (int i = 0; i < settings.layers; i += per_launch) {
        op.run(Stream{stream}, step(i), i, std::min(per_launch, settings.layers - i));
      }
      PENSTOCK_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
      PENSTOCK_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
      cudaEvent_t begin;
      cudaEvent_t end;
      PENSTOCK_CUDA_CHECK(cudaEventCreate(&begin));
      PENSTOCK_CUDA_CHECK(cudaEventCreate(&end));
      std::vector<double> us;
      for (int i = 0; i < settings.samples + 2; ++i) {
        PENSTOCK_CUDA_CHECK(cudaEventRecord(begin, stream));
        PENSTOCK_CUDA_CHECK(cudaGraphLaunch(exec, stream));
        PENSTOCK_CUDA_CHECK(cudaEventRecord(end, stream));
        PENSTOCK_CUDA_CHECK(cudaEventSynchronize(end));
        float ms = 0;
        PENSTOCK_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 2) us.push_back(static_cast<double>(ms) * 1e3 / settings.layers);
      }
      op.check();
      PENSTOCK_CUDA_CHECK(cudaEventDestroy(begin));
      PENSTOCK_CUDA_CHECK(cudaEventDestroy(end));
      PENSTOCK_CUDA_CHECK(cudaGraphExecDestroy(exec));
      PENSTOCK_CUDA_CHECK(cudaGraphDestroy(graph));
      return us;
    };
    const std::vector<double> single = time_graph(1);
    const std::vector<double> fused = time_graph(settings.layers);

    const WeightLayout w = weight_layout(shape);
    const double expert = static_cast<double>(w.norm_input - w.up_gate) / (shape.experts + 1);
    const double bytes =
        static_cast<double>(w.up_gate) + expert * (1.0 + distinct) + 656.0 * settings.picks * rows;
    const double floor_us = bytes / kBandwidth * 1e6;
    nlohmann::json j;
    j["bench"] = "decode_layer";
    j["version"] = version();
    j["shape"] = describe(shape);
    j["ranks"] = shape.ranks;
    j["rows"] = rows;
    j["picks"] = settings.picks;
    j["layers"] = settings.layers;
    j["kv_bytes_per_row"] = 656;
    j["weights"] = "fp8 128x128";
    j["grid"] = plan.grid;
    j["ring_slots"] = plan.ring_slots;
    j["all_reduce"] = shape.ranks > 1 ? "packets of all ranks to itself" : "own packets";
    j["distinct_experts"] = distinct;
    j["bytes_per_layer"] = bytes;
    j["floor_us"] = floor_us;
    for (const auto& [name, us] :
         {std::pair{"one_launch_a_layer", single}, std::pair{"all_layers_one_launch", fused}}) {
      j[name] = {{"median_us", quantile(us, 0.5)},
                 {"p10_us", quantile(us, 0.1)},
                 {"p90_us", quantile(us, 0.9)},
                 {"samples", us.size()},
                 {"fraction_of_floor", floor_us / quantile(us, 0.5)}};
    }
    fmt::print(
        "rows {} ranks {}: one launch a layer {:.1f} us, one launch for all {:.1f} us, floor "
        "{:.1f} us ({:.1f} MB, {:.1f} "
        "experts, ring {})\n",
        rows, shape.ranks, quantile(single, 0.5), quantile(fused, 0.5), floor_us, bytes / 1e6,
        distinct, plan.ring_slots);
    if (settings.timeline) {
      // Mean over layers (not the first) and CTAs, and the slowest CTA's mean, in SM clocks scaled
      // to the layer's time.
      const std::vector<std::int64_t> t = op.timeline(rows, settings.layers);
      nlohmann::json stages;
      double total = 0;
      std::vector<double> mean(kStageCount, 0.0);
      std::vector<double> top(kStageCount, 0.0);
      for (int stage = 0; stage < kStageCount; ++stage) {
        for (int cta = 0; cta < plan.grid; ++cta) {
          double sum = 0;
          for (int layer = 1; layer < settings.layers; ++layer) {
            const auto* e = &t[static_cast<std::size_t>(
                (static_cast<std::int64_t>(layer) * plan.grid + cta) * kTimelineEvents)];
            sum += static_cast<double>(e[stage + 1] - e[stage]);
          }
          mean[static_cast<std::size_t>(stage)] += sum / (settings.layers - 1) / plan.grid;
          top[static_cast<std::size_t>(stage)] =
              std::max(top[static_cast<std::size_t>(stage)], sum / (settings.layers - 1));
        }
        total += mean[static_cast<std::size_t>(stage)];
      }
      const double us_per_clock = quantile(fused, 0.5) / total;
      std::string line = "   ";
      for (int stage = 0; stage < kStageCount; ++stage) {
        const auto i = static_cast<std::size_t>(stage);
        stages[DecodeLayer::stage_names()[i]] = {{"mean_us", mean[i] * us_per_clock},
                                                 {"slowest_cta_us", top[i] * us_per_clock}};
        line += fmt::format(" {} {:.2f}/{:.2f}", DecodeLayer::stage_names()[i],
                            mean[i] * us_per_clock, top[i] * us_per_clock);
      }
      j["stages_us"] = stages;
      fmt::print("{} (clock {:.2f} GHz)\n", line, 1e-3 / us_per_clock);
    }
    PENSTOCK_CUDA_CHECK(cudaStreamDestroy(stream));
    return j;
  }
};

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app{"us per layer of decode_layer on one GPU"};
  app.add_option("--rows", settings.rows, "row counts")->delimiter(',');
  app.add_option("--tp", settings.ranks, "ranks whose shard is run");
  app.add_option("--layers", settings.layers, "layers in the graph");
  app.add_option("--sets", settings.sets, "distinct sets of weights, used in turn");
  app.add_option("--picks", settings.picks, "picks a row");
  app.add_option("--samples", settings.samples, "graph replays measured");
  app.add_option("--sm-budget", settings.sm_budget, "multiprocessors to use, 0: all");
  app.add_flag("--timeline", settings.timeline, "per-stage times (costs a little)");
  app.add_option("--json", settings.output, "append JSON lines to this file");
  CLI11_PARSE(app, argc, argv);
  try {
    Bench bench(settings);
    for (const int rows : settings.rows) {
      const nlohmann::json j = bench.run(rows);
      if (!settings.output.empty())
        std::ofstream(settings.output, std::ios::app) << j.dump() << "\n";
    }
  } catch (const Error& error) {
    fmt::print(stderr, "decode_layer_bench: {}\n", error.what());
    return 1;
  }
  return 0;
}
