#include <algorithm>

#include "penstock/fabric/transport.h"

namespace penstock {

DescriptorMerger::DescriptorMerger(int ranks, std::uint64_t max_merge_bytes)
    : max_merge_bytes_(max_merge_bytes),
      queue_(static_cast<std::size_t>(ranks)),
      front_(static_cast<std::size_t>(ranks), 0) {}

void DescriptorMerger::push(const PutDescriptor& descriptor) {
  queue_[static_cast<std::size_t>(descriptor.peer)].push_back(descriptor);
  ++pending_;
}

bool DescriptorMerger::has(int peer) const {
  const auto p = static_cast<std::size_t>(peer);
  return front_[p] < queue_[p].size();
}

MergedCopy DescriptorMerger::next() {
  const auto ranks = static_cast<int>(queue_.size());
  for (int i = 0; i < ranks; ++i) {
    const int peer = (turn_ + i) % ranks;
    if (!has(peer)) continue;
    turn_ = (peer + 1) % ranks;
    return next_for(peer);
  }
  return {};
}

MergedCopy DescriptorMerger::next_for(int peer) {
  auto& queue = queue_[static_cast<std::size_t>(peer)];
  std::size_t& front = front_[static_cast<std::size_t>(peer)];
  MergedCopy copy;
  copy.peer = peer;
  while (front < queue.size()) {
    const PutDescriptor& put = queue[front];
    if (put.bytes > 0) {
      const bool first = copy.bytes == 0;
      const bool adjacent = put.src_offset == copy.src_offset + copy.bytes &&
                            put.dst_offset == copy.dst_offset + copy.bytes &&
                            put.bytes <= max_merge_bytes_ &&
                            copy.bytes <= max_merge_bytes_ - put.bytes;
      // A put behind a lone signal starts a copy of its own: the signal must not wait for it.
      if (first && copy.positions > 0) break;
      if (!first && !adjacent) break;
      if (first) {
        copy.src_offset = put.src_offset;
        copy.dst_offset = put.dst_offset;
      }
      copy.bytes += put.bytes;
      ++copy.puts;
    }
    if (put.signal_offset != kNoSignal) {
      const auto known = std::find_if(copy.signals.begin(), copy.signals.end(),
                                      [&](const auto& s) { return s.first == put.signal_offset; });
      if (known == copy.signals.end()) {
        copy.signals.emplace_back(put.signal_offset, put.signal_epoch);
      } else {
        known->second = std::max(known->second, put.signal_epoch);
      }
    }
    ++copy.positions;
    ++front;
    --pending_;
  }
  if (front == queue.size()) {
    queue.clear();
    front = 0;
  }
  return copy;
}

void DescriptorMerger::clear() {
  for (auto& queue : queue_) queue.clear();
  std::fill(front_.begin(), front_.end(), std::size_t{0});
  pending_ = 0;
}

}  // namespace penstock
