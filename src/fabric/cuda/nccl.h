// NCCL as benchmarks use it beside our own transports, loaded at run time where it is installed.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "penstock/fabric/team.h"

namespace penstock::cuda {

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
inline constexpr int kNcclChar = 0;
inline constexpr int kNcclBf16 = 9;
inline constexpr int kNcclSum = 0;

// Throws Backend for a status other than success; `call` is the function's name.
void nccl_check(int status, const char* call);

// Collective. Opens the library named `library` on every rank. Empty if all ranks have all that is
// called; else why not, and nothing may be called.
std::string open_nccl(Team& team, bool shared_gpu, const std::string& library, Nccl& nccl);

// "2.28.3".
std::string nccl_version(const Nccl& nccl);

// This rank's communicator of the whole team. Creation is collective and, inside NCCL, without a
// deadline: whatever may fail on one rank comes before it.
class NcclRank {
 public:
  NcclRank(Team& team, const Nccl& nccl);

  const Nccl& calls() const noexcept { return nccl_; }
  NcclComm comm() const noexcept { return comm_.handle; }

 private:
  // Owns the communicator by itself: if it could not be made on another rank, the constructor
  // throws on this one, too.
  struct Comm {
    int (*destroy)(NcclComm) = nullptr;
    NcclComm handle = nullptr;
    explicit Comm(int (*call)(NcclComm)) : destroy(call) {}
    ~Comm() {
      if (handle != nullptr) (void)destroy(handle);
    }
    Comm(const Comm&) = delete;
    Comm& operator=(const Comm&) = delete;
  };
  Nccl nccl_;
  Comm comm_;
};

}  // namespace penstock::cuda
