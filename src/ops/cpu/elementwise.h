// Row-wise stages between the products. Each row's bits depend on that row only.
#pragma once

#include <cstdint>

namespace penstock::cpu {

// out = x * gain / sqrt(mean(x^2) + eps), n elements; out may be x.
void rms_norm(const float* x, const float* gain, std::int64_t n, float eps, float* out);
// out = (x - mean) / sqrt(variance + eps) * gain + bias; out may be x.
void layer_norm(const float* x, const float* gain, const float* bias, std::int64_t n, float eps,
                float* out);
// out = silu(gate) * up, silu(v) = v / (1 + exp(-v)); out may be gate.
void silu_mul(const float* gate, const float* up, std::int64_t n, float* out);
// x += y.
void add_to(float* x, const float* y, std::int64_t n);
// x += weight * y, one rounding.
void add_scaled_to(float* x, float weight, const float* y, std::int64_t n);
// Rotates n pairs (2i, 2i + 1) by the angles whose cosines and sines are given:
// (a, b) -> (a cos - b sin, a sin + b cos).
void rotate_pairs(float* x, const float* cosines, const float* sines, std::int64_t n);
// Rounds x to what E4M3 per 128 columns holds: scale s = max(amax, 1e-4) / 448 of each run of 128,
// out = E4M3(x / s) * s; a run with a NaN or an Inf reads as NaN, as quantise_fp8_token's does.
void round_to_fp8(const float* x, std::int64_t n, float* out);

}  // namespace penstock::cpu
