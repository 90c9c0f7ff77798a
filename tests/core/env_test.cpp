#include "penstock/core/env.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "penstock/core/error.h"
#include "penstock/core/log.h"

namespace penstock {
namespace {

struct ScopedVariable {
  explicit ScopedVariable(const char* variable, const char* value) : name(variable) {
    setenv(name, value, 1);
  }
  ~ScopedVariable() { unsetenv(name); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;
  const char* name;
};

TEST(EnvTest, DefaultsHoldWithoutVariables) {
  EXPECT_EQ(Env::deadline_s(), 30.0);
  EXPECT_EQ(Env::threads_count(), 0);
  EXPECT_EQ(Env::log_level(), "warn");
}

TEST(EnvTest, EnvironmentWinsAndTheTableSaysSo) {
  const ScopedVariable variable("PENSTOCK_DEADLINE_S", "0.25");
  EXPECT_EQ(Env::deadline_s(), 0.25);
  bool found = false;
  for (const EnvVariable& row : Env::table()) {
    if (row.name != "PENSTOCK_DEADLINE_S") continue;
    found = true;
    EXPECT_EQ(row.value, "0.25");
    EXPECT_EQ(row.fallback, "30");
    EXPECT_EQ(row.origin, "environment");
  }
  EXPECT_TRUE(found);
}

TEST(EnvTest, NonsenseIsRefusedByName) {
  for (const char* bad : {"abc", "-1", "nan", "1e9", "3 s", "0"}) {
    const ScopedVariable variable("PENSTOCK_DEADLINE_S", bad);
    try {
      (void)Env::deadline_s();
      FAIL() << bad << " accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find("PENSTOCK_DEADLINE_S='" + std::string(bad)),
                std::string::npos);
    }
  }
}

TEST(EnvTest, TheTableSaysWhatIsInForceInsteadOfNonsense) {
  const ScopedVariable deadline("PENSTOCK_DEADLINE_S", "soon");
  const ScopedVariable level("PENSTOCK_LOG_LEVEL", "loud");
  int refused = 0;
  for (const EnvVariable& row : Env::table()) {
    if (row.problem.empty()) {
      EXPECT_EQ(row.in_force, row.value);
      continue;
    }
    ++refused;
    EXPECT_NE(row.problem.find(row.value), std::string::npos);
    EXPECT_NE(row.in_force, row.value);
    EXPECT_EQ(row.origin, "environment");
    if (row.name == "PENSTOCK_LOG_LEVEL") {
      EXPECT_EQ(row.in_force, "off");
    }
  }
  EXPECT_EQ(refused, 2);
}

TEST(LogTest, LevelsParseAndOthersAreRefused) {
  EXPECT_EQ(parse_log_level("off"), LogLevel::kOff);
  EXPECT_THROW((void)parse_log_level("loud"), Error);
}

}  // namespace
}  // namespace penstock
