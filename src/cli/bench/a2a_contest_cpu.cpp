#include <algorithm>
#include <chrono>

#include "cli/bench/a2a_contest.h"
#include "cli/bench/timeline_trace.h"
#include "penstock/ops/a2a_gemm/mirror.h"
#include "penstock/ops/a2a_gemm/plan.h"

namespace penstock::bench {

using namespace a2a_gemm;

namespace {

constexpr int kErrorSamples = 64;

Options operator_options(const A2aProblem& problem, TransportKind transport, Fuse fuse) {
  Options options;
  options.transport = transport;
  options.fuse = fuse;
  options.row_block_rows = problem.row_block_rows;
  return options;
}

struct Entry {
  const char* name;
  TransportKind transport;
  Fuse fuse;
};
constexpr Entry kEntries[] = {
    {kA2aUnfused, TransportKind::kCopyEngine, Fuse::kNever},
    {"copy_engine", TransportKind::kCopyEngine, Fuse::kAlways},
    {"sm", TransportKind::kSm, Fuse::kAlways},
    {"direct", TransportKind::kDirect, Fuse::kAlways},
    {kA2aAuto, TransportKind::kCopyEngine, Fuse::kAuto},
};

class CpuA2aContest final : public Contestant {
 public:
  CpuA2aContest(const TeamHandle& team, const A2aProblem& problem)
      : problem_(problem),
        rank_(team->rank()),
        rows_(problem.shape.rows[static_cast<std::size_t>(rank_)]),
        operands_(problem, rank_),
        out_(static_cast<std::size_t>(rows_) * static_cast<std::size_t>(problem.shape.columns)),
        variants_{{kA2aGemmAlone, false, false}} {
    for (const Entry& entry : kEntries) {
      variants_.push_back({entry.name, true, true});
      operators_.push_back(make_cpu_a2a_gemm(
          team, problem.shape, operator_options(problem, entry.transport, entry.fuse)));
    }
    sums_.resize(static_cast<std::size_t>(operators_[0]->config().row_block_rows) *
                 static_cast<std::size_t>(problem.shape.columns));
  }

  const std::vector<Variant>& variants() const override { return variants_; }

  double run(std::size_t variant) override {
    const auto start = std::chrono::steady_clock::now();
    if (variant == 0) {
      multiply_alone();
    } else {
      operators_[variant - 1]->run({}, operands_.view(out_.data()));
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
    return variant == 0 ? TransportCounters{} : operators_[variant - 1]->counters();
  }

 private:
  // As many products as a call, every chunk in this rank's own memory: its rows of X for rank
  // `source` stand in for the chunk from there. Ranks may have different numbers of rows, so the
  // rows are taken round the whole of X.
  void multiply_alone() {
    const Shape& s = problem_.shape;
    const Operands o = operands_.view(out_.data());
    const std::int32_t block = operators_[0]->config().row_block_rows;
    for (std::int32_t row = 0; row < rows_; row += block) {
      const std::int32_t rows = std::min(block, rows_ - row);
      const std::int64_t count = static_cast<std::int64_t>(rows) * s.columns;
      std::fill(sums_.begin(), sums_.begin() + count, 0.0f);
      for (std::int32_t step = 0; step < s.ranks; ++step) {
        const int source = source_of_step(rank_, step, s.ranks);
        const std::int64_t first =
            std::min<std::int64_t>(row_offset(s, source), total_rows(s) - rows_);
        const ChunkView chunk{static_cast<const std::byte*>(o.x) + first * s.row_bytes(),
                              o.x_scales == nullptr ? nullptr : o.x_scales + first,
                              o.x_scale_stride};
        add_chunk(s, chunk, row, rows, o.w, o.w_scales, source, sums_.data());
      }
      round_sums(sums_.data(), count, out_.data() + static_cast<std::int64_t>(row) * s.columns);
    }
  }

  const A2aProblem& problem_;
  int rank_;
  std::int32_t rows_;
  A2aHostOperands operands_;
  std::vector<Bf16> out_;
  std::vector<Variant> variants_;
  std::vector<std::unique_ptr<A2aGemm>> operators_;
  std::vector<float> sums_;
};

// The mirror: the same variants, the GEMM alone as all its products into memory of this rank's.
class CpuMirrorContest final : public Contestant {
 public:
  CpuMirrorContest(const TeamHandle& team, const A2aProblem& problem)
      : problem_(problem),
        rank_(team->rank()),
        operands_(problem, rank_),
        out_(static_cast<std::size_t>(total_rows(problem.shape)) *
             static_cast<std::size_t>(problem.shape.columns)),
        variants_{{kA2aGemmAlone, false, false}} {
    for (const Entry& entry : kEntries) {
      variants_.push_back({entry.name, true, true});
      operators_.push_back(make_cpu_gemm_a2a(
          team, problem.shape, operator_options(problem, entry.transport, entry.fuse)));
    }
  }

  const std::vector<Variant>& variants() const override { return variants_; }

  double run(std::size_t variant) override {
    const auto start = std::chrono::steady_clock::now();
    if (variant == 0) {
      multiply_alone();
    } else {
      operators_[variant - 1]->run({}, operands_.view(out_.data()));
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
    return variant == 0 ? TransportCounters{} : operators_[variant - 1]->counters();
  }

 private:
  void multiply_alone() {
    const Shape& s = problem_.shape;
    const Operands o = operands_.view(out_.data());
    const std::int32_t rows = s.rows[static_cast<std::size_t>(rank_)];
    const std::int64_t count = static_cast<std::int64_t>(rows) * s.columns;
    for (std::int32_t destination = 0; destination < s.ranks; ++destination) {
      sums_.assign(static_cast<std::size_t>(count), 0.0f);
      add_chunk(s, {o.x, o.x_scales, o.x_scale_stride}, 0, rows, o.w, o.w_scales, destination,
                sums_.data());
      round_sums(sums_.data(), count, out_.data() + row_offset(s, rank_) * s.columns);
    }
  }

  const A2aProblem& problem_;
  int rank_;
  A2aHostOperands operands_;
  std::vector<Bf16> out_;
  std::vector<Variant> variants_;
  std::vector<std::unique_ptr<GemmA2a>> operators_;
  std::vector<float> sums_;
};

}  // namespace

std::unique_ptr<Contestant> make_cpu_a2a_contest(const TeamHandle& team,
                                                 const A2aProblem& problem) {
  if (problem.mirror) return std::make_unique<CpuMirrorContest>(team, problem);
  return std::make_unique<CpuA2aContest>(team, problem);
}

Trace trace_cpu_a2a(const TeamHandle& team, const A2aProblem& problem) {
  const A2aHostOperands operands(problem, team->rank());
  std::vector<Bf16> out(
      static_cast<std::size_t>(problem.shape.rows[static_cast<std::size_t>(team->rank())]) *
      static_cast<std::size_t>(problem.shape.columns));
  Timeline timeline;
  Options options = operator_options(problem, TransportKind::kCopyEngine, Fuse::kAlways);
  options.timeline = &timeline;
  const auto op = make_cpu_a2a_gemm(team, problem.shape, options);
  for (int call = 0; call < 2; ++call) {
    (void)timeline.take();
    team->barrier();
    op->run({}, operands.view(out.data()));
  }
  return trace_of(*team, timeline.take(), "row_block");
}

std::uint64_t cpu_a2a_contest_bytes(const A2aProblem& problem) {
  const Shape& s = problem.shape;
  std::uint64_t total = static_cast<std::uint64_t>(
      (total_rows(s) + std::int64_t{s.ranks} * s.columns) * s.row_bytes());
  if (problem.mirror) {
    // Windows: send and landing, two slots each, in which every rank has room for the most rows.
    const auto result = static_cast<std::uint64_t>(s.ranks) *
                        static_cast<std::uint64_t>(max_rows(s)) *
                        static_cast<std::uint64_t>(s.columns) * sizeof(Bf16);
    return total + std::size(kEntries) * 2 * kCallsInFlight * result +
           static_cast<std::uint64_t>(max_rows(s)) * static_cast<std::uint64_t>(s.columns) *
               sizeof(float);
  }
  for (const Entry& entry : kEntries) {
    const Options options = operator_options(problem, entry.transport, entry.fuse);
    total += window_bytes(s, options) + workspace_bytes(s, options);
  }
  return total;
}

}  // namespace penstock::bench
