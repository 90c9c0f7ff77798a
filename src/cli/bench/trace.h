// Timelines in the Chrome trace-event format: open the file in ui.perfetto.dev.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace penstock::bench {

// Where an event is drawn: a process (a rank, a GPU) and a track within it.
struct Track {
  int process = 0;
  int track = 0;
};

// Times are microseconds from an origin that all events of a trace share. Events may come in any
// order.
class Trace {
 public:
  using Json = nlohmann::ordered_json;

  void name_process(int process, std::string_view name);
  void name_track(Track track, std::string_view name);
  // Spans on one track must nest or be apart; viewers draw others wrongly.
  void span(Track track, std::string_view name, double begin_us, double duration_us,
            Json args = Json::object());
  void instant(Track track, std::string_view name, double at_us, Json args = Json::object());

  std::size_t size() const { return events_.size(); }
  // The whole document.
  std::string text() const;

 private:
  Json& add(char phase, Track track, std::string_view name);
  Json events_ = Json::array();
};

}  // namespace penstock::bench
