#include "fabric/cuda_host/fake_cuda.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <new>
#include <thread>

#include "fabric/cuda/put_sm90.h"
#include "penstock/fabric/signal.h"

namespace penstock::fake_cuda {
namespace {

std::mutex mutex;
std::map<std::string, int>& counts() {
  static auto& all = *new std::map<std::string, int>;
  return all;
}
int refuse_at = 0;
int created = 0;
std::atomic<std::int64_t> pace_us{0};
std::atomic<bool> starved{false};
thread_local bool is_proxy = false;
thread_local int inside = 0;  // of the fake, whose own memory is never short

bool create(const char* kind) {
  const std::lock_guard lock(mutex);
  if (++created == refuse_at) return false;
  ++counts()[kind];
  return true;
}
void destroy(const char* kind) {
  const std::lock_guard lock(mutex);
  --counts()[kind];
}

// One engine for all streams, in the order of submission.
class Engine {
 public:
  Engine() : thread_([this] { run(); }) {}
  template <typename Work>
  void submit(Work work) {
    const std::lock_guard lock(mutex_);
    ++inside;
    queue_.push_back(std::move(work));
    --inside;
    ++submitted_;
    changed_.notify_all();
  }
  std::uint64_t submitted() {
    const std::lock_guard lock(mutex_);
    return submitted_;
  }
  bool done(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    return done_ >= number;
  }
  void wait(std::uint64_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= number; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !queue_.empty(); });
      const auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (const auto us = pace_us.load(); us > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(us));
      }
      work();
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::uint64_t submitted_ = 0;
  std::uint64_t done_ = 0;
  std::thread thread_;
};
// Never destroyed: it has no end of its own.
Engine& engine() {
  static auto& only = *new Engine;
  return only;
}

struct Event {
  std::uint64_t number = 0;
};
struct Graph {
  penstock::cuda::SmPut put;
};

// What sm_put_kernel does.
void run_put(const penstock::cuda::SmPut& put) {
  if (put.bytes != 0) std::memcpy(put.dst, put.src, put.bytes);
  if (put.word != nullptr) store_signal(put.word, put.epoch);
  if (put.done != nullptr) store_signal(put.done, put.done_value);
}

}  // namespace

std::map<std::string, int> alive() {
  const std::lock_guard lock(mutex);
  std::map<std::string, int> out;
  for (const auto& [kind, count] : counts()) {
    if (count != 0) out[kind] = count;
  }
  return out;
}
void refuse_creation(int n) {
  const std::lock_guard lock(mutex);
  refuse_at = n;
  created = 0;
}
int creations() {
  const std::lock_guard lock(mutex);
  return created;
}
void set_pace(std::chrono::microseconds each) { pace_us.store(each.count()); }
void starve_proxy(bool on) { starved.store(on); }

}  // namespace penstock::fake_cuda

// ---- host memory ------------------------------------------------------------------------------

void* operator new(std::size_t bytes) {
  using namespace penstock::fake_cuda;
  void* out =
      is_proxy && inside == 0 && starved.load() ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (out == nullptr) throw std::bad_alloc();
  return out;
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }

// ---- kernels ----------------------------------------------------------------------------------

namespace penstock::cuda {

cudaError_t launch_sm_put(const SmPut& put, int, cudaStream_t, int) {
  fake_cuda::engine().submit([put] { fake_cuda::run_put(put); });
  return cudaSuccess;
}
cudaError_t launch_nothing(cudaStream_t) {
  fake_cuda::engine().submit([] {});
  return cudaSuccess;
}
cudaError_t load_sm_put() { return cudaSuccess; }
const void* sm_put_function() {
  static const int place = 0;
  return &place;
}

}  // namespace penstock::cuda

// ---- runtime ----------------------------------------------------------------------------------

using namespace penstock::fake_cuda;

namespace {

constexpr std::size_t kGranule = 2 << 20;

template <typename Handle>
cudaError_t make(const char* kind, Handle* out, void* made) {
  if (!create(kind)) {
    std::free(made);
    return cudaErrorMemoryAllocation;
  }
  *out = static_cast<Handle>(made);
  return cudaSuccess;
}

CUresult make(const char* kind) { return create(kind) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY; }

CUresult device_get(CUdevice* out, int) { return *out = 0, CUDA_SUCCESS; }
CUresult error_string(CUresult, const char** out) { return *out = "fake", CUDA_SUCCESS; }
CUresult device_attribute(int* out, CUdevice_attribute, CUdevice) { return *out = 1, CUDA_SUCCESS; }
CUresult granularity(std::size_t* out, const CUmemAllocationProp*,
                     CUmemAllocationGranularity_flags) {
  return *out = kGranule, CUDA_SUCCESS;
}
CUresult mem_create(CUmemGenericAllocationHandle* out, std::size_t bytes,
                    const CUmemAllocationProp*, unsigned long long) {
  const CUresult status = make("allocation");
  if (status == CUDA_SUCCESS) {
    *out = reinterpret_cast<CUmemGenericAllocationHandle>(std::aligned_alloc(4096, bytes));
  }
  return status;
}
CUresult mem_release(CUmemGenericAllocationHandle handle) {
  destroy("allocation");
  std::free(reinterpret_cast<void*>(handle));
  return CUDA_SUCCESS;
}
// A range is a cell that mem_map() fills; the address that is given out is the memory's, so ranges
// are reserved as none and become the memory when it is mapped: the fabric maps a range whole.
CUresult mem_address_reserve(CUdeviceptr* out, std::size_t bytes, std::size_t, CUdeviceptr,
                             unsigned long long) {
  const CUresult status = make("address range");
  if (status == CUDA_SUCCESS) {
    *out = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(4096, bytes));
  }
  return status;
}
CUresult mem_address_free(CUdeviceptr base, std::size_t) {
  destroy("address range");
  std::free(reinterpret_cast<void*>(base));
  return CUDA_SUCCESS;
}
CUresult mem_map(CUdeviceptr, std::size_t, std::size_t, CUmemGenericAllocationHandle,
                 unsigned long long) {
  return make("mapping");
}
CUresult mem_unmap(CUdeviceptr, std::size_t) { return destroy("mapping"), CUDA_SUCCESS; }
CUresult mem_set_access(CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t) {
  return CUDA_SUCCESS;
}
CUresult mem_export(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                    unsigned long long) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult mem_import(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult stream_write(CUstream, CUdeviceptr address, cuuint64_t value, unsigned) {
  engine().submit(
      [=] { penstock::store_signal(reinterpret_cast<std::uint64_t*>(address), value); });
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "fake"; }
const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorMemoryAllocation ? "out of memory" : "fake";
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? 9
           : attribute == cudaDevAttrComputeCapabilityMinor ? 0
                                                            : 132;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int, int) {
  return *value = 1, cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = cudaDeviceProp{};
  return cudaSuccess;
}
// Only the proxy's thread asks.
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  is_proxy = true;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(std::size_t* available, std::size_t* total) {
  *available = *total = 1 << 30;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** out, std::size_t bytes) {
  return make("device memory", out, std::aligned_alloc(256, (bytes + 255) / 256 * 256));
}
cudaError_t cudaFree(void* data) {
  if (data != nullptr) destroy("device memory");
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** out, std::size_t bytes, unsigned) {
  return make("pinned memory", out, std::aligned_alloc(256, (bytes + 255) / 256 * 256));
}
cudaError_t cudaFreeHost(void* data) {
  destroy("pinned memory");
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  engine().submit([=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* bytes,
                                 std::size_t count, cudaMemcpyAttributes*, std::size_t*,
                                 std::size_t, cudaStream_t stream) {
  for (std::size_t i = 0; i < count; ++i) {
    (void)cudaMemcpyAsync(to[i], from[i], bytes[i], cudaMemcpyDefault, stream);
  }
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t) {
  engine().submit([=] { std::memset(data, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int) {
  return make("stream", out, std::malloc(1));
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  destroy("stream");
  std::free(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  engine().wait(engine().submitted());
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) {
  return engine().done(engine().submitted()) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  const cudaError_t status = make("event", out, std::malloc(sizeof(Event)));
  if (status == cudaSuccess) *reinterpret_cast<Event*>(*out) = Event{};
  return status;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  destroy("event");
  std::free(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  reinterpret_cast<Event*>(event)->number = engine().submitted();
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return engine().done(reinterpret_cast<Event*>(event)->number) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaGraphCreate(cudaGraph_t* out, unsigned) {
  return make("graph", out, std::malloc(1));
}
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t* node, cudaGraph_t, const cudaGraphNode_t*,
                                   std::size_t, const cudaKernelNodeParams*) {
  *node = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t, unsigned long long) {
  const cudaError_t status = make("graph exec", out, std::malloc(sizeof(Graph)));
  if (status == cudaSuccess) *reinterpret_cast<Graph*>(*out) = Graph{};
  return status;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  destroy("graph exec");
  std::free(exec);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  destroy("graph");
  std::free(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t,
                                             const cudaKernelNodeParams* params) {
  reinterpret_cast<Graph*>(exec)->put =
      *static_cast<const penstock::cuda::SmPut*>(params->kernelParams[0]);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return penstock::cuda::launch_sm_put(reinterpret_cast<Graph*>(exec)->put, 1, stream, 1);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  static const std::map<std::string, void*> all{
      {"cuGetErrorString", reinterpret_cast<void*>(error_string)},
      {"cuDeviceGet", reinterpret_cast<void*>(device_get)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(device_attribute)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
      {"cuMemCreate", reinterpret_cast<void*>(mem_create)},
      {"cuMemRelease", reinterpret_cast<void*>(mem_release)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(mem_address_reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(mem_address_free)},
      {"cuMemMap", reinterpret_cast<void*>(mem_map)},
      {"cuMemUnmap", reinterpret_cast<void*>(mem_unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(mem_set_access)},
      {"cuMemExportToShareableHandle", reinterpret_cast<void*>(mem_export)},
      {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(mem_import)},
      {"cuStreamWriteValue64", reinterpret_cast<void*>(stream_write)}};
  *entry = all.at(symbol);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
