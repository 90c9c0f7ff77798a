// Zeroed, page-aligned floats of the system: they cost nothing until touched.
#pragma once

#include <cstdint>
#include <utility>

namespace penstock::engine {

class FloatBuffer {
 public:
  FloatBuffer() = default;
  // `count` floats and the padding that kernels may read behind them. Throws ResourceExhausted
  // naming `what` and the bytes.
  FloatBuffer(std::int64_t count, const char* what);
  ~FloatBuffer();
  FloatBuffer(FloatBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  FloatBuffer& operator=(FloatBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  float* data() const noexcept { return data_; }
  std::int64_t bytes() const noexcept { return bytes_; }

 private:
  float* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace penstock::engine
