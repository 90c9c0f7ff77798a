// The operator moe_stage2 on GPUs beside its floors and NCCL: one rank a GPU, or several that share
// one. JSON lines to --out (stdout otherwise), a table on stderr.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "core/cuda/check.h"
#include "fabric/cuda/driver.h"
#include "ops/moe_stage2/bench.h"
#include "penstock/core/error.h"
#include "penstock/ops/moe_stage2/heuristics.h"

namespace penstock::bench {
namespace {

using namespace moe_stage2;
using Json = nlohmann::json;

constexpr double kCopyEngineGbps = 378.0;  // 32 MB copies between two H200
constexpr double kMemoryGbps = 4400.0;

struct Model {
  const char* name;
  std::int32_t hidden, intermediate, top_k;
};
constexpr Model kModels[] = {
    {"glm5", 6144, 2048, 8}, {"v4-flash", 4096, 2048, 6}, {"h7168", 7168, 2048, 8}};

struct Settings {
  std::string model = "glm5";
  std::vector<std::int64_t> tokens{4096};
  std::vector<double> remote{-1.0};
  std::vector<std::string> variants;
  std::string wire = "fp8";
  int ranks = 0;
  int experts_per_rank = 32;
  double slack = 1.5;
  std::string out;
  std::string commit;
  StageBenchOptions bench;
};

double quantile(std::vector<double> v, double q) {
  std::sort(v.begin(), v.end());
  return v[static_cast<std::size_t>(q * static_cast<double>(v.size() - 1) + 0.5)];
}

const StageTiming* find(const StageBench& b, StageVariant v) {
  for (const StageTiming& t : b.timings) {
    if (t.variant == v) return &t;
  }
  return nullptr;
}

void report(const Settings& s, const StageBenchOptions& o, const StageBench& b, std::ostream& out,
            std::string& table) {
  const StageTiming* gemm = find(b, StageVariant::kGemm);
  const StageTiming* combine = find(b, StageVariant::kCombine);
  const StageTiming* nccl = find(b, StageVariant::kNccl);
  const double floor = gemm != nullptr && combine != nullptr
                           ? quantile(gemm->us, 0.5) + quantile(combine->us, 0.5)
                           : 0.0;
  table += fmt::format(
      "{} T {} P {}{} remote {} {} slack {} spilled {} wire {:.1f} MB{}: differing {}\n", s.model,
      o.shape.max_tokens_per_rank, o.shape.ranks, b.shared_gpu ? " on one GPU" : "",
      o.remote_fraction, s.wire, o.shape.row_slack, b.spilled_rows, b.wire_bytes * 1e-6,
      o.graph ? " graph" : "", b.differing_rows);
  for (const StageTiming& t : b.timings) {
    const double median = quantile(t.us, 0.5);
    Json line{
        {"bench", "moe_stage2_operator"},
        {"commit", s.commit},
        {"machine", b.machine},
        {"driver", b.driver},
        {"shape", s.model},
        {"hidden", o.shape.hidden},
        {"intermediate", o.shape.intermediate},
        {"experts_per_rank", o.shape.experts_per_rank()},
        {"ranks", o.shape.ranks},
        {"ranks_share_gpu", b.shared_gpu},
        {"top_k", o.shape.top_k},
        {"tokens_per_rank", o.shape.max_tokens_per_rank},
        {"remote_fraction", o.remote_fraction},
        {"row_slack", o.shape.row_slack},
        {"wire", s.wire},
        {"graph", o.graph},
        {"tiles_per_chunk",
         o.tiles_per_chunk > 0 ? o.tiles_per_chunk : choose_tiles_per_chunk(o.shape)},
        {"variant", to_string(t.variant)},
        {"method", "interleaved rounds, device barrier, cuda events, L2 scrubbed, slowest rank"},
        {"samples", t.us.size()},
        {"median_us", median},
        {"p10_us", quantile(t.us, 0.1)},
        {"p90_us", quantile(t.us, 0.9)},
        {"rows", b.rows},
        {"tiles", b.tiles},
        {"wire_bytes", b.wire_bytes},
        {"wire_floor_us", b.wire_bytes / (kCopyEngineGbps * 1e3)},
        {"spilled_rows", b.spilled_rows},
        {"differing_rows", b.differing_rows},
        {"transport_bytes", t.per_call.bytes},
        {"direct_bytes", t.per_call.direct_bytes},
        {"puts", t.per_call.puts},
        {"copies", t.per_call.copies},
        {"nccl", b.nccl}};
    std::string note;
    if (t.variant == StageVariant::kGemm) {
      line["tflops"] = b.flop / median * 1e-6;
      note = fmt::format("{:.0f} TFLOPS", b.flop / median * 1e-6);
    } else if (t.variant == StageVariant::kCombine) {
      line["gbps"] = b.combine_bytes / median * 1e-3;
      line["fraction_of_floor"] = b.combine_bytes / (kMemoryGbps * 1e3) / median;
      note = fmt::format("{:.0f} GB/s", b.combine_bytes / median * 1e-3);
    } else if (t.variant != StageVariant::kPlan && floor > 0.0) {
      line["floor_us"] = floor;
      line["over_floor"] = median / floor;
      note = fmt::format("{:.3f} x floor", median / floor);
      if (nccl != nullptr) {
        line["speedup_over_nccl"] = quantile(nccl->us, 0.5) / median;
        note += fmt::format("  {:.2f} x nccl", quantile(nccl->us, 0.5) / median);
      }
      if (t.per_call.puts > 0)
        note += fmt::format("  {}/{} puts/copies", t.per_call.puts, t.per_call.copies);
    }
    out << line.dump() << "\n";
    table += fmt::format("  {:11} {:9.1f} us (p10 {:.1f} p90 {:.1f})  {}\n", to_string(t.variant),
                         median, quantile(t.us, 0.1), quantile(t.us, 0.9), note);
  }
}

int run(Settings& s) {
  const auto* model = std::find_if(std::begin(kModels), std::end(kModels),
                                   [&](const Model& m) { return s.model == m.name; });
  require(model != std::end(kModels) && (s.wire == "fp8" || s.wire == "bf16"),
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format("shape '{}' or wire '{}': glm5, v4-flash, h7168 and fp8, bf16 exist",
                               s.model, s.wire);
          });
  for (const std::string& name : s.variants) {
    for (int v = 0; v < kStageVariants; ++v) {
      if (to_string(static_cast<StageVariant>(v)) == name) {
        s.bench.variants.push_back(static_cast<StageVariant>(v));
      }
    }
  }
  const int gpus = cuda::device_count();
  require(gpus > 0, ErrorKind::kUnsupported, [] { return cuda::unavailable_reason(); });
  const int ranks = s.ranks > 0 ? s.ranks : gpus;
  std::ofstream file;
  if (!s.out.empty()) file.open(s.out, std::ios::app);
  std::ostream& out = s.out.empty() ? std::cout : file;
  std::string table;
  bool right = true;
  for (const double remote : s.remote) {
    for (const std::int64_t tokens : s.tokens) {
      StageBenchOptions o = s.bench;
      o.remote_fraction = remote;
      o.shape.ranks = ranks;
      o.shape.experts = ranks * s.experts_per_rank;
      o.shape.top_k = model->top_k;
      o.shape.hidden = model->hidden;
      o.shape.intermediate = model->intermediate;
      o.shape.max_tokens_per_rank = tokens;
      o.shape.row_slack = s.slack;
      o.shape.wire = s.wire == "fp8" ? WireFormat::kFp8 : WireFormat::kBf16;
      std::vector<StageBench> results(static_cast<std::size_t>(ranks));
      run_local_team(ranks, [&](const TeamHandle& team) {
        results[static_cast<std::size_t>(team->rank())] =
            gpu_bench_stage2(team, team->rank() % gpus, o);
      });
      report(s, o, results[0], out, table);
      out.flush();
      right = right && results[0].differing_rows == 0;
    }
  }
  std::cerr << table;
  return right ? 0 : 1;
}

}  // namespace
}  // namespace penstock::bench

int main(int argc, char** argv) {
  penstock::cuda::prepare_process();
  penstock::bench::Settings s;
  CLI::App app("the operator moe_stage2 beside its floors and NCCL");
  app.add_option("--shape", s.model, "glm5, v4-flash, h7168");
  app.add_option("--tokens", s.tokens, "tokens per rank")->delimiter(',');
  app.add_option("--remote-fraction", s.remote, "of a token's slots; -1: experts equally likely")
      ->delimiter(',');
  app.add_option("--variants", s.variants,
                 "of copy_engine,sm,direct,unfused,nccl,gemm,combine,plan")
      ->delimiter(',');
  app.add_option("--wire", s.wire, "fp8 or bf16");
  app.add_option("--ranks", s.ranks, "0: one a GPU");
  app.add_option("--experts-per-rank", s.experts_per_rank, "experts of one rank");
  app.add_option("--row-slack", s.slack, "reservation over the even share");
  app.add_option("--rounds", s.bench.rounds, "measured rounds");
  app.add_option("--tiles-per-chunk", s.bench.tiles_per_chunk, "0: by the shape");
  app.add_option("--copy-ctas", s.bench.copy_ctas, "of transport sm; 0: by the shape");
  app.add_flag("--graph", s.bench.graph, "capture each call and replay it");
  app.add_option("--nccl", s.bench.nccl, "NCCL's library");
  app.add_option("--out", s.out, "file that JSON lines are appended to");
  app.add_option("--commit", s.commit, "written into each line");
  CLI11_PARSE(app, argc, argv);
  try {
    return penstock::bench::run(s);
  } catch (const penstock::Error& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
