// DecodeLayers by decode_layer's CPU operator.
#include <algorithm>
#include <cstring>
#include <vector>

#include "model/decode_weights.h"
#include "model/float_buffer.h"
#include "penstock/model/decode_layers.h"
#include "penstock/ops/decode_layer/reference.h"

namespace penstock {
namespace {

class CpuDecodeLayers final : public DecodeLayers {
 public:
  CpuDecodeLayers(const Checkpoint& checkpoint, const EngineOptions& options)
      : slots_(options.pages * decode::kPageTokens),
        page_stride_(decode::kPageTokens *
                     static_cast<std::int64_t>(decode::kv_row_bytes(options.kv_format))) {
    for (std::int64_t i = 0; i < checkpoint.config().layers; ++i) {
      Layer layer;
      layer.shape = engine::decode_layer_shape(checkpoint, i, options.ranks);
      layer.shape.eps_latent = static_cast<float>(options.latent_eps);
      layer.shape.kv_format = options.kv_format;
      layer.tensors = engine::decode_layer_tensors(checkpoint, i);
      decode::validate(layer.shape, layer.tensors);
      layer.cache = engine::FloatBuffer(options.pages * page_stride_ / 4, "cache pages");
      layers_.push_back(std::move(layer));
    }
  }

  void run(const DecodeRows& rows, std::int64_t first, std::int64_t count) override {
    for (std::int64_t i = first; i < first + count; ++i) {
      Layer& layer = layers_.at(static_cast<std::size_t>(i));
      decode::DecodeShape shape = layer.shape;
      shape.rows = static_cast<int>(rows.positions.size());
      decode::run_reference_layer(
          shape, layer.tensors, {rows.positions, rows.slots, rows.pick_offsets, rows.picks},
          {bytes(layer), page_stride_, shape.kv_format}, slots_, rows.x, rows.x);
    }
  }
  std::int64_t weight_bytes() const override { return 0; }
  std::int64_t page_bytes() const override {
    return static_cast<std::int64_t>(layers_.size()) * page_stride_;
  }
  std::int64_t scratch_bytes() const override { return 0; }
  void poison(std::int64_t slot) override {
    const auto row = static_cast<std::size_t>(page_stride_ / decode::kPageTokens);
    for (Layer& layer : layers_) {
      std::memset(bytes(layer) + slot * static_cast<std::int64_t>(row), 0xFF, row);
    }
  }

 private:
  struct Layer {
    decode::DecodeShape shape;
    decode::LayerTensors tensors;
    engine::FloatBuffer cache;  // pages one behind the other
  };
  static std::uint8_t* bytes(Layer& layer) {
    return reinterpret_cast<std::uint8_t*>(layer.cache.data());
  }

  std::int64_t slots_;
  std::int64_t page_stride_;
  std::vector<Layer> layers_;
};

}  // namespace

std::unique_ptr<DecodeLayers> cpu_decode_layers(const Checkpoint& checkpoint,
                                                const EngineOptions& options) {
  return std::make_unique<CpuDecodeLayers>(checkpoint, options);
}

}  // namespace penstock
