// The CPU operators' timelines as a trace.
#pragma once

#include <string>

#include "cli/bench/trace.h"
#include "penstock/fabric/team.h"
#include "penstock/ops/timeline.h"

namespace penstock::bench {

// Collective: every rank gives its events of one call; rank 0 gets all ranks' as a trace, the
// others an empty one. A process a rank; on it a track of the rank's own thread, one of arrivals a
// peer, and one a lane. Time zero is the first event of all. `index_name` says what the events'
// index counts.
Trace trace_of(Team& team, const std::vector<TimelineEvent>& mine, const std::string& index_name);

}  // namespace penstock::bench
