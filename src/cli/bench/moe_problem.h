// What a benchmark of moe_stage2 computes: routing, operands, and f64 beside the results.
#pragma once

#include <cstdint>
#include <vector>

#include "cli/bench/values.h"
#include "penstock/ops/moe_stage2/moe_stage2.h"
#include "penstock/ops/moe_stage2/routing.h"

namespace penstock::bench {

// The same on every rank.
struct MoeProblem {
  moe_stage2::Shape shape;
  moe_stage2::Routing routing;
  std::uint64_t seed = 1;

  // [padded rows of the rank, intermediate] and [intermediate / 128, rows]
  ValueStream act(int rank) const { return stream_of(seed, 0, rank); }
  float act_scale(int rank, std::uint64_t i) const {
    return stream_of(seed, 1, rank).uniform(i, 0.005f, 0.02f);
  }
  // [experts of the rank, hidden, intermediate] and [experts, hidden / 128, intermediate / 128]
  ValueStream weight(int rank) const { return stream_of(seed, 2, rank); }
  float weight_scale(int rank, std::uint64_t i) const {
    return stream_of(seed, 3, rank).uniform(i, 1e-4f, 4e-4f);
  }
  // [tokens of the rank, top_k]
  float token_weight(int rank, std::uint64_t i) const {
    return stream_of(seed, 4, rank).uniform(i, 0.1f, 0.5f);
  }
};

// Fraction of the rank's (token, slot) pairs whose expert is on another rank.
double remote_fraction(const MoeProblem& problem, int rank);
// Valid rows of the rank that has most, and the most that one rank sends to others.
std::int64_t most_rows(const MoeProblem& problem);
std::int64_t most_rows_sent(const MoeProblem& problem);

// One rank's operands in host memory.
struct MoeHostOperands {
  MoeHostOperands(const MoeProblem& problem, int rank);
  // Of all its tokens; `out` is [tokens, hidden].
  moe_stage2::Operands view(Bf16* out) const;

  moe_stage2::Shape shape;
  std::int64_t tokens = 0;
  moe_stage2::SourceRows rows;
  std::vector<E4M3> act, weight;
  std::vector<float> act_scales, weight_scales, token_weight;
};

// Relative error, ||out - f64|| / ||f64||, over `samples` random elements of the rank's
// out [tokens, hidden]. 0 for a rank without tokens. Computes operands of other ranks from the
// problem.
double sampled_error(const MoeProblem& problem, int rank, const std::vector<Bf16>& out,
                     int samples);

}  // namespace penstock::bench
