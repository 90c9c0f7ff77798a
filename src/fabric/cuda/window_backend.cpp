#include "fabric/cuda/window_backend.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <array>
#include <cstring>
#include <span>

#include "core/cuda/check.h"
#include "penstock/core/error.h"

namespace penstock::cuda {
namespace {

// What ranks tell each other before they map: enough to know whether they share a GPU, in whatever
// order their processes number them.
struct DeviceCard {
  std::array<char, 16> uuid{};
};

DeviceCard card_of(int device) {
  cudaDeviceProp properties{};
  PENSTOCK_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  DeviceCard card;
  static_assert(sizeof(properties.uuid.bytes) == sizeof(card.uuid));
  std::memcpy(card.uuid.data(), properties.uuid.bytes, card.uuid.size());
  return card;
}

// This process's number of the device with that uuid; -1 if it is not visible here.
int visible_device(const DeviceCard& card) {
  for (int device = 0; device < device_count(); ++device) {
    if (card_of(device).uuid == card.uuid) return device;
  }
  return -1;
}

}  // namespace

DeviceWindowMapping::~DeviceWindowMapping() {
  if (device_bases_ != nullptr) (void)cudaFree(device_bases_);
}

class DeviceWindowBackend : public WindowBackend {
 public:
  explicit DeviceWindowBackend(int device) : device_(device) {}
  Backend kind() const noexcept override { return Backend::kCuda; }
  std::uint64_t granule() const override { return granule_bytes(device_); }
  std::shared_ptr<WindowMapping> map(Team& team, std::uint64_t bytes) override;

 private:
  int device_;
};

std::shared_ptr<WindowMapping> DeviceWindowBackend::map(Team& team, std::uint64_t bytes) {
  const auto ranks = static_cast<std::size_t>(team.size());
  const auto self = static_cast<std::size_t>(team.rank());
  std::shared_ptr<DeviceWindowMapping> mapping(new DeviceWindowMapping);
  mapping->device_ = device_;
  mapping->bytes_ = bytes;
  mapping->parts_.resize(ranks);
  mapping->bases_.resize(ranks);
  mapping->same_device_.resize(ranks);
  auto own = std::make_shared<DeviceWindowMapping::Part>();
  DeviceCard card;
  collectively(team, [&] {
    const ScopedDevice scope(device_);
    own->memory = Allocation::create(bytes, device_);
    own->mapping = Mapping::create(own->memory, device_);
    own->device = device_;
    zero_device(own->mapping.data(), own->memory.bytes());
    card = card_of(device_);
  });
  std::vector<DeviceCard> cards(ranks);
  team.all_gather(std::as_bytes(std::span(&card, 1)), std::as_writable_bytes(std::span(cards)));
  // Ranks of one process share the owner's part itself, processes a descriptor of its memory.
  std::vector<std::shared_ptr<void>> shared;
  std::vector<UniqueFd> descriptors;
  if (team.in_process()) {
    shared = team.all_gather_shared(own);
  } else {
    UniqueFd mine;
    collectively(team, [&] { mine = UniqueFd(own->memory.export_descriptor()); });
    descriptors = team.all_gather_descriptor(mine.get());
  }
  collectively(team, [&] {
    const ScopedDevice scope(device_);
    for (std::size_t r = 0; r < ranks; ++r) {
      mapping->same_device_[r] = cards[r].uuid == card.uuid;
      if (r == self) {
        mapping->parts_[r] = own;
        mapping->bases_[r] = own->mapping.data();
        continue;
      }
      if (const int peer = visible_device(cards[r]); peer >= 0) {
        const PeerAccess access = peer_access(device_, peer);
        require(access.load_store && access.native_atomics, ErrorKind::kUnsupported, [&] {
          return fmt::format(
              "rank {} (GPU {}) cannot use rank {}'s memory (GPU {}): {}; put the ranks on GPUs "
              "joined by NVLink",
              self, device_, r, peer,
              access.load_store ? "the link has no native atomics" : "no peer access");
        });
      }
      if (team.in_process()) {
        mapping->parts_[r] = std::static_pointer_cast<DeviceWindowMapping::Part>(shared[r]);
        if (mapping->same_device_[r]) {
          mapping->bases_[r] = mapping->parts_[r]->mapping.data();
          continue;
        }
        mapping->mappings_.push_back(Mapping::create(mapping->parts_[r]->memory, device_));
      } else {
        mapping->imported_.push_back(
            Allocation::import(descriptors[r].get(), own->memory.bytes(), device_));
        mapping->mappings_.push_back(Mapping::create(mapping->imported_.back(), device_));
      }
      mapping->bases_[r] = mapping->mappings_.back().data();
    }
    PENSTOCK_CUDA_CHECK(
        cudaMalloc(reinterpret_cast<void**>(&mapping->device_bases_), ranks * sizeof(std::byte*)));
    write_device(mapping->device_bases_, mapping->bases_.data(), ranks * sizeof(std::byte*));
  });
  return mapping;
}

std::shared_ptr<WindowBackend> device_window_backend(int device) {
  require_sm90(device);
  return std::make_shared<DeviceWindowBackend>(device);
}

std::shared_ptr<DeviceWindowMapping> device_mapping(const Window& window) {
  auto mapping = std::dynamic_pointer_cast<DeviceWindowMapping>(window.mapping());
  require(mapping != nullptr, ErrorKind::kInvalidArgument, [&] {
    return fmt::format(
        "the window of {} lives in host memory: a cuda transport needs one made with "
        "the cuda back end",
        window.layout().name());
  });
  return mapping;
}

}  // namespace penstock::cuda
