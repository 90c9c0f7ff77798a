// The checkpoint's matrices as the engine reads them: windows into the mapping, and small vectors
// as f32.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/cpu/matrix.h"
#include "penstock/model/checkpoint.h"

namespace penstock::engine {

struct MlpWeights {
  cpu::Matrix gate;  // [intermediate, hidden]
  cpu::Matrix up;    // [intermediate, hidden]
  cpu::Matrix down;  // [hidden, intermediate]
};

// Vectors are kPadding floats longer than their shape.
struct LayerWeights {
  std::vector<float> input_norm;   // [hidden]
  cpu::Matrix q_a;                 // [q_lora, hidden]
  std::vector<float> q_norm;       // [q_lora]
  cpu::Matrix q_b;                 // [heads * (nope + rope), q_lora]
  cpu::Matrix kv_a;                // [kv_lora + rope, hidden]
  std::vector<float> kv_norm;      // [kv_lora]
  cpu::Matrix kv_b;                // [heads * (nope + v), kv_lora]
  cpu::Matrix o;                   // [hidden, heads * v]
  bool full_indexer = false;       // the four below are set
  cpu::Matrix index_q;             // [index_heads * index_dim, q_lora]
  cpu::Matrix index_k;             // [index_dim, hidden]
  cpu::Matrix index_w;             // [index_heads, hidden]
  std::vector<float> index_gain;   // [index_dim]
  std::vector<float> index_bias;   // [index_dim]
  std::vector<float> post_norm;    // [hidden]
  bool sparse = false;             // experts and router are set; false: dense
  MlpWeights dense;                // sparse: the shared expert (no rows if there is none)
  cpu::Matrix router;              // [experts, hidden]
  std::vector<float> router_bias;  // [experts]
  std::vector<MlpWeights> experts;
};

struct ModelWeights {
  cpu::Matrix embedding;  // [vocab, hidden]
  std::vector<LayerWeights> layers;
  std::vector<float> final_norm;     // [hidden]
  cpu::Matrix lm_head;               // [vocab, hidden]
  std::int64_t weight_bytes = 0;     // of matrices and their scales
  std::int64_t converted_bytes = 0;  // of the vectors
};

// Throws Unsupported for a stored format that the CPU products do not read.
ModelWeights load_weights(const Checkpoint& checkpoint);

}  // namespace penstock::engine
