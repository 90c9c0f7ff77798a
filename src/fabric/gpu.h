// What `penstock doctor` and `penstock bench link` ask of the CUDA back end, in plain C++. A build
// without that back end has the same functions; they say so.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "penstock/fabric/doctor.h"
#include "penstock/fabric/link_bench.h"
#include "penstock/fabric/team.h"

namespace penstock {

// Why no GPU can be used here, empty if one can. The first call also prepares the process
// (cuda::prepare_process): make it before anything else that touches a GPU, from one thread.
std::string gpu_unavailable();

struct GpuCard {
  int device = 0;
  std::string name;
  std::string pci_bus_id;
  std::string compute_capability;  // "9.0"
  int sms = 0;
  std::uint64_t memory_bytes = 0;
  int sm_clock_mhz = -1;    // now; -1: NVML did not say
  int nvlinks_active = -1;  // the same
  std::string problem;      // why NVML did not say
};
// Whether kernels of `from` may use the memory of `to`.
struct GpuLink {
  int from = 0;
  int to = 0;
  bool load_store = false;
  bool native_atomics = false;
};
struct GpuMachine {
  std::string driver;    // "580.159.04"; empty without NVML
  int cuda_version = 0;  // of the driver, as CUDA writes it: 13000
  std::vector<GpuCard> cards;
  std::vector<GpuLink> links;  // every ordered pair of different GPUs
};
// Unsupported with gpu_unavailable()'s words if there is none.
GpuMachine describe_gpus();
// The GPU of a rank: ranks go round the GPUs, so that more ranks than GPUs share them.
int gpu_of_rank(int local_rank);

// How the copy engine's proxy writes signals from a rank to a peer, as probed at start.
struct SignalPath {
  int from = 0;
  int to = 0;
  std::string chosen;           // "device_copy" or "stream_write"
  double device_copy_us = 0;    // a 4 KB copy and its signal, back to back
  double stream_write_us = -1;  // the same; -1: refused, or the word did not arrive
};
struct GpuSelfTest {
  std::vector<TransportReport> transports;
  std::vector<SignalPath> signals;  // every ordered pair, a rank to itself included
};
// Collective: self_test() on GPU ranks, this rank on `device`. The same report on every rank.
// Throws what the fabric throws: Unsupported where ranks cannot share or reach GPUs.
GpuSelfTest gpu_self_test(const TeamHandle& team, int device, const SelfTestOptions& options);

// One measured figure and its conditions (transport, bytes, direction, method, ...).
using LinkValue = std::variant<std::int64_t, double, std::string>;
struct LinkFigure {
  std::string figure;  // "rate", "descriptor_to_visible", "packet_all_reduce", ...
  std::string unit;    // "GB/s", "us", "ms"
  int samples = 0;
  double median = 0;
  double p10 = 0;
  double p90 = 0;
  std::vector<std::pair<std::string, LinkValue>> conditions;
};
struct GpuLinkOptions {
  std::uint64_t min_bytes = 4096;
  std::uint64_t max_bytes = 256ULL << 20;  // sizes double from min to max; 1.44 MB is added
  int samples = 20;                        // of a rate; latencies take more
  std::string nccl = "libnccl.so.2";       // opened by name for the column beside
};
struct GpuLinkBench {
  std::vector<LinkFigure> figures;  // on rank 0; empty on the others
  std::string nccl;                 // "2.28.9", or why there is no such column
};
// Collective. Ranks 0 and 1 measure the link, all ranks the packet all-reduce and NCCL; rank r runs
// on `device`. Needs two ranks (InvalidArgument). Every copied byte is compared once a size and
// transport (Backend if one is wrong). Throws what the fabric throws.
GpuLinkBench gpu_bench_link(const TeamHandle& team, int device, const GpuLinkOptions& options);

}  // namespace penstock
