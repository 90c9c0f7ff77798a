// The operator: all-to-all and the GEMM that consumes it, gated piece by piece.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "penstock/core/stream.h"
#include "penstock/fabric/transport.h"
#include "penstock/ops/a2a_gemm/heuristics.h"
#include "penstock/ops/a2a_gemm/reference.h"
#include "penstock/ops/a2a_gemm/shape.h"
#include "penstock/ops/timeline.h"

namespace penstock::a2a_gemm {

enum class Fuse : std::uint8_t {
  kAuto,    // heuristics decide
  kAlways,  // gated piece by piece
  kNever,   // all pieces first
};

struct Options {
  TransportKind transport = TransportKind::kCopyEngine;
  ChunkOrder order = ChunkOrder::kRotation;
  Fuse fuse = Fuse::kAuto;
  std::int32_t row_block_rows = 0;  // 0: heuristics; else a multiple of 256
  // FP8 on the wire for a caller who has bf16: x is [total_rows, depth] bf16, x_scales are not
  // read, and each call first makes E4M3 and its scales of it (quantise_x()), for the own chunk
  // too. shape.format must be fp8, W and its scales as there. Adds the rounding of X to the
  // result's error: about 2.6% of its norm on normal data (docs/a2a-gemm.md).
  bool quantise_x = false;
  std::chrono::nanoseconds deadline{0};  // of one wait; 0: the team's
  CpuEngineOptions engine;               // cpu, copy_engine only
  // Gets what each call did when. cuda: at collect_timeline(), and the calls run a GEMM that notes
  // times, which costs it some percent.
  Timeline* timeline = nullptr;
  std::int32_t copy_ctas = 8;  // cuda, sm only: SMs that copy beside the GEMM; even, 2 to 32
  std::int32_t device = -1;    // cuda only: the rank's GPU; -1: the calling thread's current one
};

// One rank's operator. One thread of the rank at a time; two instances of one rank may be used from
// two threads.
class A2aGemm {
 public:
  virtual ~A2aGemm() = default;

  // Collective: every rank calls it with its own operands, in the same order. On cpu it returns
  // when `out` is complete; up to two calls are in flight between ranks, since a rank that is done
  // may start its next call while a peer still reads the previous one's chunks. X may be rewritten
  // when run() returns. On cuda every pointer is device memory, 16-byte aligned, and the call only
  // enqueues: `out` is complete and X may be rewritten in the order of `stream`. It allocates
  // nothing and may be captured in a graph, whose replays take new contents from the same memory
  // (prepare() the streams first, track() after each replay). Call number and graph order choose
  // the slot: every rank makes the same calls and replays in the same order. A graph of one call
  // replayed over and over uses one slot, a graph of two both.
  // Operands' contents may change from call to call, shapes may not. Deterministic with
  // ChunkOrder::kRotation: the result depends on the operands alone. With kArrival each tile adds
  // its chunks in the order in which they came, so two runs may differ in the last bit. Errors:
  // InvalidArgument for a missing or misaligned operand; Fault when a peer does not come in time or
  // any rank faulted (out is then undefined, on cuda also that of an earlier call that was not
  // complete when a rank faulted); the team's rearm() makes the operator usable again.
  virtual void run(Stream stream, const Operands& operands) = 0;

  // cuda, before the first run() or replay on a stream that other ranks' kernels may have to wait
  // for: sets it up now (run() does it by itself, except while capturing). Waits for the stream.
  // Nothing on cpu.
  virtual void prepare(Stream stream) { (void)stream; }
  // cuda, after each launch of a graph that holds run(): tells the rank's fault handling where work
  // is. Nothing on cpu.
  virtual void track(Stream stream) { (void)stream; }
  // cuda, with Options::timeline: waits for the last call that was no replay and adds its events
  // (lane: a cluster of CTAs) by the GPU's wall clock, which ranks on other GPUs do not share.
  // Nothing on cpu, where run() adds them.
  virtual void collect_timeline() {}

  virtual const Shape& shape() const noexcept = 0;
  virtual const Config& config() const noexcept = 0;
  virtual const Layout& layout() const noexcept = 0;
  // What has been moved, by the transport or by direct stores. cuda: what run() has enqueued;
  // replays of a graph are not counted.
  virtual TransportCounters counters() const noexcept = 0;
};

// Memory outside the window that run() needs, bytes.
std::uint64_t workspace_bytes(const Shape& shape, const Options& options);
// Bytes of this operator's window at every rank.
std::uint64_t window_bytes(const Shape& shape, const Options& options);

// Collective. The CPU operator over host memory. Throws InvalidArgument on every rank when the
// shapes or options of the ranks differ or are wrong, ResourceExhausted when the window does not
// fit.
std::unique_ptr<A2aGemm> make_cpu_a2a_gemm(TeamHandle team, const Shape& shape,
                                           const Options& options = {});

// Collective. The CUDA operator on the rank's GPU. Several ranks of a process may share a GPU
// (cuda::prepare_process() rules apply); a few SMs of each then stay free for local copies. Also
// throws Unsupported on every rank: no Hopper GPU, transport direct (nothing here computes X), a
// build without CUDA.
std::unique_ptr<A2aGemm> make_cuda_a2a_gemm(TeamHandle team, const Shape& shape,
                                            const Options& options = {});

}  // namespace penstock::a2a_gemm
