#include "ops/cpu/arrival_watch.h"

#include <chrono>
#include <utility>

#include "penstock/fabric/protocol.h"
#include "penstock/fabric/signal.h"

namespace penstock::cpu {

ArrivalWatch::ArrivalWatch(Timeline& timeline, std::vector<Word> words, std::uint64_t epoch)
    : timeline_(timeline), missing_(std::move(words)), epoch_(epoch) {
  thread_ = std::thread([this] {
    while (!stop_.load(std::memory_order_relaxed) && !missing_.empty()) {
      look();
      std::this_thread::sleep_for(std::chrono::microseconds(1));
    }
    look();
  });
}

ArrivalWatch::~ArrivalWatch() {
  stop_.store(true, std::memory_order_relaxed);
  thread_.join();
}

void ArrivalWatch::look() {
  std::erase_if(missing_, [&](const Word& w) {
    if (!epoch_reached(load_signal(w.word), epoch_)) return false;
    const std::int64_t now = Timeline::now_ns();
    timeline_.add({Activity::kArrival, w.peer, w.index, now, now});
    return true;
  });
}

}  // namespace penstock::cpu
