#include "ops/decode_layer/cuda/peers.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>

#include "core/cuda/check.h"
#include "penstock/core/error.h"

namespace penstock::decode {

void enable_peers(std::span<const int> devices) {
  for (const int device : devices) {
    for (const int peer : devices) {
      if (device == peer) continue;
      int can = 0;
      PENSTOCK_CUDA_CHECK(cudaDeviceCanAccessPeer(&can, device, peer));
      require(can != 0, ErrorKind::kUnsupported, [&] {
        return fmt::format(
            "decode_layer: GPU {} cannot reach the memory of GPU {}: use GPUs with NVLink "
            "or PCIe peer access, or fewer of them (CUDA_VISIBLE_DEVICES)",
            device, peer);
      });
      PENSTOCK_CUDA_CHECK(cudaSetDevice(device));
      const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
      if (status == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError();
        continue;
      }
      cuda::check(status, "cudaDeviceEnablePeerAccess");
    }
  }
}

int share_of_device(int device, std::span<const int> devices) {
  const auto sharing = static_cast<int>(std::count(devices.begin(), devices.end(), device));
  if (sharing <= 1) return 0;
  int sms = 0;
  PENSTOCK_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  return sms / sharing;
}

}  // namespace penstock::decode
