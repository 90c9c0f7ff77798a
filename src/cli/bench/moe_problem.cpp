#include "cli/bench/moe_problem.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <random>
#include <thread>

#include "penstock/core/thread_pool.h"

namespace penstock::bench {

using namespace moe_stage2;

namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// The row of `rank` that a (token, slot) of `origin` became.
std::int64_t find_row(const SourceRows& rows, const RowOrigin& origin) {
  const auto at = std::find_if(rows.origin.begin(), rows.origin.end(), [&](const RowOrigin& o) {
    return o.rank == origin.rank && o.token == origin.token && o.slot == origin.slot;
  });
  return at - rows.origin.begin();
}

// y[row, column] of `rank` in f64, operands computed as they are needed.
double element_f64(const MoeProblem& p, int rank, std::int64_t rows, std::int64_t row,
                   std::int32_t expert, std::int32_t column) {
  const Shape& s = p.shape;
  const ValueStream act = p.act(rank);
  const ValueStream weight = p.weight(rank);
  const std::int32_t blocks = s.intermediate / kScaleBlock;
  double sum = 0.0;
  for (std::int32_t b = 0; b < blocks; ++b) {
    double block = 0.0;
    for (std::int32_t i = 0; i < kScaleBlock; ++i) {
      const std::int64_t k = b * kScaleBlock + i;
      const auto a = static_cast<std::uint64_t>(row * s.intermediate + k);
      const auto w = static_cast<std::uint64_t>(
          (static_cast<std::int64_t>(expert) * s.hidden + column) * s.intermediate + k);
      block += static_cast<double>(act.e4m3(a).to_float()) *
               static_cast<double>(weight.e4m3(w).to_float());
    }
    const auto scale_row =
        static_cast<std::int64_t>(expert) * (s.hidden / kScaleBlock) + column / kScaleBlock;
    sum += block *
           static_cast<double>(p.act_scale(rank, static_cast<std::uint64_t>(b * rows + row))) *
           static_cast<double>(
               p.weight_scale(rank, static_cast<std::uint64_t>(scale_row * blocks + b)));
  }
  return sum;
}

}  // namespace

double remote_fraction(const MoeProblem& problem, int rank) {
  const auto& experts = problem.routing.expert[size(rank)];
  if (experts.empty()) return 0.0;
  const auto remote = std::count_if(experts.begin(), experts.end(), [&](std::int32_t e) {
    return e / problem.shape.experts_per_rank() != rank;
  });
  return static_cast<double>(remote) / static_cast<double>(experts.size());
}

std::int64_t most_rows(const MoeProblem& problem) {
  std::vector<std::int64_t> rows(size(problem.shape.ranks), 0);
  for (const auto& experts : problem.routing.expert) {
    for (const std::int32_t e : experts) ++rows[size(e / problem.shape.experts_per_rank())];
  }
  return *std::max_element(rows.begin(), rows.end());
}

std::int64_t most_rows_sent(const MoeProblem& problem) {
  std::vector<std::int64_t> rows(size(problem.shape.ranks), 0);
  for (int rank = 0; rank < problem.shape.ranks; ++rank) {
    for (const std::int32_t e : problem.routing.expert[size(rank)]) {
      const int source = e / problem.shape.experts_per_rank();
      rows[size(source)] += source != rank ? 1 : 0;
    }
  }
  return *std::max_element(rows.begin(), rows.end());
}

MoeHostOperands::MoeHostOperands(const MoeProblem& problem, int rank)
    : shape(problem.shape),
      tokens(problem.routing.tokens(rank)),
      rows(rows_at(problem.routing, rank)) {
  const std::size_t padded = rows.origin.size();
  const std::size_t k = size(shape.intermediate);
  const std::size_t h = size(shape.hidden);
  const std::size_t experts = size(shape.experts_per_rank());
  act.resize(padded * k);
  act_scales.resize(padded * (k / kScaleBlock));
  weight.resize(experts * h * k);
  weight_scales.resize(experts * (h / kScaleBlock) * (k / kScaleBlock));
  token_weight.resize(size(tokens * shape.top_k));
  const ValueStream a = problem.act(rank);
  const ValueStream w = problem.weight(rank);
  ThreadPool pool(std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / shape.ranks));
  const auto fill = [&](std::vector<E4M3>& out, const ValueStream& values) {
    pool.parallel_for(out.size(), 1 << 16, [&](std::size_t begin, std::size_t end, int) {
      for (std::size_t i = begin; i < end; ++i) out[i] = values.e4m3(i);
    });
  };
  fill(act, a);
  fill(weight, w);
  for (std::size_t i = 0; i < act_scales.size(); ++i) act_scales[i] = problem.act_scale(rank, i);
  for (std::size_t i = 0; i < weight_scales.size(); ++i) {
    weight_scales[i] = problem.weight_scale(rank, i);
  }
  for (std::size_t i = 0; i < token_weight.size(); ++i) {
    token_weight[i] = problem.token_weight(rank, i);
  }
}

Operands MoeHostOperands::view(Bf16* out) const {
  Operands o;
  o.gemm.act = act.data();
  o.gemm.act_scales = act_scales.data();
  o.gemm.act_scale_stride = static_cast<std::int64_t>(rows.origin.size());
  o.gemm.weight = weight.data();
  o.gemm.weight_scales = weight_scales.data();
  o.gemm.hidden = shape.hidden;
  o.gemm.intermediate = shape.intermediate;
  o.expert_rows = rows.expert_rows.data();
  o.origin = rows.origin.data();
  o.tiles = rows.tiles();
  o.weight = token_weight.data();
  o.tokens = tokens;
  o.out = out;
  return o;
}

double sampled_error(const MoeProblem& p, int rank, const std::vector<Bf16>& out, int samples) {
  const std::int64_t tokens = p.routing.tokens(rank);
  if (tokens == 0) return 0.0;
  std::map<int, SourceRows> rows;
  std::mt19937_64 random(p.seed + 77);
  double error = 0.0;
  double norm = 0.0;
  for (int sample = 0; sample < samples; ++sample) {
    const auto token = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(tokens));
    const auto column =
        static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(p.shape.hidden));
    double exact = 0.0;
    for (std::int32_t slot = 0; slot < p.shape.top_k; ++slot) {
      const std::int64_t at = token * p.shape.top_k + slot;
      const std::int32_t expert = p.routing.expert[size(rank)][size(at)];
      const int source = expert / p.shape.experts_per_rank();
      if (!rows.contains(source)) rows[source] = rows_at(p.routing, source);
      const SourceRows& from = rows[source];
      const std::int64_t row =
          find_row(from, {static_cast<std::int32_t>(token), static_cast<std::int16_t>(rank),
                          static_cast<std::int16_t>(slot)});
      exact += static_cast<double>(p.token_weight(rank, static_cast<std::uint64_t>(at))) *
               element_f64(p, source, static_cast<std::int64_t>(from.origin.size()), row,
                           expert % p.shape.experts_per_rank(), column);
    }
    const auto got = static_cast<double>(out[size(token * p.shape.hidden + column)].to_float());
    error += (got - exact) * (got - exact);
    norm += exact * exact;
  }
  return std::sqrt(error / norm);
}

}  // namespace penstock::bench
