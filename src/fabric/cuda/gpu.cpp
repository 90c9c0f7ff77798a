// gpu.h: the machine's GPUs, and the self-test on them.
#include "fabric/gpu.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <span>
#include <thread>

#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/stream.h"
#include "fabric/cuda/copy_engine.h"
#include "fabric/cuda/device_rank.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/fabric_backend.h"
#include "fabric/cuda/pattern_sm90.h"
#include "fabric/cuda/put_sm90.h"
#include "fabric/cuda/sm_transport.h"
#include "penstock/core/error.h"

namespace penstock {
namespace cuda {
namespace {

// One rank's stream and words for the kernels of the self-test.
class PatternRank {
 public:
  explicit PatternRank(std::shared_ptr<DeviceRank> rank)
      : rank_(std::move(rank)), result_(kResultWords), op_(rank_->team()->next_operator()) {
    PENSTOCK_CUDA_CHECK(load_pattern_kernels());
    PENSTOCK_CUDA_CHECK(load_sm_put());
    rank_->prepare(stream_.handle);
  }
  PatternRank(const PatternRank&) = delete;
  PatternRank& operator=(const PatternRank&) = delete;

  const std::shared_ptr<DeviceRank>& rank() const { return rank_; }

  void fill(std::byte* to, std::uint64_t bytes, std::uint64_t seed) {
    PENSTOCK_CUDA_CHECK(launch_fill(reinterpret_cast<std::uint64_t*>(to), bytes / 8, seed,
                                    blocks_for(bytes), stream_.handle));
    rank_->track(stream_.handle);
    stream_.wait();
  }

  std::int64_t receive(Window& window, std::uint64_t signal_offset, std::uint64_t epoch, int peer,
                       std::uint64_t offset, std::uint64_t bytes, std::uint64_t seed) {
    std::uint64_t result[kResultWords] = {~0ULL, 0};
    write_device(result_.data(), result, sizeof(result));
    Receive args;
    args.guard = rank_->guard_view(op_);
    args.word = reinterpret_cast<const std::uint64_t*>(window.local() + signal_offset);
    args.epoch = epoch;
    args.peer = peer;
    args.region = window.layout().region_at(signal_offset);
    args.data = reinterpret_cast<const std::uint64_t*>(window.local() + offset);
    args.words = bytes / 8;
    args.seed = seed;
    args.first_wrong = result_.data();
    args.status = reinterpret_cast<std::uint32_t*>(result_.data() + 1);
    PENSTOCK_CUDA_CHECK(launch_receive(args, blocks_for(bytes), stream_.handle));
    rank_->track(stream_.handle);
    stream_.wait();  // the kernel's wait has a deadline
    read_device(result, result_.data(), sizeof(result));
    if (result[1] != 0) throw_fault();
    return result[0] == ~0ULL ? -1 : static_cast<std::int64_t>(result[0] * 8);
  }

 private:
  static constexpr std::size_t kResultWords = 2;

  // A CTA for each 64 KB, within the rank's share: the CTAs of receive() are all resident.
  int blocks_for(std::uint64_t bytes) const {
    return static_cast<int>(
        std::clamp<std::uint64_t>(bytes >> 16, 1, static_cast<std::uint64_t>(rank_->sms())));
  }

  // The proxy carries the kernel's record to the team, within a few hundred milliseconds.
  [[noreturn]] void throw_fault() const {
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(2);
    while (!rank_->team()->faulted() && std::chrono::steady_clock::now() < give_up) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    rank_->team()->check();
    throw_error(ErrorKind::kBackend, "a wait in a kernel failed and left no record");
  }

  std::shared_ptr<DeviceRank> rank_;
  DeviceBuffer<std::uint64_t> result_;
  std::int32_t op_;
  OwnedStream stream_;
};

std::unique_ptr<Transport> make_transport(TransportKind kind,
                                          const std::shared_ptr<DeviceRank>& rank,
                                          std::shared_ptr<Window> window) {
  if (kind == TransportKind::kCopyEngine) {
    return std::make_unique<DeviceCopyEngine>(rank, std::move(window));
  }
  return std::make_unique<DeviceSmTransport>(kind, rank, std::move(window),
                                             std::min(kSmPutBlocks, rank->sms()));
}

}  // namespace

FabricBackend fabric_backend(std::shared_ptr<DeviceRank> device_rank) {
  const auto state = std::make_shared<PatternRank>(std::move(device_rank));
  FabricBackend out;
  out.name = "cuda";
  out.memory = device_window_backend(state->rank()->device());
  out.transports = {TransportKind::kCopyEngine, TransportKind::kSm, TransportKind::kDirect};
  out.make_transport = [state](TransportKind kind, std::shared_ptr<Window> window) {
    return make_transport(kind, state->rank(), std::move(window));
  };
  out.fill = [state](Window& window, int rank, std::uint64_t offset, std::uint64_t bytes,
                     std::uint64_t seed) { state->fill(window.base(rank) + offset, bytes, seed); };
  out.receive = [state](Window& window, std::uint64_t signal_offset, std::uint64_t epoch, int peer,
                        std::uint64_t offset, std::uint64_t bytes, std::uint64_t seed) {
    return state->receive(window, signal_offset, epoch, peer, offset, bytes, seed);
  };
  return out;
}

}  // namespace cuda

std::string gpu_unavailable() {
  static const bool prepared = [] {
    cuda::prepare_process();
    return true;
  }();
  (void)prepared;
  return cuda::unavailable_reason();
}

int gpu_of_rank(int local_rank) {
  const int devices = cuda::device_count();
  require(devices > 0, ErrorKind::kUnsupported, [] { return cuda::unavailable_reason(); });
  return local_rank % devices;
}

GpuMachine describe_gpus() {
  const int devices = cuda::device_count();
  require(devices > 0, ErrorKind::kUnsupported, [] { return cuda::unavailable_reason(); });
  GpuMachine out;
  PENSTOCK_CUDA_CHECK(cudaDriverGetVersion(&out.cuda_version));
  for (int device = 0; device < devices; ++device) {
    cudaDeviceProp properties{};
    PENSTOCK_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    const cuda::GpuState state = cuda::gpu_state(device);
    if (out.driver.empty()) out.driver = state.driver_version;
    out.cards.push_back({device, properties.name, state.pci_bus_id,
                         fmt::format("{}.{}", properties.major, properties.minor),
                         properties.multiProcessorCount, properties.totalGlobalMem,
                         state.sm_clock_mhz, state.nvlinks_active, state.problem});
    for (int peer = 0; peer < devices; ++peer) {
      if (peer == device) continue;
      const cuda::PeerAccess access = cuda::peer_access(device, peer);
      out.links.push_back({device, peer, access.load_store, access.native_atomics});
    }
  }
  return out;
}

GpuSelfTest gpu_self_test(const TeamHandle& team, int device, const SelfTestOptions& options) {
  // Before the device is made current: a rank without one must refuse on every rank.
  collectively(*team, [&] { cuda::require_sm90(device); });
  const cuda::ScopedDevice scope(device);
  const auto rank = cuda::DeviceRank::create(team, device);
  FabricBackend backend;
  collectively(*team, [&] { backend = cuda::fabric_backend(rank); });
  GpuSelfTest out;
  out.transports = self_test(team, backend, options);
  struct Probe {
    std::uint32_t chosen = 0;
    std::uint32_t reserved = 0;
    double device_copy_us = 0;
    double stream_write_us = 0;
  };
  const auto ranks = static_cast<std::size_t>(team->size());
  std::vector<Probe> mine;
  for (int peer = 0; peer < team->size(); ++peer) {
    const cuda::SignalProbe& probe = rank->signal_probe(peer);
    mine.push_back(
        {static_cast<std::uint32_t>(probe.chosen), 0, probe.device_copy_us, probe.stream_write_us});
  }
  std::vector<Probe> all(ranks * ranks);
  team->all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (std::size_t i = 0; i < all.size(); ++i) {
    out.signals.push_back({static_cast<int>(i / ranks), static_cast<int>(i % ranks),
                           std::string(to_string(static_cast<cuda::SignalMethod>(all[i].chosen))),
                           all[i].device_copy_us, all[i].stream_write_us});
  }
  return out;
}

}  // namespace penstock
