// a2a_gemm on CPUs: the protocol, the plan and the order of sums of the CUDA operator, with a DMA
// thread as copy engine and plain loops as matrix unit.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <vector>

#include "ops/a2a_gemm/operands.h"
#include "ops/cpu/arrival_watch.h"
#include "penstock/core/error.h"
#include "penstock/fabric/guard.h"
#include "penstock/fabric/signal.h"
#include "penstock/numerics/formats.h"
#include "penstock/ops/a2a_gemm/a2a_gemm.h"
#include "penstock/ops/a2a_gemm/layout.h"

namespace penstock::a2a_gemm {
namespace {

// Only the direct transport stores from where X is; the others read from the window.
bool staged(const Options& options) { return options.transport != TransportKind::kDirect; }

std::size_t sum_count(const Shape& shape, std::int32_t row_block_rows) {
  return static_cast<std::size_t>(std::min(row_block_rows, max_rows(shape))) *
         static_cast<std::size_t>(shape.columns);
}

class CpuA2aGemm final : public A2aGemm, public RearmHook {
 public:
  CpuA2aGemm(TeamHandle team, const Shape& shape, const Options& options)
      : team_(std::move(team)),
        shape_(shape),
        options_(options),
        rank_(team_->rank()),
        guard_(team_, team_->next_operator(), options.deadline) {
    collectively(*team_, [&] {
      validate(shape_);
      check_quantise_x(shape_, options_.quantise_x);
      require(shape_.ranks == team_->size(), ErrorKind::kInvalidArgument, [&] {
        return fmt::format("a2a_gemm: the shape has {} ranks, the team {}", shape_.ranks,
                           team_->size());
      });
      config_ = choose(shape_, rank_, {}, options_.row_block_rows);
      if (options_.fuse != Fuse::kAuto) config_.fuse = options_.fuse == Fuse::kAlways;
      layout_ = window_layout(shape_, config_.row_block_rows, staged(options_));
    });
    window_ = Window::create(team_, layout_, cpu_window_backend());
    index_ = window_index(window_shape(shape_, config_.row_block_rows, staged(options_)));
    collectively(*team_, [&] {
      transport_ = make_cpu_transport(options_.transport, window_, options_.engine);
      pieces_ = pieces_of(shape_, rank_, config_.row_block_rows);
      sums_.resize(sum_count(shape_, config_.row_block_rows));
      if (options_.quantise_x) {
        const auto rows = static_cast<std::size_t>(total_rows(shape_));
        x_.resize(rows * static_cast<std::size_t>(shape_.depth));
        x_scales_.resize(rows * static_cast<std::size_t>(shape_.scale_blocks()));
      }
    });
    team_->add_hook(this);
  }

  ~CpuA2aGemm() override {
    team_->remove_hook(this);
    // A peer may still need what the engine holds; a team that faulted needs nothing any more.
    try {
      if (!team_->faulted()) transport_->quiet();
    } catch (const Error&) {
      // The fault is on record at the team, where check() finds it.
    }
  }

  void run(Stream, const Operands& given) override {
    check_operands(given, shape_, rank_, options_.quantise_x);
    team_->check();
    const Operands operands = options_.quantise_x ? quantised(given) : given;
    const std::uint64_t epoch = window_->epochs().next();
    std::optional<cpu::ArrivalWatch> watch;
    if (options_.timeline != nullptr) watch.emplace(*options_.timeline, arrivals(epoch), epoch);
    send(operands, epoch);
    multiply(operands, epoch);
    const std::uint32_t slot = parity_of(epoch);
    if (my_rows() > 0) {
      for (std::int32_t step = 1; step < shape_.ranks; ++step) {
        const int peer = source_of_step(rank_, step, shape_.ranks);
        transport_->signal(peer, index_.consumed(slot, rank_), epoch);
      }
      transport_->flush();
    }
  }

  const Shape& shape() const noexcept override { return shape_; }
  const Config& config() const noexcept override { return config_; }
  const Layout& layout() const noexcept override { return layout_; }
  TransportCounters counters() const noexcept override { return transport_->counters(); }

  void quiesce() override {}
  std::uint64_t highest_epoch() const override { return window_->epochs().last(); }
  void resume(std::uint64_t floor) override {
    // Nothing is in flight: every slot is free, whoever stopped short of saying so.
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
      for (int peer = 0; peer < shape_.ranks; ++peer) {
        store_signal(word(index_.consumed(slot, peer)), floor);
      }
    }
  }

 private:
  // Into memory of this operator's: the puts copy it on, so the next call may overwrite it.
  Operands quantised(const Operands& o) {
    quantise_x(shape_, static_cast<const Bf16*>(o.x), x_.data(), x_scales_.data(),
               total_rows(shape_));
    Operands used = o;
    used.x = x_.data();
    used.x_scales = x_scales_.data();
    used.x_scale_stride = total_rows(shape_);
    return used;
  }

  std::int32_t my_rows() const { return shape_.rows[static_cast<std::size_t>(rank_)]; }
  std::uint64_t* word(std::uint64_t offset) const {
    return reinterpret_cast<std::uint64_t*>(window_->local() + offset);
  }

  // A peer's slot may be written once it has said that it read the previous contents; that answer
  // also proves that the copies of that call are done, so that the slot of the send buffer is free.
  void wait_consumed(int peer, std::uint64_t epoch) {
    const std::uint32_t slot = parity_of(epoch);
    WaitSite site;
    site.peer = peer;
    site.op = guard_.op();
    site.stage = 0;
    site.region = kConsumed;
    site.index = static_cast<std::int32_t>(slot) * shape_.ranks + peer;
    guard_.wait(word(index_.consumed(slot, peer)), reuse_epoch(epoch), site);
  }

  void send(const Operands& o, std::uint64_t epoch) {
    for (int peer = 0; peer < shape_.ranks; ++peer) {
      if (peer != rank_ && shape_.rows[static_cast<std::size_t>(peer)] > 0) {
        wait_consumed(peer, epoch);
      }
    }
    if (options_.transport == TransportKind::kDirect) {
      store(o, epoch);
    } else {
      post(o, epoch);
    }
  }

  const std::byte* x_row(const Operands& o, std::int64_t row) const {
    return static_cast<const std::byte*>(o.x) + row * shape_.row_bytes();
  }

  // copy_engine and sm: piece by piece into the window and off.
  void post(const Operands& o, std::uint64_t epoch) {
    const std::uint32_t slot = parity_of(epoch);
    std::byte* base = window_->local();
    for (const Piece& piece : pieces_) {
      const TimelineSpan span(options_.timeline, Activity::kSend, piece.peer, piece.row_block);
      const std::int64_t row = row_offset(shape_, piece.peer) + piece.row;
      const auto at = static_cast<std::uint64_t>(row);
      const auto to = static_cast<std::uint64_t>(piece.row);
      PutDescriptor put;
      put.peer = piece.peer;
      for (std::uint64_t block = 0; block < index_.shape.scale_blocks; ++block) {
        put.src_offset = index_.send_scale(slot, block, at);
        put.dst_offset = index_.chunk_scale(slot, rank_, block, to);
        put.bytes = static_cast<std::uint64_t>(piece.rows) * sizeof(float);
        std::memcpy(base + put.src_offset,
                    o.x_scales + static_cast<std::int64_t>(block) * o.x_scale_stride + row,
                    put.bytes);
        transport_->put(put);
      }
      put.src_offset = index_.send(slot, at);
      put.dst_offset = index_.chunk(slot, rank_, to);
      put.bytes = static_cast<std::uint64_t>(piece.rows) * index_.shape.row_bytes;
      put.signal_offset = index_.arrived(slot, rank_, static_cast<std::uint64_t>(piece.row_block));
      put.signal_epoch = epoch;
      std::memcpy(base + put.src_offset, x_row(o, row), put.bytes);
      transport_->put(put);
    }
    transport_->flush();
  }

  // direct: the calling thread stores into the peer's window and announces it.
  void store(const Operands& o, std::uint64_t epoch) {
    const std::uint32_t slot = parity_of(epoch);
    for (const Piece& piece : pieces_) {
      const TimelineSpan span(options_.timeline, Activity::kSend, piece.peer, piece.row_block);
      const std::int64_t row = row_offset(shape_, piece.peer) + piece.row;
      const auto to = static_cast<std::uint64_t>(piece.row);
      std::byte* peer = window_->base(piece.peer);
      std::uint64_t bytes = 0;
      for (std::uint64_t block = 0; block < index_.shape.scale_blocks; ++block) {
        const std::uint64_t size = static_cast<std::uint64_t>(piece.rows) * sizeof(float);
        std::memcpy(peer + index_.chunk_scale(slot, rank_, block, to),
                    o.x_scales + static_cast<std::int64_t>(block) * o.x_scale_stride + row, size);
        bytes += size;
      }
      const std::uint64_t size = static_cast<std::uint64_t>(piece.rows) * index_.shape.row_bytes;
      std::memcpy(peer + index_.chunk(slot, rank_, to), x_row(o, row), size);
      transport_->count_direct(bytes + size);
      transport_->signal(piece.peer,
                         index_.arrived(slot, rank_, static_cast<std::uint64_t>(piece.row_block)),
                         epoch);
    }
  }

  // Every signal that a call waits for.
  std::vector<cpu::ArrivalWatch::Word> arrivals(std::uint64_t epoch) const {
    std::vector<cpu::ArrivalWatch::Word> words;
    for (std::int32_t step = 1; step < shape_.ranks; ++step) {
      const int source = source_of_step(rank_, step, shape_.ranks);
      for (std::int32_t b = 0; b < row_block_count(my_rows(), config_.row_block_rows); ++b) {
        words.push_back(
            {word(index_.arrived(parity_of(epoch), source, static_cast<std::uint64_t>(b))), source,
             b});
      }
    }
    return words;
  }

  bool arrived(int source, std::int32_t block, std::uint64_t epoch) const {
    const std::uint64_t at =
        index_.arrived(parity_of(epoch), source, static_cast<std::uint64_t>(block));
    return epoch_reached(load_signal(word(at)), epoch);
  }

  WaitSite arrival_site(int source, std::int32_t step, std::int32_t block) const {
    WaitSite site;
    site.peer = source;
    site.op = guard_.op();
    site.stage = step;
    site.region = kArrived;
    site.index = source * static_cast<std::int32_t>(index_.shape.row_blocks) + block;
    return site;
  }

  void wait_arrived(int source, std::int32_t step, std::int32_t block, std::uint64_t epoch) {
    const std::uint64_t at =
        index_.arrived(parity_of(epoch), source, static_cast<std::uint64_t>(block));
    const TimelineSpan span(options_.timeline, Activity::kWait, source, block);
    guard_.wait(word(at), epoch, arrival_site(source, step, block));
  }

  ChunkView chunk_of(const Operands& o, int source, std::uint64_t epoch) const {
    if (source == rank_) {
      const std::int64_t row = row_offset(shape_, rank_);
      return {x_row(o, row), o.x_scales == nullptr ? nullptr : o.x_scales + row, o.x_scale_stride};
    }
    const std::uint32_t slot = parity_of(epoch);
    return {
        window_->local() + index_.chunk(slot, source, 0),
        reinterpret_cast<const float*>(window_->local() + index_.chunk_scale(slot, source, 0, 0)),
        static_cast<std::int64_t>(scale_stride(index_.shape.max_rows))};
  }

  // The next source of a row block: in rotation, or the first in rotation that is there.
  int next_source(std::int32_t step, std::int32_t block, std::uint64_t epoch,
                  std::array<bool, kMaxRanks>& done) {
    if (options_.order == ChunkOrder::kRotation || step == 0) {
      const int source = source_of_step(rank_, step, shape_.ranks);
      if (source != rank_) wait_arrived(source, step, block, epoch);
      return source;
    }
    int found = -1;
    int first_missing = -1;
    const auto look = [&] {
      first_missing = -1;
      for (std::int32_t s = 1; s < shape_.ranks; ++s) {
        const int source = source_of_step(rank_, s, shape_.ranks);
        if (done[static_cast<std::size_t>(source)]) continue;
        if (arrived(source, block, epoch)) {
          found = source;
          return true;
        }
        if (first_missing < 0) first_missing = source;
      }
      return false;
    };
    if (!look()) {
      const WaitSite site = arrival_site(first_missing, step, block);
      guard_.wait_until(
          look,
          [&] {
            return load_signal(word(index_.arrived(parity_of(epoch), first_missing,
                                                   static_cast<std::uint64_t>(block))));
          },
          epoch, site);
    }
    done[static_cast<std::size_t>(found)] = true;
    return found;
  }

  void multiply(const Operands& o, std::uint64_t epoch) {
    const std::int32_t blocks = row_block_count(my_rows(), config_.row_block_rows);
    if (!config_.fuse) {
      for (std::int32_t block = 0; block < blocks; ++block) {
        for (std::int32_t step = 1; step < shape_.ranks; ++step) {
          wait_arrived(source_of_step(rank_, step, shape_.ranks), step, block, epoch);
        }
      }
    }
    for (std::int32_t block = 0; block < blocks; ++block) {
      const std::int32_t row = block * config_.row_block_rows;
      const std::int32_t rows = std::min(config_.row_block_rows, my_rows() - row);
      const std::int64_t count = static_cast<std::int64_t>(rows) * shape_.columns;
      std::fill(sums_.begin(), sums_.begin() + count, 0.0f);
      std::array<bool, kMaxRanks> done{};
      for (std::int32_t step = 0; step < shape_.ranks; ++step) {
        const int source = next_source(step, block, epoch, done);
        const TimelineSpan span(options_.timeline, Activity::kMultiply, source, block);
        add_chunk(shape_, chunk_of(o, source, epoch), row, rows, o.w, o.w_scales, source,
                  sums_.data());
      }
      round_sums(sums_.data(), count,
                 static_cast<Bf16*>(o.out) + static_cast<std::int64_t>(row) * shape_.columns);
    }
  }

  TeamHandle team_;
  Shape shape_;
  Options options_;
  std::int32_t rank_;
  Guard guard_;
  Config config_;
  Layout layout_;
  std::shared_ptr<Window> window_;
  WindowIndex index_;
  std::unique_ptr<Transport> transport_;
  std::vector<Piece> pieces_;
  std::vector<float> sums_;  // of one row block
  std::vector<E4M3> x_;      // quantise_x: [total rows, depth], and its scales
  std::vector<float> x_scales_;
};

}  // namespace

std::uint64_t workspace_bytes(const Shape& shape, const Options& options) {
  const Config config = choose(shape, 0, {}, options.row_block_rows);
  const auto quantised = static_cast<std::uint64_t>(
      options.quantise_x ? total_rows(shape) * (shape.depth + 4 * shape.scale_blocks()) : 0);
  return sum_count(shape, config.row_block_rows) * sizeof(float) + quantised;
}

std::uint64_t window_bytes(const Shape& shape, const Options& options) {
  const Config config = choose(shape, 0, {}, options.row_block_rows);
  return window_layout(shape, config.row_block_rows, staged(options)).total_bytes();
}

std::unique_ptr<A2aGemm> make_cpu_a2a_gemm(TeamHandle team, const Shape& shape,
                                           const Options& options) {
  return std::make_unique<CpuA2aGemm>(std::move(team), shape, options);
}

}  // namespace penstock::a2a_gemm
