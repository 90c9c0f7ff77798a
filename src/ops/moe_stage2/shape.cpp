#include "penstock/ops/moe_stage2/shape.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "penstock/core/error.h"

namespace penstock::moe_stage2 {

std::string find_fault(const Shape& s) {
  if (s.ranks < 1 || s.ranks > kMaxRanks) {
    return fmt::format("moe_stage2: ranks is {}; 1 to {} are supported", s.ranks, kMaxRanks);
  }
  if (s.experts < 1 || s.experts % s.ranks != 0) {
    return fmt::format(
        "moe_stage2: {} experts do not split evenly over {} ranks; give a positive multiple of the "
        "rank count",
        s.experts, s.ranks);
  }
  if (s.experts_per_rank() > kMaxExpertsPerRank) {
    return fmt::format(
        "moe_stage2: {} experts a rank; at most {} are supported (the plan scans them in one CTA)",
        s.experts_per_rank(), kMaxExpertsPerRank);
  }
  if (s.top_k < 1 || s.top_k > kMaxTopK) {
    return fmt::format("moe_stage2: top_k is {}; 1 to {} are supported", s.top_k, kMaxTopK);
  }
  if (s.top_k > s.experts) {
    return fmt::format("moe_stage2: top_k is {} but there are only {} experts", s.top_k, s.experts);
  }
  if (s.hidden < kScaleBlock || s.hidden % kScaleBlock != 0) {
    return fmt::format(
        "moe_stage2: hidden is {}; it has to be a positive multiple of {} because a weight scale "
        "covers {} x {} elements and a tile never splits one",
        s.hidden, kScaleBlock, kScaleBlock, kScaleBlock);
  }
  if (s.intermediate < kScaleBlock || s.intermediate % kScaleBlock != 0) {
    return fmt::format(
        "moe_stage2: intermediate is {}; it has to be a positive multiple of {} because "
        "activations "
        "carry one scale per {} columns",
        s.intermediate, kScaleBlock, kScaleBlock);
  }
  if (s.max_tokens_per_rank < 0) {
    return fmt::format("moe_stage2: max_tokens_per_rank is {}; it cannot be negative",
                       s.max_tokens_per_rank);
  }
  if (worst_padded_rows_per_rank(s) > std::numeric_limits<std::int32_t>::max()) {
    return fmt::format(
        "moe_stage2: {} tokens a rank with top_k {} on {} ranks can put {} rows on one rank; row "
        "numbers are 32 bits, so split the batch",
        s.max_tokens_per_rank, s.top_k, s.ranks, worst_padded_rows_per_rank(s));
  }
  if (!(s.row_slack >= 1.0) || s.row_slack > static_cast<double>(kMaxRanks)) {
    return fmt::format(
        "moe_stage2: row_slack is {}; it multiplies the even share of a pair and has to be in [1, "
        "{}]",
        s.row_slack, kMaxRanks);
  }
  return {};
}

void validate(const Shape& shape) {
  std::string fault = find_fault(shape);
  if (!fault.empty()) throw_error(ErrorKind::kInvalidArgument, fault);
}

std::int64_t reserved_rows(const Shape& s) {
  const double even = static_cast<double>(s.max_tokens_per_rank) * s.top_k / s.ranks;
  const auto rows = static_cast<std::int64_t>(std::ceil(even * s.row_slack));
  const std::int64_t worst = worst_rows_per_pair(s);
  const std::int64_t most = worst < 1 ? 1 : worst;
  if (rows < 1) return 1;
  return rows < most ? rows : most;
}

}  // namespace penstock::moe_stage2
