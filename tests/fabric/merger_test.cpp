#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "penstock/core/error.h"
#include "penstock/fabric/transport.h"

namespace penstock {
namespace {

PutDescriptor put(int peer, std::uint64_t src, std::uint64_t dst, std::uint64_t bytes,
                  std::uint64_t signal = kNoSignal, std::uint64_t epoch = 0) {
  PutDescriptor out;
  out.peer = peer;
  out.src_offset = src;
  out.dst_offset = dst;
  out.bytes = bytes;
  out.signal_offset = signal;
  out.signal_epoch = epoch;
  return out;
}

TEST(MergerTest, NeighboursBecomeOneCopyWithTheLastSignal) {
  DescriptorMerger merger(2);
  merger.push(put(1, 0, 100, 10, 8, 5));
  merger.push(put(1, 10, 110, 20, 8, 6));
  merger.push(put(1, 30, 130, 5, 16, 1));
  const MergedCopy copy = merger.next();
  EXPECT_EQ(copy.peer, 1);
  EXPECT_EQ(copy.src_offset, 0u);
  EXPECT_EQ(copy.dst_offset, 100u);
  EXPECT_EQ(copy.bytes, 35u);
  EXPECT_EQ(copy.puts, 3u);
  EXPECT_EQ(copy.positions, 3u);
  using Signals = std::vector<std::pair<std::uint64_t, std::uint64_t>>;
  EXPECT_EQ(copy.signals, (Signals{{8, 6}, {16, 1}}));
  EXPECT_TRUE(merger.empty());
}

TEST(MergerTest, GapsLimitsAndPeersSeparate) {
  DescriptorMerger merger(3, 16);
  merger.push(put(0, 0, 0, 10));
  merger.push(put(0, 10, 11, 4));   // destination does not continue
  merger.push(put(0, 14, 15, 12));  // together it would be 16: allowed
  merger.push(put(0, 26, 27, 1));   // one byte too many
  merger.push(put(2, 27, 28, 1));   // another peer
  EXPECT_EQ(merger.pending(), 5u);
  std::vector<std::pair<int, std::uint64_t>> order;
  while (!merger.empty()) {
    const MergedCopy copy = merger.next();
    order.emplace_back(copy.peer, copy.bytes);
  }
  // Peers take turns; within a peer the order stays.
  EXPECT_EQ(order, (std::vector<std::pair<int, std::uint64_t>>{{0, 10}, {2, 1}, {0, 16}, {0, 1}}));
}

TEST(MergerTest, ALoneSignalDoesNotWaitForLaterData) {
  DescriptorMerger merger(1);
  merger.push(put(0, 0, 0, 0, 8, 1));
  merger.push(put(0, 0, 0, 64));
  const MergedCopy first = merger.next();
  EXPECT_EQ(first.bytes, 0u);
  EXPECT_EQ(first.signals.size(), 1u);
  EXPECT_EQ(merger.next().bytes, 64u);
}

// Whatever is merged: the bytes that arrive, their order within a peer, and no signal before the
// data that were put before it.
RC_GTEST_PROP(MergerTest, KeepsBytesAndOrder, ()) {
  const auto limit = *rc::gen::inRange<std::uint64_t>(1, 64);
  DescriptorMerger merger(3, limit);
  struct Sent {
    std::uint64_t src, dst, bytes;
  };
  std::map<int, std::vector<Sent>> sent;                                      // data, by peer
  std::map<int, std::vector<std::pair<std::uint64_t, std::size_t>>> signals;  // epoch, data before
  const auto steps = *rc::gen::inRange(1, 60);
  std::uint64_t epoch = 0;
  std::map<int, std::pair<std::uint64_t, std::uint64_t>> cursor;
  std::map<int, std::size_t> seen_bytes;
  std::map<int, std::uint64_t> last_signal;
  std::map<int, std::uint64_t> bytes_sent;
  std::map<int, std::vector<std::pair<std::uint64_t, std::uint64_t>>> due;  // epoch, bytes before
  const auto take = [&] {
    const MergedCopy copy = merger.next();
    auto& list = sent[copy.peer];
    std::uint64_t left = copy.bytes;
    std::uint64_t at = 0;
    while (left > 0) {
      RC_ASSERT(!list.empty());
      RC_ASSERT(list.front().src == copy.src_offset + at);
      RC_ASSERT(list.front().dst == copy.dst_offset + at);
      RC_ASSERT(list.front().bytes <= left);
      at += list.front().bytes;
      left -= list.front().bytes;
      list.erase(list.begin());
    }
    RC_ASSERT(copy.bytes <= limit || copy.puts == 1);
    seen_bytes[copy.peer] += copy.bytes;
    for (const auto& [offset, e] : copy.signals) {
      RC_ASSERT(offset == 8u);
      RC_ASSERT(e > last_signal[copy.peer]);
      last_signal[copy.peer] = e;
      for (const auto& [wanted, bytes] : due[copy.peer]) {
        if (wanted <= e) RC_ASSERT(seen_bytes[copy.peer] >= bytes);
      }
    }
  };
  for (int i = 0; i < steps; ++i) {
    const int peer = *rc::gen::inRange(0, 3);
    const auto bytes = *rc::gen::inRange<std::uint64_t>(0, 20);
    const bool adjacent = *rc::gen::inRange(0, 4) != 0;
    const bool signal = bytes == 0 || *rc::gen::inRange(0, 2) == 0;
    auto& [src, dst] = cursor[peer];
    if (!adjacent) src += 1000;
    merger.push(put(peer, src, dst, bytes, signal ? 8 : kNoSignal, signal ? ++epoch : 0));
    if (bytes > 0) sent[peer].push_back({src, dst, bytes});
    bytes_sent[peer] += bytes;
    if (signal) due[peer].emplace_back(epoch, bytes_sent[peer]);
    src += bytes;
    dst += bytes;
    if (*rc::gen::inRange(0, 5) == 0) {
      while (!merger.empty() && *rc::gen::inRange(0, 3) != 0) take();
    }
  }
  while (!merger.empty()) take();
  for (const auto& [peer, list] : sent) RC_ASSERT(list.empty());
  for (const auto& [peer, list] : due) {
    if (!list.empty()) RC_ASSERT(last_signal[peer] == list.back().first);
  }
}

TEST(TransportTest, NamesAreReadBackAndOthersRefused) {
  for (const auto kind : {TransportKind::kCopyEngine, TransportKind::kSm, TransportKind::kDirect}) {
    EXPECT_EQ(parse_transport(to_string(kind)), kind);
  }
  try {
    (void)parse_transport("dma");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("'dma'"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("copy_engine, sm or direct"), std::string::npos);
  }
}

}  // namespace
}  // namespace penstock
