// moe_stage2 on GPUs: what a call enqueues, and what lives between calls. The protocol is the CPU
// operator's (cpu.cpp); docs/moe-stage2.md has both.
#include "ops/moe_stage2/cuda/operator.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/stream.h"
#include "fabric/cuda/copy_engine.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/window_backend.h"
#include "ops/moe_stage2/cuda/gemm_maps.h"
#include "ops/moe_stage2/cuda/operator_kernels.h"
#include "ops/moe_stage2/cuda/plan_sm90.h"
#include "ops/moe_stage2/operands.h"
#include "penstock/core/error.h"
#include "penstock/ops/moe_stage2/heuristics.h"
#include "penstock/ops/moe_stage2/tuning.h"

namespace penstock::moe_stage2 {
namespace {

using cuda::capturing;
using cuda::DeviceBuffer;
using cuda::OwnedEvent;
using cuda::ScopedDevice;

bool aligned(const void* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

// A stream beside the caller's, and the events that fork and join it.
struct SideStream : cuda::OwnedStream {
  // What follows on `to` comes behind what is on `from` now.
  void order(cudaStream_t from, cudaStream_t to) const {
    event.record(from);
    event.hold(to);
  }
  OwnedEvent event;
};

class CudaMoeStage2 final : public MoeStage2, public RearmHook {
 public:
  CudaMoeStage2(std::shared_ptr<cuda::DeviceRank> rank, const Shape& shape, const Options& options)
      : device_rank_(std::move(rank)),
        team_(device_rank_->team()),
        shape_(shape),
        options_(options),
        rank_(team_->rank()),
        op_(team_->next_operator()) {
    const bool shared = any_rank_shares();
    collectively(*team_, [&] { settle_options(shared); });
    window_ = Window::create(team_, layout_, cuda::device_window_backend(device_rank_->device()));
    collectively(*team_, [&] { build(); });
    team_->add_hook(this);
  }

  ~CudaMoeStage2() override {
    team_->remove_hook(this);
    const ScopedDevice scope(device_rank_->device());
    // Kernels end by themselves, at their deadlines at the latest.
    (void)cudaEventSynchronize(last_->get());
    // A peer may still need what the engine holds; a team that faulted needs nothing any more.
    try {
      if (engine_ != nullptr && !team_->faulted()) engine_->quiet();
    } catch (const Error&) {
      // The fault is on record at the team, where check() finds it.
    }
  }

  void run(Stream stream, const Operands& o) override {
    check_operands(o, shape_);
    check_alignment(o);
    throw_device_findings();
    team_->check();
    const ScopedDevice scope(device_rank_->device());
    auto* on = static_cast<cudaStream_t>(stream.handle);
    const bool graph = capturing(on);
    if (!graph && !prepared_.contains(on)) prepare(stream);
    // Calls share tables and counters: one behind the other, whatever their streams.
    if (!graph) last_->hold(on);
    enqueue(o, on);
    if (graph) return;
    last_->record(on);
    device_rank_->track(on);
  }

  void prepare(Stream stream) override {
    auto* on = static_cast<cudaStream_t>(stream.handle);
    device_rank_->prepare(on);
    prepared_.insert(on);
  }
  void track(Stream stream) override {
    device_rank_->track(static_cast<cudaStream_t>(stream.handle));
    throw_device_findings();
  }

  const Shape& shape() const noexcept override { return shape_; }
  const Layout& layout() const noexcept override { return layout_; }
  const CallFacts& facts() const noexcept override {
    for (std::size_t d = 0; d < facts_.rows.size(); ++d) {
      facts_.rows[d] = report()->rows[d];
      facts_.spilled[d] = report()->spilled[d];
    }
    return facts_;
  }
  TransportCounters counters() const noexcept override {
    TransportCounters counters;
    const std::uint64_t bytes = report()->rows_sent * index_.shape.row_bytes;
    if (engine_ != nullptr) counters = engine_->counters();
    if (options_.transport == TransportKind::kSm) counters.bytes = bytes;
    if (options_.transport == TransportKind::kDirect) counters.direct_bytes = bytes;
    if (engine_ == nullptr) counters.signals = report()->signals;
    counters.direct_bytes += report()->table_bytes;
    return counters;
  }

  void quiesce() override {
  }  // DeviceRank's hook has waited for the streams, the engine's for copies
  std::uint64_t highest_epoch() const override {
    const ScopedDevice scope(device_rank_->device());
    std::uint64_t epoch = 0;
    cuda::read_device(&epoch, &state_.data()->epoch, sizeof(epoch));
    return epoch;
  }
  void resume(std::uint64_t floor) override {
    const ScopedDevice scope(device_rank_->device());
    CallState state;
    cuda::read_device(&state, state_.data(), sizeof(state));
    state.epoch = floor;
    state.stop = state.chunks_done = state.table_arrivals = state.copy_arrivals = 0;
    std::fill(std::begin(state.peer_arrivals), std::end(state.peer_arrivals), 0);
    cuda::write_device(state_.data(), &state, sizeof(state));
    // Nothing is in flight: every slot is free, whoever stopped short of saying so.
    std::vector<std::uint64_t> words(kSlots * static_cast<std::size_t>(shape_.ranks) * kLineBytes /
                                     sizeof(std::uint64_t));
    for (std::size_t i = 0; i < words.size(); i += kLineBytes / sizeof(std::uint64_t)) {
      words[i] = floor;
    }
    cuda::write_device(window_->region(rank_, kConsumed), words.data(),
                       words.size() * sizeof(std::uint64_t));
    report()->plan_fault = report()->origin_fault = kPlanWhole;
    stopped_.clear();
  }

 private:
  bool staged() const { return options_.transport != TransportKind::kDirect; }
  CallReport* report() const { return report_.as<CallReport>(); }

  // Collective, because all ranks have to choose the same.
  bool any_rank_shares() const {
    int sms = 0;
    const cudaError_t status =
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device_rank_->device());
    const unsigned char mine = status == cudaSuccess && device_rank_->sms() < sms ? 1 : 0;
    std::vector<unsigned char> all(static_cast<std::size_t>(team_->size()));
    team_->all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    return std::find(all.begin(), all.end(), 1) != all.end();
  }

  void settle_options(bool shared) {
    validate(shape_);
    require(shape_.ranks == team_->size(), ErrorKind::kInvalidArgument, [&] {
      return fmt::format("moe_stage2: the shape has {} ranks, the team {}", shape_.ranks,
                         team_->size());
    });
    require(options_.tiles_per_chunk >= 0, ErrorKind::kInvalidArgument, [&] {
      return fmt::format("moe_stage2: tiles_per_chunk is {}; give at least 1, or 0 to choose",
                         options_.tiles_per_chunk);
    });
    if (options_.tiles_per_chunk == 0) options_.tiles_per_chunk = choose_tiles_per_chunk(shape_);
    if (options_.choose_transport) {
      options_.transport =
          choose_transport(cuda::gpu_state(device_rank_->device()).name, shape_, shared);
    }
    const bool copies = options_.transport == TransportKind::kSm && options_.fuse;
    require(!copies || (options_.copy_ctas >= 0 && options_.copy_ctas <= kMostCopyCtas &&
                        options_.copy_ctas % 2 == 0),
            ErrorKind::kInvalidArgument, [&] {
              return fmt::format(
                  "moe_stage2: {} copy CTAs; give an even number from 2 to {}, or 0 to choose",
                  options_.copy_ctas, kMostCopyCtas);
            });
    if (options_.copy_ctas == 0) {
      options_.copy_ctas =
          std::min(choose_copy_ctas(shape_), std::max(2, device_rank_->sms() / 8 * 2));
    }
    const bool beside = copies && shape_.ranks > 1;
    gemm_ctas_ = device_rank_->sms() - (beside ? options_.copy_ctas : 0);
    gemm_ctas_ -= gemm_ctas_ % 2;
    require(gemm_ctas_ >= 2, ErrorKind::kUnsupported, [&] {
      return fmt::format(
          "moe_stage2: rank {} may use {} SMs, {} of them to copy; the GEMM needs two", rank_,
          device_rank_->sms(), beside ? options_.copy_ctas : 0);
    });
    layout_ = window_layout(shape_, staged());
  }

  void build() {
    const ScopedDevice scope(device_rank_->device());
    for (const cudaError_t status :
         {load_grouped_gemm_sm90(), load_tables_sm90(), load_ship_sm90(), load_post_all_sm90(),
          load_invert_sm90(), load_combine_arrivals_sm90()}) {
      cuda::check(status, "loading moe_stage2's kernels");
    }
    index_ = window_index(window_shape(shape_, staged()));
    const auto mapping = cuda::device_mapping(*window_);
    where_.sms = device_rank_->sms();
    for (int r = 0; r < shape_.ranks; ++r) {
      where_.shared = where_.shared || (r != rank_ && mapping->same_device(r));
    }
    if (options_.transport == TransportKind::kCopyEngine) {
      engine_ = std::make_unique<cuda::DeviceCopyEngine>(device_rank_, window_);
    }
    if (options_.transport == TransportKind::kSm && options_.fuse && shape_.ranks > 1) {
      side_ = std::make_unique<SideStream>();
      device_rank_->prepare(side_->handle);
    }
    last_.emplace();

    const auto tiles = static_cast<std::size_t>(
        std::max<std::int64_t>(1, worst_padded_rows_per_rank(shape_) / kTileRows));
    const std::int64_t pair = worst_rows_per_pair(shape_);
    // A run's table starts on 16 bytes.
    plan_.row_table_stride = (pair + 3) / 4 * 4;
    words_ = DeviceBuffer<std::int32_t>(
        4 + 3 * tiles + (tiles + 1) * kMaxRanks +
        static_cast<std::size_t>(plan_.row_table_stride * shape_.ranks) + 4);
    place_ = DeviceBuffer<RowPlace>(tiles * kTileRows);
    scratch_ = DeviceBuffer<std::int32_t>(tiles * kMaxRanks);
    counters_ = DeviceBuffer<std::uint32_t>(
        (tiles / static_cast<std::size_t>(options_.tiles_per_chunk) + 1) * kCounterStride);
    next_step_ = DeviceBuffer<std::uint32_t>(1);
    cuda::zero_device(next_step_.data(), next_step_.bytes());
    inverse_ =
        DeviceBuffer<RowPlace>(static_cast<std::size_t>(shape_.max_tokens_per_rank * shape_.top_k));
    state_ = DeviceBuffer<CallState>(1);
    report_ = cuda::PinnedMemory(sizeof(CallReport));
    *report() = CallReport{};
    const CallState fresh;
    cuda::write_device(state_.data(), &fresh, sizeof(fresh));
    cuda::zero_device(words_.data(), words_.bytes());

    std::int32_t* next = words_.data();
    plan_.fault = next++;
    plan_.tile_count = next++;
    plan_.tile_expert = next;
    plan_.tile_rows = next += tiles;
    plan_.tile_mate = next += tiles;
    plan_.prefix = next += tiles;
    next += (tiles + 1) * kMaxRanks;
    plan_.row_table = next + (4 - (next - words_.data()) % 4) % 4;
    plan_.place = place_.data();

    post_.kind = options_.transport == TransportKind::kCopyEngine ? PostKind::kCopyEngine
                                                                  : PostKind::kDirect;
    post_.ranks = shape_.ranks;
    post_.rank = rank_;
    post_.guard = device_rank_->guard_view(op_);
    if (options_.deadline.count() > 0) {
      post_.guard.deadline_ns = static_cast<std::uint64_t>(options_.deadline.count());
    }
    post_.window = device_rank_->window_view(*window_);
    if (engine_ != nullptr) post_.ring = engine_->ring_view();
    post_.index = index_;
    post_.prefix = plan_.prefix;
    post_.epoch = &state_.data()->epoch;
    post_.stop = &state_.data()->stop;
    post_.chunks_done = &state_.data()->chunks_done;
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) set_bases(slot);
  }

  // Where rows are written and read in the calls of a slot.
  void set_bases(std::uint32_t slot) {
    const auto at = [](std::byte* window, std::uint64_t offset) {
      return reinterpret_cast<unsigned char*>(window + offset);
    };
    RunBases& to = written_[slot];
    RunBases& from = read_[slot];
    to.row_bytes = from.row_bytes = static_cast<std::int64_t>(index_.shape.row_bytes);
    for (int r = 0; r < shape_.ranks; ++r) {
      const bool stays = r == rank_ || !staged();
      to.base[r] = stays ? at(window_->base(r), index_.landing(slot, rank_, 0))
                         : at(window_->local(), index_.send(slot, r, 0));
      to.base[kMaxRanks + r] = at(window_->local(), index_.spill(r, 0));
      from.base[r] = at(window_->local(), index_.landing(slot, r, 0));
      from.base[kMaxRanks + r] = at(window_->base(r), index_.spill(rank_, 0));
    }
  }

  void check_alignment(const Operands& o) const {
    require(aligned(o.gemm.act, 16) && aligned(o.gemm.weight, 16) &&
                aligned(o.gemm.act_scales, 16) && aligned(o.out, 16),
            ErrorKind::kInvalidArgument, [] {
              return std::string(
                  "moe_stage2: act, act_scales, the experts' weight and out must be 16-byte "
                  "aligned");
            });
    require(o.tiles == 0 || (o.gemm.act_scale_stride % kTileRows == 0 &&
                             o.gemm.act_scale_stride >= o.tiles * kTileRows),
            ErrorKind::kInvalidArgument, [&] {
              return fmt::format(
                  "moe_stage2: act_scale_stride is {}; give a multiple of {} that holds {} rows",
                  o.gemm.act_scale_stride, kTileRows, o.tiles * kTileRows);
            });
  }

  // What kernels of earlier calls found wrong with their operands.
  void throw_device_findings() {
    CallReport& r = *report();
    const auto take = [](std::int32_t& word) {
      return std::atomic_ref<std::int32_t>(word).exchange(kPlanWhole, std::memory_order_acquire);
    };
    const std::int32_t plan = take(r.plan_fault);
    const std::int32_t origin = take(r.origin_fault);
    if (plan == kPlanWhole && origin == kPlanWhole) {
      // Without a rearm every further call would leave `out` as it was and say nothing.
      require(stopped_.empty(), ErrorKind::kInvalidArgument, [&] { return stopped_; });
      return;
    }
    if (shape_.ranks > 1) {
      stopped_ =
          "moe_stage2: an earlier call was refused on the device and its peers had no rows of it; "
          "call the team's rearm() on every rank before the next one";
    } else {  // nobody else's words depend on the call that was left out
      const ScopedDevice scope(device_rank_->device());
      const std::uint32_t go = 0;
      cuda::write_device(&state_.data()->stop, &go, sizeof(go));
    }
    require(plan == kPlanWhole, ErrorKind::kInvalidArgument,
            [&] { return "moe_stage2, an earlier call: " + describe_plan_fault(plan); });
    throw_error(ErrorKind::kInvalidArgument,
                "moe_stage2, an earlier call: a peer held a row for a token or slot that this rank "
                "does not have");
  }

  void enqueue(const Operands& o, cudaStream_t on) {
    const std::int64_t chunk = options_.tiles_per_chunk;
    const bool fused = options_.fuse && o.tiles > 0;
    PlanInputs in;
    in.expert_rows = o.expert_rows;
    in.origin = o.origin;
    in.experts = shape_.experts_per_rank();
    in.ranks = shape_.ranks;
    in.top_k = shape_.top_k;
    in.reserved = reserved_rows(shape_);
    in.tile_capacity = o.tiles;
    PlanExtras extras;
    extras.chunk_counters = counters_.data();
    extras.counters = (o.tiles + chunk - 1) / chunk;
    extras.inverse = inverse_.data();
    extras.slots = o.tokens * shape_.top_k;
    extras.rank = rank_;
    PENSTOCK_CUDA_CHECK(launch_plan_sm90(in, plan_, scratch_.data(), extras, on));

    TablesArgs tables;
    tables.guard = post_.guard;
    tables.window = post_.window;
    tables.index = index_;
    tables.state = state_.data();
    tables.report = report();
    tables.plan = plan_;
    PENSTOCK_CUDA_CHECK(launch_tables_sm90(tables, where_, on));

    ShipArgs ship;
    ship.post = post_;
    ship.state = state_.data();
    ship.tile_count = plan_.tile_count;
    ship.chunk_counters = counters_.data();
    ship.tiles_per_chunk = options_.tiles_per_chunk;
    ship.column_tiles = (shape_.hidden + kGemmTileColumns - 1) / kGemmTileColumns;
    const bool beside = side_ != nullptr && fused;
    if (beside) {
      side_->order(on, side_->handle);
      PENSTOCK_CUDA_CHECK(launch_ship_sm90(ship, options_.copy_ctas, true, side_->handle));
    }
    if (o.tiles > 0) enqueue_gemm(o, fused, on);
    if (beside) {
      side_->order(side_->handle, on);
    } else if (options_.transport == TransportKind::kSm) {
      if (shape_.ranks > 1) {
        PENSTOCK_CUDA_CHECK(launch_ship_sm90(ship, where_.sms - where_.sms % 2, false, on));
      }
    } else if (!fused) {
      PENSTOCK_CUDA_CHECK(launch_post_all_sm90(ship, on));
    }
    enqueue_combine(o, on);
  }

  void enqueue_gemm(const Operands& o, bool fused, cudaStream_t on) {
    GroupedGemmArgs gemm;
    gemm.act_scales = o.gemm.act_scales;
    gemm.act_scale_stride = o.gemm.act_scale_stride;
    gemm.weight_scales = o.gemm.weight_scales;
    gemm.hidden = shape_.hidden;
    gemm.k_blocks = shape_.intermediate / kScaleBlock;
    gemm.tile_count = plan_.tile_count;
    gemm.tile_expert = plan_.tile_expert;
    gemm.tile_rows = plan_.tile_rows;
    gemm.tile_mate = plan_.tile_mate;
    gemm.place = plan_.place;
    gemm.next_step = next_step_.data();
    gemm.runs = written_[0];
    gemm.runs_odd = written_[1];
    gemm.epoch = post_.epoch;
    gemm.tiles_per_chunk = options_.tiles_per_chunk;
    if (fused) {
      gemm.chunk_counters = counters_.data();
      gemm.post = post_;
      if (options_.transport == TransportKind::kSm) gemm.post.kind = PostKind::kNone;
    }
    if (o.gemm.act != mapped_.act || o.tiles != mapped_.tiles || o.gemm.weight != mapped_.weight) {
      maps_ = make_gemm_maps(o.gemm.act, o.tiles * kTileRows, o.gemm.weight,
                             shape_.experts_per_rank(), shape_.hidden, shape_.intermediate);
      mapped_ = {o.gemm.act, o.gemm.weight, o.tiles};
    }
    PENSTOCK_CUDA_CHECK(launch_grouped_gemm_sm90(gemm, maps_, shape_.wire, gemm_ctas_, on));
  }

  void enqueue_combine(const Operands& o, cudaStream_t on) {
    InvertArgs invert;
    invert.guard = post_.guard;
    invert.index = index_;
    invert.window = window_->local();
    invert.state = state_.data();
    invert.report = report();
    invert.inverse = inverse_.data();
    invert.slots = o.tokens * shape_.top_k;
    invert.ranks = shape_.ranks;
    invert.rank = rank_;
    PENSTOCK_CUDA_CHECK(launch_invert_sm90(invert, where_, on));

    CombineArgs combine;
    combine.inverse = inverse_.data();
    combine.weight = o.weight;
    combine.out = reinterpret_cast<std::uint16_t*>(o.out);
    combine.tokens = static_cast<std::int32_t>(o.tokens);
    combine.top_k = shape_.top_k;
    combine.hidden = shape_.hidden;
    combine.runs = read_[0];
    CombineArgs odd = combine;
    odd.runs = read_[1];
    ArrivalsArgs arrivals;
    arrivals.guard = post_.guard;
    arrivals.index = index_;
    arrivals.window = window_->local();
    arrivals.state = state_.data();
    arrivals.rank = rank_;
    PENSTOCK_CUDA_CHECK(
        launch_combine_arrivals_sm90(combine, odd, arrivals, shape_.wire, where_, on));
  }

  struct Mapped {
    const void* act = nullptr;
    const void* weight = nullptr;
    std::int64_t tiles = -1;
  };

  std::shared_ptr<cuda::DeviceRank> device_rank_;
  TeamHandle team_;
  Shape shape_;
  Options options_;
  int rank_;
  std::int32_t op_;
  int gemm_ctas_ = 0;
  Layout layout_;
  std::shared_ptr<Window> window_;
  WindowIndex index_;
  Residency where_;
  std::unique_ptr<cuda::DeviceCopyEngine> engine_;
  std::unique_ptr<SideStream> side_;
  std::optional<OwnedEvent> last_;  // end of the latest call, on the caller's stream
  std::string stopped_;             // why no call can run before a rearm; empty: they can
  std::set<cudaStream_t> prepared_;

  DeviceBuffer<std::int32_t> words_;  // what plan_ points to, places apart
  DeviceBuffer<RowPlace> place_;
  DeviceBuffer<std::int32_t> scratch_;
  DeviceBuffer<std::uint32_t> counters_, next_step_;
  DeviceBuffer<RowPlace> inverse_;
  DeviceBuffer<CallState> state_;
  cuda::PinnedMemory report_;
  PlanOutputs plan_;
  ChunkPost post_;
  std::array<RunBases, kSlots> written_;
  std::array<RunBases, kSlots> read_;
  GroupedGemmMaps maps_{};
  Mapped mapped_;
  mutable CallFacts facts_;
};

}  // namespace

std::unique_ptr<MoeStage2> make_cuda_moe_stage2(std::shared_ptr<cuda::DeviceRank> rank,
                                                const Shape& shape, const Options& options) {
  return std::make_unique<CudaMoeStage2>(std::move(rank), shape, options);
}

std::unique_ptr<MoeStage2> make_cuda_moe_stage2(TeamHandle team, const Shape& shape,
                                                const Options& options) {
  int device = options.device;
  collectively(*team, [&] {
    const std::string reason = cuda::unavailable_reason();
    require(reason.empty(), ErrorKind::kUnsupported, [&] { return "moe_stage2: " + reason; });
    if (device < 0) PENSTOCK_CUDA_CHECK(cudaGetDevice(&device));
  });
  return make_cuda_moe_stage2(cuda::DeviceRank::create(std::move(team), device), shape, options);
}

}  // namespace penstock::moe_stage2
