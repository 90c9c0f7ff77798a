// Strict JSON for files that nobody vouches for: config.json, safetensors headers, shard indexes.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace penstock::model {

// Parses `text`. `what` opens every message ("config.json", "header of x.safetensors"). Throws
// InvalidArgument where the text is not JSON or not UTF-8 (with the last key read, so that a NaN is
// found by its key), where an object names a key twice (parsers differ in which one wins, so a file
// could mean two things) and where nesting is deeper than 32.
nlohmann::json parse_json(std::string_view text, std::string_view what);

// Kind of a value in words: "a string", "a number", ...
std::string kind_of(const nlohmann::json& value);

// A value or name shortened and made printable for a message.
std::string printable(std::string_view text, std::size_t limit = 120);

// Reads a whole regular file of at most `limit` bytes. Throws InvalidArgument (missing, not a
// regular file, too large) or Backend (read error), naming the path.
std::string read_text_file(const std::string& path, std::size_t limit);

}  // namespace penstock::model
