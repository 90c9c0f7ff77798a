#include "fabric/scenarios.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "fabric/resources.h"
#include "penstock/fabric/all_reduce.h"
#include "penstock/fabric/guard.h"
#include "penstock/fabric/packet.h"
#include "penstock/fabric/transport.h"
#include "penstock/fabric/window.h"

namespace penstock::testing {

void expect_error(ErrorKind kind, const std::vector<std::string>& words,
                  const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    expect(error.kind() == kind, fmt::format("kind {} for: {}", to_string(kind), error.what()));
    for (const std::string& word : words) {
      expect(std::string_view(error.what()).find(word) != std::string_view::npos,
             fmt::format("'{}' in: {}", word, error.what()));
    }
    return;
  }
  throw std::runtime_error("expectation failed: no error was thrown");
}

FaultRecord expect_fault(const std::function<void()>& body) {
  try {
    body();
  } catch (const Fault& fault) {
    return fault.record();
  }
  throw std::runtime_error("expectation failed: no fault was thrown");
}

namespace {

// ---- collectives ------------------------------------------------------------------------------

void collectives(const TeamHandle& team, const ScenarioArgs& args) {
  const int ranks = team->size();
  std::mt19937_64 random(args.seed + static_cast<std::uint64_t>(team->rank()));
  for (std::uint64_t round = 0; round < args.rounds; ++round) {
    if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    team->barrier();
    for (const std::size_t words : {0u, 1u, 7u, 256u, 900u}) {  // 900 words need several pieces
      std::vector<std::uint64_t> mine(words);
      std::vector<std::uint64_t> all(words * static_cast<std::size_t>(ranks));
      for (std::size_t i = 0; i < words; ++i) mine[i] = pattern(round, team->rank(), 0, i);
      team->all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
      for (int r = 0; r < ranks; ++r) {
        for (std::size_t i = 0; i < words; ++i) {
          expect(all[static_cast<std::size_t>(r) * words + i] == pattern(round, r, 0, i),
                 fmt::format("all_gather round {} rank {} word {}", round, r, i));
        }
      }
    }
    const std::string text(static_cast<std::size_t>(team->rank()) * 1500 + round % 3, 'x');
    const auto texts = team->all_gather_varying(std::as_bytes(std::span(text)));
    for (int r = 0; r < ranks; ++r) {
      const auto& theirs = texts[static_cast<std::size_t>(r)];
      expect(theirs.size() == static_cast<std::size_t>(r) * 1500 + round % 3, "varying length");
      for (const std::byte b : theirs) expect(b == std::byte{'x'}, "varying content");
    }
    expect(team->agree(true), "all agreed");
    expect(!team->agree(team->rank() != static_cast<int>(round) % ranks), "one disagreed");
    expect(team->next_operator() == static_cast<std::int32_t>(round), "operator numbers");
  }
  team->barrier();
}

void descriptors(const TeamHandle& team, const ScenarioArgs& args) {
  for (std::uint64_t round = 0; round < args.rounds; ++round) {
    const UniqueFd mine(::memfd_create("test", MFD_CLOEXEC));
    const std::uint64_t value = pattern(round, team->rank(), 0, 0);
    expect(::pwrite(mine.get(), &value, sizeof value, 0) == sizeof value, "pwrite");
    const bool give = team->rank() != 1 || round % 2 == 0;
    const auto all = team->all_gather_descriptor(give ? mine.get() : -1);
    for (int r = 0; r < team->size(); ++r) {
      const UniqueFd& theirs = all[static_cast<std::size_t>(r)];
      if (r == 1 && round % 2 == 1) {
        expect(!theirs, "no descriptor was given");
        continue;
      }
      std::uint64_t seen = 0;
      expect(::pread(theirs.get(), &seen, sizeof seen, 0) == sizeof seen, "pread");
      expect(seen == pattern(round, r, 0, 0), fmt::format("descriptor of rank {}", r));
    }
  }
}

void different_calls(const TeamHandle& team, const ScenarioArgs&) {
  expect_error(ErrorKind::kInvalidArgument, {"barrier", "agree", "same order"}, [&] {
    if (team->rank() == 0) {
      team->barrier();
    } else {
      (void)team->agree(true);
    }
  });
  expect_error(ErrorKind::kInvalidArgument, {"8 bytes", "16 bytes"}, [&] {
    std::vector<std::uint64_t> mine(team->rank() == 0 ? 1 : 2);
    std::vector<std::uint64_t> all(mine.size() * static_cast<std::size_t>(team->size()));
    team->all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  });
  // Refused calls leave a team that works.
  expect(team->agree(true), "team is usable after a refused call");
}

void refused_together(const TeamHandle& team, const ScenarioArgs&) {
  expect_error(ErrorKind::kUnsupported, {"rank 1: no such thing"}, [&] {
    collectively(*team, [&] {
      if (team->rank() == 1) throw_error(ErrorKind::kUnsupported, "no such thing");
    });
  });
  bool ran = false;
  collectively(*team, [&] { ran = true; });
  expect(ran, "the body ran");
}

// ---- windows ----------------------------------------------------------------------------------

struct TestShape {
  std::uint64_t ranks = 1;
  std::uint64_t bytes = 0;  // of one message
};
enum TestRegion : int { kStaging = 0, kData = 1, kArrived = 2, kConsumed = 3 };
constexpr RegionTable<TestShape, 4> kTestTable{
    "exchange",
    {{"staging", [](const TestShape& s) { return kCallsInFlight * s.ranks * s.bytes; }, 128,
      Access::kOwner, Access::kOwner},
     {"data", [](const TestShape& s) { return kCallsInFlight * s.ranks * s.bytes; }, 128,
      Access::kPeers, Access::kOwner},
     {"arrived", [](const TestShape& s) { return s.ranks * 8; }, 64, Access::kPeers,
      Access::kOwner},
     {"consumed", [](const TestShape& s) { return s.ranks * 8; }, 64, Access::kPeers,
      Access::kOwner}}};

Layout test_layout(const TeamHandle& team, std::uint64_t bytes) {
  const TestShape shape{static_cast<std::uint64_t>(team->size()), bytes};
  return Layout::from(kTestTable, shape, fmt::format("ranks {}, bytes {}", shape.ranks, bytes));
}

void layout_refused(const TeamHandle& team, const ScenarioArgs&) {
  const int last = team->size() - 1;
  const std::uint64_t bytes = team->rank() == last ? 128 : 64;
  expect_error(ErrorKind::kInvalidArgument,
               {"bytes 64", "bytes 128", fmt::format("rank {}:", last), "rank 0", "consumed"},
               [&] { (void)Window::create(team, test_layout(team, bytes), cpu_window_backend()); });
  // The refusal left no rank behind.
  const auto window = Window::create(team, test_layout(team, 64), cpu_window_backend());
  window->close();
  expect(window->closed(), "closed");
}

void window_reach(const TeamHandle& team, const ScenarioArgs&) {
  const auto window = Window::create(team, test_layout(team, 4096), cpu_window_backend());
  const int me = team->rank();
  const int ranks = team->size();
  for (int r = 0; r < ranks; ++r) {
    auto* theirs = window->region_as<std::uint64_t>(r, kData);
    // My 4096 bytes of everybody's region; the last word too, which a short mapping would lose.
    for (std::uint64_t i = 0; i < 512; ++i) {
      theirs[static_cast<std::uint64_t>(me) * 512 + i] = pattern(1, me, r, i);
    }
  }
  team->barrier();
  for (int r = 0; r < ranks; ++r) {
    const auto* mine = window->region_as<std::uint64_t>(me, kData);
    for (std::uint64_t i = 0; i < 512; ++i) {
      expect(mine[static_cast<std::uint64_t>(r) * 512 + i] == pattern(1, r, me, i),
             fmt::format("word {} of rank {}", i, r));
    }
  }
  expect_error(ErrorKind::kInvalidArgument, {"regions 0 to 3", "not 4"},
               [&] { (void)window->region(0, 4); });
  window->close();
}

void pool(const TeamHandle& team, const ScenarioArgs&) {
  WindowPool pool(team, 1 << 20, cpu_window_backend());
  const auto a = pool.lease("layer", test_layout(team, 4096));
  const auto same = pool.lease("layer", test_layout(team, 4096));
  expect(a == same, "layers with one key share one slice");
  const auto b = pool.lease("other", test_layout(team, 256));
  expect(a->mapping() == b->mapping(), "one allocation");
  expect(b->mapping_offset() >= a->bytes(), "slices do not overlap");
  expect(pool.used_bytes() == a->bytes() + b->bytes(), "the books");
  expect_error(ErrorKind::kInvalidArgument, {"key 'layer'", "bytes 4096", "bytes 512"},
               [&] { (void)pool.lease("layer", test_layout(team, 512)); });
  expect_error(ErrorKind::kResourceExhausted, {"'huge'", "layer", "other", "raise the budget"},
               [&] { (void)pool.lease("huge", test_layout(team, 1 << 20)); });
  if (team->size() > 1) {
    expect_error(ErrorKind::kInvalidArgument, {"key 'x0'", "key 'x1'"}, [&] {
      (void)pool.lease(team->rank() == 0 ? "x0" : "x1", test_layout(team, 256));
    });
  }
  expect_error(ErrorKind::kResourceExhausted, {"does not fit"},
               [&] { WindowPool(team, 1ULL << 46, cpu_window_backend()); });
  // Both slices work side by side.
  for (int r = 0; r < team->size(); ++r) {
    a->region_as<std::uint64_t>(r, kArrived)[team->rank()] = 1;
    b->region_as<std::uint64_t>(r, kArrived)[team->rank()] = 2;
  }
  team->barrier();
  for (int r = 0; r < team->size(); ++r) {
    expect(a->region_as<std::uint64_t>(team->rank(), kArrived)[r] == 1, "slice a");
    expect(b->region_as<std::uint64_t>(team->rank(), kArrived)[r] == 2, "slice b");
  }
  b->close();
  a->close();
}

// ---- puts and waits ---------------------------------------------------------------------------

// The protocol that operators use: staging -> put -> arrived -> read -> consumed, two calls in
// flight, sizes and contents that change every round.
class Exchanger {
 public:
  Exchanger(TeamHandle team, TransportKind kind, std::uint64_t bytes,
            const CpuEngineOptions& engine, std::uint64_t seed)
      : team_(std::move(team)),
        bytes_(bytes),
        window_(Window::create(team_, test_layout(team_, bytes), cpu_window_backend())),
        transport_(make_cpu_transport(kind, window_, engine)),
        guard_(team_, team_->next_operator()),
        hook_(*this),
        random_(seed * 977 + static_cast<std::uint64_t>(team_->rank())) {
    team_->add_hook(&hook_);
  }
  ~Exchanger() { team_->remove_hook(&hook_); }

  void round(bool jitter) {
    send(jitter);
    receive(jitter);
  }

  void send(bool jitter) {
    const std::uint64_t epoch = window_->epochs().next();
    const int me = team_->rank();
    for (int i = 0; i < team_->size(); ++i) {
      const int peer = (me + i) % team_->size();
      wait(kConsumed, peer, reuse_epoch(epoch));
      const std::uint64_t words = words_of(epoch, me, peer);
      const bool direct = transport_->kind() == TransportKind::kDirect;
      const std::uint64_t from = slot(kStaging, epoch, peer);
      const std::uint64_t to = slot(kData, epoch, me);
      auto* out = reinterpret_cast<std::uint64_t*>(direct ? window_->base(peer) + to
                                                          : window_->local() + from);
      for (std::uint64_t w = 0; w < words; ++w) out[w] = pattern(epoch, me, peer, w);
      if (jitter) nap();
      const std::uint64_t signal = word(kArrived, me);
      if (direct) {
        transport_->count_direct(words * 8);
        transport_->signal(peer, signal, epoch);
        continue;
      }
      // In up to three adjacent pieces; only the last one signals.
      const std::uint64_t pieces = 1 + random_() % 3;
      std::uint64_t done = 0;
      for (std::uint64_t p = 0; p < pieces; ++p) {
        const std::uint64_t end = p + 1 == pieces ? words : words * (p + 1) / pieces;
        PutDescriptor put;
        put.peer = peer;
        put.src_offset = from + done * 8;
        put.dst_offset = to + done * 8;
        put.bytes = (end - done) * 8;
        if (p + 1 == pieces) {
          put.signal_offset = signal;
          put.signal_epoch = epoch;
        }
        if (put.bytes > 0 || p + 1 == pieces) transport_->put(put);
        done = end;
      }
    }
    transport_->flush();
    sent_ = epoch;
  }

  void receive(bool jitter) {
    const int me = team_->rank();
    const std::uint64_t epoch = sent_;
    for (int i = 0; i < team_->size(); ++i) {
      const int peer = (me + i) % team_->size();
      if (jitter) nap();
      wait(kArrived, peer, epoch);
      const auto* in =
          reinterpret_cast<const std::uint64_t*>(window_->local() + slot(kData, epoch, peer));
      const std::uint64_t words = words_of(epoch, peer, me);
      for (std::uint64_t w = 0; w < words; ++w) {
        if (in[w] != pattern(epoch, peer, me, w)) {
          throw std::runtime_error(fmt::format(
              "stale or torn: rank {} round {} from {} word {} of {}: {:016x}, not {:016x}", me,
              epoch, peer, w, words, in[w], pattern(epoch, peer, me, w)));
        }
      }
      store_signal(window_->region_as<std::uint64_t>(peer, kConsumed) + me, epoch);
    }
  }

  Window& window() { return *window_; }
  Transport& transport() { return *transport_; }

 private:
  // After a rearm nobody will consume what the fault cut short.
  class Hook final : public RearmHook {
   public:
    explicit Hook(Exchanger& owner) : owner_(owner) {}
    void quiesce() override {}
    std::uint64_t highest_epoch() const override { return kNoEpoch; }  // the window's counts
    void resume(std::uint64_t floor) override {
      const int me = owner_.team_->rank();
      for (int r = 0; r < owner_.team_->size(); ++r) {
        store_signal(owner_.window_->region_as<std::uint64_t>(me, kConsumed) + r, floor);
      }
    }

   private:
    Exchanger& owner_;
  };

  std::uint64_t words_of(std::uint64_t epoch, int from, int to) const {
    const std::uint64_t draw = pattern(epoch, from, to, ~0ULL);
    return draw % 16 == 0 ? 0 : draw / 16 % (bytes_ / 8) + 1;  // an empty message now and then
  }
  std::uint64_t slot(int region, std::uint64_t epoch, int rank) const {
    return window_->layout().region(region).offset +
           (parity_of(epoch) * static_cast<std::uint64_t>(team_->size()) +
            static_cast<std::uint64_t>(rank)) *
               bytes_;
  }
  std::uint64_t word(int region, int rank) const {
    return window_->layout().region(region).offset + static_cast<std::uint64_t>(rank) * 8;
  }
  void wait(int region, int peer, std::uint64_t epoch) {
    WaitSite site;
    site.peer = peer;
    site.region = region;
    site.index = peer;
    guard_.wait(window_->region_as<std::uint64_t>(team_->rank(), region) + peer, epoch, site);
  }
  void nap() {
    const std::uint64_t draw = random_();
    if (draw % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw / 64 % 100));
    if (draw % 64 < 4) std::this_thread::yield();
  }

  TeamHandle team_;
  std::uint64_t bytes_;
  std::shared_ptr<Window> window_;
  std::unique_ptr<Transport> transport_;
  Guard guard_;
  Hook hook_;
  std::mt19937_64 random_;
  std::uint64_t sent_ = kNoEpoch;
};

void stress(const TeamHandle& team, const ScenarioArgs& args) {
  CpuEngineOptions engine;
  engine.max_delay = std::chrono::microseconds(20);
  engine.reorder_peers = true;
  engine.seed = args.seed + static_cast<std::uint64_t>(team->rank());
  engine.ring_slots = 16;  // so that the ring fills and wraps
  Exchanger exchange(team, parse_transport(args.option), 512, engine, args.seed);
  // Epochs pass 2^32 on the way.
  exchange.window().epochs().advance_to(0xffffffffULL - args.rounds / 2);
  // Words by which peers allow reuse count from there, too.
  for (int r = 0; r < team->size(); ++r) {
    store_signal(exchange.window().region_as<std::uint64_t>(team->rank(), kConsumed) + r,
                 exchange.window().epochs().last());
  }
  team->barrier();
  for (std::uint64_t k = 0; k < args.rounds; ++k) exchange.round(true);
  exchange.transport().quiet();
  const TransportCounters done = exchange.transport().counters();
  const auto signals = args.rounds * static_cast<std::uint64_t>(team->size());
  expect(done.signals <= signals && done.signals > 0, "signals are counted");
  if (exchange.transport().kind() == TransportKind::kDirect) {
    expect(done.bytes == 0 && done.direct_bytes > 0, "direct bytes are counted as such");
  } else {
    expect(done.bytes > 0 && done.direct_bytes == 0 && done.copies <= done.puts,
           "moved bytes are counted");
  }
  exchange.window().close();
}

// Two instances in flight at once, over different transports, calls interleaved.
void two_instances(const TeamHandle& team, const ScenarioArgs& args) {
  CpuEngineOptions engine;
  engine.max_delay = std::chrono::microseconds(30);
  engine.seed = static_cast<std::uint64_t>(team->rank()) + 7;
  Exchanger a(team, TransportKind::kCopyEngine, 256, engine, args.seed);
  Exchanger b(team, TransportKind::kSm, 1024, engine, args.seed + 1);
  for (std::uint64_t k = 0; k < args.rounds; ++k) {
    a.send(true);
    b.send(true);
    if (k % 2 == 0) {
      a.receive(true);
      b.receive(true);
    } else {
      b.receive(true);
      a.receive(true);
    }
  }
  b.window().close();
  a.window().close();
}

// ---- all-reduce -------------------------------------------------------------------------------

void reduce_once(AllReduce& reduce, const TeamHandle& team, std::uint64_t call, std::size_t n,
                 AllReduceKind kind) {
  const auto value = [&](int rank, std::size_t i) {
    // Values whose f32 sum depends on the order: a wrong order shows in the last bits.
    const std::uint64_t draw = pattern(call, rank, 0, i);
    return (static_cast<float>(draw % 2000001) - 1e6f) * (draw % 3 == 0 ? 1e-4f : 1.37f);
  };
  std::vector<float> data(n);
  for (std::size_t i = 0; i < n; ++i) data[i] = value(team->rank(), i);
  reduce.run(data, kind);
  for (std::size_t i = 0; i < n; ++i) {
    float want = value(0, i);
    for (int r = 1; r < team->size(); ++r) want += value(r, i);
    if (std::memcmp(&want, &data[i], 4) != 0) {
      throw std::runtime_error(fmt::format("all-reduce call {} ({}) element {} of {}: {} not {}",
                                           call, to_string(kind), i, n, data[i], want));
    }
  }
}

void all_reduce(const TeamHandle& team, const ScenarioArgs& args) {
  constexpr std::size_t kWidth = 96;
  AllReduce reduce(team, 16 * kWidth);
  std::mt19937_64 random(args.seed);  // the same on every rank
  std::mt19937_64 local(args.seed + static_cast<std::uint64_t>(team->rank()));
  for (std::uint64_t call = 0; call < args.rounds; ++call) {
    if (local() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(local() % 300));
    const std::size_t rows = 1 + random() % 16;
    const std::size_t n = call % 5 == 0 ? 1 + random() % 7 : rows * kWidth - call % 3;
    const auto kind = random() % 2 == 0 ? AllReduceKind::kOneShot : AllReduceKind::kTwoShot;
    reduce_once(reduce, team, call, n, kind);
  }
  reduce_once(reduce, team, 1, 3 * 16 * kWidth + 5, AllReduceKind::kOneShot);  // several rounds
  reduce.window()->close();
}

// One rank's bad argument is refused on every rank at once, and leaves a team that works.
void all_reduce_refused(const TeamHandle& team, const ScenarioArgs&) {
  for (const std::uint64_t bad : {std::uint64_t{0}, (std::uint64_t{1} << 32) + 1}) {
    expect_error(ErrorKind::kInvalidArgument,
                 {fmt::format("rank 1: an all-reduce of {} elements", bad)},
                 [&] { const AllReduce reduce(team, team->rank() == 1 ? bad : 64); });
  }
  AllReduce reduce(team, 64);
  reduce_once(reduce, team, 1, 64, AllReduceKind::kOneShot);
  reduce.window()->close();
}

void tag_wrap(const TeamHandle& team, const ScenarioArgs& args) {
  constexpr std::size_t kMost = 300;
  AllReduce reduce(team, kMost);
  EpochCounter& epochs = reduce.window()->epochs();
  const auto both = [&](std::uint64_t call, std::size_t n) {
    reduce_once(reduce, team, call, n, AllReduceKind::kOneShot);
    reduce_once(reduce, team, call + 1, n, AllReduceKind::kTwoShot);
  };
  const auto jump = [&](std::uint64_t to) {
    team->barrier();
    epochs.advance_to(to);
    team->barrier();
  };
  // Across the end of 32 bits and across the tags' own period.
  jump(kTagPeriod - args.rounds);
  for (std::uint64_t k = 0; k < args.rounds * 2; ++k) both(k * 2, k % 7 == 0 ? kMost : 9);
  // Large packets of epochs e, e + 1 lie in the mailboxes; no later call overwrites them all.
  jump(2 * kTagPeriod + 100);
  const std::uint64_t first = epochs.last() + 1;
  both(1000, kMost);
  both(1002, kMost);
  // Small calls pass a sweep, then the very same tags come round again.
  jump((first / kSweepPeriod + 1) * kSweepPeriod - 3);
  for (std::uint64_t k = 0; k < 3; ++k) both(2000 + 2 * k, 3);
  jump(first + kTagPeriod - 1);
  for (std::uint64_t k = 0; k < 2; ++k) {
    // A late rank 0: its peers would find the old packets and take them for new.
    if (team->rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    both(3000 + 2 * k, kMost);
  }
  reduce.window()->close();
}

// ---- faults -----------------------------------------------------------------------------------

// One rank stays away from a round; everybody learns the same first cause, which names it; rearm;
// exact again, several times.
void absent_then_rearm(const TeamHandle& team, const ScenarioArgs& args) {
  CpuEngineOptions engine;
  engine.max_delay = std::chrono::microseconds(50);
  Exchanger exchange(team, parse_transport(args.option), 512, engine, args.seed);
  AllReduce reduce(team, 64);
  for (std::uint64_t k = 0; k < args.rounds; ++k) {
    for (int i = 0; i < 20; ++i) exchange.round(true);
    reduce_once(reduce, team, k, 64, AllReduceKind::kOneShot);
    const int absent = static_cast<int>(k) % team->size();
    FaultRecord record;
    if (team->rank() == absent) {
      while (!team->faulted()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      record = expect_fault([&] { team->check(); });
    } else {
      const auto start = std::chrono::steady_clock::now();
      record = expect_fault([&] {
        for (int i = 0; i < 3; ++i) exchange.round(false);
      });
      const auto took = std::chrono::steady_clock::now() - start;
      expect(took < team->deadline() + std::chrono::seconds(1), "within deadline + 1 s");
    }
    expect(record.peer == absent,
           fmt::format("rank {} is named, not: {}", absent, penstock::describe(record)));
    expect(record.cause == static_cast<std::uint32_t>(FaultCause::kDeadline), "cause");
    expect(record.region == kArrived || record.region == kConsumed, "region");
    expect(record.expected > record.seen, "epochs");
    // Everything refuses until the rearm.
    expect_fault([&] { team->barrier(); });
    expect_fault([&] { exchange.round(false); });
    team->rearm();
    expect(!team->faulted() && !team->fault(), "rearmed");
    expect(team->generation() == kFirstGeneration + k + 1, "generation");
    // The same first cause on every rank.
    std::vector<FaultRecord> all(static_cast<std::size_t>(team->size()));
    team->all_gather(std::as_bytes(std::span(&record, 1)), std::as_writable_bytes(std::span(all)));
    for (const FaultRecord& theirs : all) {
      expect(std::memcmp(&theirs, &record, sizeof record) == 0, "one first cause");
    }
  }
  for (int i = 0; i < 20; ++i) exchange.round(true);
  reduce_once(reduce, team, 99, 64, AllReduceKind::kTwoShot);
  exchange.window().close();
  reduce.window()->close();
}

// The engine of one rank fails in the middle.
void engine_fails(const TeamHandle& team, const ScenarioArgs& args) {
  CpuEngineOptions engine;
  if (team->rank() == 1 % team->size()) engine.fail_after_copies = 25;
  Exchanger exchange(team, TransportKind::kCopyEngine, 256, engine, args.seed);
  const FaultRecord record = expect_fault([&] {
    for (int i = 0; i < 1000; ++i) exchange.round(true);
  });
  expect(record.cause == static_cast<std::uint32_t>(FaultCause::kTransport), "cause");
  expect(record.rank == 1 % team->size(), "the failing rank is named");
  team->rearm();
  for (int i = 0; i < 50; ++i) exchange.round(true);
  exchange.transport().quiet();
  exchange.window().close();
}

// An engine that serves nothing: the ring fills, quiet() and close() end at the deadline.
void engine_stalls(const TeamHandle& team, const ScenarioArgs&) {
  CpuEngineOptions engine;
  engine.ring_slots = 4;
  if (team->rank() == 0) engine.stall_after_copies = 0;
  const auto window = Window::create(team, test_layout(team, 256), cpu_window_backend());
  const auto transport = make_cpu_transport(TransportKind::kCopyEngine, window, engine);
  const int peer = (team->rank() + 1) % team->size();
  PutDescriptor put;
  put.peer = peer;
  put.dst_offset = window->layout().region(kData).offset;
  put.bytes = 8;
  if (team->rank() == 0) {
    const FaultRecord record = expect_fault([&] {
      for (int i = 0; i < 100; ++i) transport->put(put);
    });
    expect(record.cause == static_cast<std::uint32_t>(FaultCause::kRingFull), "ring full");
  } else {
    // The others are in close() meanwhile: a stuck peer must end it, with the memory still mapped.
    // They come later, so that it is rank 0's deadline that passes first.
    std::this_thread::sleep_for(team->deadline() / 2);
    expect_fault([&] { window->close(); });
    expect(!window->closed(), "not closed");
    window->local()[0] = std::byte{1};
  }
  team->rearm();
  window->close();
  expect(window->closed(), "closed after the rearm");
}

// One rank never comes to close(): the others raise, their memory stays mapped, and the late rank's
// own stores still land.
void stuck_close(const TeamHandle& team, const ScenarioArgs&) {
  const int stuck = team->size() - 1;
  const auto window = Window::create(team, test_layout(team, 256), cpu_window_backend());
  if (team->rank() == stuck) {
    while (!team->faulted()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (int r = 0; r < team->size(); ++r) {
      window->region_as<std::uint64_t>(r, kData)[0] = 77;
    }
  } else {
    const FaultRecord record = expect_fault([&] { window->close(); });
    expect(record.peer == stuck, "the stuck rank is named");
    expect(!window->closed(), "not closed");
  }
  team->rearm();
  expect(window->region_as<std::uint64_t>(team->rank(), kData)[0] == 77, "still mapped");
  window->close();
}

// A rank leaves while others wait for it: they fail at once, not at the deadline.
void leaver(const TeamHandle& team, const ScenarioArgs&) {
  team->barrier();
  if (team->rank() == team->size() - 1) return;
  const auto start = std::chrono::steady_clock::now();
  const FaultRecord record = expect_fault([&] { team->barrier(); });
  expect(std::chrono::steady_clock::now() - start < team->deadline() / 2, "at once");
  expect(record.peer == team->size() - 1, "named");
  expect(record.cause == static_cast<std::uint32_t>(FaultCause::kPeerDead), "cause");
  const FaultRecord again = expect_fault([&] { team->rearm(); });
  expect(again.peer == team->size() - 1, "rearm names who is gone");
  // The other survivors must not find this rank gone before they have looked.
  std::this_thread::sleep_for(team->deadline() / 4);
}

// rearm() called by all but one.
void rearm_needs_all(const TeamHandle& team, const ScenarioArgs&) {
  const int absent = team->size() - 1;
  FaultRecord mine;
  mine.rank = team->rank();
  mine.op = 5;
  if (team->rank() == 0) {
    // A raise can overtake peers that are still on their way out of the last collective.
    std::this_thread::sleep_for(team->deadline() / 4);
    team->raise(mine);
  }
  while (!team->faulted()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (team->rank() != absent) {
    const FaultRecord record = expect_fault([&] { team->rearm(); });
    expect(record.peer == absent, "rearm names who did not come");
    expect(team->faulted() && team->fault()->op == 5, "still faulted, first cause kept");
  } else {
    std::this_thread::sleep_for(team->deadline() + team->deadline() / 2);
  }
  team->rearm();
  team->barrier();
}

// Puts outside the window are refused before anything moves.
void bad_puts(const TeamHandle& team, const ScenarioArgs&) {
  const auto window = Window::create(team, test_layout(team, 256), cpu_window_backend());
  for (const auto kind : {TransportKind::kCopyEngine, TransportKind::kSm}) {
    const auto transport = make_cpu_transport(kind, window);
    const auto refuse = [&](const std::string& word, const std::function<void(PutDescriptor&)>& f) {
      PutDescriptor put;
      put.peer = 0;
      put.bytes = 8;
      f(put);
      expect_error(ErrorKind::kInvalidArgument, {std::string(to_string(kind)), word},
                   [&] { transport->put(put); });
    };
    const std::uint64_t size = window->bytes();
    refuse("peer -1", [](PutDescriptor& p) { p.peer = -1; });
    refuse(fmt::format("peer {}", team->size()), [&](PutDescriptor& p) { p.peer = team->size(); });
    refuse("source", [&](PutDescriptor& p) { p.src_offset = size - 7; });
    refuse("source", [&](PutDescriptor& p) { p.src_offset = ~0ULL - 3; });
    refuse("destination", [&](PutDescriptor& p) { p.dst_offset = size - 7; });
    refuse("source", [&](PutDescriptor& p) { p.bytes = size + 1; });
    refuse("signal word at 4", [&](PutDescriptor& p) { p.signal_offset = 4; });
    refuse("signal word", [&](PutDescriptor& p) { p.signal_offset = size; });
    refuse("epoch 0", [&](PutDescriptor& p) { p.signal_offset = 8; });
    refuse("neither data nor a signal", [&](PutDescriptor& p) { p.bytes = 0; });
    refuse("flags", [&](PutDescriptor& p) { p.flags = 1; });
    transport->quiet();
    expect(transport->counters().puts == 0, "nothing moved");
  }
  const auto direct = make_cpu_transport(TransportKind::kDirect, window);
  PutDescriptor put;
  put.peer = 0;
  put.bytes = 8;
  expect_error(ErrorKind::kUnsupported, {"direct", "copies nothing"}, [&] { direct->put(put); });
  window->close();
}

// Runs until a fault ends it, for the trials that kill and stop ranks: exit codes and words are
// read by the parent.
void endless(const TeamHandle& team, const ScenarioArgs& args) {
  CpuEngineOptions engine;
  engine.max_delay = std::chrono::microseconds(100);
  engine.reorder_peers = true;
  engine.seed = args.seed;
  Exchanger a(team, TransportKind::kCopyEngine, 2048, engine, args.seed);
  Exchanger b(team, TransportKind::kSm, 256, engine, args.seed);
  AllReduce reduce(team, 512);
  fmt::print("READY\n");
  std::fflush(stdout);
  for (std::uint64_t k = 0;; ++k) {
    a.send(true);
    b.round(true);
    reduce_once(reduce, team, k, 512,
                k % 2 == 0 ? AllReduceKind::kOneShot : AllReduceKind::kTwoShot);
    a.receive(true);
    if (k % 64 == 0) team->barrier();
  }
}

}  // namespace

const std::map<std::string, Scenario>& scenarios() {
  static const std::map<std::string, Scenario> all{
      {"collectives", collectives},
      {"descriptors", descriptors},
      {"different_calls", different_calls},
      {"refused_together", refused_together},
      {"layout_refused", layout_refused},
      {"window_reach", window_reach},
      {"pool", pool},
      {"stress", stress},
      {"two_instances", two_instances},
      {"all_reduce", all_reduce},
      {"all_reduce_refused", all_reduce_refused},
      {"tag_wrap", tag_wrap},
      {"absent_then_rearm", absent_then_rearm},
      {"engine_fails", engine_fails},
      {"engine_stalls", engine_stalls},
      {"stuck_close", stuck_close},
      {"leaver", leaver},
      {"rearm_needs_all", rearm_needs_all},
      {"bad_puts", bad_puts},
      {"endless", endless},
  };
  return all;
}

}  // namespace penstock::testing
