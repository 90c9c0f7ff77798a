#include "model/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "penstock/core/error.h"

namespace penstock::model {

namespace {

[[noreturn]] void fail(std::string_view what, const std::string& path) {
  throw_error(ErrorKind::kBackend, fmt::format("{} {}: {}", what, path, std::strerror(errno)));
}

}  // namespace

AtomicFile::AtomicFile(const std::string& target) : target_(target) {
  static std::atomic<unsigned> counter{0};
  path_ = fmt::format("{}.tmp.{}.{}", target, ::getpid(), counter.fetch_add(1));
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd_ < 0) fail("create", path_);
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!committed_) ::unlink(path_.c_str());
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  // Linux writes at most 2^31 - 4096 bytes a call; 1 GiB keeps well below.
  constexpr std::size_t kChunk = std::size_t{1} << 30;
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = ::write(fd_, from, std::min(bytes, kChunk));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("write", path_);
    from += done;
    bytes -= static_cast<std::size_t>(done);
  }
}

void AtomicFile::commit() {
  if (::fsync(fd_) != 0) fail("fsync", path_);
  if (::close(std::exchange(fd_, -1)) != 0) fail("close", path_);
  if (::rename(path_.c_str(), target_.c_str()) != 0) fail("rename to", target_);
  committed_ = true;
  // The name itself is durable only once the directory is on disk.
  const auto slash = target_.rfind('/');
  const std::string directory = slash == std::string::npos ? "." : target_.substr(0, slash + 1);
  const int dir = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir < 0) fail("open directory", directory);
  const int synced = ::fsync(dir);
  ::close(dir);
  if (synced != 0) fail("fsync directory", directory);
}

}  // namespace penstock::model
