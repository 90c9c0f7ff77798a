// Rounds of put and wait with random delays, reordering across peers, contents and sizes that
// change every round, and epochs that pass 2^32: a hundred thousand in all in a Release build.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "fabric/team_harness.h"

namespace penstock::testing {
namespace {

struct Case {
  TeamKind kind;
  int size;
  const char* transport;
  std::uint64_t rounds;
};
std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  return fmt::format("{}{}_{}", info.param.kind == TeamKind::kThreads ? "Threads" : "Processes",
                     info.param.size, info.param.transport);
}

class StressTest : public ::testing::TestWithParam<Case> {};

TEST_P(StressTest, NeverStaleNeverTorn) {
  const Case& test = GetParam();
  RunOptions options;
  options.size = test.size;
  options.deadline = std::chrono::seconds(60);
  options.args.rounds = kSlowBuild ? test.rounds / 50 : test.rounds;
  options.args.seed = 20261130 + test.rounds;
  options.args.option = test.transport;
  const auto ended = run_scenario(test.kind, "stress", options);
  for (std::size_t r = 0; r < ended.size(); ++r) EXPECT_EQ(ended[r], "") << "rank " << r;
}

INSTANTIATE_TEST_SUITE_P(All, StressTest,
                         ::testing::Values(Case{TeamKind::kThreads, 2, "copy_engine", 10000},
                                           Case{TeamKind::kThreads, 2, "sm", 24000},
                                           Case{TeamKind::kThreads, 2, "direct", 22000},
                                           Case{TeamKind::kThreads, 3, "copy_engine", 8000},
                                           Case{TeamKind::kThreads, 4, "sm", 4000},
                                           Case{TeamKind::kThreads, 5, "direct", 3000},
                                           Case{TeamKind::kThreads, 8, "copy_engine", 2000},
                                           Case{TeamKind::kProcesses, 2, "copy_engine", 10000},
                                           Case{TeamKind::kProcesses, 2, "direct", 10000},
                                           Case{TeamKind::kProcesses, 4, "sm", 5000},
                                           Case{TeamKind::kProcesses, 8, "copy_engine", 2000}),
                         name_of);

}  // namespace
}  // namespace penstock::testing
