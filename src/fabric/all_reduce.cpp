#include "penstock/fabric/all_reduce.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "penstock/core/error.h"
#include "penstock/fabric/packet.h"

namespace penstock {
namespace {

constexpr std::uint64_t kFloats = kPacketPayloadBytes / 4;

void pack(std::span<const float> data, std::uint64_t packet, std::uint32_t out[3]) {
  for (std::uint64_t i = 0; i < kFloats; ++i) {
    const std::uint64_t at = packet * kFloats + i;
    out[i] = at < data.size() ? std::bit_cast<std::uint32_t>(data[at]) : 0;
  }
}

void unpack(const std::uint32_t in[3], std::uint64_t packet, std::span<float> data) {
  for (std::uint64_t i = 0; i < kFloats; ++i) {
    const std::uint64_t at = packet * kFloats + i;
    if (at < data.size()) data[at] = std::bit_cast<float>(in[i]);
  }
}

void add(std::uint32_t sum[3], const std::uint32_t term[3]) {
  for (std::uint64_t i = 0; i < kFloats; ++i) {
    sum[i] =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(sum[i]) + std::bit_cast<float>(term[i]));
  }
}

// Polls one packet; the first look is inline, since it nearly always hits.
void receive(const Guard& guard, const Packet* slot, std::uint64_t epoch, int source, int region,
             std::uint32_t out[3]) {
  const std::uint32_t tag = tag_of(epoch);
  if (load_packet(slot, tag, out)) return;
  WaitSite site;
  site.peer = source;
  site.region = region;
  guard.wait_until([&] { return load_packet(slot, tag, out); },
                   [&] { return epoch_of_tag(load_tag_relaxed(slot), epoch); }, epoch, site);
}

}  // namespace

std::string_view to_string(AllReduceKind kind) {
  return kind == AllReduceKind::kOneShot ? "one_shot" : "two_shot";
}

AllReduceKind choose_all_reduce(int ranks, std::uint64_t bytes) {
  return ranks <= 2 || bytes <= 24 * 1024 ? AllReduceKind::kOneShot : AllReduceKind::kTwoShot;
}

Layout all_reduce_layout(const AllReduceShape& shape) {
  return Layout::from(kAllReduceTable, shape,
                      fmt::format("ranks {}, max_elements {}", shape.ranks, shape.max_elements));
}

AllReduce::AllReduce(TeamHandle team, std::uint64_t max_elements)
    : max_elements_(max_elements),
      capacity_(packets_for(max_elements * 4)),
      guard_(team, team->next_operator()) {
  collectively(*team, [&] {
    require(max_elements >= 1 && max_elements <= (1ULL << 32), ErrorKind::kInvalidArgument, [&] {
      return fmt::format("an all-reduce of {} elements: give 1 to 2^32", max_elements);
    });
  });
  const AllReduceShape shape{static_cast<std::uint64_t>(team->size()), max_elements};
  window_ = Window::create(team, all_reduce_layout(shape), cpu_window_backend());
}

AllReduce::~AllReduce() = default;

void AllReduce::run(std::span<float> data) {
  const std::uint64_t largest = std::min<std::uint64_t>(data.size(), max_elements_);
  run(data, choose_all_reduce(window_->team()->size(), largest * 4));
}

void AllReduce::run(std::span<float> data, AllReduceKind kind) {
  window_->team()->check();
  if (window_->team()->size() == 1) return;
  for (std::size_t begin = 0; begin < data.size(); begin += max_elements_) {
    round(data.subspan(begin, std::min<std::size_t>(data.size() - begin, max_elements_)), kind);
  }
}

void AllReduce::round(std::span<float> data, AllReduceKind kind) {
  const std::uint64_t epoch = window_->epochs().next();
  if (kind == AllReduceKind::kOneShot) {
    one_shot(data, epoch);
  } else {
    two_shot(data, epoch);
  }
  if (sweep_due(epoch)) sweep(epoch);
}

void AllReduce::one_shot(std::span<float> data, std::uint64_t epoch) {
  const int ranks = window_->team()->size();
  const int me = window_->team()->rank();
  const std::uint64_t packets = packets_for(data.size() * 4);
  std::uint32_t payload[3];
  for (int i = 1; i < ranks; ++i) {
    const int peer = (me + i) % ranks;
    auto* mailbox = window_->region_as<Packet>(peer, kOneShotMailbox);
    for (std::uint64_t p = 0; p < packets; ++p) {
      pack(data, p, payload);
      store_packet(mailbox + one_shot_slot(epoch, me, p, ranks, capacity_), payload, tag_of(epoch));
    }
  }
  const auto* mailbox = window_->region_as<Packet>(me, kOneShotMailbox);
  for (std::uint64_t p = 0; p < packets; ++p) {
    std::uint32_t sum[3] = {};
    for (int source = 0; source < ranks; ++source) {
      if (source == me) {
        pack(data, p, payload);
      } else {
        receive(guard_, mailbox + one_shot_slot(epoch, source, p, ranks, capacity_), epoch, source,
                kOneShotMailbox, payload);
      }
      if (source == 0) {
        std::copy_n(payload, kFloats, sum);
      } else {
        add(sum, payload);
      }
    }
    unpack(sum, p, data);
  }
}

void AllReduce::two_shot(std::span<float> data, std::uint64_t epoch) {
  const int ranks = window_->team()->size();
  const int me = window_->team()->rank();
  const std::uint64_t packets = packets_for(data.size() * 4);
  std::uint32_t payload[3];
  for (int i = 1; i < ranks; ++i) {
    const int owner = (me + i) % ranks;
    auto* mailbox = window_->region_as<Packet>(owner, kReduceMailbox);
    const std::uint64_t begin = slice_begin(packets, ranks, owner);
    const std::uint64_t end = slice_begin(packets, ranks, owner + 1);
    for (std::uint64_t p = begin; p < end; ++p) {
      pack(data, p, payload);
      store_packet(mailbox + two_shot_reduce_slot(epoch, me, p - begin, ranks, capacity_), payload,
                   tag_of(epoch));
    }
  }
  const auto* reduce = window_->region_as<Packet>(me, kReduceMailbox);
  const std::uint64_t begin = slice_begin(packets, ranks, me);
  const std::uint64_t end = slice_begin(packets, ranks, me + 1);
  for (std::uint64_t p = begin; p < end; ++p) {
    std::uint32_t sum[3] = {};
    for (int source = 0; source < ranks; ++source) {
      if (source == me) {
        pack(data, p, payload);
      } else {
        receive(guard_, reduce + two_shot_reduce_slot(epoch, source, p - begin, ranks, capacity_),
                epoch, source, kReduceMailbox, payload);
      }
      if (source == 0) {
        std::copy_n(payload, kFloats, sum);
      } else {
        add(sum, payload);
      }
    }
    unpack(sum, p, data);
    for (int i = 1; i < ranks; ++i) {
      auto* mailbox = window_->region_as<Packet>((me + i) % ranks, kGatherMailbox);
      store_packet(mailbox + two_shot_gather_slot(epoch, p, capacity_), sum, tag_of(epoch));
    }
  }
  const auto* gather = window_->region_as<Packet>(me, kGatherMailbox);
  for (int i = 1; i < ranks; ++i) {
    const int owner = (me + i) % ranks;
    for (std::uint64_t p = slice_begin(packets, ranks, owner);
         p < slice_begin(packets, ranks, owner + 1); ++p) {
      receive(guard_, gather + two_shot_gather_slot(epoch, p, capacity_), epoch, owner,
              kGatherMailbox, payload);
      unpack(payload, p, data);
    }
  }
}

void AllReduce::sweep(std::uint64_t epoch) {
  const int ranks = window_->team()->size();
  const int me = window_->team()->rank();
  const auto clear = [&](int region, std::uint64_t total) {
    auto* mailbox = window_->region_as<Packet>(me, region);
    const std::uint64_t half = total / kCallsInFlight;
    for (std::uint64_t p = 0; p < half; ++p) {
      clear_packet_relaxed(mailbox + parity_of(epoch) * half + p);
    }
  };
  clear(kOneShotMailbox, one_shot_packets(ranks, capacity_));
  clear(kReduceMailbox, two_shot_reduce_packets(ranks, capacity_));
  clear(kGatherMailbox, two_shot_gather_packets(capacity_));
}

}  // namespace penstock
