#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "cli/bench/a2a_contest.h"
#include "penstock/core/thread_pool.h"

namespace penstock::bench {

using namespace a2a_gemm;

namespace {

void fill(ThreadPool& pool, const Shape& shape, std::vector<std::byte>& out,
          const ValueStream& values) {
  const auto size = static_cast<std::size_t>(shape.element_bytes());
  pool.parallel_for(out.size() / size, 1 << 16, [&](std::size_t begin, std::size_t end, int) {
    for (std::size_t i = begin; i < end; ++i) {
      if (shape.format == Format::kBf16) {
        const Bf16 value = values.bf16(i);
        std::memcpy(out.data() + i * size, &value, size);
      } else {
        out[i] = std::byte{values.e4m3(i).bits};
      }
    }
  });
}

double value(const Shape& shape, const ValueStream& values, std::int64_t i) {
  const auto at = static_cast<std::uint64_t>(i);
  return static_cast<double>(shape.format == Format::kBf16 ? values.bf16(at).to_float()
                                                           : values.e4m3(at).to_float());
}

std::int64_t stride_of(const Shape& shape) {
  return (total_rows(shape) + kUnit - 1) / kUnit * kUnit;
}

// Row `x_row` of source's X times row `column` of W[slab], in f64.
double product_f64(const A2aProblem& p, int source, std::int64_t x_row, int slab,
                   std::int64_t column) {
  const Shape& s = p.shape;
  const std::int64_t w_row = static_cast<std::int64_t>(slab) * s.columns + column;
  double sum = 0.0;
  for (std::int32_t begin = 0; begin < s.depth; begin += a2a_gemm::kScaleBlock) {
    double block = 0.0;
    for (std::int32_t k = begin; k < std::min(s.depth, begin + a2a_gemm::kScaleBlock); ++k) {
      block += value(s, p.x(source), x_row * s.depth + k) * value(s, p.w(), w_row * s.depth + k);
    }
    if (s.format == Format::kFp8) {
      const std::int64_t b = begin / a2a_gemm::kScaleBlock;
      const std::int64_t w_at = (static_cast<std::int64_t>(slab) * s.column_scale_blocks() +
                                 column / a2a_gemm::kScaleBlock) *
                                    s.scale_blocks() +
                                b;
      block *= static_cast<double>(
                   p.x_scale(source, static_cast<std::uint64_t>(b * stride_of(s) + x_row))) *
               static_cast<double>(p.w_scale(static_cast<std::uint64_t>(w_at)));
    }
    sum += block;
  }
  return sum;
}

// out[row, column] of `rank` in f64.
double element_f64(const A2aProblem& p, int rank, std::int64_t row, std::int64_t column) {
  const Shape& s = p.shape;
  if (p.mirror) {
    int source = 0;
    while (row >= row_offset(s, source) + s.rows[static_cast<std::size_t>(source)]) ++source;
    return product_f64(p, source, row - row_offset(s, source), rank, column);
  }
  double sum = 0.0;
  for (int source = 0; source < s.ranks; ++source) {
    sum += product_f64(p, source, row_offset(s, rank) + row, source, column);
  }
  return sum;
}

}  // namespace

A2aHostOperands::A2aHostOperands(const A2aProblem& problem, int rank)
    : shape(problem.shape), scale_stride(stride_of(shape)) {
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  x.resize(size(total_rows(shape) * shape.row_bytes()));
  w.resize(size(std::int64_t{shape.ranks} * shape.columns * shape.row_bytes()));
  x_scales.resize(size(scale_stride * shape.scale_blocks()));
  w_scales.resize(
      size(std::int64_t{shape.ranks} * shape.column_scale_blocks() * shape.scale_blocks()));
  ThreadPool pool(std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / shape.ranks));
  fill(pool, shape, x, problem.x(rank));
  fill(pool, shape, w, problem.w());
  for (std::size_t i = 0; i < x_scales.size(); ++i) x_scales[i] = problem.x_scale(rank, i);
  for (std::size_t i = 0; i < w_scales.size(); ++i) w_scales[i] = problem.w_scale(i);
}

Operands A2aHostOperands::view(Bf16* out) const {
  const bool scaled = shape.format == Format::kFp8;
  Operands o;
  o.x = x.data();
  o.x_scales = scaled ? x_scales.data() : nullptr;
  o.x_scale_stride = scaled ? scale_stride : 0;
  o.w = w.data();
  o.w_scales = scaled ? w_scales.data() : nullptr;
  o.out = out;
  return o;
}

double sampled_error(const A2aProblem& p, int rank, const std::vector<Bf16>& out, int samples) {
  const std::int64_t rows =
      p.mirror ? total_rows(p.shape) : p.shape.rows[static_cast<std::size_t>(rank)];
  if (rows == 0) return 0.0;
  std::mt19937_64 random(p.seed + 77);
  double error = 0.0;
  double norm = 0.0;
  for (int sample = 0; sample < samples; ++sample) {
    const auto row = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(rows));
    const auto column =
        static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(p.shape.columns));
    const double exact = element_f64(p, rank, row, column);
    const auto got = static_cast<double>(
        out[static_cast<std::size_t>(row * p.shape.columns + column)].to_float());
    error += (got - exact) * (got - exact);
    norm += exact * exact;
  }
  return std::sqrt(error / norm);
}

}  // namespace penstock::bench
