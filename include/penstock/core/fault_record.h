// The record that a failed wait leaves: plain data, safe to include in device code.
#pragma once

#include <cstdint>

namespace penstock {

// First cause of a fault, as the wait that expired saw it. A POD of fixed size: kernels write it to
// host-visible memory, processes exchange it byte by byte. Unknown fields hold -1.
struct FaultRecord {
  std::int32_t rank = -1;       // the rank whose wait expired (or that noticed a dead peer)
  std::int32_t peer = -1;       // the rank waited for
  std::int32_t op = -1;         // operator instance, as numbered by the team
  std::int32_t stage = -1;      // operator's own stage number
  std::int32_t region = -1;     // index in the operator's layout table
  std::int32_t index = -1;      // word inside the region
  std::uint64_t expected = 0;   // epoch waited for
  std::uint64_t seen = 0;       // epoch found at the deadline
  std::uint64_t waited_ns = 0;  // how long the wait lasted
  std::uint32_t cause = 0;      // FaultCause
  std::uint32_t valid = 0;      // written last; non-zero when the record is whole
};
static_assert(sizeof(FaultRecord) == 56);

enum class FaultCause : std::uint32_t {
  kNone = 0,
  kDeadline = 1,     // nothing arrived in time
  kPeerDead = 2,     // the peer's process or thread is gone
  kPeerAborted = 3,  // another rank raised the abort word
  kRingFull = 4,     // the proxy's descriptor ring stayed full until the deadline
  kTransport = 5,    // a transport reported a failed copy
};

}  // namespace penstock
