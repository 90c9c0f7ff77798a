#include "fabric/cuda/device_rank.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <thread>

#include "core/cuda/check.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/put_sm90.h"
#include "penstock/core/error.h"

namespace penstock::cuda {
namespace {

using Clock = std::chrono::steady_clock;

// How often the proxy thread compares the device's record and the team's state.
constexpr std::chrono::microseconds kLookEvery{100};
// A record that only says "a peer aborted" is held back this long, so that the peer's own record,
// the cause, reaches the team first.
constexpr std::chrono::milliseconds kCauseFirst{250};

struct PinnedWords {
  FaultRecord record;
  alignas(64) std::uint64_t abort_value = 0;
  std::uint64_t generation_value = 0;
};

}  // namespace

DeviceRank::DeviceRank(TeamHandle team, int device) : team_(std::move(team)), device_(device) {}

std::uint64_t* DeviceRank::word(DeviceControlRegion region) const {
  return control_->region_as<std::uint64_t>(team_->rank(), region);
}

std::shared_ptr<DeviceRank> DeviceRank::create(TeamHandle team, int device, int sms) {
  collectively(*team, [&] { require_sm90(device); });
  std::shared_ptr<DeviceRank> rank(new DeviceRank(team, device));
  const DeviceControlShape shape{static_cast<std::uint64_t>(team->size())};
  rank->control_ = Window::create(
      team, Layout::from(kDeviceControlTable, shape, fmt::format("ranks={}", shape.ranks)),
      device_window_backend(device));
  const auto mapping = device_mapping(*rank->control_);
  collectively(*team, [&] {
    const ScopedDevice scope(device);
    rank->proxy_ = Proxy::for_device(device);
    rank->record_ = PinnedMemory(sizeof(PinnedWords));
    *rank->record_.as<PinnedWords>() = PinnedWords{};
    write_device(rank->word(kGenerationWord), &rank->generation_, sizeof(rank->generation_));
    std::vector<std::uint64_t*> abort_words;
    for (int r = 0; r < team->size(); ++r) {
      abort_words.push_back(rank->control_->region_as<std::uint64_t>(r, kAbortWord));
    }
    write_device(rank->word(kAbortWords), abort_words.data(),
                 abort_words.size() * sizeof(std::uint64_t*));
    int available = 0;
    PENSTOCK_CUDA_CHECK(cudaDeviceGetAttribute(&available, cudaDevAttrMultiProcessorCount, device));
    const int queues = connections();
    int sharing = 0;
    for (int r = 0; r < team->size(); ++r) sharing += mapping->same_device(r) ? 1 : 0;
    // Their kernels, and the two streams of the process on this GPU (copies and words).
    require(!team->in_process() || sharing == 1 || sharing + 2 <= queues, ErrorKind::kUnsupported,
            [&] {
              return fmt::format(
                  "{} ranks of one process on GPU {} need {} hardware queues and there are {}: set "
                  "CUDA_DEVICE_MAX_CONNECTIONS=32 before the first CUDA call",
                  sharing, device, sharing + 2, queues);
            });
    rank->sms_ = sms > 0 ? sms : available / sharing;
    require(rank->sms_ >= 1 && rank->sms_ <= available, ErrorKind::kUnsupported, [&] {
      return fmt::format("{} SMs for rank {}: GPU {} has {} for {} ranks", rank->sms_, team->rank(),
                         device, available, sharing);
    });
  });
  std::vector<int> all_sms(static_cast<std::size_t>(team->size()));
  team->all_gather(std::as_bytes(std::span(&rank->sms_, 1)),
                   std::as_writable_bytes(std::span(all_sms)));
  collectively(*team, [&] {
    int available = 0;
    PENSTOCK_CUDA_CHECK(cudaDeviceGetAttribute(&available, cudaDevAttrMultiProcessorCount, device));
    int sum = 0;
    for (int r = 0; r < team->size(); ++r) {
      if (mapping->same_device(r)) sum += all_sms[static_cast<std::size_t>(r)];
    }
    require(sum <= available, ErrorKind::kUnsupported, [&] {
      return fmt::format(
          "the ranks on GPU {} ask for {} SMs together and it has {}: kernels that wait for each "
          "other must be resident together, so lower the shares",
          device, sum, available);
    });
  });
  collectively(*team, [&] {
    const ScopedDevice scope(device);
    for (int r = 0; r < team->size(); ++r) {
      // Each source has a slot of its own in the peer's probe region.
      std::byte* slot = rank->control_->region(r, kProbe) +
                        static_cast<std::size_t>(team->rank()) * kProbeSlotBytes;
      std::byte* own = rank->control_->region(team->rank(), kProbeSource);
      rank->probes_.push_back(probe_signal(*rank->proxy_, slot, own, mapping->same_device(r)));
    }
  });
  team->add_hook(rank.get());
  rank->proxy_->attach(rank.get());
  return rank;
}

DeviceRank::~DeviceRank() {
  if (proxy_ != nullptr) proxy_->detach(this);
  if (team_ != nullptr) team_->remove_hook(this);
}

GuardView DeviceRank::guard_view(std::int32_t op) const {
  GuardView view;
  view.generation = word(kGenerationWord);
  view.abort_word = word(kAbortWord);
  view.abort_words = reinterpret_cast<std::uint64_t* const*>(word(kAbortWords));
  view.record_claim = word(kRecordClaim);
  view.record = &record_.as<PinnedWords>()->record;
  view.deadline_ns = static_cast<std::uint64_t>(team_->deadline().count());
  view.rank = team_->rank();
  view.ranks = team_->size();
  view.op = op;
  return view;
}

WindowView DeviceRank::window_view(const Window& window) const {
  const auto mapping = device_mapping(window);
  require(mapping->device() == device_, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("a window on GPU {} was given to a rank on GPU {}", mapping->device(),
                       device_);
  });
  WindowView view;
  view.base = window.local();
  view.bases = mapping->device_bases();
  view.mapping_offset = window.mapping_offset();
  view.bytes = window.bytes();
  view.rank = team_->rank();
  view.ranks = team_->size();
  return view;
}

void DeviceRank::prepare(cudaStream_t stream) {
  const ScopedDevice scope(device_);
  PENSTOCK_CUDA_CHECK(launch_nothing(stream));
  track(stream);
  PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(stream));
}

void DeviceRank::track(cudaStream_t stream) {
  {
    const std::lock_guard lock(mutex_);
    launched_.try_emplace(stream).first->second.record(stream);
  }
  proxy_->wake();
}

void DeviceRank::abort() noexcept {
  const std::lock_guard lock(mutex_);
  abort_locked();
}

void DeviceRank::abort_locked() noexcept {
  if (aborted_) return;
  const ScopedDevice scope(device_);
  auto* words = record_.as<PinnedWords>();
  words->abort_value = generation_;
  // A copy engine writes the word while kernels spin on it; nothing here waits for them.
  if (cudaMemcpyAsync(word(kAbortWord), &words->abort_value, sizeof(words->abort_value),
                      cudaMemcpyHostToDevice, word_stream()) == cudaSuccess) {
    aborted_ = true;
  }
}

bool DeviceRank::serve(Clock::time_point now) noexcept {
  if (now - looked_ < kLookEvery) return false;
  looked_ = now;
  look();
  return false;
}

// Whom to blame: a kernel names the peer it waited for; the team knows of a process that has
// stopped (no heart-beat) and of whom a host thread waits for.
void DeviceRank::report(FaultRecord record) noexcept {
  if (record.cause == static_cast<std::uint32_t>(FaultCause::kDeadline) && record.peer >= 0 &&
      record.peer < team_->size()) {
    record.peer = team_->blame(record.peer, std::chrono::nanoseconds(record.waited_ns));
  }
  reported_ = true;
  (void)team_->raise(record);
}

void DeviceRank::look() noexcept {
  // One lock from the question to the answer: between the two a rearm could start the next
  // generation, which would then be the one that is aborted.
  const std::lock_guard lock(mutex_);
  if (team_->generation() == left_team_generation_) return;
  if (team_->faulted()) {
    abort_locked();
    return;
  }
  if (reported_) return;
  auto& record = record_.as<PinnedWords>()->record;
  if (std::atomic_ref<std::uint32_t>(record.valid).load(std::memory_order_acquire) == 0) return;
  if (record.cause == static_cast<std::uint32_t>(FaultCause::kPeerAborted)) {
    if (seen_aborted_ == Clock::time_point{}) seen_aborted_ = Clock::now();
    if (Clock::now() - seen_aborted_ < kCauseFirst) return;
  }
  report(record);
}

void DeviceRank::quiesce() {
  const ScopedDevice scope(device_);
  abort();
  const auto deadline = Clock::now() + team_->deadline();
  std::vector<cudaEvent_t> events;
  {
    // Not held while waiting: the proxy thread takes it, and serves other ranks, too.
    const std::lock_guard lock(mutex_);
    for (const auto& [stream, event] : launched_) events.push_back(event.get());
  }
  for (cudaEvent_t event : events) {
    while (true) {
      const cudaError_t status = cudaEventQuery(event);
      if (status == cudaSuccess) break;
      if (status != cudaErrorNotReady) check(status, "cudaEventQuery");
      if (Clock::now() > deadline) {
        FaultRecord record;
        record.rank = team_->rank();
        record.peer = team_->rank();
        record.expected = generation_;
        record.waited_ns = static_cast<std::uint64_t>(team_->deadline().count());
        record.cause = static_cast<std::uint32_t>(FaultCause::kDeadline);
        record.valid = 1;
        throw Fault(record, "a kernel of this rank did not end after the abort");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

void DeviceRank::resume(std::uint64_t floor) {
  (void)floor;  // device epochs live in the operators' own words
  const ScopedDevice scope(device_);
  const std::lock_guard lock(mutex_);
  auto* words = record_.as<PinnedWords>();
  ++generation_;
  left_team_generation_ = team_->generation();
  words->record = FaultRecord{};
  words->generation_value = generation_;
  PENSTOCK_CUDA_CHECK(cudaMemcpyAsync(word(kGenerationWord), &words->generation_value,
                                      sizeof(words->generation_value), cudaMemcpyHostToDevice,
                                      word_stream()));
  PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(word_stream()));
  reported_ = false;
  aborted_ = false;
  seen_aborted_ = {};
}

}  // namespace penstock::cuda
