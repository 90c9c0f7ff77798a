#include "cli/bench/rounds.h"

#include <cmath>
#include <numeric>
#include <random>

namespace penstock::bench {

double quantile(std::vector<double> values, double q) {
  const auto at = std::lround(q * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<std::size_t>(at)];
}

Quantiles quantiles(std::vector<double> us) {
  if (us.empty()) return {};
  return {us.size(), quantile(us, 0.1), quantile(us, 0.5), quantile(us, 0.9), quantile(us, 0.0)};
}

std::vector<std::size_t> order_of_round(std::size_t variants, int round) {
  std::mt19937_64 random(static_cast<std::uint64_t>(round));
  std::vector<std::size_t> order(variants);
  std::iota(order.begin(), order.end(), std::size_t{0});
  // Not std::shuffle, whose order is the library's own.
  for (std::size_t i = variants; i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  return order;
}

std::size_t Samples::add(std::string name) {
  names_.push_back(std::move(name));
  us_.emplace_back();
  return names_.size() - 1;
}

std::size_t Samples::find(std::string_view name) const {
  return static_cast<std::size_t>(std::find(names_.begin(), names_.end(), name) - names_.begin());
}

double Samples::median_us(std::string_view name) const {
  const std::size_t at = find(name);
  return at == size() ? 0.0 : quantiles(us_[at]).median_us;
}

}  // namespace penstock::bench
