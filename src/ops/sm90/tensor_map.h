// Tensor maps for the copy engine of an SM, encoded on the host.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <initializer_list>

namespace penstock::sm90 {

// Map of a dense row-major u8 tensor, its sizes from the innermost dimension out, with a 128-byte
// swizzle: box[0] is 128. Elements outside the tensor read as zero. `base` is 16-byte aligned
// device memory; sizes[0] is a multiple of
// 16. Throws Error(kBackend) with the driver's code when the driver refuses or is not there.
CUtensorMap make_byte_map(const void* base, std::initializer_list<std::uint64_t> sizes,
                          std::initializer_list<std::uint32_t> box);

}  // namespace penstock::sm90
