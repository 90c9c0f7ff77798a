// The plan's kernels give the same bytes as the plan on the host.
#include <gtest/gtest.h>

#include "core/cuda/device_buffer.h"
#include "ops/moe_stage2/cuda/grouped_gemm_sm90.h"
#include "ops/moe_stage2/cuda/plan_sm90.h"
#include "penstock/ops/moe_stage2/routing.h"

namespace penstock::moe_stage2 {
namespace {

using cuda::DeviceBuffer;

struct DevicePlan {
  std::int64_t capacity;
  DeviceBuffer<std::int32_t> count{1}, fault{1}, tile_expert, tile_rows, tile_mate, prefix, table,
      scratch;
  DeviceBuffer<RowPlace> place, inverse;
  DeviceBuffer<std::uint32_t> counters;
  PlanOutputs outputs;

  DevicePlan(const Shape& shape, std::int64_t tiles)
      : capacity(tiles),
        tile_expert(static_cast<std::size_t>(tiles)),
        tile_rows(static_cast<std::size_t>(tiles)),
        tile_mate(static_cast<std::size_t>(tiles)),
        prefix(static_cast<std::size_t>(tiles + 1) * kMaxRanks),
        table(static_cast<std::size_t>(worst_rows_per_pair(shape)) * kMaxRanks),
        scratch(static_cast<std::size_t>(plan_scratch_bytes(tiles)) / sizeof(std::int32_t)),
        place(static_cast<std::size_t>(tiles) * kTileRows),
        inverse(static_cast<std::size_t>(shape.max_tokens_per_rank * shape.top_k)),
        counters(static_cast<std::size_t>(tiles) * kCounterStride) {
    outputs.tile_count = count.data();
    outputs.tile_expert = tile_expert.data();
    outputs.tile_rows = tile_rows.data();
    outputs.tile_mate = tile_mate.data();
    outputs.prefix = prefix.data();
    outputs.place = place.data();
    outputs.row_table = table.data();
    outputs.row_table_stride = worst_rows_per_pair(shape);
    outputs.fault = fault.data();
  }

  // Of `rank`, which has `slots` slots itself (-1: as many as a rank can have).
  void run(const Shape& shape, const SourceRows& rows, int rank, std::int64_t slots = -1) {
    for (DeviceBuffer<std::int32_t>* b :
         {&count, &tile_expert, &tile_rows, &tile_mate, &prefix, &table})
      b->fill(0x5A);
    place.fill(0x5A);
    inverse.fill(0x5A);
    counters.fill(0x5A);
    fault.fill(0);
    const DeviceBuffer<std::int32_t> expert_rows(rows.expert_rows);
    DeviceBuffer<RowOrigin> origin(static_cast<std::size_t>(capacity) * kTileRows);
    std::vector<RowOrigin> padded = rows.origin;
    padded.resize(origin.size());
    origin.upload(padded);
    PlanInputs in;
    in.expert_rows = expert_rows.data();
    in.origin = origin.data();
    in.experts = shape.experts_per_rank();
    in.ranks = shape.ranks;
    in.top_k = shape.top_k;
    in.reserved = reserved_rows(shape);
    in.tile_capacity = capacity;
    PlanExtras extras;
    extras.chunk_counters = counters.data();
    extras.counters = capacity;
    extras.inverse = inverse.data();
    extras.slots = slots < 0 ? static_cast<std::int64_t>(inverse.size()) : slots;
    extras.rank = rank;
    PENSTOCK_CUDA_CHECK(launch_plan_sm90(in, outputs, scratch.data(), extras, nullptr));
    PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
  }
};

TEST(PlanOnDevice, EqualsPlanOnHost) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    for (int p = 0; p < kPatternCount; ++p) {
      Shape shape;
      shape.ranks = ranks;
      shape.experts = ranks * (p % 2 == 0 ? 6 : 40);
      shape.top_k = p % 3 == 0 ? 6 : 3;
      shape.hidden = 128;
      shape.intermediate = 128;
      shape.max_tokens_per_rank = p % 2 == 0 ? 700 : 33;
      shape.row_slack = 1.03;
      const auto pattern = static_cast<Pattern>(p);
      const Routing routing = make_routing(shape, pattern, 11, p);
      for (int rank = 0; rank < ranks; ++rank) {
        const SourceRows rows = rows_at(routing, rank);
        const std::int64_t tiles = rows.tiles() + 2;
        HostPlan host(shape, tiles);
        const PlanOutputs& want = host.plan(rows);
        ASSERT_EQ(*want.fault, kPlanWhole);
        DevicePlan device(shape, tiles);
        device.run(shape, rows, rank);
        const auto where = std::string(to_string(pattern)) + ", rank " + std::to_string(rank) +
                           " of " + std::to_string(ranks);
        ASSERT_EQ(device.fault.download()[0], 0) << where;
        ASSERT_EQ(device.count.download()[0], *want.tile_count) << where;
        const auto n = static_cast<std::size_t>(*want.tile_count);
        const auto same = [&](const std::vector<std::int32_t>& got, const std::int32_t* expected,
                              std::size_t count, const char* what) {
          for (std::size_t i = 0; i < count; ++i)
            ASSERT_EQ(got[i], expected[i]) << what << " " << i << ", " << where;
        };
        same(device.tile_expert.download(), want.tile_expert, n, "tile_expert");
        same(device.tile_rows.download(), want.tile_rows, n, "tile_rows");
        same(device.tile_mate.download(), want.tile_mate, n, "tile_mate");
        same(device.prefix.download(), want.prefix, (n + 1) * kMaxRanks, "prefix");
        const auto place = device.place.download();
        for (std::size_t i = 0; i < n * kTileRows; ++i) {
          ASSERT_EQ(place[i].run, want.place[i].run) << "row " << i << ", " << where;
          ASSERT_EQ(place[i].row, want.place[i].row) << "row " << i << ", " << where;
        }
        const auto table = device.table.download();
        for (int d = 0; d < ranks; ++d) {
          for (std::int64_t i = 0; i < want.prefix[n * kMaxRanks + static_cast<std::size_t>(d)];
               ++i) {
            const auto at = static_cast<std::size_t>(d * want.row_table_stride + i);
            ASSERT_EQ(table[at], want.row_table[at]) << where;
          }
        }
        std::vector<RowPlace> own(device.inverse.size());
        ASSERT_EQ(
            invert_on_host(want.row_table + rank * want.row_table_stride,
                           want.prefix[n * kMaxRanks + static_cast<std::size_t>(rank)], rank,
                           reserved_rows(shape), own.data(), static_cast<std::int64_t>(own.size())),
            kPlanWhole);
        const auto inverse = device.inverse.download();
        for (std::size_t i = 0; i < own.size(); ++i) {
          ASSERT_EQ(inverse[i].run, own[i].run) << "slot " << i << ", " << where;
          ASSERT_EQ(inverse[i].row, own[i].row) << "slot " << i << ", " << where;
        }
        const auto counters = device.counters.download();
        for (std::size_t i = 0; i < counters.size(); i += kCounterStride)
          ASSERT_EQ(counters[i], 0u);
      }
    }
  }
}

TEST(PlanOnDevice, ReportsFaultsAndStaysInBounds) {
  Shape shape;
  shape.ranks = 2;
  shape.experts = 4;
  shape.top_k = 1;
  shape.hidden = 128;
  shape.intermediate = 128;
  shape.max_tokens_per_rank = 400;
  const Routing routing = make_routing(shape, Pattern::kAllToOne, 3);
  SourceRows rows = rows_at(routing, 1);
  {
    DevicePlan device(shape, rows.tiles() - 1);
    SourceRows cut = rows;
    cut.origin.resize(static_cast<std::size_t>(device.capacity) * kTileRows);
    device.run(shape, cut, 1);
    EXPECT_EQ(device.fault.download()[0], kPlanTilesOverCapacity);
    EXPECT_EQ(device.count.download()[0], 0);
  }
  {
    SourceRows bad = rows;
    bad.origin[5].rank = 2;
    bad.origin[9].slot = 1;
    DevicePlan device(shape, rows.tiles());
    device.run(shape, bad, 1);
    EXPECT_EQ(device.fault.download()[0], kPlanBadOrigin);
    EXPECT_EQ(device.place.download()[5].run, -1);
  }
  {
    SourceRows bad = rows;
    bad.origin.back().rank = 0;
    ASSERT_NE(rows.expert_rows.back() % kTileRows, 0);
    DevicePlan device(shape, rows.tiles());
    device.run(shape, bad, 1);
    EXPECT_EQ(device.fault.download()[0], kPlanBadPadding);
  }
  {
    // Rank 1 has rows for itself beyond its slots.
    DevicePlan device(shape, rows.tiles());
    device.run(shape, rows, 1);
    EXPECT_EQ(device.fault.download()[0], kPlanWhole);
    device.run(shape, rows, 1, 100);
    EXPECT_EQ(device.fault.download()[0], kPlanBadOrigin);
  }
}

}  // namespace
}  // namespace penstock::moe_stage2
