// Products with stored weights, x [rows, cols] f32, weights decoded in registers or, for several
// rows, once into scratch. A result's bits depend on its own row of x and of W only: the same sum
// in the same order whether the row comes alone or among others, and however the outputs are split.
#pragma once

#include <cstdint>

#include "ops/cpu/matrix.h"

namespace penstock::cpu {

// Floats that may be read behind the last element of every f32 input of these kernels.
inline constexpr std::int64_t kPadding = 16;

// f32 elements of scratch that one call of either product needs for a matrix of `rows` x `cols`.
std::int64_t linear_scratch(std::int64_t rows, std::int64_t cols);

// y[m, n] = sum_k x[m, k] W[n, k] for n in [begin, end), m in [0, rows). Rows of x and y lie ldx
// and ldy floats apart.
void linear(const Matrix& w, std::int64_t begin, std::int64_t end, const float* x, std::int64_t ldx,
            std::int64_t rows, float* y, std::int64_t ldy, float* scratch);

// y[m, c] = sum_r x[m, r] W[r, c] for c in [begin, end), both multiples of 64.
void linear_transposed(const Matrix& w, std::int64_t begin, std::int64_t end, const float* x,
                       std::int64_t ldx, std::int64_t rows, float* y, std::int64_t ldy,
                       float* scratch);

// Elements [0, cols) of window row `row` as f32.
void decode_row(const Matrix& w, std::int64_t row, float* out);

// The instruction set in use, e.g. "AVX3".
const char* simd_name();

}  // namespace penstock::cpu
