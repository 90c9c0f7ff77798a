// The decode layer's kernel for one row.
#include "ops/decode_layer/cuda/decode_layer_sm90.cuh"

namespace penstock::decode {

int launch_decode_rows1_sm90(const DecodeArguments& arguments, void* stream) {
  return launch_kernel<1>(arguments, stream);
}
int resources_decode_rows1_sm90(KernelResources* out) { return kernel_resources<1>(out); }

}  // namespace penstock::decode
