// The generated tables, with the one function that reads a threshold table.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace penstock::tables {

#include "data/conversion_tables.inc"

// The code that a threshold table gives for a finite or infinite magnitude.
template <std::size_t kSize>
std::uint32_t lookup(const std::uint32_t (&thresholds)[kSize], std::uint32_t magnitude) {
  return static_cast<std::uint32_t>(std::upper_bound(thresholds, thresholds + kSize, magnitude) -
                                    thresholds);
}

}  // namespace penstock::tables
