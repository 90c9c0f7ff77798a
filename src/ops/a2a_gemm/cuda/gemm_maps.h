// The gated GEMM's tensor maps. Host side.
#pragma once

#include "ops/a2a_gemm/cuda/a2a_gemm_sm90.h"
#include "ops/sm90/tensor_map.h"

namespace penstock::a2a_gemm {

// local [rows of `rank`, K], chunk [ranks * max_rows, K] of one slot, w [ranks * N, K]; 16-byte
// aligned device memory. Tiles that pass a chunk's last row read the next chunk's first rows, which
// are multiplied and never stored.
inline GemmMaps make_gemm_maps(const Shape& shape, std::int32_t rank, const void* local,
                               const void* chunks, const void* w) {
  const auto bytes = static_cast<std::uint64_t>(shape.row_bytes());
  const auto ranks = static_cast<std::uint64_t>(shape.ranks);
  const auto map = [&](const void* base, std::uint64_t rows) {
    return sm90::make_byte_map(base, {bytes, rows}, {kStepBytes, kTileRows});
  };
  return {map(local, static_cast<std::uint64_t>(shape.rows[static_cast<std::size_t>(rank)])),
          map(chunks, ranks * static_cast<std::uint64_t>(max_rows(shape))),
          map(w, ranks * static_cast<std::uint64_t>(shape.columns))};
}

// The mirror's: x [rows of `rank`, K], w [ranks * N, K].
inline GemmMaps make_mirror_maps(const Shape& shape, std::int32_t rank, const void* x,
                                 const void* w) {
  return make_gemm_maps(shape, rank, x, x, w);
}

}  // namespace penstock::a2a_gemm
