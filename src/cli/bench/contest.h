// Several ways to do the same work, measured against each other by all ranks of a team.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "penstock/fabric/team.h"
#include "penstock/fabric/transport.h"
#include "penstock/numerics/formats.h"

namespace penstock::bench {

struct Variant {
  std::string name;
  bool whole = true;      // an operator with a result; false: a floor, a part of the work alone
  bool same_bits = true;  // it is checked: its result has to equal that of the first such variant
};

// One rank's side. Every call but the constructor's is collective: ranks make them in one order.
class Contestant {
 public:
  virtual ~Contestant() = default;
  virtual const std::vector<Variant>& variants() const = 0;
  // Does a variant's work once and returns how long it took on this rank, microseconds. The caller
  // has aligned the ranks by a team barrier; a back end whose clocks are elsewhere aligns again.
  virtual double run(std::size_t variant) = 0;
  // Fills the result with bits that no operator writes.
  virtual void poison() = 0;
  // What the last whole variant wrote on this rank.
  virtual std::vector<Bf16> result() = 0;
  // Relative error of such a result against f64, over samples of this rank's elements.
  virtual double relative_error(const std::vector<Bf16>& result) = 0;
  // Of the variant's transport on this rank since it was made.
  virtual TransportCounters counters(std::size_t variant) const = 0;
};

struct ContestOptions {
  int warm_up = 2;
  int rounds = 10;
  bool check = false;
  double error_bound = 1e-2;
  std::function<void(double)> progress{};  // called on rank 0 with the fraction that is done
};

struct VariantResult {
  Variant variant;
  std::vector<double> us;           // of each kept round: the slowest rank's
  double moved_bytes = 0.0;         // by the transport itself, per call of the rank that sends most
  double direct_bytes = 0.0;        // stored by producers, of that rank
  double relative_error = -1.0;     // the worst rank's; -1: not checked
  std::int64_t differing_rows = 0;  // of all ranks, from the first whole variant with same_bits
  bool correct = true;              // error within the bound and no row differs, if checked
};

// Collective. With `check` every whole variant first runs once into a poisoned result, which is
// compared row by row (`row_elements` each) and with f64. Then the rounds. Equal on every rank.
std::vector<VariantResult> compete(Team& team, Contestant& contestant, std::size_t row_elements,
                                   const ContestOptions& options);

}  // namespace penstock::bench
