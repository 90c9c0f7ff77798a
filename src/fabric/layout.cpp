#include "penstock/fabric/layout.h"

#include <fmt/format.h>

#include <algorithm>

#include "penstock/core/digest.h"
#include "penstock/core/error.h"

namespace penstock {

std::string_view to_string(Access access) {
  switch (access) {
    case Access::kNobody:
      return "nobody";
    case Access::kOwner:
      return "owner";
    case Access::kPeers:
      return "peers";
    case Access::kAll:
      return "all";
  }
  return "unknown";
}

Layout::Layout(std::string name, std::string shape_text, std::vector<RegionSpan> regions)
    : name_(std::move(name)), shape_text_(std::move(shape_text)), regions_(std::move(regions)) {
  Digest digest;
  digest.add(name_).add(shape_text_).add(regions_.size());
  std::uint64_t cursor = 0;
  std::uint64_t largest = 1;
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    const RegionSpan& r = regions_[i];
    const auto refuse = [&](const std::string& why) {
      throw Error(ErrorKind::kInvalidArgument,
                  fmt::format("layout {}: region {} ('{}') {}", name_, i, r.name, why));
    };
    for (std::size_t j = 0; j < i; ++j) {
      if (regions_[j].name == r.name) refuse(fmt::format("has the name of region {}", j));
    }
    if (r.alignment == 0 || (r.alignment & (r.alignment - 1)) != 0 || r.alignment > 4096) {
      refuse(fmt::format("has alignment {}: give a power of two up to 4096", r.alignment));
    }
    if (r.offset % r.alignment != 0) {
      refuse(
          fmt::format("starts at {}, not a multiple of its alignment {}", r.offset, r.alignment));
    }
    if (r.offset < cursor) {
      refuse(
          fmt::format("starts at {}, inside region {} which ends at {}", r.offset, i - 1, cursor));
    }
    if (r.bytes > kMaxWindowBytes || r.offset > kMaxWindowBytes - r.bytes) {
      refuse(fmt::format("of {} bytes at {} passes the largest window, {} bytes", r.bytes, r.offset,
                         kMaxWindowBytes));
    }
    cursor = r.offset + r.bytes;
    largest = std::max(largest, r.alignment);
    digest.add(r.name).add(r.offset).add(r.bytes).add(r.alignment);
    digest.add(static_cast<std::uint64_t>(r.writer)).add(static_cast<std::uint64_t>(r.reader));
  }
  total_bytes_ = (cursor + largest - 1) & ~(largest - 1);
  digest_ = digest.add(total_bytes_).value();
}

const RegionSpan& Layout::region(int index) const {
  require(index >= 0 && static_cast<std::size_t>(index) < regions_.size(),
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format("layout {} has regions 0 to {}, not {}", name_,
                               static_cast<int>(regions_.size()) - 1, index);
          });
  return regions_[static_cast<std::size_t>(index)];
}

int Layout::region_at(std::uint64_t offset) const {
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    if (offset >= regions_[i].offset && offset - regions_[i].offset < regions_[i].bytes) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

std::string Layout::describe() const {
  std::string out = fmt::format("{} ({}), {} bytes, digest {}\n", name_, shape_text_, total_bytes_,
                                to_hex(digest_));
  std::size_t width = 6;
  for (const RegionSpan& r : regions_) width = std::max(width, r.name.size());
  out += fmt::format("  {:>2}  {:<{}}  {:>14}  {:>14}  {:>5}  {:<6}  {:<6}\n", "#", "region", width,
                     "offset", "bytes", "align", "writer", "reader");
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    const RegionSpan& r = regions_[i];
    out += fmt::format("  {:>2}  {:<{}}  {:>14}  {:>14}  {:>5}  {:<6}  {:<6}\n", i, r.name, width,
                       r.offset, r.bytes, r.alignment, to_string(r.writer), to_string(r.reader));
  }
  return out;
}

void throw_invalid_table(std::string_view table) {
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("region table {} cannot be laid out at this shape: an alignment is no "
                          "power of two up to 4096, or the sizes pass {} bytes",
                          table, kMaxWindowBytes));
}

}  // namespace penstock
