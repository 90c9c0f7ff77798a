// NCCL as the baseline's way of moving rows: opened by name, never linked.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "penstock/fabric/team.h"

namespace penstock::moe_stage2 {

// What one rank exchanges with one peer.
struct NcclPiece {
  const unsigned char* send = nullptr;
  unsigned char* receive = nullptr;
  std::uint64_t send_bytes = 0;
  std::uint64_t receive_bytes = 0;
};

class NcclAllToAll {
 public:
  virtual ~NcclAllToAll() = default;
  // Enqueues one grouped exchange; pieces[p] is peer p's, the own one is skipped. Collective.
  virtual void exchange(std::span<const NcclPiece> pieces, cudaStream_t stream) = 0;
  virtual std::string version() const = 0;  // "2.28.9"
};

// Collective, this rank's device current. Null on every rank if one cannot open `library` or ranks
// share a GPU, which NCCL refuses; `problem` then says why. NCCL waits without deadlines.
std::unique_ptr<NcclAllToAll> open_nccl_all_to_all(Team& team, bool shared,
                                                   const std::string& library,
                                                   std::string& problem);

}  // namespace penstock::moe_stage2
