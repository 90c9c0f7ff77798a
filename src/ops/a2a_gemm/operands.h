// The check of a call's operands that both back ends make.
#pragma once

#include "penstock/ops/a2a_gemm/a2a_gemm.h"
#include "penstock/ops/a2a_gemm/reference.h"

namespace penstock::a2a_gemm {

// Throws InvalidArgument naming what `rank` lacks: a pointer, or scales of a usable stride. X's own
// scales are left alone with `quantise_x`.
void check_operands(const Operands& o, const Shape& shape, std::int32_t rank, bool quantise_x);
// Throws InvalidArgument unless the shape is one that X can be quantised for.
void check_quantise_x(const Shape& shape, bool quantise_x);
// The mirror's. InvalidArgument as above, and for options that have no meaning there.
void check_mirror_operands(const Operands& o, const Shape& shape, std::int32_t rank);
void check_mirror_options(const Options& options);

}  // namespace penstock::a2a_gemm
