#include "ops/decode_layer/bench.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <numeric>
#include <optional>
#include <random>
#include <set>

#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/stream.h"
#include "fabric/gpu.h"
#include "ops/decode_layer/cuda/bench_sides.h"
#include "ops/decode_layer/cuda/chain_sm90.h"
#include "ops/decode_layer/cuda/inspect.h"
#include "penstock/core/error.h"
#include "penstock/numerics/formats.h"
#include "penstock/ops/decode_layer/decode_layer.h"

namespace penstock::decode {
namespace {

using cuda::DeviceBuffer;

// Replays of what `enqueue` puts into the stream, microseconds.
std::vector<double> time_graph(cudaStream_t stream, int samples,
                               const std::function<void()>& enqueue) {
  struct Owned {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    cudaEvent_t begin = nullptr, end = nullptr;
    ~Owned() {
      if (begin != nullptr) cudaEventDestroy(begin);
      if (end != nullptr) cudaEventDestroy(end);
      if (exec != nullptr) cudaGraphExecDestroy(exec);
      if (graph != nullptr) cudaGraphDestroy(graph);
    }
  } g;
  PENSTOCK_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue();
  PENSTOCK_CUDA_CHECK(cudaStreamEndCapture(stream, &g.graph));
  PENSTOCK_CUDA_CHECK(cudaGraphInstantiate(&g.exec, g.graph, 0));
  PENSTOCK_CUDA_CHECK(cudaEventCreate(&g.begin));
  PENSTOCK_CUDA_CHECK(cudaEventCreate(&g.end));
  std::vector<double> us;
  constexpr int kWarmUp = 2;
  for (int i = 0; i < samples + kWarmUp; ++i) {
    PENSTOCK_CUDA_CHECK(cudaEventRecord(g.begin, stream));
    PENSTOCK_CUDA_CHECK(cudaGraphLaunch(g.exec, stream));
    PENSTOCK_CUDA_CHECK(cudaEventRecord(g.end, stream));
    PENSTOCK_CUDA_CHECK(cudaEventSynchronize(g.end));
    float ms = 0;
    PENSTOCK_CUDA_CHECK(cudaEventElapsedTime(&ms, g.begin, g.end));
    if (i >= kWarmUp) us.push_back(static_cast<double>(ms) * 1e3);
  }
  return us;
}

// Buffers of the chain of separate kernels.
class Chain {
 public:
  Chain(const DecodeBenchOptions& o, const DecodePlan& plan, const BenchRows& rows) : rows_(rows) {
    const DecodeShape& s = o.shape;
    const auto r = static_cast<std::size_t>(rows.rows);
    const auto heads = static_cast<std::size_t>(plan.heads);
    const auto size = [](int n) { return static_cast<std::size_t>(n); };
    x = DeviceBuffer<std::uint16_t>(r * size(s.hidden));
    n_ = DeviceBuffer<std::uint16_t>(r * size(s.hidden));
    c_ = DeviceBuffer<std::uint16_t>(r * size(s.q_lora + kKvRow));
    c_q_ = DeviceBuffer<std::uint16_t>(r * size(s.q_lora));
    q_ = DeviceBuffer<std::uint16_t>(r * heads * kQueryHead);
    q_lat_ = DeviceBuffer<std::uint16_t>(r * heads * kLatent);
    partial_ = DeviceBuffer<float>(kChainRows * kMaxSplits * heads * kLatent);
    softmax_ = DeviceBuffer<float>(kChainRows * kMaxSplits * heads * 2);
    o_lat_ = DeviceBuffer<std::uint16_t>(r * heads * kLatent);
    o_ = DeviceBuffer<std::uint16_t>(r * heads * kValue);
    y_ = DeviceBuffer<std::uint16_t>(r * size(s.hidden));
    scores_ = DeviceBuffer<float>(r * size(s.experts));
    routing_ = DeviceBuffer<ChainRouting>(size(groups()));
    mid_ = DeviceBuffer<std::uint16_t>(r * size((s.top_k + 1) * plan.inter));
    ChainArguments& a = base_;
    a.plan = plan;
    a.weights = weight_layout(s);
    a.eps = s.eps;
    a.eps_latent = s.eps_latent;
    a.routed_scale = s.routed_scale;
    a.norm_topk = s.norm_topk;
    for (int i = 0; i < kRope / 2; ++i) a.frequency[i] = rope_frequency(s.rope_theta, i);
  }

  int groups() const { return ceil_div(rows_.rows, kChainRows); }

  // Layers first .. first + count - 1 on x; rows in groups of kChainRows, one behind the other.
  void run(cudaStream_t stream, std::span<const LayerBinding> layers, int first, int count) {
    for (int group = 0; group < groups(); ++group) {
      const int row = group * kChainRows;
      ChainArguments a = base_;
      a.rows = std::min(kChainRows, rows_.rows - row);
      const auto at = [&](const DeviceBuffer<std::uint16_t>& buffer) {
        return buffer.data() +
               buffer.size() / static_cast<std::size_t>(rows_.rows) * static_cast<std::size_t>(row);
      };
      a.positions = rows_.positions.data() + row;
      a.slots = rows_.slots.data() + row;
      a.x = at(x);
      a.n = at(n_);
      a.c = at(c_);
      a.c_q = at(c_q_);
      a.q = at(q_);
      a.q_lat = at(q_lat_);
      a.partial = partial_.data();
      a.softmax = softmax_.data();
      a.o_lat = at(o_lat_);
      a.o = at(o_);
      a.y = at(y_);
      a.scores = scores_.data() + static_cast<std::ptrdiff_t>(row) * base_.plan.experts;
      a.routing = routing_.data() + group;
      a.mid = at(mid_);
      for (int i = first; i < first + count; ++i) {
        a.layer = arguments(layers[static_cast<std::size_t>(i)], row);
        const LayerArguments next =
            arguments(layers[static_cast<std::size_t>(std::min(i + 1, first + count - 1))], row);
        a.next_gain = reinterpret_cast<const float*>(next.weights + a.weights.norm_input);
        if (i == first) {
          cuda::check(static_cast<cudaError_t>(launch_chain_norm(a, stream)), "the chain's norm");
        }
        cuda::check(static_cast<cudaError_t>(launch_chain_layer(a, stream)), "the chain's kernels");
      }
    }
  }

  // Distinct experts that the last layer's rows chose.
  std::size_t distinct() const {
    std::set<int> chosen;
    const std::vector<ChainRouting> all = routing_.download();
    for (int s = 0; s < rows_.rows; ++s) {
      const auto& row = all[static_cast<std::size_t>(s / kChainRows)].chosen[s % kChainRows];
      chosen.insert(row, row + base_.plan.top_k);
    }
    return chosen.size();
  }

  // What the last layer's rows chose.
  struct Choice {
    std::vector<int> experts;   // best first
    std::vector<float> scores;  // [experts]
    float gap = 0;              // to the best expert not chosen
  };
  std::vector<Choice> choices() const {
    std::vector<Choice> out;
    const std::vector<ChainRouting> all = routing_.download();
    const std::vector<float> scores = scores_.download();
    const auto experts = static_cast<std::ptrdiff_t>(base_.plan.experts);
    for (int s = 0; s < rows_.rows; ++s) {
      const ChainRouting& r = all[static_cast<std::size_t>(s / kChainRows)];
      const std::int32_t* chosen = r.chosen[s % kChainRows];
      out.push_back({{chosen, chosen + base_.plan.top_k},
                     {scores.begin() + s * experts, scores.begin() + (s + 1) * experts},
                     r.gap[s % kChainRows]});
    }
    return out;
  }

  DeviceBuffer<std::uint16_t> x;

 private:
  LayerArguments arguments(const LayerBinding& l, int row) const {
    return {static_cast<const std::uint8_t*>(l.weights), static_cast<std::uint8_t*>(l.cache),
            l.page_stride, l.pick_offsets + row, l.picks};
  }

  const BenchRows& rows_;
  ChainArguments base_{};
  DeviceBuffer<std::uint16_t> n_, c_, c_q_, q_, q_lat_, o_lat_, o_, y_, mid_;
  DeviceBuffer<float> partial_, softmax_, scores_;
  DeviceBuffer<ChainRouting> routing_;
};

// Relative L2 error of each row.
std::vector<double> row_errors(const std::vector<std::uint16_t>& got,
                               const std::vector<std::uint16_t>& want, int rows) {
  const std::size_t width = got.size() / static_cast<std::size_t>(rows);
  std::vector<double> errors;
  for (std::size_t s = 0; s < static_cast<std::size_t>(rows); ++s) {
    double error = 0;
    double size = 0;
    for (std::size_t i = s * width; i < (s + 1) * width; ++i) {
      const auto w = static_cast<double>(Bf16::from_bits(want[i]).to_float());
      const double d = static_cast<double>(Bf16::from_bits(got[i]).to_float()) - w;
      error += d * d;
      size += w * w;
    }
    const double relative = std::sqrt(error / size);
    errors.push_back(std::isfinite(relative) ? relative : INFINITY);
  }
  return errors;
}

// How a row's routing differs; nothing if both sides chose the same experts.
std::optional<DecodeFlip> compare_routing(std::span<const float> kernel_scores,
                                          const Chain::Choice& chain, std::span<const float> bias) {
  DecodeFlip flip;
  const std::vector<int> kernel =
      best_experts(kernel_scores, bias, static_cast<int>(chain.experts.size()));
  const auto only = [](const std::vector<int>& from, const std::vector<int>& in) {
    std::vector<int> out;
    std::copy_if(from.begin(), from.end(), std::back_inserter(out),
                 [&](int e) { return std::find(in.begin(), in.end(), e) == in.end(); });
    return out;
  };
  flip.kernel = only(kernel, chain.experts);
  flip.chain = only(chain.experts, kernel);
  if (flip.kernel.empty()) return std::nullopt;
  double low = INFINITY;
  double high = -INFINITY;
  for (const auto* side : {&flip.kernel, &flip.chain}) {
    for (const int e : *side) {
      const auto i = static_cast<std::size_t>(e);
      const double value = static_cast<double>(kernel_scores[i] + bias[i]);
      low = std::min(low, value);
      high = std::max(high, value);
    }
  }
  flip.width = high - low;
  for (std::size_t i = 0; i < bias.size(); ++i) {
    const double d = static_cast<double>(kernel_scores[i]) - static_cast<double>(chain.scores[i]);
    flip.score_error = std::max(flip.score_error, std::abs(d));
  }
  return flip;
}

class GpuDecodeBench final : public DecodeBench {
 public:
  explicit GpuDecodeBench(const DecodeBenchOptions& options) : o_(options) {
    const std::string refusal = gpu_unavailable();
    require(refusal.empty(), ErrorKind::kUnsupported,
            [&] { return "decode_layer on a GPU: " + refusal; });
    cuda::require_sm90(o_.device);
    PENSTOCK_CUDA_CHECK(cudaSetDevice(o_.device));
    validate_bench(o_);
    sets_ = BenchSets(o_);
  }

  DecodeBenchPoint run(int count) override {
    const DecodeShape& shape = o_.shape;
    require(count >= 1 && count <= shape.rows, ErrorKind::kInvalidArgument, [&] {
      return fmt::format("decode benchmark: {} rows, made for 1 to {}", count, shape.rows);
    });
    DecodeOptions how;
    how.device = o_.device;
    how.self_loop = shape.ranks > 1;
    how.deadline_s = 2;
    how.sm_budget = o_.sm_budget;
    how.timeline = o_.timeline;
    DecodeLayer op(shape, how);
    const BenchRows rows(o_, count);
    const std::vector<LayerBinding> layers = sets_.bindings(o_, rows);
    op.set_layers(layers);
    const cuda::OwnedStream stream;
    const auto step = [&](int first) {
      return DecodeStep{count, first == 0 ? rows.x.data() : rows.out.data(), rows.out.data(),
                        rows.positions.data(), rows.slots.data()};
    };

    DecodeBenchPoint point;
    const DecodePlan& plan = op.plan(std::min(count, op.rows_per_launch()));
    point.rows = count;
    point.launches = op.launches(count);
    point.grid = plan.grid;
    point.ring_slots = plan.ring_slots;

    Chain chain(o_, plan, rows);
    const auto reset = [&] {
      PENSTOCK_CUDA_CHECK(cudaMemcpyAsync(chain.x.data(), rows.x.data(), rows.x.bytes(),
                                          cudaMemcpyDeviceToDevice, stream.handle));
    };
    reset();
    for (int i = 0; i < o_.layers; ++i) {
      chain.run(stream.handle, layers, i, 1);
      PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream.handle));
      point.distinct_experts += static_cast<double>(chain.distinct()) / o_.layers;
    }
    point.bytes = bench_bytes(o_, count, point.distinct_experts);

    if (o_.check) check_rows(op, chain, rows, layers, stream.handle, point);

    const auto per_layer = [&](std::vector<double> us) {
      for (double& t : us) t /= o_.layers;
      return us;
    };
    point.single_us = per_layer(time_graph(stream.handle, o_.samples, [&] {
      for (int i = 0; i < o_.layers; ++i) op.run(Stream{stream.handle}, step(i), i, 1);
    }));
    op.check();
    point.fused_us = per_layer(time_graph(
        stream.handle, o_.samples, [&] { op.run(Stream{stream.handle}, step(0), 0, o_.layers); }));
    op.check();
    if (o_.chain) {
      point.chain_launches = kChainLaunches * chain.groups();
      reset();
      point.chain_us = per_layer(time_graph(
          stream.handle, o_.samples, [&] { chain.run(stream.handle, layers, 0, o_.layers); }));
    }
    // A second launch would overwrite the first one's timeline.
    if (o_.timeline && point.launches == 1) read_timeline(op, point);
    return point;
  }

 private:
  // Every row of the kernel against the chain's, one layer of each set. `op` has not run yet.
  void check_rows(DecodeLayer& op, Chain& chain, const BenchRows& rows,
                  std::span<const LayerBinding> layers, cudaStream_t stream,
                  DecodeBenchPoint& point) const {
    const DecodeShape& shape = o_.shape;
    const int launches = op.launches(rows.rows);
    const auto experts = static_cast<std::size_t>(shape.experts);
    point.check_error = 0;
    point.narrowest_gap = INFINITY;
    for (int set = 0; set < std::min(o_.sets, o_.layers); ++set) {
      PENSTOCK_CUDA_CHECK(cudaMemcpyAsync(chain.x.data(), rows.x.data(), rows.x.bytes(),
                                          cudaMemcpyDeviceToDevice, stream));
      chain.run(stream, layers, set, 1);
      op.run(Stream{stream},
             {rows.rows, rows.x.data(), rows.out.data(), rows.positions.data(), rows.slots.data()},
             set, 1);
      PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream));
      op.check();
      const std::vector<float> bias = sets_.bias(shape, static_cast<std::size_t>(set));
      const std::vector<double> errors =
          row_errors(rows.out.download(), chain.x.download(), rows.rows);
      const std::vector<Chain::Choice> choices = chain.choices();
      for (int launch = 0; launch < launches; ++launch) {
        const int first = launch * op.rows_per_launch();
        const int count = std::min(op.rows_per_launch(), rows.rows - first);
        // The mailboxes' two halves hold the last two launches.
        const bool readable = launch >= launches - 2;
        std::vector<float> scores;
        if (readable) scores = read_scores(op, shape, count, (set * launches + launch) % 2);
        for (int i = 0; i < count; ++i) {
          const auto row = static_cast<std::size_t>(first + i);
          const Chain::Choice& choice = choices[row];
          point.narrowest_gap = std::min(point.narrowest_gap, static_cast<double>(choice.gap));
          bool near_tie = false;
          if (readable) {
            std::optional<DecodeFlip> flip = compare_routing(
                std::span(scores).subspan(static_cast<std::size_t>(i) * experts, experts), choice,
                bias);
            if (flip) {
              flip->set = set;
              flip->row = first + i;
              flip->error = errors[row];
              near_tie = flip->width < kNearTie;
              point.flips.push_back(*flip);
            }
          } else {
            near_tie = errors[row] > kCheckBound && static_cast<double>(choice.gap) < kNearTie;
          }
          point.near_ties += near_tie ? 1 : 0;
          if (!near_tie) point.check_error = std::max(point.check_error, errors[row]);
        }
      }
    }
  }

  // Of the last run: all layers in one launch.
  void read_timeline(const DecodeLayer& op, DecodeBenchPoint& point) const {
    const int rows = std::min(point.rows, op.rows_per_launch());
    point.events = op.timeline(rows, o_.layers);
    const auto stages = DecodeLayer::stage_names().size();
    double total = 0;
    for (std::size_t stage = 0; stage < stages; ++stage) {
      DecodeStageTime time{DecodeLayer::stage_names()[stage], 0, 0};
      for (int cta = 0; cta < point.grid; ++cta) {
        double sum = 0;
        for (int layer = 1; layer < o_.layers; ++layer) {
          const std::int64_t* e =
              &point
                   .events[(static_cast<std::size_t>(layer) * static_cast<std::size_t>(point.grid) +
                            static_cast<std::size_t>(cta)) *
                           (stages + 1)];
          sum += static_cast<double>(e[stage + 1] - e[stage]) / (o_.layers - 1);
        }
        time.mean_us += sum / point.grid;
        time.slowest_us = std::max(time.slowest_us, sum);
      }
      total += time.mean_us;
      point.stages.push_back(time);
    }
    point.us_per_clock = median(point.fused_us) / total;
    for (DecodeStageTime& time : point.stages) {
      time.mean_us *= point.us_per_clock;
      time.slowest_us *= point.us_per_clock;
    }
  }

  DecodeBenchOptions o_;
  BenchSets sets_;
};

}  // namespace

std::unique_ptr<DecodeBench> make_gpu_decode_bench(const DecodeBenchOptions& options) {
  if (options.gpus > 1) return make_group_decode_bench(options);
  return std::make_unique<GpuDecodeBench>(options);
}

}  // namespace penstock::decode
