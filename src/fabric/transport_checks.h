// What every transport asks of a descriptor, on either back end.
#pragma once

#include <string_view>

#include "penstock/fabric/transport.h"

namespace penstock::detail {

// Throws InvalidArgument naming the field unless the put stays inside the window at both ends.
void check_put(const Window& window, const PutDescriptor& put, std::string_view transport);

}  // namespace penstock::detail
