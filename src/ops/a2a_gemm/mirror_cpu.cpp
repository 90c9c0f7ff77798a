// GEMM, then all-to-all, on CPUs: pieces leave as they are computed.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/a2a_gemm/mirror_layout.h"
#include "ops/a2a_gemm/operands.h"
#include "penstock/core/error.h"
#include "penstock/fabric/guard.h"
#include "penstock/fabric/signal.h"
#include "penstock/numerics/formats.h"
#include "penstock/ops/a2a_gemm/mirror.h"
#include "penstock/ops/a2a_gemm/plan.h"

namespace penstock::a2a_gemm {
namespace {

ChunkView view_of(const Operands& o) { return {o.x, o.x_scales, o.x_scale_stride}; }

// Rows [row, row + rows) of rank `from`'s part for `destination`, bf16.
void compute(const Shape& shape, const Operands& o, std::int32_t destination, std::int32_t row,
             std::int32_t rows, std::vector<float>& sums, void* to) {
  const std::int64_t count = static_cast<std::int64_t>(rows) * shape.columns;
  sums.assign(static_cast<std::size_t>(count), 0.0f);
  // Slab d of W stands where a2a_gemm has the slab of source d.
  add_chunk(shape, view_of(o), row, rows, o.w, o.w_scales, destination, sums.data());
  round_sums(sums.data(), count, to);
}

class CpuGemmA2a final : public GemmA2a, public RearmHook {
 public:
  CpuGemmA2a(TeamHandle team, const Shape& shape, const Options& options)
      : team_(std::move(team)),
        shape_(shape),
        options_(options),
        rank_(team_->rank()),
        guard_(team_, team_->next_operator(), options.deadline) {
    collectively(*team_, [&] { settle(); });
    window_ = Window::create(team_, layout_, cpu_window_backend());
    collectively(*team_, [&] {
      transport_ = make_cpu_transport(options_.transport, window_, options_.engine);
    });
    team_->add_hook(this);
  }

  ~CpuGemmA2a() override {
    team_->remove_hook(this);
    // A peer may still need what the engine holds; a team that faulted needs nothing any more.
    try {
      if (!team_->faulted()) transport_->quiet();
    } catch (const Error&) {
      // The fault is on record at the team, where check() finds it.
    }
  }

  void run(Stream, const Operands& operands) override {
    check_mirror_operands(operands, shape_, rank_);
    team_->check();
    const std::uint64_t epoch = window_->epochs().next();
    send(operands, epoch);
    receive(operands, epoch);
  }

  const Shape& shape() const noexcept override { return shape_; }
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
  std::int32_t rows_of(int rank) const { return shape_.rows[static_cast<std::size_t>(rank)]; }
  std::int32_t blocks_of(int rank) const { return row_block_count(rows_of(rank), row_block_rows_); }
  std::uint64_t* word(std::uint64_t offset) const {
    return reinterpret_cast<std::uint64_t*>(window_->local() + offset);
  }
  Bf16* out_row(const Operands& o, int source, std::int32_t row) const {
    return static_cast<Bf16*>(o.out) + (row_offset(shape_, source) + row) * shape_.columns;
  }
  bool direct() const { return options_.transport == TransportKind::kDirect; }

  void settle() {
    validate(shape_);
    require(shape_.ranks == team_->size(), ErrorKind::kInvalidArgument, [&] {
      return fmt::format("gemm_a2a: the shape has {} ranks, the team {}", shape_.ranks,
                         team_->size());
    });
    check_mirror_options(options_);
    row_block_rows_ = choose(shape_, rank_, {}, options_.row_block_rows).row_block_rows;
    fuse_ = options_.fuse == Fuse::kAuto ? shape_.ranks > 1 : options_.fuse == Fuse::kAlways;
    index_ = mirror_index(shape_, row_block_rows_, !direct());
    layout_ = mirror_layout(shape_, row_block_rows_, !direct());
  }

  WaitSite site(int peer, int stage, int region, std::int32_t index) const {
    WaitSite s;
    s.peer = peer;
    s.op = guard_.op();
    s.stage = stage;
    s.region = region;
    s.index = index;
    return s;
  }

  // Row block by row block, a destination after the other; the own part last of all.
  void send(const Operands& o, std::uint64_t epoch) {
    const std::uint32_t slot = parity_of(epoch);
    for (std::int32_t step = 1; step < shape_.ranks && rows_of(rank_) > 0; ++step) {
      const int peer = destination_of_step(rank_, step, shape_.ranks);
      guard_.wait(
          word(index_.consumed(slot, peer)), reuse_epoch(epoch),
          site(peer, 0, kMirrorConsumed, static_cast<std::int32_t>(slot) * shape_.ranks + peer));
    }
    std::vector<PutDescriptor> held;  // unfused
    for (std::int32_t block = 0; block < blocks_of(rank_); ++block) {
      const std::int32_t row = block * row_block_rows_;
      const std::int32_t rows = std::min(row_block_rows_, rows_of(rank_) - row);
      for (std::int32_t step = 1; step < shape_.ranks; ++step) {
        const int peer = destination_of_step(rank_, step, shape_.ranks);
        const PutDescriptor put = describe_put(slot, peer, row, rows, block, epoch);
        if (direct()) {
          compute(shape_, o, peer, row, rows, sums_, window_->base(peer) + put.dst_offset);
          transport_->count_direct(put.bytes);
        } else {
          compute(shape_, o, peer, row, rows, sums_, window_->local() + put.src_offset);
        }
        if (fuse_) {
          hand_over(put);
        } else {
          held.push_back(put);
        }
      }
    }
    for (std::int32_t block = 0; block < blocks_of(rank_); ++block) {
      const std::int32_t row = block * row_block_rows_;
      compute(shape_, o, rank_, row, std::min(row_block_rows_, rows_of(rank_) - row), sums_,
              out_row(o, rank_, row));
    }
    for (const PutDescriptor& put : held) hand_over(put);
    transport_->flush();
  }

  PutDescriptor describe_put(std::uint32_t slot, int peer, std::int32_t row, std::int32_t rows,
                             std::int32_t block, std::uint64_t epoch) const {
    PutDescriptor put;
    put.peer = peer;
    if (!direct()) put.src_offset = index_.send(slot, peer, static_cast<std::uint64_t>(row));
    put.dst_offset = index_.landing(slot, rank_, static_cast<std::uint64_t>(row));
    put.bytes = static_cast<std::uint64_t>(rows) * index_.shape.row_bytes;
    put.signal_offset = index_.arrived(slot, rank_, static_cast<std::uint64_t>(block));
    put.signal_epoch = epoch;
    return put;
  }

  void hand_over(const PutDescriptor& put) {
    if (direct()) {
      transport_->signal(put.peer, put.signal_offset, put.signal_epoch);
    } else {
      transport_->put(put);
      transport_->flush();
    }
  }

  void receive(const Operands& o, std::uint64_t epoch) {
    const std::uint32_t slot = parity_of(epoch);
    for (std::int32_t block = 0; block < static_cast<std::int32_t>(index_.shape.row_blocks);
         ++block) {
      for (std::int32_t step = 1; step < shape_.ranks; ++step) {
        const int source = source_of_step(rank_, step, shape_.ranks);
        if (block >= blocks_of(source)) continue;
        guard_.wait(word(index_.arrived(slot, source, static_cast<std::uint64_t>(block))), epoch,
                    site(source, step, kMirrorArrived,
                         source * static_cast<std::int32_t>(index_.shape.row_blocks) + block));
        const std::int32_t row = block * row_block_rows_;
        const std::int32_t rows = std::min(row_block_rows_, rows_of(source) - row);
        std::memcpy(
            out_row(o, source, row),
            window_->local() + index_.landing(slot, source, static_cast<std::uint64_t>(row)),
            static_cast<std::size_t>(rows) * index_.shape.row_bytes);
      }
    }
    for (std::int32_t step = 1; step < shape_.ranks; ++step) {
      const int source = source_of_step(rank_, step, shape_.ranks);
      if (rows_of(source) > 0) {
        transport_->signal(source, index_.consumed(slot, rank_), epoch);
      }
    }
    transport_->flush();
  }

  TeamHandle team_;
  Shape shape_;
  Options options_;
  std::int32_t rank_;
  Guard guard_;
  std::int32_t row_block_rows_ = kClusterRows;
  bool fuse_ = true;
  Layout layout_;
  MirrorIndex index_;
  std::shared_ptr<Window> window_;
  std::unique_ptr<Transport> transport_;
  std::vector<float> sums_;  // of one piece
};

}  // namespace

void mirror_reference(const Shape& shape, std::int32_t rank, const Operands* all, void* out) {
  std::vector<float> sums;
  for (std::int32_t source = 0; source < shape.ranks; ++source) {
    compute(shape, all[source], rank, 0, shape.rows[static_cast<std::size_t>(source)], sums,
            static_cast<Bf16*>(out) + row_offset(shape, source) * shape.columns);
  }
}

std::unique_ptr<GemmA2a> make_cpu_gemm_a2a(TeamHandle team, const Shape& shape,
                                           const Options& options) {
  return std::make_unique<CpuGemmA2a>(std::move(team), shape, options);
}

}  // namespace penstock::a2a_gemm
