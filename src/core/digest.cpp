#include "penstock/core/digest.h"

#include <fmt/format.h>

namespace penstock {

std::string to_hex(std::uint64_t digest) { return fmt::format("{:016x}", digest); }

}  // namespace penstock
