#include "cli/bench/cublaslt_baseline.h"

#include <cublasLt.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include "core/cuda/check.h"
#include "penstock/core/error.h"

namespace penstock::bench {
namespace {

void check(cublasStatus_t status, const char* call) {
  require(status == CUBLAS_STATUS_SUCCESS, ErrorKind::kUnsupported, [&] {
    return fmt::format("{} failed with cublasStatus_t {}", call, static_cast<int>(status));
  });
}

}  // namespace

struct DenseGemm::Impl {
  void* library = nullptr;
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t layout_a = nullptr;  // b of the caller: cuBLAS is column-major
  cublasLtMatrixLayout_t layout_b = nullptr;
  cublasLtMatrixLayout_t layout_d = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  void* workspace = nullptr;
  std::size_t workspace_bytes = std::size_t{64} << 20;

  template <typename F>
  F* find(const char* name) const {
    void* symbol = dlsym(library, name);
    require(symbol != nullptr, ErrorKind::kUnsupported,
            [&] { return fmt::format("libcublasLt has no {}", name); });
    return reinterpret_cast<F*>(symbol);
  }
};

DenseGemm::DenseGemm(const std::string& path, std::int64_t m, std::int64_t n, std::int64_t k,
                     DenseFormat format)
    : impl_(std::make_unique<Impl>()), format_(format) {
  const bool scaled = format == DenseFormat::kBlockScaledFp8;
  const cudaDataType_t type = scaled ? CUDA_R_8F_E4M3 : CUDA_R_16BF;
  Impl& i = *impl_;
  const std::string name = path.empty() ? "libcublasLt.so.13" : path;
  i.library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  require(i.library != nullptr, ErrorKind::kUnsupported,
          [&] { return fmt::format("cannot open {}: {}", name, dlerror()); });
  check(i.find<decltype(cublasLtCreate)>("cublasLtCreate")(&i.handle), "cublasLtCreate");
  check(i.find<decltype(cublasLtMatmulDescCreate)>("cublasLtMatmulDescCreate")(
            &i.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "cublasLtMatmulDescCreate");
  auto* set = i.find<decltype(cublasLtMatmulDescSetAttribute)>("cublasLtMatmulDescSetAttribute");
  const auto set_value = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
    check(set(i.operation, attribute, &value, sizeof(value)), "cublasLtMatmulDescSetAttribute");
  };
  set_value(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set_value(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  if (scaled) {
    set_value(CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
              static_cast<std::int32_t>(CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F));
    set_value(CUBLASLT_MATMUL_DESC_B_SCALE_MODE,
              static_cast<std::int32_t>(CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F));
  }
  auto* layout = i.find<decltype(cublasLtMatrixLayoutCreate)>("cublasLtMatrixLayoutCreate");
  const auto rows_k = static_cast<std::uint64_t>(k);
  check(layout(&i.layout_a, type, rows_k, static_cast<std::uint64_t>(n), k), "layout of b");
  check(layout(&i.layout_b, type, rows_k, static_cast<std::uint64_t>(m), k), "layout of a");
  check(layout(&i.layout_d, CUDA_R_16BF, static_cast<std::uint64_t>(n),
               static_cast<std::uint64_t>(m), n),
        "layout of d");
  PENSTOCK_CUDA_CHECK(cudaMalloc(&i.workspace, i.workspace_bytes));
  // The heuristic looks at the scale pointers' alignment: it wants some before it answers.
  const void* aligned = i.workspace;
  if (scaled) {
    set_value(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, aligned);
    set_value(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, aligned);
  }
  cublasLtMatmulPreference_t preference = nullptr;
  check(i.find<decltype(cublasLtMatmulPreferenceCreate)>("cublasLtMatmulPreferenceCreate")(
            &preference),
        "cublasLtMatmulPreferenceCreate");
  check(i.find<decltype(cublasLtMatmulPreferenceSetAttribute)>(
            "cublasLtMatmulPreferenceSetAttribute")(preference,
                                                    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                    &i.workspace_bytes, sizeof(i.workspace_bytes)),
        "cublasLtMatmulPreferenceSetAttribute");
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  const cublasStatus_t status = i.find<decltype(cublasLtMatmulAlgoGetHeuristic)>(
      "cublasLtMatmulAlgoGetHeuristic")(i.handle, i.operation, i.layout_a, i.layout_b, i.layout_d,
                                        i.layout_d, preference, 1, &result, &found);
  i.find<decltype(cublasLtMatmulPreferenceDestroy)>("cublasLtMatmulPreferenceDestroy")(preference);
  require(status == CUBLAS_STATUS_SUCCESS && found > 0, ErrorKind::kUnsupported, [&] {
    return fmt::format("cuBLASLt {} has no {} algorithm for {} x {} x {} (status {})", version(),
                       scaled ? "block-scaled FP8" : "bf16", m, n, k, static_cast<int>(status));
  });
  i.algorithm = result.algo;
}

DenseGemm::~DenseGemm() {
  Impl& i = *impl_;
  cudaFree(i.workspace);
  // The library stays open: its handle owns device state that the process may still use.
}

std::string DenseGemm::version() const {
  return std::to_string(impl_->find<decltype(cublasLtGetVersion)>("cublasLtGetVersion")());
}

void DenseGemm::run(const void* a, const float* a_scales, const void* b, const float* b_scales,
                    void* d, cudaStream_t stream) {
  Impl& i = *impl_;
  auto* set = i.find<decltype(cublasLtMatmulDescSetAttribute)>("cublasLtMatmulDescSetAttribute");
  if (format_ == DenseFormat::kBlockScaledFp8) {
    check(set(i.operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &b_scales, sizeof(b_scales)),
          "b scales");
    check(set(i.operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &a_scales, sizeof(a_scales)),
          "a scales");
  }
  const float one = 1.0f;
  const float zero = 0.0f;
  check(i.find<decltype(cublasLtMatmul)>("cublasLtMatmul")(
            i.handle, i.operation, &one, b, i.layout_a, a, i.layout_b, &zero, d, i.layout_d, d,
            i.layout_d, &i.algorithm, i.workspace, i.workspace_bytes, stream),
        "cublasLtMatmul");
}

}  // namespace penstock::bench
