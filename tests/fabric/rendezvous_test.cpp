// How processes meet, and how they are told when they cannot.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <ctime>
#include <thread>

#include "fabric/team_harness.h"
#include "penstock/core/error.h"

namespace penstock::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

RankProcess start(int rank, int size, int port, milliseconds deadline = seconds(5)) {
  return start_rank({"window_reach", std::to_string(rank), std::to_string(size),
                     std::to_string(port), std::to_string(deadline.count()), "1", "1", "none"});
}

void expect_words(const RankProcess& process, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(process.output().find(word), std::string::npos)
        << "'" << word << "' in: " << process.output();
  }
}

TEST(RendezvousTest, OrderOfArrivalDoesNotMatter) {
  const int port = free_port();
  auto last = start(2, 3, port);
  std::this_thread::sleep_for(milliseconds(100));
  auto middle = start(1, 3, port);
  std::this_thread::sleep_for(milliseconds(100));
  auto first = start(0, 3, port);
  for (auto* rank : {&first, &middle, &last}) {
    EXPECT_EQ(rank->wait(seconds(30)), 0) << rank->output();
  }
}

TEST(RendezvousTest, AMissingRankIsNamedOnEveryOther) {
  const int port = free_port();
  auto zero = start(0, 4, port, milliseconds(3000));
  auto two = start(2, 4, port, milliseconds(3000));
  EXPECT_EQ(zero.wait(seconds(10)), 3);
  EXPECT_EQ(two.wait(seconds(10)), 3);
  expect_words(zero, {"FAULT peer=1", "2 of 4 ranks", "missing: rank 1, 3"});
  expect_words(two, {"FAULT peer="});
}

TEST(RendezvousTest, AMissingRankZeroIsNamed) {
  auto one = start(1, 2, free_port(), milliseconds(400));
  EXPECT_EQ(one.wait(seconds(10)), 3);
  expect_words(one, {"FAULT peer=0", "nobody listened"});
}

TEST(RendezvousTest, DifferentWorldSizesAreRefusedOnBothSides) {
  const int port = free_port();
  auto zero = start(0, 2, port);
  auto one = start(1, 3, port);
  EXPECT_EQ(zero.wait(seconds(10)), 4);
  EXPECT_EQ(one.wait(seconds(10)), 4);
  for (const auto* rank : {&zero, &one}) {
    expect_words(*rank, {"invalid_argument", "rank 1 says 3, rank 0 says 2"});
  }
}

TEST(RendezvousTest, ARankThatComesTwiceIsRefused) {
  const int port = free_port();
  auto zero = start(0, 3, port);
  auto one = start(1, 3, port);
  auto again = start(1, 3, port);
  EXPECT_EQ(zero.wait(seconds(10)), 4);
  EXPECT_EQ(one.wait(seconds(10)), 4);
  EXPECT_EQ(again.wait(seconds(10)), 4);
  for (const auto* rank : {&zero, &one, &again}) expect_words(*rank, {"came twice"});
}

class Listener {
 public:
  Listener() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof at;
    EXPECT_EQ(::bind(fd_.get(), reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
    EXPECT_EQ(::listen(fd_.get(), 8), 0);
    EXPECT_EQ(::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&at), &length), 0);
    port = ntohs(at.sin_port);
  }
  int port = 0;

 private:
  UniqueFd fd_;
};

TEST(RendezvousTest, APortThatIsTakenIsSaidSo) {
  const Listener other;
  auto zero = start(0, 2, other.port, milliseconds(3000));
  auto one = start(1, 2, other.port, milliseconds(3000));
  EXPECT_EQ(zero.wait(seconds(10)), 4);
  expect_words(zero, {"backend", "cannot listen at 127.0.0.1", "choose a free port"});
  // The stranger accepts and says nothing: rank 1 must not believe it, nor wait for ever.
  EXPECT_EQ(one.wait(seconds(10)), 3);
  expect_words(one, {"FAULT peer=0", "something answered"});
}

TEST(RendezvousTest, StrangersDoNotDisturb) {
  const int port = free_port();
  auto zero = start(0, 2, port, seconds(20));
  std::vector<UniqueFd> strangers;
  const std::string noise(200, '!');
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  at.sin_port = htons(static_cast<std::uint16_t>(port));
  const auto until = std::chrono::steady_clock::now() + seconds(10);
  while (strangers.size() < 2 && std::chrono::steady_clock::now() < until) {
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&at), sizeof at) != 0) {
      std::this_thread::sleep_for(milliseconds(5));
      continue;
    }
    EXPECT_EQ(::send(fd.get(), noise.data(), noise.size(), MSG_NOSIGNAL), 200);
    strangers.push_back(std::move(fd));
  }
  ASSERT_EQ(strangers.size(), 2u);
  auto one = start(1, 2, port, seconds(20));
  EXPECT_EQ(zero.wait(seconds(30)), 0) << zero.output();
  EXPECT_EQ(one.wait(seconds(30)), 0) << one.output();
}

TEST(RendezvousTest, AnAddressThatDoesNotResolveIsRefused) {
  TeamOptions options;
  options.rank = 0;
  options.size = 2;
  options.address = "no such host";
  options.port = 1;
  options.deadline = milliseconds(300);
  try {
    (void)connect_team(options);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("'no such host'"), std::string::npos);
  }
}

double cpu_seconds() {
  timespec now{};
  EXPECT_EQ(::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now), 0);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// poll() refuses more entries than the process may have descriptors. While it does, the watchers of
// a team must rest, and they must still end with the team.
TEST(RendezvousTest, AFailingPollNeitherBurnsACoreNorHoldsUpTheEnd) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP()
      << "UBSan, built in beside ASan, probes objects through pipes, and this test lets no "
         "descriptor be opened";
#endif
  const int port = free_port();
  std::vector<TeamHandle> teams(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      TeamOptions options;
      options.rank = r;
      options.size = 2;
      options.port = port;
      options.deadline = seconds(20);
      teams[static_cast<std::size_t>(r)] = connect_team(options);
    });
  }
  for (std::thread& thread : threads) thread.join();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit one = before;
  one.rlim_cur = 1;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &one), 0);
  std::this_thread::sleep_for(milliseconds(100));  // the polls under way end
  const double start = cpu_seconds();
  std::this_thread::sleep_for(milliseconds(400));
  const double burnt = cpu_seconds() - start;
  teams.clear();
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_LT(burnt, 0.1);
}

TEST(RendezvousTest, ATeamOfOneProcessNeedsNobody) {
  TeamOptions options;
  options.rank = 0;
  options.size = 1;
  const TeamHandle team = connect_team(options);
  EXPECT_EQ(team->source(), "flags");
  EXPECT_TRUE(team->in_process());
  scenarios().at("window_reach")(team, {});
  scenarios().at("pool")(team, {});
}

}  // namespace
}  // namespace penstock::testing
