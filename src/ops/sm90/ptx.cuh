// PTX of Hopper that CUDA C++ has no name for: mbarriers, tensor copies, clusters, register
// budgets. One instruction a function; what an instruction orders is said beside it.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace penstock::sm90 {

// ---- addresses
// -------------------------------------------------------------------------------------

// Address of a shared-memory object in the window that the PTX below takes.
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same offset in the shared memory of CTA `cta` of this cluster.
__device__ __forceinline__ std::uint32_t map_to_cta(std::uint32_t address, std::uint32_t cta) {
  std::uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(cta));
  return mapped;
}

__device__ __forceinline__ std::uint32_t cluster_cta_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// ---- mbarriers (addresses are shared_address() results)
// ---------------------------------------------

__device__ __forceinline__ void barrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the copy engine and to the other CTAs of the cluster; a
// cluster or CTA barrier has to follow.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// One arrival that also announces `bytes` of asynchronous copies.
__device__ __forceinline__ void barrier_arrive_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// One arrival with release order at a barrier of this CTA.
__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival at a barrier of another CTA of the cluster; `barrier` comes from map_to_cta(). Orders
// nothing but what the thread itself has read: enough to hand a stage back to a copier after its
// contents are in registers or its matrix instructions are complete. The .release.cluster form
// costs MEMBAR.ALL.GPU on each arrival.
__device__ __forceinline__ void barrier_arrive_remote(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Stores a word in the shared memory of another CTA of the cluster and announces its four bytes at
// that CTA's barrier; both addresses come from map_to_cta().
__device__ __forceinline__ void store_async_u32(std::uint32_t address, std::uint32_t value,
                                                std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address),
      "r"(value), "r"(barrier)
      : "memory");
}

// Waits, with acquire order, until the phase of parity `parity` is complete. It waits for this
// cluster's own copies and threads only, never for another rank, so it carries no deadline.
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "PENSTOCK_WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra PENSTOCK_DONE;\n"
      "bra PENSTOCK_WAIT;\n"
      "PENSTOCK_DONE:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- tensor and bulk copies
// ------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Box of a 2-D tensor at (x, y) to this CTA's shared memory; completes `bytes of the box` on
// barrier.
__device__ __forceinline__ void load_tensor_2d(std::uint32_t destination, const CUtensorMap* map,
                                               std::uint32_t barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], "
      "[%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

// The same box to the same offset of every CTA in `cta_mask`, completing on the barrier at the same
// offset there.
__device__ __forceinline__ void load_tensor_2d_multicast(std::uint32_t destination,
                                                         const CUtensorMap* map,
                                                         std::uint32_t barrier, int x, int y,
                                                         std::uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(cta_mask)
      : "memory");
}

__device__ __forceinline__ void load_tensor_3d(std::uint32_t destination, const CUtensorMap* map,
                                               std::uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, "
      "%5}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void load_tensor_3d_multicast(std::uint32_t destination,
                                                         const CUtensorMap* map,
                                                         std::uint32_t barrier, int x, int y, int z,
                                                         std::uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(cta_mask)
      : "memory");
}

// `bytes` (a multiple of 16) from 16-byte aligned global memory.
__device__ __forceinline__ void load_bulk(std::uint32_t destination, const void* source,
                                          std::uint32_t bytes, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// ---- CTA and cluster
// -------------------------------------------------------------------------------

// Named barrier `id` (1-15; 0 is __syncthreads) over `threads` threads.
__device__ __forceinline__ void named_barrier_sync(std::uint32_t id, std::uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(std::uint32_t id, std::uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// Register budget of the calling warpgroup; every warp of it has to execute the same call.
template <int kRegisters>
__device__ __forceinline__ void register_budget_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void register_budget_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- shared memory
// ---------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(std::uint32_t address, std::uint32_t a,
                                                std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
// The inverse: lane l gets words l % 4 of row l / 4 of each matrix.
__device__ __forceinline__ void load_matrix_x4(std::uint32_t (&words)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_shared_u16(std::uint32_t address, std::uint16_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}
__device__ __forceinline__ float load_shared_f32(std::uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ int load_shared_i32(std::uint32_t address) {
  int value;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}
__device__ __forceinline__ void store_shared_v4(std::uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_shared_v4(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}
// Release and acquire order among the threads of the CTA.
__device__ __forceinline__ void store_release_shared(std::uint32_t address, int value) {
  asm volatile("st.release.cta.shared.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ int load_acquire_shared(std::uint32_t address) {
  int value;
  asm volatile("ld.acquire.cta.shared.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_shared_v2(std::uint32_t address, std::uint32_t x,
                                                std::uint32_t y) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ uint2 load_shared_v2(std::uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
// Sixteen bytes, or one; zero without a read where not `wanted`.
__device__ __forceinline__ uint4 load_shared_v4_if(bool wanted, std::uint32_t address) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "r"(address), "r"(static_cast<int>(wanted)));
  return v;
}
__device__ __forceinline__ std::uint32_t load_shared_u8_if(bool wanted, std::uint32_t address) {
  std::uint32_t v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n"
      "@p ld.shared.u8 %0, [%1];\n}"
      : "=&r"(v)
      : "r"(address), "r"(static_cast<int>(wanted)));
  return v;
}

// ---- global memory
// ---------------------------------------------------------------------------------

// Sixteen bytes that this kernel will not read again: no line in L1.
__device__ __forceinline__ void store_global_v4(void* address, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// The same where `wanted` is true, without a branch.
__device__ __forceinline__ void store_global_v4_if(bool wanted, void* address, uint4 v) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<int>(wanted))
      : "memory");
}
__device__ __forceinline__ void store_release_system(std::uint32_t* address, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// ---- conversions
// -----------------------------------------------------------------------------------

// Two f32 to bf16 (nearest even), `low` in the low half.
__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// Two f32 to E4M3 (nearest even, saturating at 448), `low` in the low byte.
__device__ __forceinline__ std::uint16_t pack_e4m3(float low, float high) {
  std::uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}
// Four E4M3 to f16, exactly: `word`'s low half to `low`. Both halves in one place, so that no shift
// comes between: the conversion reads either half of a register.
__device__ __forceinline__ void unpack_e4m3x4(std::uint32_t& low, std::uint32_t& high,
                                              std::uint32_t word) {
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\n"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(word));
}

// Two f16 to f32, exactly.
__device__ __forceinline__ float2 half2_to_float2(std::uint32_t halves) {
  float2 v;
  asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, "
      "high;\n}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(halves));
  return v;
}

}  // namespace penstock::sm90
