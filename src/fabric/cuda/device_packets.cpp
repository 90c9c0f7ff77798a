#include "fabric/cuda/device_packets.h"

#include <vector>

#include "core/cuda/check.h"
#include "fabric/cuda/memory.h"
#include "penstock/core/error.h"

namespace penstock::cuda {

DevicePackets::DevicePackets(std::shared_ptr<DeviceRank> rank, std::uint64_t capacity)
    : rank_(std::move(rank)) {
  const TeamHandle& team = rank_->team();
  collectively(*team, [&] {
    require(capacity >= 1, ErrorKind::kInvalidArgument,
            [] { return std::string("a packet all-reduce of 0 packets: give at least 1"); });
  });
  const auto ranks = static_cast<std::size_t>(team->size());
  constexpr std::uint64_t kWordsPerPacket = 3;
  const AllReduceShape shape{ranks, capacity * kWordsPerPacket};
  window_ = Window::create(team, all_reduce_layout(shape), device_window_backend(rank_->device()));
  std::vector<Packet*> table;
  for (const int region : {kOneShotMailbox, kReduceMailbox, kGatherMailbox}) {
    for (int r = 0; r < team->size(); ++r) table.push_back(window_->region_as<Packet>(r, region));
  }
  collectively(*team, [&] {
    const ScopedDevice scope(rank_->device());
    tables_ = DeviceBuffer<Packet*>(table.size());
    write_device(tables_.data(), table.data(), tables_.bytes());
  });
  const auto self = static_cast<std::size_t>(team->rank());
  view_.one_shot = table[self];
  view_.reduce = table[ranks + self];
  view_.gather = table[2 * ranks + self];
  view_.one_shots = tables_.data();
  view_.reduces = tables_.data() + ranks;
  view_.gathers = tables_.data() + 2 * ranks;
  view_.capacity = all_reduce_capacity(shape);
  view_.rank = team->rank();
  view_.ranks = team->size();
}

}  // namespace penstock::cuda
