// Measured crossovers of the transports: what `penstock tune` stores and `auto` reads. One file a
// user, $XDG_CONFIG_HOME/penstock/moe_stage2.json or ~/.config/penstock/moe_stage2.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/fabric/transport.h"
#include "penstock/ops/moe_stage2/shape.h"

namespace penstock::moe_stage2 {

// The transport that was shortest on one machine, from each token count up to the next.
struct Crossover {
  std::string machine;  // the GPU's name, or the processor's
  std::int32_t ranks = 0;
  std::int32_t hidden = 0;
  WireFormat wire = WireFormat::kFp8;
  struct Point {
    std::int64_t tokens = 0;
    TransportKind transport = TransportKind::kCopyEngine;
  };
  std::vector<Point> points;  // tokens ascend
};

// Where the file is; empty where neither variable is set.
std::string tuning_path();

// Puts a crossover into the file, in place of one of the same machine, ranks, hidden and wire.
// Whole or not at all: the file is written beside and renamed. Throws Unsupported where there is no
// path, Backend with the system's words, InvalidArgument for a file that is not of this kind.
void store_crossover(const Crossover& crossover);

// What is stored for a machine and shape; nothing without file or entry. Below the first token
// count the first transport. Reads the file anew. Throws InvalidArgument, naming the file and the
// remedy, where it is not what store_crossover() writes.
std::optional<TransportKind> tuned_transport(std::string_view machine, const Shape& shape);

// `auto`: what is stored, else choose_transport(shape), or direct where ranks share a GPU: copies
// within one run on the SMs that the GEMM is on (docs/moe-stage2.md has the figures).
TransportKind choose_transport(std::string_view machine, const Shape& shape,
                               bool ranks_share_gpu = false);

}  // namespace penstock::moe_stage2
