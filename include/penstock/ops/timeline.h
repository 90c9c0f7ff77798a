// What an operator did when: one rank's events, for timelines. `penstock bench ... --trace`
// draws them.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

namespace penstock {

enum class Activity : std::uint8_t {
  kSend,      // handing rows to a transport, or storing them
  kWait,      // for a peer's signal
  kMultiply,  // one piece of the product
  kCombine,   // the top-k sum
  kArrival,   // a peer's signal was seen first; an instant
  kTile,      // one tile of the product, its waits included
};
constexpr std::string_view to_string(Activity activity) {
  switch (activity) {
    case Activity::kSend:
      return "send";
    case Activity::kWait:
      return "wait";
    case Activity::kMultiply:
      return "multiply";
    case Activity::kCombine:
      return "combine";
    case Activity::kArrival:
      return "arrival";
    case Activity::kTile:
      return "tile";
  }
  return "unknown";
}

// Times are nanoseconds of one clock: on CPUs the steady clock, which all ranks of a host share, on
// GPUs the rank's GPU's.
struct TimelineEvent {
  Activity what = Activity::kWait;
  std::int32_t peer = -1;   // whom it concerns; -1: nobody in particular
  std::int32_t index = -1;  // row block, chunk of tiles, as the operator counts
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::int32_t lane = 0;  // 0: the rank's own thread; others run beside it
};

// Any thread. An operator that is given one adds to it as long as it lives.
class Timeline {
 public:
  static std::int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  void add(const TimelineEvent& event) {
    const std::scoped_lock lock(mutex_);
    events_.push_back(event);
  }
  // Everything since the last take().
  std::vector<TimelineEvent> take() {
    const std::scoped_lock lock(mutex_);
    return std::exchange(events_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<TimelineEvent> events_;
};

// Notes the time from its construction to its end; nothing without a timeline.
class TimelineSpan {
 public:
  TimelineSpan(Timeline* timeline, Activity what, std::int32_t peer, std::int32_t index)
      : timeline_(timeline), event_{what, peer, index, timeline ? Timeline::now_ns() : 0, 0} {}
  ~TimelineSpan() {
    if (timeline_ == nullptr) return;
    event_.end_ns = Timeline::now_ns();
    timeline_->add(event_);
  }
  TimelineSpan(const TimelineSpan&) = delete;
  TimelineSpan& operator=(const TimelineSpan&) = delete;

 private:
  Timeline* timeline_;
  TimelineEvent event_;
};

}  // namespace penstock
