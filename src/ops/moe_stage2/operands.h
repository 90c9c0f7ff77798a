// What both back ends ask of a call's operands.
#pragma once

#include "penstock/ops/moe_stage2/moe_stage2.h"

namespace penstock::moe_stage2 {

// Throws InvalidArgument naming what is missing or does not fit the operator. Looks at pointers and
// sizes, not at what is behind them.
void check_operands(const Operands& o, const Shape& shape);

}  // namespace penstock::moe_stage2
