// The grouped GEMM on the device against the oracle: exact where the numbers allow it, within
// bounds elsewhere.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "core/cuda/device_buffer.h"
#include "ops/moe_stage2/cuda/gemm_maps.h"
#include "penstock/numerics/block.h"
#include "penstock/ops/moe_stage2/mxfp4.h"
#include "penstock/ops/moe_stage2/reference.h"
#include "penstock/ops/moe_stage2/routing.h"

namespace penstock::moe_stage2 {
namespace {

using cuda::DeviceBuffer;

enum class Data {
  kSmallIntegers,
  kMxfp4,  // small integers times MXFP4 weights, repacked; sums are exact
  kRandom
};

struct Case {
  const char* name;
  Shape shape;
  std::vector<std::int32_t> expert_rows;
  Data data;
};

Shape make_shape(int ranks, int experts, int top_k, int hidden, int intermediate, WireFormat wire) {
  Shape s;
  s.ranks = ranks;
  s.experts = experts;
  s.top_k = top_k;
  s.hidden = hidden;
  s.intermediate = intermediate;
  s.max_tokens_per_rank = 4096;
  s.wire = wire;
  s.row_slack = 1.0;
  return s;
}

// Rows of `expert_rows` with origins dealt over ranks unevenly; tokens only have to be different
// per rank.
SourceRows deal_rows(const Shape& shape, const std::vector<std::int32_t>& expert_rows,
                     std::mt19937_64& random) {
  SourceRows rows;
  rows.expert_rows = expert_rows;
  std::vector<std::int32_t> next(static_cast<std::size_t>(shape.ranks));
  for (const std::int32_t count : expert_rows) {
    for (std::int32_t i = 0; i < count; ++i) {
      const auto rank =
          static_cast<std::size_t>(std::min(random() % static_cast<std::uint64_t>(shape.ranks),
                                            random() % static_cast<std::uint64_t>(shape.ranks)));
      const std::int32_t slot = next[rank]++;
      rows.origin.push_back({slot / shape.top_k, static_cast<std::int16_t>(rank),
                             static_cast<std::int16_t>(slot % shape.top_k)});
    }
    rows.origin.resize((rows.origin.size() + kTileRows - 1) / kTileRows * kTileRows);
  }
  return rows;
}

struct Problem {
  Shape shape;
  SourceRows rows;
  std::int64_t capacity = 0;  // rows
  std::vector<E4M3> act, weight;
  std::vector<float> act_scales, weight_scales;
  GemmOperands operands() const {
    return {act.data(),           act_scales.data(), capacity,          weight.data(),
            weight_scales.data(), shape.hidden,      shape.intermediate};
  }
};

Problem make_problem(const Case& c, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Problem p;
  p.shape = c.shape;
  p.rows = deal_rows(c.shape, c.expert_rows, random);
  p.capacity = static_cast<std::int64_t>(p.rows.origin.size()) + kTileRows;
  const auto k = static_cast<std::size_t>(c.shape.intermediate);
  const auto h = static_cast<std::size_t>(c.shape.hidden);
  const std::size_t blocks = k / kScaleBlock;
  p.act.resize(static_cast<std::size_t>(p.capacity) * k);
  p.weight.resize(c.expert_rows.size() * h * k);
  p.act_scales.resize(blocks * static_cast<std::size_t>(p.capacity));
  p.weight_scales.resize(c.expert_rows.size() * (h / kScaleBlock) * blocks);
  std::normal_distribution<float> normal;
  const auto element = [&] {
    if (c.data != Data::kRandom) return E4M3::from_float(static_cast<float>(random() % 5) - 2.0f);
    return E4M3::from_float(normal(random) * 100.0f);
  };
  const auto scale = [&] {
    if (c.data != Data::kRandom) return std::ldexp(1.0f, static_cast<int>(random() % 3));
    return std::exp(normal(random)) * 0.01f;
  };
  for (auto& x : p.act) x = element();
  for (auto& x : p.weight) x = element();
  for (auto& x : p.act_scales) x = scale();
  for (auto& x : p.weight_scales) x = scale();
  if (c.data == Data::kMxfp4) {
    std::vector<std::uint8_t> pairs(p.weight.size() / 2);
    std::vector<E8M0> scales(p.weight.size() / 32);
    for (auto& x : pairs) x = static_cast<std::uint8_t>(random());
    for (auto& x : scales) x = E8M0::from_exponent(static_cast<int>(random() % 2));
    repack_mxfp4(pairs, scales, static_cast<std::int64_t>(c.expert_rows.size()), c.shape.hidden,
                 c.shape.intermediate, p.weight, p.weight_scales);
  }
  return p;
}

struct Device {
  Problem p;
  DeviceBuffer<E4M3> act, weight;
  DeviceBuffer<float> act_scales, weight_scales;
  HostPlan plan;
  DeviceBuffer<std::int32_t> tile_count, tile_expert, tile_rows, tile_mate;
  DeviceBuffer<RowPlace> place;
  DeviceBuffer<std::uint32_t> counters, flags, next_step;
  std::int64_t run_bytes;
  DeviceBuffer<unsigned char> out;
  GroupedGemmArgs args;

  explicit Device(Problem problem)
      : p(std::move(problem)),
        act(p.act),
        weight(p.weight),
        act_scales(p.act_scales),
        weight_scales(p.weight_scales),
        plan(p.shape, p.capacity / kTileRows) {
    const PlanOutputs& o = plan.plan(p.rows);
    EXPECT_EQ(*o.fault, kPlanWhole);
    const auto tiles = static_cast<std::size_t>(p.capacity / kTileRows);
    tile_count = DeviceBuffer<std::int32_t>(std::vector<std::int32_t>{*o.tile_count});
    tile_expert =
        DeviceBuffer<std::int32_t>(std::vector<std::int32_t>(o.tile_expert, o.tile_expert + tiles));
    tile_rows =
        DeviceBuffer<std::int32_t>(std::vector<std::int32_t>(o.tile_rows, o.tile_rows + tiles));
    tile_mate =
        DeviceBuffer<std::int32_t>(std::vector<std::int32_t>(o.tile_mate, o.tile_mate + tiles));
    place = DeviceBuffer<RowPlace>(std::vector<RowPlace>(o.place, o.place + tiles * kTileRows));
    counters = DeviceBuffer<std::uint32_t>(std::vector<std::uint32_t>(tiles * kCounterStride, 0));
    flags = DeviceBuffer<std::uint32_t>(std::vector<std::uint32_t>(tiles * kCounterStride, 0));
    next_step = DeviceBuffer<std::uint32_t>(std::vector<std::uint32_t>{0});
    const std::int64_t row_bytes = wire_row_bytes(p.shape.hidden, p.shape.wire);
    run_bytes = row_bytes * p.capacity;
    out = DeviceBuffer<unsigned char>(static_cast<std::size_t>(run_bytes) * kMaxRuns);
    out.fill(0xA5);
    args.act_scales = act_scales.data();
    args.act_scale_stride = p.capacity;
    args.weight_scales = weight_scales.data();
    args.hidden = p.shape.hidden;
    args.k_blocks = p.shape.intermediate / kScaleBlock;
    args.tile_count = tile_count.data();
    args.tile_expert = tile_expert.data();
    args.tile_rows = tile_rows.data();
    args.tile_mate = tile_mate.data();
    args.place = place.data();
    args.next_step = next_step.data();
    args.runs.row_bytes = row_bytes;
    for (int r = 0; r < kMaxRuns; ++r) args.runs.base[r] = out.data() + r * run_bytes;
  }

  std::vector<unsigned char> run(int ctas) {
    const GroupedGemmMaps maps = make_gemm_maps(
        act.data(), p.capacity, weight.data(), static_cast<std::int32_t>(p.rows.expert_rows.size()),
        p.shape.hidden, p.shape.intermediate);
    PENSTOCK_CUDA_CHECK(load_grouped_gemm_sm90());
    PENSTOCK_CUDA_CHECK(launch_grouped_gemm_sm90(args, maps, p.shape.wire, ctas, nullptr));
    PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
    EXPECT_EQ(next_step.download()[0], 0u) << "the next launch would begin in the middle";
    return out.download();
  }
};

class GroupedGemm : public testing::TestWithParam<Case> {};

// Every byte of the output: each valid row is where the plan says and equals the twin (exactly, or
// within bounds of the f64 oracle); all other bytes still hold the poison.
TEST_P(GroupedGemm, MatchesOracleAndWritesNothingElse) {
  const Case& c = GetParam();
  Device device(make_problem(c, 17));
  const Problem& p = device.p;
  const std::vector<unsigned char> got = device.run(132);
  const PlanOutputs& plan = device.plan.outputs();
  const GemmOperands op = p.operands();
  const std::int64_t row_bytes = device.args.runs.row_bytes;
  const std::int64_t payload = c.shape.wire == WireFormat::kFp8
                                   ? c.shape.hidden + c.shape.hidden / kWireBlock
                                   : 2 * c.shape.hidden;

  std::vector<unsigned char> untouched(got.size(), 1);
  std::int64_t rows_seen = 0;
  double worst = 0.0;
  std::vector<unsigned char> want(static_cast<std::size_t>(row_bytes));
  for (std::int64_t row = 0; row < static_cast<std::int64_t>(p.rows.origin.size()); ++row) {
    const RowPlace place = plan.place[row];
    ASSERT_EQ(place.run >= 0, p.rows.origin[static_cast<std::size_t>(row)].rank >= 0);
    if (place.run < 0) continue;
    ++rows_seen;
    const std::int64_t at = place.run * device.run_bytes + place.row * row_bytes;
    for (std::int64_t i = 0; i < payload; ++i) {
      ASSERT_EQ(untouched[static_cast<std::size_t>(at + i)], 1) << "two rows in one place";
      untouched[static_cast<std::size_t>(at + i)] = 0;
    }
    const std::int32_t expert = plan.tile_expert[row / kTileRows];
    if (c.data != Data::kRandom) {
      write_row(op, row, expert, c.shape.wire, want.data());
      for (std::int64_t i = 0; i < payload; ++i) {
        ASSERT_EQ(got[static_cast<std::size_t>(at + i)], want[static_cast<std::size_t>(i)])
            << "row " << row << " byte " << i << " expert " << expert;
      }
    } else if (row % 7 == 0) {
      double error = 0.0;
      double norm = 0.0;
      for (std::int32_t col = 0; col < c.shape.hidden; ++col) {
        const double exact = gemm_element_f64(op, row, expert, col);
        const double value =
            static_cast<double>(read_row(got.data() + at, c.shape.hidden, c.shape.wire, col));
        ASSERT_TRUE(std::isfinite(value)) << "row " << row << " column " << col;
        error += (value - exact) * (value - exact);
        norm += exact * exact;
      }
      worst = std::max(worst, std::sqrt(error / norm));
    }
  }
  EXPECT_EQ(rows_seen, p.rows.rows());
  EXPECT_LT(worst, c.shape.wire == WireFormat::kFp8 ? 5e-2 : 1e-2);
  if (c.data == Data::kRandom) {
    RecordProperty("worst_relative_error", std::to_string(worst));
    printf("    %s: worst relative error of a row %.2e\n", c.name, worst);
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (untouched[i] != 0) {
      ASSERT_EQ(got[i], 0xA5) << "byte " << i << " was written";
    }
  }
}

const WireFormat kB = WireFormat::kBf16;
const WireFormat kF = WireFormat::kFp8;
INSTANTIATE_TEST_SUITE_P(
    Shapes, GroupedGemm,
    testing::Values(
        Case{"exact_one_tile", make_shape(1, 1, 1, 512, 128, kB), {128}, Data::kSmallIntegers},
        // One block of K: the copier runs as many steps ahead as there are stages.
        Case{"exact_short_k",
             make_shape(3, 12, 2, 3072, 128, kB),
             {700, 129, 3, 900},
             Data::kSmallIntegers},
        Case{"exact_one_row", make_shape(2, 2, 1, 128, 128, kB), {1}, Data::kSmallIntegers},
        Case{"exact_ragged_bf16",
             make_shape(3, 15, 2, 384, 256, kB),
             {130, 0, 1, 64, 65},
             Data::kSmallIntegers},
        Case{"exact_ragged_fp8",
             make_shape(3, 15, 2, 384, 256, kF),
             {130, 0, 1, 64, 65},
             Data::kSmallIntegers},
        Case{"exact_many_tiles",
             make_shape(8, 32, 4, 1152, 640, kB),
             {700, 129, 3, 900},
             Data::kSmallIntegers},
        Case{"exact_many_tiles_fp8",
             make_shape(8, 32, 4, 1152, 640, kF),
             {700, 129, 3, 900},
             Data::kSmallIntegers},
        Case{"exact_mxfp4_bf16",
             make_shape(3, 15, 2, 640, 384, kB),
             {200, 0, 1, 64, 65},
             Data::kMxfp4},
        Case{"exact_mxfp4_fp8",
             make_shape(3, 15, 2, 640, 384, kF),
             {200, 0, 1, 64, 65},
             Data::kMxfp4},
        // More than sixteen blocks of K, and a number that is no multiple of the stages.
        Case{"exact_long_k_bf16",
             make_shape(2, 4, 2, 384, 4736, kB),
             {140, 70},
             Data::kSmallIntegers},
        Case{"exact_long_k_fp8",
             make_shape(2, 4, 2, 384, 4736, kF),
             {140, 70},
             Data::kSmallIntegers},
        Case{"random_bf16", make_shape(5, 20, 4, 1024, 1280, kB), {300, 77, 0, 513}, Data::kRandom},
        Case{"random_fp8", make_shape(5, 20, 4, 1024, 1280, kF), {300, 77, 0, 513}, Data::kRandom},
        Case{"random_hot_expert",
             make_shape(8, 64, 8, 768, 512, kB),
             {0, 0, 2000, 0, 0, 0, 0, 5},
             Data::kRandom},
        Case{"random_long_k", make_shape(2, 4, 2, 256, 5120, kB), {190, 10}, Data::kRandom}),
    [](const testing::TestParamInfo<Case>& param) { return std::string(param.param.name); });

TEST(GroupedGemmDeterminism, SameBytesOnAnyNumberOfCtas) {
  const Case c{"", make_shape(4, 16, 4, 1024, 512, kF), {300, 77, 0, 513}, Data::kRandom};
  Device device(make_problem(c, 5));
  const auto reference = device.run(132);
  for (const int ctas : {2, 6, 100, 132}) {
    device.out.fill(0xA5);
    EXPECT_EQ(device.run(ctas), reference) << ctas << " CTAs";
  }
}

TEST(GroupedGemmChunks, EachChunkIsPostedOnceAndOnlyWhenWhole) {
  for (const int tiles_per_chunk : {1, 3, 8, 1000}) {
    // With one block of K, and with many steps for one cluster, too.
    const int intermediate = tiles_per_chunk == 3 ? 128 : 256;
    const int ctas = tiles_per_chunk == 8 ? 2 : 132;
    const Case c{
        "", make_shape(4, 16, 4, 1280, intermediate, kB), {700, 129, 3, 900}, Data::kRandom};
    Device device(make_problem(c, 6));
    device.args.chunk_counters = device.counters.data();
    device.args.chunk_flags = device.flags.data();
    device.args.chunk_epoch = 41;
    device.args.tiles_per_chunk = tiles_per_chunk;
    (void)device.run(ctas);
    const auto counters = device.counters.download();
    const auto flags = device.flags.download();
    const int tiles = *device.plan.outputs().tile_count;
    const int column_tiles = (c.shape.hidden + kGemmTileColumns - 1) / kGemmTileColumns;
    for (int chunk = 0; chunk * kCounterStride < static_cast<int>(flags.size()); ++chunk) {
      const int in_chunk = std::max(0, std::min(tiles_per_chunk, tiles - chunk * tiles_per_chunk));
      const auto word = static_cast<std::size_t>(chunk * kCounterStride);
      EXPECT_EQ(counters[word], static_cast<std::uint32_t>(in_chunk * column_tiles));
      EXPECT_EQ(flags[word], in_chunk > 0 ? 41u : 0u) << "chunk " << chunk;
    }
  }
}

TEST(GroupedGemmEmpty, NoTilesWritesNothing) {
  const Case c{"", make_shape(2, 4, 1, 512, 256, kF), {0, 0}, Data::kRandom};
  Device device(make_problem(c, 7));
  for (const unsigned char byte : device.run(132)) ASSERT_EQ(byte, 0xA5);
}

}  // namespace
}  // namespace penstock::moe_stage2
