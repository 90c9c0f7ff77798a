// The decode benchmark over several ranks: shards whose all-reduces cross GPUs.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <set>

#include "core/cuda/check.h"
#include "core/cuda/stream.h"
#include "fabric/gpu.h"
#include "ops/decode_layer/cuda/bench_sides.h"
#include "ops/decode_layer/cuda/inspect.h"
#include "ops/decode_layer/cuda/peers.h"
#include "penstock/core/error.h"

namespace penstock::decode {
namespace {

int on(int device) {
  PENSTOCK_CUDA_CHECK(cudaSetDevice(device));
  return device;
}

// One rank's weights, which stay over all points.
struct Side {
  explicit Side(int gpu, const DecodeBenchOptions& options) : device(on(gpu)), sets(options) {}
  int device;
  cuda::OwnedStream stream;
  BenchSets sets;
};

// One rank of one point.
struct Rank {
  Rank(const Side& of, const DecodeShape& shape, const DecodeOptions& how,
       const DecodeBenchOptions& options, int count)
      : side(&of), rows((on(of.device), BenchRows(options, count))), op(shape, how) {
    op.set_layers(side->sets.bindings(options, rows));
  }
  // Layers [first, first + layers) on x if `fresh`, else on what the last ones left.
  void run(int first, int layers, bool fresh) {
    on(side->device);
    op.run(Stream{side->stream.handle},
           {rows.rows, fresh ? rows.x.data() : rows.out.data(), rows.out.data(),
            rows.positions.data(), rows.slots.data()},
           first, layers);
  }
  void wait() const {
    on(side->device);
    side->stream.wait();
    op.check();
  }
  const Side* side;
  BenchRows rows;
  DecodeLayer op;
};

// What `enqueue` puts into one rank's stream, as a graph.
class RankGraph {
 public:
  RankGraph(const Rank& rank, const std::function<void()>& enqueue)
      : device_(on(rank.side->device)),
        stream_(rank.side->stream.handle),
        begin_(cudaEventDefault),
        end_(cudaEventDefault) {
    PENSTOCK_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    enqueue();
    PENSTOCK_CUDA_CHECK(cudaStreamEndCapture(stream_, &handles_.graph));
    PENSTOCK_CUDA_CHECK(cudaGraphInstantiate(&handles_.exec, handles_.graph, 0));
    PENSTOCK_CUDA_CHECK(cudaGraphUpload(handles_.exec, stream_));
  }
  void launch() const {
    on(device_);
    begin_.record(stream_);
    PENSTOCK_CUDA_CHECK(cudaGraphLaunch(handles_.exec, stream_));
    end_.record(stream_);
  }
  double wait_us() const {
    on(device_);
    PENSTOCK_CUDA_CHECK(cudaEventSynchronize(end_.get()));
    float ms = 0;
    PENSTOCK_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_.get(), end_.get()));
    return static_cast<double>(ms) * 1e3;
  }

 private:
  int device_;
  cudaStream_t stream_;
  cuda::OwnedEvent begin_, end_;
  struct Handles {
    Handles() = default;
    Handles(const Handles&) = delete;
    Handles& operator=(const Handles&) = delete;
    ~Handles() {
      if (exec != nullptr) (void)cudaGraphExecDestroy(exec);
      if (graph != nullptr) (void)cudaGraphDestroy(graph);
    }
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
  } handles_;
};

class GroupDecodeBench final : public DecodeBench {
 public:
  explicit GroupDecodeBench(const DecodeBenchOptions& options) : o_(options) {
    validate_bench(o_);
    require(o_.gpus <= o_.shape.ranks && (o_.gpus & (o_.gpus - 1)) == 0 && !o_.timeline,
            ErrorKind::kInvalidArgument, [&] {
              return fmt::format(
                  "decode benchmark: {} shards of {} ranks at once{}: 1, 2, 4 or 8 of them and at "
                  "most one a rank; a timeline is one shard's (gpus 1)",
                  o_.gpus, o_.shape.ranks, o_.timeline ? " with a timeline" : "");
            });
    for (int r = 0; r < o_.gpus; ++r) devices_.push_back(gpu_of_rank(r));
    for (const int device : devices_) cuda::require_sm90(device);
    enable_peers(devices_);
    for (const int device : devices_) sides_.push_back(std::make_unique<Side>(device, o_));
  }

  DecodeBenchPoint run(int count) override {
    require(count >= 1 && count <= o_.shape.rows, ErrorKind::kInvalidArgument, [&] {
      return fmt::format("decode benchmark: {} rows, made for 1 to {}", count, o_.shape.rows);
    });
    std::vector<std::unique_ptr<Rank>> ranks;
    std::vector<void*> windows;
    for (std::size_t r = 0; r < sides_.size(); ++r) {
      DecodeShape shape = o_.shape;
      shape.rank = static_cast<int>(r);
      DecodeOptions how;
      how.device = devices_[r];
      how.present = o_.gpus;
      how.deadline_s = 2;
      const int share = share_of_device(devices_[r], devices_);
      how.sm_budget = share > 0 ? share : o_.sm_budget;
      ranks.push_back(std::make_unique<Rank>(*sides_[r], shape, how, o_, count));
      windows.push_back(ranks.back()->op.window());
    }
    for (const auto& rank : ranks) rank->op.connect(windows);

    const DecodeLayer& op = ranks[0]->op;
    const DecodePlan& plan = op.plan(std::min(count, op.rows_per_launch()));
    DecodeBenchPoint point;
    point.rows = count;
    point.launches = op.launches(count);
    point.grid = plan.grid;
    point.ring_slots = plan.ring_slots;
    walk_layers(ranks, point);
    point.bytes = bench_bytes(o_, count, point.distinct_experts);
    point.single_us = time(ranks, [&](Rank& rank) {
      for (int i = 0; i < o_.layers; ++i) rank.run(i, 1, i == 0);
    });
    point.fused_us = time(ranks, [&](Rank& rank) { rank.run(0, o_.layers, true); });
    return point;
  }

 private:
  // All layers one by one: how many experts are chosen, and whether all ranks get the same bits.
  void walk_layers(const std::vector<std::unique_ptr<Rank>>& ranks, DecodeBenchPoint& point) const {
    const DecodeLayer& op = ranks[0]->op;
    const int launches = op.launches(point.rows);
    const auto experts = static_cast<std::size_t>(o_.shape.experts);
    if (o_.check) point.check_error = 0;
    for (int layer = 0; layer < o_.layers; ++layer) {
      for (const auto& rank : ranks) rank->run(layer, 1, layer == 0);
      for (const auto& rank : ranks) rank->wait();
      on(devices_[0]);
      const std::vector<float> bias =
          sides_[0]->sets.bias(o_.shape, static_cast<std::size_t>(layer % o_.sets));
      std::set<int> chosen;
      // The mailboxes' two halves hold the last two launches.
      for (int launch = std::max(0, launches - 2); launch < launches; ++launch) {
        const int rows = std::min(op.rows_per_launch(), point.rows - launch * op.rows_per_launch());
        const std::vector<float> scores =
            read_scores(op, o_.shape, rows, (layer * launches + launch) % 2);
        for (int i = 0; i < rows; ++i) {
          const std::vector<int> best = best_experts(
              std::span(scores).subspan(static_cast<std::size_t>(i) * experts, experts), bias,
              o_.shape.top_k);
          chosen.insert(best.begin(), best.end());
        }
      }
      point.distinct_experts += static_cast<double>(chosen.size()) / o_.layers;
      if (!o_.check) continue;
      const std::vector<std::uint16_t> want = ranks[0]->rows.out.download();
      for (const auto& rank : ranks) {
        on(rank->side->device);
        if (rank->rows.out.download() != want) point.check_error = INFINITY;
      }
    }
  }

  // us a layer, one value a replay: of the slowest rank.
  std::vector<double> time(const std::vector<std::unique_ptr<Rank>>& ranks,
                           const std::function<void(Rank&)>& enqueue) const {
    std::vector<std::unique_ptr<RankGraph>> graphs;
    for (const auto& rank : ranks) {
      graphs.push_back(std::make_unique<RankGraph>(*rank, [&] { enqueue(*rank); }));
    }
    std::vector<double> us;
    constexpr int kWarmUp = 2;
    for (int i = 0; i < o_.samples + kWarmUp; ++i) {
      for (const auto& graph : graphs) graph->launch();
      double slowest = 0;
      for (const auto& graph : graphs) slowest = std::max(slowest, graph->wait_us());
      if (i >= kWarmUp) us.push_back(slowest / o_.layers);
    }
    for (const auto& rank : ranks) rank->wait();
    return us;
  }

  DecodeBenchOptions o_;
  std::vector<int> devices_;
  std::vector<std::unique_ptr<Side>> sides_;
};

}  // namespace

std::unique_ptr<DecodeBench> make_group_decode_bench(const DecodeBenchOptions& options) {
  const std::string refusal = gpu_unavailable();
  require(refusal.empty(), ErrorKind::kUnsupported,
          [&] { return "decode_layer on a GPU: " + refusal; });
  return std::make_unique<GroupDecodeBench>(options);
}

}  // namespace penstock::decode
