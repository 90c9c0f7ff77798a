// The check of a call's operands that both back ends make.
#pragma once

#include "penstock/ops/a2a_gemm/reference.h"

namespace penstock::a2a_gemm {

// Throws InvalidArgument naming what `rank` lacks: a pointer, or scales of a usable stride.
void check_operands(const Operands& o, const Shape& shape, std::int32_t rank);

}  // namespace penstock::a2a_gemm
