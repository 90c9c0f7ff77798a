// cuBLASLt's dense GEMMs, found by dlopen, as the baseline beside our kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

namespace penstock::bench {

enum class DenseFormat {
  kBlockScaledFp8,  // E4M3, one f32 scale per 1 x 128 of a and per 128 x 128 of b
  kBf16,
};

// d[m, n] bf16 = a[m, k] x b[n, k]^T, f32 accumulation.
class DenseGemm {
 public:
  // Opens libcublasLt.so.13 (or `path`), picks the first algorithm of the library's heuristic.
  // Throws Error(kUnsupported) naming what is missing: the library, its version, or the format.
  DenseGemm(const std::string& path, std::int64_t m, std::int64_t n, std::int64_t k,
            DenseFormat format = DenseFormat::kBlockScaledFp8);
  ~DenseGemm();
  DenseGemm(const DenseGemm&) = delete;
  DenseGemm& operator=(const DenseGemm&) = delete;

  // Enqueues. a_scales has m * k / 128 values, b_scales n / 128 * k / 128 (k / 128 rounded up to
  // 4); bf16 has none.
  void run(const void* a, const float* a_scales, const void* b, const float* b_scales, void* d,
           cudaStream_t stream);
  std::string version() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  DenseFormat format_;
};

using BlockScaledGemm = DenseGemm;

}  // namespace penstock::bench
