// What ranks do in the fabric's tests. A scenario is written once and runs on threads and on
// processes: team_harness.h starts the ranks, fabric_rank.cpp is the process's main.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>

#include "penstock/fabric/team.h"

namespace penstock::testing {

// Numbers that a test hands to its ranks.
struct ScenarioArgs {
  std::uint64_t rounds = 0;
  std::uint64_t seed = 1;
  std::string option;  // e.g. a transport
};

using Scenario = std::function<void(const TeamHandle&, const ScenarioArgs&)>;
const std::map<std::string, Scenario>& scenarios();

// A failed expectation inside a rank; the harness turns it into a test failure.
inline void expect(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error("expectation failed: " + what);
}

// Runs body, which must throw an Error of this kind whose text has every one of the words.
void expect_error(ErrorKind kind, const std::vector<std::string>& words,
                  const std::function<void()>& body);
// Runs body, which must throw Fault; returns its record.
FaultRecord expect_fault(const std::function<void()>& body);

// The value of word i of what `from` sends `to` in round `epoch`: another one for each argument.
inline std::uint64_t pattern(std::uint64_t epoch, int from, int to, std::uint64_t i) {
  std::uint64_t x = epoch * 0x9e3779b97f4a7c15ULL ^ static_cast<std::uint64_t>(from) << 56 ^
                    static_cast<std::uint64_t>(to) << 48 ^ i;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
  return x ^ x >> 31;
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || !defined(NDEBUG)
inline constexpr bool kSlowBuild = true;
#else
inline constexpr bool kSlowBuild = false;
#endif

}  // namespace penstock::testing
