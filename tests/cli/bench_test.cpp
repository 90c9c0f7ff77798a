// What benchmarks share: order statistics, turns, tables, plots, traces.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/bench/decode_report.h"
#include "cli/bench/plot.h"
#include "cli/bench/report.h"
#include "cli/bench/rounds.h"
#include "cli/bench/trace.h"

namespace penstock::bench {
namespace {

TEST(BenchQuantiles, AreValuesThatWereMeasured) {
  const Quantiles q = quantiles({5, 1, 4, 2, 3});
  EXPECT_EQ(q.samples, 5u);
  EXPECT_EQ(q.least_us, 1);
  EXPECT_EQ(q.median_us, 3);
  EXPECT_EQ(q.p10_us, 1);
  EXPECT_EQ(q.p90_us, 5);
  EXPECT_EQ(quantiles({7}).p90_us, 7);
  EXPECT_EQ(quantiles({}).samples, 0u);
}

TEST(BenchRounds, EveryVariantComesBehindEveryOtherAndWarmUpIsNotKept) {
  const Rounds rounds{3, 1, 20};
  std::vector<std::size_t> order;
  std::vector<int> kept(3, 0);
  rounds.run([&](std::size_t variant, bool counts) {
    order.push_back(variant);
    kept[variant] += counts ? 1 : 0;
  });
  ASSERT_EQ(order.size(), rounds.steps());
  EXPECT_EQ(kept, (std::vector<int>{20, 20, 20}));
  int behind[3][3] = {};
  for (std::size_t i = 0; i < order.size(); ++i) {
    EXPECT_EQ(order[i], order_of_round(3, static_cast<int>(i / 3))[i % 3]);
    if (i % 3 != 0) ++behind[order[i - 1]][order[i]];
  }
  for (std::size_t a = 0; a < 3; ++a) {
    for (std::size_t b = 0; b < 3; ++b) EXPECT_EQ(behind[a][b] > 2, a != b) << a << " " << b;
  }
}

TEST(BenchSamples, MedianByName) {
  Samples samples;
  const std::size_t a = samples.add("a");
  const std::size_t b = samples.add("b");
  for (const double us : {3.0, 1.0, 2.0}) samples.push(b, us);
  EXPECT_EQ(samples.median_us("b"), 2.0);
  EXPECT_EQ(samples.median_us("a"), 0.0);
  EXPECT_EQ(samples.median_us("c"), 0.0);
  EXPECT_EQ(samples.find("a"), a);
  EXPECT_EQ(samples.find("c"), samples.size());
}

TEST(BenchReport, LinesStartWithTheCommonKeys) {
  JsonLines lines(Json{{"bench", "x"}, {"machine", "\xff"}});
  lines.add({{"variant", "a"}});
  lines.add({{"variant", "b"}});
  const std::string& text = lines.text();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2);
  const auto first = nlohmann::json::parse(text.substr(0, text.find('\n')));
  EXPECT_EQ(first["bench"], "x");
  EXPECT_EQ(first["variant"], "a");
}

TEST(BenchReport, TableAligns) {
  Table table({"variant", "us"});
  table.add({"a", "1.0"});
  table.add({"longer name", "100.0"});
  EXPECT_EQ(table.text(), "variant         us\na              1.0\nlonger name  100.0\n");
}

TEST(BenchPlot, ScalesHoldTheData) {
  std::vector<PlotSeries> series;
  series_named(series, "a<b").points = {{16, 1.4}, {64, 1.6}, {32, -1}};
  series_named(series, "c").points = {{16, 0.9}};
  series_named(series, "c").points.emplace_back(64, 1.0);
  ASSERT_EQ(series.size(), 2u);
  const std::string svg =
      svg_of({"t", "tokens", "times", PlotUnit::kNumber, PlotScale::kFromZero}, series);
  EXPECT_NE(svg.find("a&lt;b"), std::string::npos);
  EXPECT_NE(svg.find(">64<"), std::string::npos);
  EXPECT_NE(svg.find(">0<"), std::string::npos);  // y begins at zero
  // The negative point is left out.
  const std::size_t first = svg.find("points=\"") + 8;
  const std::string points = svg.substr(first, svg.find('"', first) - first);
  EXPECT_EQ(std::count(points.begin(), points.end(), ','), 2);
  EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
}

TEST(BenchTrace, IsTheTraceEventFormat) {
  Trace trace;
  trace.name_process(1, "rank 1");
  trace.name_track({1, 2}, "tiles");
  trace.span({1, 2}, "tile 0", 10.5, 2.0, {{"rows", 128}});
  trace.instant({1, 3}, "arrived", 9.0);
  const auto document = nlohmann::json::parse(trace.text());
  const auto& events = document["traceEvents"];
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0]["args"]["name"], "rank 1");
  EXPECT_EQ(events[2]["ph"], "X");
  EXPECT_EQ(events[2]["ts"], 10.5);
  EXPECT_EQ(events[2]["dur"], 2.0);
  EXPECT_EQ(events[2]["args"]["rows"], 128);
  EXPECT_EQ(events[3]["ph"], "i");
  EXPECT_EQ(events[3]["tid"], 3);
}

// Two CTAs whose clocks have different origins, two layers of two stages.
TEST(DecodeReport, TraceAlignsClocksAndTheTableNamesWhatIsWrong) {
  decode::DecodeBenchOptions options;
  options.layers = 2;
  decode::DecodeBenchPoint point;
  point.rows = 1;
  point.grid = 2;
  point.bytes = 4484e3;  // 1 us
  point.single_us = {5.0};
  point.fused_us = {4.0};
  point.chain_us = {12.0};
  point.chain_launches = 14;
  point.us_per_clock = 0.5;
  point.stages = {{"input", 1.0, 1.5}, {"qkv_a", 2.0, 2.5}};
  point.events = {100, 102, 106, 7000, 7004, 7008, 106, 108, 112, 7008, 7010, 7014};
  const nlohmann::json trace = nlohmann::json::parse(decode_trace(options, point).text());
  double end = 0;
  int spans = 0;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    ++spans;
    if (event["name"] == "input" && event["args"]["layer"] == 0) {
      // Both CTAs leave their first stage at the origin.
      EXPECT_EQ(event["ts"].get<double>() + event["dur"].get<double>(), 0.0);
    }
    end = std::max(end, event["ts"].get<double>() + event["dur"].get<double>());
  }
  EXPECT_EQ(spans, 8);
  EXPECT_EQ(end, 5.0);

  EXPECT_EQ(decode_floor_us(point), 1.0);
  EXPECT_FALSE(decode_wrong(point));
  EXPECT_EQ(decode_line(options, point)["speedup_over_chain"], 3.0);
  EXPECT_FALSE(decode_line(options, point).contains("correct"));
  point.check_error = 0.5;
  EXPECT_TRUE(decode_wrong(point));
  EXPECT_FALSE(decode_line(options, point)["correct"].get<bool>());
  EXPECT_NE(decode_table(options, {&point, 1}).find("WRONG 5.0e-01"), std::string::npos);

  // Which experts changed places, and whether it was a near tie.
  point.flips = {{1, 3, {17}, {45}, 2e-4, 1e-4, 0.36}, {0, 2, {5, 6}, {7, 8}, 0.1, 0.2, 0.5}};
  const std::string table = decode_table(options, {&point, 1});
  EXPECT_NE(
      table.find("weight set 1, row 3: the kernel chose 17 for the chain's 45, 2.0e-04 apart"),
      std::string::npos)
      << table;
  EXPECT_NE(table.find("row error 3.6e-01: a near tie"), std::string::npos);
  EXPECT_NE(table.find("chose 5, 6 for the chain's 7, 8"), std::string::npos);
  EXPECT_NE(table.find("row error 5.0e-01: NO near tie"), std::string::npos);
  EXPECT_EQ(decode_line(options, point)["flips"][1]["kernel_only"], (std::vector<int>{5, 6}));
}

TEST(DecodeReport, GoalsAreThoseOfTheShape) {
  decode::DecodeBenchOptions options;
  options.shape.ranks = 8;
  decode::DecodeBenchPoint point;
  point.rows = 1;
  point.single_us = point.fused_us = {38.5};
  EXPECT_EQ(decode_line(options, point)["goal_us"], 38);
  EXPECT_FALSE(decode_line(options, point)["goal_met"].get<bool>());
  EXPECT_NE(decode_table(options, {&point, 1}).find("38 missed"), std::string::npos);
  options.shape.ranks = 2;
  EXPECT_EQ(decode_line(options, point)["goal_us"], 80);
  EXPECT_NE(decode_table(options, {&point, 1}).find("80 met"), std::string::npos);
  point.rows = 8;
  EXPECT_EQ(decode_line(options, point)["goal_us"], 330);
  point.rows = 2;
  EXPECT_FALSE(decode_line(options, point).contains("goal_us"));
  options.shape.ranks = 8;
  options.picks = 64;
  EXPECT_FALSE(decode_line(options, point).contains("goal_us"));
}

}  // namespace
}  // namespace penstock::bench
