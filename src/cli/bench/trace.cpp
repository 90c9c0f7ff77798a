#include "cli/bench/trace.h"

#include <utility>

namespace penstock::bench {

Trace::Json& Trace::add(char phase, Track track, std::string_view name) {
  events_.push_back({{"ph", std::string(1, phase)},
                     {"pid", track.process},
                     {"tid", track.track},
                     {"name", name}});
  return events_.back();
}

void Trace::name_process(int process, std::string_view name) {
  add('M', {process, 0}, "process_name")["args"] = {{"name", name}};
}

void Trace::name_track(Track track, std::string_view name) {
  add('M', track, "thread_name")["args"] = {{"name", name}};
}

void Trace::span(Track track, std::string_view name, double begin_us, double duration_us,
                 Json args) {
  Json& event = add('X', track, name);
  event["ts"] = begin_us;
  event["dur"] = duration_us;
  if (!args.empty()) event["args"] = std::move(args);
}

void Trace::instant(Track track, std::string_view name, double at_us, Json args) {
  Json& event = add('i', track, name);
  event["ts"] = at_us;
  event["s"] = "t";  // as high as its track
  if (!args.empty()) event["args"] = std::move(args);
}

std::string Trace::text() const {
  const Json document = {{"displayTimeUnit", "ns"}, {"traceEvents", events_}};
  return document.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace penstock::bench
