// Everything that a team, a window and a transport promise, on threads and on processes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "fabric/team_harness.h"
#include "penstock/core/error.h"

namespace penstock::testing {
namespace {

struct Case {
  TeamKind kind;
  int size;
};
std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  return fmt::format("{}{}", info.param.kind == TeamKind::kThreads ? "Threads" : "Processes",
                     info.param.size);
}

class TeamTest : public ::testing::TestWithParam<Case> {
 protected:
  void run(const std::string& scenario, std::uint64_t rounds = 1, const std::string& option = {},
           std::chrono::milliseconds deadline = std::chrono::seconds(20)) {
    RunOptions options;
    options.size = GetParam().size;
    options.deadline = deadline;
    options.args.rounds = rounds;
    options.args.option = option;
    const auto ended = run_scenario(GetParam().kind, scenario, options);
    for (std::size_t r = 0; r < ended.size(); ++r) {
      EXPECT_EQ(ended[r], "") << scenario << ", rank " << r;
    }
  }
  // A short deadline for scenarios that wait for one to pass.
  static constexpr auto kSoon = std::chrono::milliseconds(kSlowBuild ? 4000 : 1500);
};

TEST_P(TeamTest, Collectives) { run("collectives", kSlowBuild ? 20 : 100); }
TEST_P(TeamTest, DescriptorsReachEveryRank) { run("descriptors", 20); }
TEST_P(TeamTest, WindowReachesEveryRank) { run("window_reach"); }
TEST_P(TeamTest, BadPutsAreRefused) { run("bad_puts"); }
TEST_P(TeamTest, PoolSharesAndRefuses) { run("pool"); }
TEST_P(TeamTest, AllReduceIsExactAndOrdered) { run("all_reduce", kSlowBuild ? 60 : 400); }

INSTANTIATE_TEST_SUITE_P(All, TeamTest,
                         ::testing::Values(Case{TeamKind::kThreads, 1}, Case{TeamKind::kThreads, 2},
                                           Case{TeamKind::kThreads, 3}, Case{TeamKind::kThreads, 8},
                                           Case{TeamKind::kProcesses, 2},
                                           Case{TeamKind::kProcesses, 4}),
                         name_of);

class PeersTest : public TeamTest {};

TEST_P(PeersTest, DifferentCallsAreRefusedOnEveryRank) { run("different_calls"); }
TEST_P(PeersTest, OneRefusalIsEverybodys) { run("refused_together"); }
TEST_P(PeersTest, DifferentLayoutsAreRefusedOnEveryRank) { run("layout_refused"); }
TEST_P(PeersTest, OneBadArgumentIsRefusedOnEveryRank) { run("all_reduce_refused"); }
TEST_P(PeersTest, TagsSurviveTheirWrap) { run("tag_wrap", 30); }
TEST_P(PeersTest, TwoInstancesAtOnce) { run("two_instances", kSlowBuild ? 50 : 300); }
TEST_P(PeersTest, AnAbsentRankIsNamedEverywhereAndRearmRepairs) {
  run("absent_then_rearm", 3, "copy_engine", kSoon);
  run("absent_then_rearm", 2, "sm", kSoon);
  run("absent_then_rearm", 2, "direct", kSoon);
}
TEST_P(PeersTest, AFailedCopyIsEverybodysFault) { run("engine_fails"); }
TEST_P(PeersTest, AStalledEngineFillsTheRingAndIsReported) { run("engine_stalls", 1, {}, kSoon); }
TEST_P(PeersTest, CloseWithAStuckPeerRaisesAndKeepsTheMemory) { run("stuck_close", 1, {}, kSoon); }
TEST_P(PeersTest, WhoeverWaitsForALeaverFailsAtOnce) {
  run("leaver", 1, {}, std::chrono::milliseconds(kSlowBuild ? 4000 : 2000));
}
TEST_P(PeersTest, RearmNamesWhoDoesNotCome) { run("rearm_needs_all", 1, {}, kSoon); }

INSTANTIATE_TEST_SUITE_P(All, PeersTest,
                         ::testing::Values(Case{TeamKind::kThreads, 2}, Case{TeamKind::kThreads, 4},
                                           Case{TeamKind::kProcesses, 2},
                                           Case{TeamKind::kProcesses, 3}),
                         name_of);

TEST(LocalTeamTest, SizesOutsideTheRangeAreRefused) {
  EXPECT_THROW((void)make_local_teams(0), Error);
  EXPECT_THROW((void)make_local_teams(kMaxRanks + 1), Error);
  LocalTeamOptions negative;
  negative.deadline = std::chrono::nanoseconds(-1);
  EXPECT_THROW((void)make_local_teams(1, negative), Error);
}

TEST(LocalTeamTest, TheCauseIsRethrownNotItsConsequence) {
  try {
    run_local_team(3, [](const TeamHandle& team) {
      if (team->rank() == 2) throw Error(ErrorKind::kUnsupported, "the cause");
      team->barrier();
    });
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "the cause");
  }
}

TEST(LocalTeamTest, MissingRanksAreListed) {
  LocalTeamOptions options;
  options.deadline = std::chrono::milliseconds(100);
  const auto teams = make_local_teams(4, options);
  try {
    teams[1]->barrier();
    FAIL();
  } catch (const Fault& fault) {
    EXPECT_NE(std::string(fault.what()).find("missing: rank 0, 2, 3"), std::string::npos)
        << fault.what();
    EXPECT_EQ(fault.record().rank, 1);
    EXPECT_GE(fault.record().waited_ns, 100'000'000u);
  }
  EXPECT_THROW(teams[0]->check(), Fault);
}

// Rank 2 waits for 1, 1 waits for 0: whichever deadline passes first, rank 0 is to blame.
TEST(LocalTeamTest, BlameGoesToTheEndOfTheChain) {
  const auto teams = make_local_teams(3);
  teams[1]->set_waiting_for(0);
  EXPECT_EQ(teams[2]->blame(1, std::chrono::seconds(1)), 0);
  teams[1]->set_waiting_for(-1);
  EXPECT_EQ(teams[2]->blame(1, std::chrono::seconds(1)), 1);
  teams[1]->set_waiting_for(2);  // a circle has no end
  EXPECT_EQ(teams[2]->blame(1, std::chrono::seconds(1)), 1);
}

TEST(LocalTeamTest, TheFirstCauseWins) {
  const auto teams = make_local_teams(2);
  FaultRecord first;
  first.rank = 0;
  first.op = 1;
  FaultRecord second;
  second.rank = 1;
  second.op = 2;
  EXPECT_EQ(teams[0]->raise(first).op, 1);
  EXPECT_EQ(teams[1]->raise(second).op, 1);
  EXPECT_EQ(teams[1]->fault()->op, 1);
  EXPECT_EQ(teams[0]->fault()->op, 1);
  EXPECT_NE(teams[0]->fault()->valid, 0u);
}

}  // namespace
}  // namespace penstock::testing
