// Notes in a timeline when a peer's signals were seen first, whatever the operator does meanwhile.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "penstock/ops/timeline.h"

namespace penstock::cpu {

// Owns a thread that polls the words; for a call whose timeline is wanted, not for one that is
// timed. The words have to outlive it.
class ArrivalWatch {
 public:
  struct Word {
    const std::uint64_t* word = nullptr;
    std::int32_t peer = -1;
    std::int32_t index = -1;
  };
  ArrivalWatch(Timeline& timeline, std::vector<Word> words, std::uint64_t epoch);
  // Looks once more and stops.
  ~ArrivalWatch();
  ArrivalWatch(const ArrivalWatch&) = delete;
  ArrivalWatch& operator=(const ArrivalWatch&) = delete;

 private:
  void look();

  Timeline& timeline_;
  std::vector<Word> missing_;
  std::uint64_t epoch_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace penstock::cpu
