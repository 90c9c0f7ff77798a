#include "penstock/fabric/doctor.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>

#include "fabric/link_layout.h"
#include "fabric/pattern.h"
#include "penstock/core/error.h"
#include "penstock/fabric/guard.h"
#include "penstock/fabric/signal.h"

namespace penstock {
namespace {

// What a receiver found for one sender, as it travels between ranks.
struct PairOutcome {
  std::int32_t round = -1;  // first bad round, -1: none
  std::int32_t reserved = 0;
  std::int64_t byte = -1;
};

std::uint64_t seed_of(TransportKind kind, int round, int from, int to) {
  return ((static_cast<std::uint64_t>(kind) * 131 + static_cast<std::uint64_t>(round)) * 131 +
          static_cast<std::uint64_t>(from)) *
             131 +
         static_cast<std::uint64_t>(to) + 1;
}

template <typename T>
std::vector<T> gather(Team& team, std::span<const T> mine) {
  std::vector<T> all(mine.size() * static_cast<std::size_t>(team.size()));
  team.all_gather(std::as_bytes(mine), std::as_writable_bytes(std::span(all)));
  return all;
}

// Sends one message to each peer, receives one from each, looks at the bytes as soon as the signal
// is there.
class Tester {
 public:
  Tester(TeamHandle team, const FabricBackend& backend, const SelfTestOptions& options)
      : team_(std::move(team)),
        backend_(backend),
        options_(options),
        window_(Window::create(team_, link_layout(team_->size(), options.bytes), backend.memory)) {}

  TransportReport run(TransportKind kind) {
    const int ranks = team_->size();
    const int me = team_->rank();
    std::vector<PairOutcome> outcome(static_cast<std::size_t>(ranks));
    // All stand before the first waits: on GPUs that ranks share, setting up (allocations, a
    // stream's first launch) may wait for kernels that wait for the peer that is still setting up.
    std::unique_ptr<Transport> transport;
    collectively(*team_, [&] { transport = backend_.make_transport(kind, window_); });
    for (int round = 0; round < options_.rounds; ++round) {
      const std::uint64_t epoch = window_->epochs().next();
      for (int i = first(); i < ranks; ++i) send(*transport, kind, round, epoch, (me + i) % ranks);
      transport->flush();
      for (int i = first(); i < ranks; ++i) {
        const int from = (me + i) % ranks;
        const std::int64_t bad =
            backend_.receive(*window_, word(from), epoch, from, slot(kLinkData, from),
                             options_.bytes, seed_of(kind, round, from, me));
        PairOutcome& found = outcome[static_cast<std::size_t>(from)];
        if (bad >= 0 && found.round < 0) {
          found.round = round;
          found.byte = bad;
        }
      }
      transport->quiet();
      team_->barrier();  // the buffers are single: nobody may be a round ahead
    }
    return report(kind, outcome, transport->counters());
  }

  void close() { window_->close(); }

 private:
  // A team of one sends to itself, larger teams to the others.
  int first() const { return team_->size() == 1 ? 0 : 1; }
  std::uint64_t slot(int region, int rank) const {
    return window_->layout().region(region).offset +
           static_cast<std::uint64_t>(rank) * options_.bytes;
  }
  std::uint64_t word(int rank) const {
    return window_->layout().region(kLinkArrived).offset + static_cast<std::uint64_t>(rank) * 8;
  }

  void send(Transport& transport, TransportKind kind, int round, std::uint64_t epoch, int to) {
    const int me = team_->rank();
    const std::uint64_t seed = seed_of(kind, round, me, to);
    if (kind == TransportKind::kDirect) {
      backend_.fill(*window_, to, slot(kLinkData, me), options_.bytes, seed);
      transport.count_direct(options_.bytes);
      transport.signal(to, word(me), epoch);
      return;
    }
    backend_.fill(*window_, me, slot(kLinkStaging, to), options_.bytes, seed);
    PutDescriptor put;
    put.peer = to;
    put.src_offset = slot(kLinkStaging, to);
    put.dst_offset = slot(kLinkData, me);
    put.bytes = options_.bytes;
    put.signal_offset = word(me);
    put.signal_epoch = epoch;
    transport.put(put);
  }

  TransportReport report(TransportKind kind, const std::vector<PairOutcome>& outcome,
                         const TransportCounters& counted) {
    const auto ranks = static_cast<std::uint64_t>(team_->size());
    const std::uint64_t peers = ranks == 1 ? 1 : ranks - 1;
    const std::uint64_t asked =
        peers * static_cast<std::uint64_t>(options_.rounds) * options_.bytes;
    const std::uint64_t moved =
        kind == TransportKind::kDirect ? counted.direct_bytes : counted.bytes;
    const auto books = gather(*team_, std::span<const std::uint64_t>(&moved, 1));
    const auto all = gather(*team_, std::span<const PairOutcome>(outcome));
    TransportReport out;
    out.kind = kind;
    out.asked_bytes = asked * ranks;
    for (std::size_t r = 0; r < books.size(); ++r) {
      out.moved_bytes += books[r];
      // Right bytes that no transport moved were moved by something else: that is no success.
      if (books[r] != asked && out.reason.empty()) {
        out.reason = fmt::format("rank {}'s {} transport counted {} of {} bytes", r,
                                 to_string(kind), books[r], asked);
      }
    }
    for (int to = 0; to < team_->size(); ++to) {
      for (int from = 0; from < team_->size(); ++from) {
        if (from == to && ranks > 1) continue;
        const PairOutcome& found =
            all[static_cast<std::size_t>(to) * ranks + static_cast<std::size_t>(from)];
        PairReport pair{from, to, found.round < 0, {}};
        if (!pair.ok) {
          pair.reason = fmt::format("round {}: byte {} of {} was wrong when the signal was seen",
                                    found.round, found.byte, options_.bytes);
          if (out.reason.empty()) {
            out.reason = fmt::format("rank {} to rank {}, {}", from, to, pair.reason);
          }
        }
        out.pairs.push_back(pair);
      }
    }
    out.ok = out.reason.empty() && !out.pairs.empty();
    return out;
  }

  TeamHandle team_;
  const FabricBackend& backend_;
  SelfTestOptions options_;
  std::shared_ptr<Window> window_;
};

}  // namespace

FabricBackend cpu_fabric_backend() {
  FabricBackend out;
  out.name = "cpu";
  out.memory = cpu_window_backend();
  out.transports = {TransportKind::kCopyEngine, TransportKind::kSm, TransportKind::kDirect};
  out.make_transport = [](TransportKind kind, std::shared_ptr<Window> window) {
    return make_cpu_transport(kind, std::move(window));
  };
  out.fill = [](Window& window, int rank, std::uint64_t offset, std::uint64_t bytes,
                std::uint64_t seed) {
    auto* to = reinterpret_cast<std::uint64_t*>(window.base(rank) + offset);
    for (std::uint64_t i = 0; i < bytes / 8; ++i) to[i] = pattern_word(seed, i);
  };
  out.receive = [](Window& window, std::uint64_t signal_offset, std::uint64_t epoch, int peer,
                   std::uint64_t offset, std::uint64_t bytes, std::uint64_t seed) -> std::int64_t {
    WaitSite site;
    site.peer = peer;
    site.region = window.layout().region_at(signal_offset);
    Guard(window.team())
        .wait(reinterpret_cast<std::uint64_t*>(window.local() + signal_offset), epoch, site);
    const auto* at = reinterpret_cast<const std::uint64_t*>(window.local() + offset);
    for (std::uint64_t i = 0; i < bytes / 8; ++i) {
      // The first byte of the word that differs; little-endian, as all machines this runs on.
      const std::uint64_t wrong = at[i] ^ pattern_word(seed, i);
      if (wrong != 0) return static_cast<std::int64_t>(i * 8) + std::countr_zero(wrong) / 8;
    }
    return -1;
  };
  return out;
}

std::vector<TransportReport> self_test(const TeamHandle& team, const FabricBackend& backend,
                                       const SelfTestOptions& options) {
  collectively(*team, [&] {
    require(options.bytes >= 8 && options.bytes % 8 == 0 && options.bytes <= (1ULL << 32),
            ErrorKind::kInvalidArgument, [&] {
              return fmt::format("self-test messages of {} bytes: give a multiple of 8 up to 2^32",
                                 options.bytes);
            });
    require(options.rounds >= 1, ErrorKind::kInvalidArgument, [&] {
      return fmt::format("a self-test of {} rounds tests nothing: give 1 or more", options.rounds);
    });
    require(!backend.transports.empty(), ErrorKind::kUnsupported,
            [&] { return fmt::format("back end {} has no transport to test", backend.name); });
  });
  Tester tester(team, backend, options);
  std::vector<TransportReport> out;
  for (const TransportKind kind : backend.transports) out.push_back(tester.run(kind));
  tester.close();
  return out;
}

}  // namespace penstock
