// Environment variables: one reader, one table. Each variable has an API twin that wins over it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace penstock {

// One variable as `penstock env` prints it.
struct EnvVariable {
  std::string name;         // PENSTOCK_<NAME>_<UNIT>
  std::string value;        // as the environment has it, else the default
  std::string fallback;     // the default
  std::string origin;       // "default" or "environment"
  std::string description;  // what it does and its API twin
  std::string in_force;     // what the library does by: the value, or what it does instead of it
  std::string problem;      // why the value is refused; empty if it is not
};

// All variables that the library reads. Thread-safe; the environment is read anew at each call.
class Env {
 public:
  // Deadline of every wait, seconds (PENSTOCK_DEADLINE_S, default 30, 0.001 .. 86400). API twin:
  // TeamOptions::deadline.
  static double deadline_s();
  // Compute threads of one CPU rank (PENSTOCK_THREADS_COUNT, default: hardware threads / ranks). 0
  // means default.
  static int threads_count();
  // Log level (PENSTOCK_LOG_LEVEL: trace, debug, info, warn, error, off; default warn). API twin:
  // set_log_level().
  static std::string log_level();

  static std::vector<EnvVariable> table();
};

}  // namespace penstock
