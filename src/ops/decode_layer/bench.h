// decode_layer on a GPU, timed beside a chain of separate kernels: what `penstock bench decode`,
// `penstock trace decode` and the benchmark program run. Plain C++; a build without the CUDA back
// end has the same function, which says so.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "penstock/ops/decode_layer/shape.h"

namespace penstock::decode {

struct DecodeBenchOptions {
  // A MoE layer; ranks: whose shard is run, alone: each all-reduce exchanges the packets of all
  // ranks with itself. rows: the most that run() will be asked for.
  DecodeShape shape;
  int layers = 76;
  int sets = 4;      // distinct sets of weights and caches, used in turn: more bytes than L2 holds
  int picks = 2048;  // a row
  int context = 8192;  // cache slots a row; picks are a random choice of them
  int samples = 15;    // graph replays kept, behind two that are not
  int sm_budget = 0;
  int device = 0;
  // Shards that run at once, a power of two up to shape.ranks: ranks 0 to gpus - 1, each on a GPU
  // of its own or, if there are fewer, sharing multiprocessors; all-reduces go over these. 1: one
  // shard without peers. More than one: no chain, and the check is that all of them get the same
  // bits.
  int gpus = 1;
  bool chain = true;      // time the chain of separate kernels too
  bool check = false;     // compare the kernel's rows with the chain's on every set
  bool timeline = false;  // the kernel keeps SM clocks; costs a little
};

// Largest error of a row: each side's roundings may move it 5e-3 from the reference.
inline constexpr double kCheckBound = 7e-3;
// Of score + bias: 5e-3 of error in a row moves a router's logit of unit variance by 5e-3, a score
// by a quarter of that, and the two sides of a tie move apart.
inline constexpr double kNearTie = 2.5e-3;

struct DecodeStageTime {
  std::string name;
  double mean_us = 0;     // over CTAs and layers, the first left out; waiting for inputs included
  double slowest_us = 0;  // of the CTA that takes longest on average
};

// A row whose experts differ between the kernel and the chain.
struct DecodeFlip {
  int set = 0;  // of weights
  int row = 0;
  std::vector<int> kernel, chain;  // the experts that only one of them chose, best first
  double width = 0;                // score + bias between the best and the worst of them
  double score_error = 0;          // largest difference between the two sides' scores of the row
  double error = 0;                // relative L2 of the row's result
};

struct DecodeBenchPoint {
  int rows = 0;
  int launches = 0;  // of the kernel for these rows
  int grid = 0;
  int ring_slots = 0;
  double distinct_experts = 0;  // a layer, mean
  double bytes = 0;             // that a layer must read: attention, router, shared expert, chosen
                                // experts, picked cache rows
  // us a layer, one value a replay of a graph of all layers.
  std::vector<double> single_us;  // one launch a layer
  std::vector<double> fused_us;   // all layers in one launch
  std::vector<double> chain_us;   // separate kernels; empty without
  int chain_launches = 0;         // a layer
  // Kernel against chain, one layer at a time on every set; relative L2 of the worst row, -1: not
  // asked. A row whose experts differ in a near tie (flips narrower than kNearTie) is counted, not
  // compared.
  double check_error = -1;
  int near_ties = 0;
  std::vector<DecodeFlip> flips;
  double narrowest_gap = 0;  // of all rows checked: score + bias of the last expert chosen and the
                             // next one, in the chain
  std::vector<DecodeStageTime> stages;  // with timeline; of fused_us' median
  std::vector<std::int64_t> events;     // [layers][grid][stages + 1] SM clocks
  double us_per_clock = 0;
};

// Holds the weights: `sets` shards in the kernel's layout, random, made on the device.
class DecodeBench {
 public:
  virtual ~DecodeBench() = default;
  // Throws Fault if a wait of the kernel expired.
  virtual DecodeBenchPoint run(int rows) = 0;
};

// Throws Unsupported with the reason where there is no usable GPU, InvalidArgument for sizes that
// do not fit each other, ResourceExhausted for memory.
std::unique_ptr<DecodeBench> make_gpu_decode_bench(const DecodeBenchOptions& options);

}  // namespace penstock::decode
