// The decode layer's kernel for two rows.
#include "ops/decode_layer/cuda/decode_layer_sm90.cuh"

namespace penstock::decode {

int launch_decode_rows2_sm90(const DecodeArguments& arguments, void* stream) {
  return launch_kernel<2>(arguments, stream);
}
int resources_decode_rows2_sm90(KernelResources* out) { return kernel_resources<2>(out); }

}  // namespace penstock::decode
