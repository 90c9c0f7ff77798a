// moe_stage2 on CPUs: the plan, the protocol and the order of sums of the CUDA operator, with a DMA
// thread as copy engine and plain loops as matrix unit.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "ops/cpu/arrival_watch.h"
#include "ops/moe_stage2/operands.h"
#include "penstock/core/error.h"
#include "penstock/fabric/guard.h"
#include "penstock/fabric/signal.h"
#include "penstock/ops/moe_stage2/heuristics.h"
#include "penstock/ops/moe_stage2/layout.h"
#include "penstock/ops/moe_stage2/moe_stage2.h"
#include "penstock/ops/moe_stage2/plan.h"
#include "penstock/ops/moe_stage2/routing.h"

namespace penstock::moe_stage2 {
namespace {

bool staged(const Options& options) { return options.transport != TransportKind::kDirect; }

class CpuMoeStage2 final : public MoeStage2, public RearmHook {
 public:
  CpuMoeStage2(TeamHandle team, const Shape& shape, const Options& options)
      : team_(std::move(team)),
        shape_(shape),
        options_(options),
        rank_(team_->rank()),
        guard_(team_, team_->next_operator(), options.deadline) {
    collectively(*team_, [&] {
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
      layout_ = window_layout(shape_, staged(options_));
    });
    window_ = Window::create(team_, layout_, cpu_window_backend());
    index_ = window_index(window_shape(shape_, staged(options_)));
    collectively(*team_, [&] {
      transport_ = make_cpu_transport(options_.transport, window_, options_.engine);
      plan_ = std::make_unique<HostPlan>(shape_, worst_padded_rows_per_rank(shape_) / kTileRows);
      inverse_.resize(static_cast<std::size_t>(shape_.max_tokens_per_rank * shape_.top_k));
    });
    team_->add_hook(this);
  }

  ~CpuMoeStage2() override {
    team_->remove_hook(this);
    // A peer may still need what the engine holds; a team that faulted needs nothing any more.
    try {
      if (!team_->faulted()) transport_->quiet();
    } catch (const Error&) {
      // The fault is on record at the team, where check() finds it.
    }
  }

  void run(Stream, const Operands& o) override {
    check_operands(o, shape_);
    team_->check();
    const PlanOutputs& plan = make_plan(o);
    const std::uint64_t epoch = window_->epochs().next();
    for_peers([&](int peer) {
      wait(kConsumed, peer, epoch, reuse_epoch(epoch));
      if (spills_) wait(kConsumed, peer, epoch - 1, epoch - 1);
    });
    std::optional<cpu::ArrivalWatch> watch;
    if (options_.timeline != nullptr) watch.emplace(*options_.timeline, arrivals(epoch), epoch);
    send_tables(plan, epoch);
    multiply(o, plan, epoch);
    for_peers([&](int peer) {
      transport_->signal(peer, index_.arrived(parity_of(epoch), rank_), epoch);
    });
    transport_->flush();
    receive(o, epoch);
    combine(o, epoch);
    for_peers([&](int peer) {
      transport_->signal(peer, index_.consumed(parity_of(epoch), rank_), epoch);
    });
    transport_->flush();
  }

  const Shape& shape() const noexcept override { return shape_; }
  const Layout& layout() const noexcept override { return layout_; }
  const CallFacts& facts() const noexcept override { return facts_; }
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
  // The other ranks, from the right neighbour on, so that not everybody starts with rank 0.
  template <typename Visit>
  void for_peers(Visit&& visit) const {
    for (int step = 1; step < shape_.ranks; ++step) visit((rank_ + step) % shape_.ranks);
  }

  std::uint64_t* word(std::uint64_t offset) const {
    return reinterpret_cast<std::uint64_t*>(window_->local() + offset);
  }

  // The signals that end a call's arrivals.
  std::vector<cpu::ArrivalWatch::Word> arrivals(std::uint64_t epoch) const {
    std::vector<cpu::ArrivalWatch::Word> words;
    for_peers([&](int peer) {
      words.push_back({word(index_.arrived(parity_of(epoch), peer)), peer, 0});
    });
    return words;
  }

  // For the word of the slot that the call `of` uses.
  void wait(WindowRegion region, int peer, std::uint64_t of, std::uint64_t reached) {
    const std::uint32_t slot = parity_of(of);
    WaitSite site;
    site.peer = peer;
    site.op = guard_.op();
    site.stage = region == kConsumed ? 0 : 1;
    site.region = region;
    site.index = static_cast<std::int32_t>(slot) * shape_.ranks + peer;
    const TimelineSpan span(options_.timeline, Activity::kWait, peer, region);
    guard_.wait(
        word(region == kConsumed ? index_.consumed(slot, peer) : index_.arrived(slot, peer)),
        reached, site);
  }

  const PlanOutputs& make_plan(const Operands& o) {
    PlanInputs in;
    in.expert_rows = o.expert_rows;
    in.origin = o.origin;
    in.experts = shape_.experts_per_rank();
    in.ranks = shape_.ranks;
    in.top_k = shape_.top_k;
    in.reserved = reserved_rows(shape_);
    in.tile_capacity = o.tiles;
    const PlanOutputs& plan = plan_->plan(in);
    require(*plan.fault == kPlanWhole, ErrorKind::kInvalidArgument,
            [&] { return "moe_stage2: " + describe_plan_fault(*plan.fault); });
    spills_ = false;
    for (int d = 0; d < shape_.ranks; ++d) {
      const auto i = static_cast<std::size_t>(d);
      facts_.rows[i] = plan.prefix[*plan.tile_count * kMaxRanks + d];
      facts_.spilled[i] = std::max<std::int64_t>(0, facts_.rows[i] - in.reserved);
      spills_ = spills_ || facts_.spilled[i] > 0;
    }
    return plan;
  }

  // Bytes from this rank's window at `source` to `target` of the peer's: through the transport, or
  // stored at once.
  void ship(int peer, std::uint64_t source, std::uint64_t target, std::uint64_t bytes) {
    PutDescriptor put;
    put.peer = peer;
    put.src_offset = source;
    put.dst_offset = target;
    put.bytes = bytes;
    transport_->put(put);
  }

  void send_tables(const PlanOutputs& plan, std::uint64_t epoch) {
    const std::uint32_t slot = parity_of(epoch);
    for (int d = 0; d < shape_.ranks; ++d) {
      const auto i = static_cast<std::size_t>(d);
      const TableHead head{facts_.rows[i]};
      const auto entries = static_cast<std::uint64_t>(head.rows) * sizeof(std::int32_t);
      const std::uint64_t there = index_.landing_table(slot, rank_);
      const std::uint64_t here = index_.send_table(slot, d);
      const bool through_transport = d != rank_ && staged(options_);
      std::byte* target = through_transport ? window_->local() + here : window_->base(d) + there;
      std::memcpy(target, &head, sizeof(head));
      if (entries > 0) {
        std::memcpy(target + kLineBytes, plan.row_table + d * plan.row_table_stride, entries);
      }
      if (through_transport) {
        ship(d, here, there, kLineBytes + (entries + 15) / 16 * 16);
      } else if (d != rank_) {
        transport_->count_direct(sizeof(head) + entries);
      }
    }
  }

  // Where a row is written: its place in a send buffer, at home, in a peer's window, or among the
  // spilled rows.
  std::byte* target_of(RowPlace place, std::uint64_t epoch) const {
    const std::uint32_t slot = parity_of(epoch);
    const int d = place.run % kMaxRanks;
    const auto row = static_cast<std::uint64_t>(place.row);
    if (place.run >= kMaxRanks) return window_->local() + index_.spill(d, row);
    if (d == rank_ || !staged(options_)) return window_->base(d) + index_.landing(slot, rank_, row);
    return window_->local() + index_.send(slot, d, row);
  }

  void multiply(const Operands& o, const PlanOutputs& plan, std::uint64_t epoch) {
    const std::int64_t tiles = *plan.tile_count;
    const std::int64_t step =
        options_.fuse ? options_.tiles_per_chunk : std::max<std::int64_t>(tiles, 1);
    for (std::int64_t first = 0; first < tiles; first += step) {
      const std::int64_t last = std::min(first + step, tiles);
      std::optional<TimelineSpan> span;
      span.emplace(options_.timeline, Activity::kMultiply, -1, static_cast<std::int32_t>(first));
      for (std::int64_t tile = first; tile < last; ++tile) {
        for (std::int64_t row = tile * kTileRows; row < tile * kTileRows + plan.tile_rows[tile];
             ++row) {
          write_row(o.gemm, row, plan.tile_expert[tile], shape_.wire,
                    reinterpret_cast<unsigned char*>(target_of(plan.place[row], epoch)));
        }
      }
      span.emplace(options_.timeline, Activity::kSend, -1, static_cast<std::int32_t>(first));
      post_chunk(plan, first, last, epoch);
    }
  }

  // The rows of tiles [first, last) that have a reserved place: one range per peer.
  void post_chunk(const PlanOutputs& plan, std::int64_t first, std::int64_t last,
                  std::uint64_t epoch) {
    const std::uint32_t slot = parity_of(epoch);
    const std::int64_t reserved = reserved_rows(shape_);
    for_peers([&](int peer) {
      const RowRange range = rows_of_tiles(plan.prefix, first, last, peer);
      const std::int64_t end = std::min<std::int64_t>(range.end, reserved);
      if (range.begin >= end) return;
      const auto begin = static_cast<std::uint64_t>(range.begin);
      const std::uint64_t bytes =
          static_cast<std::uint64_t>(end - range.begin) * index_.shape.row_bytes;
      if (staged(options_)) {
        ship(peer, index_.send(slot, peer, begin), index_.landing(slot, rank_, begin), bytes);
      } else {
        transport_->count_direct(bytes);
      }
    });
    transport_->flush();
  }

  const TableHead& head_of(int source, std::uint64_t epoch) const {
    return *reinterpret_cast<const TableHead*>(window_->local() +
                                               index_.landing_table(parity_of(epoch), source));
  }

  void receive(const Operands& o, std::uint64_t epoch) {
    const std::int64_t slots = o.tokens * shape_.top_k;
    std::fill(inverse_.begin(), inverse_.begin() + slots, RowPlace{});
    const auto invert = [&](int source) {
      const std::byte* table = window_->local() + index_.landing_table(parity_of(epoch), source);
      const std::int32_t fault = invert_on_host(
          reinterpret_cast<const std::int32_t*>(table + kLineBytes), head_of(source, epoch).rows,
          source, reserved_rows(shape_), inverse_.data(), slots);
      require(fault == kPlanWhole, ErrorKind::kInvalidArgument, [&] {
        return fmt::format(
            "moe_stage2: rank {} holds a row for a token or slot that rank {} does not have; it "
            "has {} tokens",
            source, rank_, o.tokens);
      });
    };
    invert(rank_);
    for_peers([&](int peer) {
      wait(kArrived, peer, epoch, epoch);
      invert(peer);
    });
  }

  const unsigned char* row_at(RowPlace place, std::uint64_t epoch) const {
    const std::uint32_t slot = parity_of(epoch);
    const int source = place.run % kMaxRanks;
    const auto row = static_cast<std::uint64_t>(place.row);
    const std::byte* at = place.run < kMaxRanks
                              ? window_->local() + index_.landing(slot, source, row)
                              : window_->base(source) + index_.spill(rank_, row);
    return reinterpret_cast<const unsigned char*>(at);
  }

  void combine(const Operands& o, std::uint64_t epoch) {
    const TimelineSpan span(options_.timeline, Activity::kCombine, -1, -1);
    std::array<const unsigned char*, kMaxTopK> rows{};
    for (std::int64_t token = 0; token < o.tokens; ++token) {
      for (std::int32_t k = 0; k < shape_.top_k; ++k) {
        const RowPlace place = inverse_[static_cast<std::size_t>(token * shape_.top_k + k)];
        rows[static_cast<std::size_t>(k)] = place.run < 0 ? nullptr : row_at(place, epoch);
      }
      for (std::int32_t c = 0; c < shape_.hidden; ++c) {
        o.out[token * shape_.hidden + c] =
            combine_element(rows.data(), o.weight + token * shape_.top_k, shape_.top_k,
                            shape_.hidden, shape_.wire, c);
      }
    }
  }

  TeamHandle team_;
  Shape shape_;
  Options options_;
  int rank_;
  Guard guard_;
  Layout layout_;
  std::shared_ptr<Window> window_;
  WindowIndex index_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<HostPlan> plan_;
  std::vector<RowPlace> inverse_;  // [max_tokens_per_rank, top_k]
  CallFacts facts_;
  bool spills_ = false;  // this call has rows past a reservation
};

}  // namespace

std::uint64_t window_bytes(const Shape& shape, const Options& options) {
  const TransportKind kind = options.choose_transport ? choose_transport(shape) : options.transport;
  return window_layout(shape, kind != TransportKind::kDirect).total_bytes();
}

std::unique_ptr<MoeStage2> make_cpu_moe_stage2(TeamHandle team, const Shape& shape,
                                               const Options& options) {
  return std::make_unique<CpuMoeStage2>(std::move(team), shape, options);
}

}  // namespace penstock::moe_stage2
