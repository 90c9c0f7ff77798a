// A 64-bit digest (FNV-1a) for layouts and configurations: constexpr, so that a table's digest is
// known at compile time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace penstock {

// Feeds bytes, integers and text into one running value. Not cryptographic: it finds mistakes, not
// attackers.
class Digest {
 public:
  constexpr Digest& add(std::string_view text) {
    for (const char c : text) step(static_cast<std::uint8_t>(c));
    step(0xff);  // ends the text, so that ("ab", "c") and ("a", "bc") differ
    return *this;
  }
  constexpr Digest& add(std::uint64_t value) {
    for (int i = 0; i < 8; ++i) step(static_cast<std::uint8_t>(value >> (8 * i)));
    return *this;
  }
  constexpr std::uint64_t value() const { return value_; }

 private:
  constexpr void step(std::uint8_t byte) { value_ = (value_ ^ byte) * 0x100000001b3ULL; }
  std::uint64_t value_ = 0xcbf29ce484222325ULL;
};

// 16 hexadecimal digits.
std::string to_hex(std::uint64_t digest);

}  // namespace penstock
