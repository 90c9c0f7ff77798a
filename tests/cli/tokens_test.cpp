// Token ids and UTF-8 streaming of the command line.
#include "cli/tokens.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "penstock/core/error.h"

namespace penstock::cli {
namespace {

std::vector<std::string> stream(std::string_view bytes) {
  Utf8Stream utf8;
  std::vector<std::string> out;
  for (const char c : bytes) out.push_back(utf8.push(static_cast<unsigned char>(c)));
  out.push_back(utf8.flush());
  return out;
}

TEST(Utf8StreamTest, HoldsACharacterBackUntilItIsWhole) {
  using Parts = std::vector<std::string>;
  EXPECT_EQ(stream("aé"), (Parts{"a", "", "é", ""}));
  EXPECT_EQ(stream("€"), (Parts{"", "", "€", ""}));
  EXPECT_EQ(stream("😀x"), (Parts{"", "", "", "😀", "x", ""}));
}

TEST(Utf8StreamTest, LetsThroughWhatCannotBecomeACharacter) {
  using Parts = std::vector<std::string>;
  EXPECT_EQ(stream("\x80\xFF"), (Parts{"\x80", "\xFF", ""}));
  EXPECT_EQ(stream("\xC0\x80"), (Parts{"\xC0", "\x80", ""}));  // overlong: never valid
  EXPECT_EQ(stream("\xE2\x82"
                   "a"),
            (Parts{"", "",
                   "\xE2\x82"
                   "a",
                   ""}));                                           // cut short
  EXPECT_EQ(stream("\xE2\xC3\xA9"), (Parts{"", "\xE2", "é", ""}));  // cut short by another
  EXPECT_EQ(stream("\xF0\x9F"), (Parts{"", "", "\xF0\x9F"}));       // the text ends inside
}

RC_GTEST_PROP(Utf8StreamTest, LosesAndReordersNothing, ()) {
  const auto bytes = *rc::gen::arbitrary<std::string>();
  std::string joined;
  for (const auto& part : stream(bytes)) joined += part;
  RC_ASSERT(joined == bytes);
}

TEST(TokenIdsTest, ReadsListsAndJsonArrays) {
  const std::vector<std::int32_t> want{2, 71, 255};
  EXPECT_EQ(parse_token_ids("2 71 255", 256, "ids"), want);
  EXPECT_EQ(parse_token_ids("[2, 71,\n255]\n", 256, "ids"), want);
  EXPECT_EQ(parse_token_ids("\t2,71,,255", 256, "ids"), want);
  EXPECT_TRUE(parse_token_ids("", 256, "ids").empty());
  EXPECT_TRUE(parse_token_ids("[]\n", 256, "ids").empty());
}

TEST(TokenIdsTest, RefusesWhatIsNoIdAndNamesIt) {
  for (const char* bad :
       {"256", "-1", "1.5", "0x10", "two", "1 2 99999999999999999999", "3;4", "4294967298"}) {
    EXPECT_THROW(parse_token_ids(bad, 256, "ids"), Error) << bad;
  }
  try {
    parse_token_ids("1 2 x3", 256, "ids.txt");
    FAIL();
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("ids.txt: 'x3' (number 2)"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace penstock::cli
