#include "penstock/fabric/link_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "fabric/link_layout.h"
#include "penstock/core/error.h"

namespace penstock {
namespace {

using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// One size, one transport: rank 0 (and rank 1 in both directions) sends, the other answers.
class Link {
 public:
  Link(const TeamHandle& team, const FabricBackend& backend, TransportKind kind,
       std::uint64_t bytes, const std::shared_ptr<Window>& window)
      : team_(*team),
        backend_(backend),
        kind_(kind),
        bytes_(bytes),
        window_(window),
        transport_(backend.make_transport(kind, window)) {}

  LinkPoint measure(bool both, const LinkBenchOptions& options) {
    const int me = team_.rank();
    const bool sends = me == 0 || (both && me == 1);
    const bool answers = me == 1 || (both && me == 0);
    std::vector<double> us;
    bool correct = true;
    for (int s = -options.warm_up; s < options.samples; ++s) {
      const std::uint64_t epoch = window_->epochs().next();
      const bool last = s + 1 == options.samples;
      if (sends && kind_ != TransportKind::kDirect) {
        backend_.fill(*window_, me, at(kLinkStaging, 0), bytes_, epoch);
      }
      team_.barrier();
      const auto start = Clock::now();
      if (sends) send(epoch);
      if (answers) {
        wait(kLinkArrived, epoch);
        transport_->signal(1 - me, at(kLinkAnswered, me), epoch);
        transport_->flush();
      }
      if (sends) {
        wait(kLinkAnswered, epoch);
        if (s >= 0) us.push_back(us_since(start));
      }
      if (last && answers) {
        correct = backend_.receive(*window_, at(kLinkArrived, 1 - me), epoch, 1 - me,
                                   at(kLinkData, 1 - me), bytes_, epoch) < 0;
      }
    }
    transport_->quiet();
    LinkPoint point;
    point.kind = kind_;
    point.bytes = bytes_;
    point.both_directions = both;
    if (me == 0) {
      point.time = summarise(us);
      point.gb_per_s = static_cast<double>(bytes_) / (point.time.median_us * 1e3);
      const TransportCounters counted = transport_->counters();
      point.moved_bytes = kind_ == TransportKind::kDirect ? counted.direct_bytes : counted.bytes;
    }
    point.correct = team_.agree(correct);
    return point;
  }

 private:
  std::uint64_t at(int region, int rank) const {
    const std::uint64_t stride = region <= kLinkData ? max_bytes() : 8;
    return window_->layout().region(region).offset + static_cast<std::uint64_t>(rank) * stride;
  }
  std::uint64_t max_bytes() const {
    return window_->layout().region(kLinkData).bytes / static_cast<std::uint64_t>(team_.size());
  }
  void wait(int region, std::uint64_t epoch) {
    const int peer = 1 - team_.rank();
    (void)backend_.receive(*window_, at(region, peer), epoch, peer, 0, 0, 0);
  }
  void send(std::uint64_t epoch) {
    const int me = team_.rank();
    const int to = 1 - me;
    if (kind_ == TransportKind::kDirect) {
      backend_.fill(*window_, to, at(kLinkData, me), bytes_, epoch);
      transport_->count_direct(bytes_);
      transport_->signal(to, at(kLinkArrived, me), epoch);
    } else {
      PutDescriptor put;
      put.peer = to;
      put.src_offset = at(kLinkStaging, 0);
      put.dst_offset = at(kLinkData, me);
      put.bytes = bytes_;
      put.signal_offset = at(kLinkArrived, me);
      put.signal_epoch = epoch;
      transport_->put(put);
    }
    transport_->flush();
  }

  Team& team_;
  const FabricBackend& backend_;
  TransportKind kind_;
  std::uint64_t bytes_;
  std::shared_ptr<Window> window_;
  std::unique_ptr<Transport> transport_;
};

// Rank 0's points, byte for byte, to everybody.
template <typename T>
void spread_from_rank_0(Team& team, std::vector<T>& points) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all(points.size() * static_cast<std::size_t>(team.size()));
  team.all_gather(std::as_bytes(std::span(points)), std::as_writable_bytes(std::span(all)));
  std::copy_n(all.begin(), points.size(), points.begin());
}

}  // namespace

Samples summarise(std::span<double> us) {
  require(!us.empty(), ErrorKind::kInvalidArgument,
          [] { return std::string("no samples to summarise"); });
  std::sort(us.begin(), us.end());
  const auto quantile = [&](double q) {
    return us[static_cast<std::size_t>(std::lround(q * static_cast<double>(us.size() - 1)))];
  };
  return {static_cast<int>(us.size()), quantile(0.5), quantile(0.1), quantile(0.9)};
}

std::vector<LinkPoint> bench_link(const TeamHandle& team, const FabricBackend& backend,
                                  const LinkBenchOptions& options) {
  require(team->size() >= 2, ErrorKind::kInvalidArgument,
          [] { return std::string("a link has two ends: give at least 2 ranks"); });
  collectively(*team, [&] {
    require(options.min_bytes >= 8 && options.min_bytes % 8 == 0 &&
                options.max_bytes >= options.min_bytes && options.max_bytes <= (1ULL << 32),
            ErrorKind::kInvalidArgument, [&] {
              return fmt::format(
                  "sizes from {} to {} bytes: give multiples of 8, in order, up to 2^32",
                  options.min_bytes, options.max_bytes);
            });
    require(options.samples >= 1 && options.warm_up >= 0, ErrorKind::kInvalidArgument, [&] {
      return fmt::format("{} samples after {} warm-up rounds: give at least 1 and 0",
                         options.samples, options.warm_up);
    });
  });
  const auto window =
      Window::create(team, link_layout(team->size(), options.max_bytes), backend.memory);
  std::vector<LinkPoint> points;
  for (const TransportKind kind : backend.transports) {
    for (std::uint64_t bytes = options.min_bytes; bytes <= options.max_bytes; bytes *= 2) {
      for (const bool both : {false, true}) {
        points.push_back(Link(team, backend, kind, bytes, window).measure(both, options));
      }
    }
  }
  window->close();
  spread_from_rank_0(*team, points);
  return points;
}

std::vector<AllReducePoint> bench_all_reduce(const TeamHandle& team, std::uint64_t width,
                                             int samples) {
  collectively(*team, [&] {
    require(width >= 1 && samples >= 1, ErrorKind::kInvalidArgument, [&] {
      return fmt::format("all-reduce of rows of {} in {} samples: give at least 1 of each", width,
                         samples);
    });
  });
  AllReduce reduce(team, 16 * width);
  std::vector<AllReducePoint> points;
  for (const int rows : {1, 2, 4, 8, 16}) {
    for (const auto kind : {AllReduceKind::kOneShot, AllReduceKind::kTwoShot}) {
      std::vector<float> data(static_cast<std::size_t>(rows) * width);
      std::vector<double> us;
      for (int s = -3; s < samples; ++s) {
        std::fill(data.begin(), data.end(), 1.0f);
        team->barrier();
        const auto start = Clock::now();
        reduce.run(data, kind);
        if (s >= 0) us.push_back(us_since(start));
      }
      require(data.back() == static_cast<float>(team->size()), ErrorKind::kBackend, [&] {
        return fmt::format("an all-reduce of ones over {} ranks gave {}", team->size(),
                           data.back());
      });
      points.push_back({rows, width, kind, summarise(us)});
    }
  }
  reduce.window()->close();
  spread_from_rank_0(*team, points);
  return points;
}

}  // namespace penstock
