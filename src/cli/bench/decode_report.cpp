#include "cli/bench/decode_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

#include "penstock/core/version.h"

namespace penstock::bench {
namespace {

Json times(const std::vector<double>& us, double floor_us) {
  Json j = Json::object();
  const Quantiles q = quantiles(us);
  add_times(j, q);
  j["fraction_of_floor"] = floor_us / q.median_us;
  return j;
}

// us a layer that the operator is to reach and aims at, one GPU, FP8, 2048 picks a row (issue
// "decode_layer").
struct Goal {
  int ranks, rows;
  double reach_us, aim_us;
};
constexpr Goal kGoals[] = {{8, 1, 38, 30}, {8, 2, 47, 40}, {8, 4, 66, 58},
                           {8, 8, 98, 88}, {2, 1, 80, 72}, {2, 8, 330, 300}};

const Goal* goal_of(const decode::DecodeBenchOptions& options, int rows) {
  const decode::DecodeShape& s = options.shape;
  const decode::DecodeShape glm5;
  if (s.hidden != glm5.hidden || s.q_lora != glm5.q_lora || s.heads != glm5.heads ||
      s.experts != glm5.experts || s.top_k != glm5.top_k || s.intermediate != glm5.intermediate ||
      options.picks != decode::kMaxPicks) {
    return nullptr;
  }
  for (const Goal& goal : kGoals) {
    if (goal.ranks == s.ranks && goal.rows == rows) return &goal;
  }
  return nullptr;
}

std::string flip_text(int rows, const decode::DecodeFlip& flip) {
  return fmt::format(
      "{} rows, weight set {}, row {}: the kernel chose {} for the chain's {}, {:.1e} apart in "
      "score + bias (scores differ by {:.1e} at most); row error {:.1e}: {}\n",
      rows, flip.set, flip.row, fmt::join(flip.kernel, ", "), fmt::join(flip.chain, ", "),
      flip.width, flip.score_error, flip.error,
      flip.width < decode::kNearTie ? "a near tie" : "NO near tie");
}

}  // namespace

double decode_floor_us(const decode::DecodeBenchPoint& point) {
  return point.bytes / kDecodeBandwidth * 1e6;
}

bool decode_wrong(const decode::DecodeBenchPoint& point) {
  return point.check_error >= 0 && !(point.check_error <= decode::kCheckBound);
}

Json decode_line(const decode::DecodeBenchOptions& options, const decode::DecodeBenchPoint& point) {
  const double floor = decode_floor_us(point);
  decode::DecodeShape shape = options.shape;
  shape.rows = point.rows;
  Json j;
  j["schema"] = 1;
  j["bench"] = "decode_layer";
  j["version"] = version();
  j["backend"] = "cuda";
  j["shape"] = decode::describe(shape);
  j["ranks"] = shape.ranks;
  j["rows"] = point.rows;
  j["picks"] = options.picks;
  j["context"] = options.context;
  j["layers"] = options.layers;
  j["weight_sets"] = options.sets;
  j["kv_bytes_per_row"] = decode::kv_row_bytes(shape.kv_format);
  j["weights"] = "fp8 128x128";
  j["gpus"] = options.gpus;
  j["all_reduce"] = options.gpus > 1  ? fmt::format("over {} shards", options.gpus)
                    : shape.ranks > 1 ? "packets of all ranks to itself"
                                      : "own packets";
  j["method"] = "CUDA graph of all layers, events; us a layer";
  j["grid"] = point.grid;
  j["ring_slots"] = point.ring_slots;
  j["launches"] = point.launches;
  j["distinct_experts"] = point.distinct_experts;
  j["bytes_per_layer"] = point.bytes;
  j["floor_us"] = floor;
  j["one_launch_a_layer"] = times(point.single_us, floor);
  j["all_layers_one_launch"] = times(point.fused_us, floor);
  if (!point.chain_us.empty()) {
    j["chain"] = times(point.chain_us, floor);
    j["chain"]["kernels_a_layer"] = point.chain_launches;
    j["speedup_over_chain"] =
        quantiles(point.chain_us).median_us / quantiles(point.fused_us).median_us;
  }
  if (const Goal* goal = goal_of(options, point.rows)) {
    j["goal_us"] = goal->reach_us;
    j["aim_us"] = goal->aim_us;
    j["goal_met"] = quantiles(point.fused_us).median_us <= goal->reach_us;
  }
  if (point.check_error >= 0) {
    j["worst_row_error"] = point.check_error;
    j["near_tied_rows"] = point.near_ties;
    // Not known where shards on several GPUs were compared with each other.
    if (point.narrowest_gap > 0 && std::isfinite(point.narrowest_gap)) {
      j["narrowest_gap"] = point.narrowest_gap;
    }
    j["correct"] = !decode_wrong(point);
    for (const decode::DecodeFlip& flip : point.flips) {
      j["flips"].push_back({{"weight_set", flip.set},
                            {"row", flip.row},
                            {"kernel_only", flip.kernel},
                            {"chain_only", flip.chain},
                            {"width", flip.width},
                            {"score_error", flip.score_error},
                            {"row_error", flip.error}});
    }
  }
  for (const decode::DecodeStageTime& stage : point.stages) {
    j["stages_us"][stage.name] = {{"mean_us", stage.mean_us}, {"slowest_cta_us", stage.slowest_us}};
  }
  return j;
}

std::string decode_table(const decode::DecodeBenchOptions& options,
                         std::span<const decode::DecodeBenchPoint> points) {
  std::string text = fmt::format(
      "{}; {} layers of {} weight sets, {} picks a row, FP8 128x128, cache rows of {} B; us a "
      "layer\n",
      decode::describe(options.shape), options.layers, options.sets, options.picks,
      decode::kv_row_bytes(options.shape.kv_format));
  if (options.gpus > 1) {
    text += fmt::format(
        "{} shards at once, all-reduces over these; time of the slowest; check: equal bits\n",
        options.gpus);
  } else if (options.shape.ranks > 1) {
    text += "the shard alone: all-reduces exchange the packets of all ranks with itself\n";
  }
  Table table({"rows", "MB", "floor", "launch a layer", "one launch", "goal", "fraction", "chain",
               "x", "experts", "check"});
  for (const decode::DecodeBenchPoint& p : points) {
    const double fused = quantiles(p.fused_us).median_us;
    const Goal* goal = goal_of(options, p.rows);
    const bool chain = !p.chain_us.empty();
    const double chain_us = chain ? quantiles(p.chain_us).median_us : 0;
    table.add(
        {fmt::format("{}", p.rows), fmt::format("{:.1f}", p.bytes / 1e6),
         fmt::format("{:.1f}", decode_floor_us(p)),
         fmt::format("{:.1f}", quantiles(p.single_us).median_us), fmt::format("{:.1f}", fused),
         goal == nullptr
             ? "-"
             : fmt::format("{:.0f} {}", goal->reach_us, fused <= goal->reach_us ? "met" : "missed"),
         fmt::format("{:.2f}", decode_floor_us(p) / fused),
         chain ? fmt::format("{:.1f} ({} kernels)", chain_us, p.chain_launches) : "-",
         chain ? fmt::format("{:.2f}", chain_us / fused) : "-",
         fmt::format("{:.1f}", p.distinct_experts),
         p.check_error < 0 ? "-"
                           : fmt::format("{} {:.1e}, {} ties", decode_wrong(p) ? "WRONG" : "ok",
                                         p.check_error, p.near_ties)});
  }
  text += table.text();
  for (const decode::DecodeBenchPoint& p : points) {
    for (const decode::DecodeFlip& flip : p.flips) text += flip_text(p.rows, flip);
  }
  if (points.empty() || points[0].stages.empty()) return text;
  std::vector<std::string> heads = {"stage, mean / slowest CTA"};
  for (const decode::DecodeBenchPoint& p : points) heads.push_back(fmt::format("{} rows", p.rows));
  Table stages(heads);
  for (std::size_t i = 0; i < points[0].stages.size(); ++i) {
    std::vector<std::string> cells = {points[0].stages[i].name};
    for (const decode::DecodeBenchPoint& p : points) {
      cells.push_back(fmt::format("{:.2f} / {:.2f}", p.stages[i].mean_us, p.stages[i].slowest_us));
    }
    stages.add(cells);
  }
  return text + "\n" + stages.text();
}

Trace decode_trace(const decode::DecodeBenchOptions& options,
                   const decode::DecodeBenchPoint& point) {
  Trace trace;
  const std::size_t stages = point.stages.size();
  trace.name_process(0, fmt::format("decode_layer, {} rows, rank {} of {}", point.rows,
                                    options.shape.rank, options.shape.ranks));
  for (int cta = 0; cta < point.grid; ++cta) {
    const Track track{0, cta};
    trace.name_track(track, fmt::format("CTA {}", cta));
    const auto events = [&](int layer) {
      return &point.events[(static_cast<std::size_t>(layer) * static_cast<std::size_t>(point.grid) +
                            static_cast<std::size_t>(cta)) *
                           (stages + 1)];
    };
    const std::int64_t origin = events(0)[1];
    for (int layer = 0; layer < options.layers; ++layer) {
      const std::int64_t* e = events(layer);
      for (std::size_t stage = 0; stage < stages; ++stage) {
        trace.span(track, point.stages[stage].name,
                   static_cast<double>(e[stage] - origin) * point.us_per_clock,
                   static_cast<double>(e[stage + 1] - e[stage]) * point.us_per_clock,
                   {{"layer", layer}});
      }
    }
  }
  return trace;
}

}  // namespace penstock::bench
