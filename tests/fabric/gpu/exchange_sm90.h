// A test operator: every rank sends chunks to every rank, checks what it gets word by word, poisons
// it and says so. It uses the whole protocol (parity buffers, signals, consumed words, deadlines)
// on any transport.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "penstock/fabric/device_views.h"
#include "penstock/fabric/region_table.h"

namespace penstock::test {

struct ExchangeShape {
  std::uint64_t ranks = 2;
  std::uint64_t chunks = 1;        // to each peer and call
  std::uint64_t chunk_bytes = 16;  // a multiple of 4
};
enum ExchangeRegion : int { kSend = 0, kReceive = 1, kArrived = 2, kConsumed = 3 };
// [parity][peer][chunk] each; words lie 8 bytes apart so that neighbouring signals can share a
// copy.
inline constexpr RegionTable<ExchangeShape, 4> kExchangeTable{
    "exchange",
    {{"send",
      [](const ExchangeShape& s) { return kCallsInFlight * s.ranks * s.chunks * s.chunk_bytes; },
      256, Access::kOwner, Access::kOwner},
     {"receive",
      [](const ExchangeShape& s) { return kCallsInFlight * s.ranks * s.chunks * s.chunk_bytes; },
      256, Access::kPeers, Access::kOwner},
     {"arrived", [](const ExchangeShape& s) { return s.ranks * s.chunks * 8; }, 128, Access::kPeers,
      Access::kOwner},
     {"consumed", [](const ExchangeShape& s) { return s.ranks * s.chunks * 8; }, 128,
      Access::kPeers, Access::kOwner}}};

struct ExchangeResult {
  std::uint64_t words_right = 0;
  std::uint64_t words_wrong = 0;
  std::uint64_t first_wrong = ~0ULL;  // byte offset in the receive region
  std::uint64_t stopped = 0;          // waits that failed
};

struct Exchange {
  GuardView guard;
  WindowView window;
  RingView ring;  // slots == nullptr: transport direct
  ExchangeShape shape;
  LayoutOffsets<4> at;
  std::uint64_t* epoch = nullptr;  // calls made before, device memory; advanced by `calls`
  std::uint64_t calls = 1;
  ExchangeResult* result = nullptr;  // device memory, added to
  std::uint64_t delay_ns = 0;        // before each chunk of this rank
  std::uint64_t shift = 0;           // data of call e are scaled by 2^((e + shift) % 8)
};

inline constexpr int kExchangeThreads = 256;
// Half of the blocks produce, half consume; at least two, all resident.
cudaError_t launch_exchange(const Exchange& exchange, int blocks, cudaStream_t stream);
cudaError_t load_exchange_kernels();

// One thread waits for `word` >= epoch and stores the WaitStatus; for tests of the guard alone.
cudaError_t launch_wait(const GuardView& guard, const std::uint64_t* word, std::uint64_t epoch,
                        int peer, std::uint32_t* status, cudaStream_t stream);
// One thread posts `count` descriptors that the ring's consumer may or may not take; stores the
// last WaitStatus.
cudaError_t launch_posts(const GuardView& guard, const RingView& ring, const PutDescriptor& put,
                         int count, std::uint32_t* status, cudaStream_t stream);

}  // namespace penstock::test
