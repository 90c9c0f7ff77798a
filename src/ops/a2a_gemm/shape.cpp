#include "penstock/ops/a2a_gemm/shape.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <span>

#include "penstock/core/error.h"

namespace penstock::a2a_gemm {
namespace {

std::span<const std::int32_t> rows_of(const Shape& shape) {
  return std::span(shape.rows).first(static_cast<std::size_t>(shape.ranks));
}

}  // namespace

const char* to_string(Format format) { return format == Format::kBf16 ? "bf16" : "fp8"; }

Shape even_shape(std::int32_t ranks, std::int32_t rows, std::int32_t depth, std::int32_t columns,
                 Format format) {
  Shape shape;
  shape.ranks = ranks;
  for (std::int32_t r = 0; r < std::min(ranks, kMaxRanks); ++r) {
    shape.rows[static_cast<std::size_t>(r)] = rows;
  }
  shape.depth = depth;
  shape.columns = columns;
  shape.format = format;
  return shape;
}

std::int64_t row_offset(const Shape& shape, std::int32_t rank) {
  std::int64_t offset = 0;
  for (std::int32_t r = 0; r < rank; ++r) offset += shape.rows[static_cast<std::size_t>(r)];
  return offset;
}
std::int64_t total_rows(const Shape& shape) { return row_offset(shape, shape.ranks); }
std::int32_t max_rows(const Shape& shape) {
  const auto rows = rows_of(shape);
  return *std::max_element(rows.begin(), rows.end());
}

double flop(const Shape& shape, std::int32_t rank) {
  return 2.0 * shape.rows[static_cast<std::size_t>(rank)] * shape.columns * shape.ranks *
         shape.depth;
}
double wire_bytes(const Shape& shape, std::int32_t rank) {
  return static_cast<double>(shape.rows[static_cast<std::size_t>(rank)]) * (shape.ranks - 1) *
         (static_cast<double>(shape.row_bytes()) + 4.0 * shape.scale_blocks());
}

std::string find_fault(const Shape& s) {
  if (s.ranks < 1 || s.ranks > kMaxRanks) {
    return fmt::format("a2a_gemm: ranks is {}; 1 to {} are supported", s.ranks, kMaxRanks);
  }
  for (std::int32_t r = 0; r < s.ranks; ++r) {
    const std::int32_t rows = s.rows[static_cast<std::size_t>(r)];
    if (rows < 0 || rows % kUnit != 0) {
      return fmt::format(
          "a2a_gemm: rank {} has {} rows; give a multiple of {} (or 0) and pad the sequence", r,
          rows, kUnit);
    }
  }
  for (std::int32_t r = s.ranks; r < kMaxRanks; ++r) {
    if (s.rows[static_cast<std::size_t>(r)] != 0) {
      return fmt::format("a2a_gemm: rows are given for rank {} but there are {} ranks", r, s.ranks);
    }
  }
  if (s.depth < kUnit || s.depth % kUnit != 0) {
    return fmt::format(
        "a2a_gemm: depth is {}; give a positive multiple of {}: a row is copied and "
        "loaded in pieces of 16 bytes",
        s.depth, kUnit);
  }
  if (s.columns < kUnit || s.columns % kUnit != 0) {
    return fmt::format("a2a_gemm: columns is {}; give a positive multiple of {}", s.columns, kUnit);
  }
  if (s.format != Format::kBf16 && s.format != Format::kFp8) {
    return fmt::format("a2a_gemm: format {} is not known; bf16 and fp8 are",
                       static_cast<int>(s.format));
  }
  if (total_rows(s) > std::numeric_limits<std::int32_t>::max()) {
    return fmt::format(
        "a2a_gemm: {} rows over all ranks; row numbers are 32 bits, so split the sequence",
        total_rows(s));
  }
  return {};
}

void validate(const Shape& shape) {
  const std::string fault = find_fault(shape);
  if (!fault.empty()) throw_error(ErrorKind::kInvalidArgument, fault);
}

std::string describe(const Shape& shape) {
  return fmt::format("ranks={} rows={} depth={} columns={} format={}", shape.ranks,
                     fmt::join(rows_of(shape), ","), shape.depth, shape.columns,
                     to_string(shape.format));
}

}  // namespace penstock::a2a_gemm
