#include "penstock/ops/a2a_gemm/heuristics.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/core/error.h"

namespace penstock::a2a_gemm {
namespace {

// While a copy engine moves data the whole time the GEMM loses this much (docs/a2a-gemm.md).
constexpr double kSlowdownUnderCopies = 1.015;
// Fusing has to be predicted to save this much: it is not worth a riskier path for less.
constexpr double kLeastGain = 0.01;

double piece_us(const Shape& shape, double rows, const Machine& machine) {
  const double data = rows * static_cast<double>(shape.row_bytes()) / (machine.link_gbps * 1e3);
  const double scales =
      shape.format == Format::kFp8
          ? machine.copy_us + rows * 4.0 * shape.scale_blocks() / (machine.link_gbps * 1e3)
          : 0.0;
  return machine.copy_us + data + scales + machine.signal_us;
}

// Where a step's row block stands in a table of arrivals [ranks, blocks].
std::size_t at(std::int32_t step, std::int32_t blocks, std::int32_t block) {
  return static_cast<std::size_t>(step) * static_cast<std::size_t>(blocks) +
         static_cast<std::size_t>(block);
}

// Arrival of (step, row block) at `rank`, in the order in which its sources send.
std::vector<double> arrivals_us(const Shape& shape, std::int32_t rank, std::int32_t row_block_rows,
                                const Machine& machine) {
  const std::int32_t rows = shape.rows[static_cast<std::size_t>(rank)];
  const std::int32_t blocks = row_block_count(rows, row_block_rows);
  std::vector<double> arrival(static_cast<std::size_t>(shape.ranks * blocks), 0.0);
  double now = machine.start_us;
  for (std::int32_t block = 0; block < blocks; ++block) {
    const std::int32_t in_block = std::min(row_block_rows, rows - block * row_block_rows);
    for (std::int32_t step = 1; step < shape.ranks; ++step) {
      now += piece_us(shape, in_block, machine);
      arrival[at(step, blocks, block)] = now;
    }
  }
  return arrival;
}

double chunk_us(const Shape& shape, const Machine& machine) {
  const double tflops = shape.format == Format::kBf16 ? machine.bf16_tflops : machine.fp8_tflops;
  const double per_sm = tflops * 1e6 / machine.sms;  // FLOP a microsecond
  return 2.0 * kTileRows * kTileColumns * shape.depth / per_sm;
}

// Cluster tiles of a band. The GEMM alone runs equally fast with each of them (docs/a2a-gemm.md);
// what a small band gains is that a wave of tiles needs fewer rows of every source.
constexpr std::int32_t kBands[] = {8, 4, 2, 1};
// A larger band or row block wins when it is predicted to cost no more than this: fewer copies,
// fewer words, less of W from memory.
constexpr double kTie = 1.002;

struct Choice {
  std::int32_t row_block_rows = kClusterRows;
  std::int32_t band = 1;
  double fused_us = 0.0;
};

double fused_us(const Shape& shape, std::int32_t rank, std::int32_t row_block_rows,
                std::int32_t band, const Machine& machine) {
  const std::int32_t rows = shape.rows[static_cast<std::size_t>(rank)];
  return kSlowdownUnderCopies *
         schedule_floor_us(tile_grid(rows, shape.columns, band), shape.ranks, row_block_rows,
                           machine.sms / kClusterCtas, chunk_us(shape, machine),
                           arrivals_us(shape, rank, row_block_rows, machine));
}

// The band for a row block.
Choice choose_band(const Shape& shape, std::int32_t rank, std::int32_t row_block_rows,
                   const Machine& machine) {
  const std::int32_t cluster_rows =
      tile_grid(shape.rows[static_cast<std::size_t>(rank)], shape.columns, 1).cluster_rows;
  Choice best{row_block_rows, 1, 0.0};
  bool found = false;
  for (const std::int32_t wide : kBands) {
    const std::int32_t band = std::clamp(cluster_rows, 1, wide);
    const double time = fused_us(shape, rank, row_block_rows, band, machine);
    if (found && time * kTie >= best.fused_us) continue;
    best = {row_block_rows, band, time};
    found = true;
  }
  return best;
}

// One measured point: both forms by copy engine, in the same rounds.
struct Measured {
  bool shared_gpu;
  std::int32_t ranks;
  Format format;
  std::int32_t columns;  // N
  std::int32_t rows;     // of the rank with most
  double gain;           // unfused over fused
};
constexpr Measured kMeasured[] = {
#include "ops/a2a_gemm/measured_gains.inc"
};
constexpr double kNear = 1.5;  // of rows, and of columns

}  // namespace

double measured_gain(const Shape& shape, const Machine& machine) {
  double nearest = 0.0;
  double gain = 0.0;
  const double rows = std::max(max_rows(shape), 1);
  for (const Measured& m : kMeasured) {
    if (m.shared_gpu != machine.shared_gpu || m.ranks != shape.ranks || m.format != shape.format) {
      continue;
    }
    const double row_ratio = std::max(rows / m.rows, m.rows / rows);
    const double columns = shape.columns;
    const double column_ratio = std::max(columns / m.columns, m.columns / columns);
    if (row_ratio > kNear || column_ratio > kNear) continue;
    if (gain == 0.0 || row_ratio * column_ratio < nearest) {
      nearest = row_ratio * column_ratio;
      gain = m.gain;
    }
  }
  return gain;
}

double predict_exchange_us(const Shape& shape, std::int32_t rank, std::int32_t row_block_rows,
                           const Machine& machine) {
  const std::vector<double> arrival = arrivals_us(shape, rank, row_block_rows, machine);
  return arrival.empty() ? 0.0 : *std::max_element(arrival.begin(), arrival.end());
}

double predict_gemm_us(const Shape& shape, std::int32_t rank, const Machine& machine) {
  const std::int32_t rows = shape.rows[static_cast<std::size_t>(rank)];
  const TileGrid grid = tile_grid(rows, shape.columns, 1);
  const std::vector<double> here(static_cast<std::size_t>(shape.ranks), 0.0);
  return schedule_floor_us(grid, shape.ranks, std::max(rows, 1), machine.sms / kClusterCtas,
                           chunk_us(shape, machine), here);
}

double schedule_floor_us(const TileGrid& grid, std::int32_t ranks, std::int32_t row_block_rows,
                         std::int32_t clusters, double chunk_us,
                         const std::vector<double>& arrival_us) {
  require(ranks > 0 && clusters > 0 && row_block_rows > 0, ErrorKind::kInvalidArgument, [&] {
    return fmt::format(
        "a schedule of {} ranks on {} clusters in row blocks of {}: all have to be "
        "positive",
        ranks, clusters, row_block_rows);
  });
  require(
      arrival_us.size() % static_cast<std::size_t>(ranks) == 0, ErrorKind::kInvalidArgument, [&] {
        return fmt::format("{} arrival times do not divide by {} ranks", arrival_us.size(), ranks);
      });
  const auto blocks =
      static_cast<std::int32_t>(arrival_us.size() / static_cast<std::size_t>(ranks));
  double last = 0.0;
  for (std::int32_t worker = 0; worker < clusters; ++worker) {
    double now = 0.0;
    for (std::int32_t linear = worker; linear < grid.tiles(); linear += clusters) {
      const TilePlace place = tile_place(grid, linear);
      const std::int32_t block =
          std::min(place.cluster_row * kClusterRows / row_block_rows, blocks - 1);
      for (std::int32_t step = 0; step < ranks; ++step) {
        now = std::max(now, arrival_us[at(step, blocks, block)]);
        now += chunk_us;
      }
    }
    last = std::max(last, now);
  }
  return last;
}

Config choose(const Shape& shape, std::int32_t rank, const Machine& machine,
              std::int32_t row_block_rows) {
  validate(shape);
  require(rank >= 0 && rank < shape.ranks, ErrorKind::kInvalidArgument,
          [&] { return fmt::format("a2a_gemm: rank {} of {}", rank, shape.ranks); });
  require(row_block_rows >= 0 && row_block_rows % kClusterRows == 0, ErrorKind::kInvalidArgument,
          [&] {
            return fmt::format(
                "a2a_gemm: row_block_rows is {}; give 0 to have it chosen, or a multiple of {}, so "
                "that no tile spans two announcements",
                row_block_rows, kClusterRows);
          });
  Config best;
  best.gemm_us = predict_gemm_us(shape, rank, machine);
  best.row_block_rows = row_block_rows;
  if (row_block_rows == 0) {
    // Every rank has to come to the same row block, so it is chosen for the rank with most rows.
    const auto at = std::max_element(shape.rows.begin(), shape.rows.end()) - shape.rows.begin();
    const auto busiest = static_cast<std::int32_t>(at);
    const std::int32_t rows = max_rows(shape);
    best.row_block_rows = kClusterRows;
    if (rows > 0) {
      double least = choose_band(shape, busiest, kClusterRows, machine).fused_us;
      for (std::int32_t block = 2 * kClusterRows; block < 2 * rows; block *= 2) {
        const double time = choose_band(shape, busiest, block, machine).fused_us;
        if (time <= least * kTie) {
          best.row_block_rows = block;
          least = std::min(least, time);
        }
      }
    }
  }
  if (shape.rows[static_cast<std::size_t>(rank)] > 0) {
    best.exchange_us = predict_exchange_us(shape, rank, max_rows(shape), machine);
    const Choice choice = choose_band(shape, rank, best.row_block_rows, machine);
    best.band = choice.band;
    best.fused_us = choice.fused_us;
    best.unfused_us = best.exchange_us + machine.launch_us + best.gemm_us;
  }
  const double gain = measured_gain(shape, machine);
  best.fuse =
      shape.ranks > 1 && (gain > 0.0 ? gain > 1.0 / (1.0 - kLeastGain)
                                     : best.fused_us < (1.0 - kLeastGain) * best.unfused_us);
  return best;
}

std::string describe(const Config& c) {
  return fmt::format(
      "{}: pieces of {} rows, bands of {} cluster tiles; predicted {:.1f} us fused, {:.1f} us "
      "unfused (exchange {:.1f}, GEMM {:.1f})",
      c.fuse ? "fused" : "unfused", c.row_block_rows, c.band, c.fused_us, c.unfused_us,
      c.exchange_us, c.gemm_us);
}

}  // namespace penstock::a2a_gemm
