#include "ops/moe_stage2/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <span>

#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/stream.h"
#include "fabric/cuda/device_rank.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/window_backend.h"
#include "ops/moe_stage2/cuda/align_sm90.h"
#include "ops/moe_stage2/cuda/combine_sm90.h"
#include "ops/moe_stage2/cuda/gemm_maps.h"
#include "ops/moe_stage2/cuda/nccl_all_to_all.h"
#include "ops/moe_stage2/cuda/operator.h"
#include "ops/moe_stage2/cuda/plan_sm90.h"
#include "penstock/core/error.h"
#include "penstock/ops/moe_stage2/routing.h"

namespace penstock::moe_stage2 {
namespace {

using cuda::DeviceBuffer;
using cuda::OwnedEvent;

// Longer than the L2, and than the host needs to enqueue a call behind it.
constexpr std::size_t kScrubBytes = std::size_t{512} << 20;
constexpr std::size_t kPatternBytes = std::size_t{16} << 20;

// E4M3 codes of a normal distribution of deviation 100: what a block scaled to amax 448 looks like.
std::vector<unsigned char> normal_codes(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, 100.0f);
  std::array<unsigned char, 65536> table{};
  for (auto& code : table) code = E4M3::from_float(normal(random)).bits;
  std::vector<unsigned char> codes(count);
  for (std::size_t i = 0; i < count; i += 4) {
    const std::uint64_t bits = random();
    for (std::size_t j = 0; j < 4 && i + j < count; ++j)
      codes[i + j] = table[bits >> (16 * j) & 0xffff];
  }
  return codes;
}

// Fills device memory with repetitions of a pattern whose length divides no row.
void fill(unsigned char* to, std::size_t bytes, const DeviceBuffer<unsigned char>& pattern) {
  for (std::size_t at = 0; at < bytes; at += pattern.size()) {
    PENSTOCK_CUDA_CHECK(cudaMemcpy(to + at, pattern.data(), std::min(pattern.size(), bytes - at),
                                   cudaMemcpyDeviceToDevice));
  }
}

std::vector<float> uniform(std::size_t count, float low, float high, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> values(count);
  for (float& x : values) {
    x = low + (high - low) * static_cast<float>(random() >> 40) * 0x1p-24f;
  }
  return values;
}

std::size_t at_least_one(std::int64_t count) {
  return static_cast<std::size_t>(std::max<std::int64_t>(1, count));
}

// One rank's operands, its plan on local memory, and the inverse tables of its tokens.
class Rig {
 public:
  Rig(const StageBenchOptions& options, int rank)
      : shape_(options.shape),
        routing_(options.remote_fraction < 0.0
                     ? make_routing(shape_, Pattern::kBalanced, options.seed)
                     : make_remote_routing(shape_, options.remote_fraction, options.seed)),
        rank_(rank) {
    make_inverse();
    const std::int64_t tiles = rows_.tiles();
    const auto k = static_cast<std::size_t>(shape_.intermediate);
    const auto h = static_cast<std::size_t>(shape_.hidden);
    const auto experts = static_cast<std::size_t>(shape_.experts_per_rank());
    const DeviceBuffer<unsigned char> pattern(
        normal_codes(kPatternBytes + 4099, options.seed + static_cast<std::uint64_t>(rank)));
    act_ = DeviceBuffer<unsigned char>(at_least_one(tiles) * kTileRows * k);
    weight_ = DeviceBuffer<unsigned char>(experts * h * k);
    fill(act_.data(), act_.size(), pattern);
    fill(weight_.data(), weight_.size(), pattern);
    act_scales_ = DeviceBuffer<float>(
        uniform(at_least_one(tiles) * kTileRows * (k / 128), 0.005f, 0.02f, options.seed + 1));
    weight_scales_ = DeviceBuffer<float>(
        uniform(experts * (h / 128) * (k / 128), 1e-4f, 4e-4f, options.seed + 2));
    const auto slots = static_cast<std::size_t>(shape_.max_tokens_per_rank * shape_.top_k);
    slot_weight_ = DeviceBuffer<float>(uniform(slots, 0.1f, 0.5f, options.seed + 3));
    out_ = DeviceBuffer<std::uint16_t>(static_cast<std::size_t>(shape_.max_tokens_per_rank) * h);
    expert_rows_ = DeviceBuffer<std::int32_t>(rows_.expert_rows);
    rows_.origin.resize(at_least_one(tiles) * kTileRows);
    origin_ = DeviceBuffer<RowOrigin>(rows_.origin);
    PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
  }

  Operands operands() const {
    Operands o;
    o.gemm.act = reinterpret_cast<const E4M3*>(act_.data());
    o.gemm.act_scales = act_scales_.data();
    o.gemm.act_scale_stride = rows_.tiles() * kTileRows;
    o.gemm.weight = reinterpret_cast<const E4M3*>(weight_.data());
    o.gemm.weight_scales = weight_scales_.data();
    o.gemm.hidden = shape_.hidden;
    o.gemm.intermediate = shape_.intermediate;
    o.expert_rows = expert_rows_.data();
    o.origin = origin_.data();
    o.tiles = rows_.tiles();
    o.weight = slot_weight_.data();
    o.tokens = routing_.tokens(rank_);
    o.out = reinterpret_cast<Bf16*>(out_.data());
    return o;
  }

  const SourceRows& rows() const { return rows_; }
  // Rows of this rank's experts for each rank, and of each rank's for this one.
  std::int64_t sent(int to) const { return sent_[static_cast<std::size_t>(to)]; }
  std::int64_t received(int from) const { return received_[static_cast<std::size_t>(from)]; }
  const std::vector<RowPlace>& inverse() const { return inverse_; }
  DeviceBuffer<std::uint16_t>& out() { return out_; }

 private:
  void make_inverse() {
    inverse_.resize(static_cast<std::size_t>(shape_.max_tokens_per_rank * shape_.top_k));
    for (int source = 0; source < shape_.ranks; ++source) {
      SourceRows rows = rows_at(routing_, source);
      // Place of each row for this rank: its stable rank among them, as the plan has it.
      std::int32_t next = 0;
      for (const RowOrigin& origin : rows.origin) {
        if (origin.rank == rank_) {
          inverse_[static_cast<std::size_t>(slot_index(origin.token, origin.slot, shape_.top_k))] =
              {source, next++};
        }
        if (source == rank_ && origin.rank >= 0) ++sent_[static_cast<std::size_t>(origin.rank)];
      }
      received_[static_cast<std::size_t>(source)] = next;
      if (source == rank_) rows_ = std::move(rows);
    }
  }

  Shape shape_;
  Routing routing_;
  int rank_;
  SourceRows rows_;
  std::array<std::int64_t, moe_stage2::kMaxRanks> sent_{};
  std::array<std::int64_t, moe_stage2::kMaxRanks> received_{};
  std::vector<RowPlace> inverse_;
  DeviceBuffer<unsigned char> act_, weight_;
  DeviceBuffer<float> act_scales_, weight_scales_, slot_weight_;
  DeviceBuffer<std::int32_t> expert_rows_;
  DeviceBuffer<RowOrigin> origin_;
  DeviceBuffer<std::uint16_t> out_;
};

// Plan, GEMM and combine on local memory: the floors, and the baseline's stages.
class LocalStages {
 public:
  LocalStages(const Shape& shape, Rig& rig, int rank, int sms)
      : shape_(shape), rig_(rig), rank_(rank), sms_(sms), inverse_(rig.inverse()) {
    const auto tiles = at_least_one(rig.rows().tiles());
    const std::int64_t pair = worst_rows_per_pair(shape);
    words_ = DeviceBuffer<std::int32_t>(2 + 3 * tiles + (tiles + 1) * moe_stage2::kMaxRanks +
                                        static_cast<std::size_t>(pair * shape.ranks));
    words_.fill(0);
    place_ = DeviceBuffer<RowPlace>(tiles * kTileRows);
    scratch_ = DeviceBuffer<std::int32_t>(tiles * moe_stage2::kMaxRanks);
    next_step_ = DeviceBuffer<std::uint32_t>(1);
    next_step_.fill(0);
    std::int32_t* next = words_.data();
    plan_.fault = next++;
    plan_.tile_count = next++;
    plan_.tile_expert = next;
    plan_.tile_rows = next += tiles;
    plan_.tile_mate = next += tiles;
    plan_.prefix = next += tiles;
    plan_.row_table = next + (tiles + 1) * moe_stage2::kMaxRanks;
    plan_.row_table_stride = pair;
    plan_.place = place_.data();
    send_.row_bytes = receive_.row_bytes = wire_row_bytes(shape.hidden, shape.wire);
    std::int64_t sent = 0;
    std::int64_t received = 0;
    for (int r = 0; r < shape.ranks; ++r) {
      sent += rig.sent(r);
      received += rig.received(r);
    }
    out_rows_ = DeviceBuffer<unsigned char>(at_least_one(sent * send_.row_bytes));
    in_rows_ = DeviceBuffer<unsigned char>(at_least_one(received * send_.row_bytes));
    in_rows_.fill(0x38);  // finite in either format
    sent = received = 0;
    for (int r = 0; r < shape.ranks; ++r) {
      send_.base[r] = out_rows_.data() + sent * send_.row_bytes;
      receive_.base[r] = in_rows_.data() + received * send_.row_bytes;
      pieces_.push_back({send_.base[r], receive_.base[r],
                         static_cast<std::uint64_t>(rig.sent(r) * send_.row_bytes),
                         static_cast<std::uint64_t>(rig.received(r) * send_.row_bytes)});
      sent += rig.sent(r);
      received += rig.received(r);
    }
    // Rows at home are written where they are read.
    home_ = send_;
    home_.base[rank] = receive_.base[rank];
    const Operands o = rig.operands();
    if (o.tiles > 0) {
      maps_ = make_gemm_maps(o.gemm.act, o.tiles * kTileRows, o.gemm.weight,
                             shape.experts_per_rank(), shape.hidden, shape.intermediate);
    }
  }

  void plan(cudaStream_t on) {
    const Operands o = rig_.operands();
    PlanInputs in;
    in.expert_rows = o.expert_rows;
    in.origin = o.origin;
    in.experts = shape_.experts_per_rank();
    in.ranks = shape_.ranks;
    in.top_k = shape_.top_k;
    in.reserved = worst_rows_per_pair(shape_);
    in.tile_capacity = o.tiles;
    PENSTOCK_CUDA_CHECK(launch_plan_sm90(in, plan_, scratch_.data(), {}, on));
  }
  void gemm(cudaStream_t on) {
    const Operands o = rig_.operands();
    if (o.tiles == 0) return;
    GroupedGemmArgs args;
    args.act_scales = o.gemm.act_scales;
    args.act_scale_stride = o.gemm.act_scale_stride;
    args.weight_scales = o.gemm.weight_scales;
    args.hidden = shape_.hidden;
    args.k_blocks = shape_.intermediate / kScaleBlock;
    args.tile_count = plan_.tile_count;
    args.tile_expert = plan_.tile_expert;
    args.tile_rows = plan_.tile_rows;
    args.tile_mate = plan_.tile_mate;
    args.place = plan_.place;
    args.next_step = next_step_.data();
    args.runs = home_;
    PENSTOCK_CUDA_CHECK(launch_grouped_gemm_sm90(args, maps_, shape_.wire, sms_ - sms_ % 2, on));
  }
  void combine(cudaStream_t on) {
    const Operands o = rig_.operands();
    CombineArgs args;
    args.runs = receive_;
    args.inverse = inverse_.data();
    args.weight = o.weight;
    args.out = reinterpret_cast<std::uint16_t*>(o.out);
    args.tokens = static_cast<std::int32_t>(o.tokens);
    args.top_k = shape_.top_k;
    args.hidden = shape_.hidden;
    PENSTOCK_CUDA_CHECK(launch_combine_sm90(args, shape_.wire, sms_, on));
  }
  const std::vector<NcclPiece>& pieces() const { return pieces_; }

 private:
  Shape shape_;
  Rig& rig_;
  int rank_;
  int sms_;
  DeviceBuffer<RowPlace> inverse_;
  DeviceBuffer<std::int32_t> words_, scratch_;
  DeviceBuffer<std::uint32_t> next_step_;
  DeviceBuffer<RowPlace> place_;
  DeviceBuffer<unsigned char> out_rows_, in_rows_;
  PlanOutputs plan_;
  RunBases send_, receive_, home_;
  GroupedGemmMaps maps_{};
  std::vector<NcclPiece> pieces_;
};

// Starts a stretch of work at the same time on all ranks.
class Aligner {
 public:
  explicit Aligner(const std::shared_ptr<cuda::DeviceRank>& rank)
      : window_(Window::create(
            rank->team(),
            Layout::from(kAlignTable, {static_cast<std::uint64_t>(rank->team()->size())}, "bench"),
            cuda::device_window_backend(rank->device()))),
        epoch_(std::vector<std::uint64_t>{0}) {
    PENSTOCK_CUDA_CHECK(load_align_sm90());
    args_.guard = rank->guard_view(rank->team()->next_operator());
    args_.window = rank->window_view(*window_);
    args_.epoch = epoch_.data();
  }
  void align(cudaStream_t on) const { PENSTOCK_CUDA_CHECK(launch_align_sm90(args_, on)); }

 private:
  std::shared_ptr<Window> window_;
  DeviceBuffer<std::uint64_t> epoch_;
  AlignArgs args_;
};

// A whole call as it is timed: enqueued anew, or as a graph.
class Call {
 public:
  Call(std::unique_ptr<MoeStage2> op, const Operands& operands, bool graph, cudaStream_t on)
      : op_(std::move(op)), operands_(operands) {
    op_->prepare({on});
    if (!graph) return;
    cudaGraph_t recorded = nullptr;
    PENSTOCK_CUDA_CHECK(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal));
    op_->run({on}, operands_);
    PENSTOCK_CUDA_CHECK(cudaStreamEndCapture(on, &recorded));
    PENSTOCK_CUDA_CHECK(cudaGraphInstantiate(&graph_, recorded, 0));
    PENSTOCK_CUDA_CHECK(cudaGraphDestroy(recorded));
    PENSTOCK_CUDA_CHECK(cudaGraphUpload(graph_, on));
    PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(on));
  }
  ~Call() {
    if (graph_ != nullptr) (void)cudaGraphExecDestroy(graph_);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  void enqueue(cudaStream_t on) {
    if (graph_ == nullptr) {
      op_->run({on}, operands_);
    } else {
      PENSTOCK_CUDA_CHECK(cudaGraphLaunch(graph_, on));
      op_->track({on});
    }
  }
  const MoeStage2& op() const { return *op_; }

 private:
  std::unique_ptr<MoeStage2> op_;
  Operands operands_;
  cudaGraphExec_t graph_ = nullptr;
};

// A random order that is the same on every rank: none always runs behind the same one, behind whose
// light load the GPU's clock may be higher.
std::vector<std::size_t> order_of_round(std::size_t count, int round) {
  std::mt19937_64 random(static_cast<std::uint64_t>(round));
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t i = count; i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  return order;
}

bool is_call(StageVariant v) { return v <= StageVariant::kNccl; }

Options options_of(const StageBenchOptions& bench, StageVariant v) {
  Options options;
  options.tiles_per_chunk = bench.tiles_per_chunk;
  options.copy_ctas = bench.copy_ctas;
  options.fuse = v != StageVariant::kUnfused;
  if (v == StageVariant::kSm) options.transport = TransportKind::kSm;
  if (v == StageVariant::kDirect) options.transport = TransportKind::kDirect;
  return options;
}

class Bench {
 public:
  Bench(const TeamHandle& team, int device, const StageBenchOptions& options)
      : team_(team),
        options_(options),
        rank_(cuda::DeviceRank::create(team, device)),
        rig_(options, team->rank()),
        stages_(options.shape, rig_, team->rank(), rank_->sms()),
        aligner_(rank_),
        scrub_(kScrubBytes) {
    PENSTOCK_CUDA_CHECK(load_grouped_gemm_sm90());
    PENSTOCK_CUDA_CHECK(load_combine_sm90());
    PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    rank_->prepare(stream_);
  }
  ~Bench() {
    calls_.clear();
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  StageBench run() {
    StageBench result = describe();
    std::vector<StageVariant> variants = options_.variants;
    if (variants.empty()) {
      for (int v = 0; v < kStageVariants; ++v) variants.push_back(static_cast<StageVariant>(v));
    }
    for (const StageVariant v : variants) add(v, result);
    stages_.plan(stream_);
    PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream_));
    compare(result);
    time(result);
    return result;
  }

 private:
  StageBench describe() const {
    const Shape& shape = options_.shape;
    StageBench result;
    const cuda::GpuState state = cuda::gpu_state(rank_->device());
    result.machine = state.name;
    result.driver = state.driver_version;
    result.shared_gpu = rank_->sms() < sm_count();
    result.rows = rig_.rows().rows();
    result.tiles = rig_.rows().tiles();
    for (int r = 0; r < shape.ranks; ++r) {
      if (r != team_->rank()) result.sent_rows += rig_.sent(r);
      result.spilled_rows += std::max<std::int64_t>(0, rig_.sent(r) - reserved_rows(shape));
    }
    const auto row = static_cast<double>(wire_row_bytes(shape.hidden, shape.wire));
    result.flop = 2.0 * static_cast<double>(result.rows) * shape.hidden * shape.intermediate;
    result.wire_bytes = static_cast<double>(result.sent_rows) * row;
    result.combine_bytes = static_cast<double>(shape.max_tokens_per_rank) *
                           (shape.top_k * (row + 12.0) + 2.0 * shape.hidden);
    return result;
  }
  int sm_count() const {
    int count = 0;
    PENSTOCK_CUDA_CHECK(
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, rank_->device()));
    return count;
  }

  // Collective. A variant that cannot run is left out, with the reason in the result.
  void add(StageVariant v, StageBench& result) {
    if (v == StageVariant::kNccl) {
      nccl_ = open_nccl_all_to_all(*team_, result.shared_gpu, options_.nccl, result.nccl);
      if (nccl_ == nullptr) return;
      result.nccl = nccl_->version();
      bodies_[v] = [this](cudaStream_t on) {
        stages_.plan(on);
        stages_.gemm(on);
        nccl_->exchange(stages_.pieces(), on);
        stages_.combine(on);
      };
    } else if (is_call(v)) {
      auto call = std::make_unique<Call>(
          make_cuda_moe_stage2(rank_, options_.shape, options_of(options_, v)), rig_.operands(),
          options_.graph, stream_);
      bodies_[v] = [c = call.get()](cudaStream_t on) { c->enqueue(on); };
      calls_[v] = std::move(call);
    } else if (v == StageVariant::kGemm) {
      bodies_[v] = [this](cudaStream_t on) { stages_.gemm(on); };
    } else if (v == StageVariant::kCombine) {
      bodies_[v] = [this](cudaStream_t on) { stages_.combine(on); };
    } else {
      bodies_[v] = [this](cudaStream_t on) { stages_.plan(on); };
    }
    result.timings.push_back({v, {}, {}});
  }

  // Every whole call once, `out` poisoned before: the same bytes everywhere?
  void compare(StageBench& result) {
    std::vector<std::uint16_t> first;
    std::int64_t differing = 0;
    for (StageTiming& timing : result.timings) {
      if (!is_call(timing.variant)) continue;
      PENSTOCK_CUDA_CHECK(cudaMemsetAsync(rig_.out().data(), 0xA5, rig_.out().bytes(), stream_));
      PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream_));
      team_->barrier();
      const TransportCounters before = counters(timing.variant);
      bodies_.at(timing.variant)(stream_);
      PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream_));
      team_->check();
      team_->barrier();
      timing.per_call = difference(counters(timing.variant), before);
      std::vector<std::uint16_t> out = rig_.out().download();
      if (!result.compared.empty()) result.compared += ' ';
      result.compared += to_string(timing.variant);
      if (first.empty()) {
        first = std::move(out);
        continue;
      }
      const auto h = static_cast<std::size_t>(options_.shape.hidden);
      for (std::size_t row = 0; row < out.size(); row += h) {
        differing += std::memcmp(out.data() + row, first.data() + row, 2 * h) != 0;
      }
    }
    std::vector<std::int64_t> all(static_cast<std::size_t>(team_->size()));
    team_->all_gather(std::as_bytes(std::span(&differing, 1)),
                      std::as_writable_bytes(std::span(all)));
    for (const std::int64_t rows : all) result.differing_rows += rows;
  }
  TransportCounters counters(StageVariant v) const {
    const auto call = calls_.find(v);
    return call == calls_.end() ? TransportCounters{} : call->second->op().counters();
  }
  static TransportCounters difference(const TransportCounters& a, const TransportCounters& b) {
    return {a.puts - b.puts, a.copies - b.copies, a.bytes - b.bytes,
            a.direct_bytes - b.direct_bytes, a.signals - b.signals};
  }

  void time(StageBench& result) {
    const OwnedEvent start{cudaEventDefault};
    const OwnedEvent stop{cudaEventDefault};
    const std::size_t count = result.timings.size();
    for (int round = -options_.warmup; round < options_.rounds; ++round) {
      for (const std::size_t variant : order_of_round(count, round + options_.warmup)) {
        StageTiming& timing = result.timings[variant];
        team_->barrier();
        PENSTOCK_CUDA_CHECK(cudaMemsetAsync(scrub_.data(), round & 0xff, scrub_.bytes(), stream_));
        aligner_.align(stream_);
        rank_->track(stream_);
        start.record(stream_);
        bodies_.at(timing.variant)(stream_);
        stop.record(stream_);
        PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream_));
        team_->check();
        float ms = 0.0f;
        PENSTOCK_CUDA_CHECK(cudaEventElapsedTime(&ms, start.get(), stop.get()));
        if (round >= 0) timing.us.push_back(1e3 * static_cast<double>(ms));
      }
    }
    for (StageTiming& timing : result.timings) {
      std::vector<double> all(timing.us.size() * static_cast<std::size_t>(team_->size()));
      team_->all_gather(std::as_bytes(std::span(timing.us)),
                        std::as_writable_bytes(std::span(all)));
      for (std::size_t i = 0; i < all.size(); ++i) {
        double& slowest = timing.us[i % timing.us.size()];
        slowest = std::max(slowest, all[i]);
      }
    }
  }

  TeamHandle team_;
  StageBenchOptions options_;
  std::shared_ptr<cuda::DeviceRank> rank_;
  Rig rig_;
  LocalStages stages_;
  Aligner aligner_;
  DeviceBuffer<unsigned char> scrub_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<NcclAllToAll> nccl_;
  std::map<StageVariant, std::unique_ptr<Call>> calls_;
  std::map<StageVariant, std::function<void(cudaStream_t)>> bodies_;
};

}  // namespace

StageBench gpu_bench_stage2(const TeamHandle& team, int device, const StageBenchOptions& options) {
  collectively(*team, [&] {
    validate(options.shape);
    require(options.shape.ranks == team->size() && options.rounds > 0 && options.warmup >= 0,
            ErrorKind::kInvalidArgument, [&] {
              return fmt::format(
                  "moe_stage2 bench: a shape of {} ranks on a team of {}, {} rounds after {}",
                  options.shape.ranks, team->size(), options.rounds, options.warmup);
            });
    cuda::require_sm90(device);
  });
  const cuda::ScopedDevice scope(device);
  Bench bench(team, device, options);
  StageBench result = bench.run();
  team->barrier();  // nobody frees what a peer may still map
  return result;
}

}  // namespace penstock::moe_stage2
