#include "ops/moe_stage2/cuda/nccl_all_to_all.h"

#include "fabric/cuda/nccl.h"

namespace penstock::moe_stage2 {
namespace {

using cuda::kNcclChar;
using cuda::Nccl;
using cuda::nccl_check;

class Exchange final : public NcclAllToAll {
 public:
  Exchange(Team& team, const Nccl& nccl) : nccl_(team, nccl), rank_(team.rank()) {}

  void exchange(std::span<const NcclPiece> pieces, cudaStream_t stream) override {
    const Nccl& calls = nccl_.calls();
    nccl_check(calls.group_start(), "ncclGroupStart");
    for (int peer = 0; peer < static_cast<int>(pieces.size()); ++peer) {
      if (peer == rank_) continue;
      const NcclPiece& piece = pieces[static_cast<std::size_t>(peer)];
      nccl_check(calls.send(piece.send, piece.send_bytes, kNcclChar, peer, nccl_.comm(), stream),
                 "ncclSend");
      nccl_check(
          calls.recv(piece.receive, piece.receive_bytes, kNcclChar, peer, nccl_.comm(), stream),
          "ncclRecv");
    }
    nccl_check(calls.group_end(), "ncclGroupEnd");
  }
  std::string version() const override { return nccl_version(nccl_.calls()); }

 private:
  cuda::NcclRank nccl_;
  int rank_;
};

}  // namespace

std::unique_ptr<NcclAllToAll> open_nccl_all_to_all(Team& team, bool shared,
                                                   const std::string& library,
                                                   std::string& problem) {
  Nccl nccl;
  problem = cuda::open_nccl(team, shared, library, nccl);
  if (!problem.empty()) return nullptr;
  return std::make_unique<Exchange>(team, nccl);
}

}  // namespace penstock::moe_stage2
