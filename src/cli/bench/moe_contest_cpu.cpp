#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "cli/bench/moe_contest.h"
#include "cli/bench/timeline_trace.h"
#include "penstock/core/error.h"
#include "penstock/ops/moe_stage2/reference.h"

namespace penstock::bench {

using namespace moe_stage2;

namespace {

constexpr int kErrorSamples = 64;

// What the parts work on alone: all rows of the rank written to one place, and a place full of rows
// that a combine may read.
class Floors {
 public:
  Floors(const MoeProblem& problem, const MoeHostOperands& operands)
      : shape_(problem.shape),
        operands_(operands),
        row_bytes_(static_cast<std::size_t>(wire_row_bytes(shape_.hidden, shape_.wire))),
        plan_(shape_, operands.rows.tiles()),
        rows_(operands.rows.origin.size() * row_bytes_),
        landed_(operands.token_weight.size() * row_bytes_) {
    plan_.plan(operands.rows);
    const ValueStream values = stream_of(problem.seed, 9, 0);
    const std::size_t payload = static_cast<std::size_t>(shape_.hidden);
    for (std::size_t row = 0; row < operands.token_weight.size(); ++row) {
      unsigned char* at = landed_.data() + row * row_bytes_;
      for (std::size_t c = 0; c < payload; ++c) {
        if (shape_.wire == WireFormat::kFp8) {
          at[c] = values.e4m3(row * payload + c).bits;
        } else {
          const std::uint16_t bits = values.bf16(row * payload + c).bits;
          at[2 * c] = static_cast<unsigned char>(bits & 0xff);
          at[2 * c + 1] = static_cast<unsigned char>(bits >> 8);
        }
      }
      // Scales of 2^-7.
      if (shape_.wire == WireFormat::kFp8) std::fill(at + payload, at + row_bytes_, 120);
    }
  }

  void gemm() {
    const PlanOutputs& plan = plan_.outputs();
    const GemmOperands gemm = operands_.view(nullptr).gemm;
    for (std::int64_t tile = 0; tile < *plan.tile_count; ++tile) {
      for (std::int64_t i = 0; i < plan.tile_rows[tile]; ++i) {
        const std::int64_t row = tile * kTileRows + i;
        write_row(gemm, row, plan.tile_expert[tile], shape_.wire,
                  rows_.data() + static_cast<std::size_t>(row) * row_bytes_);
      }
    }
  }

  void combine(Bf16* out) {
    const auto top_k = static_cast<std::size_t>(shape_.top_k);
    std::array<const unsigned char*, kMaxTopK> rows{};
    for (std::size_t token = 0; token < static_cast<std::size_t>(operands_.tokens); ++token) {
      for (std::size_t k = 0; k < top_k; ++k) {
        rows[k] = landed_.data() + (token * top_k + k) * row_bytes_;
      }
      for (std::int32_t c = 0; c < shape_.hidden; ++c) {
        *out++ = combine_element(rows.data(), operands_.token_weight.data() + token * top_k,
                                 shape_.top_k, shape_.hidden, shape_.wire, c);
      }
    }
  }

 private:
  Shape shape_;
  const MoeHostOperands& operands_;
  std::size_t row_bytes_;
  HostPlan plan_;
  std::vector<unsigned char> rows_;
  std::vector<unsigned char> landed_;
};

Options operator_options(TransportKind transport, bool fuse) {
  Options options;
  options.transport = transport;
  options.fuse = fuse;
  return options;
}

class CpuMoeContest final : public Contestant {
 public:
  CpuMoeContest(const TeamHandle& team, const MoeProblem& problem, const MoeContestOptions& options)
      : problem_(problem),
        rank_(team->rank()),
        operands_(problem, rank_),
        floors_(problem, operands_),
        out_(static_cast<std::size_t>(operands_.tokens * problem.shape.hidden)),
        variants_{{kGemmAlone, false, false}, {kCombineAlone, false, false}} {
    const auto add = [&](std::string name, const Options& with) {
      variants_.push_back({std::move(name), true, true});
      operators_.push_back(make_cpu_moe_stage2(team, problem.shape, with));
    };
    add(kUnfused, operator_options(TransportKind::kCopyEngine, false));
    for (const TransportKind kind : options.transports) {
      add(std::string(to_string(kind)), operator_options(kind, true));
    }
  }

  const std::vector<Variant>& variants() const override { return variants_; }

  double run(std::size_t variant) override {
    const auto start = std::chrono::steady_clock::now();
    if (variant == 0) {
      floors_.gemm();
    } else if (variant == 1) {
      floors_.combine(out_.data());
    } else {
      operators_[variant - kFloors]->run({}, operands_.view(out_.data()));
    }
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
        .count();
  }

  void poison() override { std::fill(out_.begin(), out_.end(), Bf16{0xFFFF}); }
  std::vector<Bf16> result() override { return out_; }
  double relative_error(const std::vector<Bf16>& result) override {
    return sampled_error(problem_, rank_, result, kErrorSamples);
  }
  TransportCounters counters(std::size_t variant) const override {
    return variant < kFloors ? TransportCounters{} : operators_[variant - kFloors]->counters();
  }

 private:
  static constexpr std::size_t kFloors = 2;

  const MoeProblem& problem_;
  int rank_;
  MoeHostOperands operands_;
  Floors floors_;
  std::vector<Bf16> out_;
  std::vector<Variant> variants_;
  std::vector<std::unique_ptr<MoeStage2>> operators_;
};

}  // namespace

std::unique_ptr<Contestant> make_cpu_moe_contest(const TeamHandle& team, const MoeProblem& problem,
                                                 const MoeContestOptions& options) {
  return std::make_unique<CpuMoeContest>(team, problem, options);
}

Trace trace_cpu_moe(const TeamHandle& team, const MoeProblem& problem, TransportKind transport) {
  const MoeHostOperands operands(problem, team->rank());
  std::vector<Bf16> out(static_cast<std::size_t>(operands.tokens * problem.shape.hidden));
  Timeline timeline;
  Options options = operator_options(transport, true);
  options.timeline = &timeline;
  const auto op = make_cpu_moe_stage2(team, problem.shape, options);
  for (int call = 0; call < 2; ++call) {
    (void)timeline.take();
    team->barrier();
    op->run({}, operands.view(out.data()));
  }
  return trace_of(*team, timeline.take(), "first_tile");
}

std::uint64_t cpu_moe_contest_bytes(const MoeProblem& problem, int rank,
                                    const MoeContestOptions& options) {
  const Shape& shape = problem.shape;
  const auto bytes = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
  const std::int64_t row_bytes = wire_row_bytes(shape.hidden, shape.wire);
  const auto padded = static_cast<std::int64_t>(rows_at(problem.routing, rank).origin.size());
  const std::int64_t slots = problem.routing.tokens(rank) * std::int64_t{shape.top_k};
  std::uint64_t total =
      bytes(padded * (shape.intermediate + row_bytes)) +
      bytes(std::int64_t{shape.experts_per_rank()} * shape.hidden * shape.intermediate) +
      bytes(slots * row_bytes);
  total += window_bytes(shape, operator_options(TransportKind::kCopyEngine, false));
  for (const TransportKind kind : options.transports) {
    total += window_bytes(shape, operator_options(kind, true));
  }
  return total;
}

}  // namespace penstock::bench
