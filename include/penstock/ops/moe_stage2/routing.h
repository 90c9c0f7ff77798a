// Routing patterns for tests and benchmarks, and the rows that they put on a rank. Host only,
// deterministic.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "penstock/ops/moe_stage2/plan.h"
#include "penstock/ops/moe_stage2/shape.h"

namespace penstock::moe_stage2 {

enum class Pattern : std::uint8_t {
  kBalanced,         // top_k different experts, all equally likely
  kHotExpert,        // expert 0 in every token's slots
  kHotRank,          // four of five slots on rank 0's experts
  kAllToOne,         // every slot on the last rank's experts, as far as it has enough of them
  kRaggedSources,    // balanced, token counts from 0 to the maximum
  kZeroTokenRank,    // balanced, one rank without tokens
  kZeroRowExpert,    // every odd expert unused (if the rest suffices for top_k)
  kRotatingHotspot,  // the hot expert moves with the call
  kBurst,  // one rank (moves with the call) has all its tokens on its right neighbour's experts
};
inline constexpr int kPatternCount = 9;
std::string_view to_string(Pattern pattern);

// Which expert each (token, slot) of each rank goes to; experts of a token differ.
struct Routing {
  Shape shape;
  std::vector<std::vector<std::int32_t>> expert;  // [ranks][tokens_r * top_k]
  std::int32_t tokens(int rank) const {
    return static_cast<std::int32_t>(expert[static_cast<std::size_t>(rank)].size()) / shape.top_k;
  }
};

// max_tokens_per_rank tokens on every rank, fewer where the pattern says so. `call` moves what
// rotates.
Routing make_routing(const Shape& shape, Pattern pattern, std::uint64_t seed, int call = 0);

// max_tokens_per_rank tokens on every rank, `remote` (0 to 1) of whose slots go to other ranks'
// experts, all equally likely, the rest to their own rank's. Fewer GPUs than a deployment has can
// so carry its wire load: with P ranks and balanced routing it is (P - 1) / P. InvalidArgument
// where there are too few experts of either kind for a token's slots, or no other rank.
Routing make_remote_routing(const Shape& shape, double remote, std::uint64_t seed);

// The rows of one rank's experts as dispatch leaves them: sorted by expert, then by origin (rank,
// token, slot), every expert padded to whole tiles.
struct SourceRows {
  std::vector<std::int32_t> expert_rows;  // [experts_per_rank]
  std::vector<RowOrigin> origin;          // [tiles * kTileRows]
  std::int64_t tiles() const { return static_cast<std::int64_t>(origin.size()) / kTileRows; }
  std::int64_t rows() const;  // valid ones
};
SourceRows rows_at(const Routing& routing, int rank);

// Memory of a host plan, sized for `capacity` tiles.
class HostPlan {
 public:
  HostPlan(const Shape& shape, std::int64_t tile_capacity);
  // Plans `rows` of a rank; the result stays valid until the next call.
  const PlanOutputs& plan(const SourceRows& rows);
  // The same from any inputs; in.tile_capacity must not exceed the constructor's.
  const PlanOutputs& plan(const PlanInputs& in);
  const PlanOutputs& outputs() const { return outputs_; }

 private:
  Shape shape_;
  std::int64_t capacity_;
  std::vector<std::int32_t> words_;
  std::vector<RowPlace> place_;
  PlanOutputs outputs_;
};

}  // namespace penstock::moe_stage2
