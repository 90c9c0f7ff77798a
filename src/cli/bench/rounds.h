// Interleaved rounds and the order statistics of what they measured.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace penstock::bench {

// The q-quantile (0 to 1) by nearest rank: always one of the values. Needs at least one.
double quantile(std::vector<double> values, double q);

// Order statistics of one variant's samples, microseconds.
struct Quantiles {
  std::size_t samples = 0;
  double p10_us = 0.0;
  double median_us = 0.0;
  double p90_us = 0.0;
  double least_us = 0.0;
};
// All zero without samples.
Quantiles quantiles(std::vector<double> us);

// 0 to variants - 1 in the order of a round.
std::vector<std::size_t> order_of_round(std::size_t variants, int round);

// The rounds of one comparison. Every round runs every variant once, so that clocks, power and
// neighbours treat them alike, each round in a random order of its own: a GPU at its power limit
// runs what follows a light variant at a higher clock, so none may always have the same one before
// it. The order depends on the round alone: ranks that each go through their own Rounds meet in the
// same variant.
struct Rounds {
  std::size_t variants = 0;
  int warm_up = 2;  // rounds that are run and not kept
  int kept = 20;

  std::size_t steps() const { return variants * static_cast<std::size_t>(warm_up + kept); }
  // Calls body(variant, kept), `kept` telling whether the sample counts.
  template <typename Body>
  void run(Body&& body) const {
    for (int round = 0; round < warm_up + kept; ++round) {
      for (const std::size_t variant : order_of_round(variants, round)) {
        body(variant, round >= warm_up);
      }
    }
  }
};

// Samples by name, in the order in which the names came.
class Samples {
 public:
  // The index under which a variant's samples are kept.
  std::size_t add(std::string name);
  void push(std::size_t variant, double us) { us_[variant].push_back(us); }
  std::size_t size() const { return names_.size(); }
  const std::string& name(std::size_t variant) const { return names_[variant]; }
  const std::vector<double>& us(std::size_t variant) const { return us_[variant]; }
  std::vector<double>& us(std::size_t variant) { return us_[variant]; }
  // Index of a name; size() if there is none.
  std::size_t find(std::string_view name) const;
  // Of a name; 0 if there is none or it was not measured.
  double median_us(std::string_view name) const;

 private:
  std::vector<std::string> names_;
  std::vector<std::vector<double>> us_;
};

}  // namespace penstock::bench
