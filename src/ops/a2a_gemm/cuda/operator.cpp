// a2a_gemm on GPUs: what a call enqueues, and what lives between calls.
//
// A call is a kernel that opens it (a new epoch; the peers' leave to write), copies on a side
// stream with a signal behind each, and the GEMM beside them, which waits piece by piece. Sizes are
// static, so the host enqueues every copy ahead; the signal is an 8-byte copy of the slot's opened
// epoch in device memory, so that a graph's replays send new epochs and a call whose slot was not
// free sends none. Each slot counts epochs of its own
// and calls take the slots in turn: addresses are then fixed when a graph is captured.
#include "ops/a2a_gemm/cuda/operator.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <set>
#include <vector>

#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/stream.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/window_backend.h"
#include "ops/a2a_gemm/cuda/call_kernels.h"
#include "ops/a2a_gemm/cuda/gemm_maps.h"
#include "ops/a2a_gemm/operands.h"
#include "penstock/core/error.h"

namespace penstock::a2a_gemm {
namespace {

using cuda::capturing;
using cuda::DeviceBuffer;
using cuda::OwnedEvent;
using cuda::ScopedDevice;

constexpr std::int32_t kMostCopyCtas = 32;
// SMs that a rank leaves free where ranks share a GPU: copies inside a GPU may be done by SMs.
constexpr std::int32_t kSmsForLocalCopies = 2;
constexpr std::int64_t kShownWaitNs = 200;  // the wall clock ticks in steps of up to 1 us
constexpr std::size_t kWordsPerLine = kLineBytes / sizeof(std::uint64_t);

struct SideStream : cuda::OwnedStream {
  OwnedEvent fork;
  OwnedEvent join;
  OwnedEvent last;  // end of the latest call, on the caller's stream
};

class CudaA2aGemm final : public A2aGemm, public RearmHook {
 public:
  CudaA2aGemm(std::shared_ptr<cuda::DeviceRank> rank, const Shape& shape, const Options& options)
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

  ~CudaA2aGemm() override {
    team_->remove_hook(this);
    const ScopedDevice scope(device_rank_->device());
    // Kernels end by themselves, at their deadlines at the latest.
    (void)cudaEventSynchronize(side_->last.get());
    side_.reset();  // while its device is current
  }

  void run(Stream stream, const Operands& o) override {
    check_operands(o, shape_, rank_, options_.quantise_x);
    check_alignment(o, shape_.format == Format::kFp8 && !options_.quantise_x, "a2a_gemm");
    team_->check();
    const ScopedDevice scope(device_rank_->device());
    auto* on = static_cast<cudaStream_t>(stream.handle);
    const bool graph = capturing(on);
    if (!graph) {
      if (!prepared_.contains(on)) prepare(stream);
      // Calls follow each other even if the caller changes streams.
      side_->last.hold(on);
    }
    const auto slot = static_cast<std::uint32_t>(calls_++ % kSlots);
    enqueue(o, slot, on, graph);
    if (graph) return;
    side_->last.record(on);
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

  void collect_timeline() override {
    if (stamps_.size() == 0) return;
    const ScopedDevice scope(device_rank_->device());
    PENSTOCK_CUDA_CHECK(cudaEventSynchronize(side_->last.get()));
    const std::vector<std::uint64_t> stamps = stamps_.download();
    add_tiles(stamps);
    for (std::size_t i = 0; i < trace_arrivals(); ++i) {
      const std::uint64_t seen = stamps[trace_tiles_words() + i];
      if (seen == ~std::uint64_t{0}) continue;
      const auto at = static_cast<std::int64_t>(seen);
      options_.timeline->add({Activity::kArrival,
                              static_cast<std::int32_t>(i / index_.shape.row_blocks),
                              static_cast<std::int32_t>(i % index_.shape.row_blocks), at, at});
    }
  }

  const Shape& shape() const noexcept override { return shape_; }
  const Config& config() const noexcept override { return config_; }
  const Layout& layout() const noexcept override { return layout_; }
  TransportCounters counters() const noexcept override { return counters_; }

  void quiesce() override {}  // DeviceRank's hook has waited for the streams, and calls end there
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
  bool sm_copies() const { return options_.transport == TransportKind::kSm && shape_.ranks > 1; }
  std::int32_t my_rows() const { return shape_.rows[static_cast<std::size_t>(rank_)]; }
  std::uint64_t* epoch_word(std::uint32_t slot) const {
    return words_.data() + slot * kWordsPerLine;
  }
  std::uint64_t* open_word(std::uint32_t slot) const { return epoch_word(slot) + 1; }
  std::uint64_t* finished_word() const { return words_.data() + kSlots * kWordsPerLine; }

  void settle_options() {
    validate(shape_);
    check_quantise_x(shape_, options_.quantise_x);
    require(shape_.ranks == team_->size(), ErrorKind::kInvalidArgument, [&] {
      return fmt::format("a2a_gemm: the shape has {} ranks, the team {}", shape_.ranks,
                         team_->size());
    });
    require(options_.transport != TransportKind::kDirect, ErrorKind::kUnsupported, [&] {
      return fmt::format(
          "a2a_gemm on cuda: transport direct stores from the kernel that computes X, and X is "
          "given here; take copy_engine or sm");
    });
    ctas_ = gemm_ctas(*device_rank_, sm_copies() ? options_.copy_ctas : 0, options_.copy_ctas,
                      "a2a_gemm");
    Machine machine;
    machine.sms = ctas_;
    machine.shared_gpu = shares_gpu(*device_rank_);
    config_ = choose(shape_, rank_, machine, options_.row_block_rows);
    if (options_.fuse != Fuse::kAuto) config_.fuse = options_.fuse == Fuse::kAlways;
    layout_ = window_layout(shape_, config_.row_block_rows, false);
  }

  void build() {
    const ScopedDevice scope(device_rank_->device());
    for (const cudaError_t status :
         {load_gemm_sm90(), load_begin_call_sm90(), load_wait_arrived_sm90(),
          load_quantise_x_sm90(), load_push_scales_sm90(), load_push_sm90()}) {
      cuda::check(status, "loading a2a_gemm's kernels");
    }
    index_ = window_index(window_shape(shape_, config_.row_block_rows, false));
    mapping_ = cuda::device_mapping(*window_);
    pieces_ = pieces_of(shape_, rank_, config_.row_block_rows);
    words_ = DeviceBuffer<std::uint64_t>((kSlots + 1) * kWordsPerLine + pieces_.size());
    cuda::zero_device(words_.data(), words_.bytes());
    if (sm_copies() && !pieces_.empty()) {
      device_pieces_ = DeviceBuffer<Piece>(pieces_.size());
      cuda::write_device(device_pieces_.data(), pieces_.data(), device_pieces_.bytes());
    }
    if (options_.quantise_x && total_rows(shape_) > 0) {
      const auto rows = static_cast<std::size_t>(total_rows(shape_));
      x_ = DeviceBuffer<std::uint8_t>(rows * static_cast<std::size_t>(shape_.depth));
      x_scales_ = DeviceBuffer<float>(rows * static_cast<std::size_t>(shape_.scale_blocks()));
    }
    side_ = std::make_unique<SideStream>();
    device_rank_->prepare(side_->handle);
    if (options_.timeline != nullptr && my_rows() > 0) {
      stamps_ = DeviceBuffer<std::uint64_t>(trace_tiles_words() + trace_arrivals());
      stamps_.fill(0xff);
    }

    GuardView guard = device_rank_->guard_view(op_);
    if (options_.deadline.count() > 0) {
      guard.deadline_ns = static_cast<std::uint64_t>(options_.deadline.count());
    }
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
      begin_[slot] = begin_args(slot, guard);
      wait_[slot] = wait_args(slot, guard);
      gemm_[slot] = gemm_args(slot, guard);
      send_[slot] = send_args(slot);
    }
  }

  BeginArgs begin_args(std::uint32_t slot, const GuardView& guard) const {
    BeginArgs args;
    args.epoch = epoch_word(slot);
    args.open = open_word(slot);
    args.consumed =
        reinterpret_cast<const std::uint64_t*>(window_->local() + index_.consumed(slot, 0));
    for (int peer = 0; peer < shape_.ranks; ++peer) {
      if (peer != rank_ && shape_.rows[static_cast<std::size_t>(peer)] > 0) {
        args.peers |= 1u << peer;
      }
    }
    args.ranks = shape_.ranks;
    args.slot = static_cast<std::int32_t>(slot);
    args.guard = guard;
    return args;
  }
  WaitArrivedArgs wait_args(std::uint32_t slot, const GuardView& guard) const {
    WaitArrivedArgs args;
    args.arrived = arrived(slot);
    args.arrival_stride = static_cast<std::int64_t>(arrival_stride(index_.shape.row_blocks) / 8);
    args.row_blocks = row_block_count(my_rows(), config_.row_block_rows);
    args.ranks = shape_.ranks;
    args.rank = rank_;
    args.epoch = epoch_word(slot);
    args.guard = guard;
    return args;
  }
  TileGrid grid() const { return tile_grid(my_rows(), shape_.columns, config_.band); }
  std::size_t trace_tiles_words() const {
    return static_cast<std::size_t>(grid().tiles() * trace_words(shape_.ranks));
  }
  std::size_t trace_arrivals() const {
    return static_cast<std::size_t>(shape_.ranks) * index_.shape.row_blocks;
  }
  TraceView trace() const {
    if (stamps_.size() == 0) return {};
    return {stamps_.data(), stamps_.data() + trace_tiles_words()};
  }
  const std::uint64_t* arrived(std::uint32_t slot) const {
    return reinterpret_cast<const std::uint64_t*>(window_->local() + index_.arrived(slot, 0, 0));
  }
  GemmArgs gemm_args(std::uint32_t slot, const GuardView& guard) const {
    GemmArgs args;
    args.ranks = shape_.ranks;
    args.rank = rank_;
    args.rows = my_rows();
    args.columns = shape_.columns;
    args.steps = shape_.steps();
    args.chunk_rows = max_rows(shape_);
    args.row_block_rows = config_.row_block_rows;
    args.row_blocks = static_cast<std::int32_t>(index_.shape.row_blocks);
    args.band = config_.band;
    args.chunk_scales =
        reinterpret_cast<const float*>(window_->local() + index_.chunk_scale(slot, 0, 0, 0));
    args.scale_stride = static_cast<std::int64_t>(scale_stride(index_.shape.max_rows));
    args.arrived = config_.fuse && shape_.ranks > 1 ? arrived(slot) : nullptr;
    args.arrival_stride = static_cast<std::int64_t>(arrival_stride(index_.shape.row_blocks) / 8);
    args.epoch = epoch_word(slot);
    args.finished = finished_word();
    args.order = options_.order;
    args.trace = trace();
    args.guard = guard;
    for (int peer = 0; peer < shape_.ranks; ++peer) {
      if (peer == rank_) continue;
      args.consumed[peer] =
          reinterpret_cast<std::uint64_t*>(window_->base(peer) + index_.consumed(slot, rank_));
    }
    return args;
  }
  SendArgs send_args(std::uint32_t slot) const {
    SendArgs args;
    args.pieces = device_pieces_.data();
    args.count = static_cast<std::int32_t>(pieces_.size());
    for (int peer = 0; peer < shape_.ranks; ++peer) {
      args.rows[peer] = shape_.rows[static_cast<std::size_t>(peer)];
      args.row_offset[peer] = row_offset(shape_, peer);
      args.base[peer] = window_->base(peer);
    }
    args.index = index_;
    args.rank = rank_;
    args.slot = static_cast<std::int32_t>(slot);
    args.done = finished_word() + kWordsPerLine;
    args.epoch = epoch_word(slot);
    args.open = open_word(slot);
    return args;
  }

  // Into memory of this operator's: calls follow each other, copies included.
  Operands quantised(const Operands& o, cudaStream_t on) const {
    if (total_rows(shape_) == 0) return o;
    QuantiseArgs args;
    args.x = static_cast<const std::uint16_t*>(o.x);
    args.q = x_.data();
    args.scales = x_scales_.data();
    args.rows = args.scale_stride = total_rows(shape_);
    args.depth = shape_.depth;
    cuda::check(launch_quantise_x_sm90(args, on), "quantise_x_sm90");
    Operands used = o;
    used.x = x_.data();
    used.x_scales = x_scales_.data();
    used.x_scale_stride = args.scale_stride;
    return used;
  }

  void enqueue(const Operands& given, std::uint32_t slot, cudaStream_t on, bool graph) {
    const Operands o = options_.quantise_x ? quantised(given, on) : given;
    cuda::check(launch_begin_call_sm90(begin_[slot], on), "begin_call_sm90");
    SendArgs send = send_[slot];
    send.x = static_cast<const std::byte*>(o.x);
    send.x_scales = o.x_scales;
    send.x_scale_stride = o.x_scale_stride;
    if (!pieces_.empty()) {
      // Ahead of the GEMM, which leaves no SM to it.
      if (shape_.format == Format::kFp8) {
        cuda::check(launch_push_scales_sm90(send, ctas_, on), "push_scales_sm90");
      }
      side_->fork.record(on);
      side_->fork.hold(side_->handle);
    }
    // The GEMM first: it has its own chunk to go on with while the host enqueues the copies.
    if (my_rows() > 0) {
      if (!config_.fuse && shape_.ranks > 1) {
        cuda::check(launch_wait_arrived_sm90(wait_[slot], on), "wait_arrived_sm90");
      }
      multiply(o, slot, on);
    }
    if (pieces_.empty()) return;
    if (sm_copies()) {
      cuda::check(launch_push_sm90(send, options_.copy_ctas, side_->handle), "push_sm90");
    }
    for (const Piece& piece : pieces_) {
      if (!sm_copies()) copy(o, piece, slot, graph);
      count(piece);
    }
    side_->join.record(side_->handle);
    side_->join.hold(on);
  }

  // Of each tile a span, and in it one a chunk and one for each wait that took time.
  void add_tiles(const std::vector<std::uint64_t>& stamps) const {
    const TileGrid tiles = grid();
    const int clusters = ctas_ / kClusterCtas;
    // The copying thread is a few stages ahead: it wants a tile's rows while the last one ends.
    std::vector<std::int64_t> ended(static_cast<std::size_t>(clusters), 0);
    for (std::int32_t linear = 0; linear < tiles.tiles(); ++linear) {
      const std::uint64_t* word = stamps.data() + linear * trace_words(shape_.ranks);
      const auto time = [&](int i) {
        return static_cast<std::int64_t>(
            i < 2 * shape_.ranks && i % 2 == 0 ? word[i] & ~kTraceSourceMask : word[i]);
      };
      const std::int32_t lane = 1 + linear % clusters;
      const std::int32_t block =
          tile_place(tiles, linear).cluster_row * kClusterRows / config_.row_block_rows;
      std::int64_t& last = ended[static_cast<std::size_t>(lane - 1)];
      const std::int64_t first = std::max(last, time(0));
      last = time(2 * shape_.ranks);
      options_.timeline->add({Activity::kTile, -1, linear, first, last, lane});
      for (int chunk = 0; chunk < shape_.ranks; ++chunk) {
        const auto source = static_cast<std::int32_t>(word[2 * chunk] & kTraceSourceMask);
        const std::int64_t wanted = std::max(first, time(2 * chunk));
        const std::int64_t there = std::max(wanted, time(2 * chunk + 1));
        const std::int64_t end = std::max(there, time(2 * chunk + 2));
        if (there - wanted >= kShownWaitNs) {
          options_.timeline->add({Activity::kWait, source, block, wanted, there, lane});
        }
        options_.timeline->add({Activity::kMultiply, source, block, there, end, lane});
      }
    }
  }

  void multiply(const Operands& o, std::uint32_t slot, cudaStream_t on) {
    if (stamps_.size() != 0) {
      PENSTOCK_CUDA_CHECK(
          cudaMemsetAsync(trace().arrivals, 0xff, trace_arrivals() * sizeof(std::uint64_t), on));
    }
    const std::int64_t first = row_offset(shape_, rank_);
    const auto* local = static_cast<const std::byte*>(o.x) + first * shape_.row_bytes();
    Mapped& mapped = mapped_[slot];
    if (mapped.local != local || mapped.w != o.w) {
      mapped.maps =
          make_gemm_maps(shape_, rank_, local, window_->local() + index_.chunk(slot, 0, 0), o.w);
      mapped.local = local;
      mapped.w = o.w;
    }
    GemmArgs args = gemm_[slot];
    args.out = static_cast<std::uint16_t*>(o.out);
    args.local_scales = o.x_scales == nullptr ? nullptr : o.x_scales + first;
    args.local_scale_stride = o.x_scale_stride;
    args.w_scales = o.w_scales;
    cuda::check(launch_gemm_sm90(args, mapped.maps, shape_.format, ctas_, on), "a2a_gemm_sm90");
  }

  void copy(const Operands& o, const Piece& piece, std::uint32_t slot, bool graph) {
    const std::int64_t row = row_offset(shape_, piece.peer) + piece.row;
    std::byte* base = window_->base(piece.peer);
    const bool engine = mapping_->same_device(piece.peer) && !graph;
    copy_bytes(base + index_.chunk(slot, rank_, static_cast<std::uint64_t>(piece.row)),
               static_cast<const std::byte*>(o.x) + row * shape_.row_bytes(),
               static_cast<std::uint64_t>(piece.rows) * index_.shape.row_bytes, engine);
    // A submission of its own: visible no earlier than the data.
    copy_bytes(base + index_.arrived(slot, rank_, static_cast<std::uint64_t>(piece.row_block)),
               open_word(slot), sizeof(std::uint64_t), engine);
  }

  // `engine`: both ends lie in this GPU, and the copy asks for the copy engine (plain local copies
  // are done by SMs, which may be taken); a captured copy cannot ask.
  void copy_bytes(void* to, const void* from, std::uint64_t bytes, bool engine) {
    if (!engine) {
      PENSTOCK_CUDA_CHECK(
          cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, side_->handle));
      return;
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t size = bytes;
    std::size_t first = 0;
    PENSTOCK_CUDA_CHECK(
        cudaMemcpyBatchAsync(&to, &from, &size, 1, &attributes, &first, 1, side_->handle));
  }

  void count(const Piece& piece) {
    const auto rows = static_cast<std::uint64_t>(piece.rows);
    counters_.puts += 1;
    counters_.copies += 1;
    counters_.bytes += rows * (index_.shape.row_bytes + 4 * index_.shape.scale_blocks);
    counters_.signals += 1;
  }

  // Tensor maps of the last operands.
  struct Mapped {
    const void* local = nullptr;
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
  Config config_;
  Layout layout_;
  std::shared_ptr<Window> window_;
  std::shared_ptr<cuda::DeviceWindowMapping> mapping_;
  WindowIndex index_;
  std::vector<Piece> pieces_;
  DeviceBuffer<Piece> device_pieces_;
  // A line each: the slots' epochs and what of them was opened, CTAs of the GEMM that have ended;
  // then CTAs done with a piece.
  DeviceBuffer<std::uint64_t> words_;
  DeviceBuffer<std::uint64_t> stamps_;  // Options::timeline: TraceView's tiles, then its arrivals
  DeviceBuffer<std::uint8_t> x_;        // quantise_x: [total rows, depth] E4M3, and its scales
  DeviceBuffer<float> x_scales_;
  std::array<BeginArgs, kSlots> begin_;
  std::array<WaitArrivedArgs, kSlots> wait_;
  std::array<GemmArgs, kSlots> gemm_;
  std::array<SendArgs, kSlots> send_;
  std::array<Mapped, kSlots> mapped_;
  std::set<cudaStream_t> prepared_;
  std::uint64_t calls_ = 0;
  TransportCounters counters_;
  std::unique_ptr<SideStream> side_;
};

}  // namespace

bool shares_gpu(const cuda::DeviceRank& rank) {
  int available = 0;
  const ScopedDevice scope(rank.device());
  PENSTOCK_CUDA_CHECK(
      cudaDeviceGetAttribute(&available, cudaDevAttrMultiProcessorCount, rank.device()));
  return rank.sms() < available;
}

std::int32_t gemm_ctas(const cuda::DeviceRank& rank, std::int32_t copy_ctas, std::int32_t asked,
                       const char* what) {
  require(asked >= 2 && asked <= kMostCopyCtas && asked % 2 == 0, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("{}: copy_ctas is {}; give an even number from 2 to {}", what, asked,
                       kMostCopyCtas);
  });
  std::int32_t ctas = rank.sms() - copy_ctas;
  if (shares_gpu(rank)) ctas -= kSmsForLocalCopies;
  ctas -= ctas % kClusterCtas;
  require(ctas >= kClusterCtas, ErrorKind::kUnsupported, [&] {
    return fmt::format(
        "{}: this rank may fill {} SMs, too few for a cluster of {} beside the copies; give it "
        "more or lower copy_ctas",
        what, rank.sms(), kClusterCtas);
  });
  return ctas;
}

void check_alignment(const Operands& o, bool scales, const char* what) {
  const auto need = [&](const void* pointer, const char* name) {
    require(reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0, ErrorKind::kInvalidArgument, [&] {
      return fmt::format("{}: {} is at {}; give device memory aligned to 16 bytes", what, name,
                         pointer);
    });
  };
  need(o.x, "x");
  need(o.w, "w");
  need(o.out, "out");
  if (scales) need(o.x_scales, "x_scales");
}

int settle_device(Team& team, int device, const char* what) {
  collectively(team, [&] {
    const std::string reason = cuda::unavailable_reason();
    require(reason.empty(), ErrorKind::kUnsupported,
            [&] { return fmt::format("{}: {}", what, reason); });
    if (device < 0) PENSTOCK_CUDA_CHECK(cudaGetDevice(&device));
  });
  return device;
}

std::unique_ptr<A2aGemm> make_cuda_a2a_gemm(std::shared_ptr<cuda::DeviceRank> rank,
                                            const Shape& shape, const Options& options) {
  return std::make_unique<CudaA2aGemm>(std::move(rank), shape, options);
}

std::unique_ptr<A2aGemm> make_cuda_a2a_gemm(TeamHandle team, const Shape& shape,
                                            const Options& options) {
  const int device = settle_device(*team, options.device, "a2a_gemm");
  return make_cuda_a2a_gemm(cuda::DeviceRank::create(std::move(team), device), shape, options);
}

}  // namespace penstock::a2a_gemm
