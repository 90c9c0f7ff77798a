#include "penstock/core/digest.h"

#include <gtest/gtest.h>

namespace penstock {
namespace {

TEST(DigestTest, IsConstexprAndOrderMatters) {
  constexpr auto a = Digest().add("ab").add("c").value();
  constexpr auto b = Digest().add("a").add("bc").value();
  constexpr auto c = Digest().add(1U).add(2U).value();
  constexpr auto d = Digest().add(2U).add(1U).value();
  static_assert(a != b);
  static_assert(c != d);
  EXPECT_EQ(to_hex(0xabcULL), "0000000000000abc");
}

}  // namespace
}  // namespace penstock
