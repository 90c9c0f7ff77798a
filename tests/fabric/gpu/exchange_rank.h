// One rank of the exchange operator, and what the tests read from the environment.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/stream.h"
#include "fabric/cuda/copy_engine.h"
#include "fabric/cuda/device_rank.h"
#include "fabric/cuda/window_backend.h"
#include "fabric/gpu/exchange_sm90.h"

namespace penstock::test {

inline int number_from(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

// Set by FabricGpuProcessSuiteTest: this process is one rank of so many, and the tests' teams are
// teams of processes.
inline bool is_rank_process() { return std::getenv("PENSTOCK_GPU_TEST_PROCESSES") != nullptr; }

// Where everything takes longer, deadlines and the bounds on them are stretched alike and fewer
// calls are made: under compute-sanitizer, where kernels run tens of times slower
// (PENSTOCK_GPU_TEST_SLOWDOWN), and in processes that share a GPU, which take turns on it, each
// turn milliseconds long.
inline int slowdown() {
  return std::max(1, number_from("PENSTOCK_GPU_TEST_SLOWDOWN", is_rank_process() ? 4 : 1));
}
inline std::uint64_t scaled(std::uint64_t calls) {
  const int less = is_rank_process() ? 5 * slowdown() : slowdown();
  return std::max<std::uint64_t>(4, calls / static_cast<std::uint64_t>(less));
}
inline std::chrono::milliseconds stretched(std::chrono::milliseconds time) {
  return time * slowdown();
}

// Everything one rank needs for the exchange operator.
struct ExchangeRank {
  ExchangeRank(const TeamHandle& team, int device, const ExchangeShape& shape, bool copy_engine,
               const cuda::CopyEngineOptions& options = {})
      : rank(cuda::DeviceRank::create(team, device)),
        window(Window::create(team,
                              Layout::from(kExchangeTable, shape,
                                           "ranks=" + std::to_string(shape.ranks) +
                                               " chunks=" + std::to_string(shape.chunks) +
                                               " bytes=" + std::to_string(shape.chunk_bytes)),
                              cuda::device_window_backend(device))),
        epoch(std::vector<std::uint64_t>{0}),
        result(std::vector<ExchangeResult>{{}}) {
    if (copy_engine) engine = std::make_unique<cuda::DeviceCopyEngine>(rank, window, options);
    args.guard = rank->guard_view(11);
    args.window = rank->window_view(*window);
    if (engine != nullptr) args.ring = engine->ring_view();
    args.shape = shape;
    args.at = kExchangeTable.at(shape);
    args.epoch = epoch.data();
    args.result = result.data();
    // A block at the most for each chunk, and one SM's worth each.
    rank->prepare(stream.handle);
    blocks = std::clamp(static_cast<int>(2 * shape.ranks * shape.chunks), 2, rank->sms() & ~1);
    team->barrier();
  }
  void launch(std::uint64_t calls) {
    args.calls = calls;
    PENSTOCK_CUDA_CHECK(launch_exchange(args, blocks, stream.handle));
    rank->track(stream.handle);
  }
  ExchangeResult take_result() {
    ExchangeResult host;
    cuda::read_device(&host, result.data(), sizeof(host));
    const ExchangeResult clear;
    cuda::write_device(result.data(), &clear, sizeof(clear));
    return host;
  }
  std::uint64_t words(std::uint64_t calls) const {
    return calls * args.shape.ranks * args.shape.chunks * args.shape.chunk_bytes / 4;
  }

  std::shared_ptr<cuda::DeviceRank> rank;
  std::shared_ptr<Window> window;
  std::unique_ptr<cuda::DeviceCopyEngine> engine;
  cuda::DeviceBuffer<std::uint64_t> epoch;
  cuda::DeviceBuffer<ExchangeResult> result;
  cuda::OwnedStream stream;
  Exchange args;
  int blocks = 2;
};

inline void expect_exact(ExchangeRank& x, std::uint64_t calls) {
  const ExchangeResult result = x.take_result();
  EXPECT_EQ(result.words_right, x.words(calls));
  EXPECT_EQ(result.words_wrong, 0U) << "first at byte " << result.first_wrong;
  EXPECT_EQ(result.stopped, 0U);
}

}  // namespace penstock::test
