// decode_layer's CPU operator on random weights, timed: what `penstock bench decode --backend cpu`
// runs.
#pragma once

#include <memory>
#include <vector>

#include "penstock/ops/decode_layer/shape.h"

namespace penstock::bench {

struct DecodeCpuOptions {
  decode::DecodeShape shape;  // rows: the most that run() will be asked for
  int layers = 1;             // runs of the layer behind one another a sample
  int picks = 2048;           // a row
  int context = 8192;         // cache slots a row
  int samples = 3;
  bool check = false;
};

struct DecodeCpuPoint {
  int rows = 0;
  std::vector<double> us;   // a layer, all ranks one after another on the calling thread
  double check_error = -1;  // relative L2 of the worst row, shape.ranks shards against one; -1: not
                            // asked
};

class DecodeCpuBench {
 public:
  // Experts share four distinct sets of matrices, so that GLM-5 fits.
  explicit DecodeCpuBench(const DecodeCpuOptions& options);
  ~DecodeCpuBench();
  DecodeCpuBench(const DecodeCpuBench&) = delete;
  DecodeCpuBench& operator=(const DecodeCpuBench&) = delete;
  DecodeCpuPoint run(int rows);

  // Multiply-adds of one layer and row, all ranks.
  static double multiply_adds(const DecodeCpuOptions& options);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace penstock::bench
