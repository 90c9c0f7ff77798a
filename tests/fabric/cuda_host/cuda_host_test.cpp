// The host side of the CUDA fabric over a fake GPU: what it does when something cannot be had, when
// memory runs out in the proxy, when a ring never empties, when NCCL fails on one rank.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "fabric/cuda/copy_engine.h"
#include "fabric/cuda/device_packets.h"
#include "fabric/cuda/device_rank.h"
#include "fabric/cuda/nccl.h"
#include "fabric/cuda/sm_transport.h"
#include "fabric/cuda/window_backend.h"
#include "fabric/cuda_host/fake_cuda.h"
#include "penstock/core/error.h"
#include "penstock/fabric/signal.h"

namespace penstock {
namespace {

using cuda::DeviceCopyEngine;
using cuda::DeviceRank;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::uint64_t kBytes = 1 << 16;

std::shared_ptr<Window> make_window(const TeamHandle& team) {
  return Window::create(team,
                        Layout("puts", "", {{"all", 0, kBytes, 8, Access::kAll, Access::kAll}}),
                        cuda::device_window_backend(0));
}

// Everything that a rank of the CUDA fabric owns, used once.
void life(const TeamHandle& team) {
  const auto rank = DeviceRank::create(team, 0);
  const auto window = make_window(team);
  DeviceCopyEngine engine(rank, window);
  cuda::DeviceSmTransport copiers(TransportKind::kSm, rank, window, 4);
  const cuda::DevicePackets packets(rank, 16);
  cuda::OwnedStream stream;
  rank->prepare(stream.handle);
  PutDescriptor put;
  put.peer = 0;
  put.bytes = 64;
  put.dst_offset = 4096;
  put.signal_offset = 8192;
  put.signal_epoch = 1;
  engine.put(put);
  engine.quiet();
  put.signal_epoch = 2;
  copiers.put(put);
  copiers.quiet();
  team->barrier();
}

TEST(CudaHostTest, WhateverCannotBeHadNothingIsLeftBehind) {
  fake_cuda::set_pace(microseconds(0));
  run_local_team(1, life);  // what lives as long as the process
  const auto before = fake_cuda::alive();
  fake_cuda::refuse_creation(0);
  run_local_team(1, life);
  EXPECT_EQ(fake_cuda::alive(), before);
  const int creations = fake_cuda::creations();
  ASSERT_GT(creations, 20);
  for (int n = 1; n <= creations; ++n) {
    fake_cuda::refuse_creation(n);
    EXPECT_THROW(run_local_team(1, life), Error) << "creation " << n;
    EXPECT_EQ(fake_cuda::alive(), before) << "creation " << n;
  }
  fake_cuda::refuse_creation(0);
}

struct EngineRank {
  explicit EngineRank(const TeamHandle& team)
      : rank(DeviceRank::create(team, 0)), window(make_window(team)), engine(rank, window) {}
  PutDescriptor put(std::uint64_t epoch) const {
    PutDescriptor out;
    out.peer = 0;
    out.bytes = 64;
    out.dst_offset = 4096;
    out.signal_offset = 8192;
    out.signal_epoch = epoch;
    return out;
  }
  std::uint64_t signal() const {
    return load_signal(reinterpret_cast<const std::uint64_t*>(window->local() + 8192));
  }
  std::shared_ptr<DeviceRank> rank;
  std::shared_ptr<Window> window;
  DeviceCopyEngine engine;
};

bool comes_true(const std::function<bool()>& condition, milliseconds limit) {
  const auto until = steady_clock::now() + limit;
  while (!condition()) {
    if (steady_clock::now() > until) return false;
    std::this_thread::sleep_for(microseconds(100));
  }
  return true;
}

TEST(CudaHostTest, NoMemoryInTheProxyIsAFaultThatARearmRepairs) {
  fake_cuda::set_pace(microseconds(20));
  run_local_team(1, [](const TeamHandle& team) {
    EngineRank x(team);
    for (std::uint64_t round = 1; round <= 5; ++round) {
      x.engine.put(x.put(2 * round));
      x.engine.quiet();
      EXPECT_EQ(x.signal(), 2 * round);
      fake_cuda::starve_proxy(true);
      x.engine.put(x.put(2 * round + 1));
      EXPECT_TRUE(comes_true([&] { return team->faulted(); }, milliseconds(5000)));
      fake_cuda::starve_proxy(false);
      ASSERT_TRUE(team->faulted());
      EXPECT_EQ(team->fault()->cause, static_cast<std::uint32_t>(FaultCause::kTransport));
      EXPECT_THROW(x.engine.quiet(), Fault);
      EXPECT_EQ(x.signal(), 2 * round) << "a put that was lost must not be signalled";
      team->rearm();
    }
  });
}

// Posts like a kernel, without an end, so that the ring is never empty.
void post_endlessly(const RingView& ring, const PutDescriptor& put, const std::atomic<bool>& stop) {
  for (std::uint64_t position = 0; !stop.load(); ++position) {
    while (!ring_has_room(position, load_signal(ring.tail), ring.capacity)) {
      if (stop.load()) return;
      std::this_thread::yield();
    }
    RingSlot& slot = ring.slots[ring_index(position, ring.capacity)];
    slot.put = put;
    store_signal(ring.head, position + 1);
    store_signal(&slot.sequence, position + 1);
  }
}

TEST(CudaHostTest, AKernelRingThatIsNeverEmptyDoesNotKeepTheHostOut) {
  fake_cuda::set_pace(microseconds(300));  // both batches stay in flight
  run_local_team(1, [](const TeamHandle& team) {
    EngineRank x(team);
    std::atomic<bool> stop{false};
    PutDescriptor endless = x.put(1);
    endless.dst_offset = 12288;
    endless.signal_offset = kNoSignal;
    std::thread kernel([&] { post_endlessly(x.engine.ring_view(), endless, stop); });
    EXPECT_TRUE(comes_true([&] { return x.engine.counters().puts > 100; }, milliseconds(5000)));
    for (std::uint64_t epoch = 1; epoch <= 10; ++epoch) {
      x.engine.put(x.put(epoch));
      EXPECT_TRUE(comes_true([&] { return x.signal() == epoch; }, milliseconds(2000)))
          << "put " << epoch;
    }
    stop.store(true);
    kernel.join();
    x.engine.quiet();
  });
  fake_cuda::set_pace(microseconds(0));
}

// Two operators' slices of one device allocation: the same offsets in each, and a third that does
// not fit the budget.
TEST(CudaHostTest, SlicesOfAPoolAreSeparate) {
  fake_cuda::set_pace(microseconds(0));
  run_local_team(2, [](const TeamHandle& team) {
    const auto rank = DeviceRank::create(team, 0);
    WindowPool pool(team, 4 * kBytes, cuda::device_window_backend(0));
    const Layout layout("puts", "", {{"all", 0, kBytes, 8, Access::kAll, Access::kAll}});
    const auto a = pool.lease("a", layout);
    const auto b = pool.lease("b", layout);
    EXPECT_EQ(a->mapping(), b->mapping());
    // The budget is rounded up to whole granules.
    const std::uint64_t granule = cuda::granule_bytes(0);
    const Layout big("big", "", {{"all", 0, granule, 8, Access::kAll, Access::kAll}});
    EXPECT_THROW((void)pool.lease("c", big), Error);
    DeviceCopyEngine to_a(rank, a);
    DeviceCopyEngine to_b(rank, b);
    PutDescriptor put;
    put.peer = 1 - team->rank();
    put.bytes = 8;
    put.dst_offset = 4096;
    std::uint64_t value = 10 + static_cast<std::uint64_t>(team->rank());
    cuda::write_device(a->local(), &value, sizeof(value));
    value += 10;
    cuda::write_device(b->local(), &value, sizeof(value));
    to_a.put(put);
    to_b.put(put);
    to_a.quiet();
    to_b.quiet();
    team->barrier();
    const auto from = static_cast<std::uint64_t>(put.peer);
    cuda::read_device(&value, a->local() + 4096, sizeof(value));
    EXPECT_EQ(value, 10 + from);
    cuda::read_device(&value, b->local() + 4096, sizeof(value));
    EXPECT_EQ(value, 20 + from);
    team->barrier();
  });
}

// ---- NCCL -------------------------------------------------------------------------------------

std::atomic<int> communicators{0};

TEST(CudaHostTest, ACommunicatorThatOneRankCannotHaveIsDestroyedOnTheOthers) {
  cuda::Nccl nccl;
  nccl.unique_id = [](cuda::NcclId*) { return 0; };
  nccl.destroy = [](cuda::NcclComm) {
    --communicators;
    return 0;
  };
  nccl.init_rank = [](cuda::NcclComm* out, int, cuda::NcclId, int rank) {
    if (rank == 1) return 3;
    ++communicators;
    *out = &communicators;
    return 0;
  };
  run_local_team(3, [&](const TeamHandle& team) {
    EXPECT_THROW(cuda::NcclRank(*team, nccl), Error);
    team->barrier();
  });
  EXPECT_EQ(communicators.load(), 0);
}

}  // namespace
}  // namespace penstock
