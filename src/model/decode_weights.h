// A checkpoint's layers as decode_layer takes them.
#pragma once

#include "penstock/model/checkpoint.h"
#include "penstock/ops/decode_layer/shape.h"
#include "penstock/ops/decode_layer/weights.h"

namespace penstock::engine {

// The shape of layer `layer` (MoE or dense), one row, rank 0 of `ranks`. Throws Unsupported naming
// the configuration's value that decode_layer cannot run.
decode::DecodeShape decode_layer_shape(const ModelConfig& config, std::int64_t layer, int ranks);
// The same with the checkpoint's scales of attention. Throws Unsupported, too, for attention
// matrices that are neither all FP8 per block nor all per channel.
decode::DecodeShape decode_layer_shape(const Checkpoint& checkpoint, std::int64_t layer, int ranks);

// Windows into the checkpoint's mapping. Throws Unsupported for weights that are not E4M3 per
// 128x128 block (attention: or per channel).
decode::LayerTensors decode_layer_tensors(const Checkpoint& checkpoint, std::int64_t layer);

}  // namespace penstock::engine
