// The host's view of a region table evaluated at a shape: text, digest, bounds.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/fabric/region_table.h"

namespace penstock {

// "nobody", "owner", "peers", "all".
std::string_view to_string(Access access);

// One region at its place.
struct RegionSpan {
  std::string name;
  std::uint64_t offset = 0;  // bytes from the window's base
  std::uint64_t bytes = 0;
  std::uint64_t alignment = 1;
  Access writer = Access::kNobody;
  Access reader = Access::kNobody;
};

// A layout: what a window of one operator holds, at one shape. Value type.
class Layout {
 public:
  Layout() = default;
  // From spans that already have offsets. Throws InvalidArgument when a name repeats, an alignment
  // is no power of two <= 4096, a span is misplaced, overlaps its predecessor or passes
  // kMaxWindowBytes. `shape_text` is printed and enters the digest: give every size that a kernel
  // or a plan depends on, so that ranks with different shapes of equal byte size are told apart.
  Layout(std::string name, std::string shape_text, std::vector<RegionSpan> regions);

  // From a table and a shape; throws InvalidArgument as above.
  template <typename Shape, int N>
  static Layout from(const RegionTable<Shape, N>& table, const Shape& shape,
                     std::string shape_text);

  const std::string& name() const { return name_; }
  const std::string& shape_text() const { return shape_text_; }
  const std::vector<RegionSpan>& regions() const { return regions_; }
  // Bounds-checked; throws InvalidArgument naming the table's size.
  const RegionSpan& region(int index) const;
  std::uint64_t total_bytes() const { return total_bytes_; }
  // Covers name, shape, and every field of every region. Equal digests mean equal layouts.
  std::uint64_t digest() const { return digest_; }
  // Index of the region that holds this byte, -1 in a gap or past the end.
  int region_at(std::uint64_t offset) const;
  // A table of all regions, one a line, as `penstock layout` prints it; ends with a newline.
  std::string describe() const;

 private:
  std::string name_;
  std::string shape_text_;
  std::vector<RegionSpan> regions_;
  std::uint64_t total_bytes_ = 0;
  std::uint64_t digest_ = 0;
};

[[noreturn]] void throw_invalid_table(std::string_view table);

template <typename Shape, int N>
Layout Layout::from(const RegionTable<Shape, N>& table, const Shape& shape,
                    std::string shape_text) {
  const LayoutOffsets<N> at = table.at(shape);
  if (!at.valid) throw_invalid_table(table.name);
  std::vector<RegionSpan> spans;
  spans.reserve(N);
  for (int i = 0; i < N; ++i) {
    spans.push_back({table.region[i].name, at.offset[i], at.bytes[i], table.region[i].alignment,
                     table.region[i].writer, table.region[i].reader});
  }
  return Layout(table.name, std::move(shape_text), std::move(spans));
}

}  // namespace penstock
