// The check of a call's operands that both back ends make.
#pragma once

#include "penstock/ops/a2a_gemm/reference.h"

namespace penstock::a2a_gemm {

// Throws InvalidArgument naming what `rank` lacks: a pointer, or scales of a usable stride. X's own
// scales are left alone with `quantise_x`.
void check_operands(const Operands& o, const Shape& shape, std::int32_t rank, bool quantise_x);
// Throws InvalidArgument unless the shape is one that X can be quantised for.
void check_quantise_x(const Shape& shape, bool quantise_x);

}  // namespace penstock::a2a_gemm
