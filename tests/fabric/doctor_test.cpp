#include "penstock/fabric/doctor.h"

#include <gtest/gtest.h>

#include <mutex>

#include "penstock/core/error.h"
#include "penstock/fabric/link_bench.h"

namespace penstock {
namespace {

// A CPU transport that can lie.
class Liar final : public Transport {
 public:
  enum class Lie { kMovesNothing, kCountsNothing };
  Liar(std::unique_ptr<Transport> honest, Lie lie) : honest_(std::move(honest)), lie_(lie) {}
  TransportKind kind() const noexcept override { return honest_->kind(); }
  const std::shared_ptr<Window>& window() const noexcept override { return honest_->window(); }
  void put(const PutDescriptor& put) override {
    PutDescriptor done = put;
    if (lie_ == Lie::kMovesNothing) {
      claimed_ += done.bytes;
      done.bytes = 0;
    }
    honest_->put(done);
  }
  void flush() override { honest_->flush(); }
  void quiet() override { honest_->quiet(); }
  void count_direct(std::uint64_t bytes) noexcept override { honest_->count_direct(bytes); }
  TransportCounters counters() const noexcept override {
    TransportCounters out;
    if (lie_ == Lie::kMovesNothing) out.bytes = claimed_;
    return out;
  }

 private:
  std::unique_ptr<Transport> honest_;
  Lie lie_;
  std::uint64_t claimed_ = 0;
};

std::vector<TransportReport> run(int ranks, const FabricBackend& backend) {
  std::vector<TransportReport> out;
  std::mutex mutex;
  run_local_team(ranks, [&](const TeamHandle& team) {
    SelfTestOptions options;
    options.bytes = 4096;
    auto mine = self_test(team, backend, options);
    const std::scoped_lock lock(mutex);
    if (!out.empty()) {
      EXPECT_EQ(out.size(), mine.size());
      EXPECT_EQ(out[0].reason, mine[0].reason);  // the same report everywhere
    }
    out = std::move(mine);
  });
  return out;
}

TEST(SelfTest, AllTransportsMoveBytesBetweenAllPairs) {
  for (const int ranks : {1, 2, 4}) {
    const auto reports = run(ranks, cpu_fabric_backend());
    ASSERT_EQ(reports.size(), 3u);
    for (const TransportReport& report : reports) {
      EXPECT_TRUE(report.ok) << report.reason;
      EXPECT_EQ(report.pairs.size(),
                ranks == 1 ? 1u : static_cast<std::size_t>(ranks * (ranks - 1)));
      EXPECT_EQ(report.asked_bytes, report.pairs.size() * 3 * 4096);
      EXPECT_EQ(report.moved_bytes, report.asked_bytes);
    }
  }
}

TEST(SelfTest, ATransportThatMovesNothingDoesNotPass) {
  for (const auto lie : {Liar::Lie::kMovesNothing, Liar::Lie::kCountsNothing}) {
    FabricBackend backend = cpu_fabric_backend();
    backend.transports = {TransportKind::kSm};
    backend.make_transport = [lie](TransportKind kind, std::shared_ptr<Window> window) {
      return std::make_unique<Liar>(make_cpu_transport(kind, std::move(window)), lie);
    };
    const auto reports = run(2, backend);
    ASSERT_EQ(reports.size(), 1u);
    EXPECT_FALSE(reports[0].ok);
    EXPECT_NE(reports[0].reason.find(lie == Liar::Lie::kMovesNothing
                                         ? "was wrong when the signal was seen"
                                         : "counted 0 of 12288 bytes"),
              std::string::npos)
        << reports[0].reason;
  }
}

TEST(SelfTest, NothingToTestIsNoSuccess) {
  FabricBackend backend = cpu_fabric_backend();
  backend.transports.clear();
  EXPECT_THROW((void)run(1, backend), Error);
  run_local_team(1, [](const TeamHandle& team) {
    SelfTestOptions options;
    options.rounds = 0;
    EXPECT_THROW((void)self_test(team, cpu_fabric_backend(), options), Error);
    options.rounds = 1;
    options.bytes = 12;
    EXPECT_THROW((void)self_test(team, cpu_fabric_backend(), options), Error);
  });
}

TEST(LinkBench, MeasuresEveryTransportInBothDirections) {
  run_local_team(3, [](const TeamHandle& team) {
    LinkBenchOptions options;
    options.min_bytes = 4096;
    options.max_bytes = 16384;
    options.samples = 3;
    const auto points = bench_link(team, cpu_fabric_backend(), options);
    ASSERT_EQ(points.size(), 3u * 3u * 2u);
    for (const LinkPoint& point : points) {
      EXPECT_TRUE(point.correct);
      EXPECT_GT(point.time.median_us, 0);
      EXPECT_LE(point.time.p10_us, point.time.p90_us);
      EXPECT_EQ(point.moved_bytes, point.bytes * 6);  // 3 samples, 3 to warm up
    }
    const auto reduces = bench_all_reduce(team, 96, 3);
    EXPECT_EQ(reduces.size(), 10u);
  });
  EXPECT_THROW(
      run_local_team(
          1, [](const TeamHandle& team) { (void)bench_link(team, cpu_fabric_backend(), {}); }),
      Error);
}

}  // namespace
}  // namespace penstock
