// The fabric's self-test: every transport moves bytes between every pair, signals follow data, and
// nothing that moved nothing passes. `penstock doctor` prints it; a back end takes part by filling
// in a FabricBackend.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "penstock/fabric/transport.h"
#include "penstock/fabric/window.h"

namespace penstock {

// What the self-test and the link benchmark need from a back end, for one rank. All functions run
// on the rank's thread and return when their effect is there.
struct FabricBackend {
  std::string name;  // "cpu", "cuda"
  std::shared_ptr<WindowBackend> memory;
  std::vector<TransportKind> transports;  // those that this back end has
  // Called by all ranks, none of which waits for a signal meanwhile.
  std::function<std::unique_ptr<Transport>(TransportKind, std::shared_ptr<Window>)> make_transport;
  // Writes the pattern of `seed` to [offset, + bytes) of `rank`'s window, with this rank's stores.
  // Offsets and sizes are multiples of 8.
  std::function<void(Window&, int rank, std::uint64_t offset, std::uint64_t bytes,
                     std::uint64_t seed)>
      fill;
  // Waits (deadline, Fault) until this rank's word at `signal_offset` is >= epoch; `peer` is its
  // writer. Then whoever saw the signal compares [offset, + bytes) with the pattern of `seed` at
  // once: first byte that differs, or -1. bytes == 0: the wait alone.
  std::function<std::int64_t(Window&, std::uint64_t signal_offset, std::uint64_t epoch, int peer,
                             std::uint64_t offset, std::uint64_t bytes, std::uint64_t seed)>
      receive;
};

// The CPU's: host memory, all three transports.
FabricBackend cpu_fabric_backend();

struct SelfTestOptions {
  std::uint64_t bytes = 1 << 20;  // a message; a multiple of 8
  int rounds = 3;                 // each with other data
};

// One transport from one rank to another. ok only if every byte of every round was right when its
// signal was seen.
struct PairReport {
  int from = 0;
  int to = 0;
  bool ok = false;
  std::string reason;  // empty if ok: which round and byte
};
struct TransportReport {
  TransportKind kind = TransportKind::kSm;
  bool ok = false;     // all pairs, and the books of every rank agree with what was asked
  std::string reason;  // first reason if not ok
  std::uint64_t asked_bytes = 0;  // over all ranks
  std::uint64_t moved_bytes = 0;  // counted by the transports (for direct: by the producers)
  std::vector<PairReport> pairs;
};

// Collective. Runs every transport of the back end between every pair of ranks at once (a team of
// one sends to itself). The same report on every rank. Throws what windows and waits throw.
std::vector<TransportReport> self_test(const TeamHandle& team, const FabricBackend& backend,
                                       const SelfTestOptions& options = {});

}  // namespace penstock
