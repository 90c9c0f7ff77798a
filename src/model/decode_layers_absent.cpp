// cuda_decode_layers() in a build without the CUDA back end.
#include "fabric/gpu.h"
#include "penstock/core/error.h"
#include "penstock/model/decode_layers.h"

namespace penstock {

std::unique_ptr<DecodeLayers> cuda_decode_layers(const Checkpoint&, const EngineOptions&) {
  throw_error(ErrorKind::kUnsupported, "decode_layer on a GPU: " + gpu_unavailable());
}

}  // namespace penstock
