// Shape checks shared by the reference's stages.
#pragma once

#include <fmt/format.h>

#include <initializer_list>
#include <string_view>

#include "penstock/core/error.h"
#include "penstock/model/reference.h"

namespace penstock::reference {

template <typename T>
void require_shape(std::string_view name, const Array<T>& array,
                   std::initializer_list<std::int64_t> want) {
  require(array.shape == std::vector<std::int64_t>(want), ErrorKind::kInvalidArgument, [&] {
    return fmt::format("reference: {} has shape {}, the configuration needs {}", name,
                       describe_shape(array.shape), describe_shape({want.begin(), want.size()}));
  });
}

inline void require_shape(std::string_view name, const Weight& weight, std::int64_t rows,
                          std::int64_t cols) {
  require(weight.rows == rows && weight.cols == cols, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("reference: {} is [{}, {}], the configuration needs [{}, {}]", name,
                       weight.rows, weight.cols, rows, cols);
  });
}

inline void require_size(std::string_view name, std::size_t size, std::int64_t want) {
  require(static_cast<std::int64_t>(size) == want, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("reference: {} has {} values, the configuration needs {}", name, size, want);
  });
}

inline void require_range(std::string_view name, Range range, std::int64_t limit) {
  require(range.begin >= 0 && range.begin <= range.end && range.end <= limit,
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format("reference: {} [{}, {}) is not inside [0, {})", name, range.begin,
                               range.end, limit);
          });
}

}  // namespace penstock::reference
