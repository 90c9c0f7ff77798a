// A file that appears whole or not at all.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace penstock::model {

// Writes to a temporary name beside `target`; commit() makes it durable and renames it over
// `target`. Without commit() the destructor removes it. Throws Backend with the system's words.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& target);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile();

  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  void commit();

 private:
  std::string target_;
  std::string path_;
  int fd_ = -1;
  bool committed_ = false;
};

}  // namespace penstock::model
