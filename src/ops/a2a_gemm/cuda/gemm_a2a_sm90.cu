// The mirror's GEMM, sm_90a: gemm_main_sm90.cuh over one chunk of K and the slabs of all
// destinations, a piece after the other. The warp that stores the last part of a piece hands the
// piece over: no thread, warp or SM of its own.
#include <cuda_runtime.h>

#include "ops/a2a_gemm/cuda/gemm_main_sm90.cuh"
#include "ops/a2a_gemm/cuda/mirror_kernels.h"
#include "ops/a2a_gemm/cuda/post_results_sm90.cuh"
#include "ops/moe_stage2/cuda/post_sm90.cuh"

namespace penstock::a2a_gemm {
namespace {

using namespace main_loop;

constexpr std::uint32_t kSharedBytes = kGateOffset;

class ResultJob {
 public:
  using Place = MirrorPlace;
  static constexpr bool kPicked = false;
  static constexpr bool kOneChunk = true;

  __device__ explicit ResultJob(const MirrorArgs& args) : args_(args) {}
  __device__ const GemmArgs& args() const { return args_.gemm; }
  __device__ int tiles() const { return args_.send.grid.tiles(); }
  // As ChunkJob::place(): divisors that stay out of the registers.
  __device__ __forceinline__ Place place(int linear) const {
    MirrorGrid opaque = args_.send.grid;
    asm volatile(""
                 : "+r"(opaque.part.band), "+r"(opaque.part.columns), "+r"(opaque.block_rows),
                   "+r"(opaque.part.cluster_rows));
    return mirror_place(opaque, linear);
  }
  __device__ int chunks() const { return 1; }
  __device__ bool local(int) const { return true; }
  __device__ int slab(const Place& place, int) const { return place.destination; }
  __device__ std::uint16_t* result(const Place& place) const {
    return args_.result[place.destination];
  }
  __device__ __forceinline__ void written(const Place& place, int, int) const {
    if (place.piece < 0) return;
    __syncwarp();  // the lanes' stores before the one lane's release
    if (threadIdx.x % 32 != 0) return;
    const std::uint32_t full = static_cast<std::uint32_t>(args_.send.grid.piece_tiles(place.piece) *
                                                          kClusterCtas * kConsumerWarps);
    if (moe_stage2::count_tile(args_.send.counters + place.piece, full)) {
      post_result(args_.send, place.piece);
    }
  }

 private:
  const MirrorArgs& args_;
};

// X and W are there.
struct OpenGate {
  __device__ int pass(const MirrorPlace& place, int, int, int, bool) { return place.destination; }
};

template <Format kFormat>
__global__ void __cluster_dims__(kClusterCtas, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_a2a_sm90(const __grid_constant__ MirrorArgs args, const __grid_constant__ GemmMaps maps) {
  extern __shared__ __align__(1024) unsigned char storage[];
  const ResultJob job(args);
  run_roles<kFormat>(job, maps, shared_address(storage), nullptr, OpenGate{}, [] {});
}

using Kernel = void (*)(MirrorArgs, GemmMaps);
Kernel kernel_of(Format format) {
  return format == Format::kBf16 ? gemm_a2a_sm90<Format::kBf16> : gemm_a2a_sm90<Format::kFp8>;
}

}  // namespace

cudaError_t load_gemm_a2a_sm90() {
  for (const Format format : {Format::kBf16, Format::kFp8}) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel_of(format), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(kSharedBytes));
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t launch_gemm_a2a_sm90(const MirrorArgs& args, const GemmMaps& maps, Format format,
                                 int ctas, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ctas / kClusterCtas * kClusterCtas));
  const Kernel kernel = kernel_of(format);
  kernel<<<grid, kThreads, kSharedBytes, stream>>>(args, maps);
  return cudaGetLastError();
}

}  // namespace penstock::a2a_gemm
