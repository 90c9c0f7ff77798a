// Size curves of a link, per transport, and the packet all-reduce's latency. `penstock bench link`
// prints them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "penstock/fabric/all_reduce.h"
#include "penstock/fabric/doctor.h"

namespace penstock {

// Order statistics of repeated measurements, microseconds.
struct Samples {
  int count = 0;
  double median_us = 0;
  double p10_us = 0;
  double p90_us = 0;
};
// Sorts `us` in place; needs at least one.
Samples summarise(std::span<double> us);

struct LinkBenchOptions {
  std::uint64_t min_bytes = 4096;
  std::uint64_t max_bytes = 256ULL << 20;  // sizes double from min to max
  int samples = 20;
  int warm_up = 3;
};

// One point. A sample runs from put() on rank 0 until rank 0 sees the answer that rank 1 gives when
// it sees the data's signal: one copy and two signals. In both directions, rank 1 sends the same
// amount at the same time and each answers the other.
struct LinkPoint {
  TransportKind kind = TransportKind::kSm;
  std::uint64_t bytes = 0;
  bool both_directions = false;
  Samples time;
  double gb_per_s = 0;            // bytes of one direction / median, 1e9 bytes per second
  std::uint64_t moved_bytes = 0;  // counted by rank 0's transport over all samples
  bool correct = false;           // the last sample's bytes were compared
};
// Collective; ranks 0 and 1 measure, the others take part in the collectives. Needs two ranks
// (InvalidArgument). Returns rank 0's points on every rank.
std::vector<LinkPoint> bench_link(const TeamHandle& team, const FabricBackend& backend,
                                  const LinkBenchOptions& options);

struct AllReducePoint {
  int rows = 0;
  std::uint64_t width = 0;  // f32 elements of a row
  AllReduceKind kind = AllReduceKind::kOneShot;
  Samples time;  // of rank 0
};
// Collective, CPU ranks: rows 1, 2, 4, 8, 16 of `width`, both kinds.
std::vector<AllReducePoint> bench_all_reduce(const TeamHandle& team, std::uint64_t width,
                                             int samples);

}  // namespace penstock
