// Expectations on typed errors: the kind, and words that the text must hold.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <string_view>

#include "penstock/core/error.h"

namespace penstock::testing {

template <typename Call>
void expect_error(ErrorKind kind, std::initializer_list<std::string_view> words, Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), kind) << e.what();
    for (const std::string_view word : words) {
      EXPECT_NE(std::string_view(e.what()).find(word), std::string_view::npos)
          << "no '" << word << "' in: " << e.what();
    }
    return;
  }
  ADD_FAILURE() << "no error was thrown";
}

}  // namespace penstock::testing
