#include "ops/a2a_gemm/bench.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <span>

#include "core/cuda/device_buffer.h"
#include "core/cuda/stream.h"
#include "fabric/cuda/device_rank.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/window_backend.h"
#include "ops/a2a_gemm/cuda/gemm_maps.h"
#include "ops/a2a_gemm/cuda/mirror_kernels.h"
#include "ops/a2a_gemm/cuda/operator.h"
#include "ops/moe_stage2/cuda/align_sm90.h"
#include "ops/moe_stage2/cuda/nccl_all_to_all.h"
#include "penstock/core/error.h"
#include "penstock/numerics/formats.h"
#include "penstock/ops/a2a_gemm/layout.h"

namespace penstock::a2a_gemm {
namespace {

using cuda::DeviceBuffer;
using cuda::OwnedEvent;
using moe_stage2::AlignArgs;
using moe_stage2::NcclPiece;

// Longer than the L2, and than the host needs to enqueue a call behind it.
constexpr std::size_t kScrubBytes = std::size_t{512} << 20;
constexpr std::size_t kPatternBytes = (std::size_t{16} << 20) + 4096 + 16;

// Normal values: deviation 1 in bf16, 100 in E4M3 (what a block scaled to amax 448 looks like).
std::vector<std::byte> normal_bytes(Format format, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, format == Format::kBf16 ? 1.0f : 100.0f);
  std::vector<std::byte> table(65536 * (format == Format::kBf16 ? 2 : 1));
  for (std::size_t i = 0; i < 65536; ++i) {
    if (format == Format::kBf16) {
      reinterpret_cast<Bf16*>(table.data())[i] = Bf16::from_float(normal(random));
    } else {
      reinterpret_cast<E4M3*>(table.data())[i] = E4M3::from_float(normal(random));
    }
  }
  const std::size_t size = format == Format::kBf16 ? 2 : 1;
  std::vector<std::byte> bytes(kPatternBytes);
  for (std::size_t i = 0; i < kPatternBytes / size; i += 4) {
    const std::uint64_t bits = random();
    for (std::size_t j = 0; j < 4 && i + j < kPatternBytes / size; ++j) {
      std::copy_n(table.data() + (bits >> (16 * j) & 0xffff) * size, size,
                  bytes.data() + (i + j) * size);
    }
  }
  return bytes;
}

// Repetitions of a pattern whose length divides no row.
void fill(std::byte* to, std::size_t bytes, const DeviceBuffer<std::byte>& pattern) {
  for (std::size_t at = 0; at < bytes; at += pattern.size()) {
    PENSTOCK_CUDA_CHECK(cudaMemcpy(to + at, pattern.data(), std::min(pattern.size(), bytes - at),
                                   cudaMemcpyDeviceToDevice));
  }
}

std::vector<float> uniform(std::size_t count, float low, float high, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> values(count);
  for (float& x : values) {
    x = low + (high - low) * static_cast<float>(random() >> 40) * 0x1p-24f;
  }
  return values;
}

std::size_t size_of(std::int64_t n) { return static_cast<std::size_t>(n); }

// One rank's operands, and in memory of its own what the floors and NCCL need.
class Rig {
 public:
  virtual ~Rig() = default;
  virtual Operands operands() const = 0;
  virtual std::int32_t rows() const = 0;  // of this rank's GEMM, M
  virtual void gemm(const Config& config, int ctas, cudaStream_t on) const = 0;
  // The library's GEMM of as much: its K, and its N.
  virtual std::int64_t dense_depth() const = 0;
  virtual std::int64_t dense_columns() const = 0;
  virtual void dense(DenseBaseline& baseline, cudaStream_t on) = 0;
  // What NCCL moves: the payload, or (scales) FP8's scales; empty where there are none.
  virtual std::vector<NcclPiece> pieces(bool scales) const = 0;
  virtual DeviceBuffer<std::uint16_t>& out() = 0;
};

template <typename T>
unsigned char* bytes_of(T* p) {
  return reinterpret_cast<unsigned char*>(const_cast<std::remove_const_t<T>*>(p));
}

// a2a_gemm: the chunks of all sources.
class ChunkRig final : public Rig {
 public:
  ChunkRig(const BenchOptions& options, int rank)
      : shape_(options.shape), rank_(rank), max_(max_rows(shape_)) {
    const std::uint64_t seed = options.seed + 16 * static_cast<std::uint64_t>(rank);
    const DeviceBuffer<std::byte> pattern(normal_bytes(shape_.format, seed));
    const std::size_t row_bytes = size_of(shape_.row_bytes());
    x_ = DeviceBuffer<std::byte>(size_of(total_rows(shape_)) * row_bytes);
    w_ = DeviceBuffer<std::byte>(size_of(shape_.ranks) * size_of(shape_.columns) * row_bytes);
    chunks_ = DeviceBuffer<std::byte>(size_of(shape_.ranks) * size_of(max_) * row_bytes);
    out_ = DeviceBuffer<std::uint16_t>(size_of(rows()) * size_of(shape_.columns));
    fill(x_.data(), x_.size(), pattern);
    fill(w_.data(), w_.size(), pattern);
    fill(chunks_.data(), chunks_.size(), pattern);
    if (shape_.format == Format::kFp8) {
      const std::size_t blocks = size_of(shape_.scale_blocks());
      x_scales_ = DeviceBuffer<float>(
          uniform(blocks * size_of(total_rows(shape_)), 0.005f, 0.02f, seed + 1));
      w_scales_ = DeviceBuffer<float>(
          uniform(size_of(shape_.ranks) * size_of(shape_.column_scale_blocks()) * blocks, 1e-4f,
                  4e-4f, seed + 2));
      chunk_scales_ = DeviceBuffer<float>(
          uniform(size_of(shape_.ranks) * blocks * size_of(stride()), 0.005f, 0.02f, seed + 3));
      // NCCL sends contiguous pieces: the scales of each destination packed.
      packed_scales_ = DeviceBuffer<float>(size_of(shape_.ranks) * blocks * size_of(stride()));
      for (int peer = 0; peer < shape_.ranks; ++peer) {
        if (shape_.rows[size_of(peer)] == 0) continue;
        PENSTOCK_CUDA_CHECK(cudaMemcpy2D(
            packed(peer), size_of(stride()) * 4, x_scales_.data() + row_offset(shape_, peer),
            size_of(total_rows(shape_)) * 4, size_of(shape_.rows[size_of(peer)]) * 4, blocks,
            cudaMemcpyDeviceToDevice));
      }
    }
    PENSTOCK_CUDA_CHECK(load_gemm_sm90());
    if (rows() > 0) {
      maps_ = make_gemm_maps(shape_, rank_, local(), chunks_.data(), w_.data());
    }
    PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
  }

  Operands operands() const override {
    Operands o;
    o.x = x_.data();
    o.w = w_.data();
    o.out = out_.data();
    if (shape_.format == Format::kFp8) {
      o.x_scales = x_scales_.data();
      o.x_scale_stride = total_rows(shape_);
      o.w_scales = w_scales_.data();
    }
    return o;
  }
  void gemm(const Config& config, int ctas, cudaStream_t on) const override {
    if (rows() == 0) return;
    GemmArgs args;
    args.ranks = shape_.ranks;
    args.rank = rank_;
    args.rows = rows();
    args.columns = shape_.columns;
    args.steps = shape_.steps();
    args.chunk_rows = max_;
    args.band = config.band;
    args.out = out_.data();
    args.chunk_scales = chunk_scales_.data();
    args.scale_stride = stride();
    args.local_scales =
        shape_.format == Format::kFp8 ? x_scales_.data() + row_offset(shape_, rank_) : nullptr;
    args.local_scale_stride = total_rows(shape_);
    args.w_scales = w_scales_.data();
    PENSTOCK_CUDA_CHECK(launch_gemm_sm90(args, maps_, shape_.format, ctas, on));
  }
  std::int64_t dense_depth() const override {
    return static_cast<std::int64_t>(shape_.ranks) * shape_.depth;
  }
  std::int64_t dense_columns() const override { return shape_.columns; }
  void dense(DenseBaseline& baseline, cudaStream_t on) override {
    if (rows() == 0) return;
    baseline.run(chunks_.data(), chunk_scales_.data(), w_.data(), w_scales_.data(), out_.data(),
                 {on});
  }
  std::vector<NcclPiece> pieces(bool scales) const override {
    if (scales && shape_.format != Format::kFp8) return {};
    std::vector<NcclPiece> pieces(size_of(shape_.ranks));
    const std::int64_t blocks = shape_.scale_blocks();
    for (int peer = 0; peer < shape_.ranks; ++peer) {
      NcclPiece& piece = pieces[size_of(peer)];
      if (!scales) {
        const std::int64_t bytes = shape_.row_bytes();
        piece.send = bytes_of(x_.data() + row_offset(shape_, peer) * bytes);
        piece.receive = bytes_of(chunks_.data() + peer * max_ * bytes);
        piece.send_bytes = size_of(shape_.rows[size_of(peer)] * bytes);
        piece.receive_bytes = size_of(rows() * bytes);
      } else {
        piece.send = bytes_of(packed(peer));
        piece.receive = bytes_of(chunk_scales_.data() + peer * blocks * stride());
        piece.send_bytes = piece.receive_bytes = size_of(blocks * stride() * 4);
      }
    }
    return pieces;
  }
  std::int32_t rows() const override { return shape_.rows[size_of(rank_)]; }
  DeviceBuffer<std::uint16_t>& out() override { return out_; }

 private:
  std::int64_t stride() const {
    return static_cast<std::int64_t>(scale_stride(static_cast<std::uint64_t>(max_)));
  }
  float* packed(int peer) const {
    return packed_scales_.data() + peer * shape_.scale_blocks() * stride();
  }
  const std::byte* local() const {
    return x_.data() + row_offset(shape_, rank_) * shape_.row_bytes();
  }

  Shape shape_;
  int rank_;
  std::int32_t max_;
  DeviceBuffer<std::byte> x_, w_, chunks_;
  DeviceBuffer<float> x_scales_, w_scales_, chunk_scales_, packed_scales_;
  DeviceBuffer<std::uint16_t> out_;
  GemmMaps maps_{};
};

// The mirror: the parts of all destinations, which stay in memory of this rank's.
class MirrorRig final : public Rig {
 public:
  MirrorRig(const BenchOptions& options, int rank) : shape_(options.shape), rank_(rank) {
    const std::uint64_t seed = options.seed + 16 * static_cast<std::uint64_t>(rank);
    const DeviceBuffer<std::byte> pattern(normal_bytes(shape_.format, seed));
    const std::size_t row_bytes = size_of(shape_.row_bytes());
    x_ = DeviceBuffer<std::byte>(size_of(rows()) * row_bytes);
    w_ = DeviceBuffer<std::byte>(size_of(shape_.ranks) * size_of(shape_.columns) * row_bytes);
    parts_ = DeviceBuffer<std::uint16_t>(size_of(shape_.ranks) * size_of(rows()) *
                                         size_of(shape_.columns));
    out_ = DeviceBuffer<std::uint16_t>(size_of(total_rows(shape_)) * size_of(shape_.columns));
    fill(x_.data(), x_.size(), pattern);
    fill(w_.data(), w_.size(), pattern);
    if (shape_.format == Format::kFp8) {
      const std::size_t blocks = size_of(shape_.scale_blocks());
      x_scales_ = DeviceBuffer<float>(uniform(blocks * size_of(rows()), 0.005f, 0.02f, seed + 1));
      w_scales_ = DeviceBuffer<float>(
          uniform(size_of(shape_.ranks) * size_of(shape_.column_scale_blocks()) * blocks, 1e-4f,
                  4e-4f, seed + 2));
    }
    counters_ = DeviceBuffer<std::uint32_t>(
        size_of(shape_.ranks) * size_of(row_block_count(max_rows(shape_), kClusterRows)));
    PENSTOCK_CUDA_CHECK(load_gemm_a2a_sm90());
    if (rows() > 0) maps_ = make_mirror_maps(shape_, rank_, x_.data(), w_.data());
    PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
  }

  Operands operands() const override {
    Operands o;
    o.x = x_.data();
    o.w = w_.data();
    o.out = out_.data();
    if (shape_.format == Format::kFp8) {
      o.x_scales = x_scales_.data();
      o.x_scale_stride = rows();
      o.w_scales = w_scales_.data();
    }
    return o;
  }
  std::int32_t rows() const override { return shape_.rows[size_of(rank_)]; }
  void gemm(const Config& config, int ctas, cudaStream_t on) const override {
    if (rows() == 0) return;
    MirrorArgs args;
    args.gemm.ranks = shape_.ranks;
    args.gemm.rank = rank_;
    args.gemm.rows = rows();
    args.gemm.columns = shape_.columns;
    args.gemm.steps = shape_.steps();
    args.gemm.local_scales = x_scales_.data();
    args.gemm.local_scale_stride = rows();
    args.gemm.w_scales = w_scales_.data();
    // In the order of the operator, every part into memory of its own, nothing handed over.
    args.send.grid = mirror_grid(shape_.ranks, rank_, rows(), shape_.columns, config.row_block_rows,
                                 config.band);
    args.send.counters = counters_.data();
    for (int d = 0; d < shape_.ranks; ++d) {
      args.result[d] = parts_.data() + static_cast<std::int64_t>(d) * rows() * shape_.columns;
    }
    PENSTOCK_CUDA_CHECK(launch_gemm_a2a_sm90(args, maps_, shape_.format, ctas, on));
  }
  std::int64_t dense_depth() const override { return shape_.depth; }
  std::int64_t dense_columns() const override {
    return static_cast<std::int64_t>(shape_.ranks) * shape_.columns;
  }
  void dense(DenseBaseline& baseline, cudaStream_t on) override {
    if (rows() == 0) return;
    baseline.run(x_.data(), x_scales_.data(), w_.data(), w_scales_.data(), parts_.data(), {on});
  }
  std::vector<NcclPiece> pieces(bool scales) const override {
    if (scales) return {};
    std::vector<NcclPiece> pieces(size_of(shape_.ranks));
    const std::int64_t row = shape_.columns;
    for (int peer = 0; peer < shape_.ranks; ++peer) {
      NcclPiece& piece = pieces[size_of(peer)];
      piece.send = bytes_of(parts_.data() + peer * rows() * row);
      piece.receive = bytes_of(out_.data() + row_offset(shape_, peer) * row);
      piece.send_bytes = size_of(rows() * row * 2);
      piece.receive_bytes = size_of(shape_.rows[size_of(peer)] * row * 2);
    }
    return pieces;
  }
  DeviceBuffer<std::uint16_t>& out() override { return out_; }

 private:
  Shape shape_;
  int rank_;
  DeviceBuffer<std::byte> x_, w_;
  DeviceBuffer<float> x_scales_, w_scales_;
  DeviceBuffer<std::uint16_t> parts_, out_;
  DeviceBuffer<std::uint32_t> counters_;
  GemmMaps maps_{};
};

// A whole call as it is timed: enqueued anew, or as graphs of two calls, one a slot.
class Call {
 public:
  virtual ~Call() = default;
  virtual void enqueue(cudaStream_t on) = 0;
};

template <typename Operator>
class CallOf final : public Call {
 public:
  CallOf(std::unique_ptr<Operator> op, const Operands& operands, bool graph, cudaStream_t on)
      : op_(std::move(op)), operands_(operands), graph_(graph) {
    op_->prepare({on});
    if (!graph) return;
    for (cudaGraphExec_t& exec : execs_) {
      cudaGraph_t recorded = nullptr;
      PENSTOCK_CUDA_CHECK(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal));
      op_->run({on}, operands_);
      PENSTOCK_CUDA_CHECK(cudaStreamEndCapture(on, &recorded));
      PENSTOCK_CUDA_CHECK(cudaGraphInstantiate(&exec, recorded, 0));
      PENSTOCK_CUDA_CHECK(cudaGraphDestroy(recorded));
      PENSTOCK_CUDA_CHECK(cudaGraphUpload(exec, on));
    }
    PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(on));
  }
  ~CallOf() override {
    for (cudaGraphExec_t exec : execs_) {
      if (exec != nullptr) (void)cudaGraphExecDestroy(exec);
    }
  }
  CallOf(const CallOf&) = delete;
  CallOf& operator=(const CallOf&) = delete;
  void enqueue(cudaStream_t on) override {
    if (!graph_) {
      op_->run({on}, operands_);
      return;
    }
    PENSTOCK_CUDA_CHECK(cudaGraphLaunch(execs_[next_], on));
    next_ = (next_ + 1) % execs_.size();
    op_->track({on});
  }

 private:
  std::unique_ptr<Operator> op_;
  Operands operands_;
  bool graph_;
  std::array<cudaGraphExec_t, kSlots> execs_{};
  std::size_t next_ = 0;
};

Options options_of(const BenchOptions& bench, BenchVariant variant) {
  Options options;
  options.row_block_rows = bench.row_block_rows;
  options.copy_ctas = bench.copy_ctas;
  options.fuse = Fuse::kAlways;
  if (variant == BenchVariant::kArrival) options.order = ChunkOrder::kArrival;
  if (variant == BenchVariant::kDirect) options.transport = TransportKind::kDirect;
  if (variant == BenchVariant::kSm) options.transport = TransportKind::kSm;
  if (variant == BenchVariant::kAuto) options.fuse = Fuse::kAuto;
  if (variant == BenchVariant::kUnfused) options.fuse = Fuse::kNever;
  return options;
}

// That a rank of the mirror receives: rows of the others, bf16.
double mirror_wire_bytes(const Shape& shape, std::int32_t rank) {
  return 2.0 * shape.columns * static_cast<double>(total_rows(shape) - shape.rows[size_of(rank)]);
}

class Bench {
 public:
  Bench(const TeamHandle& team, int device, const BenchOptions& options)
      : team_(team),
        options_(options),
        rank_(cuda::DeviceRank::create(team, device)),
        align_window_(Window::create(
            team,
            Layout::from(moe_stage2::kAlignTable, {static_cast<std::uint64_t>(team->size())},
                         "a2a_gemm bench"),
            cuda::device_window_backend(device))),
        align_epoch_(std::vector<std::uint64_t>{0}) {
    collectively(*team_, [&] {
      PENSTOCK_CUDA_CHECK(moe_stage2::load_align_sm90());
      if (options.mirror) {
        rig_ = std::make_unique<MirrorRig>(options, team->rank());
      } else {
        rig_ = std::make_unique<ChunkRig>(options, team->rank());
      }
      scrub_ = DeviceBuffer<std::byte>(kScrubBytes);
      PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
      rank_->prepare(stream_);
    });
    align_.guard = rank_->guard_view(team_->next_operator());
    align_.window = rank_->window_view(*align_window_);
    align_.epoch = align_epoch_.data();
  }
  ~Bench() {
    calls_.clear();
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  BenchResult run() {
    BenchResult result;
    int sms = 0;
    PENSTOCK_CUDA_CHECK(
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, rank_->device()));
    const cuda::GpuState state = cuda::gpu_state(rank_->device());
    result.machine = state.name;
    result.driver = state.driver_version;
    result.shared_gpu = !team_->agree(rank_->sms() == sms);
    Machine machine;  // as the operators see it
    machine.sms = gemm_ctas(*rank_, 0, options_.copy_ctas, "a2a_gemm");
    machine.shared_gpu = shares_gpu(*rank_);
    result.config = choose(options_.shape, team_->rank(), machine, options_.row_block_rows);
    const auto& rows = options_.shape.rows;
    const auto busiest =
        static_cast<std::int32_t>(std::max_element(rows.begin(), rows.end()) - rows.begin());
    result.flop = flop(options_.shape, busiest);  // the mirror's too: 2 M K P N
    result.wire_bytes = options_.mirror ? mirror_wire_bytes(options_.shape, team_->rank())
                                        : wire_bytes(options_.shape, busiest);
    std::vector<BenchVariant> variants = options_.variants;
    if (variants.empty()) {
      for (int v = 0; v < kBenchVariants; ++v) variants.push_back(static_cast<BenchVariant>(v));
    }
    for (const BenchVariant v : variants) add(v, result);
    team_->barrier();
    compare(result);
    time(result);
    return result;
  }

 private:
  static bool needs_nccl(BenchVariant v) {
    return v == BenchVariant::kNccl || v == BenchVariant::kNcclDense;
  }
  static bool needs_dense(BenchVariant v) {
    return v == BenchVariant::kDense || v == BenchVariant::kNcclDense;
  }

  // Makes what the variant needs, on all ranks or on none.
  void add(BenchVariant v, BenchResult& result) {
    if (v == (options_.mirror ? BenchVariant::kArrival : BenchVariant::kDirect)) return;
    std::string problem;
    if (needs_nccl(v) && nccl_ == nullptr) {
      nccl_ = moe_stage2::open_nccl_all_to_all(*team_, result.shared_gpu, options_.nccl, problem);
      if (nccl_ != nullptr) result.nccl = nccl_->version();
    }
    if (problem.empty() && needs_dense(v) && dense_ == nullptr) {
      try {
        if (options_.dense && rig_->rows() > 0) {
          dense_ = options_.dense(rig_->rows(), rig_->dense_columns(), rig_->dense_depth(),
                                  options_.shape.format);
        }
        if (!options_.dense) problem = "no library GEMM was given";
      } catch (const Error& error) {
        problem = error.what();
      }
    }
    if (!team_->agree(problem.empty())) {
      if (problem.empty()) problem = "another rank cannot";
      result.left_out +=
          fmt::format("{}{}: {}", result.left_out.empty() ? "" : "; ", to_string(v), problem);
      return;
    }
    if (is_whole(v) && v != BenchVariant::kNccl) {
      const Options options = options_of(options_, v);
      if (options_.mirror) {
        calls_[v] = call_of(make_cuda_gemm_a2a(rank_, options_.shape, options));
      } else {
        calls_[v] = call_of(make_cuda_a2a_gemm(rank_, options_.shape, options));
      }
    }
    result.timings.push_back({v, {}});
  }

  template <typename Operator>
  std::unique_ptr<Call> call_of(std::unique_ptr<Operator> op) const {
    return std::make_unique<CallOf<Operator>>(std::move(op), rig_->operands(), options_.graph,
                                              stream_);
  }

  int ctas() const { return rank_->sms() - rank_->sms() % kClusterCtas; }

  void enqueue(BenchVariant v, const BenchResult& result) {
    if (const auto call = calls_.find(v); call != calls_.end()) {
      call->second->enqueue(stream_);
      return;
    }
    if (needs_nccl(v) && !options_.mirror) exchange();
    if (needs_dense(v)) {
      if (dense_ != nullptr) rig_->dense(*dense_, stream_);
    } else {
      rig_->gemm(result.config, ctas(), stream_);
    }
    if (needs_nccl(v) && options_.mirror) exchange();
  }
  void exchange() {
    for (const bool scales : {false, true}) {
      const std::vector<NcclPiece> pieces = rig_->pieces(scales);
      if (!pieces.empty()) nccl_->exchange(pieces, stream_);
    }
  }

  // Chunks as they come may be added in another order; NCCL leaves the mirror's own part where the
  // GEMM wrote it.
  bool same_bits(BenchVariant v) const {
    return v != BenchVariant::kArrival && !(options_.mirror && v == BenchVariant::kNccl);
  }

  // Every other whole variant once into a poisoned result.
  void compare(BenchResult& result) {
    std::vector<std::uint16_t> first;
    for (const BenchTiming& timing : result.timings) {
      if (!is_whole(timing.variant) || !same_bits(timing.variant)) continue;
      PENSTOCK_CUDA_CHECK(cudaMemsetAsync(rig_->out().data(), 0xff, rig_->out().bytes(), stream_));
      PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream_));
      team_->barrier();
      enqueue(timing.variant, result);
      rank_->track(stream_);
      PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream_));
      team_->check();
      team_->barrier();
      std::vector<std::uint16_t> got = rig_->out().download();
      std::int64_t differing = 0;
      if (first.empty()) {
        first = std::move(got);
      } else {
        for (std::size_t i = 0; i < got.size(); ++i) differing += got[i] != first[i] ? 1 : 0;
      }
      std::vector<std::int64_t> all(size_of(team_->size()));
      team_->all_gather(std::as_bytes(std::span(&differing, 1)),
                        std::as_writable_bytes(std::span(all)));
      for (const std::int64_t d : all) result.differing += d;
      result.compared +=
          fmt::format("{}{}", result.compared.empty() ? "" : " ", to_string(timing.variant));
    }
  }

  void time(BenchResult& result) {
    const OwnedEvent begin{cudaEventDefault};
    const OwnedEvent end{cudaEventDefault};
    const std::size_t count = result.timings.size();
    for (int round = 0; round < options_.warmup + options_.rounds; ++round) {
      for (std::size_t i = 0; i < count; ++i) {
        BenchTiming& timing = result.timings[(i + size_of(round)) % count];
        team_->barrier();
        PENSTOCK_CUDA_CHECK(cudaMemsetAsync(scrub_.data(), round & 0xff, scrub_.bytes(), stream_));
        PENSTOCK_CUDA_CHECK(moe_stage2::launch_align_sm90(align_, stream_));
        begin.record(stream_);
        enqueue(timing.variant, result);
        end.record(stream_);
        rank_->track(stream_);
        PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream_));
        float ms = 0.0f;
        PENSTOCK_CUDA_CHECK(cudaEventElapsedTime(&ms, begin.get(), end.get()));
        std::vector<float> all(size_of(team_->size()));
        team_->all_gather(std::as_bytes(std::span(&ms, 1)), std::as_writable_bytes(std::span(all)));
        if (round < options_.warmup) continue;
        timing.us.push_back(1e3 * static_cast<double>(*std::max_element(all.begin(), all.end())));
      }
    }
    team_->check();
  }

  TeamHandle team_;
  BenchOptions options_;
  std::shared_ptr<cuda::DeviceRank> rank_;
  std::shared_ptr<Window> align_window_;
  DeviceBuffer<std::uint64_t> align_epoch_;
  AlignArgs align_;
  std::unique_ptr<Rig> rig_;
  DeviceBuffer<std::byte> scrub_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<moe_stage2::NcclAllToAll> nccl_;
  std::unique_ptr<DenseBaseline> dense_;
  std::map<BenchVariant, std::unique_ptr<Call>> calls_;
};

}  // namespace

BenchResult gpu_bench_a2a_gemm(const TeamHandle& team, int device, const BenchOptions& options) {
  const cuda::ScopedDevice scope(device);
  Bench bench(team, device, options);
  BenchResult result = bench.run();
  team->barrier();
  return result;
}

}  // namespace penstock::a2a_gemm
