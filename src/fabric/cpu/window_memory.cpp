#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "penstock/fabric/window.h"

namespace penstock {
namespace {

constexpr std::uint64_t kPage = 4096;

// One mmap of one rank's part.
class Part {
 public:
  // fd -1: anonymous memory. Throws ResourceExhausted.
  Part(std::uint64_t bytes, int fd) : bytes_(bytes) {
    const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (base == MAP_FAILED) {
      throw Error(
          ErrorKind::kResourceExhausted,
          fmt::format("could not map {} bytes for a window: {}", bytes, std::strerror(errno)));
    }
    base_ = static_cast<std::byte*>(base);
  }
  ~Part() { ::munmap(base_, bytes_); }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;
  std::byte* base() const noexcept { return base_; }

 private:
  std::byte* base_ = nullptr;
  std::uint64_t bytes_;
};

class CpuMapping final : public WindowMapping {
 public:
  CpuMapping(std::vector<std::shared_ptr<Part>> parts, std::uint64_t bytes)
      : parts_(std::move(parts)), bytes_(bytes) {}
  std::byte* base(int rank) const noexcept override {
    return parts_[static_cast<std::size_t>(rank)]->base();
  }
  std::uint64_t bytes() const noexcept override { return bytes_; }

 private:
  std::vector<std::shared_ptr<Part>> parts_;  // [rank], shared between the threads of a team
  std::uint64_t bytes_;
};

// More than the machine has can only end in the out-of-memory killer: refuse it in words instead.
void require_memory(std::uint64_t bytes) {
  const auto pages = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES));
  require(bytes <= pages * kPage, ErrorKind::kResourceExhausted, [&] {
    return fmt::format("a window of {} bytes does not fit this machine's {} bytes of memory", bytes,
                       pages * kPage);
  });
}

class CpuWindowBackend final : public WindowBackend {
 public:
  Backend kind() const noexcept override { return Backend::kCpu; }
  std::uint64_t granule() const override { return kPage; }

  std::shared_ptr<WindowMapping> map(Team& team, std::uint64_t bytes) override {
    std::vector<std::shared_ptr<Part>> parts(static_cast<std::size_t>(team.size()));
    if (team.in_process()) {
      map_threads(team, bytes, parts);
    } else {
      map_processes(team, bytes, parts);
    }
    return std::make_shared<CpuMapping>(std::move(parts), bytes);
  }

 private:
  static void map_threads(Team& team, std::uint64_t bytes,
                          std::vector<std::shared_ptr<Part>>& parts) {
    std::shared_ptr<Part> mine;
    collectively(team, [&] {
      require_memory(bytes);
      mine = std::make_shared<Part>(bytes, -1);
    });
    const auto all = team.all_gather_shared(mine);
    for (std::size_t r = 0; r < parts.size(); ++r)
      parts[r] = std::static_pointer_cast<Part>(all[r]);
  }

  static void map_processes(Team& team, std::uint64_t bytes,
                            std::vector<std::shared_ptr<Part>>& parts) {
    UniqueFd memory;
    collectively(team, [&] {
      require_memory(bytes);
      memory = UniqueFd(::memfd_create("penstock-window", MFD_CLOEXEC));
      if (!memory) {
        throw Error(ErrorKind::kResourceExhausted,
                    fmt::format("memfd_create failed: {}", std::strerror(errno)));
      }
      // Reserve the pages now: a sparse file would raise SIGBUS in the middle of a copy.
      if (::ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0 ||
          ::fallocate(memory.get(), 0, 0, static_cast<off_t>(bytes)) != 0) {
        throw Error(ErrorKind::kResourceExhausted,
                    fmt::format("could not reserve {} bytes of shared memory: {}", bytes,
                                std::strerror(errno)));
      }
    });
    const std::vector<UniqueFd> all = team.all_gather_descriptor(memory.get());
    collectively(team, [&] {
      for (std::size_t r = 0; r < parts.size(); ++r) {
        parts[r] = std::make_shared<Part>(bytes, all[r].get());
      }
    });
  }
};

}  // namespace

std::shared_ptr<WindowBackend> cpu_window_backend() { return std::make_shared<CpuWindowBackend>(); }

}  // namespace penstock
