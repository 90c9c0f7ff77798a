// The CUDA operators' results beside f64, for --check.
#include <algorithm>
#include <span>

#include "cli/bench/a2a_contest.h"
#include "cli/bench/moe_contest.h"
#include "cli/bench/timeline_trace.h"
#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "fabric/cuda/device_rank.h"
#include "ops/a2a_gemm/cuda/operator.h"
#include "ops/moe_stage2/cuda/operator.h"

namespace penstock::bench {

using cuda::DeviceBuffer;

namespace {

constexpr int kErrorSamples = 64;

template <typename T>
DeviceBuffer<T> on_device(std::vector<T> values) {
  values.resize(std::max<std::size_t>(values.size(), 1));  // a rank may have nothing
  return DeviceBuffer<T>(values);
}

std::size_t at_least_one(std::int64_t count) {
  return static_cast<std::size_t>(std::max<std::int64_t>(count, 1));
}

class ScopedStream {
 public:
  ScopedStream() {
    PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~ScopedStream() { (void)cudaStreamDestroy(stream_); }
  ScopedStream(const ScopedStream&) = delete;
  ScopedStream& operator=(const ScopedStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// The largest of all ranks'; NaN if any is.
double worst_of(Team& team, double mine) {
  std::vector<double> all(static_cast<std::size_t>(team.size()));
  team.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  double worst = 0.0;
  for (const double e : all) worst = e <= worst ? worst : e;
  return worst;
}

// One call into a poisoned result, and how far it is off.
template <typename Operator, typename Operands, typename Problem>
double error_of(Team& team, Operator& op, const Operands& operands, DeviceBuffer<Bf16>& out,
                const Problem& problem, cudaStream_t stream) {
  op.prepare({stream});
  out.fill(0xFF);
  PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
  team.barrier();
  op.run({stream}, operands);
  PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream));
  team.check();
  return worst_of(team, sampled_error(problem, team.rank(), out.download(), kErrorSamples));
}

}  // namespace

std::vector<double> cuda_moe_errors(const TeamHandle& team, int device, const MoeProblem& problem) {
  const cuda::ScopedDevice scope(device);
  const auto rank = cuda::DeviceRank::create(team, device);
  const MoeHostOperands host(problem, team->rank());
  const auto act = on_device(host.act);
  const auto act_scales = on_device(host.act_scales);
  const auto weight = on_device(host.weight);
  const auto weight_scales = on_device(host.weight_scales);
  const auto token_weight = on_device(host.token_weight);
  const auto expert_rows = on_device(host.rows.expert_rows);
  const auto origin = on_device(host.rows.origin);
  DeviceBuffer<Bf16> out(at_least_one(host.tokens * problem.shape.hidden));
  moe_stage2::Operands o = host.view(out.data());
  o.gemm.act = act.data();
  o.gemm.act_scales = act_scales.data();
  o.gemm.weight = weight.data();
  o.gemm.weight_scales = weight_scales.data();
  o.weight = token_weight.data();
  o.expert_rows = expert_rows.data();
  o.origin = origin.data();

  const ScopedStream stream;
  std::vector<double> errors;
  for (const TransportKind kind :
       {TransportKind::kCopyEngine, TransportKind::kSm, TransportKind::kDirect}) {
    moe_stage2::Options options;
    options.transport = kind;
    const auto op = moe_stage2::make_cuda_moe_stage2(rank, problem.shape, options);
    errors.push_back(error_of(*team, *op, o, out, problem, stream.get()));
  }
  team->barrier();  // nobody frees what a peer may still map
  return errors;
}

namespace {

// One rank's operands of a2a_gemm or its mirror on its GPU.
struct A2aOnDevice {
  A2aOnDevice(const A2aProblem& problem, int rank)
      : host(problem, rank),
        x(on_device(host.x)),
        w(on_device(host.w)),
        x_scales(on_device(host.x_scales)),
        w_scales(on_device(host.w_scales)),
        out(at_least_one((problem.mirror ? total_rows(problem.shape)
                                         : problem.shape.rows[static_cast<std::size_t>(rank)]) *
                         problem.shape.columns)),
        view(host.view(out.data())) {
    view.x = x.data();
    view.w = w.data();
    if (view.x_scales != nullptr) view.x_scales = x_scales.data();
    if (view.w_scales != nullptr) view.w_scales = w_scales.data();
  }
  A2aHostOperands host;
  DeviceBuffer<std::byte> x, w;
  DeviceBuffer<float> x_scales, w_scales;
  DeviceBuffer<Bf16> out;
  a2a_gemm::Operands view;
};

a2a_gemm::Options a2a_options(const A2aProblem& problem) {
  a2a_gemm::Options options;
  options.fuse = a2a_gemm::Fuse::kAlways;
  options.row_block_rows = problem.row_block_rows;
  return options;
}

}  // namespace

std::vector<double> cuda_a2a_errors(const TeamHandle& team, int device, const A2aProblem& problem) {
  const cuda::ScopedDevice scope(device);
  const auto rank = cuda::DeviceRank::create(team, device);
  A2aOnDevice mine(problem, team->rank());
  const ScopedStream stream;
  std::vector<double> errors;
  for (const TransportKind kind : {TransportKind::kCopyEngine, TransportKind::kSm}) {
    a2a_gemm::Options options = a2a_options(problem);
    options.transport = kind;
    if (problem.mirror) {
      const auto op = a2a_gemm::make_cuda_gemm_a2a(rank, problem.shape, options);
      errors.push_back(error_of(*team, *op, mine.view, mine.out, problem, stream.get()));
    } else {
      const auto op = a2a_gemm::make_cuda_a2a_gemm(rank, problem.shape, options);
      errors.push_back(error_of(*team, *op, mine.view, mine.out, problem, stream.get()));
    }
  }
  team->barrier();
  return errors;
}

Trace trace_cuda_a2a(const TeamHandle& team, int device, const A2aProblem& problem) {
  const cuda::ScopedDevice scope(device);
  const auto rank = cuda::DeviceRank::create(team, device);
  const A2aOnDevice mine(problem, team->rank());
  const ScopedStream stream;
  Timeline timeline;
  a2a_gemm::Options options = a2a_options(problem);
  options.timeline = &timeline;
  const auto op = a2a_gemm::make_cuda_a2a_gemm(rank, problem.shape, options);
  op->prepare({stream.get()});
  for (int call = 0; call < 3; ++call) {  // the last one counts
    PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
    team->barrier();
    op->run({stream.get()}, mine.view);
    PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
    team->check();
  }
  op->collect_timeline();
  Trace trace = trace_of(*team, timeline.take(), "row_block");
  team->barrier();  // nobody frees what a peer may still map
  return trace;
}

}  // namespace penstock::bench
