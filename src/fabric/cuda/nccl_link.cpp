#include "fabric/cuda/nccl_link.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/link_timer.h"
#include "penstock/core/error.h"

namespace penstock::cuda {
namespace {

// The part of NCCL's C interface that is called, declared here because its header need not be
// installed.
struct NcclId {
  char bytes[128];
};
using NcclComm = void*;
struct Nccl {
  int (*version)(int*) = nullptr;
  int (*unique_id)(NcclId*) = nullptr;
  int (*init_rank)(NcclComm*, int, NcclId, int) = nullptr;
  int (*destroy)(NcclComm) = nullptr;
  int (*all_reduce)(const void*, void*, std::size_t, int, int, NcclComm, cudaStream_t) = nullptr;
  int (*send)(const void*, std::size_t, int, int, NcclComm, cudaStream_t) = nullptr;
  int (*recv)(void*, std::size_t, int, int, NcclComm, cudaStream_t) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
};
constexpr int kNcclChar = 0;
constexpr int kNcclBf16 = 9;
constexpr int kNcclSum = 0;

void nccl_check(int status, const char* call) {
  require(status == 0, ErrorKind::kBackend,
          [&] { return fmt::format("{} returned {}", call, status); });
}

// Empty if the library has all that is called; else why not.
std::string open(const std::string& name, Nccl& n) {
  std::string problem;
  void* library = open_library(name.c_str(), &problem);
  if (library == nullptr) return problem;
  const auto find = [&](const char* symbol, auto& slot) {
    slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(find_symbol(library, symbol));
    if (slot == nullptr && problem.empty()) problem = fmt::format("{} has no {}", name, symbol);
  };
  find("ncclGetVersion", n.version);
  find("ncclGetUniqueId", n.unique_id);
  find("ncclCommInitRank", n.init_rank);
  find("ncclCommDestroy", n.destroy);
  find("ncclAllReduce", n.all_reduce);
  find("ncclSend", n.send);
  find("ncclRecv", n.recv);
  find("ncclGroupStart", n.group_start);
  find("ncclGroupEnd", n.group_end);
  return problem;
}

class NcclRank {
 public:
  NcclRank(Team& team, const Nccl& nccl, std::uint64_t bytes) : team_(team), n_(nccl) {
    NcclId id{};
    collectively(team, [&] {
      if (team.rank() == 0) nccl_check(n_.unique_id(&id), "ncclGetUniqueId");
    });
    std::vector<NcclId> ids(static_cast<std::size_t>(team.size()));
    team.all_gather(std::as_bytes(std::span(&id, 1)), std::as_writable_bytes(std::span(ids)));
    collectively(team, [&] {
      from_ = DeviceBuffer<std::byte>(bytes);
      to_ = DeviceBuffer<std::byte>(bytes);
      from_.fill(1);
      to_.fill(0);
    });
    // Apart: a rank that cannot allocate must not leave the others in here, which has no deadline.
    collectively(team, [&] {
      nccl_check(n_.init_rank(&comm_, team.size(), ids[0], team.rank()), "ncclCommInitRank");
    });
  }
  ~NcclRank() {
    if (comm_ != nullptr) (void)n_.destroy(comm_);
  }
  NcclRank(const NcclRank&) = delete;
  NcclRank& operator=(const NcclRank&) = delete;

  void all_reduce(std::size_t elements) const {
    nccl_check(n_.all_reduce(from_.data(), to_.data(), elements, kNcclBf16, kNcclSum, comm_,
                             stream_.handle),
               "ncclAllReduce");
  }
  // Ranks 0 and 1: rank 0 to rank 1, or both at once.
  void send_recv(std::size_t bytes, bool both) const {
    const int peer = 1 - team_.rank();
    nccl_check(n_.group_start(), "ncclGroupStart");
    if (both || team_.rank() == 0)
      nccl_check(n_.send(from_.data(), bytes, kNcclChar, peer, comm_, stream_.handle), "ncclSend");
    if (both || team_.rank() == 1)
      nccl_check(n_.recv(to_.data(), bytes, kNcclChar, peer, comm_, stream_.handle), "ncclRecv");
    nccl_check(n_.group_end(), "ncclGroupEnd");
  }
  // Microseconds a call of `repeats` in one stream, warmed up.
  template <typename Call>
  std::vector<double> time_us(int samples, int repeats, Call&& call) const {
    std::vector<double> us;
    for (int sample = 0; sample <= samples; ++sample) {
      team_.barrier();
      const double seconds = timer_.seconds(stream_.handle, [&] {
        for (int i = 0; i < repeats; ++i) call();
      });
      if (sample > 0) us.push_back(seconds * 1e6 / repeats);
    }
    return us;
  }

 private:
  Team& team_;
  const Nccl& n_;
  DeviceBuffer<std::byte> from_;
  DeviceBuffer<std::byte> to_;
  LinkStream stream_;
  LinkTimer timer_;
  NcclComm comm_ = nullptr;
};

}  // namespace

std::string bench_nccl(Team& team, bool shared, const std::string& library,
                       const std::vector<std::uint64_t>& sizes, int samples,
                       const FigureSink& add) {
  if (shared) return "not measured: ranks share a GPU, which NCCL refuses";
  Nccl nccl;
  const std::string problem = open(library, nccl);
  if (!team.agree(problem.empty())) {
    return "not measured: " + (problem.empty() ? "a rank cannot open " + library : problem);
  }
  int number = 0;
  collectively(team, [&] { nccl_check(nccl.version(&number), "ncclGetVersion"); });
  const std::string version =
      fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
  const NcclRank rank(
      team, nccl,
      std::max<std::uint64_t>(*std::max_element(sizes.begin(), sizes.end()), 16 * 6144 * 2));
  for (const std::size_t rows : {1, 2, 4, 8, 16}) {
    add("nccl_all_reduce", "us", rank.time_us(samples, 200, [&] { rank.all_reduce(rows * 6144); }),
        {{"rows", static_cast<std::int64_t>(rows)},
         {"hidden", std::int64_t{6144}},
         {"nccl", version},
         {"method", std::string("200 eager calls in one stream")}});
  }
  for (const std::uint64_t bytes : sizes) {
    for (const bool both : {false, true}) {
      const int repeats = bytes > (64U << 20) ? 5 : 20;
      auto values = rank.time_us(samples, repeats, [&] {
        if (team.rank() < 2) rank.send_recv(bytes, both);
      });
      for (double& x : values) x = static_cast<double>(bytes) / x * 1e-3;
      add("rate", "GB/s", std::move(values),
          {{"transport", std::string("nccl")},
           {"bytes", static_cast<std::int64_t>(bytes)},
           {"direction", std::string(both ? "both" : "one")},
           {"nccl", version},
           {"method", fmt::format("{} eager send/recv in one stream", repeats)}});
    }
  }
  return version;
}

}  // namespace penstock::cuda
