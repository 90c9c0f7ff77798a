#include "model/json_text.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <set>
#include <vector>

#include "penstock/core/error.h"

namespace penstock::model {

namespace {

constexpr int kMaxDepth = 32;

}  // namespace

std::string printable(std::string_view text, std::size_t limit) {
  std::string out;
  for (const char c : text.substr(0, limit)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  if (text.size() > limit) out += fmt::format("... ({} bytes)", text.size());
  return out;
}

std::string kind_of(const nlohmann::json& value) {
  switch (value.type()) {
    case nlohmann::json::value_t::null:
      return "null";
    case nlohmann::json::value_t::boolean:
      return "a boolean";
    case nlohmann::json::value_t::string:
      return "a string";
    case nlohmann::json::value_t::array:
      return "a list";
    case nlohmann::json::value_t::object:
      return "an object";
    default:
      return "a number";
  }
}

nlohmann::json parse_json(std::string_view text, std::string_view what) {
  using nlohmann::json;
  std::string last_key;
  // One set of keys for each open object; arrays open no set.
  std::vector<std::set<std::string>> keys;
  const auto callback = [&](int depth, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
        keys.emplace_back();
        [[fallthrough]];
      case json::parse_event_t::array_start:
        require(depth < kMaxDepth, ErrorKind::kInvalidArgument, [&] {
          return fmt::format("{}: nested deeper than {} levels near key '{}'", what, kMaxDepth,
                             printable(last_key));
        });
        break;
      case json::parse_event_t::object_end:
        keys.pop_back();
        break;
      case json::parse_event_t::key:
        last_key = parsed.get_ref<const std::string&>();
        require(keys.back().insert(last_key).second, ErrorKind::kInvalidArgument, [&] {
          return fmt::format("{}: the key '{}' appears twice in one object; keep one of them", what,
                             printable(last_key));
        });
        break;
      default:
        break;
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), callback);
  } catch (const json::exception& e) {
    throw_error(
        ErrorKind::kInvalidArgument,
        fmt::format("{}: not valid JSON{}: {}", what,
                    last_key.empty() ? std::string()
                                     : fmt::format(" at or after key '{}'", printable(last_key)),
                    printable(e.what(), 300)));
  }
}

std::string read_text_file(const std::string& path, std::size_t limit) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    throw_error(ErrorKind::kInvalidArgument,
                fmt::format("cannot open {}: {}", path, std::strerror(errno)));
  }
  struct Closer {
    int fd;
    ~Closer() { ::close(fd); }
  } closer{fd};
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    throw_error(ErrorKind::kBackend, fmt::format("fstat {}: {}", path, std::strerror(errno)));
  }
  require(S_ISREG(info.st_mode), ErrorKind::kInvalidArgument,
          [&] { return fmt::format("{} is not a regular file", path); });
  const auto size = static_cast<std::size_t>(info.st_size);
  require(size <= limit, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("{} has {} bytes; at most {} are accepted", path, size, limit);
  });
  std::string text(size, '\0');
  std::size_t done = 0;
  while (done < size) {
    const ssize_t got = ::read(fd, text.data() + done, size - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw_error(ErrorKind::kBackend, fmt::format("read {}: {}", path, std::strerror(errno)));
    }
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  text.resize(done);
  return text;
}

}  // namespace penstock::model
