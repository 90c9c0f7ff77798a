#include "penstock/core/version.h"

namespace penstock {

std::string_view version() { return PENSTOCK_VERSION; }
bool built_with_cuda() noexcept { return PENSTOCK_HAS_CUDA != 0; }

}  // namespace penstock
