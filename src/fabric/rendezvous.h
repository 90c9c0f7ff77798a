// How processes of one host find each other: once over TCP, then Unix sockets between all pairs.
#pragma once

#include <cstdint>
#include <vector>

#include "fabric/sockets.h"
#include "penstock/fabric/team.h"

namespace penstock::detail {

struct Meeting {
  std::vector<UniqueFd> peer;  // [size] connected SEQPACKET sockets, empty at the own rank
};

// Collective over the processes; errors as connect_team().
Meeting rendezvous(const Discovery& discovery, TimePoint until);

}  // namespace penstock::detail
