// One rank on its GPU: the guard's words, the fault record, and their bridge to the team. Every
// CUDA operator of the rank uses one DeviceRank.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "core/cuda/stream.h"
#include "fabric/cuda/memory.h"
#include "fabric/cuda/proxy.h"
#include "fabric/cuda/window_backend.h"
#include "penstock/fabric/device_views.h"
#include "penstock/fabric/region_table.h"
#include "penstock/fabric/team.h"
#include "penstock/fabric/window.h"

namespace penstock::cuda {

// The guard's window: one line a word, so that a poll of one never waits for a store to another.
struct DeviceControlShape {
  std::uint64_t ranks = 1;
};
enum DeviceControlRegion : int {
  kAbortWord = 0,
  kGenerationWord = 1,
  kRecordClaim = 2,
  kAbortWords = 3,
  kProbe = 4,
  kProbeSource = 5
};
inline constexpr std::uint64_t kDeviceLineBytes = 128;
inline constexpr std::uint64_t kProbeSlotBytes = kProbeDataBytes + kDeviceLineBytes;
inline constexpr RegionTable<DeviceControlShape, 6> kDeviceControlTable{
    "device_control",
    {{"abort_word", [](const DeviceControlShape&) { return kDeviceLineBytes; }, kDeviceLineBytes,
      Access::kAll, Access::kOwner},
     {"generation", [](const DeviceControlShape&) { return kDeviceLineBytes; }, kDeviceLineBytes,
      Access::kOwner, Access::kOwner},
     {"record_claim", [](const DeviceControlShape&) { return kDeviceLineBytes; }, kDeviceLineBytes,
      Access::kOwner, Access::kOwner},
     {"abort_words", [](const DeviceControlShape& s) { return s.ranks * 8; }, kDeviceLineBytes,
      Access::kOwner, Access::kOwner},
     {"probe", [](const DeviceControlShape& s) { return s.ranks * kProbeSlotBytes; },
      kDeviceLineBytes, Access::kAll, Access::kOwner},
     {"probe_source", [](const DeviceControlShape&) { return kProbeSlotBytes; }, kDeviceLineBytes,
      Access::kOwner, Access::kOwner}}};

class DeviceRank : public RearmHook, private ProxyClient {
 public:
  // Collective. Ranks that share a GPU in one process need a hardware queue each, or a kernel of
  // one waits behind a kernel that waits for it: Unsupported, naming CUDA_DEVICE_MAX_CONNECTIONS,
  // if there are too few (see prepare_process()). `sms`: how many SMs this rank may fill, 0 for an
  // equal share of the ranks on its GPU; ranks that share a GPU must be resident together, so the
  // shares of one GPU may not add up to more than it has (Unsupported, with the sum). Throws
  // Unsupported on every rank if one has no Hopper GPU.
  static std::shared_ptr<DeviceRank> create(TeamHandle team, int device, int sms = 0);
  ~DeviceRank() override;

  const TeamHandle& team() const noexcept { return team_; }
  int device() const noexcept { return device_; }
  // CTAs of one-a-SM kernels that this rank may launch.
  int sms() const noexcept { return sms_; }
  const std::shared_ptr<Proxy>& proxy() const noexcept { return proxy_; }

  // For kernels of operator `op`. Valid for the life of this object, across rearms.
  GuardView guard_view(std::int32_t op) const;
  // Views of a window made with device_window_backend(device()).
  WindowView window_view(const Window& window) const;

  // How signals to `peer` are written, as measured when this rank was created.
  const SignalProbe& signal_probe(int peer) const {
    return probes_[static_cast<std::size_t>(peer)];
  }

  // Makes the driver set `stream` up now, by an empty kernel that this call waits for. A new
  // stream's first launch may wait for the GPU to be idle; on a GPU that several ranks share, that
  // is a wait for a kernel which waits for this launch. Call it for every stream before the first
  // kernel that waits for a peer; not while capturing.
  void prepare(cudaStream_t stream);
  // Tells the guard that work which touches windows was enqueued on `stream`, and wakes the proxy.
  // Call it after every launch (not while capturing; replays of a graph: after cudaGraphLaunch).
  void track(cudaStream_t stream);
  // Ends every device wait of this generation on this rank from the host. Any thread.
  void abort() noexcept;

  // RearmHook: waits until the tracked streams are idle (their kernels end because the abort word
  // is up).
  void quiesce() override;
  std::uint64_t highest_epoch() const override { return kNoEpoch; }
  void resume(std::uint64_t floor) override;

 private:
  DeviceRank(TeamHandle team, int device);
  bool serve(std::chrono::steady_clock::time_point now) noexcept override;
  bool busy() const noexcept override { return false; }
  void look() noexcept;
  void report(FaultRecord record) noexcept;  // mutex_ is held
  void abort_locked() noexcept;              // mutex_ is held

  TeamHandle team_;
  int device_;
  int sms_ = 0;
  std::shared_ptr<Proxy> proxy_;
  std::shared_ptr<Window> control_;
  std::vector<SignalProbe> probes_;  // [ranks]
  PinnedMemory record_;  // FaultRecord, then the value that abort() copies to the device
  std::uint64_t* word(DeviceControlRegion region) const;
  std::uint64_t generation_ = kFirstGeneration;
  std::mutex mutex_;  // the fields below, and generation_ against the proxy thread
  // One event a stream, recorded behind its latest launch: unlike the stream it cannot be destroyed
  // under us.
  std::map<cudaStream_t, OwnedEvent> launched_;
  // Team generation that a rearm is about to leave: its fault is still visible while this rank has
  // already resumed.
  std::uint64_t left_team_generation_ = 0;
  bool reported_ = false;  // this generation's record went to the team
  bool aborted_ = false;   // this generation's abort word was written by this host
  std::chrono::steady_clock::time_point seen_aborted_{};
  std::chrono::steady_clock::time_point looked_{};
};

}  // namespace penstock::cuda
