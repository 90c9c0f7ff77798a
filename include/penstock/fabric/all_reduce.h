// A small all-reduce over packets: for the rows of a decode step, 1 to 16 of them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "penstock/fabric/guard.h"
#include "penstock/fabric/layout.h"
#include "penstock/fabric/window.h"

namespace penstock {

enum class AllReduceKind : std::uint8_t {
  kOneShot,  // everybody sends everything to everybody: one hop, (ranks - 1) x bytes sent
  kTwoShot,  // each rank sums a slice and sends the sums: two hops, 2 (ranks - 1) / ranks x bytes
};
std::string_view to_string(AllReduceKind kind);

// Which kind moves less time: one-shot up to 2 ranks or 24 KB a rank (one hop of latency,
// hardware.md figures: 0.91 us against two hops), two-shot above. Pure.
AllReduceKind choose_all_reduce(int ranks, std::uint64_t bytes);

struct AllReduceShape {
  std::uint64_t ranks = 1;
  std::uint64_t max_elements = 0;  // of f32, the largest call
};
enum AllReduceRegion : int { kOneShotMailbox = 0, kReduceMailbox = 1, kGatherMailbox = 2 };
inline constexpr std::uint64_t all_reduce_capacity(const AllReduceShape& shape) {
  return packets_for(shape.max_elements * 4);
}
inline constexpr RegionTable<AllReduceShape, 3> kAllReduceTable{
    "all_reduce",
    {{"one_shot",
      [](const AllReduceShape& s) {
        return one_shot_packets(static_cast<int>(s.ranks), all_reduce_capacity(s)) * sizeof(Packet);
      },
      128, Access::kPeers, Access::kOwner},
     {"reduce",
      [](const AllReduceShape& s) {
        return two_shot_reduce_packets(static_cast<int>(s.ranks), all_reduce_capacity(s)) *
               sizeof(Packet);
      },
      128, Access::kPeers, Access::kOwner},
     {"gather",
      [](const AllReduceShape& s) {
        return two_shot_gather_packets(all_reduce_capacity(s)) * sizeof(Packet);
      },
      128, Access::kPeers, Access::kOwner}}};
Layout all_reduce_layout(const AllReduceShape& shape);

// Sums f32 vectors over the ranks of a team, on the CPU. Deterministic: element i is
// ((x_0[i] + x_1[i]) + x_2[i]) + ... in rank order, in f32, on every rank, whatever the kind, the
// timing and the number of rows: results are bit-equal across ranks and kinds.
class AllReduce {
 public:
  // Collective. max_elements >= 1: largest call, e.g. 16 rows x hidden; InvalidArgument otherwise.
  AllReduce(TeamHandle team, std::uint64_t max_elements);
  ~AllReduce();
  AllReduce(const AllReduce&) = delete;
  AllReduce& operator=(const AllReduce&) = delete;

  // Collective. data[n] in place, n equal on all ranks (a smaller n on one rank ends in a Fault at
  // the deadline); more than max_elements go in several rounds. Allocates nothing. Throws Fault;
  // data is then unspecified.
  void run(std::span<float> data);
  void run(std::span<float> data, AllReduceKind kind);
  const std::shared_ptr<Window>& window() const noexcept { return window_; }

 private:
  void round(std::span<float> data, AllReduceKind kind);
  void one_shot(std::span<float> data, std::uint64_t epoch);
  void two_shot(std::span<float> data, std::uint64_t epoch);
  void sweep(std::uint64_t epoch);

  std::uint64_t max_elements_;
  std::uint64_t capacity_;  // packets
  std::shared_ptr<Window> window_;
  Guard guard_;
};

}  // namespace penstock
