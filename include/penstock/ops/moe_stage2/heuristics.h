// Choices from the shape alone: pure functions, the same on every rank.
#pragma once

#include <cstdint>

#include "penstock/fabric/transport.h"
#include "penstock/ops/moe_stage2/shape.h"

namespace penstock::moe_stage2 {

// Bytes to one peer that a chunk aims at: a copy engine moves 1.4 MB at 60% of its rate and longer
// ones better, while a chunk's rows wait for its last tile.
inline constexpr double kChunkBytes = 1.4e6;

// Tiles whose rows leave together: kChunkBytes to each peer where rows spread evenly over the
// ranks, 1 to 64.
std::int32_t choose_tiles_per_chunk(const Shape& shape);

// Transport sm: CTAs that copy beside the GEMM, each on an SM that the GEMM does without. Enough
// that rows leave as fast as a GEMM of kGemmFlops makes them, at kCopyCtaBytes a second each; even,
// because the GEMM's CTAs come in pairs, 2 to 16, and 0 without peers.
inline constexpr double kGemmFlops = 1.05e15;    // of the FP8 GEMM on an H200, docs/moe-stage2.md
inline constexpr double kCopyCtaBytes = 45.0e9;  // of a CTA of 1024 threads over NVLink
inline constexpr std::int32_t kMostCopyCtas = 16;
std::int32_t choose_copy_ctas(const Shape& shape);

// From so many tokens a rank on `auto` takes the copy engine; below, direct stores. Predicted, not
// measured over NVLink: a descriptor takes 10 to 13 us to become a signal, 5% of a GEMM of 1024
// tokens, while stores of the epilogue share the SMs' path to memory with the GEMM's own loads.
inline constexpr std::int64_t kCopyEngineFromTokens = 1024;
// What `auto` takes on cuda, by max_tokens_per_rank.
TransportKind choose_transport(const Shape& shape);

}  // namespace penstock::moe_stage2
