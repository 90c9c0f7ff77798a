// The decode layer's kernel for up to eight rows.
#include "ops/decode_layer/cuda/decode_layer_sm90.cuh"

namespace penstock::decode {

int launch_decode_rows8_sm90(const DecodeArguments& arguments, void* stream) {
  return launch_kernel<8>(arguments, stream);
}
int resources_decode_rows8_sm90(KernelResources* out) { return kernel_resources<8>(out); }

}  // namespace penstock::decode
