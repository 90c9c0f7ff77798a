// Device pieces of the decode layer: packets inside one GPU, bulk copies, tensor-core fragments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace penstock::decode::device {

// A packet inside one GPU: 12 bytes of payload and their tag in one 16-byte access. The fabric's
// packets have system scope; these have GPU scope.
__device__ __forceinline__ uint4 load_local_packet(const uint4* slot) {
  std::uint64_t low;
  std::uint64_t high;
  asm volatile(
      "{\n\t.reg .b128 packet;\n\tld.relaxed.gpu.global.b128 packet, [%2];\n\t"
      "mov.b128 {%0, %1}, packet;\n\t}"
      : "=l"(low), "=l"(high)
      : "l"(slot)
      : "memory");
  return make_uint4(static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32),
                    static_cast<std::uint32_t>(high), static_cast<std::uint32_t>(high >> 32));
}
__device__ __forceinline__ void store_local_packet(uint4* slot, std::uint32_t a, std::uint32_t b,
                                                   std::uint32_t c, std::uint32_t tag) {
  const std::uint64_t low = a | static_cast<std::uint64_t>(b) << 32;
  const std::uint64_t high = c | static_cast<std::uint64_t>(tag) << 32;
  asm volatile(
      "{\n\t.reg .b128 packet;\n\tmov.b128 packet, {%1, %2};\n\t"
      "st.relaxed.gpu.global.b128 [%0], packet;\n\t}" ::"l"(slot),
      "l"(low), "l"(high)
      : "memory");
}
__device__ __forceinline__ uint4 load_system_packet(const uint4* slot) {
  std::uint64_t low;
  std::uint64_t high;
  asm volatile(
      "{\n\t.reg .b128 packet;\n\tld.relaxed.sys.global.b128 packet, [%2];\n\t"
      "mov.b128 {%0, %1}, packet;\n\t}"
      : "=l"(low), "=l"(high)
      : "l"(slot)
      : "memory");
  return make_uint4(static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32),
                    static_cast<std::uint32_t>(high), static_cast<std::uint32_t>(high >> 32));
}
__device__ __forceinline__ void store_system_packet(uint4* slot, std::uint32_t a, std::uint32_t b,
                                                    std::uint32_t c, std::uint32_t tag) {
  const std::uint64_t low = a | static_cast<std::uint64_t>(b) << 32;
  const std::uint64_t high = c | static_cast<std::uint64_t>(tag) << 32;
  asm volatile(
      "{\n\t.reg .b128 packet;\n\tmov.b128 packet, {%1, %2};\n\t"
      "st.relaxed.sys.global.b128 [%0], packet;\n\t}" ::"l"(slot),
      "l"(low), "l"(high)
      : "memory");
}

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(std::uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool barrier_try_wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ std::uint32_t load_acquire_shared(std::uint32_t address) {
  std::uint32_t v;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_release_shared(std::uint32_t address, std::uint32_t v) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Copies, and has the barrier's phase wait for the bytes; whoever calls it arrives after the
// phase's last copy. Weights are read once a layer: evict-first keeps mailboxes and cache rows in
// L2.
__device__ __forceinline__ void bulk_load(std::uint32_t to, const void* from, std::uint32_t bytes,
                                          std::uint32_t barrier, std::uint64_t policy) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ std::uint64_t evict_first_policy() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void prefetch_l2(const void* from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// Not volatile: the compiler may overlap them. The address must come from a point after the barrier
// or wait that makes the data valid (see pin()).
__device__ __forceinline__ uint4 load_shared(std::uint32_t address) {
  uint4 v;
  asm("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "r"(address));
  return v;
}
// Volatile: weights must be out of their slot before it is handed back.
__device__ __forceinline__ uint4 take_shared(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ float4 take_shared_f32(std::uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
// Makes an address depend on this point of the program: no load from it moves above.
__device__ __forceinline__ std::uint32_t pin(std::uint32_t address) {
  asm volatile("" : "+r"(address)::"memory");
  return address;
}

// Two E4M3 as two f16, exact (Hopper converts in hardware).
__device__ __forceinline__ std::uint32_t widen_e4m3(std::uint32_t pair) {
  std::uint32_t out;
  asm("{\n\t.reg .b16 q;\n\tcvt.u16.u32 q, %1;\n\tcvt.rn.f16x2.e4m3x2 %0, q;\n\t}"
      : "=r"(out)
      : "r"(pair));
  return out;
}
// D = A B + C, A: 16 x 16, B: 16 x 8.
__device__ __forceinline__ void mma_f16(float (&d)[4], std::uint32_t a0, std::uint32_t a1,
                                        std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                        std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4],
                                         std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void load_matrix(std::uint32_t (&a)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrix_transposed(std::uint32_t (&a)[4],
                                                       std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ float bf16_low(std::uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float bf16_high(std::uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000U);
}
__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
__device__ __forceinline__ float round_bf16(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}
__device__ __forceinline__ std::uint32_t pack_f16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffU, x, d);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, d));
  return x;
}
// 2^-e and 2^e with e such that amax * 2^-e lies in [2^14, 2^15): a row in f16 keeps 11 bits of
// all that is within 2^-28 of its largest value. Powers of two, so that nothing else changes.
__device__ __forceinline__ void row_scale(float amax, float& down, float& up) {
  int e = static_cast<int>((__float_as_uint(amax) >> 23) & 0xffU) - 127 - 14;
  e = max(-100, min(100, e));
  if (amax == 0.0F) e = 0;
  down = __uint_as_float(static_cast<std::uint32_t>(127 - e) << 23);
  up = __uint_as_float(static_cast<std::uint32_t>(127 + e) << 23);
}

}  // namespace penstock::decode::device
