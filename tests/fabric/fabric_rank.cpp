// One rank of a multi-process test: joins the team, plays a scenario, and says how it ended.
// Exit codes: 0 done, 1 expectation failed, 3 fault (the record is on stdout), 4 error.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "fabric/resources.h"
#include "fabric/scenarios.h"
#include "penstock/fabric/team.h"

using namespace penstock;
using namespace penstock::testing;

namespace {

int play(const std::string& name, const TeamOptions& options, const ScenarioArgs& args) {
  try {
    const TeamHandle team = connect_team(options);
    scenarios().at(name)(team, args);
    return 0;
  } catch (const Fault& fault) {
    fmt::print("FAULT peer={} cause={} text={}\n", fault.record().peer, fault.record().cause,
               fault.what());
    return 3;
  } catch (const Error& error) {
    fmt::print("ERROR kind={} text={}\n", to_string(error.kind()), error.what());
    return 4;
  } catch (const std::exception& error) {
    fmt::print("FAILED {}\n", error.what());
    return 1;
  }
}

// Joins and leaves again and again: what a process holds must not grow.
int cycle(TeamOptions options, std::uint64_t rounds) {
  Resources first;
  for (std::uint64_t k = 0; k < rounds; ++k) {
    const TeamHandle team = connect_team(options);
    scenarios().at("window_reach")(team, {});
    // Nobody may meet the next team while the last one still stands.
    team->barrier();
    if (k == 4) first = resources();
    if (k + 1 == rounds) {
      const Resources last = settled_resources(first);
      if (last.descriptors != first.descriptors || last.threads > first.threads ||
          last.shared_mappings != first.shared_mappings ||
          (!kSlowBuild && last.mappings > first.mappings + 8)) {
        fmt::print("FAILED leak: descriptors {} -> {}, threads {} -> {}, mappings {} -> {}\n",
                   first.descriptors, last.descriptors, first.threads, last.threads, first.mappings,
                   last.mappings);
        return 1;
      }
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 9) {
    fmt::print(stderr,
               "usage: fabric_rank scenario rank size port deadline_ms rounds seed option\n");
    return 2;
  }
  TeamOptions options;
  options.rank = std::atoi(argv[2]);
  options.size = std::atoi(argv[3]);
  options.port = std::atoi(argv[4]);
  options.deadline = std::chrono::milliseconds(std::atoi(argv[5]));
  ScenarioArgs args;
  args.rounds = std::strtoull(argv[6], nullptr, 10);
  args.seed = std::strtoull(argv[7], nullptr, 10);
  args.option = argv[8];
  // A sanitizer starts a thread of its own beside the first one.
  std::thread([] {}).join();
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const Resources before = resources();
  int code = 0;
  try {
    code = std::string(argv[1]) == "cycle" ? cycle(options, args.rounds)
                                           : play(argv[1], options, args);
  } catch (const std::exception& error) {
    fmt::print("FAILED {}\n", error.what());
    code = 1;
  }
  const Resources after = settled_resources(before);
  if (after.descriptors != before.descriptors || after.threads > before.threads ||
      after.shared_mappings != before.shared_mappings) {
    fmt::print("LEAK descriptors {} -> {}, threads {} -> {}, shared mappings {} -> {}\n",
               before.descriptors, after.descriptors, before.threads, after.threads,
               before.shared_mappings, after.shared_mappings);
    code = 1;
  }
  fmt::print("END\n");
  return code;
}
