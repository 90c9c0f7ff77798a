// The gated GEMM of a2a_gemm on one GPU beside cuBLASLt's GEMM of the same M, N, K: gates open, all
// pieces announced, and pieces announced late by a script that plays an exchange of a stated rate.
// Variants take turns inside each round, so that clocks and power treat them alike; medians over
// rounds. JSON lines on stdout or --out, a table on stderr.
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

#include "a2a_gemm_script.h"
#include "cli/bench/cublaslt_baseline.h"
#include "cli/bench/report.h"
#include "cli/bench/rounds.h"
#include "core/cuda/device_buffer.h"
#include "device_fill.h"
#include "fabric/cuda/memory.h"
#include "ops/a2a_gemm/cuda/gemm_maps.h"
#include "penstock/core/error.h"
#include "penstock/core/fault_record.h"
#include "penstock/numerics/formats.h"
#include "penstock/ops/a2a_gemm/heuristics.h"
#include "penstock/ops/a2a_gemm/layout.h"

namespace penstock::bench {
namespace {

using namespace a2a_gemm;
using cuda::DeviceBuffer;

constexpr int kScriptSms = 2;  // for the kernel that announces

struct Options {
  std::int32_t hidden = 8192;
  std::vector<std::int32_t> sequences{8192, 16384, 65536};
  std::vector<std::int32_t> ranks{8, 2};
  std::vector<std::string> formats{"bf16", "fp8"};
  std::vector<double> ratios{0.5, 0.9};
  int rounds = 20;
  int ctas = 0;
  int band = 0;
  std::int32_t row_block = 0;
  std::string cublaslt;
  std::string out;
  std::string commit;
  bool check = true;
  bool late = false;
};

struct Variant {
  std::string name;
  std::function<void(cudaStream_t)> run;
  std::vector<double> arrival_us{};  // of each piece, where a script announces them
  std::vector<double> us{};
};

// One problem as rank 0 sees it, everything on the device.
class Problem {
 public:
  Problem(const Shape& shape, const Config& config)
      : shape_(shape),
        index_(window_index(window_shape(shape, config.row_block_rows, false))),
        rows_(shape.rows[0]),
        window_(static_cast<std::size_t>(index_.at.total_bytes)),
        x_(static_cast<std::size_t>(rows_) * static_cast<std::size_t>(shape.row_bytes())),
        w_(static_cast<std::size_t>(shape.ranks) * static_cast<std::size_t>(shape.columns) *
           static_cast<std::size_t>(shape.row_bytes())),
        x_scales_(static_cast<std::size_t>(shape.scale_blocks()) * static_cast<std::size_t>(rows_)),
        w_scales_(static_cast<std::size_t>(shape.ranks * shape.column_scale_blocks()) *
                  static_cast<std::size_t>(shape.scale_blocks())),
        out_(static_cast<std::size_t>(rows_) * static_cast<std::size_t>(shape.columns)),
        words_(16),
        record_(sizeof(FaultRecord)) {
    fill(x_.data(), x_.size(), 1);
    fill(window_.data() + index_.at.offset[kChunks], index_.at.bytes[kChunks], 2);
    fill(w_.data(), w_.size(), 3);
    PENSTOCK_CUDA_CHECK(
        cudaMemset(window_.data() + index_.at.offset[kArrived], 0, index_.at.bytes[kArrived]));
    if (shape.format == Format::kFp8) {
      PENSTOCK_CUDA_CHECK(fill_uniform(chunk_scales(), index_.at.bytes[kChunkScales] / 4, 0.005f,
                                       0.02f, 4, nullptr));
      PENSTOCK_CUDA_CHECK(
          fill_uniform(x_scales_.data(), x_scales_.size(), 0.005f, 0.02f, 5, nullptr));
      PENSTOCK_CUDA_CHECK(
          fill_uniform(w_scales_.data(), w_scales_.size(), 1e-4f, 4e-4f, 6, nullptr));
    }
    words_.upload({1, 0, 0, reinterpret_cast<std::uint64_t>(words_.data() + 1), 1, 0, 0, 0, 0, 0, 0,
                   0, 0, 0, 0, 0});
    args_.ranks = shape.ranks;
    args_.rows = rows_;
    args_.columns = shape.columns;
    args_.steps = shape.steps();
    args_.chunk_rows = rows_;
    args_.row_block_rows = config.row_block_rows;
    args_.row_blocks = static_cast<std::int32_t>(index_.shape.row_blocks);
    args_.band = config.band;
    args_.out = out_.data();
    args_.chunk_scales = chunk_scales();
    args_.scale_stride = static_cast<std::int64_t>(scale_stride(index_.shape.max_rows));
    args_.local_scales = x_scales_.data();
    args_.local_scale_stride = rows_;
    args_.w_scales = w_scales_.data();
    args_.arrival_stride = static_cast<std::int64_t>(arrival_stride(index_.shape.row_blocks) / 8);
    args_.guard.generation = words_.data();
    args_.guard.abort_word = words_.data() + 1;
    args_.guard.record_claim = words_.data() + 2;
    args_.guard.abort_words = reinterpret_cast<std::uint64_t* const*>(words_.data() + 3);
    args_.guard.record = record_.as<FaultRecord>();
    args_.guard.deadline_ns = 1'000'000'000;
    args_.guard.rank = 0;
    args_.guard.ranks = 1;
    args_.epoch = epoch();
    maps_ = make_gemm_maps(shape, 0, x_.data(), chunks(), w_.data());
  }

  std::uint64_t* epoch() const { return words_.data() + 4; }
  std::uint64_t* word(int source, int block) const {
    return reinterpret_cast<std::uint64_t*>(
        window_.data() + index_.arrived(0, source, static_cast<std::uint64_t>(block)));
  }
  std::byte* chunks() const { return window_.data() + index_.chunk(0, 0, 0); }
  float* chunk_scales() const {
    return reinterpret_cast<float*>(window_.data() + index_.chunk_scale(0, 0, 0, 0));
  }
  const DeviceBuffer<std::byte>& w() const { return w_; }
  const DeviceBuffer<float>& w_scales() const { return w_scales_; }
  int row_blocks() const { return args_.row_blocks; }
  void launch(bool gated, int ctas, cudaStream_t stream,
              ChunkOrder order = ChunkOrder::kRotation) const {
    GemmArgs args = args_;
    args.order = order;
    args.arrived = gated ? word(0, 0) : nullptr;
    PENSTOCK_CUDA_CHECK(launch_gemm_sm90(args, maps_, shape_.format, ctas, stream));
  }
  bool faulted() const { return record_.as<FaultRecord>()->valid != 0; }

  // Relative error (to the f64 norm) of random elements of the last result.
  double sample_error() const {
    std::mt19937_64 random(99);
    const auto depth = static_cast<std::size_t>(shape_.depth);
    const auto bytes = static_cast<std::size_t>(shape_.row_bytes());
    std::vector<std::byte> a(bytes);
    std::vector<std::byte> b(bytes);
    std::vector<float> all_w_scales = w_scales_.download();
    double error = 0.0;
    double norm = 0.0;
    for (int sample = 0; sample < 48; ++sample) {
      const auto row = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rows_));
      const auto column =
          static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(shape_.columns));
      double exact = 0.0;
      for (int source = 0; source < shape_.ranks; ++source) {
        const std::byte* a_from =
            source == 0 ? x_.data() + static_cast<std::size_t>(row) * bytes
                        : window_.data() + index_.chunk(0, source, static_cast<std::uint64_t>(row));
        const std::size_t w_row =
            static_cast<std::size_t>(source) * static_cast<std::size_t>(shape_.columns) +
            static_cast<std::size_t>(column);
        copy(a.data(), a_from, bytes);
        copy(b.data(), w_.data() + w_row * bytes, bytes);
        for (std::size_t k = 0; k < depth; k += 128) {
          double block = 0.0;
          for (std::size_t i = k; i < std::min(depth, k + 128); ++i) {
            block += element(a.data(), i) * element(b.data(), i);
          }
          if (shape_.format == Format::kFp8) {
            float scale = 0.0f;
            const std::size_t kb = k / 128;
            copy(&scale,
                 source == 0
                     ? x_scales_.data() + kb * static_cast<std::size_t>(rows_) +
                           static_cast<std::size_t>(row)
                     : reinterpret_cast<const float*>(
                           window_.data() +
                           index_.chunk_scale(0, source, kb, static_cast<std::uint64_t>(row))),
                 4);
            const std::size_t w_at = (static_cast<std::size_t>(source) *
                                          static_cast<std::size_t>(shape_.column_scale_blocks()) +
                                      static_cast<std::size_t>(column / kScaleBlock)) *
                                         static_cast<std::size_t>(shape_.scale_blocks()) +
                                     kb;
            block *= static_cast<double>(scale) * static_cast<double>(all_w_scales[w_at]);
          }
          exact += block;
        }
      }
      Bf16 got;
      copy(&got, out_.data() + row * shape_.columns + column, 2);
      const double value = static_cast<double>(got.to_float());
      error += (value - exact) * (value - exact);
      norm += exact * exact;
    }
    return std::sqrt(error / norm);
  }
  void poison() { out_.fill(0xFF); }

 private:
  static void copy(void* to, const void* from, std::size_t bytes) {
    PENSTOCK_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
  }
  double element(const std::byte* row, std::size_t k) const {
    return static_cast<double>(shape_.format == Format::kBf16
                                   ? reinterpret_cast<const Bf16*>(row)[k].to_float()
                                   : reinterpret_cast<const E4M3*>(row)[k].to_float());
  }
  void fill(void* data, std::size_t bytes, std::uint64_t seed) const {
    PENSTOCK_CUDA_CHECK(shape_.format == Format::kBf16
                            ? fill_bf16_normal(data, bytes / 2, seed, nullptr)
                            : fill_e4m3_normal(data, bytes, seed, nullptr));
  }

  Shape shape_;
  WindowIndex index_;
  std::int32_t rows_;
  DeviceBuffer<std::byte> window_;
  DeviceBuffer<std::byte> x_;
  DeviceBuffer<std::byte> w_;
  DeviceBuffer<float> x_scales_;
  DeviceBuffer<float> w_scales_;
  DeviceBuffer<std::uint16_t> out_;
  DeviceBuffer<std::uint64_t> words_;
  cuda::PinnedMemory record_;
  GemmArgs args_;
  GemmMaps maps_{};
};

// Arrival of (step, row block) when an exchange of `total_us` sends row block by row block, all
// sources within one: what the operator's copies do.
std::vector<double> schedule_of(int ranks, int row_blocks, double total_us) {
  std::vector<double> at(static_cast<std::size_t>(ranks * row_blocks), 0.0);
  const double piece = total_us / ((ranks - 1) * row_blocks);
  int sent = 0;
  for (int block = 0; block < row_blocks; ++block) {
    for (int step = 1; step < ranks; ++step) {
      at[static_cast<std::size_t>(step * row_blocks + block)] = ++sent * piece;
    }
  }
  return at;
}

// The same with the first sender late: what it sends to a row block comes behind everybody else's.
std::vector<double> late_schedule_of(int ranks, int row_blocks, double total_us) {
  std::vector<double> at = schedule_of(ranks, row_blocks, total_us);
  for (int block = 0; block < row_blocks; ++block) {
    const auto place = [&](int step) {
      return static_cast<std::size_t>(step * row_blocks + block);
    };
    const double last = at[place(ranks - 1)];
    for (int step = ranks - 1; step > 1; --step) at[place(step)] = at[place(step - 1)];
    at[place(1)] = last;
  }
  return at;
}

// As a tile in arrival order meets them: its k-th chunk is the k-th to come.
std::vector<double> in_arrival_order(std::vector<double> at, int ranks, int row_blocks) {
  for (int block = 0; block < row_blocks; ++block) {
    std::vector<double> times;
    for (int step = 1; step < ranks; ++step) {
      times.push_back(at[static_cast<std::size_t>(step * row_blocks + block)]);
    }
    std::sort(times.begin(), times.end());
    for (int step = 1; step < ranks; ++step) {
      at[static_cast<std::size_t>(step * row_blocks + block)] =
          times[static_cast<std::size_t>(step - 1)];
    }
  }
  return at;
}

class Runner {
 public:
  explicit Runner(const Options& options) : options_(options) {
    int device = 0;
    PENSTOCK_CUDA_CHECK(cudaGetDevice(&device));
    cuda::require_sm90(device);
    PENSTOCK_CUDA_CHECK(cudaGetDeviceProperties(&properties_, device));
    ctas_ = options.ctas > 0 ? options.ctas : properties_.multiProcessorCount;
    PENSTOCK_CUDA_CHECK(load_gemm_sm90());
    PENSTOCK_CUDA_CHECK(load_script_kernels());
    for (cudaStream_t* s : {&stream_, &script_stream_}) {
      PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking));
    }
    for (cudaEvent_t* e : {&begin_, &end_}) PENSTOCK_CUDA_CHECK(cudaEventCreate(e));
    scrub_ = DeviceBuffer<unsigned char>(std::size_t{256} << 20);
    if (!options.out.empty()) file_.open(options.out, std::ios::app);
  }

  bool measure(const Shape& shape, std::int32_t sequence) {
    Config config = choose(shape, 0, {}, options_.row_block);
    if (options_.band > 0) config.band = options_.band;
    Problem problem(shape, config);
    PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
    bool correct = true;
    double error = -1.0;
    if (options_.check) {
      problem.poison();
      problem.launch(false, ctas_, stream_);
      PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream_));
      error = problem.sample_error();
      correct = error < 1e-2;
    }

    const int scripted_ctas = ctas_ - kScriptSms;
    std::unique_ptr<DenseGemm> dense;
    std::vector<Variant> variants;
    try {
      dense = std::make_unique<DenseGemm>(
          options_.cublaslt, shape.rows[0], shape.columns,
          static_cast<std::int64_t>(shape.ranks) * shape.depth,
          shape.format == Format::kBf16 ? DenseFormat::kBf16 : DenseFormat::kBlockScaledFp8);
      variants.push_back({"cublaslt", [&](cudaStream_t on) {
                            dense->run(problem.chunks(), problem.chunk_scales(), problem.w().data(),
                                       problem.w_scales().data(), dense_out(shape), on);
                          }});
    } catch (const Error& e) {
      std::cerr << "no cuBLASLt baseline: " << e.what() << "\n";
    }
    variants.push_back({"open", [&](cudaStream_t on) { problem.launch(false, ctas_, on); }});
    const std::vector<double> at_once(static_cast<std::size_t>(shape.ranks * problem.row_blocks()),
                                      0.0);
    // The words of the epoch are set before the launch: what the gate costs when nobody is late.
    scripts_.clear();
    add_script(problem, shape, at_once);
    const auto script = [&](std::size_t i, cudaStream_t on) {
      const DeviceBuffer<ScriptedArrival>& s = scripts_[i];
      PENSTOCK_CUDA_CHECK(play_script(s.data(), static_cast<int>(s.size()), problem.epoch(), on));
    };
    variants.push_back(
        {"gated, all there", [&](cudaStream_t on) { problem.launch(true, ctas_, on); }});
    variants.push_back(
        {"open, two SMs less", [&](cudaStream_t on) { problem.launch(false, scripted_ctas, on); }});
    PENSTOCK_CUDA_CHECK(advance_epoch(problem.epoch(), stream_));
    script(0, stream_);
    run_rounds(variants, 5, [&] {});
    const double open_us = quantile(find(variants, "open, two SMs less").us, 0.5);
    for (Variant& v : variants) v.us.clear();

    // Scripts in terms of the measured GEMM.
    std::vector<const std::uint64_t*> words;
    for (int s = 1; s < shape.ranks; ++s) {
      for (int b = 0; b < problem.row_blocks(); ++b) words.push_back(problem.word(s, b));
    }
    const DeviceBuffer<const std::uint64_t*> device_words(words);
    if (shape.ranks > 1) {
      for (const double ratio : options_.ratios) {
        const auto schedule = schedule_of(shape.ranks, problem.row_blocks(), ratio * open_us);
        const std::size_t i = scripts_.size();
        add_script(problem, shape, schedule);
        variants.push_back({fmt::format("scripted {:.2f}: in-kernel gate", ratio),
                            [&, i](cudaStream_t on) {
                              script(i, script_stream_);
                              problem.launch(true, scripted_ctas, on);
                            },
                            schedule});
        variants.push_back({fmt::format("scripted {:.2f}: gate kernel + GEMM", ratio),
                            [&, i](cudaStream_t on) {
                              script(i, script_stream_);
                              PENSTOCK_CUDA_CHECK(wait_for_words(device_words.data(),
                                                                 static_cast<int>(words.size()),
                                                                 problem.epoch(), on));
                              problem.launch(false, scripted_ctas, on);
                            },
                            schedule});
        if (!options_.late) continue;
        variants.push_back({fmt::format("scripted {:.2f}: arrival order", ratio),
                            [&, i](cudaStream_t on) {
                              script(i, script_stream_);
                              problem.launch(true, scripted_ctas, on, ChunkOrder::kArrival);
                            },
                            schedule});
        const auto late = late_schedule_of(shape.ranks, problem.row_blocks(), ratio * open_us);
        const std::size_t j = scripts_.size();
        add_script(problem, shape, late);
        for (const ChunkOrder order : {ChunkOrder::kRotation, ChunkOrder::kArrival}) {
          const bool arrival = order == ChunkOrder::kArrival;
          variants.push_back(
              {fmt::format("one late {:.2f}: {}", ratio, arrival ? "arrival order" : "rotation"),
               [&, j, order](cudaStream_t on) {
                 script(j, script_stream_);
                 problem.launch(true, scripted_ctas, on, order);
               },
               arrival ? in_arrival_order(late, shape.ranks, problem.row_blocks()) : late});
        }
      }
    }
    run_rounds(variants, options_.rounds, [&] {
      // Every variant gets a fresh epoch; "gated, all there" gets its words now.
      PENSTOCK_CUDA_CHECK(advance_epoch(problem.epoch(), stream_));
    });
    correct = correct && !problem.faulted();
    report(shape, sequence, config, variants, error, correct);
    return correct;
  }

 private:
  static Variant& find(std::vector<Variant>& variants, const std::string& name) {
    return *std::find_if(variants.begin(), variants.end(),
                         [&](const Variant& v) { return v.name == name; });
  }

  void* dense_out(const Shape& shape) {
    const std::size_t need =
        static_cast<std::size_t>(shape.rows[0]) * static_cast<std::size_t>(shape.columns);
    if (dense_out_.size() < need) dense_out_ = DeviceBuffer<std::uint16_t>(need);
    return dense_out_.data();
  }

  void add_script(const Problem& problem, const Shape& shape, const std::vector<double>& at_us) {
    std::vector<ScriptedArrival> arrivals;
    for (int step = 1; step < shape.ranks; ++step) {
      for (int b = 0; b < problem.row_blocks(); ++b) {
        const double us = at_us[static_cast<std::size_t>(step * problem.row_blocks() + b)];
        arrivals.push_back({problem.word(source_of_step(0, step, shape.ranks), b),
                            static_cast<std::uint64_t>(us * 1e3)});
      }
    }
    std::stable_sort(arrivals.begin(), arrivals.end(),
                     [](const auto& a, const auto& b) { return a.at_ns < b.at_ns; });
    scripts_.emplace_back(arrivals);
  }

  template <typename Prepare>
  void run_rounds(std::vector<Variant>& variants, int rounds, Prepare&& prepare) {
    Rounds{variants.size(), 2, rounds}.run([&](std::size_t i, bool kept) {
      Variant& v = variants[i];
      if (!v.arrival_us.empty()) prepare();
      // Scrubs the L2 and keeps the GPU busy while the host enqueues what is timed.
      PENSTOCK_CUDA_CHECK(cudaMemsetAsync(scrub_.data(), 0, scrub_.bytes(), stream_));
      PENSTOCK_CUDA_CHECK(cudaEventRecord(begin_, stream_));
      PENSTOCK_CUDA_CHECK(cudaStreamWaitEvent(script_stream_, begin_, 0));
      v.run(stream_);
      PENSTOCK_CUDA_CHECK(cudaEventRecord(end_, stream_));
      PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream_));
      PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(script_stream_));
      float ms = 0.0f;
      PENSTOCK_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
      if (kept) v.us.push_back(1e3 * static_cast<double>(ms));
    });
  }

  void report(const Shape& shape, std::int32_t sequence, const Config& config,
              std::vector<Variant>& variants, double error, bool correct) {
    std::ostream& json = options_.out.empty() ? std::cout : file_;
    const double dense_us =
        variants.front().name == "cublaslt" ? quantile(variants.front().us, 0.5) : 0.0;
    const double work = flop(shape, 0);
    // What a chunk of a tile takes, from the open gates of the same rounds: clocks drift over
    // minutes, and a floor from another moment would not be one.
    const TileGrid grid = tile_grid(shape.rows[0], shape.columns, config.band);
    const int clusters = (ctas_ - kScriptSms) / kClusterCtas;
    const int waves = (grid.tiles() + clusters - 1) / clusters;
    const double chunk_us =
        quantile(find(variants, "open, two SMs less").us, 0.5) / waves / shape.ranks;
    std::cerr << fmt::format(
        "{} hidden {} sequence {} ranks {}: M {} N {} K {}, row blocks of {}, band {}, relative "
        "error {:.1e} {}\n",
        to_string(shape.format), options_.hidden, sequence, shape.ranks, shape.rows[0],
        shape.columns, shape.ranks * shape.depth, config.row_block_rows, config.band, error,
        correct ? "ok" : "WRONG");
    for (const Variant& v : variants) {
      const Quantiles times = quantiles(v.us);
      const double median = times.median_us;
      Json line{{"bench", "a2a_gemm"},
                {"commit", options_.commit},
                {"machine", properties_.name},
                {"format", to_string(shape.format)},
                {"hidden", options_.hidden},
                {"sequence", sequence},
                {"ranks", shape.ranks},
                {"m", shape.rows[0]},
                {"n", shape.columns},
                {"k", shape.ranks * shape.depth},
                {"row_block_rows", config.row_block_rows},
                {"band", config.band},
                {"variant", v.name},
                {"method", "one GPU, interleaved rounds, cuda events, L2 scrubbed before each"}};
      add_times(line, times);
      line["tflops"] = work / median * 1e-6;
      line["relative_error"] = error;
      line["correct"] = correct;
      std::string more;
      if (dense_us > 0.0) {
        line["of_cublaslt"] = dense_us / median;
        more += fmt::format("  {:.3f} of cuBLASLt", dense_us / median);
      }
      if (!v.arrival_us.empty()) {
        const double floor = schedule_floor_us(grid, shape.ranks, config.row_block_rows, clusters,
                                               chunk_us, v.arrival_us);
        line["schedule_floor_us"] = floor;
        line["chunk_us"] = chunk_us;
        line["over_floor"] = median / floor;
        more += fmt::format("  {:.3f} x the schedule's floor {:.1f}", median / floor, floor);
      }
      json << line.dump() << "\n";
      std::cerr << fmt::format("  {:36} {:8.1f} us (p10 {:.1f} p90 {:.1f}) {:5.0f} TFLOPS{}\n",
                               v.name, median, times.p10_us, times.p90_us, work / median * 1e-6,
                               more);
    }
    json.flush();
  }

  Options options_;
  cudaDeviceProp properties_{};
  int ctas_ = 0;
  cudaStream_t stream_ = nullptr;
  cudaStream_t script_stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  DeviceBuffer<unsigned char> scrub_;
  DeviceBuffer<std::uint16_t> dense_out_;
  std::vector<DeviceBuffer<ScriptedArrival>> scripts_;
  std::ofstream file_;
};

int measure(const Options& options) {
  Runner runner(options);
  bool correct = true;
  for (const std::string& format : options.formats) {
    require(format == "bf16" || format == "fp8", ErrorKind::kInvalidArgument,
            [&] { return fmt::format("format '{}'; bf16 and fp8 are known", format); });
    for (const std::int32_t ranks : options.ranks) {
      for (const std::int32_t sequence : options.sequences) {
        const Shape shape =
            even_shape(ranks, sequence / ranks, options.hidden / ranks, options.hidden,
                       format == "bf16" ? Format::kBf16 : Format::kFp8);
        validate(shape);
        correct = runner.measure(shape, sequence) && correct;
      }
    }
  }
  return correct ? 0 : 1;
}

}  // namespace
}  // namespace penstock::bench

int main(int argc, char** argv) {
  penstock::bench::Options options;
  CLI::App app("a2a_gemm's gated GEMM on one GPU, beside cuBLASLt");
  app.add_option("--hidden", options.hidden, "N, and K over all ranks");
  app.add_option("--seq", options.sequences, "rows of all ranks")->delimiter(',');
  app.add_option("--ranks", options.ranks, "ranks that the problem is shaped for")->delimiter(',');
  app.add_option("--format", options.formats, "bf16, fp8")->delimiter(',');
  app.add_option("--ratio", options.ratios, "scripted exchanges, as fractions of the GEMM's time")
      ->delimiter(',');
  app.add_option("--rounds", options.rounds, "measured rounds after two to warm up");
  app.add_option("--ctas", options.ctas, "CTAs of the GEMM; 0: one an SM");
  app.add_option("--band", options.band, "cluster tiles of a band; 0: the heuristic's");
  app.add_option("--row-block", options.row_block, "rows announced together; 0: the heuristic's");
  app.add_option("--cublaslt", options.cublaslt, "path of libcublasLt.so.13");
  app.add_option("--out", options.out, "file that JSON lines are appended to");
  app.add_option("--commit", options.commit, "written into each line");
  app.add_flag("--late", options.late,
               "also chunks in arrival order, and scripts in which one sender is late");
  app.add_flag("!--no-check", options.check, "leave the sampled check out");
  CLI11_PARSE(app, argc, argv);
  try {
    return penstock::bench::measure(options);
  } catch (const penstock::Error& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
