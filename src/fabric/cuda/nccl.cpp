#include "fabric/cuda/nccl.h"

#include <fmt/format.h>

#include <span>
#include <type_traits>
#include <vector>

#include "fabric/cuda/driver.h"
#include "penstock/core/error.h"

namespace penstock::cuda {
namespace {

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

}  // namespace

void nccl_check(int status, const char* call) {
  require(status == 0, ErrorKind::kBackend,
          [&] { return fmt::format("{} returned {}", call, status); });
}

std::string open_nccl(Team& team, bool shared_gpu, const std::string& library, Nccl& nccl) {
  std::string problem = shared_gpu ? "ranks share a GPU, which NCCL refuses" : open(library, nccl);
  if (!team.agree(problem.empty()) && problem.empty()) problem = "a rank cannot open " + library;
  return problem;
}

std::string nccl_version(const Nccl& nccl) {
  int number = 0;
  nccl_check(nccl.version(&number), "ncclGetVersion");
  return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

NcclRank::NcclRank(Team& team, const Nccl& nccl) : nccl_(nccl), comm_(nccl.destroy) {
  NcclId id{};
  collectively(team, [&] {
    if (team.rank() == 0) nccl_check(nccl_.unique_id(&id), "ncclGetUniqueId");
  });
  std::vector<NcclId> ids(static_cast<std::size_t>(team.size()));
  team.all_gather(std::as_bytes(std::span(&id, 1)), std::as_writable_bytes(std::span(ids)));
  collectively(team, [&] {
    nccl_check(nccl_.init_rank(&comm_.handle, team.size(), ids[0], team.rank()),
               "ncclCommInitRank");
  });
}

}  // namespace penstock::cuda
