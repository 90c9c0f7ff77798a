// bench.h in a build without the CUDA back end.
#include "fabric/gpu.h"
#include "ops/decode_layer/bench.h"
#include "penstock/core/error.h"

namespace penstock::decode {

std::unique_ptr<DecodeBench> make_gpu_decode_bench(const DecodeBenchOptions&) {
  throw_error(ErrorKind::kUnsupported, "decode_layer on a GPU: " + gpu_unavailable());
}

}  // namespace penstock::decode
