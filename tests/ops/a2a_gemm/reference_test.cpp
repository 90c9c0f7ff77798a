#include <gtest/gtest.h>

#include <cmath>

#include "ops/a2a_gemm/random_operands.h"

namespace penstock::a2a_gemm {
namespace {

Shape odd_shape(Format format) {
  Shape shape = even_shape(3, 48, 208, 144, format);
  shape.rows[1] = 80;
  return shape;
}

TEST(ReferenceTest, EqualsF64ExactlyOnSmallIntegers) {
  for (const Format format : {Format::kBf16, Format::kFp8}) {
    World world(odd_shape(format), Data::kSmallIntegers, 3);
    for (int rank = 0; rank < 3; ++rank) {
      const auto out = world.expected(rank);
      const auto* got = reinterpret_cast<const Bf16*>(out.data());
      for (std::int64_t row = 0; row < world.shape().rows[static_cast<std::size_t>(rank)]; ++row) {
        for (std::int64_t column = 0; column < world.shape().columns; ++column) {
          const double exact =
              element_f64(world.shape(), rank, world.operands().data(), row, column);
          ASSERT_EQ(got[row * world.shape().columns + column].bits,
                    Bf16::from_float(static_cast<float>(exact)).bits)
              << to_string(format) << " rank " << rank << " (" << row << ", " << column << ")";
        }
      }
    }
  }
}

TEST(ReferenceTest, StaysWithinOnePercentOfF64OnRandomData) {
  for (const Format format : {Format::kBf16, Format::kFp8}) {
    World world(odd_shape(format), Data::kRandom, 4);
    const auto out = world.expected(1);
    const auto* got = reinterpret_cast<const Bf16*>(out.data());
    double error = 0.0;
    double norm = 0.0;
    for (std::int64_t row = 0; row < 80; ++row) {
      for (std::int64_t column = 0; column < 144; ++column) {
        const double exact = element_f64(world.shape(), 1, world.operands().data(), row, column);
        const double value = static_cast<double>(got[row * 144 + column].to_float());
        error += (value - exact) * (value - exact);
        norm += exact * exact;
      }
    }
    EXPECT_LT(std::sqrt(error / norm), 1e-2);
  }
}

// The sum of a chunk does not depend on how its rows are split.
TEST(ReferenceTest, RowsMayBeAddedInPieces) {
  World world(odd_shape(Format::kFp8), Data::kRandom, 5);
  const Operands& o = world.operands()[0];
  const ChunkView chunk{o.x, o.x_scales, o.x_scale_stride};
  std::vector<float> whole(80 * 144, 0.0f);
  std::vector<float> parts(80 * 144, 0.0f);
  add_chunk(world.shape(), chunk, 0, 80, o.w, o.w_scales, 2, whole.data());
  add_chunk(world.shape(), chunk, 0, 16, o.w, o.w_scales, 2, parts.data());
  add_chunk(world.shape(), chunk, 16, 64, o.w, o.w_scales, 2, parts.data() + 16 * 144);
  EXPECT_EQ(whole, parts);
}

}  // namespace
}  // namespace penstock::a2a_gemm
