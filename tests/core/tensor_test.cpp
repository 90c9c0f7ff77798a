#include "penstock/core/tensor.h"

#include <gtest/gtest.h>

namespace penstock {
namespace {

TEST(TensorTest, CountsElementsAndBytesBeyond4GiB) {
  TensorView view;
  view.dtype = DType::kBF16;
  view.rank = 3;
  view.shape = {70000, 70000, 2};
  EXPECT_EQ(view.elements(), 9'800'000'000);
  EXPECT_EQ(view.bytes(), 19'600'000'000);
}

TEST(TensorTest, SubByteElementsRoundUpToBytes) {
  TensorView view;
  view.dtype = DType::kE2M1;
  view.rank = 1;
  view.shape = {5};
  EXPECT_EQ(view.bytes(), 3);
}

TEST(TensorTest, DescribesShapeAndType) {
  TensorView view;
  view.dtype = DType::kE4M3;
  view.rank = 2;
  view.shape = {256, 128};
  EXPECT_EQ(describe(view), "[256, 128] F8_E4M3");
  EXPECT_TRUE(view.has_shape({256, 128}));
  EXPECT_FALSE(view.has_shape({256}));
  EXPECT_FALSE(view.has_shape({128, 256}));
  view.rank = 0;
  EXPECT_EQ(view.elements(), 1);
  EXPECT_EQ(describe(view), "[] F8_E4M3");
}

}  // namespace
}  // namespace penstock
