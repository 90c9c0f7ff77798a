#include "ops/moe_stage2/cuda/nccl_all_to_all.h"

#include <fmt/format.h>

#include <type_traits>
#include <vector>

#include "core/cuda/check.h"
#include "fabric/cuda/driver.h"
#include "penstock/core/error.h"

namespace penstock::moe_stage2 {
namespace {

// The part of NCCL's C interface that is called, declared here because its header need not be
// installed.
struct NcclId {
  char bytes[128];
};
using NcclComm = void*;
struct Calls {
  int (*version)(int*) = nullptr;
  int (*unique_id)(NcclId*) = nullptr;
  int (*init_rank)(NcclComm*, int, NcclId, int) = nullptr;
  int (*destroy)(NcclComm) = nullptr;
  int (*send)(const void*, std::size_t, int, int, NcclComm, cudaStream_t) = nullptr;
  int (*recv)(void*, std::size_t, int, int, NcclComm, cudaStream_t) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
};
constexpr int kNcclChar = 0;

void nccl_check(int status, const char* call) {
  require(status == 0, ErrorKind::kBackend,
          [&] { return fmt::format("{} returned {}", call, status); });
}

std::string open(const std::string& name, Calls& calls) {
  std::string problem;
  void* library = cuda::open_library(name.c_str(), &problem);
  if (library == nullptr) return problem;
  const auto find = [&](const char* symbol, auto& slot) {
    slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(
        cuda::find_symbol(library, symbol));
    if (slot == nullptr && problem.empty()) problem = fmt::format("{} has no {}", name, symbol);
  };
  find("ncclGetVersion", calls.version);
  find("ncclGetUniqueId", calls.unique_id);
  find("ncclCommInitRank", calls.init_rank);
  find("ncclCommDestroy", calls.destroy);
  find("ncclSend", calls.send);
  find("ncclRecv", calls.recv);
  find("ncclGroupStart", calls.group_start);
  find("ncclGroupEnd", calls.group_end);
  return problem;
}

class Exchange final : public NcclAllToAll {
 public:
  Exchange(Team& team, const Calls& calls) : calls_(calls), rank_(team.rank()) {
    NcclId id{};
    collectively(team, [&] {
      if (rank_ == 0) nccl_check(calls_.unique_id(&id), "ncclGetUniqueId");
    });
    std::vector<NcclId> ids(static_cast<std::size_t>(team.size()));
    team.all_gather(std::as_bytes(std::span(&id, 1)), std::as_writable_bytes(std::span(ids)));
    collectively(team, [&] {
      nccl_check(calls_.init_rank(&comm_, team.size(), ids[0], rank_), "ncclCommInitRank");
    });
  }
  ~Exchange() override {
    if (comm_ != nullptr) (void)calls_.destroy(comm_);
  }
  void exchange(std::span<const NcclPiece> pieces, cudaStream_t stream) override {
    nccl_check(calls_.group_start(), "ncclGroupStart");
    for (int peer = 0; peer < static_cast<int>(pieces.size()); ++peer) {
      if (peer == rank_) continue;
      const NcclPiece& piece = pieces[static_cast<std::size_t>(peer)];
      nccl_check(calls_.send(piece.send, piece.send_bytes, kNcclChar, peer, comm_, stream),
                 "ncclSend");
      nccl_check(calls_.recv(piece.receive, piece.receive_bytes, kNcclChar, peer, comm_, stream),
                 "ncclRecv");
    }
    nccl_check(calls_.group_end(), "ncclGroupEnd");
  }
  std::string version() const override {
    int number = 0;
    nccl_check(calls_.version(&number), "ncclGetVersion");
    return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
  }

 private:
  Calls calls_;
  int rank_;
  NcclComm comm_ = nullptr;
};

}  // namespace

std::unique_ptr<NcclAllToAll> open_nccl_all_to_all(Team& team, bool shared,
                                                   const std::string& library,
                                                   std::string& problem) {
  Calls calls;
  problem = shared ? "ranks share a GPU, which NCCL refuses" : open(library, calls);
  if (!team.agree(problem.empty())) {
    if (problem.empty()) problem = "a rank cannot open " + library;
    return nullptr;
  }
  return std::make_unique<Exchange>(team, calls);
}

}  // namespace penstock::moe_stage2
