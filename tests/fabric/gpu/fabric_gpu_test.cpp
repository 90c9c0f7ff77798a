// The fabric on GPUs: 2, 4 and 8 ranks on one GPU, and one rank a GPU where there are several.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "fabric/cuda/copy_engine.h"
#include "fabric/cuda/device_packets.h"
#include "fabric/cuda/device_rank.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/packet_all_reduce_sm90.h"
#include "fabric/cuda/sm_transport.h"
#include "fabric/cuda/window_backend.h"
#include "fabric/gpu.h"
#include "fabric/gpu/exchange_rank.h"
#include "fabric/gpu/exchange_sm90.h"

namespace penstock {
namespace {

using cuda::CopyEngineOptions;
using cuda::DeviceBuffer;
using cuda::DeviceCopyEngine;
using cuda::DeviceRank;
using test::ExchangeRank;
using test::ExchangeResult;
using test::expect_exact;
using test::is_rank_process;
using test::number_from;
using test::scaled;
using test::slowdown;
using test::stretched;

constexpr std::chrono::seconds kDeadline{4};

// Before gtest_main makes the first CUDA call.
[[maybe_unused]] const bool kPrepared = [] {
  cuda::prepare_process();
  return true;
}();

// Ranks on one GPU, or spread over all GPUs there are.
struct Placement {
  int ranks;
  bool spread;
};
std::string name_of(const testing::TestParamInfo<Placement>& info) {
  return std::to_string(info.param.ranks) + (info.param.spread ? "RanksSpread" : "RanksOneGpu");
}

class FabricGpuTest : public testing::TestWithParam<Placement> {
 protected:
  void SetUp() override {
    ASSERT_GT(cuda::device_count(), 0) << cuda::unavailable_reason();
    if (GetParam().spread && cuda::device_count() < 2) GTEST_SKIP() << "one GPU only";
    // All kernels of the test before the first one that waits.
    for (int d = 0; d < cuda::device_count(); ++d) {
      const cuda::ScopedDevice scope(d);
      PENSTOCK_CUDA_CHECK(test::load_exchange_kernels());
      PENSTOCK_CUDA_CHECK(cuda::load_packet_kernels());
    }
    if (!is_rank_process()) return;
    // Processes start at different speeds; from the first test on they are all there. A test that
    // fails on one rank may make another number of teams there, so each test has ports of its own.
    if (test_++ == 0) connect(number_from("MASTER_PORT", 0), std::chrono::seconds(60))->barrier();
    team_of_test_ = 0;
  }
  static TeamHandle connect(int port, std::chrono::nanoseconds deadline) {
    TeamOptions options;
    options.rank = number_from("RANK", -1);
    options.size = number_from("WORLD_SIZE", -1);
    options.local_rank = options.rank;
    options.address = "127.0.0.1";
    options.port = port;
    options.deadline = deadline;
    return connect_team(options);
  }
  static int device_of(int rank) { return GetParam().spread ? rank % cuda::device_count() : 0; }
  // Runs body on one thread a rank, or as the one rank that this process is; failures inside are
  // reported by gtest, exceptions rethrown.
  static void run(const std::function<void(const TeamHandle&)>& body,
                  std::chrono::nanoseconds deadline = kDeadline) {
    if (is_rank_process()) {
      const int port = number_from("MASTER_PORT", 0) + test_ * kTeamsOfTest + ++team_of_test_;
      const TeamHandle team = connect(port, deadline * slowdown());
      const cuda::ScopedDevice scope(device_of(team->rank()));
      body(team);
      return;
    }
    run_local_team(GetParam().ranks,
                   [&](const TeamHandle& team) {
                     const cuda::ScopedDevice scope(device_of(team->rank()));
                     body(team);
                   },
                   {.deadline = deadline * slowdown()});
  }

 private:
  static constexpr int kTeamsOfTest = 16;  // at the most
  inline static int test_ = 0;
  inline static int team_of_test_ = 0;
};

TEST_P(FabricGpuTest, CopyEngineDeliversEveryChunkExactly) {
  const auto ranks = static_cast<std::uint64_t>(GetParam().ranks);
  run([&](const TeamHandle& team) {
    ExchangeRank x(team, device_of(team->rank()), {ranks, 3, 20480 + 4}, true);
    const std::uint64_t calls = scaled(60);
    x.launch(calls);
    x.stream.wait();
    x.engine->quiet();
    expect_exact(x, calls);
    const TransportCounters counters = x.engine->counters();
    EXPECT_EQ(counters.puts, calls * ranks * 3);
    EXPECT_EQ(counters.bytes, calls * ranks * 3 * (20480 + 4));
    EXPECT_LE(counters.copies, counters.puts);
    team->barrier();
  });
}

TEST_P(FabricGpuTest, DirectStoresWithADelayedRank) {
  const auto ranks = static_cast<std::uint64_t>(GetParam().ranks);
  run([&](const TeamHandle& team) {
    ExchangeRank x(team, device_of(team->rank()), {ranks, 2, 4100}, false);
    if (team->rank() == 1) x.args.delay_ns = 20000;
    const std::uint64_t calls = scaled(500);
    x.launch(calls);
    x.stream.wait();
    expect_exact(x, calls);
    team->barrier();
  });
}

TEST_P(FabricGpuTest, CopyEngineWithADelayedRankAndATinyRing) {
  const auto ranks = static_cast<std::uint64_t>(GetParam().ranks);
  run([&](const TeamHandle& team) {
    ExchangeRank x(team, device_of(team->rank()), {ranks, 4, 1024}, true, {.ring_slots = 2});
    if (team->rank() == 0) x.args.delay_ns = 30000;
    const std::uint64_t calls = scaled(100);
    x.launch(calls);
    x.stream.wait();
    expect_exact(x, calls);
    team->barrier();
  });
}

TEST_P(FabricGpuTest, GraphReplaysMoveNewData) {
  const auto ranks = static_cast<std::uint64_t>(GetParam().ranks);
  run([&](const TeamHandle& team) {
    ExchangeRank x(team, device_of(team->rank()), {ranks, 2, 8192}, true);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    x.args.calls = 3;
    // One rank after the other captures in the mode that forbids every other thread unsafe calls,
    // while the proxy moves puts: the proxy must not break the capture.
    for (int turn = 0; turn < team->size(); ++turn) {
      team->barrier();
      if (turn != team->rank()) continue;
      PENSTOCK_CUDA_CHECK(cudaStreamBeginCapture(x.stream.handle, cudaStreamCaptureModeGlobal));
      for (int i = 0; i < 50; ++i) {
        PutDescriptor put;
        put.peer = (team->rank() + 1) % team->size();
        put.bytes = 256;  // of zeros, into the part of the peer that call 1 overwrites
        x.engine->put(put);
      }
      PENSTOCK_CUDA_CHECK(test::launch_exchange(x.args, x.blocks, x.stream.handle));
      PENSTOCK_CUDA_CHECK(cudaStreamEndCapture(x.stream.handle, &graph));
    }
    team->barrier();
    x.engine->quiet();
    EXPECT_EQ(x.engine->counters().puts, 50U);
    PENSTOCK_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    PENSTOCK_CUDA_CHECK(cudaGraphUpload(exec, x.stream.handle));
    x.stream.wait();
    team->barrier();
    const std::uint64_t replays = scaled(20);
    for (std::uint64_t i = 0; i < replays; ++i) {
      PENSTOCK_CUDA_CHECK(cudaGraphLaunch(exec, x.stream.handle));
      x.rank->track(x.stream.handle);
    }
    x.stream.wait();
    expect_exact(x, 3 * replays);
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
    team->barrier();
  });
}

TEST_P(FabricGpuTest, TwoOperatorsInFlightShareTheProxy) {
  const auto ranks = static_cast<std::uint64_t>(GetParam().ranks);
  run([&](const TeamHandle& team) {
    const int device = device_of(team->rank());
    ExchangeRank a(team, device, {ranks, 2, 4096}, true);
    ExchangeRank b(team, device, {ranks, 1, 65536}, true);
    a.blocks = std::min(a.blocks, (a.rank->sms() / 2) & ~1);
    b.blocks = std::min(b.blocks, (b.rank->sms() / 2) & ~1);
    b.args.shift = 3;
    const std::uint64_t calls = scaled(40);
    a.launch(2 * calls);
    b.launch(calls);
    a.stream.wait();
    b.stream.wait();
    expect_exact(a, 2 * calls);
    expect_exact(b, calls);
    team->barrier();
  });
}

TEST_P(FabricGpuTest, MissingRankFaultsEveryRankThenRearmIsExact) {
  const auto ranks = static_cast<std::uint64_t>(GetParam().ranks);
  run(
      [&](const TeamHandle& team) {
        ExchangeRank x(team, device_of(team->rank()), {ranks, 2, 4096}, true);
        const bool absent = team->rank() == team->size() - 1;
        const auto start = std::chrono::steady_clock::now();
        if (!absent) {
          x.launch(5);
          x.stream.wait();  // the kernel ends by itself
          const auto took = std::chrono::steady_clock::now() - start;
          EXPECT_LT(took, stretched(std::chrono::milliseconds(1500)));
          const ExchangeResult result = x.take_result();
          EXPECT_GT(result.stopped, 0U);
          EXPECT_EQ(result.words_wrong, 0U);
        }
        while (!team->faulted()) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          ASSERT_LT(std::chrono::steady_clock::now() - start,
                    stretched(std::chrono::milliseconds(3000)));
        }
        const FaultRecord record = *team->fault();
        EXPECT_EQ(record.cause, static_cast<std::uint32_t>(FaultCause::kDeadline))
            << describe(record);
        // With two ranks there is one to blame; with more, a rank held up by the absent one may
        // expire first.
        EXPECT_NE(record.peer, record.rank) << describe(record);
        EXPECT_TRUE(team->size() > 2 || record.peer == 1) << describe(record);
        EXPECT_EQ(record.op, 11);
        EXPECT_GE(record.waited_ns, 500'000'000U);
        EXPECT_THROW(team->check(), Fault);
        team->rearm();
        // Above every epoch that anybody published, on every rank; consumed words follow.
        constexpr std::uint64_t kFloor = 100;
        cuda::write_device(x.epoch.data(), &kFloor, sizeof(kFloor));
        std::vector<std::uint64_t> consumed(ranks * x.args.shape.chunks, kFloor);
        cuda::write_device(x.window->region(team->rank(), test::kConsumed), consumed.data(),
                           consumed.size() * 8);
        team->barrier();
        x.launch(scaled(20));
        x.stream.wait();
        expect_exact(x, scaled(20));
        team->barrier();
      },
      std::chrono::milliseconds(500));
}

TEST_P(FabricGpuTest, FullRingIsReportedNotWaitedForEver) {
  run(
      [&](const TeamHandle& team) {
        const int device = device_of(team->rank());
        const auto rank = DeviceRank::create(team, device);
        // A ring that nobody drains.
        DeviceBuffer<RingSlot> slots(4);
        slots.fill(0);
        DeviceBuffer<std::uint64_t> words(std::vector<std::uint64_t>(16, 0));
        RingView ring;
        ring.slots = slots.data();
        ring.tail = words.data();
        ring.head = words.data() + 1;
        ring.tail_seen = words.data() + 2;
        ring.signal_cells = words.data() + 4;
        ring.capacity = 4;
        DeviceBuffer<std::uint32_t> status(std::vector<std::uint32_t>{9});
        const cuda::OwnedStream stream;
        rank->prepare(stream.handle);
        team->barrier();
        if (team->rank() == 0) {
          PutDescriptor put;
          put.peer = 1;
          PENSTOCK_CUDA_CHECK(
              test::launch_posts(rank->guard_view(5), ring, put, 5, status.data(), stream.handle));
          rank->track(stream.handle);
          stream.wait();
          std::uint32_t how = 0;
          cuda::read_device(&how, status.data(), sizeof(how));
          EXPECT_EQ(how, static_cast<std::uint32_t>(WaitStatus::kDeadline));
          std::uint64_t head = 0;
          cuda::read_device(&head, words.data() + 1, sizeof(head));
          EXPECT_EQ(head, 4U);  // the fifth position was never claimed: no hole
        }
        const auto start = std::chrono::steady_clock::now();
        while (!team->faulted() && std::chrono::steady_clock::now() - start <
                                       stretched(std::chrono::milliseconds(2000))) {
          std::this_thread::yield();
        }
        ASSERT_TRUE(team->faulted());
        EXPECT_EQ(team->fault()->cause, static_cast<std::uint32_t>(FaultCause::kRingFull));
        EXPECT_EQ(team->fault()->rank, 0);
        team->rearm();
      },
      std::chrono::milliseconds(300));
}

TEST_P(FabricGpuTest, HostRaiseEndsDeviceWaits) {
  run([&](const TeamHandle& team) {
    const auto rank = DeviceRank::create(team, device_of(team->rank()));
    DeviceBuffer<std::uint64_t> word(std::vector<std::uint64_t>{0});
    DeviceBuffer<std::uint32_t> status(std::vector<std::uint32_t>{9});
    const cuda::OwnedStream stream;
    team->barrier();
    PENSTOCK_CUDA_CHECK(
        test::launch_wait(rank->guard_view(6), word.data(), 1, 0, status.data(), stream.handle));
    rank->track(stream.handle);
    if (team->rank() == 0) {
      // Not before the others have left the barrier, which would throw.
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      FaultRecord record;
      record.rank = 0;
      record.cause = static_cast<std::uint32_t>(FaultCause::kPeerDead);
      record.valid = 1;
      (void)team->raise(record);
    }
    const auto start = std::chrono::steady_clock::now();
    stream.wait();
    EXPECT_LT(std::chrono::steady_clock::now() - start, stretched(std::chrono::milliseconds(1000)));
    std::uint32_t how = 0;
    cuda::read_device(&how, status.data(), sizeof(how));
    EXPECT_EQ(how, static_cast<std::uint32_t>(WaitStatus::kAborted));
    team->rearm();
    // The wait works again, and ends well this time.
    constexpr std::uint64_t kOne = 1;
    cuda::write_device(word.data(), &kOne, sizeof(kOne));
    PENSTOCK_CUDA_CHECK(
        test::launch_wait(rank->guard_view(6), word.data(), 1, 0, status.data(), stream.handle));
    stream.wait();
    cuda::read_device(&how, status.data(), sizeof(how));
    EXPECT_EQ(how, static_cast<std::uint32_t>(WaitStatus::kArrived));
    team->barrier();
  });
}

void raise_from(const TeamHandle& team, int rank) {
  if (team->rank() == rank) {
    // Not before the others have left the last barrier, which would throw.
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    FaultRecord record;
    record.rank = record.peer = rank;
    record.cause = static_cast<std::uint32_t>(FaultCause::kPeerDead);
    record.valid = 1;
    (void)team->raise(record);
  }
  const auto start = std::chrono::steady_clock::now();
  while (!team->faulted()) {
    ASSERT_LT(std::chrono::steady_clock::now() - start, stretched(std::chrono::milliseconds(2000)));
    std::this_thread::yield();
  }
}

// The proxy sees the fault of one generation while the next one begins: it must not end the new
// generation's waits.
TEST_P(FabricGpuTest, WaitsAfterARearmAreNotEndedByTheOldFault) {
  run([&](const TeamHandle& team) {
    const auto rank = DeviceRank::create(team, device_of(team->rank()));
    DeviceBuffer<std::uint64_t> word(std::vector<std::uint64_t>{0});
    DeviceBuffer<std::uint32_t> status(std::vector<std::uint32_t>{9});
    const cuda::OwnedStream stream;
    rank->prepare(stream.handle);
    for (std::uint64_t round = 1; round <= scaled(40); ++round) {
      team->barrier();
      raise_from(team, static_cast<int>(round) % team->size());
      team->rearm();
      PENSTOCK_CUDA_CHECK(test::launch_wait(rank->guard_view(6), word.data(), round, 0,
                                            status.data(), stream.handle));
      rank->track(stream.handle);
      std::this_thread::sleep_for(std::chrono::microseconds(400));  // several looks of the proxy
      cuda::write_device(word.data(), &round, sizeof(round));
      stream.wait();
      std::uint32_t how = 9;
      cuda::read_device(&how, status.data(), sizeof(how));
      ASSERT_EQ(how, static_cast<std::uint32_t>(WaitStatus::kArrived)) << "round " << round;
    }
    team->barrier();
  });
}

TEST_P(FabricGpuTest, AFaultDropsWhatTransportsHeldBack) {
  run([&](const TeamHandle& team) {
    const int device = device_of(team->rank());
    const auto rank = DeviceRank::create(team, device);
    const auto window = Window::create(
        team, Layout("held", "", {{"all", 0, 1 << 16, 8, Access::kAll, Access::kAll}}),
        cuda::device_window_backend(device));
    DeviceCopyEngine engine(rank, window);
    cuda::DeviceSmTransport copiers(TransportKind::kSm, rank, window, 1);
    const std::uint64_t value = 41 + static_cast<std::uint64_t>(team->rank());
    cuda::write_device(window->local(), &value, sizeof(value));
    team->barrier();
    PutDescriptor put;
    put.peer = (team->rank() + 1) % team->size();
    put.bytes = 8;
    put.dst_offset = 4096;
    copiers.put(put);
    copiers.flush();  // launched: delivered and counted, whatever comes
    put.dst_offset = 8192;
    copiers.put(put);  // held back
    team->barrier();
    raise_from(team, 0);
    EXPECT_THROW(engine.put(put), Fault);
    EXPECT_THROW(copiers.put(put), Fault);
    team->rearm();
    EXPECT_EQ(copiers.counters().puts, 1U);
    EXPECT_EQ(engine.counters().puts, 0U);
    copiers.quiet();
    engine.quiet();
    team->barrier();
    std::uint64_t got[2] = {};
    cuda::read_device(&got[0], window->local() + 4096, 8);
    cuda::read_device(&got[1], window->local() + 8192, 8);
    const auto from = static_cast<std::uint64_t>((team->rank() + team->size() - 1) % team->size());
    EXPECT_EQ(got[0], 41 + from);
    EXPECT_EQ(got[1], 0U);
    // Both transports work again.
    put.dst_offset = 12288;
    engine.put(put);
    engine.quiet();
    put.dst_offset = 16384;
    copiers.put(put);
    copiers.quiet();
    team->barrier();
    cuda::read_device(&got[0], window->local() + 12288, 8);
    cuda::read_device(&got[1], window->local() + 16384, 8);
    EXPECT_EQ(got[0], 41 + from);
    EXPECT_EQ(got[1], 41 + from);
    team->barrier();
  });
}

// What `penstock doctor` runs: every pair, every transport, compared by the kernel that saw the
// signal.
TEST_P(FabricGpuTest, SelfTestPassesOnEveryTransport) {
  run([&](const TeamHandle& team) {
    const GpuSelfTest report = gpu_self_test(team, device_of(team->rank()), {65536, 2});
    ASSERT_EQ(report.transports.size(), 3U);
    for (const TransportReport& transport : report.transports) {
      EXPECT_TRUE(transport.ok) << to_string(transport.kind) << ": " << transport.reason;
      EXPECT_EQ(transport.moved_bytes, transport.pairs.size() * 2 * 65536);
    }
    EXPECT_EQ(report.signals.size(), static_cast<std::size_t>(team->size() * team->size()));
  });
}

TEST_P(FabricGpuTest, OneBadArgumentIsRefusedOnEveryRank) {
  run([&](const TeamHandle& team) {
    const auto rank = DeviceRank::create(team, device_of(team->rank()));
    const auto start = std::chrono::steady_clock::now();
    EXPECT_THROW(cuda::DevicePackets(rank, team->rank() == 1 ? 0 : 16), Error);
    EXPECT_LT(std::chrono::steady_clock::now() - start, stretched(std::chrono::milliseconds(1000)));
    team->barrier();
  });
}

TEST_P(FabricGpuTest, WindowSizesAroundTheGranuleReachTheLastByte) {
  for (const std::int64_t off_granule : {-8, 0, 8}) {
    run([&](const TeamHandle& team) {
      const int device = device_of(team->rank());
      const auto rank = DeviceRank::create(team, device);
      const auto granule = static_cast<std::int64_t>(cuda::granule_bytes(device));
      const auto bytes = static_cast<std::uint64_t>(granule + off_granule);
      const auto window = Window::create(
          team, Layout("edge", "", {{"all", 0, bytes, 8, Access::kAll, Access::kAll}}),
          cuda::device_window_backend(device));
      EXPECT_EQ(window->bytes() % static_cast<std::uint64_t>(granule), 0U);
      EXPECT_GE(window->bytes(), bytes);
      DeviceCopyEngine engine(rank, window);
      const int peer = (team->rank() + 1) % team->size();
      const int source = (team->rank() + team->size() - 1) % team->size();
      const std::uint64_t value = 0x1234567800000000ULL + static_cast<std::uint64_t>(team->rank());
      cuda::write_device(window->local(), &value, sizeof(value));
      team->barrier();
      PutDescriptor put;
      put.peer = peer;
      put.bytes = 8;
      put.dst_offset = window->bytes() - 16;
      put.signal_offset = window->bytes() - 8;  // the last word that is mapped
      put.signal_epoch = 42;
      engine.put(put);
      engine.quiet();
      team->barrier();
      std::uint64_t got[2] = {};
      cuda::read_device(got, window->local() + window->bytes() - 16, sizeof(got));
      EXPECT_EQ(got[0], 0x1234567800000000ULL + static_cast<std::uint64_t>(source));
      EXPECT_EQ(got[1], 42U);
      put.dst_offset = window->bytes() - 4;
      EXPECT_THROW(engine.put(put), Error);
      team->barrier();
    });
  }
}

TEST_P(FabricGpuTest, OffsetsPastFourGiB) {
  if (GetParam().ranks > 4) GTEST_SKIP() << "two and four ranks suffice for address arithmetic";
  run([&](const TeamHandle& team) {
    const int device = device_of(team->rank());
    const auto rank = DeviceRank::create(team, device);
    constexpr std::uint64_t kFar = (5ULL << 30) + 12344;
    const auto window = Window::create(
        team, Layout("far", "", {{"all", 0, 6ULL << 30, 8, Access::kAll, Access::kAll}}),
        cuda::device_window_backend(device));
    DeviceCopyEngine engine(rank, window);
    const std::uint64_t value = 77 + static_cast<std::uint64_t>(team->rank());
    cuda::write_device(window->local() + kFar, &value, sizeof(value));
    team->barrier();
    PutDescriptor put;
    put.peer = (team->rank() + 1) % team->size();
    put.src_offset = kFar;
    put.dst_offset = kFar + 64;
    put.bytes = 8;
    engine.put(put);
    engine.quiet();
    team->barrier();
    std::uint64_t got = 0;
    cuda::read_device(&got, window->local() + kFar + 64, sizeof(got));
    EXPECT_EQ(got,
              77U + static_cast<std::uint64_t>((team->rank() + team->size() - 1) % team->size()));
    std::uint64_t low = 1;
    cuda::read_device(&low, window->local() + (kFar + 64) % (1ULL << 32), sizeof(low));
    EXPECT_EQ(low, 0U);  // a 32-bit offset would have landed here
    team->barrier();
  });
}

TEST_P(FabricGpuTest, HostPutsArriveOnEveryTransport) {
  run([&](const TeamHandle& team) {
    const int device = device_of(team->rank());
    const auto rank = DeviceRank::create(team, device);
    constexpr std::uint64_t kBytes = 3 * 65536 + 40;  // three adjacent chunks and an odd end
    constexpr std::uint64_t kSlot = 1 << 18;
    const auto ranks = static_cast<std::uint64_t>(team->size());
    const auto window = Window::create(
        team,
        Layout("puts", "", {{"all", 0, (2 * ranks + 1) * kSlot, 8, Access::kAll, Access::kAll}}),
        cuda::device_window_backend(device));
    const std::uint64_t signals = 2 * ranks * kSlot;
    DeviceCopyEngine engine(rank, window);
    cuda::DeviceSmTransport copiers(TransportKind::kSm, rank, window, std::min(4, rank->sms()));
    std::uint64_t epoch = 0;
    for (Transport* transport : std::initializer_list<Transport*>{&engine, &copiers}) {
      ++epoch;
      std::vector<std::uint32_t> mine(kSlot / 4);
      for (int to = 0; to < team->size(); ++to) {
        for (std::size_t i = 0; i < mine.size(); ++i) {
          mine[i] = static_cast<std::uint32_t>(i * 7 + epoch * 1000003 +
                                               static_cast<std::uint64_t>(team->rank() * 64 + to));
        }
        cuda::write_device(window->local() + static_cast<std::uint64_t>(to) * kSlot, mine.data(),
                           kSlot);
      }
      team->barrier();
      for (int to = 0; to < team->size(); ++to) {
        for (std::uint64_t at = 0; at < kBytes; at += 65536) {
          PutDescriptor put;
          put.peer = to;
          put.src_offset = static_cast<std::uint64_t>(to) * kSlot + at;
          put.dst_offset = (ranks + static_cast<std::uint64_t>(team->rank())) * kSlot + at;
          put.bytes = std::min<std::uint64_t>(65536, kBytes - at);
          put.signal_offset = signals + static_cast<std::uint64_t>(team->rank()) * 8;
          put.signal_epoch = epoch;
          transport->put(put);
        }
      }
      transport->quiet();
      team->barrier();
      for (int from = 0; from < team->size(); ++from) {
        std::vector<std::uint32_t> got(kSlot / 4);
        cuda::read_device(got.data(),
                          window->local() + (ranks + static_cast<std::uint64_t>(from)) * kSlot,
                          kSlot);
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < kBytes / 4; ++i) {
          wrong += got[i] !=
                   static_cast<std::uint32_t>(i * 7 + epoch * 1000003 +
                                              static_cast<std::uint64_t>(from * 64 + team->rank()));
        }
        EXPECT_EQ(wrong, 0U) << to_string(transport->kind()) << " from " << from;
        EXPECT_EQ(got[kBytes / 4], 0U) << "wrote past the end";
        std::uint64_t seen = 0;
        cuda::read_device(&seen, window->local() + signals + static_cast<std::uint64_t>(from) * 8,
                          8);
        EXPECT_EQ(seen, epoch);
      }
      EXPECT_EQ(transport->counters().bytes, ranks * kBytes);
      EXPECT_EQ(transport->counters().puts, ranks * 4);
      EXPECT_LE(transport->counters().copies, ranks * 4);
      team->barrier();
    }
    cuda::DeviceSmTransport books(TransportKind::kDirect, rank, window, 1);
    PutDescriptor data;
    data.peer = 0;
    data.bytes = 8;
    EXPECT_THROW(books.put(data), Error);
    books.count_direct(123);
    EXPECT_EQ(books.counters().direct_bytes, 123U);
    team->barrier();
  });
}

// ---- packets ----------------------------------------------------------------------------------

struct PacketRank {
  PacketRank(const TeamHandle& team, int device, std::uint64_t capacity)
      : rank(DeviceRank::create(team, device)), packets(rank, capacity) {
    words = DeviceBuffer<std::uint64_t>(std::vector<std::uint64_t>(32, 0));
    status = DeviceBuffer<std::uint32_t>(std::vector<std::uint32_t>{0});
    args.guard = rank->guard_view(21);
    args.packets = packets.view();
    args.epoch = words.data();
    args.barrier = words.data() + 16;
    args.status = status.data();
    rank->prepare(stream.handle);
  }
  std::shared_ptr<DeviceRank> rank;
  cuda::DevicePackets packets;
  DeviceBuffer<std::uint64_t> words;
  DeviceBuffer<std::uint32_t> status;
  cuda::PacketCalls args;
  cuda::OwnedStream stream;
};

std::uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
float from_bf16(std::uint16_t x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16);
}

// Input of a rank: random bf16 with exponents far enough apart that the order of the sum shows.
std::vector<std::uint16_t> random_bf16(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-6, 6);
  std::vector<std::uint16_t> out(count);
  for (auto& x : out) x = to_bf16(std::ldexp(normal(random), exponent(random)));
  return out;
}

void check_packets(const TeamHandle& team, PacketRank& x, std::uint64_t count, std::uint64_t inputs,
                   std::uint64_t calls, bool two_shot, std::uint32_t seed, int blocks) {
  calls = scaled(calls);
  inputs = std::min(inputs, calls);
  const std::size_t elements = count * 6;
  std::vector<std::vector<std::uint16_t>> all;
  for (int r = 0; r < team->size(); ++r) {
    all.push_back(random_bf16(elements * inputs, seed * 100 + static_cast<std::uint32_t>(r)));
  }
  DeviceBuffer<std::uint16_t> in(all[static_cast<std::size_t>(team->rank())]);
  DeviceBuffer<std::uint16_t> out(elements * inputs);
  out.fill(0xee);
  x.args.in = reinterpret_cast<const std::uint32_t*>(in.data());
  x.args.out = reinterpret_cast<std::uint32_t*>(out.data());
  x.args.inputs = inputs;
  x.args.calls = calls;
  x.args.count = count;
  x.args.two_shot = two_shot;
  team->barrier();
  PENSTOCK_CUDA_CHECK(cuda::launch_packet_calls(x.args, blocks, x.stream.handle));
  x.rank->track(x.stream.handle);
  x.stream.wait();
  std::uint32_t status = 0;
  cuda::read_device(&status, x.status.data(), sizeof(status));
  ASSERT_EQ(status, 0U);
  std::vector<std::uint16_t> got(elements * inputs);
  cuda::read_device(got.data(), out.data(), out.bytes());
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    float sum = from_bf16(all[0][i]);
    for (std::size_t r = 1; r < all.size(); ++r) sum += from_bf16(all[r][i]);
    if (got[i] != to_bf16(sum) && wrong++ == 0)
      ADD_FAILURE() << "element " << i << " of rank " << team->rank();
  }
  EXPECT_EQ(wrong, 0U);
}

TEST_P(FabricGpuTest, PacketAllReduceSumsInRankOrder) {
  run([&](const TeamHandle& team) {
    PacketRank x(team, device_of(team->rank()), 16 * 1024);
    std::uint32_t seed = 1;
    for (const std::uint64_t rows : {1, 2, 5, 8, 16}) {
      for (const bool two_shot : {false, true}) {
        const std::uint64_t count = rows * 1024;
        const int blocks = std::min<int>(
            static_cast<int>((count + cuda::kPacketThreads - 1) / cuda::kPacketThreads),
            x.rank->sms());
        check_packets(team, x, count, 4, 40, two_shot, seed++, blocks);
      }
    }
    // Widths that fill neither a packet row nor a slice evenly.
    check_packets(team, x, 7, 3, 30, false, seed++, 1);
    check_packets(team, x, 7, 3, 30, true, seed++, 1);
    check_packets(team, x, 1, 2, 30, true, seed++, 1);
  });
}

TEST_P(FabricGpuTest, PacketTagsWrapAndSweep) {
  // Across the tag's period and across a sweep of the mailboxes, one-shot and two-shot, with one
  // rank late.
  const std::uint64_t half = scaled(40) / 2;
  for (const std::uint64_t start : {kTagPeriod - half, 3 * kTagPeriod - half - 1,
                                    kSweepPeriod - half, 4 * kSweepPeriod - half}) {
    run([&](const TeamHandle& team) {
      PacketRank x(team, device_of(team->rank()), 2048);
      cuda::write_device(x.words.data(), &start, sizeof(start));
      if (team->rank() == 0) x.args.delay_ns = 3000;
      const int blocks = std::min(8, x.rank->sms());
      check_packets(team, x, 2048, 4, 40, false, 7, blocks);
      cuda::write_device(x.words.data(), &start, sizeof(start));
      std::uint64_t zero = 0;
      cuda::write_device(x.args.barrier, &zero, sizeof(zero));
      // Used epochs again on purpose: fresh mailboxes make that legal.
      for (int region = 0; region < 3; ++region) {
        cuda::zero_device(x.packets.window()->region(team->rank(), region),
                          x.packets.window()->layout().region(region).bytes);
      }
      team->barrier();
      check_packets(team, x, 2048, 4, 40, true, 8, blocks);
    });
  }
}

// From the first epoch, and from one whose next two sweep the mailboxes: there threads whose wait
// has failed must still come to the barriers of their block.
TEST_P(FabricGpuTest, PacketWaitsEndAtTheDeadline) {
  for (const std::uint64_t before : {std::uint64_t{0}, kSweepPeriod - 2}) {
    run(
        [&](const TeamHandle& team) {
          PacketRank x(team, device_of(team->rank()), 1024);
          cuda::write_device(x.words.data(), &before, sizeof(before));
          DeviceBuffer<std::uint16_t> in(random_bf16(6144, 3));
          DeviceBuffer<std::uint16_t> out(6144);
          out.fill(0xee);
          x.args.in = reinterpret_cast<const std::uint32_t*>(in.data());
          x.args.out = reinterpret_cast<std::uint32_t*>(out.data());
          x.args.count = 1024;
          x.args.calls = 3;
          team->barrier();
          if (team->rank() != 0) {
            PENSTOCK_CUDA_CHECK(cuda::launch_packet_calls(x.args, 4, x.stream.handle));
            x.rank->track(x.stream.handle);
            x.stream.wait();
            std::uint32_t status = 0;
            cuda::read_device(&status, x.status.data(), sizeof(status));
            EXPECT_NE(status, 0U);
            std::vector<std::uint16_t> got(6144);
            cuda::read_device(got.data(), out.data(), out.bytes());
            EXPECT_EQ(std::count(got.begin(), got.end(), 0xeeee),
                      6144);  // nothing derived was published
          }
          const auto start = std::chrono::steady_clock::now();
          while (!team->faulted() && std::chrono::steady_clock::now() - start <
                                         stretched(std::chrono::milliseconds(2000))) {
            std::this_thread::yield();
          }
          ASSERT_TRUE(team->faulted());
          EXPECT_EQ(team->fault()->peer, 0) << describe(*team->fault());
          team->rearm();
          // Tags of the aborted epochs are never used again: continue above them.
          const std::uint64_t floor = before + 10;
          cuda::write_device(x.words.data(), &floor, sizeof(floor));
          cuda::zero_device(x.args.barrier, sizeof(*x.args.barrier));
          cuda::zero_device(x.status.data(), 4);
          check_packets(team, x, 1024, 4, 50, false, 9, std::min(8, x.rank->sms()));
        },
        std::chrono::milliseconds(300));
  }
}

INSTANTIATE_TEST_SUITE_P(Placements, FabricGpuTest,
                         testing::Values(Placement{2, false}, Placement{4, false},
                                         Placement{8, false}, Placement{2, true},
                                         Placement{8, true}),
                         name_of);

TEST(FabricGpuLifeTest, TwoHundredTeamsLeakNoMemory) {
  ASSERT_GT(cuda::device_count(), 0) << cuda::unavailable_reason();
  const auto cycle = [] {
    run_local_team(2, [](const TeamHandle& team) {
      const auto window = Window::create(
          team, Layout("leak", "", {{"all", 0, 1 << 20, 8, Access::kAll, Access::kAll}}),
          cuda::device_window_backend(0));
      team->barrier();
    });
  };
  cycle();
  std::size_t before = 0;
  std::size_t after = 0;
  std::size_t total = 0;
  PENSTOCK_CUDA_CHECK(cudaMemGetInfo(&before, &total));
  for (std::uint64_t i = 0; i < scaled(200); ++i) cycle();
  PENSTOCK_CUDA_CHECK(cudaMemGetInfo(&after, &total));
  EXPECT_LE(before - std::min(before, after), 8U << 20);
}

}  // namespace
}  // namespace penstock
