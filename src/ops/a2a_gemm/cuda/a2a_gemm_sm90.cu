// The gated GEMM, sm_90a: gemm_main_sm90.cuh over the chunks of all sources, one behind the other.
//
// Before the first step of a chunk the copying thread waits until warp 1 has seen the chunk's row
// block come. K is never split: the accumulators go through all chunks.
//
// Two orders of the chunks. In rotation every CTA's warp 1 watches the words that its own tiles
// need. In arrival order warp 1 of a cluster's first CTA picks, for both, whichever chunk is there:
// the CTAs bring half of W each, so they need one order.
#include <cuda_runtime.h>

#include "ops/a2a_gemm/cuda/a2a_gemm_sm90.h"
#include "ops/a2a_gemm/cuda/gemm_main_sm90.cuh"
#include "penstock/fabric/signal_device.cuh"
#include "penstock/ops/a2a_gemm/layout.h"

namespace penstock::a2a_gemm {
namespace {

using namespace main_loop;

// ---- shared storage

constexpr int kSeenWords = 32;  // one bit an arrival word

// Words that have been seen, as bits in shared memory: warp 1 watches the words in the order in
// which this CTA's tiles need them and sets their bits; the copying thread, which has a pipeline to
// feed, looks at shared memory instead of making the trips to L2 of a poll and an acquire.
struct Seen {
  std::uint32_t bits[kSeenWords];
  std::uint32_t failed;  // a wait has ended without its word
};

constexpr std::uint32_t kSharedBytes =
    kGateOffset +
    static_cast<std::uint32_t>(sizeof(Picks) > sizeof(Seen) ? sizeof(Picks) : sizeof(Seen));
static_assert(kSharedBytes - kGateOffset <= kMostGateBytes,
              "more shared memory than a block of sm_90 can have");

__device__ __forceinline__ ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_block> in_block(
    std::uint32_t& word) {
  return ::cuda::atomic_ref<std::uint32_t, ::cuda::thread_scope_block>(word);
}

// ---- the job

// What a traced call notes: times of the GPU's wall clock, of a tile by its cluster's first CTA.
template <bool kOn>
struct Stamps {
  static __device__ __forceinline__ std::uint64_t now() { return device::global_timer_ns(); }
  // Chunk `s` of a tile was wanted and then could be read; a time's last bits say from whom.
  static __device__ __forceinline__ void chunk(const GemmArgs& args, int linear, int s, int source,
                                               std::uint64_t wanted) {
    if constexpr (kOn) {
      if (cluster_cta_rank() != 0) return;
      std::uint64_t* at = args.trace.tiles + trace_words(args.ranks) * linear + 2 * s;
      at[0] = (wanted & ~kTraceSourceMask) | static_cast<std::uint64_t>(source);
      at[1] = now();
    }
  }
  static __device__ __forceinline__ void tile_end(const GemmArgs& args, int linear) {
    if constexpr (kOn) {
      if (cluster_cta_rank() != 0) return;
      args.trace.tiles[trace_words(args.ranks) * linear + 2 * args.ranks] = now();
    }
  }
  static __device__ __forceinline__ void arrival(const GemmArgs& args, int source, int block) {
    if constexpr (kOn) {
      ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_device> first(
          args.trace.arrivals[source * args.row_blocks + block]);
      first.fetch_min(now(), ::cuda::memory_order_relaxed);
    }
  }
};

template <bool kInArrivalOrder, bool kTraced>
class ChunkJob {
 public:
  using Place = TilePlace;
  using Stamp = Stamps<kTraced>;
  static constexpr bool kPicked = kInArrivalOrder;
  static constexpr bool kOneChunk = false;

  __device__ explicit ChunkJob(const GemmArgs& args) : args_(args) {}
  __device__ const GemmArgs& args() const { return args_; }
  __device__ int tiles() const { return tile_grid(args_.rows, args_.columns, args_.band).tiles(); }
  // tile_place() whose divisors the compiler cannot see to be the same for every tile: it would
  // keep their reciprocals in registers through all of K, which the FP8 consumers do not have.
  __device__ __forceinline__ Place place(int linear) const {
    TileGrid opaque = tile_grid(args_.rows, args_.columns, args_.band);
    asm volatile("" : "+r"(opaque.band), "+r"(opaque.columns), "+r"(opaque.cluster_rows));
    return tile_place(opaque, linear);
  }
  __device__ int chunks() const { return args_.ranks; }
  __device__ bool local(int slab) const { return slab == args_.rank; }
  __device__ int slab(const Place&, int chunk) const {
    return source_of_step(args_.rank, chunk, args_.ranks);
  }
  __device__ int row_block(const Place& place) const {
    return place.cluster_row * kClusterRows / args_.row_block_rows;
  }
  __device__ std::uint16_t* result(const Place&) const { return args_.out; }
  __device__ __forceinline__ void written(const Place&, int linear, int warp) const {
    if constexpr (kTraced) {
      if (warp == 0 && threadIdx.x % 32 == 0) Stamp::tile_end(args_, linear);
    }
  }

 private:
  const GemmArgs& args_;
};

// ---- waiting for a word

// False: the wait failed; the guard has the record.
__device__ bool wait_for_piece(const GemmArgs& args, int source, int block, int step) {
  const device::Guard guard(args.guard);
  const device::WaitSite site{source, step, kArrived, source * args.row_blocks + block};
  if (device::wait_epoch<Scope::kSystem>(args.arrived + source * args.arrival_stride + block,
                                         *args.epoch, guard, site) != WaitStatus::kArrived) {
    return false;
  }
  // The acquire orders ordinary reads; tensor copies are made by another proxy.
  asm volatile("fence.proxy.async;" ::: "memory");
  return true;
}

// ---- chunks in rotation

// Into the L2: this CTA's half of W for all steps of a chunk. W is there however late the chunk is,
// and behind a wait all CTAs ask for it at once.
__device__ __forceinline__ void prefetch_w(const GemmArgs& args, const CUtensorMap* map, int slab,
                                           int column) {
  const int row = slab * args.columns + column * kTileColumns +
                  static_cast<int>(cluster_cta_rank()) * (kTileColumns / kClusterCtas);
#pragma unroll 1
  for (int kb = 0; kb < args.steps; ++kb) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map),
                 "r"(kb * kStepBytes), "r"(row)
                 : "memory");
  }
}

template <bool kTraced>
class SeenGate {
 public:
  using Job = ChunkJob<false, kTraced>;
  __device__ SeenGate(const Job& job, const CUtensorMap* w, Seen& seen)
      : job_(job), w_(w), seen_(seen) {}

  // The copying thread. After a failed wait no wait is made any more: the kernel runs to its end
  // over whatever is there and publishes nothing.
  __device__ int pass(const TilePlace& place, int linear, int, int step, bool has_rows) {
    const GemmArgs& args = job_.args();
    const int source = job_.slab(place, step);
    std::uint64_t wanted = 0;
    if constexpr (kTraced) wanted = Job::Stamp::now();
    if (args.arrived != nullptr && source != args.rank && has_rows && !failed_) {
      failed_ = !seen(source, job_.row_block(place), step, place.column);
    }
    Job::Stamp::chunk(args, linear, step, source, wanted);
    return source;
  }

  // A lane of warp 1: a lane a source, tile after tile in the order of the copying thread, ahead of
  // it.
  __device__ void watch() {
    const GemmArgs& args = job_.args();
    const Walk walk(job_);
    const int step = 1 + static_cast<int>(threadIdx.x) % 32;
    if (args.arrived == nullptr || step >= args.ranks) return;
    const int source = source_of_step(args.rank, step, args.ranks);
    for (int linear = walk.first; linear < walk.total; linear += walk.step) {
      const TilePlace place = job_.place(linear);
      if (place.cluster_row * kClusterRows + walk.cta_rank * kTileRows >= args.rows) continue;
      if (!watch_piece(source, job_.row_block(place), step)) return;
    }
  }

 private:
  static constexpr int kSeenBits = kSeenWords * 32;

  __device__ bool seen(int source, int block, int step, int column) {
    const int bit = source * job_.args().row_blocks + block;
    if (bit >= kSeenBits) return wait_for_piece(job_.args(), source, block, step);
    bool fetched = false;
    while ((in_block(seen_.bits[bit / 32]).load(::cuda::memory_order_acquire) >> (bit % 32) & 1u) ==
           0) {
      if (!fetched) prefetch_w(job_.args(), w_, source, column);
      fetched = true;
      // The watching warp ends each wait by its bit or by this.
      if (in_block(seen_.failed).load(::cuda::memory_order_relaxed) != 0) return false;
    }
    return true;
  }

  // False: no piece need be watched any more.
  __device__ bool watch_piece(int source, int block, int step) {
    const int bit = source * job_.args().row_blocks + block;
    if (bit >= kSeenBits) return true;
    std::uint32_t& word = seen_.bits[bit / 32];
    if ((in_block(word).load(::cuda::memory_order_relaxed) >> (bit % 32) & 1u) != 0) return true;
    if (!wait_for_piece(job_.args(), source, block, step)) {
      in_block(seen_.failed).store(1, ::cuda::memory_order_relaxed);
      return false;
    }
    Job::Stamp::arrival(job_.args(), source, block);
    in_block(word).fetch_or(1u << (bit % 32), ::cuda::memory_order_release);
    return true;
  }

  const Job& job_;
  const CUtensorMap* w_;
  Seen& seen_;
  bool failed_ = false;
};

// ---- chunks as they arrive

// A word of this CTA's shared memory that the cluster's first CTA writes.
__device__ __forceinline__ std::uint32_t load_picked(std::uint32_t address) {
  std::uint32_t value;
  asm volatile("ld.acquire.cluster.shared::cta.u32 %0, [%1];"
               : "=r"(value)
               : "r"(address)
               : "memory");
  return value;
}
// Into the same word of every CTA of the cluster.
__device__ __forceinline__ void store_picked(std::uint32_t address, std::uint32_t value) {
#pragma unroll
  for (std::uint32_t cta = 0; cta < kClusterCtas; ++cta) {
    asm volatile("st.release.cluster.shared::cluster.u32 [%0], %1;" ::"r"(map_to_cta(address, cta)),
                 "r"(value)
                 : "memory");
  }
}

template <bool kTraced>
class PickedGate {
 public:
  using Job = ChunkJob<true, kTraced>;
  __device__ PickedGate(const Job& job, std::uint32_t picks) : job_(job), picks_(picks) {}

  // The copying thread, as SeenGate::pass().
  __device__ int pass(const TilePlace& place, int linear, int index, int step, bool) {
    const GemmArgs& args = job_.args();
    std::uint64_t wanted = 0;
    if constexpr (kTraced) wanted = Job::Stamp::now();
    int source = job_.slab(place, step);
    if (index >= kPickedTiles) {
      if (source != args.rank && !failed_) {
        failed_ = !wait_for_piece(args, source, job_.row_block(place), step);
      }
    } else if (step > 0 && !failed_) {
      std::uint32_t found = 0;
      while ((found = load_picked(order(index)) >> (4 * step) & 15u) == 0) {
        if (load_picked(failed()) != 0) {
          failed_ = true;
          break;
        }
      }
      if (found != 0) source = static_cast<int>(found) - 1;
      asm volatile("fence.proxy.async;" ::: "memory");
    }
    Job::Stamp::chunk(args, linear, step, source, wanted);
    return source;
  }

  // Warp 1. That of the cluster's first CTA picks for both: it has rows whenever the other has. An
  // arrived chunk costs nothing to commit to, so it picks as far ahead as it finds chunks.
  __device__ void watch() {
    const GemmArgs& args = job_.args();
    const Walk walk(job_);
    if (walk.cta_rank != 0) return;
    const device::Guard guard(args.guard);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int source = source_of_step(args.rank, lane % args.ranks, args.ranks);
    const std::uint64_t epoch = *args.epoch;
    int index = 0;
    for (int linear = walk.first; linear < walk.total && index < kPickedTiles;
         linear += walk.step, ++index) {
      const int block = job_.row_block(job_.place(linear));
      const std::uint64_t* word = args.arrived + source * args.arrival_stride + block;
      bool open = lane > 0 && lane < args.ranks;
      std::uint32_t picked = static_cast<std::uint32_t>(args.rank) + 1;
      int count = 1;
      device::WaitClock clock;
      while (count < args.ranks) {
        const bool there = open && epoch_reached(device::load_relaxed<Scope::kSystem>(word), epoch);
        const std::uint32_t arrived = __ballot_sync(0xffffffffu, there);
        if (arrived == 0) {
          if (!poll(guard, clock, open, word, epoch, block)) return;
          continue;
        }
        if (there) {
          (void)device::load_acquire<Scope::kSystem>(word);
          Job::Stamp::arrival(args, source, block);
          open = false;
        }
        __syncwarp();
        for (std::uint32_t left = arrived; left != 0; left &= left - 1, ++count) {
          const int step = __ffs(static_cast<int>(left)) - 1;
          picked |= static_cast<std::uint32_t>(source_of_step(args.rank, step, args.ranks) + 1)
                    << (4 * count);
        }
        if (lane == 0) store_picked(order(index), picked);
        clock = device::WaitClock{};
      }
    }
  }

 private:
  __device__ std::uint32_t order(int index) const {
    return picks_ + static_cast<std::uint32_t>(index) * 4;
  }
  __device__ std::uint32_t failed() const { return order(kPickedTiles); }

  // Behind a look that found nothing. False: the wait is over; the first chunk that is missing goes
  // on record.
  __device__ bool poll(const device::Guard& guard, device::WaitClock& clock, bool open,
                       const std::uint64_t* word, std::uint64_t epoch, int block) {
    const WaitStatus mine = guard.poll(clock);
    // One lane's answer for all: the lanes' clocks and looks may differ.
    const auto status =
        static_cast<WaitStatus>(__shfl_sync(0xffffffffu, static_cast<int>(mine), 0));
    if (status == WaitStatus::kArrived) return true;
    const int first = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, open))) - 1;
    if (static_cast<int>(threadIdx.x) % 32 == first) {
      const GemmArgs& args = job_.args();
      const int source = source_of_step(args.rank, first, args.ranks);
      (void)guard.fail(status, clock, {source, first, kArrived, source * args.row_blocks + block},
                       epoch, device::load_relaxed<Scope::kSystem>(word));
      store_picked(failed(), 1);
    }
    return false;
  }

  const Job& job_;
  std::uint32_t picks_;
  bool failed_ = false;
};

// ---- the kernel

// The last CTA of the grid tells every source that its chunk has been read.
__device__ __forceinline__ void publish_consumed(const GemmArgs& args) {
  ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_device> finished(*args.finished);
  const std::uint64_t before = finished.fetch_add(1, ::cuda::memory_order_acq_rel);
  if ((before + 1) % gridDim.x != 0) return;
  const device::Guard guard(args.guard);
  if (guard.aborted()) return;
  const std::uint64_t epoch = *args.epoch;
  for (int peer = 0; peer < args.ranks; ++peer) {
    if (args.consumed[peer] != nullptr) {
      device::store_release<Scope::kSystem>(args.consumed[peer], epoch);
    }
  }
}

template <Format kFormat, bool kInArrivalOrder, bool kTraced>
__global__ void __cluster_dims__(kClusterCtas, 1, 1) __launch_bounds__(kThreads, 1)
    a2a_gemm_sm90(const __grid_constant__ GemmArgs args, const __grid_constant__ GemmMaps maps) {
  extern __shared__ __align__(1024) unsigned char storage[];
  const std::uint32_t shared = shared_address(storage);
  const ChunkJob<kInArrivalOrder, kTraced> job(args);
  if constexpr (kInArrivalOrder) {
    Picks& picks = *reinterpret_cast<Picks*>(storage + kGateOffset);
    for (int i = static_cast<int>(threadIdx.x); i < kPickedTiles; i += kThreads) picks.order[i] = 0;
    if (threadIdx.x == 0) picks.failed = 0;
    PickedGate<kTraced> gate(job, shared + kGateOffset);
    run_roles<kFormat>(job, maps, shared, &picks, gate, [&] { gate.watch(); });
  } else {
    Seen& seen = *reinterpret_cast<Seen*>(storage + kGateOffset);
    if (threadIdx.x == 0) seen = Seen{};
    SeenGate<kTraced> gate(job, &maps.w, seen);
    run_roles<kFormat>(job, maps, shared, nullptr, gate, [&] { gate.watch(); });
  }
  if (threadIdx.x == 0 && args.finished != nullptr) publish_consumed(args);
}

using Kernel = void (*)(GemmArgs, GemmMaps);
template <Format kFormat>
Kernel kernel_of(ChunkOrder order, bool traced) {
  if (order == ChunkOrder::kArrival) {
    return traced ? a2a_gemm_sm90<kFormat, true, true> : a2a_gemm_sm90<kFormat, true, false>;
  }
  return traced ? a2a_gemm_sm90<kFormat, false, true> : a2a_gemm_sm90<kFormat, false, false>;
}
Kernel kernel_of(Format format, ChunkOrder order, bool traced) {
  return format == Format::kBf16 ? kernel_of<Format::kBf16>(order, traced)
                                 : kernel_of<Format::kFp8>(order, traced);
}

}  // namespace

cudaError_t load_gemm_sm90() {
  for (const Format format : {Format::kBf16, Format::kFp8}) {
    for (const ChunkOrder order : {ChunkOrder::kRotation, ChunkOrder::kArrival}) {
      for (const bool traced : {false, true}) {
        const cudaError_t status = cudaFuncSetAttribute(kernel_of(format, order, traced),
                                                        cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                        static_cast<int>(kSharedBytes));
        if (status != cudaSuccess) return status;
      }
    }
  }
  return cudaSuccess;
}

cudaError_t launch_gemm_sm90(const GemmArgs& args, const GemmMaps& maps, Format format, int ctas,
                             cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ctas / kClusterCtas * kClusterCtas));
  // With everything there, both orders are one.
  const ChunkOrder order = args.arrived == nullptr ? ChunkOrder::kRotation : args.order;
  const Kernel kernel = kernel_of(format, order, args.trace.tiles != nullptr);
  kernel<<<grid, kThreads, kSharedBytes, stream>>>(args, maps);
  return cudaGetLastError();
}

}  // namespace penstock::a2a_gemm
