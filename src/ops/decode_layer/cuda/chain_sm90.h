// A decoder layer as a chain of separate kernels: what decode_layer is measured against. Plain
// data: device code includes this.
#pragma once

#include <cstdint>

#include "ops/decode_layer/cuda/launch.h"

namespace penstock::decode {

// Pairs of (row, expert) that one launch of the chain holds.
inline constexpr int kChainRows = 8;
inline constexpr int kChainActive = kChainRows * kMaxTopK + 1;

// Which experts the rows chose; filled by the chain's routing kernel.
struct ChainRouting {
  std::int32_t count;                            // active experts, the shared one first
  std::int32_t expert[kChainActive];             // [count]
  std::uint8_t place[kChainActive][kChainRows];  // 0: not chosen by the row; else 1 + its rank
  float weight[kChainRows][kMaxTopK + 1];        // [row][rank]; rank 0 is the shared expert
  float gap[kChainRows];  // of score + bias, between the last expert chosen and the next one
  std::int32_t chosen[kChainRows][kMaxTopK];  // best first
};

// One layer. Values between kernels are f16 that hold bf16-rounded numbers (what tensor cores take
// beside E4M3 weights), so magnitudes must stay below 65504: the benchmark's operands do.
struct ChainArguments {
  DecodePlan plan;
  WeightLayout weights;
  LayerArguments layer;
  const float* next_gain;  // [hidden] f32: the next layer's input norm
  int rows;
  float eps, eps_latent, routed_scale;
  bool norm_topk;
  float frequency[kRope / 2];
  const std::int32_t* positions;
  const std::int64_t* slots;
  std::uint16_t* x;      // [rows, hidden] bf16 residual, in and out
  std::uint16_t* n;      // [rows, hidden] f16: its norm, in and out (of the next layer)
  std::uint16_t* c;      // [rows, q_lora + 576] f16
  std::uint16_t* c_q;    // [rows, q_lora] f16
  std::uint16_t* q;      // [rows, heads, 256] f16
  std::uint16_t* q_lat;  // [rows, heads, 512] f16
  float* partial;        // [rows, splits, heads, 512]
  float* softmax;        // [rows, splits, heads, 2]: largest logit, sum
  std::uint16_t* o_lat;  // [rows, heads, 512] f16
  std::uint16_t* o;      // [rows, heads, 256] f16
  std::uint16_t* y;      // [rows, hidden] bf16: this rank's part
  float* scores;         // [rows, experts]
  ChainRouting* routing;
  std::uint16_t* mid;  // [rows, top_k + 1, inter] f16
};

// Kernels of one layer behind launch_chain_norm, which a first layer needs.
inline constexpr int kChainLaunches = 14;

// Enqueue; the cudaError_t as int. KV rows are kFp8Scaled, layers are MoE layers. Every all-reduce
// adds this rank's part `ranks` times, as decode_layer's self_loop does.
int launch_chain_norm(const ChainArguments& arguments, void* stream);
int launch_chain_layer(const ChainArguments& arguments, void* stream);

}  // namespace penstock::decode
