// Processes that die or stop at random moments: every survivor must raise a fault that names the
// lost rank within its deadline and a second, give back all it holds, and end.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <random>
#include <thread>

#include "fabric/resources.h"
#include "fabric/team_harness.h"

namespace penstock::testing {
namespace {

using std::chrono::milliseconds;

void trials(int count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::size_t shared_before = entries("/dev/shm");
  for (int trial = 0; trial < count; ++trial) {
    RunOptions options;
    options.size = 2 + static_cast<int>(random() % 3);
    options.deadline = milliseconds(kSlowBuild ? 4000 : 2500);
    options.args.seed = random();
    const int victim = static_cast<int>(random() % static_cast<std::uint64_t>(options.size));
    const bool kill = random() % 2 == 0;
    const auto moment = std::chrono::microseconds(random() % 150000);
    SCOPED_TRACE(fmt::format("trial {} seed {}: {} rank {} of {} after {} us", trial, seed,
                             kill ? "SIGKILL" : "SIGSTOP", victim, options.size, moment.count()));
    auto ranks = start_ranks("endless", options, free_port());
    for (auto& rank : ranks) {
      ASSERT_TRUE(rank.wait_for_output("READY\n", milliseconds(20000))) << rank.output();
    }
    std::this_thread::sleep_for(moment);
    auto& lost = ranks[static_cast<std::size_t>(victim)];
    lost.signal(kill ? SIGKILL : SIGSTOP);
    const auto start = std::chrono::steady_clock::now();
    const auto limit = options.deadline + milliseconds(1000);
    for (auto& rank : ranks) {
      if (&rank == &lost) continue;
      ASSERT_TRUE(rank.wait_for_output("FAULT ", milliseconds(20000))) << rank.output();
      EXPECT_LE(std::chrono::steady_clock::now() - start, limit) << rank.output();
      EXPECT_EQ(rank.wait(milliseconds(20000)), 3) << rank.output();
      EXPECT_NE(rank.output().find(fmt::format("FAULT peer={} ", victim)), std::string::npos)
          << rank.output();
      EXPECT_EQ(rank.output().find("LEAK"), std::string::npos) << rank.output();
      EXPECT_NE(rank.output().find("END\n"), std::string::npos) << rank.output();
    }
    if (!kill) {
      // Awake again, the stopped rank finds itself out of the team and ends by itself.
      lost.signal(SIGCONT);
      EXPECT_EQ(lost.wait(milliseconds(20000)), 3) << lost.output();
      EXPECT_EQ(lost.output().find("LEAK"), std::string::npos) << lost.output();
    }
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_EQ(entries("/dev/shm"), shared_before);
}

TEST(KillTest, TwentyTrials) { trials(kSlowBuild ? 6 : 20, 1); }
// The long form: fabric_kill_tests --gtest_also_run_disabled_tests --gtest_filter=*TwoHundred*
TEST(KillTest, DISABLED_TwoHundredTrials) { trials(200, 2); }

}  // namespace
}  // namespace penstock::testing
