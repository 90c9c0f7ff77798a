// What the ranks of a team share: one block of memory, on the heap for threads, in a memfd for
// processes. All words are read and written through atomic_ref; nothing here is a pointer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "penstock/core/fault_record.h"
#include "penstock/fabric/protocol.h"

namespace penstock::detail {

inline constexpr std::uint64_t kControlMagic = 0x70656e73746f636bULL;
inline constexpr std::size_t kSlotBytes = 2048;  // of one exchange; longer messages go in pieces

enum class RankState : std::uint64_t { kAbsent = 0, kJoined = 1, kLeft = 2, kDead = 3 };

// Which collective a rank is in, so that two ranks in different ones are told so.
enum class Collective : std::uint32_t {
  kNone = 0,
  kBarrier,
  kAllGather,
  kAllGatherVarying,
  kAgree,
  kDescriptor,
};

struct ExchangeSlot {
  std::uint32_t call = 0;   // Collective
  std::uint32_t piece = 0;  // of a long message
  std::uint64_t bytes = 0;  // what must be equal on all ranks
  std::byte payload[kSlotBytes];
};

struct alignas(128) RankCell {
  alignas(128) std::uint64_t arrived = 0;  // last exchange that this rank has entered
  alignas(128) std::uint64_t abort_word = 0;
  alignas(128) std::uint64_t state = 0;        // RankState
  std::uint64_t waiting_for = 0;               // rank + 1, 0 for none
  std::uint64_t heart_beat_ns = 0;             // steady clock; 0: this rank shows none
  alignas(128) std::uint64_t rearm_epoch = 0;  // proposals, read after the rearm is decided
  std::uint64_t rearm_sequence = 0;
  std::uint64_t rearm_done = 0;  // generation that this rank has reached
  alignas(128) ExchangeSlot slot[2];
};

struct TeamControl {
  std::uint64_t magic = kControlMagic;
  std::uint64_t size = 0;
  // First cause: claim goes to the generation by compare-and-swap, the winner writes the record's
  // words and then `published`.
  alignas(128) std::uint64_t claim = 0;
  alignas(128) std::uint64_t published = 0;
  std::uint64_t record[sizeof(FaultRecord) / 8] = {};
  // One bit a rank; the rearm of a generation is decided the moment all bits are set, so that no
  // rank can give up after another has gone on. Two words, for odd and even generations.
  alignas(128) std::uint64_t rearm_mask[2] = {};
  RankCell cell[kMaxRanks];
};
static_assert(sizeof(FaultRecord) % 8 == 0);

inline std::uint64_t load(const std::uint64_t& word,
                          std::memory_order order = std::memory_order_acquire) noexcept {
  return std::atomic_ref<std::uint64_t>(const_cast<std::uint64_t&>(word)).load(order);
}
inline void store(std::uint64_t& word, std::uint64_t value,
                  std::memory_order order = std::memory_order_release) noexcept {
  std::atomic_ref<std::uint64_t>(word).store(value, order);
}
// Raises a word to at least `value`.
inline void store_max(std::uint64_t& word, std::uint64_t value) noexcept {
  std::atomic_ref<std::uint64_t> ref(word);
  std::uint64_t seen = ref.load(std::memory_order_relaxed);
  while (seen < value && !ref.compare_exchange_weak(seen, value, std::memory_order_seq_cst)) {
  }
}

}  // namespace penstock::detail
