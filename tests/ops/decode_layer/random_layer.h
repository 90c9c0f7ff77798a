// A decoder layer of random FP8 weights, a random paged cache and picks, for tests of decode_layer.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "penstock/numerics/formats.h"
#include "penstock/ops/decode_layer/reference.h"
#include "penstock/ops/decode_layer/weights.h"

namespace penstock::decode::test {

inline std::uint16_t bf16_bits(float x) { return Bf16::from_float(x).bits; }
inline float bf16_value(std::uint16_t bits) { return Bf16::from_bits(bits).to_float(); }

// Weights whose products keep a unit variance, with block scales that differ from block to block.
class RandomLayer {
 public:
  // Experts share `pool` distinct sets of matrices: enough to notice a wrong expert. `channels`:
  // attention has one scale a row instead of one a block.
  RandomLayer(const DecodeShape& s, std::uint32_t seed, int pool = 5, bool channels = false)
      : random_(seed) {
    codes_.resize(1 << 16);
    std::normal_distribution<float> normal(0.0F, 60.0F);
    for (auto& c : codes_) c = E4M3::from_float(normal(random_)).bits;
    LayerTensors& t = tensors;
    t.q_a = matrix(s.q_lora, s.hidden, channels);
    t.kv_a = matrix(kKvRow, s.hidden, channels);
    t.q_b = matrix(s.heads * kQueryHead, s.q_lora, channels);
    t.kv_b = matrix(s.heads * (kNope + kValue), kLatent, channels);
    t.o = matrix(s.hidden, s.heads * kValue, channels);
    t.norm_input = gain(s.hidden);
    t.norm_q = gain(s.q_lora);
    t.norm_kv = gain(kLatent);
    t.norm_post = gain(s.hidden);
    if (s.dense) {
      t.dense_gate = matrix(s.dense_width(), s.hidden);
      t.dense_up = matrix(s.dense_width(), s.hidden);
      t.dense_down = matrix(s.hidden, s.dense_width());
      return;
    }
    auto router = std::make_shared<std::vector<std::uint16_t>>();
    std::normal_distribution<float> unit(0.0F, 1.0F / std::sqrt(static_cast<float>(s.hidden)));
    for (int i = 0; i < s.experts * s.hidden; ++i) router->push_back(bf16_bits(unit(random_)));
    t.router = keep(router, DType::kBF16, {s.experts, s.hidden});
    auto bias = std::make_shared<std::vector<float>>();
    std::uniform_real_distribution<float> near34(33.9F, 34.1F);
    for (int i = 0; i < s.experts; ++i) bias->push_back(near34(random_));
    t.bias = keep(bias, DType::kF32, {s.experts});
    std::vector<Fp8Matrix> gates;
    std::vector<Fp8Matrix> ups;
    std::vector<Fp8Matrix> downs;
    for (int i = 0; i < pool; ++i) {
      gates.push_back(matrix(s.intermediate, s.hidden));
      ups.push_back(matrix(s.intermediate, s.hidden));
      downs.push_back(matrix(s.hidden, s.intermediate));
    }
    for (std::size_t e = 0; e < static_cast<std::size_t>(s.experts); ++e) {
      t.gate.push_back(gates[e % gates.size()]);
      t.up.push_back(ups[(e / 2) % ups.size()]);
      t.down.push_back(downs[(e / 3) % downs.size()]);
    }
    t.shared_gate = matrix(s.intermediate, s.hidden);
    t.shared_up = matrix(s.intermediate, s.hidden);
    t.shared_down = matrix(s.hidden, s.intermediate);
  }

  // Experts 2 i and 2 i + 1 get one router row and one bias: exact ties, which go to the lower
  // index.
  void tie_pairs() {
    auto* router = const_cast<std::uint16_t*>(tensors.router.as<std::uint16_t>());
    auto* bias = const_cast<float*>(tensors.bias.as<float>());
    const std::int64_t experts = tensors.router.dim(0);
    const std::int64_t hidden = tensors.router.dim(1);
    for (std::int64_t e = 1; e < experts; e += 2) {
      std::copy_n(router + (e - 1) * hidden, hidden, router + e * hidden);
      bias[e] = bias[e - 1];
    }
  }
  // All experts score 1/2 and have a bias of 34.
  void tie_all() {
    auto* router = const_cast<std::uint16_t*>(tensors.router.as<std::uint16_t>());
    std::fill_n(router, tensors.router.elements(), std::uint16_t{0});
    std::fill_n(const_cast<float*>(tensors.bias.as<float>()), tensors.bias.elements(), 34.0F);
  }

  LayerTensors tensors;

 private:
  template <typename T>
  TensorView keep(const std::shared_ptr<std::vector<T>>& data, DType dtype,
                  std::initializer_list<std::int64_t> shape) {
    kept_.push_back(data);
    TensorView view;
    view.data = data->data();
    view.dtype = dtype;
    view.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), view.shape.begin());
    return view;
  }
  Fp8Matrix matrix(std::int64_t rows, std::int64_t cols, bool channels = false) {
    auto data = std::make_shared<std::vector<std::uint8_t>>(static_cast<std::size_t>(rows * cols));
    for (auto& c : *data) c = codes_[random_() & 0xFFFFU];
    auto scale = std::make_shared<std::vector<float>>();
    std::uniform_real_distribution<float> spread(0.5F, 1.5F);
    const std::int64_t blocks = channels ? rows : (rows + 127) / 128 * ((cols + 127) / 128);
    for (std::int64_t i = 0; i < blocks; ++i) {
      scale->push_back(spread(random_) / (60.0F * std::sqrt(static_cast<float>(cols))));
    }
    const TensorView codes = keep(data, DType::kE4M3, {rows, cols});
    if (channels) return {codes, keep(scale, DType::kF32, {rows})};
    return {codes, keep(scale, DType::kF32, {(rows + 127) / 128, (cols + 127) / 128})};
  }
  TensorView gain(std::int64_t n) {
    auto data = std::make_shared<std::vector<std::uint16_t>>();
    std::uniform_real_distribution<float> around1(0.7F, 1.3F);
    for (std::int64_t i = 0; i < n; ++i) data->push_back(bf16_bits(around1(random_)));
    return keep(data, DType::kBF16, {n});
  }

  std::minstd_rand random_;
  std::vector<std::uint8_t> codes_;
  std::vector<std::shared_ptr<void>> kept_;
};

// A paged cache with gaps between pages, filled with rows of unit variance.
class RandomCache {
 public:
  // The first `distinct` pages (0: all) differ; later ones repeat them in turn.
  RandomCache(KvFormat format, int pages, std::uint32_t seed, int distinct = 0)
      : format_(format), stride_(kPageTokens * kv_row_bytes(format) + 48) {
    bytes.resize(static_cast<std::size_t>(pages * stride_));
    std::minstd_rand random(seed);
    std::normal_distribution<float> unit;
    if (distinct == 0 || distinct > pages) distinct = pages;
    for (int slot = 0; slot < distinct * kPageTokens; ++slot) {
      std::uint8_t* row = row_of(slot);
      const auto put = [&](int at) {
        const std::uint16_t bits = bf16_bits(unit(random));
        std::memcpy(row + at, &bits, 2);
      };
      if (format == KvFormat::kBf16) {
        for (int i = 0; i < kKvRow; ++i) put(2 * i);
        continue;
      }
      const bool scaled = format == KvFormat::kFp8Scaled;
      for (int i = 0; i < (scaled ? kLatent : kKvRow); ++i) {
        row[i] = E4M3::from_float(unit(random) * (scaled ? 100.0F : 1.0F)).bits;
      }
      if (!scaled) continue;
      for (int b = 0; b < 4; ++b) {
        // Any f32 scale must work, not only powers of two.
        const float scale = 0.01F * (1.0F + static_cast<float>(random() % 1000) / 2000.0F);
        std::memcpy(row + kLatent + 4 * b, &scale, 4);
      }
      for (int i = 0; i < kRope; ++i) put(kLatent + 16 + 2 * i);
    }
    for (int page = distinct; page < pages; ++page) {
      std::memcpy(row_of(std::int64_t{page} * kPageTokens),
                  row_of(std::int64_t{page % distinct} * kPageTokens),
                  static_cast<std::size_t>(page_bytes()));
    }
  }
  std::uint8_t* row_of(std::int64_t slot) {
    return bytes.data() + slot / kPageTokens * stride_ + slot % kPageTokens * kv_row_bytes(format_);
  }
  HostCache host() { return {bytes.data(), stride_, format_}; }
  // For reading alone.
  HostCache host() const { return {const_cast<std::uint8_t*>(bytes.data()), stride_, format_}; }
  KvFormat format() const { return format_; }
  std::int64_t pages() const { return static_cast<std::int64_t>(bytes.size()) / stride_; }
  std::int64_t page_bytes() const { return std::int64_t{kPageTokens} * kv_row_bytes(format_); }
  std::int64_t stride() const { return stride_; }
  std::int64_t slots() const {
    return static_cast<std::int64_t>(bytes.size()) / stride_ * kPageTokens;
  }

  std::vector<std::uint8_t> bytes;

 private:
  KvFormat format_;
  std::int64_t stride_;
};

// Inputs of a step.
struct RandomStep {
  std::vector<std::uint16_t> x;
  std::vector<std::int32_t> positions;
  std::vector<std::int64_t> slots;
  std::vector<std::int32_t> pick_offsets{0};
  std::vector<std::int32_t> picks;

  // `counts[s]` picks of row s, its own new slot among them; -1 makes row s padding.
  RandomStep(const DecodeShape& shape, std::int64_t cache_slots, const std::vector<int>& counts,
             std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> unit;
    std::vector<std::int32_t> free(static_cast<std::size_t>(cache_slots));
    std::iota(free.begin(), free.end(), 0);
    for (std::size_t s = 0; s < counts.size(); ++s) {
      for (int i = 0; i < shape.hidden; ++i) x.push_back(bf16_bits(unit(random)));
      positions.push_back(static_cast<std::int32_t>(random() % 200000));
      // Slots of different rows differ, so that no row reads what another one writes.
      slots.push_back(counts[s] < 0 ? -1 : static_cast<std::int64_t>(7 + 131 * s));
      std::shuffle(free.begin(), free.end(), random);
      int wanted = counts[s];
      if (wanted > 0) {
        picks.push_back(static_cast<std::int32_t>(slots.back()));
        --wanted;
      }
      for (std::size_t i = 0; wanted > 0; ++i) {
        if (free[i] % 131 == 7) continue;
        picks.push_back(free[i]);
        --wanted;
      }
      pick_offsets.push_back(static_cast<std::int32_t>(picks.size()));
    }
  }
  // Row s is the last token of a sequence of contexts[s] tokens, whose pages are dealt out from a
  // shuffled pack: they lie anywhere, in no order, interleaved with those of other rows, the last
  // one partly filled. It picks its own new slot and a random choice of the others, at most
  // kMaxPicks in all, in no order.
  static RandomStep paged(const DecodeShape& shape, std::int64_t pages,
                          const std::vector<int>& contexts, std::uint32_t seed) {
    RandomStep step(shape, 0, {}, seed);
    std::mt19937 random(seed);
    std::normal_distribution<float> unit;
    std::vector<std::int32_t> pack(static_cast<std::size_t>(pages));
    std::iota(pack.begin(), pack.end(), 0);
    std::shuffle(pack.begin(), pack.end(), random);
    for (const int context : contexts) {
      for (int i = 0; i < shape.hidden; ++i) step.x.push_back(bf16_bits(unit(random)));
      std::vector<std::int32_t> table;
      for (int token = 0; token < context; token += kPageTokens) {
        table.push_back(pack.back());
        pack.pop_back();
      }
      const auto slot_of = [&](std::int32_t position) {
        return table[static_cast<std::size_t>(position / kPageTokens)] * kPageTokens +
               position % kPageTokens;
      };
      step.positions.push_back(context - 1);
      step.slots.push_back(slot_of(context - 1));
      std::vector<std::int32_t> older(static_cast<std::size_t>(context - 1));
      std::iota(older.begin(), older.end(), 0);
      std::shuffle(older.begin(), older.end(), random);
      older.resize(std::min<std::size_t>(older.size(), kMaxPicks - 1));
      const auto first = static_cast<std::ptrdiff_t>(step.picks.size());
      step.picks.push_back(slot_of(context - 1));
      for (const std::int32_t position : older) step.picks.push_back(slot_of(position));
      std::shuffle(step.picks.begin() + first, step.picks.end(), random);
      step.pick_offsets.push_back(static_cast<std::int32_t>(step.picks.size()));
    }
    return step;
  }
  StepInput input() const { return {positions, slots, pick_offsets, picks}; }
};

inline double relative_l2(const std::vector<float>& got, const std::vector<float>& want) {
  if (got.size() != want.size() || got.empty()) return INFINITY;
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double d = static_cast<double>(got[i]) - static_cast<double>(want[i]);
    error += d * d;
    norm += static_cast<double>(want[i]) * static_cast<double>(want[i]);
  }
  return std::isfinite(error) && norm > 0 ? std::sqrt(error / norm) : INFINITY;
}

inline DecodeShape tiny_shape() {
  DecodeShape s;
  s.hidden = 256;
  s.q_lora = 128;
  s.heads = 8;
  s.experts = 16;
  s.top_k = 4;
  s.intermediate = 256;
  s.rope_theta = 1e4;
  return s;
}

}  // namespace penstock::decode::test
