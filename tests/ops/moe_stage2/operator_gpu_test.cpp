// The CUDA operator: bit for bit the plain sum over slots, whatever the routing, the transport, the
// chunk size, the slack and the timing. Ranks share one GPU, or are spread over all there are. The
// operands are small integers, so that the tensor cores' sums are those of the CPU reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "core/cuda/device_buffer.h"
#include "ops/moe_stage2/gpu_team.h"
#include "ops/moe_stage2/world.h"
#include "penstock/core/error.h"

namespace penstock::moe_stage2 {
namespace {

using cuda::DeviceBuffer;

// One rank's operands of a world in device memory, `out` poisoned.
class DeviceWorld {
 public:
  // Room for worlds up to `tiles` and `tokens`; set() fills it.
  DeviceWorld(const Shape& shape, std::int64_t tiles, std::int64_t tokens)
      : tiles_(tiles),
        act_(static_cast<std::size_t>(tiles * kTileRows * shape.intermediate)),
        weight_(static_cast<std::size_t>(shape.experts_per_rank()) *
                static_cast<std::size_t>(shape.hidden) *
                static_cast<std::size_t>(shape.intermediate)),
        act_scales_(static_cast<std::size_t>(tiles * kTileRows * (shape.intermediate / 128))),
        weight_scales_(weight_.size() / (128 * 128)),
        slot_weight_(static_cast<std::size_t>(tokens * shape.top_k)),
        expert_rows_(static_cast<std::size_t>(shape.experts_per_rank())),
        origin_(static_cast<std::size_t>(tiles * kTileRows)),
        out_(static_cast<std::size_t>(tokens * shape.hidden)) {}
  DeviceWorld(World& world, int rank)
      : DeviceWorld(world.shape(), world.rank(rank).rows.tiles(), world.tokens(rank)) {
    set(world, rank);
  }

  void set(World& world, int rank) {
    const World::Rank& from = world.rank(rank);
    hidden_ = world.shape().hidden;
    intermediate_ = world.shape().intermediate;
    tokens_ = world.tokens(rank);
    copy(act_, from.act);
    copy(weight_, from.weight);
    // Transposed, with this memory's stride.
    const std::size_t rows = from.rows.origin.size();
    std::vector<float> scales(act_scales_.size(), 0.0f);
    for (std::size_t b = 0; b < static_cast<std::size_t>(intermediate_ / 128); ++b) {
      for (std::size_t r = 0; r < rows; ++r) {
        scales[b * static_cast<std::size_t>(tiles_ * kTileRows) + r] =
            from.act_scales[b * rows + r];
      }
    }
    copy(act_scales_, scales);
    copy(weight_scales_, from.weight_scales);
    copy(slot_weight_, from.slot_weight);
    copy(expert_rows_, from.rows.expert_rows);
    std::vector<RowOrigin> origin(origin_.size());
    std::copy(from.rows.origin.begin(), from.rows.origin.end(), origin.begin());
    copy(origin_, origin);
    const std::vector<std::uint16_t> poison(out_.size(), 0xA5A5);
    copy(out_, poison);
  }

  Operands operands() const {
    Operands o;
    o.gemm.act = reinterpret_cast<const E4M3*>(act_.data());
    o.gemm.act_scales = act_scales_.data();
    o.gemm.act_scale_stride = tiles_ * kTileRows;
    o.gemm.weight = reinterpret_cast<const E4M3*>(weight_.data());
    o.gemm.weight_scales = weight_scales_.data();
    o.gemm.hidden = hidden_;
    o.gemm.intermediate = intermediate_;
    o.expert_rows = expert_rows_.data();
    o.origin = origin_.data();
    o.tiles = tiles_;
    o.weight = slot_weight_.data();
    o.tokens = tokens_;
    o.out = reinterpret_cast<Bf16*>(out_.data());
    return o;
  }

  // Rows of `out` that differ from `want`, [tokens, hidden].
  int wrong_rows(const std::vector<Bf16>& want, cudaStream_t on) const {
    std::vector<std::uint16_t> got(want.size());
    // First, because a copy to pageable memory that has to wait may hold the driver's lock, and
    // with it the peers that this rank's kernels wait for.
    PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(on));
    PENSTOCK_CUDA_CHECK(
        cudaMemcpyAsync(got.data(), out_.data(), got.size() * 2, cudaMemcpyDeviceToHost, on));
    PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(on));
    int wrong = 0;
    for (std::size_t row = 0; row < want.size(); row += static_cast<std::size_t>(hidden_)) {
      wrong += std::memcmp(got.data() + row, want.data() + row,
                           static_cast<std::size_t>(hidden_) * 2) != 0;
    }
    return wrong;
  }

 private:
  template <typename To, typename From>
  static void copy(const DeviceBuffer<To>& to, const std::vector<From>& from) {
    static_assert(sizeof(To) == sizeof(From));
    if (from.empty()) return;
    ASSERT_LE(from.size(), to.size());
    cuda::write_device(to.data(), from.data(), from.size() * sizeof(From));
  }
  std::int64_t tiles_;
  std::int64_t tokens_ = 0;
  std::int32_t hidden_ = 0, intermediate_ = 0;
  DeviceBuffer<unsigned char> act_, weight_;
  DeviceBuffer<float> act_scales_, weight_scales_, slot_weight_;
  DeviceBuffer<std::int32_t> expert_rows_;
  DeviceBuffer<RowOrigin> origin_;
  DeviceBuffer<std::uint16_t> out_;
};

using Expected = std::vector<std::vector<Bf16>>;  // [ranks]
Expected expected_of(const World& world) {
  Expected all(static_cast<std::size_t>(world.shape().ranks));
  std::vector<std::thread> threads;  // the reference is what these tests spend their time on
  for (int r = 0; r < world.shape().ranks; ++r) {
    threads.emplace_back([&, r] { all[static_cast<std::size_t>(r)] = world.expected(r); });
  }
  for (std::thread& thread : threads) thread.join();
  return all;
}

class MoeStage2GpuTest : public GpuTeamTest {
 protected:
  std::int64_t spilled_ = 0;  // of all ranks
};

// Every variant, pattern and wire, new routing and data in each call.
TEST_P(MoeStage2GpuTest, EveryPatternAndTransportGivesThePlainSum) {
  for (const WireFormat wire : {WireFormat::kFp8, WireFormat::kBf16}) {
    const Shape shape = make_shape(ranks(), 4, 3, 40, 1.5, wire);
    std::vector<World> worlds;
    std::vector<Expected> want;
    for (int p = 0; p < kPatternCount; ++p) {
      worlds.emplace_back(shape, static_cast<Pattern>(p), 5, p, Values::kIntegers);
      want.push_back(expected_of(worlds.back()));
    }
    run([&](const TeamHandle& team, const auto& rank) {
      ScopedStream stream;
      for (const Variant& v : kVariants) {
        const auto op = make_cuda_moe_stage2(rank, shape, options_of(v, v.fuse ? 2 : 1));
        std::vector<DeviceWorld> devices;
        for (World& world : worlds) devices.emplace_back(world, team->rank());
        team->barrier();
        for (const DeviceWorld& d : devices) op->run(stream.get(), d.operands());
        stream.wait();
        team->check();
        for (std::size_t p = 0; p < worlds.size(); ++p) {
          EXPECT_EQ(
              devices[p].wrong_rows(want[p][static_cast<std::size_t>(team->rank())], stream.handle),
              0)
              << v.name << ", " << to_string(static_cast<Pattern>(p)) << ", rank " << team->rank();
        }
        team->barrier();
      }
    });
  }
}

// Token counts, chunk sizes; calls of one operator.
TEST_P(MoeStage2GpuTest, TokenCountsAndChunkSizesGiveThePlainSum) {
  constexpr std::array<std::int64_t, 6> kTokens{0, 1, 7, 128, 512, 700};
  const Shape shape = make_shape(ranks(), 4, 2, 700, 1.5, WireFormat::kFp8);
  std::vector<World> worlds;
  std::vector<Expected> want;
  for (const std::int64_t tokens : kTokens) {
    Shape part = shape;
    part.max_tokens_per_rank = std::max<std::int64_t>(tokens, 1);
    const Pattern pattern = tokens == 0 ? Pattern::kZeroTokenRank : Pattern::kBalanced;
    worlds.emplace_back(part, pattern, 7, static_cast<int>(tokens), Values::kIntegers);
    want.push_back(expected_of(worlds.back()));
  }
  run([&](const TeamHandle& team, const auto& rank) {
    ScopedStream stream;
    for (const Variant& v : kVariants) {
      for (const int chunk : {1, 5, 0}) {
        if (!v.fuse && chunk != 0) continue;
        const auto op = make_cuda_moe_stage2(rank, shape, options_of(v, chunk));
        std::vector<DeviceWorld> devices;
        for (World& world : worlds) devices.emplace_back(world, team->rank());
        team->barrier();
        for (const DeviceWorld& d : devices) op->run(stream.get(), d.operands());
        stream.wait();
        team->check();
        for (std::size_t p = 0; p < worlds.size(); ++p) {
          EXPECT_EQ(
              devices[p].wrong_rows(want[p][static_cast<std::size_t>(team->rank())], stream.handle),
              0)
              << v.name << ", chunk " << chunk << ", " << kTokens[p] << " tokens, rank "
              << team->rank();
        }
        team->barrier();
      }
    }
  });
}

// One captured call, replayed with new routing and data in the same memory.
TEST_P(MoeStage2GpuTest, AGraphReplaysWithNewRouting) {
  const Shape shape = make_shape(ranks(), 4, 3, 96, 1.5, WireFormat::kFp8);
  constexpr int kReplays = 7;
  std::vector<World> worlds;
  std::vector<Expected> want;
  std::int64_t tiles = 0;
  for (int c = 0; c < kReplays; ++c) {
    worlds.emplace_back(shape, c % 2 == 0 ? Pattern::kRotatingHotspot : Pattern::kBurst, 11, c,
                        Values::kIntegers);
    want.push_back(expected_of(worlds.back()));
    for (int r = 0; r < ranks(); ++r) {
      tiles = std::max(tiles, worlds.back().rank(r).rows.tiles());
    }
  }
  run([&](const TeamHandle& team, const auto& rank) {
    ScopedStream stream;
    for (const Variant& v : kVariants) {
      const auto op = make_cuda_moe_stage2(rank, shape, options_of(v));
      DeviceWorld device(shape, tiles, 96);
      device.set(worlds[0], team->rank());
      op->prepare(stream.get());
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      PENSTOCK_CUDA_CHECK(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal));
      op->run(stream.get(), device.operands());
      PENSTOCK_CUDA_CHECK(cudaStreamEndCapture(stream.handle, &graph));
      PENSTOCK_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
      PENSTOCK_CUDA_CHECK(cudaGraphUpload(exec, stream.handle));
      stream.wait();
      team->barrier();
      for (int c = 0; c < kReplays; ++c) {
        const auto call = static_cast<std::size_t>(c);
        device.set(worlds[call], team->rank());
        team->barrier();  // pageable copies and waiting kernels apart, see wrong_rows()
        PENSTOCK_CUDA_CHECK(cudaGraphLaunch(exec, stream.handle));
        op->track(stream.get());
        EXPECT_EQ(
            device.wrong_rows(want[call][static_cast<std::size_t>(team->rank())], stream.handle), 0)
            << v.name << ", replay " << c << ", rank " << team->rank();
        team->barrier();
      }
      for (int c = 0; c < 50; ++c) {  // back to back
        PENSTOCK_CUDA_CHECK(cudaGraphLaunch(exec, stream.handle));
        op->track(stream.get());
      }
      EXPECT_EQ(
          device.wrong_rows(want.back()[static_cast<std::size_t>(team->rank())], stream.handle), 0)
          << v.name << ", back to back, rank " << team->rank();
      team->check();
      PENSTOCK_CUDA_CHECK(cudaGraphExecDestroy(exec));
      PENSTOCK_CUDA_CHECK(cudaGraphDestroy(graph));
      team->barrier();
    }
  });
}

// No slack and everything to one rank: most rows spill, none is lost, and the report says so.
TEST_P(MoeStage2GpuTest, SpilledRowsAreFetchedExactly) {
  const Shape shape = make_shape(ranks(), 4, 3, 150, 1.03, WireFormat::kFp8);
  std::vector<World> worlds;
  std::vector<Expected> want;
  for (int c = 0; c < 6; ++c) {
    worlds.emplace_back(shape, c % 3 == 2 ? Pattern::kBurst : Pattern::kAllToOne, 13, c,
                        Values::kIntegers);
    want.push_back(expected_of(worlds.back()));
  }
  run([&](const TeamHandle& team, const auto& rank) {
    ScopedStream stream;
    for (const Variant& v : kVariants) {
      const auto op = make_cuda_moe_stage2(rank, shape, options_of(v));
      std::vector<DeviceWorld> devices;
      for (World& world : worlds) devices.emplace_back(world, team->rank());
      team->barrier();
      for (const DeviceWorld& d : devices) op->run(stream.get(), d.operands());
      stream.wait();
      team->check();
      for (std::size_t p = 0; p < worlds.size(); ++p) {
        EXPECT_EQ(
            devices[p].wrong_rows(want[p][static_cast<std::size_t>(team->rank())], stream.handle),
            0)
            << v.name << ", call " << p << ", rank " << team->rank();
      }
      // The last call was a burst: one rank has all its rows on its right neighbour's experts.
      std::int64_t rows = 0;
      std::int64_t spilled = 0;
      for (int d = 0; d < ranks(); ++d) {
        rows += op->facts().rows[static_cast<std::size_t>(d)];
        spilled += op->facts().spilled[static_cast<std::size_t>(d)];
      }
      EXPECT_EQ(rows, worlds.back().rank(team->rank()).rows.rows());
      std::atomic_ref<std::int64_t>(spilled_).fetch_add(spilled);
      team->barrier();
      if (team->rank() == 0) {
        EXPECT_TRUE(ranks() == 1 || spilled_ > 0) << v.name;
        spilled_ = 0;
      }
      team->barrier();
    }
  });
}

// A thousand calls enqueued back to back, data that change by a power of two on odd calls, ranks
// that come late.
TEST_P(MoeStage2GpuTest, AThousandCallsWithLateRanksStayExact) {
  const Shape shape = make_shape(ranks(), 4, 2, 12, 1.5, WireFormat::kFp8);
  constexpr std::size_t kWorlds = 6;
  constexpr std::size_t kCalls = 1000;
  std::vector<World> worlds;
  std::vector<Expected> want;
  for (std::size_t c = 0; c < kWorlds; ++c) {
    worlds.emplace_back(shape, static_cast<Pattern>(c % kPatternCount), 17, static_cast<int>(c / 2),
                        Values::kIntegers, c % 2 == 0 ? 1.0f : 8.0f);
    want.push_back(expected_of(worlds.back()));
  }
  for (const Variant& v : kVariants) {
    if (!v.fuse) continue;
    run([&](const TeamHandle& team, const auto& rank) {
      ScopedStream stream;
      const auto op = make_cuda_moe_stage2(rank, shape, options_of(v, 1));
      std::vector<DeviceWorld> devices;
      for (World& world : worlds) devices.emplace_back(world, team->rank());
      const auto out_bytes = static_cast<std::size_t>(shape.max_tokens_per_rank * shape.hidden) * 2;
      DeviceBuffer<unsigned char> outs(kCalls * out_bytes);
      cuda::write_device(outs.data(), std::vector<unsigned char>(outs.size(), 0xA5).data(),
                         outs.size());
      team->barrier();
      std::mt19937_64 random(23 + static_cast<std::uint64_t>(team->rank()));
      for (std::size_t c = 0; c < kCalls; ++c) {
        if (random() % 97 == 0)
          std::this_thread::sleep_for(std::chrono::milliseconds(random() % 40));
        if (c == 500 && team->rank() == ranks() - 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
        Operands o = devices[c % kWorlds].operands();
        o.out = reinterpret_cast<Bf16*>(outs.data() + c * out_bytes);
        op->run(stream.get(), o);
      }
      stream.wait();
      team->check();
      std::vector<unsigned char> got(outs.size());
      cuda::read_device(got.data(), outs.data(), got.size());
      int wrong = 0;
      for (std::size_t c = 0; c < kCalls; ++c) {
        const auto& right = want[c % kWorlds][static_cast<std::size_t>(team->rank())];
        wrong += !right.empty() &&
                 std::memcmp(got.data() + c * out_bytes, right.data(), right.size() * 2) != 0;
      }
      EXPECT_EQ(wrong, 0) << v.name << ": calls with a wrong row at rank " << team->rank();
    });
  }
}

// A rank that never comes: everybody gets the fault, and after a rearm everything is exact again.
TEST_P(MoeStage2GpuTest, AStoppedRankIsAFaultAndRearmBringsTheOperatorBack) {
  if (ranks() == 1) GTEST_SKIP() << "nobody to wait for";
  const Shape shape = make_shape(ranks(), 4, 2, 24, 1.5, WireFormat::kFp8);
  World world(shape, Pattern::kBalanced, 19, 0, Values::kIntegers);
  const Expected want = expected_of(world);
  for (const Variant& v : kVariants) {
    run(
        [&](const TeamHandle& team, const auto& rank) {
          ScopedStream stream;
          Options options = options_of(v);
          options.deadline = std::chrono::milliseconds(300);
          const auto op = make_cuda_moe_stage2(rank, shape, options);
          const DeviceWorld device(world, team->rank());
          const int lost = ranks() - 1;
          op->prepare(stream.get());
          team->barrier();
          for (int c = 0; c < 3; ++c) op->run(stream.get(), device.operands());
          if (team->rank() != lost) op->run(stream.get(), device.operands());
          stream.wait();
          const auto give_up = std::chrono::steady_clock::now() + kDeadline;
          while (!team->faulted() && std::chrono::steady_clock::now() < give_up) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
          ASSERT_TRUE(team->faulted()) << v.name << ", rank " << team->rank();
          EXPECT_EQ(team->fault()->peer, lost) << v.name;
          EXPECT_THROW(op->run(stream.get(), device.operands()), Fault);
          team->rearm();
          for (int c = 0; c < 3; ++c) op->run(stream.get(), device.operands());
          EXPECT_EQ(device.wrong_rows(want[static_cast<std::size_t>(team->rank())], stream.handle),
                    0)
              << v.name << ", after rearm, rank " << team->rank();
          team->check();
        },
        std::chrono::seconds(20));
  }
}

// What only the device can see wrong stops the operator until a rearm, and every call says so: none
// may leave `out` as it was without a word, also where all ranks are wrong and nobody waits.
TEST_P(MoeStage2GpuTest, BadOriginsEverywhereAreToldUntilTheRearm) {
  if (ranks() == 1) GTEST_SKIP() << "one rank goes on by itself";
  const Shape shape = make_shape(ranks(), 4, 2, 9, 1.5, WireFormat::kFp8);
  World world(shape, Pattern::kBalanced, 3, 0, Values::kIntegers);
  const Expected want = expected_of(world);
  run([&](const TeamHandle& team, const auto& rank) {
    ScopedStream stream;
    const auto op = make_cuda_moe_stage2(rank, shape, Options{});
    DeviceWorld device(world, team->rank());
    op->prepare(stream.get());
    const Operands good = device.operands();
    Operands bad = good;
    std::vector<RowOrigin> origin = world.rank(team->rank()).rows.origin;
    ASSERT_FALSE(origin.empty());
    origin[0].slot = 9;
    const DeviceBuffer<RowOrigin> wrong(origin);
    bad.origin = wrong.data();
    team->barrier();
    op->run(stream.get(), bad);
    stream.wait();
    EXPECT_THROW(op->track(stream.get()), Error);
    for (int call = 0; call < 3; ++call) EXPECT_THROW(op->run(stream.get(), good), Error);
    team->rearm();
    op->run(stream.get(), good);
    EXPECT_EQ(device.wrong_rows(want[static_cast<std::size_t>(team->rank())], stream.handle), 0);
  });
}

TEST_P(MoeStage2GpuTest, TwoInstancesDoNotDisturbEachOther) {
  const Shape shape = make_shape(ranks(), 4, 2, 24, 1.5, WireFormat::kBf16);
  World first(shape, Pattern::kBalanced, 3, 0, Values::kIntegers);
  World second(shape, Pattern::kHotRank, 4, 1, Values::kIntegers);
  const Expected want_first = expected_of(first);
  const Expected want_second = expected_of(second);
  run([&](const TeamHandle& team, const auto& rank) {
    ScopedStream stream;
    const auto a = make_cuda_moe_stage2(rank, shape, options_of(kVariants[0]));
    const auto b = make_cuda_moe_stage2(rank, shape, options_of(kVariants[2]));
    const DeviceWorld one(first, team->rank());
    const DeviceWorld two(second, team->rank());
    team->barrier();
    for (int i = 0; i < 5; ++i) {
      a->run(stream.get(), one.operands());
      b->run(stream.get(), two.operands());
    }
    const auto r = static_cast<std::size_t>(team->rank());
    EXPECT_EQ(one.wrong_rows(want_first[r], stream.handle), 0);
    EXPECT_EQ(two.wrong_rows(want_second[r], stream.handle), 0);
    team->check();
    // Rows to peers: all through the copy engine, tables by stores.
    std::uint64_t sent = 0;
    for (int d = 0; d < ranks(); ++d) {
      if (d != team->rank()) {
        sent += static_cast<std::uint64_t>(a->facts().rows[static_cast<std::size_t>(d)] -
                                           a->facts().spilled[static_cast<std::size_t>(d)]);
      }
    }
    const std::uint64_t row = static_cast<std::uint64_t>(wire_row_bytes(shape.hidden, shape.wire));
    const auto settled = std::chrono::steady_clock::now() + kDeadline;
    while (a->counters().bytes != 5 * sent * row && std::chrono::steady_clock::now() < settled) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the proxy counts when it looks
    }
    EXPECT_EQ(a->counters().bytes, 5 * sent * row);
    EXPECT_EQ(b->counters().bytes, 0U);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, MoeStage2GpuTest, placements(), name_of);

TEST(MoeStage2GpuRefusal, BadOriginsAreThrownByTheNextCall) {
  const Shape shape = make_shape(1, 4, 2, 9, 1.5, WireFormat::kFp8);
  World world(shape, Pattern::kBalanced, 3, 0, Values::kIntegers);
  run_local_team(1, [&](const TeamHandle& team) {
    ScopedStream stream;
    const auto op = make_cuda_moe_stage2(team, shape, Options{});
    DeviceWorld device(world, 0);
    const Operands good = device.operands();
    Operands bad = good;
    std::vector<RowOrigin> origin = world.rank(0).rows.origin;
    origin[0].slot = 9;
    const DeviceBuffer<RowOrigin> wrong(origin);
    bad.origin = wrong.data();
    op->run(stream.get(), bad);
    stream.wait();
    EXPECT_THROW(op->run(stream.get(), good), Error);
    op->run(stream.get(), good);
    EXPECT_EQ(device.wrong_rows(world.expected(0), stream.handle), 0);
    bad = good;
    bad.gemm.act += 1;
    EXPECT_THROW(op->run(stream.get(), bad), Error);
    bad = good;
    bad.gemm.act_scale_stride += 1;
    EXPECT_THROW(op->run(stream.get(), bad), Error);
    Options options;
    options.transport = TransportKind::kSm;
    options.copy_ctas = 3;
    EXPECT_THROW((void)make_cuda_moe_stage2(team, shape, options), Error);
  });
}

}  // namespace
}  // namespace penstock::moe_stage2
