// What a process holds: for tests that say that nothing leaks.
#pragma once

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

namespace penstock::testing {

inline std::size_t entries(const char* folder) {
  std::size_t count = 0;
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator(folder, error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    ++count;
  }
  return count;
}

struct Resources {
  std::size_t descriptors = 0;
  std::size_t threads = 0;
  std::size_t shared_files = 0;     // in /dev/shm, of the whole machine
  std::size_t shared_mappings = 0;  // memfd mappings of ours
  std::size_t mappings = 0;         // all lines of /proc/self/maps
};

inline Resources resources() {
  Resources out;
  out.descriptors = entries("/proc/self/fd");
  out.threads = entries("/proc/self/task");
  out.shared_files = entries("/dev/shm");
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    ++out.mappings;
    if (line.find("memfd:penstock") != std::string::npos) ++out.shared_mappings;
  }
  return out;
}

// The same once the kernel has put away threads that were joined a moment ago.
inline Resources settled_resources(const Resources& before) {
  Resources now = resources();
  for (int i = 0; i < 200 && now.threads > before.threads; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    now = resources();
  }
  return now;
}

}  // namespace penstock::testing
