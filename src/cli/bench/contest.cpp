#include "cli/bench/contest.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "cli/bench/rounds.h"

namespace penstock::bench {
namespace {

// values[n] of every rank, in rank order.
std::vector<double> gather(Team& team, const std::vector<double>& values) {
  std::vector<double> all(values.size() * static_cast<std::size_t>(team.size()));
  team.all_gather(std::as_bytes(std::span(values)), std::as_writable_bytes(std::span(all)));
  return all;
}

std::int64_t differing_rows(const std::vector<Bf16>& a, const std::vector<Bf16>& b,
                            std::size_t row) {
  std::int64_t rows = 0;
  for (std::size_t i = 0; i < a.size(); i += row) {
    rows += std::memcmp(a.data() + i, b.data() + i, row * sizeof(Bf16)) != 0 ? 1 : 0;
  }
  return rows;
}

void check(Team& team, Contestant& contestant, std::size_t row_elements, double bound,
           std::vector<VariantResult>& results) {
  std::vector<Bf16> first;
  bool have_first = false;
  for (std::size_t v = 0; v < results.size(); ++v) {
    VariantResult& result = results[v];
    if (!result.variant.same_bits) continue;
    contestant.poison();
    team.barrier();
    contestant.run(v);
    std::vector<Bf16> out = contestant.result();
    double differing = 0.0;
    if (have_first) {
      differing = static_cast<double>(differing_rows(first, out, row_elements));
    }
    const std::vector<double> all = gather(team, {differing, contestant.relative_error(out)});
    result.relative_error = 0.0;
    bool within = true;
    for (std::size_t i = 0; i < all.size(); i += 2) {
      result.differing_rows += static_cast<std::int64_t>(all[i]);
      within = within && all[i + 1] <= bound;  // false for NaN
      result.relative_error =
          all[i + 1] <= result.relative_error ? result.relative_error : all[i + 1];
    }
    result.correct = within && result.differing_rows == 0;
    if (!have_first) {
      first = std::move(out);
      have_first = true;
    }
  }
}

}  // namespace

std::vector<VariantResult> compete(Team& team, Contestant& contestant, std::size_t row_elements,
                                   const ContestOptions& options) {
  std::vector<VariantResult> results;
  for (const Variant& variant : contestant.variants()) results.emplace_back().variant = variant;
  if (options.check) check(team, contestant, row_elements, options.error_bound, results);

  std::vector<TransportCounters> before;
  for (std::size_t v = 0; v < results.size(); ++v) before.push_back(contestant.counters(v));
  const Rounds rounds{results.size(), options.warm_up, options.rounds};
  std::size_t step = 0;
  rounds.run([&](std::size_t v, bool kept) {
    team.barrier();
    const double us = contestant.run(v);
    if (kept) results[v].us.push_back(us);
    ++step;
    if (options.progress && team.rank() == 0) {
      options.progress(static_cast<double>(step) / static_cast<double>(rounds.steps()));
    }
  });

  for (std::size_t v = 0; v < results.size(); ++v) {
    VariantResult& result = results[v];
    std::vector<double> mine = result.us;
    const TransportCounters after = contestant.counters(v);
    const double calls = options.warm_up + options.rounds;
    mine.push_back(static_cast<double>(after.bytes - before[v].bytes) / calls);
    mine.push_back(static_cast<double>(after.direct_bytes - before[v].direct_bytes) / calls);
    const std::vector<double> all = gather(team, mine);
    for (std::size_t rank = 0; rank < all.size(); rank += mine.size()) {
      for (std::size_t i = 0; i < result.us.size(); ++i) {
        result.us[i] = std::max(result.us[i], all[rank + i]);
      }
      const double moved = all[rank + mine.size() - 2];
      const double direct = all[rank + mine.size() - 1];
      if (moved + direct > result.moved_bytes + result.direct_bytes) {
        result.moved_bytes = moved;
        result.direct_bytes = direct;
      }
    }
  }
  return results;
}

}  // namespace penstock::bench
