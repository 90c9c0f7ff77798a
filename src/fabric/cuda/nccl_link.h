// NCCL beside the fabric in one run: opened by name, called from every rank.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "fabric/gpu.h"

namespace penstock::cuda {

// Takes one figure; called on rank 0.
using FigureSink = std::function<void(const std::string& figure, const std::string& unit,
                                      std::vector<double> values,
                                      std::vector<std::pair<std::string, LinkValue>> conditions)>;

// Collective, this rank's device current. `shared`: whether some ranks share a GPU, which NCCL
// refuses. All-reduces of 1 to 16 rows of 6144 bf16 over all ranks, then sends of `sizes` bytes
// from rank 0 to rank 1, one way and both. Returns NCCL's version, or why it was not measured;
// equal on every rank. NCCL waits for its peers without a deadline: it is entered only once every
// rank has opened the library.
std::string bench_nccl(Team& team, bool shared, const std::string& library,
                       const std::vector<std::uint64_t>& sizes, int samples, const FigureSink& add);

}  // namespace penstock::cuda
