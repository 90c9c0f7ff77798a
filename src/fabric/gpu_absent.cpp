// gpu.h in a build without the CUDA back end.
#include "fabric/gpu.h"
#include "penstock/core/error.h"

namespace penstock {
namespace {

constexpr const char* kAbsent =
    "this build has no CUDA back end: configure with -DPENSTOCK_CUDA=ON and nvcc on PATH";

}  // namespace

std::string gpu_unavailable() { return kAbsent; }
GpuMachine describe_gpus() { throw_error(ErrorKind::kUnsupported, kAbsent); }
int gpu_of_rank(int) { throw_error(ErrorKind::kUnsupported, kAbsent); }
GpuSelfTest gpu_self_test(const TeamHandle&, int, const SelfTestOptions&) {
  throw_error(ErrorKind::kUnsupported, kAbsent);
}
GpuLinkBench gpu_bench_link(const TeamHandle&, int, const GpuLinkOptions&) {
  throw_error(ErrorKind::kUnsupported, kAbsent);
}

}  // namespace penstock
