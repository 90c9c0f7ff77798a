// The mirror of a2a_gemm on GPUs: what a call enqueues, and what lives between calls.
//
// A call is a kernel that opens it (a new epoch; the peers' leave to write), the GEMM, which hands
// pieces over as they are finished, and behind it a kernel that copies the peers' pieces out of the
// window as they come. Slots and epochs are those of operator.cpp.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <vector>

#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/stream.h"
#include "fabric/cuda/copy_engine.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/window_backend.h"
#include "ops/a2a_gemm/cuda/call_kernels.h"
#include "ops/a2a_gemm/cuda/gemm_maps.h"
#include "ops/a2a_gemm/cuda/mirror_kernels.h"
#include "ops/a2a_gemm/cuda/operator.h"
#include "ops/a2a_gemm/operands.h"
#include "penstock/core/error.h"

namespace penstock::a2a_gemm {
namespace {

using cuda::capturing;
using cuda::DeviceBuffer;
using cuda::OwnedEvent;
using cuda::ScopedDevice;

constexpr std::size_t kWordsPerLine = kLineBytes / sizeof(std::uint64_t);

// For the CTAs of transport sm, beside the caller's.
struct SideStream : cuda::OwnedStream {
  OwnedEvent fork;
  OwnedEvent join;
};

class CudaGemmA2a final : public GemmA2a, public RearmHook {
 public:
  CudaGemmA2a(std::shared_ptr<cuda::DeviceRank> rank, const Shape& shape, const Options& options)
      : device_rank_(std::move(rank)),
        team_(device_rank_->team()),
        shape_(shape),
        options_(options),
        rank_(team_->rank()),
        op_(team_->next_operator()) {
    collectively(*team_, [&] { settle_options(); });
    window_ = Window::create(team_, layout_, cuda::device_window_backend(device_rank_->device()));
    collectively(*team_, [&] { build(); });
    team_->add_hook(this);
  }

  ~CudaGemmA2a() override {
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
    side_.reset();  // while its device is current
    last_.reset();
  }

  void run(Stream stream, const Operands& o) override {
    check_mirror_operands(o, shape_, rank_);
    check_alignment(o, shape_.format == Format::kFp8, "gemm_a2a");
    team_->check();
    const ScopedDevice scope(device_rank_->device());
    auto* on = static_cast<cudaStream_t>(stream.handle);
    const bool graph = capturing(on);
    if (!graph) {
      if (!prepared_.contains(on)) prepare(stream);
      // Calls follow each other even if the caller changes streams.
      last_->hold(on);
    }
    enqueue(o, static_cast<std::uint32_t>(calls_++ % kSlots), on);
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
  }

  const Shape& shape() const noexcept override { return shape_; }
  const Layout& layout() const noexcept override { return layout_; }
  TransportCounters counters() const noexcept override {
    return engine_ != nullptr ? engine_->counters() : counters_;
  }

  // DeviceRank's hook has waited for the streams, the engine's for copies.
  void quiesce() override {}
  std::uint64_t highest_epoch() const override {
    const ScopedDevice scope(device_rank_->device());
    std::uint64_t highest = kNoEpoch;
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
      std::uint64_t epoch = kNoEpoch;
      cuda::read_device(&epoch, epoch_word(slot), sizeof(epoch));
      highest = std::max(highest, epoch);
    }
    return highest;
  }
  void resume(std::uint64_t floor) override {
    const ScopedDevice scope(device_rank_->device());
    // Nothing is in flight: every slot is free, whoever stopped short of saying so.
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
      cuda::write_device(epoch_word(slot), &floor, sizeof(floor));
      cuda::write_device(open_word(slot), &floor, sizeof(floor));
      for (int peer = 0; peer < shape_.ranks; ++peer) {
        cuda::write_device(window_->local() + index_.consumed(slot, peer), &floor, sizeof(floor));
      }
    }
    // Ranks may have stopped after different numbers of calls.
    calls_ = 0;
  }

 private:
  std::int32_t my_rows() const { return shape_.rows[static_cast<std::size_t>(rank_)]; }
  bool sm() const { return options_.transport == TransportKind::kSm; }
  bool direct() const { return options_.transport == TransportKind::kDirect; }
  bool sends() const { return shape_.ranks > 1 && my_rows() > 0; }
  // Rows of somebody else end up here.
  bool receives() const { return total_rows(shape_) > my_rows(); }
  std::uint64_t* epoch_word(std::uint32_t slot) const {
    return words_.data() + slot * kWordsPerLine;
  }
  std::uint64_t* open_word(std::uint32_t slot) const { return epoch_word(slot) + 1; }
  std::uint64_t* finished_word() const { return words_.data() + kSlots * kWordsPerLine; }

  void settle_options() {
    validate(shape_);
    check_mirror_options(options_);
    require(shape_.ranks == team_->size(), ErrorKind::kInvalidArgument, [&] {
      return fmt::format("gemm_a2a: the shape has {} ranks, the team {}", shape_.ranks,
                         team_->size());
    });
    fuse_ = options_.fuse == Fuse::kAuto ? shape_.ranks > 1 : options_.fuse == Fuse::kAlways;
    ctas_ = gemm_ctas(*device_rank_, sm() && fuse_ && shape_.ranks > 1 ? options_.copy_ctas : 0,
                      options_.copy_ctas, "gemm_a2a");
    Machine machine;
    machine.sms = ctas_;
    machine.shared_gpu = shares_gpu(*device_rank_);
    // Every rank has to come to the same pieces, whatever SMs it has.
    config_ = choose(shape_, rank_, machine,
                     choose(shape_, rank_, {}, options_.row_block_rows).row_block_rows);
    layout_ = mirror_layout(shape_, config_.row_block_rows, !direct());
  }

  void build() {
    const ScopedDevice scope(device_rank_->device());
    for (const cudaError_t status :
         {load_gemm_a2a_sm90(), load_begin_call_sm90(), load_ship_results_sm90(),
          load_post_results_sm90(), load_receive_results_sm90()}) {
      cuda::check(status, "loading gemm_a2a's kernels");
    }
    index_ = mirror_index(shape_, config_.row_block_rows, !direct());
    grid_ = mirror_grid(shape_.ranks, rank_, my_rows(), shape_.columns, config_.row_block_rows,
                        config_.band);
    words_ = DeviceBuffer<std::uint64_t>((kSlots + 1) * kWordsPerLine);
    cuda::zero_device(words_.data(), words_.bytes());
    counters_words_ = DeviceBuffer<std::uint32_t>(2 * static_cast<std::size_t>(pieces()));
    if (sends() && options_.transport == TransportKind::kCopyEngine) {
      engine_ = std::make_unique<cuda::DeviceCopyEngine>(device_rank_, window_);
    }
    if (sends() && sm() && fuse_) {
      side_ = std::make_unique<SideStream>();
      device_rank_->prepare(side_->handle);
    }
    last_.emplace();

    GuardView guard = device_rank_->guard_view(op_);
    if (options_.deadline.count() > 0) {
      guard.deadline_ns = static_cast<std::uint64_t>(options_.deadline.count());
    }
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
      begin_[slot] = begin_args(slot, guard);
      mirror_[slot] = mirror_args(slot, guard);
      receive_[slot] = receive_args(slot, guard);
    }
  }
  std::int32_t pieces() const { return sends() ? grid_.pieces() : 0; }

  BeginArgs begin_args(std::uint32_t slot, const GuardView& guard) const {
    BeginArgs args;
    args.epoch = epoch_word(slot);
    args.open = open_word(slot);
    args.consumed =
        reinterpret_cast<const std::uint64_t*>(window_->local() + index_.consumed(slot, 0));
    if (sends()) args.peers = ((1u << shape_.ranks) - 1) & ~(1u << rank_);
    args.ranks = shape_.ranks;
    args.slot = static_cast<std::int32_t>(slot);
    args.region = kMirrorConsumed;
    args.counters = counters_words_.data();
    args.counter_count = 2 * pieces();
    args.guard = guard;
    return args;
  }
  MirrorArgs mirror_args(std::uint32_t slot, const GuardView& guard) const {
    MirrorArgs args;
    args.gemm.ranks = shape_.ranks;
    args.gemm.rank = rank_;
    args.gemm.rows = my_rows();
    args.gemm.columns = shape_.columns;
    args.gemm.steps = shape_.steps();
    args.gemm.row_block_rows = config_.row_block_rows;
    args.gemm.band = config_.band;
    args.gemm.guard = guard;
    ResultSend& send = args.send;
    send.grid = grid_;
    send.rows = my_rows();
    send.slot = static_cast<std::int32_t>(slot);
    send.index = index_;
    if (engine_ != nullptr) send.ring = engine_->ring_view();
    send.guard = guard;
    send.counters = counters_words_.data();
    send.epoch = epoch_word(slot);
    send.open = open_word(slot);
    for (int peer = 0; peer < shape_.ranks; ++peer) {
      send.base[peer] = window_->base(peer);
      if (peer == rank_) continue;  // the caller's `out`
      std::byte* to = direct() ? window_->base(peer) + index_.landing(slot, rank_, 0)
                               : window_->local() + index_.send(slot, peer, 0);
      args.result[peer] = reinterpret_cast<std::uint16_t*>(to);
    }
    return args;
  }
  ReceiveArgs receive_args(std::uint32_t slot, const GuardView& guard) const {
    ReceiveArgs args;
    args.index = index_;
    args.window = window_->local();
    for (int source = 0; source < shape_.ranks; ++source) {
      const auto at = static_cast<std::size_t>(source);
      args.rows[source] = shape_.rows[at];
      args.row_offset[source] = row_offset(shape_, source);
      if (source == rank_ || shape_.rows[at] == 0) continue;
      args.consumed[source] =
          reinterpret_cast<std::uint64_t*>(window_->base(source) + index_.consumed(slot, rank_));
    }
    args.ranks = shape_.ranks;
    args.rank = rank_;
    args.slot = static_cast<std::int32_t>(slot);
    args.row_block_rows = config_.row_block_rows;
    args.epoch = epoch_word(slot);
    args.finished = finished_word();
    args.guard = guard;
    return args;
  }

  void enqueue(const Operands& o, std::uint32_t slot, cudaStream_t on) {
    cuda::check(launch_begin_call_sm90(begin_[slot], on), "begin_call_sm90");
    if (side_ != nullptr) {
      side_->fork.record(on);
      side_->fork.hold(side_->handle);
    }
    MirrorArgs args = mirror_[slot];
    const ResultPost post = direct() ? ResultPost::kDirect : ResultPost::kCopyEngine;
    if (my_rows() > 0) {
      if (sends() && fuse_ && !sm()) args.send.post = post;
      multiply(o, args, on);
    }
    if (sends()) {
      if (side_ != nullptr) {
        cuda::check(launch_ship_results_sm90(args.send, true, options_.copy_ctas, side_->handle),
                    "ship_results_sm90");
      } else if (sm()) {
        cuda::check(launch_ship_results_sm90(args.send, false, ctas_, on), "ship_results_sm90");
      } else if (!fuse_) {
        args.send.post = post;
        cuda::check(launch_post_results_sm90(args.send, on), "post_results_sm90");
      }
      count();
    }
    if (receives()) {
      ReceiveArgs receive = receive_[slot];
      receive.out = static_cast<std::byte*>(o.out);
      cuda::check(launch_receive_results_sm90(receive, ctas_, on), "receive_results_sm90");
    }
    if (side_ != nullptr) {
      side_->join.record(side_->handle);
      side_->join.hold(on);
    }
  }

  void multiply(const Operands& o, MirrorArgs& args, cudaStream_t on) {
    if (mapped_.x != o.x || mapped_.w != o.w) {
      mapped_ = {o.x, o.w, make_mirror_maps(shape_, rank_, o.x, o.w)};
    }
    args.gemm.local_scales = o.x_scales;
    args.gemm.local_scale_stride = o.x_scale_stride;
    args.gemm.w_scales = o.w_scales;
    args.result[rank_] =
        static_cast<std::uint16_t*>(o.out) + row_offset(shape_, rank_) * shape_.columns;
    cuda::check(launch_gemm_a2a_sm90(args, mapped_.maps, shape_.format, ctas_, on),
                "gemm_a2a_sm90");
  }

  // What the engine does not count.
  void count() {
    const auto sent = static_cast<std::uint64_t>(shape_.ranks - 1) *
                      static_cast<std::uint64_t>(my_rows()) * index_.shape.row_bytes;
    const auto pieces = static_cast<std::uint64_t>(grid_.pieces());
    (direct() ? counters_.direct_bytes : counters_.bytes) += sent;
    counters_.signals += pieces;
    if (direct()) return;
    counters_.puts += pieces;
    counters_.copies += pieces;
  }

  // Tensor maps of the last operands.
  struct Mapped {
    const void* x = nullptr;
    const void* w = nullptr;
    GemmMaps maps{};
  };

  std::shared_ptr<cuda::DeviceRank> device_rank_;
  TeamHandle team_;
  Shape shape_;
  Options options_;
  std::int32_t rank_;
  std::int32_t op_;
  std::int32_t ctas_ = 0;
  bool fuse_ = true;
  Config config_;
  Layout layout_;
  std::shared_ptr<Window> window_;
  MirrorIndex index_;
  MirrorGrid grid_;
  std::unique_ptr<cuda::DeviceCopyEngine> engine_;
  std::unique_ptr<SideStream> side_;
  std::optional<OwnedEvent> last_;  // end of the latest call, on the caller's stream
  // A line each: the slots' epochs and what of them was opened, CTAs of the receiver that ended.
  DeviceBuffer<std::uint64_t> words_;
  DeviceBuffer<std::uint32_t> counters_words_;
  std::array<BeginArgs, kSlots> begin_;
  std::array<MirrorArgs, kSlots> mirror_;
  std::array<ReceiveArgs, kSlots> receive_;
  Mapped mapped_;
  std::set<cudaStream_t> prepared_;
  std::uint64_t calls_ = 0;
  TransportCounters counters_;
};

}  // namespace

std::unique_ptr<GemmA2a> make_cuda_gemm_a2a(std::shared_ptr<cuda::DeviceRank> rank,
                                            const Shape& shape, const Options& options) {
  return std::make_unique<CudaGemmA2a>(std::move(rank), shape, options);
}

std::unique_ptr<GemmA2a> make_cuda_gemm_a2a(TeamHandle team, const Shape& shape,
                                            const Options& options) {
  const int device = settle_device(*team, options.device, "gemm_a2a");
  return make_cuda_gemm_a2a(cuda::DeviceRank::create(std::move(team), device), shape, options);
}

}  // namespace penstock::a2a_gemm
