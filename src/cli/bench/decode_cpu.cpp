#include "cli/bench/decode_cpu.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "cli/bench/values.h"
#include "penstock/core/error.h"
#include "penstock/ops/decode_layer/reference.h"

namespace penstock::bench {

using decode::DecodeShape;
using decode::Fp8Matrix;

struct DecodeCpuBench::State {
  DecodeCpuOptions options;
  decode::LayerTensors tensors;
  std::vector<std::shared_ptr<void>> kept;
  std::uint64_t next_seed = 1;
  std::vector<std::uint8_t> cache;

  template <typename T>
  TensorView keep(std::vector<T> values, DType dtype, std::initializer_list<std::int64_t> shape) {
    auto owner = std::make_shared<std::vector<T>>(std::move(values));
    TensorView view;
    view.data = owner->data();
    view.dtype = dtype;
    view.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), view.shape.begin());
    kept.push_back(std::move(owner));
    return view;
  }
  // Products keep unit variance.
  Fp8Matrix matrix(std::int64_t rows, std::int64_t cols) {
    const ValueStream values{next_seed++};
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * cols));
    for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = values.e4m3(i).bits;
    const float unit = 1.0F / (100.0F * std::sqrt(static_cast<float>(cols)));
    const ValueStream scales{next_seed++};
    std::vector<float> s(static_cast<std::size_t>((rows + 127) / 128 * ((cols + 127) / 128)));
    for (std::size_t i = 0; i < s.size(); ++i) s[i] = scales.uniform(i, 0.5F * unit, 1.5F * unit);
    return {keep(std::move(codes), DType::kE4M3, {rows, cols}),
            keep(std::move(s), DType::kF32, {(rows + 127) / 128, (cols + 127) / 128})};
  }
  TensorView bf16(std::int64_t rows, std::int64_t cols, float low, float high) {
    const ValueStream values{next_seed++};
    std::vector<std::uint16_t> bits(static_cast<std::size_t>(rows * cols));
    for (std::size_t i = 0; i < bits.size(); ++i) {
      bits[i] = Bf16::from_float(values.uniform(i, low, high)).bits;
    }
    return rows == 1 ? keep(std::move(bits), DType::kBF16, {cols})
                     : keep(std::move(bits), DType::kBF16, {rows, cols});
  }
};

DecodeCpuBench::DecodeCpuBench(const DecodeCpuOptions& options)
    : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.options = options;
  const DecodeShape& s = options.shape;
  decode::validate(s);
  require(
      options.picks >= 1 && options.picks <= decode::kMaxPicks &&
          options.picks <= options.context && options.context % decode::kPageTokens == 0 &&
          options.layers >= 1 && options.samples >= 1 && !s.dense,
      ErrorKind::kInvalidArgument, [&] {
        return fmt::format(
            "decode benchmark: {} picks of a context of {}, {} layers, {} samples: picks from 1 "
            "to {} and to the context, which is a multiple of {}; the others at least 1; a MoE "
            "layer",
            options.picks, options.context, options.layers, options.samples, decode::kMaxPicks,
            decode::kPageTokens);
      });
  decode::LayerTensors& t = state.tensors;
  t.q_a = state.matrix(s.q_lora, s.hidden);
  t.kv_a = state.matrix(decode::kKvRow, s.hidden);
  t.q_b = state.matrix(std::int64_t{s.heads} * decode::kQueryHead, s.q_lora);
  t.kv_b = state.matrix(std::int64_t{s.heads} * (decode::kNope + decode::kValue), decode::kLatent);
  t.o = state.matrix(s.hidden, std::int64_t{s.heads} * decode::kValue);
  t.norm_input = state.bf16(1, s.hidden, 0.7F, 1.3F);
  t.norm_q = state.bf16(1, s.q_lora, 0.7F, 1.3F);
  t.norm_kv = state.bf16(1, decode::kLatent, 0.7F, 1.3F);
  t.norm_post = state.bf16(1, s.hidden, 0.7F, 1.3F);
  const float logit = std::sqrt(3.0F / static_cast<float>(s.hidden));
  t.router = state.bf16(s.experts, s.hidden, -logit, logit);
  std::vector<float> bias(static_cast<std::size_t>(s.experts));
  const ValueStream biases{state.next_seed++};
  for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = biases.uniform(i, 33.9F, 34.1F);
  t.bias = state.keep(std::move(bias), DType::kF32, {s.experts});
  constexpr int kPool = 4;
  for (int e = 0; e < s.experts; ++e) {
    const auto from = static_cast<std::size_t>(e - kPool);
    t.gate.push_back(e < kPool ? state.matrix(s.intermediate, s.hidden) : t.gate[from]);
    t.up.push_back(e < kPool ? state.matrix(s.intermediate, s.hidden) : t.up[from]);
    t.down.push_back(e < kPool ? state.matrix(s.hidden, s.intermediate) : t.down[from]);
  }
  t.shared_gate = state.matrix(s.intermediate, s.hidden);
  t.shared_up = state.matrix(s.intermediate, s.hidden);
  t.shared_down = state.matrix(s.hidden, s.intermediate);
  const int row_bytes = decode::kv_row_bytes(s.kv_format);
  state.cache.resize(static_cast<std::size_t>(options.context) * static_cast<std::size_t>(s.rows) *
                     static_cast<std::size_t>(row_bytes));
  // Finite in every format: codes of small numbers, and scales and bf16 values made of them.
  const ValueStream bytes{state.next_seed++};
  for (std::size_t i = 0; i < state.cache.size(); ++i) {
    state.cache[i] = static_cast<std::uint8_t>(bytes.bits(i) & 0xBF);
  }
  if (s.kv_format == decode::KvFormat::kFp8Scaled) {
    const float scale = 0.5F;
    for (std::size_t row = 0; row < state.cache.size();
         row += static_cast<std::size_t>(row_bytes)) {
      for (std::size_t b = 0; b < 4; ++b) {
        std::memcpy(&state.cache[row + decode::kLatent + 4 * b], &scale, 4);
      }
    }
  }
}

DecodeCpuBench::~DecodeCpuBench() = default;

double DecodeCpuBench::multiply_adds(const DecodeCpuOptions& options) {
  const DecodeShape& s = options.shape;
  const double heads = s.heads;
  const double attention =
      heads * (decode::kQueryHead * static_cast<double>(s.q_lora) +
               decode::kLatent * static_cast<double>(decode::kNope + decode::kValue) +
               options.picks * static_cast<double>(decode::kKvRow + decode::kLatent) +
               decode::kValue * static_cast<double>(s.hidden));
  return attention + static_cast<double>(s.hidden) * (s.q_lora + decode::kKvRow + s.experts) +
         3.0 * s.hidden * s.intermediate * (s.top_k + 1);
}

DecodeCpuPoint DecodeCpuBench::run(int count) {
  State& state = *state_;
  const DecodeCpuOptions& o = state.options;
  require(count >= 1 && count <= o.shape.rows, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("decode benchmark: {} rows, made for 1 to {}", count, o.shape.rows);
  });
  const auto rows = static_cast<std::size_t>(count);
  std::mt19937 random(9);
  std::vector<std::int32_t> positions(rows, o.context - 1);
  std::vector<std::int32_t> offsets = {0};
  std::vector<std::int32_t> picks;
  std::vector<std::int64_t> slots;
  for (int s = 0; s < count; ++s) {
    std::vector<std::int32_t> all(static_cast<std::size_t>(o.context));
    std::iota(all.begin(), all.end(), s * o.context);
    std::shuffle(all.begin(), all.end(), random);
    picks.insert(picks.end(), all.begin(), all.begin() + o.picks);
    offsets.push_back(static_cast<std::int32_t>(picks.size()));
    slots.push_back(all[0]);
  }
  const ValueStream values{state.next_seed};
  std::vector<std::uint16_t> x(rows * static_cast<std::size_t>(o.shape.hidden));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = values.bf16(i).bits;
  const decode::HostCache cache{
      state.cache.data(),
      decode::kPageTokens * std::int64_t{decode::kv_row_bytes(o.shape.kv_format)},
      o.shape.kv_format};
  const auto layer = [&](int ranks, std::span<const std::uint16_t> in,
                         std::span<std::uint16_t> out) {
    DecodeShape shape = o.shape;
    shape.rows = count;
    shape.ranks = ranks;
    decode::run_reference_layer(shape, state.tensors, {positions, slots, offsets, picks}, cache,
                                std::int64_t{o.context} * o.shape.rows, in, out);
  };

  DecodeCpuPoint point;
  point.rows = count;
  std::vector<std::uint16_t> out(x.size());
  for (int i = 0; i < o.samples; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    for (int l = 0; l < o.layers; ++l) layer(o.shape.ranks, l == 0 ? x : out, out);
    const std::chrono::duration<double, std::micro> us = std::chrono::steady_clock::now() - begin;
    point.us.push_back(us.count() / o.layers);
  }
  if (o.check) {
    std::vector<std::uint16_t> whole(x.size());
    layer(o.shape.ranks, x, out);
    layer(1, x, whole);
    point.check_error = 0;
    const std::size_t width = x.size() / rows;
    for (std::size_t s = 0; s < rows; ++s) {
      double error = 0;
      double size = 0;
      for (std::size_t i = s * width; i < (s + 1) * width; ++i) {
        const double w = double{Bf16::from_bits(whole[i]).to_float()};
        const double d = double{Bf16::from_bits(out[i]).to_float()} - w;
        error += d * d;
        size += w * w;
      }
      const double relative = std::sqrt(error / size);
      point.check_error =
          std::isfinite(relative) ? std::max(point.check_error, relative) : INFINITY;
    }
  }
  return point;
}

}  // namespace penstock::bench
