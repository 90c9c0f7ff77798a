// moe_stage2's parts on one GPU, each alone: grouped GEMM (bf16 and fp8 rows, with and without
// chunk counters), combine, plan, and cuBLASLt's block-scaled dense GEMM of the same M, N, K beside
// them. Variants take turns inside each round, so that clocks and power treat them alike; medians
// over rounds. Weights (0.4 GB and more) and rows exceed the L2, so every launch starts cold. JSON
// lines on stdout or --out, a table on stderr.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>

#include "cli/bench/cublaslt_baseline.h"
#include "cli/bench/report.h"
#include "cli/bench/rounds.h"
#include "core/cuda/device_buffer.h"
#include "device_fill.h"
#include "ops/moe_stage2/cuda/combine_sm90.h"
#include "ops/moe_stage2/cuda/gemm_maps.h"
#include "ops/moe_stage2/cuda/plan_sm90.h"
#include "penstock/core/error.h"
#include "penstock/ops/moe_stage2/reference.h"
#include "penstock/ops/moe_stage2/routing.h"

namespace penstock::bench {
namespace {

using namespace moe_stage2;
using cuda::DeviceBuffer;
using moe_stage2::kMaxRanks;  // a plan's, not the fabric's

// Ceilings measured on the H200 that docs/moe-stage2.md names.
constexpr double kBlockScaledTflops = 1324.0;  // cuBLASLt, 8192^3
constexpr double kMemoryGbps = 4400.0;

struct Model {
  const char* name;
  std::int32_t hidden, intermediate, experts, top_k;
};
constexpr Model kModels[] = {
    {"glm5", 6144, 2048, 256, 8}, {"v4-flash", 4096, 2048, 256, 6}, {"h7168", 7168, 2048, 256, 8}};

struct Variant {
  std::string name;
  std::function<void(cudaStream_t)> run;
  double flop = 0.0;
  double bytes = 0.0;  // compulsory device memory traffic
  std::vector<double> us;
};

struct Options {
  std::vector<std::string> models{"glm5"};
  std::vector<std::int64_t> tokens{4096};
  int rounds = 20;
  int ranks = 8;
  int ctas = 0;
  int group_sms = 0;
  std::string pattern = "balanced";
  std::string cublaslt;
  std::string out;
  std::string commit;
  bool baseline = true;
};

Pattern find_pattern(const std::string& name) {
  for (int p = 0; p < kPatternCount; ++p) {
    if (to_string(static_cast<Pattern>(p)) == name) return static_cast<Pattern>(p);
  }
  throw_error(ErrorKind::kInvalidArgument, fmt::format("unknown routing pattern '{}'", name));
}

// Everything of one (model, tokens) on the device.
struct Setup {
  Shape shape;
  std::int64_t rows = 0;      // valid
  std::int64_t capacity = 0;  // padded
  DeviceBuffer<unsigned char> act, weight;
  DeviceBuffer<float> act_scales, weight_scales, token_weight;
  DeviceBuffer<std::int32_t> expert_rows, words, scratch;
  DeviceBuffer<RowOrigin> origin;
  DeviceBuffer<RowPlace> place, inverse, home;
  DeviceBuffer<std::uint32_t> counters, flags, next_step;
  DeviceBuffer<unsigned char> runs, landing;
  DeviceBuffer<std::uint16_t> dense, out;
  PlanInputs plan_in;
  PlanOutputs plan_out;
  GroupedGemmMaps maps{};
};

// What the operator has the plan do besides.
PlanExtras plan_extras(const Setup& s) {
  PlanExtras extras;
  extras.chunk_counters = s.counters.data();
  extras.counters = s.plan_in.tile_capacity;
  extras.inverse = s.home.data();
  extras.slots = static_cast<std::int64_t>(s.home.size());
  extras.rank = 0;
  return extras;
}

Setup make_setup(const Model& model, std::int64_t tokens, const Options& options) {
  Setup s;
  s.shape.ranks = options.ranks;
  s.shape.experts = model.experts;
  s.shape.top_k = model.top_k;
  s.shape.hidden = model.hidden;
  s.shape.intermediate = model.intermediate;
  s.shape.max_tokens_per_rank = tokens;
  // Skewed patterns are measured with all rows inside the reservation: the spill path is another
  // benchmark's.
  s.shape.row_slack = options.pattern == "balanced" ? 1.5 : options.ranks;
  const Routing routing = make_routing(s.shape, find_pattern(options.pattern), 2026);
  const std::int64_t reserved = reserved_rows(s.shape);

  std::vector<RowPlace> inverse(static_cast<std::size_t>(tokens * model.top_k));
  SourceRows mine;
  for (int source = 0; source < options.ranks; ++source) {
    SourceRows rows = rows_at(routing, source);
    HostPlan plan(s.shape, rows.tiles());
    const PlanOutputs& o = plan.plan(rows);
    require(*o.fault == kPlanWhole, ErrorKind::kBackend,
            [&] { return describe_plan_fault(*o.fault); });
    const std::int64_t count = o.prefix[*o.tile_count * kMaxRanks];
    require(count <= reserved, ErrorKind::kUnsupported, [] {
      return std::string("routing spills; this benchmark measures the reserved path");
    });
    (void)invert_on_host(o.row_table, count, source, reserved, inverse.data(),
                         static_cast<std::int64_t>(inverse.size()));
    if (source == 0) mine = std::move(rows);
  }
  s.rows = mine.rows();
  s.capacity = mine.tiles() * kTileRows;
  const auto capacity = static_cast<std::size_t>(s.capacity);
  const auto k = static_cast<std::size_t>(model.intermediate);
  const auto h = static_cast<std::size_t>(model.hidden);
  const auto experts = static_cast<std::size_t>(s.shape.experts_per_rank());
  s.act = DeviceBuffer<unsigned char>(capacity * k);
  s.weight = DeviceBuffer<unsigned char>(experts * h * k);
  s.act_scales = DeviceBuffer<float>(capacity * (k / 128));
  s.weight_scales = DeviceBuffer<float>(experts * (h / 128) * (k / 128));
  s.token_weight = DeviceBuffer<float>(inverse.size());
  PENSTOCK_CUDA_CHECK(fill_e4m3_normal(s.act.data(), s.act.size(), 1, nullptr));
  PENSTOCK_CUDA_CHECK(fill_e4m3_normal(s.weight.data(), s.weight.size(), 2, nullptr));
  PENSTOCK_CUDA_CHECK(
      fill_uniform(s.act_scales.data(), s.act_scales.size(), 0.005f, 0.02f, 3, nullptr));
  PENSTOCK_CUDA_CHECK(
      fill_uniform(s.weight_scales.data(), s.weight_scales.size(), 1e-4f, 4e-4f, 4, nullptr));
  PENSTOCK_CUDA_CHECK(
      fill_uniform(s.token_weight.data(), s.token_weight.size(), 0.1f, 0.5f, 5, nullptr));

  s.expert_rows = DeviceBuffer<std::int32_t>(mine.expert_rows);
  s.origin = DeviceBuffer<RowOrigin>(mine.origin);
  s.inverse = DeviceBuffer<RowPlace>(inverse);
  s.home = DeviceBuffer<RowPlace>(inverse.size());
  const auto tiles = static_cast<std::size_t>(mine.tiles());
  const std::int64_t stride = worst_rows_per_pair(s.shape);
  s.words = DeviceBuffer<std::int32_t>(2 + 3 * tiles + (tiles + 1) * kMaxRanks +
                                       static_cast<std::size_t>(stride) * kMaxRanks);
  s.words.fill(0);
  s.place = DeviceBuffer<RowPlace>(capacity);
  s.scratch = DeviceBuffer<std::int32_t>(tiles * kMaxRanks);
  s.counters = DeviceBuffer<std::uint32_t>(tiles * kCounterStride);
  s.flags = DeviceBuffer<std::uint32_t>(tiles * kCounterStride);
  s.next_step = DeviceBuffer<std::uint32_t>(1);
  s.next_step.fill(0);
  std::int32_t* next = s.words.data();
  s.plan_out.fault = next++;
  s.plan_out.tile_count = next++;
  s.plan_out.tile_expert = next;
  s.plan_out.tile_rows = next + tiles;
  s.plan_out.tile_mate = next + 2 * tiles;
  s.plan_out.prefix = next + 3 * tiles;
  s.plan_out.row_table = next + 3 * tiles + (tiles + 1) * kMaxRanks;
  s.plan_out.row_table_stride = stride;
  s.plan_out.place = s.place.data();
  s.plan_in.expert_rows = s.expert_rows.data();
  s.plan_in.origin = s.origin.data();
  s.plan_in.experts = s.shape.experts_per_rank();
  s.plan_in.ranks = s.shape.ranks;
  s.plan_in.top_k = s.shape.top_k;
  s.plan_in.reserved = reserved;
  s.plan_in.tile_capacity = mine.tiles();

  const auto most = static_cast<std::size_t>(wire_row_bytes(model.hidden, WireFormat::kBf16));
  s.runs = DeviceBuffer<unsigned char>(static_cast<std::size_t>(options.ranks * reserved) * most);
  s.landing =
      DeviceBuffer<unsigned char>(static_cast<std::size_t>(options.ranks * reserved) * most);
  PENSTOCK_CUDA_CHECK(
      fill_wire_rows(s.landing.data(),
                     static_cast<std::size_t>(options.ranks * reserved) * most /
                         static_cast<std::size_t>(wire_row_bytes(model.hidden, WireFormat::kFp8)),
                     wire_row_bytes(model.hidden, WireFormat::kFp8), model.hidden, 6, nullptr));
  s.dense = DeviceBuffer<std::uint16_t>(static_cast<std::size_t>(s.rows + 16) * h);
  s.out = DeviceBuffer<std::uint16_t>(static_cast<std::size_t>(tokens) * h);
  s.maps = make_gemm_maps(s.act.data(), s.capacity, s.weight.data(), s.shape.experts_per_rank(),
                          model.hidden, model.intermediate);
  PENSTOCK_CUDA_CHECK(
      launch_plan_sm90(s.plan_in, s.plan_out, s.scratch.data(), plan_extras(s), nullptr));
  PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
  return s;
}

RunBases bases_of(const Setup& s, unsigned char* memory, WireFormat wire) {
  RunBases bases;
  bases.row_bytes = wire_row_bytes(s.shape.hidden, wire);
  for (int r = 0; r < s.shape.ranks; ++r) {
    bases.base[r] = memory + r * reserved_rows(s.shape) * bases.row_bytes;
  }
  return bases;
}

GroupedGemmArgs gemm_args(const Setup& s, WireFormat wire) {
  GroupedGemmArgs args;
  args.act_scales = s.act_scales.data();
  args.act_scale_stride = s.capacity;
  args.weight_scales = s.weight_scales.data();
  args.hidden = s.shape.hidden;
  args.k_blocks = s.shape.intermediate / kScaleBlock;
  args.tile_count = s.plan_out.tile_count;
  args.tile_expert = s.plan_out.tile_expert;
  args.tile_rows = s.plan_out.tile_rows;
  args.tile_mate = s.plan_out.tile_mate;
  args.place = s.place.data();
  args.next_step = s.next_step.data();
  args.tiles_per_chunk = 16;
  args.chunk_epoch = 1;
  args.runs = bases_of(s, s.runs.data(), wire);
  return args;
}

CombineArgs combine_args(const Setup& s, WireFormat wire) {
  CombineArgs args;
  args.runs = bases_of(s, s.landing.data(), wire);
  args.inverse = s.inverse.data();
  args.weight = s.token_weight.data();
  args.out = s.out.data();
  args.tokens = static_cast<std::int32_t>(s.shape.max_tokens_per_rank);
  args.top_k = s.shape.top_k;
  args.hidden = s.shape.hidden;
  return args;
}

// The batch in two groups of tokens: the combine of the first, on `sms` SMs, beside the GEMM of the
// second on the others. All rows at home, no protocol: the most that groups could win.
class TwoGroups {
 public:
  TwoGroups(const Model& model, std::int64_t tokens, const Options& options, int sms)
      : first_(make_setup(model, tokens / 2, options)),
        second_(make_setup(model, tokens / 2, options)),
        pause_(std::size_t{8} << 20),
        sms_(sms) {
    PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&side_, cudaStreamNonBlocking));
    for (cudaEvent_t& event : events_) {
      PENSTOCK_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
  }
  ~TwoGroups() {
    for (cudaEvent_t event : events_) (void)cudaEventDestroy(event);
    (void)cudaStreamDestroy(side_);
  }
  TwoGroups(const TwoGroups&) = delete;
  TwoGroups& operator=(const TwoGroups&) = delete;

  void run(WireFormat wire, int ctas, cudaStream_t on) {
    PENSTOCK_CUDA_CHECK(
        launch_grouped_gemm_sm90(gemm_args(first_, wire), first_.maps, wire, ctas, on));
    PENSTOCK_CUDA_CHECK(cudaEventRecord(events_[0], on));
    PENSTOCK_CUDA_CHECK(cudaStreamWaitEvent(side_, events_[0]));
    // The GEMM comes first to its pairs of SMs.
    PENSTOCK_CUDA_CHECK(cudaMemsetAsync(pause_.data(), 0, pause_.bytes(), side_));
    PENSTOCK_CUDA_CHECK(launch_combine_sm90(combine_args(first_, wire), wire, sms_, side_, true));
    PENSTOCK_CUDA_CHECK(cudaEventRecord(events_[1], side_));
    PENSTOCK_CUDA_CHECK(
        launch_grouped_gemm_sm90(gemm_args(second_, wire), second_.maps, wire, ctas - sms_, on));
    PENSTOCK_CUDA_CHECK(cudaStreamWaitEvent(on, events_[1]));
    PENSTOCK_CUDA_CHECK(launch_combine_sm90(combine_args(second_, wire), wire, ctas, on));
  }

 private:
  Setup first_, second_;
  DeviceBuffer<unsigned char> pause_;
  int sms_;
  cudaStream_t side_ = nullptr;
  cudaEvent_t events_[2] = {};
};

// Largest relative error (to the row's f64 norm over the sampled columns) of the rows that the last
// GEMM wrote.
double sample_error(const Setup& s, WireFormat wire, const GroupedGemmArgs& args) {
  std::mt19937_64 random(99);
  const auto k = static_cast<std::size_t>(s.shape.intermediate);
  const auto place = s.place.download();
  const auto act_scales = s.act_scales.download();
  const auto weight_scales = s.weight_scales.download();
  std::vector<std::int32_t> expert(static_cast<std::size_t>(s.capacity / kTileRows));
  PENSTOCK_CUDA_CHECK(
      cudaMemcpy(expert.data(), s.plan_out.tile_expert, expert.size() * 4, cudaMemcpyDeviceToHost));
  double worst = 0.0;
  std::vector<unsigned char> bytes(static_cast<std::size_t>(args.runs.row_bytes));
  std::vector<E4M3> a(k);
  std::vector<E4M3> w(k);
  for (int sample = 0; sample < 24;) {
    const std::size_t row = random() % place.size();
    if (place[row].run < 0) continue;
    ++sample;
    const std::int32_t e = expert[row / kTileRows];
    PENSTOCK_CUDA_CHECK(cudaMemcpy(bytes.data(), args.runs.address(place[row]), bytes.size(),
                                   cudaMemcpyDeviceToHost));
    PENSTOCK_CUDA_CHECK(cudaMemcpy(a.data(), s.act.data() + row * k, k, cudaMemcpyDeviceToHost));
    double error = 0.0;
    double norm = 0.0;
    for (int i = 0; i < 48; ++i) {
      const auto column =
          static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(s.shape.hidden));
      PENSTOCK_CUDA_CHECK(
          cudaMemcpy(w.data(),
                     s.weight.data() +
                         (static_cast<std::size_t>(e) * static_cast<std::size_t>(s.shape.hidden) +
                          static_cast<std::size_t>(column)) *
                             k,
                     k, cudaMemcpyDeviceToHost));
      double exact = 0.0;
      for (std::size_t b = 0; b < k / 128; ++b) {
        double block = 0.0;
        for (std::size_t x = 128 * b; x < 128 * b + 128; ++x) {
          block += static_cast<double>(a[x].to_float()) * static_cast<double>(w[x].to_float());
        }
        const std::size_t scale_row =
            static_cast<std::size_t>(e) * static_cast<std::size_t>(s.shape.hidden / 128) +
            static_cast<std::size_t>(column / 128);
        exact += block *
                 static_cast<double>(act_scales[b * static_cast<std::size_t>(s.capacity) + row]) *
                 static_cast<double>(weight_scales[scale_row * (k / 128) + b]);
      }
      const double value =
          static_cast<double>(read_row(bytes.data(), s.shape.hidden, wire, column));
      error += (value - exact) * (value - exact);
      norm += exact * exact;
    }
    const double relative = std::sqrt(error / norm);
    if (!(relative <= worst)) worst = relative;  // NaN counts as the worst
  }
  return worst;
}

int measure(const Options& options) {
  int device = 0;
  PENSTOCK_CUDA_CHECK(cudaGetDevice(&device));
  cuda::require_sm90(device);
  cudaDeviceProp properties{};
  PENSTOCK_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  const int ctas = options.ctas > 0 ? options.ctas : properties.multiProcessorCount;
  PENSTOCK_CUDA_CHECK(load_grouped_gemm_sm90());
  PENSTOCK_CUDA_CHECK(load_combine_sm90());
  std::ofstream file;
  if (!options.out.empty()) file.open(options.out, std::ios::app);
  std::ostream& json_out = options.out.empty() ? std::cout : file;
  cudaStream_t stream = nullptr;
  PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  DeviceBuffer<unsigned char> scrub(std::size_t{256} << 20);
  bool correct = true;

  for (const std::string& model_name : options.models) {
    const auto* model = std::find_if(std::begin(kModels), std::end(kModels),
                                     [&](const Model& m) { return model_name == m.name; });
    require(model != std::end(kModels), ErrorKind::kInvalidArgument, [&] {
      return fmt::format("unknown shape '{}'; glm5, v4-flash and h7168 are known", model_name);
    });
    for (const std::int64_t tokens : options.tokens) {
      Setup s = make_setup(*model, tokens, options);
      const double flop = 2.0 * static_cast<double>(s.rows) * model->hidden * model->intermediate;
      std::vector<Variant> variants;
      std::unique_ptr<BlockScaledGemm> dense;
      if (options.baseline) {
        try {
          // Rounded up to 16 rows, which cuBLASLt asks for; the rate counts the rows alone.
          dense = std::make_unique<BlockScaledGemm>(options.cublaslt, (s.rows + 15) / 16 * 16,
                                                    model->hidden, model->intermediate);
          variants.push_back({"cublaslt_dense",
                              [&](cudaStream_t on) {
                                dense->run(s.act.data(), s.act_scales.data(), s.weight.data(),
                                           s.weight_scales.data(), s.dense.data(), on);
                              },
                              flop,
                              0.0,
                              {}});
        } catch (const Error& error) {
          std::cerr << "no cuBLASLt baseline: " << error.what() << "\n";
        }
      }
      const double operand_bytes =
          static_cast<double>(s.rows) * model->intermediate * (1.0 + 4.0 / 128) +
          static_cast<double>(s.weight.bytes() + s.weight_scales.bytes());
      for (const WireFormat wire : {WireFormat::kBf16, WireFormat::kFp8}) {
        for (const bool counted : {false, true}) {
          GroupedGemmArgs a = gemm_args(s, wire);
          if (counted) {
            a.chunk_counters = s.counters.data();
            a.chunk_flags = s.flags.data();
          }
          const std::string name = fmt::format(
              "gemm_{}{}", wire == WireFormat::kBf16 ? "bf16" : "fp8", counted ? "_counted" : "");
          const Setup* setup = &s;
          variants.push_back(
              {name,
               [a, setup, wire, ctas](cudaStream_t on) {
                 PENSTOCK_CUDA_CHECK(launch_grouped_gemm_sm90(a, setup->maps, wire, ctas, on));
               },
               flop,
               operand_bytes + static_cast<double>(s.rows) * static_cast<double>(a.runs.row_bytes),
               {}});
          variants.back().run(nullptr);
          PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
          const double error = sample_error(s, wire, a);
          const bool good = error < (wire == WireFormat::kBf16 ? 1e-2 : 5e-2);
          correct = correct && good;
          std::cerr << fmt::format("check {} {} tokens {}: sampled relative error {:.2e} {}\n",
                                   model->name, name, tokens, error, good ? "ok" : "WRONG");
        }
      }
      for (const WireFormat wire : {WireFormat::kFp8, WireFormat::kBf16}) {
        const CombineArgs c = combine_args(s, wire);
        const int sms = properties.multiProcessorCount;
        const double bytes =
            static_cast<double>(tokens) *
            (model->top_k * (static_cast<double>(c.runs.row_bytes) + 12.0) + 2.0 * model->hidden);
        variants.push_back({wire == WireFormat::kFp8 ? "combine_fp8" : "combine_bf16",
                            [c, wire, sms](cudaStream_t on) {
                              PENSTOCK_CUDA_CHECK(launch_combine_sm90(c, wire, sms, on));
                            },
                            0.0,
                            bytes,
                            {}});
      }
      std::unique_ptr<TwoGroups> groups;
      if (options.group_sms > 0) {
        groups = std::make_unique<TwoGroups>(*model, tokens, options, options.group_sms);
        for (const WireFormat wire : {WireFormat::kFp8, WireFormat::kBf16}) {
          const char* name = wire == WireFormat::kFp8 ? "fp8" : "bf16";
          const Setup* setup = &s;
          variants.push_back({fmt::format("gemm_combine_{}", name),
                              [setup, wire, ctas](cudaStream_t on) {
                                PENSTOCK_CUDA_CHECK(launch_grouped_gemm_sm90(
                                    gemm_args(*setup, wire), setup->maps, wire, ctas, on));
                                PENSTOCK_CUDA_CHECK(launch_combine_sm90(combine_args(*setup, wire),
                                                                        wire, ctas, on));
                              },
                              flop,
                              0.0,
                              {}});
          variants.push_back(
              {fmt::format("two_groups_{}", name),
               [g = groups.get(), wire, ctas](cudaStream_t on) { g->run(wire, ctas, on); },
               flop,
               0.0,
               {}});
        }
      }
      variants.push_back({"plan",
                          [&](cudaStream_t on) {
                            PENSTOCK_CUDA_CHECK(launch_plan_sm90(
                                s.plan_in, s.plan_out, s.scratch.data(), plan_extras(s), on));
                          },
                          0.0,
                          static_cast<double>(s.capacity) * 28.0,
                          {}});

      std::vector<cudaEvent_t> events(variants.size() + 1);
      for (auto& event : events) PENSTOCK_CUDA_CHECK(cudaEventCreate(&event));
      Rounds{variants.size(), 3, options.rounds}.run([&](std::size_t i, bool kept) {
        Variant& v = variants[i];
        if (v.name.find("counted") != std::string::npos) {
          PENSTOCK_CUDA_CHECK(cudaMemsetAsync(s.counters.data(), 0, s.counters.bytes(), stream));
        }
        // Scrubs the L2 and keeps the GPU busy while the host enqueues what is timed. The memset
        // alone would leave 50 MB of dirty lines, whose way back to memory what is timed would pay.
        PENSTOCK_CUDA_CHECK(cudaMemsetAsync(scrub.data(), 0, scrub.bytes(), stream));
        PENSTOCK_CUDA_CHECK(read_all(scrub.data(), scrub.bytes(), stream));
        PENSTOCK_CUDA_CHECK(cudaEventRecord(events[0], stream));
        v.run(stream);
        PENSTOCK_CUDA_CHECK(cudaEventRecord(events[1], stream));
        PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream));
        float ms = 0.0f;
        PENSTOCK_CUDA_CHECK(cudaEventElapsedTime(&ms, events[0], events[1]));
        if (kept) v.us.push_back(1e3 * static_cast<double>(ms));
      });
      for (auto& event : events) PENSTOCK_CUDA_CHECK(cudaEventDestroy(event));

      const double dense_us = dense ? quantile(variants.front().us, 0.5) : 0.0;
      for (const Variant& v : variants) {
        const Quantiles times = quantiles(v.us);
        const double median = times.median_us;
        const double flop_us = v.flop / (kBlockScaledTflops * 1e6);
        const double byte_us = v.bytes / (kMemoryGbps * 1e3);
        const double floor_us = std::max(flop_us, byte_us);
        Json line{{"bench", "moe_stage2"},
                  {"commit", options.commit},
                  {"machine", properties.name},
                  {"shape", model->name},
                  {"hidden", model->hidden},
                  {"intermediate", model->intermediate},
                  {"experts_per_rank", s.shape.experts_per_rank()},
                  {"ranks", s.shape.ranks},
                  {"top_k", model->top_k},
                  {"tokens_per_rank", tokens},
                  {"routing", options.pattern},
                  {"rows", s.rows},
                  {"tiles", s.capacity / kTileRows},
                  {"variant", v.name},
                  {"method",
                   "interleaved rounds in random order, cuda events, L2 scrubbed by reads before "
                   "each launch"}};
        add_times(line, times);
        line["floor_us"] = floor_us;
        line["fraction_of_floor"] = floor_us / median;
        std::string rate;
        if (v.flop > 0.0) {
          line["tflops"] = v.flop / median * 1e-6;
          rate = fmt::format("{:7.0f} TFLOPS", v.flop / median * 1e-6);
          if (dense) {
            line["of_cublaslt"] = dense_us / median;
            rate += fmt::format("  {:.3f} of cuBLASLt", dense_us / median);
          }
        } else {
          line["gbps"] = v.bytes / median * 1e-3;
          rate = fmt::format("{:7.0f} GB/s", v.bytes / median * 1e-3);
        }
        json_out << line.dump() << "\n";
        std::cerr << fmt::format(
            "{:9} T {:6} rows {:7} {:26} {:9.1f} us (p10 {:.1f} p90 {:.1f}) {} floor {:.2f}\n",
            model->name, tokens, s.rows, v.name, median, times.p10_us, times.p90_us, rate,
            floor_us / median);
      }
    }
  }
  return correct ? 0 : 1;
}

}  // namespace
}  // namespace penstock::bench

int main(int argc, char** argv) {
  penstock::bench::Options options;
  CLI::App app("moe_stage2 on one GPU, part by part");
  app.add_option("--shape", options.models, "glm5, v4-flash, h7168")->delimiter(',');
  app.add_option("--tokens", options.tokens, "tokens per rank")->delimiter(',');
  app.add_option("--rounds", options.rounds, "measured rounds after three to warm up");
  app.add_option("--ranks", options.ranks, "ranks that the routing is spread over");
  app.add_option("--ctas", options.ctas, "CTAs of the GEMM; 0: one an SM");
  app.add_option("--group-sms", options.group_sms,
                 "even, not 0: also GEMM and combine one behind the other, and in two groups of "
                 "tokens whose first combine has so many SMs");
  app.add_option("--pattern", options.pattern, "routing pattern");
  app.add_option("--cublaslt", options.cublaslt, "path of libcublasLt.so.13");
  app.add_option("--out", options.out, "file that JSON lines are appended to");
  app.add_option("--commit", options.commit, "written into each line");
  app.add_flag("!--no-baseline", options.baseline, "leave cuBLASLt out");
  CLI11_PARSE(app, argc, argv);
  try {
    return penstock::bench::measure(options);
  } catch (const penstock::Error& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
