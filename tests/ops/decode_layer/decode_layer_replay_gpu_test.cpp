// decode_layer on a GPU: what must not change a bit (replays, graphs, widths, padding, SM budgets,
// placement, late ranks and late CTAs), and what a wait that expires leaves behind.
#include <functional>
#include <set>

#include "ops/decode_layer/delay_sm90.h"
#include "ops/decode_layer/gpu_rig.h"

namespace penstock::decode::test {
namespace {

using Bits = std::vector<std::uint16_t>;

DecodeShape group_shape(int ranks, int rows) {
  DecodeShape s = tiny_shape();
  s.intermediate = 512;
  s.ranks = ranks;
  s.rows = rows;
  return s;
}

// A captured graph of what `enqueue` puts into the rig's stream.
class Graph {
 public:
  Graph(const Rig& rig, const std::function<void(cudaStream_t)>& enqueue)
      : stream_(rig.stream.handle) {
    PENSTOCK_CUDA_CHECK(cudaSetDevice(rig.device));
    PENSTOCK_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    enqueue(stream_);
    PENSTOCK_CUDA_CHECK(cudaStreamEndCapture(stream_, &graph_));
    PENSTOCK_CUDA_CHECK(cudaGraphInstantiate(&exec_, graph_, 0));
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    cudaGraphExecDestroy(exec_);
    cudaGraphDestroy(graph_);
  }
  void launch() const { PENSTOCK_CUDA_CHECK(cudaGraphLaunch(exec_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

TEST(DecodeLayerGpu, ReplaysWidthAndPaddingKeepTheBits) {
  const DecodeShape s = group_shape(1, 16);
  const RandomLayer layer(s, 23);
  const RandomCache pages(s.kv_format, 64, 77);
  Group group(s, layer, pages);
  Rig& rig = group[0];
  std::vector<int> counts;
  for (int i = 0; i < 16; ++i) counts.push_back(i % 5 == 3 ? -1 : 40 * i + 1);
  const RandomStep step(s, pages.slots(), counts, 31);
  rig.upload(step);
  rig.launch(16);
  const Bits first = rig.result(16);
  RandomCache cache = pages;
  rig.cache.download(cache);
  const auto h = static_cast<std::size_t>(s.hidden);
  for (int replay = 0; replay < 20; ++replay) {
    rig.out.fill(replay);
    rig.launch(16);
    const Bits again = rig.result(16);
    for (std::size_t i = 0; i < 16 * h; ++i) {
      ASSERT_EQ(again[i], counts[i / h] < 0 ? static_cast<std::uint16_t>(replay * 257) : first[i])
          << "row " << i / h;
    }
    RandomCache now = pages;
    rig.cache.download(now);
    ASSERT_EQ(now.bytes, cache.bytes);
  }
  // Each row alone.
  for (std::size_t i = 0; i < 16; ++i) {
    if (counts[i] < 0) continue;
    RandomStep one = step;
    one.x.assign(step.x.begin() + static_cast<std::ptrdiff_t>(i * h),
                 step.x.begin() + static_cast<std::ptrdiff_t>((i + 1) * h));
    one.positions = {step.positions[i]};
    one.slots = {step.slots[i]};
    one.picks.assign(step.picks.begin() + step.pick_offsets[i],
                     step.picks.begin() + step.pick_offsets[i + 1]);
    one.pick_offsets = {0, static_cast<std::int32_t>(one.picks.size())};
    rig.upload(one);
    rig.launch(1);
    const Bits alone = rig.result(1);
    for (std::size_t k = 0; k < h; ++k)
      ASSERT_EQ(alone[k], first[i * h + k]) << "row " << i << " column " << k;
  }
}

TEST(DecodeLayerGpu, BitsDoNotDependOnTheSmBudget) {
  DecodeShape s = group_shape(1, 4);
  s.hidden = 1024;  // 64 tiles: 1 to 4 a CTA
  const RandomLayer layer(s, 41);
  const RandomCache pages(s.kv_format, 16, 77);
  const RandomStep step(s, pages.slots(), {100, 3, 64, 700}, 42);
  Bits want;
  std::set<int> grids;
  for (const int budget : {0, 33, 22, 16}) {
    DecodeOptions options;
    options.sm_budget = budget;
    Group group(s, layer, pages, 1, options);
    grids.insert(group[0].op.plan(4).grid);
    group.upload(step);
    group.launch(4);
    const Bits got = group.result(4);
    if (want.empty()) want = got;
    EXPECT_EQ(got, want) << "a budget of " << budget << " multiprocessors";
  }
  EXPECT_EQ(grids.size(), 4U);
}

// Virtual ranks of one GPU against one rank on each.
TEST(DecodeLayerGpu, PlacementChangesNoBit) {
  int devices = 0;
  PENSTOCK_CUDA_CHECK(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "one GPU: every placement is virtual";
  for (int ranks = 2; ranks <= std::min(devices, 8); ranks *= 2) {
    for (int a = 0; a < ranks; ++a) {
      PENSTOCK_CUDA_CHECK(cudaSetDevice(a));
      for (int b = 0; b < ranks; ++b) {
        if (a != b && cudaDeviceEnablePeerAccess(b, 0) != cudaSuccess) cudaGetLastError();
      }
    }
    const DecodeShape s = group_shape(ranks, 4);
    const RandomLayer layer(s, 43);
    const RandomCache pages(s.kv_format, 16, 77);
    const RandomStep step(s, pages.slots(), {100, 3, -1, 700}, 44);
    Group near(s, layer, pages);
    Group far(s, layer, pages, 1, {}, 0, true);
    for (Group* group : {&near, &far}) {
      group->upload(step);
      group->launch(4);
    }
    EXPECT_EQ(far.result(4), near.result(4)) << ranks << " ranks";
  }
}

TEST(DecodeLayerGpu, SeveralLayersALaunchAndGraphsEqualSingleLaunches) {
  const DecodeShape s = group_shape(1, 4);
  const RandomLayer layer(s, 24);
  const RandomCache pages(s.kv_format, 16, 77);
  constexpr int kLayers = 3;
  Group group(s, layer, pages, kLayers);
  Rig& rig = group[0];
  DecodeStep next = rig.step(4);
  next.x_in = rig.out.data();
  const Graph graph(rig, [&](cudaStream_t stream) {
    rig.op.run(Stream{stream}, rig.step(4), 0, 1);
    rig.op.run(Stream{stream}, next, 1, 2);
  });
  for (unsigned round = 0; round < 50; ++round) {
    const RandomStep step(s, pages.slots(), {100, 3, -1, 700}, 300 + round);
    rig.upload(step);
    for (int i = 0; i < kLayers; ++i) {
      rig.op.run(Stream{rig.stream.handle}, i == 0 ? rig.step(4) : next, i, 1);
    }
    const Bits single = rig.result(4);
    rig.upload(step);
    rig.launch(4, kLayers);
    const Bits together = rig.result(4);
    rig.upload(step);
    graph.launch();
    const Bits replayed = rig.result(4);
    ASSERT_EQ(single, together) << "round " << round;
    ASSERT_EQ(single, replayed) << "round " << round;
  }
}

// Rows of earlier launches of the same run() may be picked by later ones.
TEST(DecodeLayerGpu, ALaterLaunchReadsTheRowsOfAnEarlierOne) {
  const DecodeShape s = group_shape(1, 16);
  const RandomLayer layer(s, 45);
  const RandomCache pages(s.kv_format, 64, 77);
  RandomStep step(s, pages.slots(), std::vector<int>(16, 40), 46);
  // The last row picks the new slot of the first one, in another launch or in the same.
  step.picks.back() = static_cast<std::int32_t>(step.slots[0]);
  Group group(s, layer, pages);
  group.upload(step);
  group.launch(16);
  const std::vector<float> got = floats(group.result(16));
  RandomCache cache = pages;
  Bits want(step.x.size());
  run_reference_layer(s, layer.tensors, step.input(), cache.host(), cache.slots(), step.x, want);
  const auto h = static_cast<std::size_t>(s.hidden);
  const std::vector<float> want_rows = floats(want);
  const auto a = row_of(got, 15, h);
  const auto b = row_of(want_rows, 15, h);
  EXPECT_LE(relative_l2({a.begin(), a.end()}, {b.begin(), b.end()}), 5e-3);
}

class DecodeLayerLate : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DecodeLayerLate, testing::Values(1, 2, 4, 8));

// All ranks replay a graph of three layers, each behind a delay of its own and another one at every
// replay, so that now this rank and now that one comes late.
TEST_P(DecodeLayerLate, GraphLaunchesWithDelayedRanksKeepTheBits) {
  const int ranks = GetParam();
  const int launches = ranks == 2 ? 10'000 : 1'000;
  constexpr int kLayers = 3;
  const DecodeShape s = group_shape(ranks, 4);
  const RandomLayer layer(s, 29);
  const RandomCache pages(s.kv_format, 16, 77);
  Group group(s, layer, pages, kLayers);
  const RandomStep step(s, pages.slots(), {100, 3, -1, 700}, 600);
  std::vector<std::uint32_t> seeds;
  for (int r = 0; r < ranks; ++r) seeds.push_back(77U * static_cast<std::uint32_t>(r));
  DeviceBuffer<std::uint32_t> calls(seeds);
  std::vector<std::unique_ptr<Graph>> graphs;
  group.upload(step);
  for (std::size_t r = 0; r < seeds.size(); ++r) {
    graphs.push_back(std::make_unique<Graph>(group[r], [&](cudaStream_t stream) {
      PENSTOCK_CUDA_CHECK(launch_delay(calls.data() + r, 40'000, stream));
      group[r].launch(4, kLayers);
    }));
  }
  PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
  Bits want;
  int differing = 0;
  for (int i = 0; i < launches && differing == 0; ++i) {
    for (const auto& graph : graphs) graph->launch();
    for (const auto& rank : group.ranks) rank->stream.wait();
    for (const auto& rank : group.ranks) {
      rank->op.check();
      const Bits got = rank->out.download();
      if (want.empty()) want = got;
      differing += got != want ? 1 : 0;
    }
    EXPECT_EQ(differing, 0) << "launch " << i;
  }
  std::vector<std::uint32_t> counted = calls.download();
  for (std::size_t r = 0; r < counted.size(); ++r) {
    EXPECT_EQ(counted[r], seeds[r] + static_cast<std::uint32_t>(launches));
  }
}

// Every stage held up once on every rank, and in one CTA only: late, but nothing else.
TEST_P(DecodeLayerLate, StallsBeforeEveryStageKeepTheBits) {
  const int ranks = GetParam();
  const DecodeShape s = group_shape(ranks, 4);
  const RandomLayer layer(s, 51);
  const RandomCache pages(s.kv_format, 16, 77);
  constexpr int kLayers = 2;
  Group group(s, layer, pages, kLayers);
  const RandomStep step(s, pages.slots(), {100, 3, -1, 700}, 52);
  group.upload(step);
  group.launch(4, kLayers);
  const Bits want = group.result(4);
  const int grid = group[0].op.plan(4).grid;
  for (int stage = 0; stage < kStageCount; ++stage) {
    for (int rank = 0; rank < ranks; rank += std::max(1, ranks - 1)) {
      for (const int cta : {-1, 0, grid - 1}) {
        group.stall(rank, {stage, cta, 1e-4});
        group.upload(step);
        group.launch(4, kLayers);
        ASSERT_EQ(group.result(4), want) << "stage " << stage << " rank " << rank << " CTA " << cta;
        group.stall(rank, {});
      }
    }
  }
}

// A rank that stands still for longer than the deadline: its peers name it, all can go on after the
// rearm.
TEST_P(DecodeLayerLate, AStallBeyondTheDeadlineNamesRankStageAndCta) {
  const int ranks = GetParam();
  const DecodeShape s = group_shape(ranks, 2);
  const RandomLayer layer(s, 53);
  const RandomCache pages(s.kv_format, 16, 77);
  DecodeOptions options;
  options.deadline_s = 0.02;
  Group group(s, layer, pages, 1, options);
  const RandomStep step(s, pages.slots(), {100, 64}, 54);
  group.upload(step);
  group.launch(2);
  const Bits want = group.result(2);
  const int late = ranks - 1;
  const int grid = group[0].op.plan(2).grid;
  // Nobody waits for the down projection of a launch's last layer but peers.
  const int last = ranks > 1 ? kStageDown : kStageUpGate;
  for (const int stage : {0, static_cast<int>(kStageO), last}) {
    // With peers the whole rank, else one CTA whose neighbours wait for it.
    group.stall(late, {stage, ranks > 1 ? -1 : grid - 1, 0.1 * slowdown()});
    group.upload(step);
    group.launch(2);
    PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
    try {
      group[0].op.check();
      ADD_FAILURE() << "no fault at stage " << stage;
    } catch (const Fault& fault) {
      const FaultRecord& r = fault.record();
      EXPECT_EQ(r.rank, 0) << fault.what();
      EXPECT_EQ(r.peer, late) << fault.what();
      EXPECT_EQ(r.cause, static_cast<std::uint32_t>(FaultCause::kDeadline));
      EXPECT_EQ(r.op, 0);
      EXPECT_GE(r.region, 0);
      EXPECT_LT(r.region, grid);
      EXPECT_GE(r.waited_ns, 20'000'000U);
      EXPECT_LE(static_cast<double>(r.waited_ns), 90e6 * slowdown());
      if (ranks > 1) {
        EXPECT_EQ(r.stage,
                  stage <= kStageReduceAttention ? kStageReduceAttention : kStageReduceExperts)
            << fault.what();
      } else {
        EXPECT_GE(r.stage, stage) << fault.what();
      }
    }
    group.stall(late, {});
    group.rearm();
    group.upload(step);
    group.launch(2);
    ASSERT_EQ(group.result(2), want) << "after the rearm, stage " << stage;
  }
}

// Shards of four ranks of which two are there, as benchmarks run them on two GPUs.
TEST(DecodeLayerGpu, FewerRanksPresentAddTheirOwnPartsAlone) {
  const DecodeShape s = group_shape(4, 2);
  const RandomLayer layer(s, 58);
  const RandomCache pages(s.kv_format, 16, 77);
  const RandomStep step(s, pages.slots(), {100, 64}, 59);
  DecodeOptions options;
  options.present = 2;
  options.sm_budget = 66;
  options.deadline_s = 5 * slowdown();
  std::vector<std::unique_ptr<Rig>> rigs;
  std::vector<void*> windows;
  for (const int rank : {0, 1}) {
    DecodeShape of_rank = s;
    of_rank.rank = rank;
    rigs.push_back(std::make_unique<Rig>(of_rank, options, layer, pages));
    windows.push_back(rigs.back()->op.window());
  }
  for (const auto& rig : rigs) rig->op.connect(windows);
  for (const auto& rig : rigs) rig->upload(step);
  for (const auto& rig : rigs) rig->launch(2);
  const Bits out = rigs[0]->result(2);
  EXPECT_EQ(rigs[1]->result(2), out);
  std::vector<StageValues> values;
  for (const auto& rig : rigs) values.push_back(read_stages(rig->op, rig->shape, 2, 0));
  compare_reductions(values, step, static_cast<std::size_t>(s.hidden), 0, 2, floats(out),
                     "two of four ranks");
}

TEST(DecodeLayerGpu, AMissingPeerIsAFaultAndRearmGoesOn) {
  const DecodeShape s = group_shape(4, 1);
  const RandomLayer layer(s, 26);
  const RandomCache pages(s.kv_format, 16, 77);
  DecodeOptions options;
  options.deadline_s = 0.05;
  Group group(s, layer, pages, 1, options);
  const RandomStep step(s, pages.slots(), {100}, 27);
  for (const std::size_t missing : {1U, 3U, 0U}) {
    group.upload(step);
    for (std::size_t r = 0; r < 4; ++r) {
      if (r != missing) group[r].launch(1);
    }
    PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
    for (std::size_t r = 0; r < 4; ++r) {
      if (r == missing) continue;
      try {
        group[r].op.check();
        ADD_FAILURE() << "no fault on rank " << r;
      } catch (const Fault& fault) {
        EXPECT_EQ(fault.record().rank, static_cast<int>(r)) << fault.what();
        EXPECT_EQ(fault.record().peer, static_cast<int>(missing)) << fault.what();
        EXPECT_EQ(fault.record().stage, kStageReduceAttention) << fault.what();
        EXPECT_GE(fault.record().waited_ns, 50'000'000U);
      }
    }
    // Void until the rearm, also for the rank that was missing.
    group.rearm();
    group.launch(1);
    const std::vector<float> got = floats(group.result(1));
    RandomCache cache = pages;
    Bits want(step.x.size());
    run_reference_layer(s, layer.tensors, step.input(), cache.host(), cache.slots(), step.x, want);
    EXPECT_LE(relative_l2(got, floats(want)), 5e-3);
  }
}

template <typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(DecodeLayerGpu, RefusalsNameTheValue) {
  const DecodeShape s = group_shape(2, 4);
  const RandomLayer layer(s, 55);
  const RandomCache pages(s.kv_format, 16, 77);
  Rig rig(s, {}, layer, pages);
  const auto refusal = [&](const auto& call) { return message_of(call); };
  const auto run = [&](const DecodeStep& step, int first, int count) {
    return refusal([&] { rig.op.run(Stream{rig.stream.handle}, step, first, count); });
  };
  EXPECT_NE(run(rig.step(1), 0, 1).find("connect() was not called"), std::string::npos);
  EXPECT_NE(refusal([&] {
              void* const one[1] = {rig.op.window()};
              rig.op.connect(one);
            }).find("1 windows"),
            std::string::npos);
  void* const windows[2] = {rig.op.window(), rig.op.window()};
  rig.op.connect(windows);
  EXPECT_NE(run(rig.step(5), 0, 1).find("5 rows"), std::string::npos);
  EXPECT_NE(run(rig.step(0), 0, 1).find("0 rows"), std::string::npos);
  EXPECT_NE(run(rig.step(1), 0, 2).find("layers 0 to 2"), std::string::npos);
  DecodeStep null = rig.step(1);
  null.slots = nullptr;
  EXPECT_NE(run(null, 0, 1).find("null"), std::string::npos);
  const auto bind = [&](LayerBinding binding) {
    return refusal([&] { rig.op.set_layers(std::span(&binding, 1)); });
  };
  const LayerBinding good{rig.weights.data(), rig.cache.data(), rig.cache.stride(),
                          rig.offsets.data(), rig.picks.data()};
  LayerBinding bad = good;
  bad.weights = rig.weights.data() + 16;
  EXPECT_NE(bind(bad).find("256-byte aligned"), std::string::npos);
  bad = good;
  bad.page_stride = kPageTokens * 656 - 16;
  EXPECT_NE(bind(bad).find("page stride 41968"), std::string::npos);
  bad = good;
  bad.picks = nullptr;
  EXPECT_NE(bind(bad).find("picks"), std::string::npos);
  EXPECT_NE(refusal([&] { rig.op.set_stall({99, -1, 0.0}); }).find("stage 99"), std::string::npos);
  DecodeOptions options;
  options.sm_budget = 1000;
  EXPECT_NE(refusal([&] { DecodeLayer(s, options); }).find("budget of 1000"), std::string::npos);
  options.sm_budget = 0;
  options.present = 3;
  EXPECT_NE(refusal([&] { DecodeLayer(s, options); }).find("3 ranks present"), std::string::npos);
}

// Stage clocks of every CTA and layer: none missing, none before its predecessor.
TEST(DecodeLayerGpu, TheTimelineIsWholeAndChangesNoBit) {
  const DecodeShape s = group_shape(1, 4);
  const RandomLayer layer(s, 56);
  const RandomCache pages(s.kv_format, 16, 77);
  constexpr int kLayers = 3;
  const RandomStep step(s, pages.slots(), {100, 3, -1, 700}, 57);
  Group plain(s, layer, pages, kLayers);
  plain.upload(step);
  plain.launch(4, kLayers);
  EXPECT_TRUE(plain[0].op.timeline(4, kLayers).empty());
  DecodeOptions options;
  options.timeline = true;
  Group timed(s, layer, pages, kLayers, options);
  timed.upload(step);
  timed.launch(4, kLayers);
  EXPECT_EQ(timed.result(4), plain.result(4));
  const std::vector<std::int64_t> events = timed[0].op.timeline(4, kLayers);
  const auto stages = DecodeLayer::stage_names().size();
  const auto grid = static_cast<std::size_t>(timed[0].op.plan(4).grid);
  ASSERT_EQ(events.size(), kLayers * grid * (stages + 1));
  for (std::size_t cta = 0; cta < grid; ++cta) {
    std::int64_t before = 0;
    for (std::size_t l = 0; l < kLayers; ++l) {
      for (std::size_t stage = 0; stage <= stages; ++stage) {
        const std::int64_t at = events[(l * grid + cta) * (stages + 1) + stage];
        EXPECT_GT(at, 0) << "layer " << l << " CTA " << cta << " stage " << stage;
        EXPECT_GE(at, before) << "layer " << l << " CTA " << cta << " stage " << stage;
        before = at;
      }
    }
  }
}

}  // namespace
}  // namespace penstock::decode::test
