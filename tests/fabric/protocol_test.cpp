#include "penstock/fabric/protocol.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "penstock/fabric/all_reduce.h"
#include "penstock/fabric/packet.h"
#include "penstock/fabric/signal.h"

namespace penstock {
namespace {

TEST(ProtocolTest, EpochsCompareByGreaterOrEqual) {
  static_assert(!epoch_reached(6, 7));
  static_assert(epoch_reached(7, 7));
  static_assert(epoch_reached(8, 7));
  static_assert(epoch_reached(kNoEpoch, kNoEpoch));
}

TEST(ProtocolTest, ReuseWaitsForTheCallBeforeLast) {
  static_assert(kCallsInFlight == 2);
  EXPECT_EQ(reuse_epoch(1), kNoEpoch);
  EXPECT_EQ(reuse_epoch(2), kNoEpoch);
  EXPECT_EQ(reuse_epoch(3), 1u);
  for (std::uint64_t e = 3; e < 100; ++e) {
    EXPECT_EQ(parity_of(reuse_epoch(e)), parity_of(e));
    EXPECT_NE(parity_of(e), parity_of(e - 1));
  }
}

RC_GTEST_PROP(ProtocolTest, WidenedEpochsAreExactWhileNear, ()) {
  const auto near = *rc::gen::arbitrary<std::uint64_t>();
  const auto step = *rc::gen::arbitrary<std::int32_t>();
  const std::uint64_t want = near + static_cast<std::uint64_t>(static_cast<std::int64_t>(step));
  const bool fits = step >= 0 ? want >= near : want < near;  // no wrap of 64 bits
  RC_PRE(fits);
  RC_ASSERT(widen_epoch(static_cast<std::uint32_t>(want), near) == want);
}

TEST(ProtocolTest, WidenedEpochsAtTheEdges) {
  EXPECT_EQ(widen_epoch(0, 0xffffffffULL), 0x100000000ULL);
  EXPECT_EQ(widen_epoch(0xffffffffu, 0x100000000ULL), 0xffffffffULL);
  EXPECT_EQ(widen_epoch(5, 5), 5u);
  EXPECT_EQ(widen_epoch(1, 0), 1u);
}

TEST(ProtocolTest, TagsAreNeverZeroAndChangeEveryEpoch) {
  constexpr std::uint64_t kStarts[] = {1, kTagPeriod - 4, 0xfffffffdULL, 2 * kTagPeriod - 3,
                                       ~0ULL - 20};
  for (const std::uint64_t start : kStarts) {
    for (std::uint64_t e = start; e < start + 8; ++e) {
      EXPECT_NE(tag_of(e), 0u) << e;
      EXPECT_NE(tag_of(e), tag_of(e + 1)) << e;
      EXPECT_NE(tag_of(e), tag_of(e + kCallsInFlight)) << e;
      EXPECT_EQ(tag_of(e), tag_of(e % kTagPeriod)) << e;
      EXPECT_EQ(epoch_of_tag(tag_of(e), e), e);
      if (e > 2) {
        EXPECT_EQ(epoch_of_tag(tag_of(e - 2), e), e - 2);
      }
    }
  }
  EXPECT_EQ(epoch_of_tag(0, 77), kNoEpoch);
}

TEST(ProtocolTest, EveryTagPeriodHasSweepsOfBothParities) {
  static_assert(kSweepPeriod < kTagPeriod / 2);
  static_assert(kSweepPeriod % kCallsInFlight == 0);
  std::set<std::uint32_t> parities;
  for (std::uint64_t e = kSweepPeriod * 3 - 2; e < kSweepPeriod * 3 + 6; ++e) {
    if (sweep_due(e)) parities.insert(parity_of(e));
  }
  EXPECT_EQ(parities.size(), kCallsInFlight);
}

// No two packets that can be alive at once share a slot.
TEST(ProtocolTest, MailboxSlotsAreDisjointAndInside) {
  for (const int ranks : {1, 2, 3, 8}) {
    for (const std::uint64_t capacity : {1u, 2u, 7u, 64u}) {
      std::set<std::uint64_t> one_shot;
      std::set<std::uint64_t> reduce;
      std::set<std::uint64_t> gather;
      for (std::uint64_t epoch = 10; epoch < 10 + kCallsInFlight; ++epoch) {
        for (int source = 0; source < ranks; ++source) {
          for (std::uint64_t p = 0; p < capacity; ++p) {
            one_shot.insert(one_shot_slot(epoch, source, p, ranks, capacity));
          }
          for (int owner = 0; owner < ranks; ++owner) {
            const std::uint64_t begin = slice_begin(capacity, ranks, owner);
            const std::uint64_t end = slice_begin(capacity, ranks, owner + 1);
            ASSERT_LE(end - begin, slice_capacity(capacity, ranks));
          }
          for (std::uint64_t p = 0; p < slice_capacity(capacity, ranks); ++p) {
            reduce.insert(two_shot_reduce_slot(epoch, source, p, ranks, capacity));
          }
        }
        for (std::uint64_t p = 0; p < capacity; ++p) {
          gather.insert(two_shot_gather_slot(epoch, p, capacity));
        }
      }
      EXPECT_EQ(one_shot.size(), one_shot_packets(ranks, capacity));
      EXPECT_EQ(*one_shot.rbegin(), one_shot_packets(ranks, capacity) - 1);
      EXPECT_EQ(reduce.size(), two_shot_reduce_packets(ranks, capacity));
      EXPECT_EQ(*reduce.rbegin(), two_shot_reduce_packets(ranks, capacity) - 1);
      EXPECT_EQ(gather.size(), two_shot_gather_packets(capacity));
      EXPECT_EQ(slice_begin(capacity, ranks, 0), 0u);
      EXPECT_EQ(slice_begin(capacity, ranks, ranks), capacity);
    }
  }
}

TEST(ProtocolTest, RingPositionsNeedNoReset) {
  static_assert(ring_has_room(0, 0, 4) && ring_has_room(3, 0, 4) && !ring_has_room(4, 0, 4));
  // Across the wrap of the 64-bit positions, too: the difference is what counts.
  EXPECT_TRUE(ring_has_room(2, ~0ULL, 4));
  EXPECT_FALSE(ring_has_room(3, ~0ULL, 4));
  EXPECT_EQ(ring_index(5, 4), 1u);
}

TEST(ProtocolTest, AbortEndsItsGenerationAndEarlierOnes) {
  EXPECT_FALSE(generation_aborted(0, kFirstGeneration));
  EXPECT_TRUE(generation_aborted(1, 1));
  EXPECT_FALSE(generation_aborted(1, 2));
  EXPECT_TRUE(generation_aborted(3, 2));
}

TEST(PacketTest, HoldsAllBitsAndRefusesOtherTags) {
  Packet slot{};
  const std::uint32_t sent[3] = {0xdeadbeef, 0xffffffff, 0x12345678};
  std::uint32_t seen[3] = {1, 2, 3};
  EXPECT_FALSE(load_packet(&slot, 7, seen));
  store_packet(&slot, sent, 7);
  EXPECT_FALSE(load_packet(&slot, 8, seen));
  EXPECT_EQ(seen[0], 1u);
  ASSERT_TRUE(load_packet(&slot, 7, seen));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(seen[i], sent[i]);
  EXPECT_EQ(load_tag_relaxed(&slot), 7u);
  clear_packet_relaxed(&slot);
  EXPECT_EQ(load_tag_relaxed(&slot), 0u);
}

// A reader on another thread never sees half a packet.
TEST(PacketTest, IsNeverTorn) {
  Packet slot{};
  std::uint64_t taken = 0;
  constexpr std::uint64_t kRounds = 20000;
  std::thread writer([&] {
    for (std::uint64_t e = 1; e <= kRounds; ++e) {
      while (load_signal(&taken) != e - 1) std::this_thread::yield();
      const auto v = static_cast<std::uint32_t>(e * 2654435761u);
      const std::uint32_t payload[3] = {v, v + 1, v + 2};
      store_packet(&slot, payload, tag_of(e));
    }
  });
  std::uint64_t bad = 0;
  for (std::uint64_t e = 1; e <= kRounds; ++e) {
    std::uint32_t got[3];
    while (!load_packet(&slot, tag_of(e), got)) std::this_thread::yield();
    const auto v = static_cast<std::uint32_t>(e * 2654435761u);
    bad += got[0] != v || got[1] != v + 1 || got[2] != v + 2;
    store_signal(&taken, e);
  }
  writer.join();
  EXPECT_EQ(bad, 0u);
}

TEST(AllReduceTest, KindFollowsRanksAndSize) {
  EXPECT_EQ(choose_all_reduce(2, 1 << 20), AllReduceKind::kOneShot);
  EXPECT_EQ(choose_all_reduce(8, 12 * 1024), AllReduceKind::kOneShot);
  EXPECT_EQ(choose_all_reduce(8, 1 << 20), AllReduceKind::kTwoShot);
  EXPECT_EQ(all_reduce_layout({4, 300}).regions().size(), 3u);
}

// The model checks the protocol with these numbers: they must be the code's.
TEST(SpecTest, ConstantsOfTheModelAreTheCodes) {
  std::ifstream file(PENSTOCK_SPEC_DIR "/fabric.pml");
  ASSERT_TRUE(file) << PENSTOCK_SPEC_DIR "/fabric.pml";
  std::stringstream text;
  text << file.rdbuf();
  const auto constant = [&](const std::string& name) -> long {
    const std::string line = "#define " + name + " ";
    const auto at = text.str().find(line);
    EXPECT_NE(at, std::string::npos) << name;
    return at == std::string::npos ? -1 : std::atol(text.str().c_str() + at + line.size());
  };
  EXPECT_EQ(constant("CALLS_IN_FLIGHT"), static_cast<long>(kCallsInFlight));
  EXPECT_EQ(constant("NO_EPOCH"), static_cast<long>(kNoEpoch));
  EXPECT_EQ(constant("FIRST_GENERATION"), static_cast<long>(kFirstGeneration));
  // The formulas, at the epochs that the model reaches.
  EXPECT_NE(text.str().find("#define PARITY(e) ((e) % CALLS_IN_FLIGHT)"), std::string::npos);
  EXPECT_NE(text.str().find("#define REUSE(e) ((e) > CALLS_IN_FLIGHT -> (e) - CALLS_IN_FLIGHT : "
                            "NO_EPOCH)"),
            std::string::npos);
  for (std::uint64_t e = 1; e < 10; ++e) {
    EXPECT_EQ(parity_of(e), e % kCallsInFlight);
    EXPECT_EQ(reuse_epoch(e), e > kCallsInFlight ? e - kCallsInFlight : kNoEpoch);
  }
}

}  // namespace
}  // namespace penstock
