#include "penstock/ops/moe_stage2/routing.h"

#include <algorithm>
#include <random>
#include <string>

#include "penstock/core/error.h"

namespace penstock::moe_stage2 {
namespace {

// Draws `count` different experts for one token out of `candidates`, after those in `fixed`.
void draw_token(std::mt19937_64& random, std::vector<std::int32_t>& candidates,
                std::span<const std::int32_t> fixed, int top_k, std::vector<std::int32_t>& out) {
  const auto begin = static_cast<std::ptrdiff_t>(out.size());
  for (const std::int32_t e : fixed) out.push_back(e);
  std::size_t left = candidates.size();
  while (out.size() - static_cast<std::size_t>(begin) < static_cast<std::size_t>(top_k)) {
    // Fisher-Yates from the back; the order of candidates does not matter between tokens.
    const std::size_t pick = random() % left;
    --left;
    std::swap(candidates[pick], candidates[left]);
    const std::int32_t e = candidates[left];
    if (std::find(fixed.begin(), fixed.end(), e) == fixed.end()) out.push_back(e);
  }
  std::shuffle(out.begin() + begin, out.end(), random);
}

std::vector<std::int32_t> expert_range(std::int32_t begin, std::int32_t end) {
  std::vector<std::int32_t> list;
  for (std::int32_t e = begin; e < end; ++e) list.push_back(e);
  return list;
}

}  // namespace

std::string_view to_string(Pattern pattern) {
  switch (pattern) {
    case Pattern::kBalanced:
      return "balanced";
    case Pattern::kHotExpert:
      return "hot_expert";
    case Pattern::kHotRank:
      return "hot_rank";
    case Pattern::kAllToOne:
      return "all_to_one";
    case Pattern::kRaggedSources:
      return "ragged_sources";
    case Pattern::kZeroTokenRank:
      return "zero_token_rank";
    case Pattern::kZeroRowExpert:
      return "zero_row_expert";
    case Pattern::kRotatingHotspot:
      return "rotating_hotspot";
    case Pattern::kBurst:
      return "burst";
  }
  return "unknown";
}

Routing make_routing(const Shape& shape, Pattern pattern, std::uint64_t seed, int call) {
  validate(shape);
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15ULL + static_cast<std::uint64_t>(call));
  const std::int32_t local = shape.experts_per_rank();
  const auto all = expert_range(0, shape.experts);
  // Experts of one rank, filled up with others where the rank has too few for top_k different ones.
  const auto on_rank = [&](int rank) {
    auto list = expert_range(rank * local, (rank + 1) * local);
    for (std::int32_t e = 0; static_cast<std::int32_t>(list.size()) < shape.top_k; ++e) {
      if (e / local != rank) list.push_back(e);
    }
    return list;
  };
  auto even = all;
  std::erase_if(even, [](std::int32_t e) { return e % 2 != 0; });

  Routing routing;
  routing.shape = shape;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    auto tokens = static_cast<std::int64_t>(shape.max_tokens_per_rank);
    if (pattern == Pattern::kRaggedSources) {
      tokens = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(tokens + 1));
    }
    if (pattern == Pattern::kZeroTokenRank && rank == (call + 1) % shape.ranks) tokens = 0;
    std::vector<std::int32_t> out;
    out.reserve(static_cast<std::size_t>(tokens * shape.top_k));
    auto candidates = all;
    std::vector<std::int32_t> fixed;
    switch (pattern) {
      case Pattern::kHotExpert:
        fixed = {0};
        break;
      case Pattern::kRotatingHotspot:
        fixed = {call % shape.experts};
        break;
      case Pattern::kAllToOne:
        candidates = on_rank(shape.ranks - 1);
        break;
      case Pattern::kBurst:
        if (rank == call % shape.ranks) candidates = on_rank((rank + 1) % shape.ranks);
        break;
      case Pattern::kZeroRowExpert:
        if (static_cast<std::int32_t>(even.size()) >= shape.top_k) candidates = even;
        break;
      default:
        break;
    }
    auto hot = on_rank(0);
    for (std::int64_t t = 0; t < tokens; ++t) {
      auto& from = pattern == Pattern::kHotRank && random() % 5 != 0 ? hot : candidates;
      draw_token(random, from, fixed, shape.top_k, out);
    }
    routing.expert.push_back(std::move(out));
  }
  return routing;
}

Routing make_remote_routing(const Shape& shape, double remote, std::uint64_t seed) {
  validate(shape);
  require(remote >= 0.0 && remote <= 1.0, ErrorKind::kInvalidArgument, [&] {
    return "moe_stage2: remote fraction " + std::to_string(remote) + "; give 0 to 1";
  });
  const std::int32_t local = shape.experts_per_rank();
  const double wanted = remote * shape.top_k;
  const auto fewest = static_cast<std::int32_t>(wanted);
  const double more = wanted - fewest;  // of a token having one remote slot more
  const std::int32_t most = fewest + (more > 0.0 ? 1 : 0);
  require(most <= shape.experts - local && shape.top_k - fewest <= local,
          ErrorKind::kInvalidArgument, [&] {
            return "moe_stage2: remote fraction " + std::to_string(remote) + " of " +
                   std::to_string(shape.top_k) + " slots does not fit " + std::to_string(local) +
                   " experts of this rank and " + std::to_string(shape.experts - local) +
                   " of others; give more experts or another fraction";
          });
  Routing routing{shape, {}};
  for (int rank = 0; rank < shape.ranks; ++rank) {
    std::mt19937_64 random(seed * 0x9e3779b97f4a7c15ULL + static_cast<std::uint64_t>(rank));
    std::vector<std::int32_t> own;
    std::vector<std::int32_t> others;
    for (std::int32_t e = 0; e < shape.experts; ++e) {
      (e / local == rank ? own : others).push_back(e);
    }
    std::vector<std::int32_t> out;
    for (std::int64_t t = 0; t < shape.max_tokens_per_rank; ++t) {
      const bool one_more = static_cast<double>(random() >> 11) * 0x1p-53 < more;
      const std::int32_t away = fewest + (one_more ? 1 : 0);
      draw_token(random, others, {}, away, out);
      draw_token(random, own, {}, shape.top_k - away, out);
    }
    routing.expert.push_back(std::move(out));
  }
  return routing;
}

std::int64_t SourceRows::rows() const {
  std::int64_t total = 0;
  for (const std::int32_t rows : expert_rows) total += rows;
  return total;
}

SourceRows rows_at(const Routing& routing, int rank) {
  const Shape& shape = routing.shape;
  const std::int32_t local = shape.experts_per_rank();
  std::vector<std::vector<RowOrigin>> lists(static_cast<std::size_t>(local));
  for (int from = 0; from < shape.ranks; ++from) {
    const auto& experts = routing.expert[static_cast<std::size_t>(from)];
    for (std::size_t i = 0; i < experts.size(); ++i) {
      if (experts[i] / local != rank) continue;
      const auto k = static_cast<std::size_t>(shape.top_k);
      lists[static_cast<std::size_t>(experts[i] % local)].push_back(
          {static_cast<std::int32_t>(i / k), static_cast<std::int16_t>(from),
           static_cast<std::int16_t>(i % k)});
    }
  }
  SourceRows rows;
  for (auto& list : lists) {
    rows.expert_rows.push_back(static_cast<std::int32_t>(list.size()));
    list.resize(static_cast<std::size_t>(tiles_of(static_cast<std::int64_t>(list.size()))) *
                kTileRows);
    rows.origin.insert(rows.origin.end(), list.begin(), list.end());
  }
  return rows;
}

HostPlan::HostPlan(const Shape& shape, std::int64_t tile_capacity)
    : shape_(shape), capacity_(tile_capacity) {
  const auto tiles = static_cast<std::size_t>(tile_capacity);
  const std::int64_t stride = worst_rows_per_pair(shape);
  words_.resize(2 + 3 * tiles + (tiles + 1) * kMaxRanks +
                static_cast<std::size_t>(stride) * kMaxRanks);
  place_.resize(tiles * kTileRows);
  std::int32_t* next = words_.data();
  outputs_.fault = next++;
  outputs_.tile_count = next++;
  outputs_.tile_expert = next;
  next += tiles;
  outputs_.tile_rows = next;
  next += tiles;
  outputs_.tile_mate = next;
  next += tiles;
  outputs_.prefix = next;
  next += (tiles + 1) * kMaxRanks;
  outputs_.row_table = next;
  outputs_.row_table_stride = stride;
  outputs_.place = place_.data();
}

const PlanOutputs& HostPlan::plan(const SourceRows& rows) {
  PlanInputs in;
  in.expert_rows = rows.expert_rows.data();
  in.origin = rows.origin.data();
  in.experts = shape_.experts_per_rank();
  in.ranks = shape_.ranks;
  in.top_k = shape_.top_k;
  in.reserved = reserved_rows(shape_);
  in.tile_capacity = capacity_;
  return plan(in);
}

const PlanOutputs& HostPlan::plan(const PlanInputs& in) {
  require(in.tile_capacity <= capacity_, ErrorKind::kInvalidArgument, [&] {
    return "moe_stage2: " + std::to_string(in.tile_capacity) + " tiles; the plan's memory holds " +
           std::to_string(capacity_);
  });
  *outputs_.fault = kPlanWhole;
  plan_on_host(in, outputs_);
  return outputs_;
}

}  // namespace penstock::moe_stage2
