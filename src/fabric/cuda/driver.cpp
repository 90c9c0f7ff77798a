#include "fabric/cuda/driver.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <cstdlib>

#include "core/cuda/check.h"
#include "penstock/core/error.h"

namespace penstock::cuda {
namespace {

// The oldest driver whose memory and stream calls have the signatures in Driver.
constexpr unsigned int kEntryVersion = 12000;

template <typename Function>
void find(const char* name, unsigned int version, Function& slot) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found);
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess || entry == nullptr) {
    (void)cudaGetLastError();
    throw_error(ErrorKind::kUnsupported,
                fmt::format("the NVIDIA driver has no {} of version {} ({}): install driver 525 or "
                            "newer, or use the cpu back end",
                            name, version, cudaGetErrorString(status)));
  }
  slot = reinterpret_cast<Function>(entry);
}

Driver load() {
  Driver d;
  if (device_count() == 0) {
    throw_error(ErrorKind::kUnsupported,
                fmt::format("the cuda back end needs a GPU: {}", unavailable_reason()));
  }
  check(cudaDriverGetVersion(&d.version), "cudaDriverGetVersion");
  find("cuGetErrorString", kEntryVersion, d.get_error_string);
  find("cuDeviceGet", kEntryVersion, d.device_get);
  find("cuDeviceGetAttribute", kEntryVersion, d.device_get_attribute);
  find("cuMemGetAllocationGranularity", kEntryVersion, d.mem_get_allocation_granularity);
  find("cuMemCreate", kEntryVersion, d.mem_create);
  find("cuMemRelease", kEntryVersion, d.mem_release);
  find("cuMemAddressReserve", kEntryVersion, d.mem_address_reserve);
  find("cuMemAddressFree", kEntryVersion, d.mem_address_free);
  find("cuMemMap", kEntryVersion, d.mem_map);
  find("cuMemUnmap", kEntryVersion, d.mem_unmap);
  find("cuMemSetAccess", kEntryVersion, d.mem_set_access);
  find("cuMemExportToShareableHandle", kEntryVersion, d.mem_export);
  find("cuMemImportFromShareableHandle", kEntryVersion, d.mem_import);
  find("cuStreamWriteValue64", kEntryVersion, d.stream_write_value64);
  return d;
}

// The part of NVML's C interface that gpu_state() calls, declared here because the toolkit need not
// ship nvml.h.
using NvmlDevice = void*;
struct Nvml {
  std::string problem;
  int (*init)() = nullptr;
  int (*by_pci)(const char*, NvmlDevice*) = nullptr;
  int (*clock)(NvmlDevice, int, unsigned int*) = nullptr;
  int (*driver_version)(char*, unsigned int) = nullptr;
  int (*link_state)(NvmlDevice, unsigned int, unsigned int*) = nullptr;
};

const Nvml& nvml() noexcept {
  static const Nvml loaded = [] {
    Nvml n;
    void* library = open_library("libnvidia-ml.so.1", &n.problem);
    if (library == nullptr) return n;
    n.init = reinterpret_cast<int (*)()>(find_symbol(library, "nvmlInit_v2"));
    n.by_pci = reinterpret_cast<int (*)(const char*, NvmlDevice*)>(
        find_symbol(library, "nvmlDeviceGetHandleByPciBusId_v2"));
    n.clock = reinterpret_cast<int (*)(NvmlDevice, int, unsigned int*)>(
        find_symbol(library, "nvmlDeviceGetClockInfo"));
    n.driver_version = reinterpret_cast<int (*)(char*, unsigned int)>(
        find_symbol(library, "nvmlSystemGetDriverVersion"));
    n.link_state = reinterpret_cast<int (*)(NvmlDevice, unsigned int, unsigned int*)>(
        find_symbol(library, "nvmlDeviceGetNvLinkState"));
    if (n.init == nullptr || n.by_pci == nullptr || n.clock == nullptr ||
        n.driver_version == nullptr || n.link_state == nullptr) {
      n.problem = "libnvidia-ml.so.1 lacks an entry point";
    } else if (const int status = n.init(); status != 0) {
      n.problem = fmt::format("nvmlInit_v2 returned {}", status);
    }
    return n;
  }();
  return loaded;
}

}  // namespace

void prepare_process() {
  (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
}

int connections() noexcept {
  constexpr int kDriverDefault = 8;
  const char* text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const int value = text == nullptr ? 0 : std::atoi(text);
  return value > 0 ? value : kDriverDefault;
}

const Driver& driver() {
  static const Driver loaded = load();
  return loaded;
}

void check(CUresult status, const char* call) {
  if (status == CUDA_SUCCESS) return;
  const char* words = nullptr;
  if (driver().get_error_string(status, &words) != CUDA_SUCCESS || words == nullptr) {
    words = "unknown error";
  }
  const ErrorKind kind =
      status == CUDA_ERROR_OUT_OF_MEMORY ? ErrorKind::kResourceExhausted : ErrorKind::kBackend;
  throw_error(kind, fmt::format("cu_{} failed: {} ({})", call, static_cast<int>(status), words));
}

GpuState gpu_state(int device) noexcept {
  GpuState state;
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
    (void)cudaGetLastError();
    state.problem = "cudaGetDeviceProperties failed";
    return state;
  }
  state.name = properties.name;
  state.pci_bus_id = fmt::format("{:08x}:{:02x}:{:02x}.0", properties.pciDomainID,
                                 properties.pciBusID, properties.pciDeviceID);
  const Nvml& n = nvml();
  state.problem = n.problem;
  if (!n.problem.empty()) return state;
  std::array<char, 96> version{};
  if (n.driver_version(version.data(), static_cast<unsigned int>(version.size())) == 0) {
    state.driver_version = version.data();
  }
  NvmlDevice handle = nullptr;
  if (const int status = n.by_pci(state.pci_bus_id.c_str(), &handle); status != 0) {
    state.problem = fmt::format("NVML does not know {} (status {})", state.pci_bus_id, status);
    return state;
  }
  constexpr int kNvmlClockSm = 1;
  constexpr int kNvmlClockMemory = 2;
  unsigned int mhz = 0;
  if (n.clock(handle, kNvmlClockSm, &mhz) == 0) state.sm_clock_mhz = static_cast<int>(mhz);
  if (n.clock(handle, kNvmlClockMemory, &mhz) == 0) state.memory_clock_mhz = static_cast<int>(mhz);
  constexpr unsigned int kMaxLinks = 18;
  int active = 0;
  bool answered = false;
  for (unsigned int link = 0; link < kMaxLinks; ++link) {
    unsigned int on = 0;
    if (n.link_state(handle, link, &on) != 0) continue;
    answered = true;
    active += on != 0 ? 1 : 0;
  }
  if (answered) state.nvlinks_active = active;
  return state;
}

void* open_library(const char* name, std::string* problem) noexcept {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr && problem != nullptr) {
    const char* words = dlerror();
    *problem = words != nullptr ? words : "dlopen failed";
  }
  return library;
}

void* find_symbol(void* library, const char* name) noexcept { return dlsym(library, name); }

}  // namespace penstock::cuda
