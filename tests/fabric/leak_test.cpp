// Thousands of teams, windows and engines come and go; the process holds no more than before.
#include <gtest/gtest.h>

#include "fabric/resources.h"
#include "fabric/team_harness.h"
#include "penstock/core/error.h"
#include "penstock/fabric/all_reduce.h"
#include "penstock/fabric/transport.h"

namespace penstock::testing {
namespace {

void expect_same(const Resources& before, const Resources& after) {
  EXPECT_EQ(after.descriptors, before.descriptors);
  // An ended thread can still be listed for a moment when `before` is taken.
  EXPECT_LE(after.threads, before.threads);
  EXPECT_EQ(after.shared_mappings, before.shared_mappings);
  // Allocator arenas come with the first threads; thousands of leaked maps would show.
  // (A sanitizer's own maps grow.)
  if (!kSlowBuild) {
    EXPECT_LE(after.mappings, before.mappings + 16);
  }
}

TEST(LeakTest, ThreadTeamsComeAndGo) {
  const int cycles = kSlowBuild ? 200 : 3000;
  Resources before;
  for (int k = 0; k < cycles; ++k) {
    run_local_team(2, [](const TeamHandle& team) {
      AllReduce reduce(team, 8);
      const auto engine = make_cpu_transport(TransportKind::kCopyEngine, reduce.window());
      std::vector<float> data(8, 1.0f);
      reduce.run(data);
      expect(data[7] == 2.0f, "sum");
    });
    if (k == 20) before = resources();
  }
  expect_same(before, settled_resources(before));
}

TEST(LeakTest, ExceptionsLeakNothing) {
  const int cycles = kSlowBuild ? 50 : 500;
  Resources before;
  for (int k = 0; k < cycles; ++k) {
    EXPECT_THROW(run_local_team(3,
                                [&](const TeamHandle& team) {
                                  AllReduce reduce(team, 8);
                                  const auto engine = make_cpu_transport(TransportKind::kCopyEngine,
                                                                         reduce.window());
                                  if (team->rank() == k % 3) {
                                    throw Error(ErrorKind::kBackend, "in the middle");
                                  }
                                  std::vector<float> data(8);
                                  reduce.run(data);
                                  team->barrier();
                                }),
                 Error);
    if (k == 20) before = resources();
  }
  expect_same(before, settled_resources(before));
}

TEST(LeakTest, ProcessTeamsComeAndGo) {
  RunOptions options;
  options.size = 2;
  options.deadline = std::chrono::seconds(20);
  options.args.rounds = kSlowBuild ? 50 : 1000;
  const std::size_t before = entries("/dev/shm");
  auto ranks = start_ranks("cycle", options, free_port());
  for (auto& rank : ranks) EXPECT_EQ(rank.wait(std::chrono::seconds(250)), 0) << rank.output();
  EXPECT_EQ(entries("/dev/shm"), before);
}

}  // namespace
}  // namespace penstock::testing
