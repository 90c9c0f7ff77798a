// Logging to standard error. The library is quiet by default (level warn).
#pragma once

#include <string_view>

namespace penstock {

enum class LogLevel : unsigned char { kTrace, kDebug, kInfo, kWarn, kError, kOff };

// Sets the level for the whole process; wins over PENSTOCK_LOG_LEVEL. Thread-safe.
void set_log_level(LogLevel level);
// Parses "warn" etc.; throws InvalidArgument naming the accepted words.
LogLevel parse_log_level(std::string_view text);
// Writes one line. Thread-safe; never throws.
void log(LogLevel level, std::string_view message) noexcept;

}  // namespace penstock
