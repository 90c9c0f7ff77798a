// DecodeLayers by the decode_layer kernel: every rank of the group in this process, on one GPU or
// several.
#include "penstock/model/decode_layers.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "fabric/gpu.h"
#include "model/decode_weights.h"
#include "ops/decode_layer/cuda/peers.h"
#include "penstock/core/error.h"
#include "penstock/ops/decode_layer/decode_layer.h"

namespace penstock {
namespace {

using cuda::DeviceBuffer;

// The operator for one kind of layer (dense or MoE), and which of the model's layers are its own.
struct Kind {
  decode::DecodeShape shape;
  std::unique_ptr<decode::DecodeLayer> op;
  std::vector<decode::LayerBinding> bindings;
};

struct Rank {
  int device = 0;
  cudaStream_t stream = nullptr;
  std::optional<Kind> dense, sparse;
  std::vector<DeviceBuffer<std::uint8_t>> weights;  // [layers]
  std::vector<DeviceBuffer<std::uint8_t>> caches;   // [layers]
  DeviceBuffer<std::uint16_t> x;
  DeviceBuffer<std::int32_t> positions, pick_offsets, picks;
  DeviceBuffer<std::int64_t> slots;

  Rank() = default;
  Rank(Rank&& other) noexcept = delete;
  ~Rank() {
    if (stream == nullptr) return;
    cudaSetDevice(device);
    cudaStreamDestroy(stream);
  }
};

template <typename T>
void upload(const DeviceBuffer<T>& to, std::span<const T> from, cudaStream_t stream) {
  if (from.empty()) return;
  PENSTOCK_CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data(), from.size() * sizeof(T),
                                      cudaMemcpyHostToDevice, stream));
}

class CudaDecodeLayers final : public DecodeLayers {
 public:
  CudaDecodeLayers(const Checkpoint& checkpoint, const EngineOptions& options)
      : row_bytes_(decode::kv_row_bytes(options.kv_format)),
        page_stride_(decode::kPageTokens * static_cast<std::int64_t>(row_bytes_)),
        layers_(checkpoint.config().layers) {
    const std::string refusal = gpu_unavailable();
    require(refusal.empty(), ErrorKind::kUnsupported,
            [&] { return "decode_layer on a GPU: " + refusal; });
    for (int rank = 0; rank < options.ranks; ++rank) devices_.push_back(gpu_of_rank(rank));
    for (int rank = 0; rank < options.ranks; ++rank) add_rank(checkpoint, options, rank);
    connect();
  }

  void run(const DecodeRows& rows, std::int64_t first, std::int64_t count) override {
    if (faulted_) rearm();
    faulted_ = true;  // until everything below has gone well
    const auto row_count = static_cast<int>(rows.positions.size());
    for (const auto& rank : ranks_) {
      PENSTOCK_CUDA_CHECK(cudaSetDevice(rank->device));
      upload<std::uint16_t>(rank->x, rows.x, rank->stream);
      upload(rank->positions, rows.positions, rank->stream);
      upload(rank->slots, rows.slots, rank->stream);
      upload(rank->pick_offsets, rows.pick_offsets, rank->stream);
      upload(rank->picks, rows.picks, rank->stream);
    }
    // Nothing waits between the launches of different ranks: their kernels wait for one another.
    for (const auto& rank : ranks_) {
      PENSTOCK_CUDA_CHECK(cudaSetDevice(rank->device));
      const decode::DecodeStep step{row_count, rank->x.data(), rank->x.data(),
                                    rank->positions.data(), rank->slots.data()};
      for (std::int64_t i = first; i < first + count;) {
        const Place place = places_.at(static_cast<std::size_t>(i));
        std::int64_t n = 1;
        while (i + n < first + count &&
               places_[static_cast<std::size_t>(i + n)].dense == place.dense) {
          ++n;
        }
        const Kind& kind = place.dense ? *rank->dense : *rank->sparse;
        kind.op->run(Stream{rank->stream}, step, place.index, static_cast<int>(n));
        i += n;
      }
    }
    for (const auto& rank : ranks_) {
      PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(rank->stream));
    }
    for (const auto& rank : ranks_) {
      for (const auto& kind : {std::cref(rank->dense), std::cref(rank->sparse)}) {
        if (kind.get()) kind.get()->op->check();
      }
    }
    PENSTOCK_CUDA_CHECK(
        cudaMemcpy(rows.x.data(), ranks_[0]->x.data(), rows.x.size() * 2, cudaMemcpyDeviceToHost));
    faulted_ = false;
  }

  std::int64_t weight_bytes() const override { return weight_bytes_; }
  std::int64_t page_bytes() const override {
    return layers_ * page_stride_ * static_cast<std::int64_t>(ranks_.size());
  }
  std::int64_t scratch_bytes() const override { return scratch_bytes_; }
  void poison(std::int64_t slot) override {
    for (const auto& rank : ranks_) {
      PENSTOCK_CUDA_CHECK(cudaSetDevice(rank->device));
      for (const auto& cache : rank->caches) {
        PENSTOCK_CUDA_CHECK(cudaMemset(cache.data() + slot * row_bytes_, 0xFF,
                                       static_cast<std::size_t>(row_bytes_)));
      }
    }
  }

 private:
  // A layer's operator and its number there.
  struct Place {
    bool dense;
    int index;
  };

  void add_rank(const Checkpoint& checkpoint, const EngineOptions& options, int number) {
    const ModelConfig& config = checkpoint.config();
    auto owner = std::make_unique<Rank>();
    Rank& rank = *owner;
    rank.device = devices_[static_cast<std::size_t>(number)];
    cuda::require_sm90(rank.device);
    PENSTOCK_CUDA_CHECK(cudaSetDevice(rank.device));
    PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
    const auto rows = static_cast<std::size_t>(decode::kMaxRows);
    rank.x = DeviceBuffer<std::uint16_t>(rows * static_cast<std::size_t>(config.hidden));
    rank.positions = DeviceBuffer<std::int32_t>(rows);
    rank.slots = DeviceBuffer<std::int64_t>(rows);
    rank.pick_offsets = DeviceBuffer<std::int32_t>(rows + 1);
    rank.picks = DeviceBuffer<std::int32_t>(rows * static_cast<std::size_t>(std::min<std::int64_t>(
                                                       options.max_context, decode::kMaxPicks)));
    std::vector<std::uint8_t> prepared;
    for (std::int64_t i = 0; i < layers_; ++i) {
      decode::DecodeShape shape = engine::decode_layer_shape(checkpoint, i, options.ranks);
      shape.rank = number;
      shape.rows = decode::kMaxRows;
      shape.eps_latent = static_cast<float>(options.latent_eps);
      shape.kv_format = options.kv_format;
      prepared.resize(static_cast<std::size_t>(decode::weight_layout(shape).bytes));
      decode::prepare_weights(shape, engine::decode_layer_tensors(checkpoint, i), prepared);
      rank.weights.emplace_back(prepared);
      weight_bytes_ += static_cast<std::int64_t>(prepared.size());
      rank.caches.emplace_back(static_cast<std::size_t>(options.pages * page_stride_));
      std::optional<Kind>& kind = shape.dense ? rank.dense : rank.sparse;
      if (!kind) kind.emplace(Kind{shape, nullptr, {}});
      require(kind->shape.attention_scales == shape.attention_scales, ErrorKind::kUnsupported, [&] {
        return fmt::format(
            "decode_layer: attention of layer {} has scales of another kind (per block, per "
            "channel) than the layers before it: one operator runs them all",
            i);
      });
      if (number == 0) {
        places_.push_back({shape.dense, static_cast<int>(kind->bindings.size())});
      }
      kind->bindings.push_back({rank.weights.back().data(), rank.caches.back().data(), page_stride_,
                                rank.pick_offsets.data(), rank.picks.data()});
    }
    decode::DecodeOptions how;
    how.device = rank.device;
    how.sm_budget = decode::share_of_device(rank.device, devices_);
    for (std::optional<Kind>* kind : {&rank.dense, &rank.sparse}) {
      if (!*kind) continue;
      (*kind)->op = std::make_unique<decode::DecodeLayer>((*kind)->shape, how);
      (*kind)->op->set_layers((*kind)->bindings);
      scratch_bytes_ += decode::DecodeLayer::window_bytes((*kind)->shape, how) +
                        decode::DecodeLayer::workspace_bytes((*kind)->shape, how);
    }
    ranks_.push_back(std::move(owner));
  }

  void connect() {
    if (ranks_.size() == 1) return;
    decode::enable_peers(devices_);
    for (std::optional<Kind> Rank::*kind : {&Rank::dense, &Rank::sparse}) {
      if (!((*ranks_[0]).*kind)) continue;
      std::vector<void*> windows;
      for (const auto& rank : ranks_) windows.push_back(((*rank).*kind)->op->window());
      for (const auto& rank : ranks_) ((*rank).*kind)->op->connect(windows);
    }
  }

  void rearm() {
    for (const auto& rank : ranks_) {
      for (std::optional<Kind>* kind : {&rank->dense, &rank->sparse}) {
        if (*kind) (*kind)->op->rearm();
      }
    }
  }

  int row_bytes_;
  std::int64_t page_stride_;
  std::int64_t layers_;
  std::int64_t weight_bytes_ = 0;
  std::int64_t scratch_bytes_ = 0;
  bool faulted_ = false;
  std::vector<int> devices_;   // [ranks]
  std::vector<Place> places_;  // [layers]
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace

std::unique_ptr<DecodeLayers> cuda_decode_layers(const Checkpoint& checkpoint,
                                                 const EngineOptions& options) {
  return std::make_unique<CudaDecodeLayers>(checkpoint, options);
}

}  // namespace penstock
