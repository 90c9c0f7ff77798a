// The operator a2a_gemm on GPUs beside NCCL, cuBLASLt and the GEMM alone: one rank a GPU, or
// several that share one. JSON lines to --out (stdout otherwise), a table on stderr.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>

#include "cli/bench/cublaslt_baseline.h"
#include "cli/bench/report.h"
#include "cli/bench/rounds.h"
#include "core/cuda/check.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/memory.h"
#include "ops/a2a_gemm/bench.h"
#include "penstock/core/error.h"

namespace penstock::bench {
namespace {

using namespace a2a_gemm;

struct Settings {
  std::int32_t hidden = 8192;
  std::vector<std::int32_t> sequences{8192, 16384, 65536};
  std::vector<std::string> formats{"bf16", "fp8"};
  std::vector<std::string> variants;
  int ranks = 0;
  std::string cublaslt;
  std::string out;
  std::string commit;
  BenchOptions bench;
};

class CublasLt final : public DenseBaseline {
 public:
  CublasLt(const std::string& path, std::int64_t m, std::int64_t n, std::int64_t k, Format format)
      : gemm_(path, m, n, k,
              format == Format::kBf16 ? DenseFormat::kBf16 : DenseFormat::kBlockScaledFp8) {}
  void run(const void* a, const float* a_scales, const void* b, const float* b_scales, void* d,
           Stream stream) override {
    gemm_.run(a, a_scales, b, b_scales, d, static_cast<cudaStream_t>(stream.handle));
  }

 private:
  DenseGemm gemm_;
};

double median_of(const BenchResult& result, BenchVariant variant) {
  for (const BenchTiming& t : result.timings) {
    if (t.variant == variant) return quantiles(t.us).median_us;
  }
  return 0.0;
}

void report(const Settings& s, const BenchOptions& o, std::int32_t sequence,
            const BenchResult& result, std::ostream& out) {
  const double gemm = median_of(result, BenchVariant::kGemm);
  const double nccl = std::max(median_of(result, BenchVariant::kNccl), 0.0);
  const double nccl_dense = median_of(result, BenchVariant::kNcclDense);
  const double best_nccl =
      nccl_dense > 0.0 ? (nccl > 0.0 ? std::min(nccl, nccl_dense) : nccl_dense) : nccl;
  std::cerr << fmt::format("{}{} hidden {} sequence {} ranks {}{}{}: {}; differing {} ({}){}\n",
                           o.mirror ? "mirror, " : "", to_string(o.shape.format), s.hidden,
                           sequence, o.shape.ranks, result.shared_gpu ? " on one GPU" : "",
                           o.graph ? " graph" : "", describe(result.config), result.differing,
                           result.compared,
                           result.left_out.empty() ? "" : "; left out " + result.left_out);
  for (const BenchTiming& t : result.timings) {
    const Quantiles times = quantiles(t.us);
    Json line{
        {"bench", "a2a_gemm_operator"},
        {"commit", s.commit},
        {"machine", result.machine},
        {"driver", result.driver},
        {"format", to_string(o.shape.format)},
        {"hidden", s.hidden},
        {"sequence", sequence},
        {"ranks", o.shape.ranks},
        {"ranks_share_gpu", result.shared_gpu},
        {"graph", o.graph},
        {"mirror", o.mirror},
        {"row_block_rows", result.config.row_block_rows},
        {"band", result.config.band},
        {"fuse_chosen", result.config.fuse},
        {"variant", to_string(t.variant)},
        {"method", "interleaved rounds, device barrier, cuda events, L2 scrubbed, slowest rank"},
        {"wire_bytes", result.wire_bytes},
        {"differing", result.differing},
        {"nccl", result.nccl}};
    add_times(line, times);
    line["tflops"] = result.flop / times.median_us * 1e-6;
    std::string note = fmt::format("{:5.0f} TFLOPS", result.flop / times.median_us * 1e-6);
    if (gemm > 0.0) {
      line["over_gemm"] = times.median_us / gemm;
      note += fmt::format("  {:.3f} x gemm", times.median_us / gemm);
    }
    if (best_nccl > 0.0) {
      line["speedup_over_nccl"] = best_nccl / times.median_us;
      note += fmt::format("  {:.3f} x nccl's speed", best_nccl / times.median_us);
    }
    out << line.dump() << "\n";
    std::cerr << fmt::format("  {:13} {:9.1f} us (p10 {:.1f} p90 {:.1f})  {}\n",
                             to_string(t.variant), times.median_us, times.p10_us, times.p90_us,
                             note);
  }
  out.flush();
}

int run(Settings& s) {
  const int gpus = cuda::device_count();
  require(gpus > 0, ErrorKind::kUnsupported, [&] { return cuda::unavailable_reason(); });
  if (s.ranks == 0) s.ranks = std::max(2, gpus);
  for (const std::string& name : s.variants) {
    const std::size_t before = s.bench.variants.size();
    for (int v = 0; v < kBenchVariants; ++v) {
      const auto variant = static_cast<BenchVariant>(v);
      if (to_string(variant) == name) s.bench.variants.push_back(variant);
    }
    require(s.bench.variants.size() > before, ErrorKind::kInvalidArgument,
            [&] { return fmt::format("variant '{}' is not known", name); });
  }
  s.bench.dense = [&s](std::int64_t m, std::int64_t n, std::int64_t k, Format format) {
    return std::make_unique<CublasLt>(s.cublaslt, m, n, k, format);
  };
  std::ofstream file;
  if (!s.out.empty()) file.open(s.out, std::ios::app);
  std::ostream& out = s.out.empty() ? std::cout : file;
  std::int64_t differing = 0;
  for (const std::string& format : s.formats) {
    require(format == "bf16" || format == "fp8", ErrorKind::kInvalidArgument,
            [&] { return fmt::format("format '{}'; bf16 and fp8 are known", format); });
    for (const std::int32_t sequence : s.sequences) {
      BenchOptions o = s.bench;
      // The mirror's K is whole, its N a rank's share.
      const std::int32_t share = s.hidden / s.ranks;
      o.shape =
          even_shape(s.ranks, sequence / s.ranks, o.mirror ? s.hidden : share,
                     o.mirror ? share : s.hidden, format == "bf16" ? Format::kBf16 : Format::kFp8);
      validate(o.shape);
      run_local_team(s.ranks,
                     [&](const TeamHandle& team) {
                       const int device = team->rank() % gpus;
                       const cuda::ScopedDevice scope(device);
                       const BenchResult result = gpu_bench_a2a_gemm(team, device, o);
                       if (team->rank() != 0) return;
                       report(s, o, sequence, result, out);
                       differing += result.differing;
                     },
                     {.deadline = std::chrono::seconds(20)});
    }
  }
  return differing == 0 ? 0 : 1;
}

}  // namespace
}  // namespace penstock::bench

int main(int argc, char** argv) {
  penstock::cuda::prepare_process();
  penstock::bench::Settings s;
  CLI::App app("a2a_gemm over GPUs, beside NCCL, cuBLASLt and the GEMM alone");
  app.add_option("--hidden", s.hidden, "N, and K over all ranks");
  app.add_option("--seq", s.sequences, "rows of all ranks")->delimiter(',');
  app.add_option("--ranks", s.ranks, "0: the GPUs, at least two");
  app.add_option("--format", s.formats, "bf16, fp8")->delimiter(',');
  app.add_option("--variant", s.variants, "names of the table; default: all")->delimiter(',');
  app.add_option("--rounds", s.bench.rounds, "measured rounds");
  app.add_option("--row-block", s.bench.row_block_rows, "rows announced together; 0: chosen");
  app.add_option("--copy-ctas", s.bench.copy_ctas, "SMs that copy in variant sm");
  app.add_flag("--mirror", s.bench.mirror, "the GEMM whose result leaves");
  app.add_flag("--graph", s.bench.graph, "replay graphs");
  app.add_option("--nccl", s.bench.nccl, "path of libnccl.so.2");
  app.add_option("--cublaslt", s.cublaslt, "path of libcublasLt.so.13");
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
