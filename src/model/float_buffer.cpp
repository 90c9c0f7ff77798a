#include "model/float_buffer.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "ops/cpu/linear.h"
#include "penstock/core/error.h"

namespace penstock::engine {

FloatBuffer::FloatBuffer(std::int64_t count, const char* what) {
  const std::int64_t bytes = (count + cpu::kPadding) * 4;
  void* data = ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require(data != MAP_FAILED, ErrorKind::kResourceExhausted, [&] {
    return fmt::format("no memory for {} ({} bytes): {}", what, bytes, std::strerror(errno));
  });
  data_ = static_cast<float*>(data);
  bytes_ = bytes;
}

FloatBuffer::~FloatBuffer() {
  if (data_ != nullptr) ::munmap(data_, static_cast<std::size_t>(bytes_));
}

}  // namespace penstock::engine
