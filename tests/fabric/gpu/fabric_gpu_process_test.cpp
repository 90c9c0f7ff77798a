// Ranks that are processes and share GPUs: the whole suite of fabric_gpu_test.cpp in 2, 4 and 8 of
// them, and processes that are killed or stopped at random moments.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/cuda/check.h"
#include "fabric/cuda/driver.h"
#include "fabric/gpu/exchange_rank.h"
#include "fabric/rank_process.h"
#include "fabric/resources.h"

namespace penstock {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using test::ExchangeRank;
using test::number_from;
using testing::RankProcess;

constexpr milliseconds kStartLimit{60000};

RankProcess start(const std::string& filter, int rank, int ranks, int port,
                  std::vector<std::string> more = {}) {
  more.insert(more.end(), {fmt::format("RANK={}", rank), fmt::format("WORLD_SIZE={}", ranks),
                           fmt::format("MASTER_PORT={}", port)});
  return RankProcess("/proc/self/exe", {"--gtest_filter=" + filter}, more);
}

// ---- the whole suite --------------------------------------------------------------------------

class FabricGpuProcessSuiteTest : public ::testing::TestWithParam<int> {};

// Each process runs every test of the suite as one rank, in step with the others.
TEST_P(FabricGpuProcessSuiteTest, WholeSuite) {
  ASSERT_GT(cuda::device_count(), 0) << cuda::unavailable_reason();
  const int ranks = GetParam();
  const std::string filter = fmt::format("Placements/FabricGpuTest.*/{}RanksOneGpu", ranks);
  std::vector<RankProcess> processes;
  for (int r = 0; r < ranks; ++r) {
    processes.push_back(start(filter, r, ranks, 20000 + ranks * 1000,
                              {fmt::format("PENSTOCK_GPU_TEST_PROCESSES={}", ranks)}));
  }
  for (RankProcess& process : processes) {
    EXPECT_EQ(process.wait(milliseconds(240000)), 0) << process.output();
    const auto tests = ::testing::UnitTest::GetInstance();
    int expected = 0;
    for (int i = 0; i < tests->total_test_suite_count(); ++i) {
      const auto* suite = tests->GetTestSuite(i);
      if (std::string(suite->name()) != "Placements/FabricGpuTest") continue;
      for (int k = 0; k < suite->total_test_count(); ++k) {
        expected += std::string(suite->GetTestInfo(k)->name())
                        .ends_with(fmt::format("/{}RanksOneGpu", ranks));
      }
    }
    EXPECT_GT(expected, 10);
    EXPECT_NE(process.output().find(fmt::format("{} tests from 1 test suite ran.", expected)),
              std::string::npos)
        << process.output();
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, FabricGpuProcessSuiteTest, ::testing::Values(2, 4, 8),
                         ::testing::PrintToStringParamName());

// ---- killed and stopped processes -------------------------------------------------------------

constexpr milliseconds kDeadline{2000};

// One trial as one rank: exchanges until a fault, says whom it names, and puts everything away.
void play_until_a_fault(int trial) {
  TeamOptions options;
  options.rank = number_from("RANK", -1);
  options.size = number_from("WORLD_SIZE", -1);
  options.local_rank = options.rank;
  options.address = "127.0.0.1";
  options.port = number_from("MASTER_PORT", 0) + trial;
  options.deadline = std::chrono::seconds(60);  // to find each other; below, the trial's own
  { connect_team(options)->barrier(); }
  options.port += 1000;
  options.deadline = kDeadline;
  const TeamHandle team = connect_team(options);
  try {
    ExchangeRank x(team, 0, {static_cast<std::uint64_t>(team->size()), 1, 4096}, true);
    fmt::print("READY {}\n", trial);
    std::fflush(stdout);
    while (!team->faulted()) {
      x.launch(10);
      x.stream.wait();
      if (x.take_result().stopped == 0) team->barrier();
    }
    team->check();
  } catch (const Fault&) {
    const FaultRecord record = team->fault().value();
    fmt::print("FAULT {} peer={} cause={}\n", trial, record.peer, record.cause);
    std::fflush(stdout);
    return;
  }
  FAIL() << "ended without a fault";
}

// Started by the test below, once a rank.
TEST(FabricGpuProcessRank, Plays) {
  const int first = number_from("PENSTOCK_GPU_TEST_FIRST", -1);
  if (first < 0) GTEST_SKIP() << "one rank of FabricGpuKillTest, which starts it";
  const cuda::ScopedDevice scope(0);
  PENSTOCK_CUDA_CHECK(test::load_exchange_kernels());
  // What the driver opens for good is not counted.
  run_local_team(1, [](const TeamHandle& team) { ExchangeRank(team, 0, {1, 1, 4096}, true); });
  const testing::Resources before = testing::resources();
  for (int trial = first; trial < number_from("PENSTOCK_GPU_TEST_TRIALS", 0); ++trial) {
    play_until_a_fault(trial);
    const testing::Resources after = testing::settled_resources(before);
    EXPECT_EQ(after.descriptors, before.descriptors) << "trial " << trial;
    EXPECT_LE(after.threads, before.threads) << "trial " << trial;
    EXPECT_EQ(after.shared_mappings, before.shared_mappings) << "trial " << trial;
  }
}

// A team that loses a rank in every trial: killed and stopped in turn. The stopped one wakes up
// afterwards and finds itself out of the team; a killed one is replaced.
void lose_ranks(int ranks, int trials, int port, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto start_from = [&](int rank, int trial) {
    return start("FabricGpuProcessRank.Plays", rank, ranks, port,
                 {fmt::format("PENSTOCK_GPU_TEST_FIRST={}", trial),
                  fmt::format("PENSTOCK_GPU_TEST_TRIALS={}", trials)});
  };
  std::vector<std::unique_ptr<RankProcess>> team;
  for (int r = 0; r < ranks; ++r) team.push_back(std::make_unique<RankProcess>(start_from(r, 0)));
  for (int trial = 0; trial < trials; ++trial) {
    const auto victim = static_cast<std::size_t>(random() % static_cast<std::uint64_t>(ranks));
    const bool killed = trial % 2 == 0;
    const auto moment = std::chrono::microseconds(random() % 200000);
    SCOPED_TRACE(fmt::format("trial {}: {} rank {} of {} after {} us", trial,
                             killed ? "SIGKILL" : "SIGSTOP", victim, ranks, moment.count()));
    for (auto& rank : team) {
      ASSERT_TRUE(rank->wait_for_output(fmt::format("READY {}\n", trial), kStartLimit))
          << rank->output();
    }
    std::this_thread::sleep_for(moment);
    team[victim]->signal(killed ? SIGKILL : SIGSTOP);
    const auto lost_at = steady_clock::now();
    for (std::size_t r = 0; r < team.size(); ++r) {
      if (r == victim) continue;
      ASSERT_TRUE(team[r]->wait_for_output(fmt::format("FAULT {} ", trial), kStartLimit))
          << team[r]->output();
      EXPECT_LE(steady_clock::now() - lost_at, kDeadline + milliseconds(1000));
      EXPECT_NE(team[r]->output().find(fmt::format("FAULT {} peer={} ", trial, victim)),
                std::string::npos)
          << team[r]->output();
    }
    if (!killed) {
      team[victim]->signal(SIGCONT);
    } else if (trial + 1 < trials) {
      team[victim] = std::make_unique<RankProcess>(start_from(static_cast<int>(victim), trial + 1));
    } else {
      EXPECT_EQ(team[victim]->wait(kStartLimit), 128 + SIGKILL);
      team.erase(team.begin() + static_cast<std::ptrdiff_t>(victim));
    }
  }
  for (auto& rank : team) EXPECT_EQ(rank->wait(kStartLimit), 0) << rank->output();
}

TEST(FabricGpuKillTest, SurvivorsNameWhoWasKilledOrStopped) {
  ASSERT_GT(cuda::device_count(), 0) << cuda::unavailable_reason();
  const int trials = number_from("PENSTOCK_GPU_TEST_TRIALS", 4);
  std::size_t free_before = 0;
  std::size_t free_after = 0;
  std::size_t total = 0;
  PENSTOCK_CUDA_CHECK(cudaMemGetInfo(&free_before, &total));
  std::vector<std::thread> teams;
  int team = 0;
  for (const int ranks : {2, 2, 3}) {
    teams.emplace_back([=] {
      lose_ranks(ranks, trials, 26000 + team * 100, 20261201 + static_cast<std::uint64_t>(team));
    });
    ++team;
  }
  for (std::thread& thread : teams) thread.join();
  PENSTOCK_CUDA_CHECK(cudaMemGetInfo(&free_after, &total));
  EXPECT_LE(free_before - std::min(free_before, free_after), 8U << 20);
}

}  // namespace
}  // namespace penstock
