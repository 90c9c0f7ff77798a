#include "penstock/ops/a2a_gemm/shape.h"

#include <gtest/gtest.h>

#include "penstock/core/error.h"
#include "penstock/ops/a2a_gemm/a2a_gemm.h"
#include "penstock/ops/a2a_gemm/layout.h"

namespace penstock::a2a_gemm {
namespace {

TEST(ShapeTest, SaysWhatIsWrong) {
  const Shape good = even_shape(2, 32, 64, 48, Format::kBf16);
  EXPECT_EQ(find_fault(good), "");
  const auto fault = [&](auto change) {
    Shape shape = good;
    change(shape);
    const std::string text = find_fault(shape);
    if (!text.empty()) {
      EXPECT_THROW(validate(shape), Error);
    }
    return text;
  };
  EXPECT_NE(fault([](Shape& s) { s.ranks = 9; }).find("ranks is 9; 1 to 8"), std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.ranks = 0; }).find("ranks is 0"), std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.rows[1] = 24; }).find("rank 1 has 24 rows"), std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.rows[0] = -16; }).find("-16"), std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.rows[2] = 16; }).find("rank 2 but there are 2"),
            std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.depth = 8; }).find("depth is 8"), std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.depth = 0; }).find("depth is 0"), std::string::npos);
  EXPECT_NE(fault([](Shape& s) { s.columns = 40; }).find("columns is 40"), std::string::npos);
  EXPECT_EQ(fault([](Shape& s) { s.rows[0] = 0; }), "");
}

TEST(ShapeTest, CountsStepsScalesAndBytes) {
  Shape s = even_shape(4, 64, 272, 144, Format::kBf16);
  EXPECT_EQ(s.steps(), 5);  // 544 bytes
  EXPECT_EQ(s.scale_blocks(), 0);
  s.format = Format::kFp8;
  EXPECT_EQ(s.steps(), 3);
  EXPECT_EQ(s.scale_blocks(), 3);
  EXPECT_EQ(s.column_scale_blocks(), 2);
  s.rows[1] = 0;
  EXPECT_EQ(row_offset(s, 2), 64);
  EXPECT_EQ(total_rows(s), 192);
  EXPECT_EQ(wire_bytes(s, 1), 0.0);
  EXPECT_EQ(wire_bytes(s, 0), 64.0 * 3 * (272 + 12));
  EXPECT_EQ(describe(s), "ranks=4 rows=64,0,64,64 depth=272 columns=144 format=fp8");
}

// Every address that the protocol can use lies in its own region, and no two coincide.
TEST(LayoutTest, AddressesAreInsideTheirRegionsAndDisjoint) {
  for (const Format format : {Format::kBf16, Format::kFp8}) {
    Shape shape = even_shape(3, 544, 272, 144, format);
    shape.rows[2] = 16;
    for (const bool staged : {false, true}) {
      const WindowShape w = window_shape(shape, 256, staged);
      const WindowIndex index = window_index(w);
      ASSERT_TRUE(index.at.valid);
      EXPECT_EQ(w.row_blocks, 3u);
      const Layout layout = window_layout(shape, 256, staged);
      EXPECT_EQ(layout.total_bytes(), index.at.total_bytes);
      for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
        for (int source = 0; source < 3; ++source) {
          for (const std::uint64_t row : {std::uint64_t{0}, std::uint64_t{543}}) {
            EXPECT_EQ(layout.region_at(index.chunk(slot, source, row)), kChunks);
            EXPECT_EQ(layout.region_at(index.chunk(slot, source, row) + w.row_bytes - 1), kChunks);
          }
          for (std::uint64_t block = 0; block < w.scale_blocks; ++block) {
            EXPECT_EQ(layout.region_at(index.chunk_scale(slot, source, block, 543)), kChunkScales);
          }
          for (std::uint64_t block = 0; block < w.row_blocks; ++block) {
            EXPECT_EQ(layout.region_at(index.arrived(slot, source, block)), kArrived);
          }
          EXPECT_EQ(layout.region_at(index.consumed(slot, source)), kConsumed);
          if (staged) {
            EXPECT_EQ(layout.region_at(index.send(slot, w.staged_rows - 1)), kSend);
          }
        }
      }
      EXPECT_NE(index.arrived(0, 0, 2), index.arrived(0, 1, 0));
      EXPECT_GE(index.arrived(0, 1, 0) - index.arrived(0, 0, 0), kLineBytes);
      EXPECT_EQ(index.chunk(1, 0, 0) - index.chunk(0, 2, 543), w.row_bytes);
    }
  }
}

TEST(LayoutTest, DigestTellsShapesApart) {
  const Shape a = even_shape(2, 512, 64, 64, Format::kBf16);
  Shape b = a;
  b.columns = 128;  // the same bytes in the window
  EXPECT_EQ(window_layout(a, 256, true).total_bytes(), window_layout(b, 256, true).total_bytes());
  EXPECT_NE(window_layout(a, 256, true).digest(), window_layout(b, 256, true).digest());
  EXPECT_NE(window_layout(a, 256, true).digest(), window_layout(a, 512, true).digest());
}

TEST(LayoutTest, SizesAreKnownBeforeConstruction) {
  const Shape shape = even_shape(2, 512, 64, 64, Format::kBf16);
  Options options;
  options.row_block_rows = 256;
  EXPECT_EQ(window_bytes(shape, options), window_layout(shape, 256, true).total_bytes());
  options.transport = TransportKind::kDirect;
  EXPECT_EQ(window_bytes(shape, options), window_layout(shape, 256, false).total_bytes());
  EXPECT_EQ(workspace_bytes(shape, options), 256u * 64 * 4);
}

}  // namespace
}  // namespace penstock::a2a_gemm
