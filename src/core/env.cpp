#include "penstock/core/env.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <utility>

#include "penstock/core/error.h"
#include "penstock/core/log.h"

namespace penstock {
namespace {

// The table that every reader below goes through, so that nothing is read that `penstock env` does
// not print.
struct Entry {
  const char* name;
  const char* fallback;
  const char* description;
  void (*check)();        // throws what a reader of the value throws
  const char* otherwise;  // in force where the value is refused
};
constexpr std::array kEntries{
    Entry{"PENSTOCK_DEADLINE_S", "30",
          "deadline of every wait, seconds [0.001, 86400]; API: TeamOptions::deadline",
          [] { (void)Env::deadline_s(); }, "refused"},
    Entry{"PENSTOCK_THREADS_COUNT", "0",
          "compute threads of one CPU rank, 0 = hardware threads / ranks; API: "
          "EngineOptions::threads",
          [] { (void)Env::threads_count(); }, "refused"},
    Entry{"PENSTOCK_LOG_LEVEL", "warn",
          "trace, debug, info, warn, error, off; API: set_log_level()",
          [] { (void)parse_log_level(Env::log_level()); }, "off"},
};

const Entry& entry(std::string_view name) {
  for (const Entry& e : kEntries) {
    if (name == e.name) return e;
  }
  throw_error(ErrorKind::kInvalidArgument,
              fmt::format("environment variable {} is not in the table", name));
}

std::string read(std::string_view name) {
  const Entry& e = entry(name);
  const char* value = std::getenv(e.name);
  return value != nullptr && *value != '\0' ? value : e.fallback;
}

template <typename T>
T read_number(std::string_view name, T low, T high) {
  const std::string text = read(name);
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() ||
      !(value >= low && value <= high)) {
    throw_error(ErrorKind::kInvalidArgument,
                fmt::format("{}='{}' is not a number in [{}, {}]: correct or unset it", name, text,
                            low, high));
  }
  return value;
}

}  // namespace

double Env::deadline_s() { return read_number<double>("PENSTOCK_DEADLINE_S", 0.001, 86400.0); }
int Env::threads_count() { return read_number<int>("PENSTOCK_THREADS_COUNT", 0, 1024); }
std::string Env::log_level() { return read("PENSTOCK_LOG_LEVEL"); }

std::vector<EnvVariable> Env::table() {
  std::vector<EnvVariable> rows;
  for (const Entry& e : kEntries) {
    const char* value = std::getenv(e.name);
    const bool set = value != nullptr && *value != '\0';
    EnvVariable row{
        e.name,        set ? value : e.fallback, e.fallback, set ? "environment" : "default",
        e.description, set ? value : e.fallback, {}};
    try {
      e.check();
    } catch (const Error& error) {
      row.in_force = e.otherwise;
      row.problem = error.what();
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace penstock
