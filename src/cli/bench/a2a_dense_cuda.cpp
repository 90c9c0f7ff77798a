#include "cli/bench/a2a_contest.h"
#include "cli/bench/cublaslt_baseline.h"

namespace penstock::bench {

using namespace a2a_gemm;

namespace {

class CublasLt final : public DenseBaseline {
 public:
  CublasLt(const std::string& library, std::int64_t m, std::int64_t n, std::int64_t k,
           Format format)
      : gemm_(library, m, n, k,
              format == Format::kBf16 ? DenseFormat::kBf16 : DenseFormat::kBlockScaledFp8) {}
  void run(const void* a, const float* a_scales, const void* b, const float* b_scales, void* d,
           Stream stream) override {
    gemm_.run(a, a_scales, b, b_scales, d, static_cast<cudaStream_t>(stream.handle));
  }

 private:
  DenseGemm gemm_;
};

}  // namespace

DenseFactory cublaslt_baseline(const std::string& library) {
  return [library](std::int64_t m, std::int64_t n, std::int64_t k, Format format) {
    return std::unique_ptr<DenseBaseline>(std::make_unique<CublasLt>(library, m, n, k, format));
  };
}

}  // namespace penstock::bench
