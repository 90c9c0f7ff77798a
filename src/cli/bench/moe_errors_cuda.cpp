#include <algorithm>
#include <span>

#include "cli/bench/moe_contest.h"
#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "fabric/cuda/device_rank.h"
#include "ops/moe_stage2/cuda/operator.h"

namespace penstock::bench {

using namespace moe_stage2;
using cuda::DeviceBuffer;

namespace {

constexpr int kErrorSamples = 64;

template <typename T>
DeviceBuffer<T> on_device(std::vector<T> values) {
  values.resize(std::max<std::size_t>(values.size(), 1));  // a rank may have no rows
  return DeviceBuffer<T>(values);
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
  DeviceBuffer<Bf16> out(
      std::max<std::size_t>(1, static_cast<std::size_t>(host.tokens * problem.shape.hidden)));
  Operands o = host.view(out.data());
  o.gemm.act = act.data();
  o.gemm.act_scales = act_scales.data();
  o.gemm.weight = weight.data();
  o.gemm.weight_scales = weight_scales.data();
  o.weight = token_weight.data();
  o.expert_rows = expert_rows.data();
  o.origin = origin.data();

  cudaStream_t stream = nullptr;
  PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::vector<double> worst;
  for (const TransportKind kind :
       {TransportKind::kCopyEngine, TransportKind::kSm, TransportKind::kDirect}) {
    Options options;
    options.transport = kind;
    const auto op = make_cuda_moe_stage2(rank, problem.shape, options);
    op->prepare({stream});
    out.fill(0xFF);
    team->barrier();
    op->run({stream}, o);
    PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream));
    team->check();
    const double mine = sampled_error(problem, team->rank(), out.download(), kErrorSamples);
    std::vector<double> all(static_cast<std::size_t>(team->size()));
    team->all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    double error = 0.0;
    for (const double e : all) error = e <= error ? error : e;  // NaN stays
    worst.push_back(error);
  }
  PENSTOCK_CUDA_CHECK(cudaStreamDestroy(stream));
  team->barrier();  // nobody frees what a peer may still map
  return worst;
}

}  // namespace penstock::bench
