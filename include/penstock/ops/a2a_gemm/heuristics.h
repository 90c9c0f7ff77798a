// From a shape to a configuration: pure functions that can be printed and tested.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/ops/a2a_gemm/plan.h"
#include "penstock/ops/a2a_gemm/shape.h"

namespace penstock::a2a_gemm {

// What the predictions rest on, measured on H200 (docs/a2a-gemm.md): the GEMM's rates with its
// gates open at sequence 16384 and up, link and copy costs of an H200 pair. A caller who has
// measured elsewhere passes what he found.
struct Machine {
  std::int32_t sms = 132;
  double bf16_tflops = 740.0;
  double fp8_tflops = 1240.0;
  double link_gbps = 390.0;  // one direction of one GPU, copy engine
  double copy_us = 2.4;      // fixed cost of one copy
  double signal_us = 2.4;    // of the word behind it: a copy of eight bytes
  double start_us = 6.0;     // from the call's beginning to the first byte on the wire
  double launch_us = 4.0;    // hand-over from the last copy to the GEMM in the unfused form
  // Ranks share the GPU: copies are made by SMs, and slowly beside a GEMM. measured_gain() has what
  // was found there.
  bool shared_gpu = false;
};

struct Config {
  std::int32_t row_block_rows = kClusterRows;  // gate granularity: rows announced together
  std::int32_t band = 1;                       // TileGrid::band
  bool fuse = true;
  double gemm_us = 0.0;      // predicted, alone
  double exchange_us = 0.0;  // predicted, alone
  double fused_us = 0.0;     // predicted
  double unfused_us = 0.0;   // predicted: exchange, then GEMM
};

// `row_block_rows` 0 chooses; otherwise it is kept (a multiple of kClusterRows). Fusing is chosen
// where it was measured, else is predicted, to save more than 1%: with one rank there is nothing to
// fuse, and with few rows the first piece is the whole exchange.
Config choose(const Shape& shape, std::int32_t rank, const Machine& machine = {},
              std::int32_t row_block_rows = 0);
std::string describe(const Config& config);

// What fusing gained in measurements on H200 (docs/a2a-gemm.md, "Where fusing does not pay"): the
// unfused form's time over the fused one's, at the measured point nearest to the shape; 0 where
// none is within a factor of 1.5 in rows and columns and of the same ranks and format. choose()
// takes such a measurement before its own prediction.
double measured_gain(const Shape& shape, const Machine& machine);

// Time of the exchange of one rank: copies of `row_block_rows` rows each, one after the other.
double predict_exchange_us(const Shape& shape, std::int32_t rank, std::int32_t row_block_rows,
                           const Machine& machine);
double predict_gemm_us(const Shape& shape, std::int32_t rank, const Machine& machine);

// The best time that the static tile order allows when piece (step, row block) arrives at
// arrival_us[step * row_blocks + row block] (own chunk: 0): `clusters` workers take tiles round
// robin, a tile multiplies its chunks in order, `chunk_us` each, and starts none before its piece
// is there. No pipeline, no polling: a lower bound of the gated kernel under that schedule.
double schedule_floor_us(const TileGrid& grid, std::int32_t ranks, std::int32_t row_block_rows,
                         std::int32_t clusters, double chunk_us,
                         const std::vector<double>& arrival_us);

}  // namespace penstock::a2a_gemm
