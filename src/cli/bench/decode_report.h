// What `penstock bench decode` and `penstock trace decode` show of a measured point.
#pragma once

#include <span>
#include <string>

#include "cli/bench/report.h"
#include "cli/bench/trace.h"
#include "ops/decode_layer/bench.h"

namespace penstock::bench {

// bytes/s: copy rate of one H200 (docs/performance.md); what the floor divides by.
inline constexpr double kDecodeBandwidth = 4484e9;

double decode_floor_us(const decode::DecodeBenchPoint& point);
// Whether the check was asked for and failed.
bool decode_wrong(const decode::DecodeBenchPoint& point);

// One JSON object.
Json decode_line(const decode::DecodeBenchOptions& options, const decode::DecodeBenchPoint& point);
// A table of all points, then one of their stages if there is a timeline.
std::string decode_table(const decode::DecodeBenchOptions& options,
                         std::span<const decode::DecodeBenchPoint> points);
// The point's timeline, one track a CTA. CTAs count from the end of their first layer's first
// stage: multiprocessors' clocks have no common origin, and all of them then hold the same input.
Trace decode_trace(const decode::DecodeBenchOptions& options,
                   const decode::DecodeBenchPoint& point);

}  // namespace penstock::bench
