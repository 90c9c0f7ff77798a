// What a launch handed from stage to stage, read back from its mailboxes: for tests and for the
// benchmark's check. The only host code that knows where the kernel puts its packets.
#pragma once

#include <vector>

#include "penstock/ops/decode_layer/decode_layer.h"

namespace penstock::decode {

// Row-major, as ReferenceStages takes and gives them. Rows of padding hold what an earlier launch
// left.
struct StageValues {
  std::vector<float> c;            // [rows, q_lora + 576], behind qkv_a
  std::vector<float> q;            // [rows, heads, 256], rotated
  std::vector<float> q_lat;        // [rows, heads, 512]
  std::vector<float> o;            // [rows, heads, 256]
  std::vector<float> y_attention;  // [rows, hidden], this rank's part
  std::vector<float> a;            // [rows, hidden], residual behind attention
  std::vector<float> scores;       // [rows, experts]; of a dense layer: not defined
  std::vector<float> mid;        // [rows, top_k + 1, inter]; 0: shared expert, k: the k-th best one
  std::vector<float> y_experts;  // [rows, hidden], this rank's part
};

// The last launch that used mailbox half `parity`, of `rows` rows and one layer (with more layers:
// the last one of that parity). Synchronous; no launch may run.
StageValues read_stages(const DecodeLayer& op, const DecodeShape& shape, int rows, int parity);
// Its scores alone.
std::vector<float> read_scores(const DecodeLayer& op, const DecodeShape& shape, int rows,
                               int parity);

}  // namespace penstock::decode
