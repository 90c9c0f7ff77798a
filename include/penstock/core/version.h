// What this build is.
#pragma once

#include <string_view>

namespace penstock {

std::string_view version();       // "0.1.0"
bool built_with_cuda() noexcept;  // whether the CUDA back end was compiled in

}  // namespace penstock
