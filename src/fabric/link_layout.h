// The window of the self-test and of the link benchmark: one message to and from each rank.
#pragma once

#include <fmt/format.h>

#include "penstock/fabric/layout.h"

namespace penstock {

struct LinkShape {
  std::uint64_t ranks = 1;
  std::uint64_t bytes = 0;
};
enum LinkRegion : int { kLinkStaging = 0, kLinkData = 1, kLinkArrived = 2, kLinkAnswered = 3 };
inline constexpr RegionTable<LinkShape, 4> kLinkTable{
    "link",
    {{"staging", [](const LinkShape& s) { return s.ranks * s.bytes; }, 256, Access::kOwner,
      Access::kOwner},
     {"data", [](const LinkShape& s) { return s.ranks * s.bytes; }, 256, Access::kPeers,
      Access::kOwner},
     {"arrived", [](const LinkShape& s) { return s.ranks * 8; }, 128, Access::kPeers,
      Access::kOwner},
     {"answered", [](const LinkShape& s) { return s.ranks * 8; }, 128, Access::kPeers,
      Access::kOwner}}};

inline Layout link_layout(int ranks, std::uint64_t bytes) {
  return Layout::from(kLinkTable, LinkShape{static_cast<std::uint64_t>(ranks), bytes},
                      fmt::format("ranks {}, bytes {}", ranks, bytes));
}

}  // namespace penstock
