#include "penstock/ops/a2a_gemm/plan.h"

#include <algorithm>

namespace penstock::a2a_gemm {

std::vector<Piece> pieces_of(const Shape& shape, std::int32_t rank, std::int32_t row_block_rows) {
  std::vector<Piece> pieces;
  const std::int32_t blocks = row_block_count(max_rows(shape), row_block_rows);
  for (std::int32_t block = 0; block < blocks; ++block) {
    for (std::int32_t step = 1; step < shape.ranks; ++step) {
      const std::int32_t peer = destination_of_step(rank, step, shape.ranks);
      const std::int32_t row = block * row_block_rows;
      const std::int32_t left = shape.rows[static_cast<std::size_t>(peer)] - row;
      if (left > 0) pieces.push_back({peer, row, std::min(left, row_block_rows), block});
    }
  }
  return pieces;
}

}  // namespace penstock::a2a_gemm
