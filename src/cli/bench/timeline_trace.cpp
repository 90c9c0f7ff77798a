#include "cli/bench/timeline_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

namespace penstock::bench {

Trace trace_of(Team& team, const std::vector<TimelineEvent>& mine, const std::string& index_name) {
  const auto bytes = team.all_gather_varying(std::as_bytes(std::span(mine)));
  Trace trace;
  if (team.rank() != 0) return trace;
  std::vector<std::vector<TimelineEvent>> all;
  std::int64_t origin = std::numeric_limits<std::int64_t>::max();
  for (const auto& of_rank : bytes) {
    std::vector<TimelineEvent>& events = all.emplace_back(of_rank.size() / sizeof(TimelineEvent));
    if (!events.empty()) std::memcpy(events.data(), of_rank.data(), of_rank.size());
    for (const TimelineEvent& event : events) origin = std::min(origin, event.begin_ns);
  }
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    trace.name_process(rank, fmt::format("rank {}", rank));
    trace.name_track({rank, 0}, "operator");
    for (int peer = 0; peer < static_cast<int>(all.size()); ++peer) {
      if (peer != rank) trace.name_track({rank, 1 + peer}, fmt::format("arrivals from {}", peer));
    }
    std::int32_t most = 0;
    for (const TimelineEvent& event : all[static_cast<std::size_t>(rank)]) {
      most = std::max(most, event.lane);
    }
    const int lanes = 1 + static_cast<int>(all.size());
    for (std::int32_t lane = 1; lane <= most; ++lane) {
      trace.name_track({rank, lanes + lane}, fmt::format("cluster {}", lane - 1));
    }
    for (const TimelineEvent& event : all[static_cast<std::size_t>(rank)]) {
      const double begin = static_cast<double>(event.begin_ns - origin) * 1e-3;
      const double duration = static_cast<double>(event.end_ns - event.begin_ns) * 1e-3;
      Trace::Json args = Trace::Json::object();
      if (event.peer >= 0) args["peer"] = event.peer;
      if (event.index >= 0) args[index_name] = event.index;
      std::string name(to_string(event.what));
      if (event.index >= 0) name += fmt::format(" {}", event.index);
      if (event.peer >= 0) name += fmt::format(", rank {}", event.peer);
      if (event.what == Activity::kArrival) {
        trace.instant({rank, 1 + event.peer}, name, begin, std::move(args));
      } else {
        trace.span({rank, event.lane == 0 ? 0 : lanes + event.lane}, name, begin, duration,
                   std::move(args));
      }
    }
  }
  return trace;
}

}  // namespace penstock::bench
