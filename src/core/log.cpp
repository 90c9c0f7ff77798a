#include "penstock/core/log.h"

#include <fmt/format.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

#include "penstock/core/env.h"
#include "penstock/core/error.h"

namespace penstock {
namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return spdlog::level::trace;
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::warn;
}

spdlog::logger& logger() {
  static const std::shared_ptr<spdlog::logger> instance = [] {
    auto sink = std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
    auto made = std::make_shared<spdlog::logger>("penstock", sink);
    made->set_pattern("%H:%M:%S.%e %n %^%l%$ %v");
    made->set_level(to_spdlog(parse_log_level(Env::log_level())));
    return made;
  }();
  return *instance;
}

}  // namespace

void set_log_level(LogLevel level) { logger().set_level(to_spdlog(level)); }

LogLevel parse_log_level(std::string_view text) {
  if (text == "trace") return LogLevel::kTrace;
  if (text == "debug") return LogLevel::kDebug;
  if (text == "info") return LogLevel::kInfo;
  if (text == "warn") return LogLevel::kWarn;
  if (text == "error") return LogLevel::kError;
  if (text == "off") return LogLevel::kOff;
  throw_error(
      ErrorKind::kInvalidArgument,
      fmt::format("log level '{}' is not one of trace, debug, info, warn, error, off", text));
}

void log(LogLevel level, std::string_view message) noexcept {
  try {
    logger().log(to_spdlog(level), "{}", message);
  } catch (...) {
    // A broken stderr must not take a computation down with it.
    return;
  }
}

}  // namespace penstock
