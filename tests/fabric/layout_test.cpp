#include "penstock/fabric/layout.h"

#include <gtest/gtest.h>

#include "penstock/core/error.h"
#include "penstock/fabric/all_reduce.h"

namespace penstock {
namespace {

struct Shape {
  std::uint64_t rows;
};
constexpr RegionTable<Shape, 3> kTable{
    "demo",
    {{"a", [](const Shape& s) { return s.rows * 3; }, 16, Access::kOwner, Access::kPeers},
     {"empty", [](const Shape&) { return std::uint64_t{0}; }, 1, Access::kNobody, Access::kNobody},
     {"b", [](const Shape& s) { return s.rows; }, 256, Access::kPeers, Access::kAll}}};

TEST(LayoutTest, OffsetsAreKnownAtCompileTime) {
  constexpr auto at = kTable.at(Shape{10});
  static_assert(at.valid);
  static_assert(at.offset[0] == 0 && at.bytes[0] == 30);
  static_assert(at.offset[1] == 30 && at.bytes[1] == 0);
  static_assert(at.offset[2] == 256 && at.bytes[2] == 10);
  static_assert(at.total_bytes == 512);
}

TEST(LayoutTest, HostViewAgreesWithTheTable) {
  const Layout layout = Layout::from(kTable, Shape{10}, "rows 10");
  EXPECT_EQ(layout.total_bytes(), 512u);
  EXPECT_EQ(layout.region(2).offset, 256u);
  EXPECT_EQ(layout.region_at(0), 0);
  EXPECT_EQ(layout.region_at(29), 0);
  EXPECT_EQ(layout.region_at(30), -1);  // a gap
  EXPECT_EQ(layout.region_at(265), 2);
  EXPECT_EQ(layout.region_at(266), -1);
  const std::string text = layout.describe();
  for (const char* word : {"demo", "rows 10", "512 bytes", "peers", "owner", "all", "nobody"}) {
    EXPECT_NE(text.find(word), std::string::npos) << word << " in\n" << text;
  }
}

// Everything that a kernel could depend on enters the digest.
TEST(LayoutTest, DigestCoversEveryField) {
  const auto digest = [](const std::string& name, const std::string& shape, RegionSpan span) {
    return Layout(name, shape, {std::move(span)}).digest();
  };
  const RegionSpan base{"r", 64, 100, 32, Access::kOwner, Access::kPeers};
  const std::uint64_t reference = digest("op", "s", base);
  EXPECT_EQ(digest("op", "s", base), reference);
  EXPECT_NE(digest("op2", "s", base), reference);
  EXPECT_NE(digest("op", "s2", base), reference);
  for (int field = 0; field < 6; ++field) {
    RegionSpan other = base;
    if (field == 0) other.name = std::string(1, 'q');
    if (field == 1) other.offset = 96;
    if (field == 2) other.bytes = 101;
    if (field == 3) other.alignment = 64;
    if (field == 4) other.writer = Access::kAll;
    if (field == 5) other.reader = Access::kAll;
    EXPECT_NE(digest("op", "s", other), reference) << field;
  }
}

TEST(LayoutTest, MistakesAreRefusedByName) {
  const auto refuse = [](std::vector<RegionSpan> spans, const std::string& word) {
    try {
      (void)Layout("op", "s", std::move(spans));
      ADD_FAILURE() << "accepted, expected: " << word;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  refuse({{"a", 0, 8, 8, {}, {}}, {"a", 8, 8, 8, {}, {}}}, "name of region 0");
  refuse({{"a", 0, 8, 3, {}, {}}}, "alignment 3");
  refuse({{"a", 0, 8, 0, {}, {}}}, "alignment 0");
  refuse({{"a", 0, 8, 8192, {}, {}}}, "alignment 8192");
  refuse({{"a", 4, 8, 8, {}, {}}}, "not a multiple");
  refuse({{"a", 0, 9, 8, {}, {}}, {"b", 8, 8, 8, {}, {}}}, "inside region 0");
  refuse({{"a", 0, kMaxWindowBytes + 1, 8, {}, {}}}, "largest window");
  refuse({{"a", ~0ULL - 7, 8, 8, {}, {}}}, "largest window");
  const Layout one("op", "s", {{"a", 0, 8, 8, {}, {}}});
  EXPECT_THROW((void)one.region(1), Error);
  EXPECT_THROW((void)one.region(-1), Error);
}

TEST(LayoutTest, AnOverflowingShapeIsRefused) {
  EXPECT_FALSE(kTable.at(Shape{~0ULL / 4}).valid);
  EXPECT_THROW((void)Layout::from(kTable, Shape{~0ULL / 4}, "rows huge"), Error);
  // int32 ends at 2 GiB, a window does not.
  EXPECT_EQ(Layout::from(kTable, Shape{3ULL << 32}, "rows 3 * 2^32").region(2).bytes, 3ULL << 32);
}

}  // namespace
}  // namespace penstock
