// decode_layer without a GPU: what shapes and tensors are refused, the weight layout's inverse, and
// the CPU operator's own properties (independence of rows, padding, sharding).
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "ops/decode_layer/random_layer.h"
#include "penstock/core/error.h"
#include "penstock/ops/decode_layer/plan.h"

namespace penstock::decode::test {
namespace {

// Where prepare_weights puts gate row i of a slice; up row i lies 8 rows on.
int gate_row(int i) { return i / 8 * 16 + i % 8; }

constexpr int kH200Sms = 132;
constexpr int kH200Smem = 232448;

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(DecodeShape, RefusalsNameTheValueAndTheReason) {
  DecodeShape s = tiny_shape();
  validate(s);
  s.rows = 17;
  EXPECT_NE(message_of([&] { validate(s); }).find("rows is 17"), std::string::npos);
  s = tiny_shape();
  s.ranks = 3;
  EXPECT_NE(message_of([&] { validate(s); }).find("3 ranks"), std::string::npos);
  s = tiny_shape();
  s.hidden = 250;
  EXPECT_NE(message_of([&] { validate(s); }).find("hidden is 250"), std::string::npos);
  s = tiny_shape();
  s.ranks = 8;  // slices of 32 columns
  EXPECT_NE(message_of([&] { validate(s); }).find("intermediate is 256"), std::string::npos);
  s = tiny_shape();
  s.top_k = 8;
  s.experts = 4;
  EXPECT_NE(message_of([&] { validate(s); }).find("exceeds"), std::string::npos);
  s = DecodeShape{};
  s.intermediate = 2048 + 64;
  EXPECT_NE(message_of([&] { validate(s); }).find("2112"), std::string::npos);
}

TEST(DecodePlan, FitsEveryRankCountOfGlm5) {
  for (const int ranks : {1, 2, 4, 8}) {
    DecodeShape s;
    s.ranks = ranks;
    s.rows = 16;
    const int rows = rows_per_launch(s, kH200Sms, kH200Smem);
    EXPECT_GE(rows, 1);
    if (ranks == 8) {
      EXPECT_EQ(rows, 8);
    }
    for (int r = 1; r <= rows; ++r) {
      const DecodePlan p = make_plan(s, kH200Sms, kH200Smem, r);
      EXPECT_LE(p.smem_bytes, kH200Smem);
      EXPECT_GE(p.ring_slots, 3);
      // Every CTA owns exactly one block of hidden columns.
      EXPECT_EQ(p.o.blocks, p.grid);
      EXPECT_LE(p.grid, kH200Sms);
      // Boxes lie behind one another.
      EXPECT_LT(p.box_x, p.box_packets);
      EXPECT_LE(p.uv_tasks(r) * p.uv_part_packets(), p.box_a - p.box_o);
    }
  }
}

TEST(DecodePlan, RefusesASmallSmBudgetWithTheNumberNeeded) {
  DecodeShape s;
  for (const auto& [ranks, needed] : {std::pair{1, 128}, std::pair{2, 128}, std::pair{8, 96}}) {
    s.ranks = ranks;
    const std::string wanted = "at least " + std::to_string(needed) + " ";
    EXPECT_NE(message_of([&] { make_plan(s, 64, kH200Smem, 1); }).find(wanted), std::string::npos);
    EXPECT_NO_THROW(make_plan(s, needed, kH200Smem, 1));
    EXPECT_THROW(make_plan(s, needed - 1, kH200Smem, 1), Error);
  }
}

TEST(DecodeWeights, PreparedElementsAreTheCheckpoints) {
  for (const int ranks : {1, 2, 4}) {
    DecodeShape s = tiny_shape();
    s.ranks = ranks;
    const RandomLayer layer(s, 7);
    const LayerTensors& t = layer.tensors;
    const auto at = [](const Fp8Matrix& m, std::int64_t row, std::int64_t col) {
      return std::pair(m.data.as<std::uint8_t>()[row * m.data.dim(1) + col],
                       m.scale.as<float>()[row / 128 * m.scale.dim(1) + col / 128]);
    };
    for (s.rank = 0; s.rank < ranks; ++s.rank) {
      std::vector<std::uint8_t> prepared(static_cast<std::size_t>(weight_layout(s).bytes));
      prepare_weights(s, t, prepared);
      const auto expect = [&](WeightPart part, int expert, int row, int col, const Fp8Matrix& m,
                              std::int64_t from_row, std::int64_t from_col) {
        const WeightElement e = prepared_element(s, prepared, part, expert, row, col);
        const auto [code, scale] = at(m, from_row, from_col);
        ASSERT_EQ(e.code, code) << "row " << row << " column " << col;
        ASSERT_EQ(e.scale, scale) << "row " << row << " column " << col;
      };
      const int heads = s.local_heads();
      const int inter = s.local_intermediate();
      for (int r = 0; r < s.q_lora + kKvRow; ++r) {
        for (int c = 0; c < s.hidden; ++c) {
          if (r < s.q_lora) {
            expect(WeightPart::kQkvA, 0, r, c, t.q_a, r, c);
          } else {
            expect(WeightPart::kQkvA, 0, r, c, t.kv_a, r - s.q_lora, c);
          }
        }
      }
      for (int h = 0; h < heads; ++h) {
        const int global = s.rank * heads + h;
        for (int r = 0; r < kQueryHead; ++r) {
          for (int c = 0; c < s.q_lora; ++c) {
            expect(WeightPart::kQB, 0, h * kQueryHead + r, c, t.q_b, global * kQueryHead + r, c);
          }
        }
        for (int l = 0; l < kLatent; ++l) {
          for (int d = 0; d < kNope; ++d) {
            expect(WeightPart::kUk, 0, h * kLatent + l, d, t.kv_b, global * 448 + d, l);
          }
          for (int v = 0; v < kValue; ++v) {
            expect(WeightPart::kUv, 0, h * kValue + v, l, t.kv_b, global * 448 + kNope + v, l);
          }
        }
        for (int r = 0; r < s.hidden; ++r) {
          for (int v = 0; v < kValue; ++v) {
            expect(WeightPart::kO, 0, r, h * kValue + v, t.o, r, global * kValue + v);
          }
        }
      }
      for (const int e : {0, 3, 15, 16}) {
        const auto i = static_cast<std::size_t>(e);
        const Fp8Matrix& gate = e == 16 ? t.shared_gate : t.gate[i];
        const Fp8Matrix& up = e == 16 ? t.shared_up : t.up[i];
        const Fp8Matrix& down = e == 16 ? t.shared_down : t.down[i];
        for (int r = 0; r < inter; ++r) {
          for (int c = 0; c < s.hidden; ++c) {
            expect(WeightPart::kUpGate, e, gate_row(r), c, gate, s.rank * inter + r, c);
            expect(WeightPart::kUpGate, e, gate_row(r) + 8, c, up, s.rank * inter + r, c);
            expect(WeightPart::kDown, e, c, r, down, c, s.rank * inter + r);
          }
        }
      }
    }
  }
}

TEST(DecodeShape, DenseLayersAreCutIntoExpertShapedSlices) {
  const DecodeShape glm5 = dense_shape(DecodeShape{}, 12288);
  EXPECT_EQ(glm5.experts, 5);
  EXPECT_EQ(glm5.top_k, 5);
  EXPECT_EQ(glm5.intermediate, 2048);
  const DecodeShape tiny = dense_shape(tiny_shape(), 512);
  EXPECT_EQ(tiny.experts, 1);
  EXPECT_EQ(tiny.dense_width(), 512);
  // A width that is no multiple of the experts' takes the fewest slices that fit.
  EXPECT_EQ(dense_shape(DecodeShape{}, 3072).intermediate, 1536);
  EXPECT_NE(message_of([] { dense_shape(DecodeShape{}, 1000); }).find("width 1000"),
            std::string::npos);
  DecodeShape s = tiny;
  s.experts = 3;
  EXPECT_NE(message_of([&] { validate(s); }).find("top_k must be 3"), std::string::npos);
}

TEST(DecodeWeights, DenseSlicesAreTheCheckpoints) {
  for (const int ranks : {1, 2}) {
    DecodeShape moe = tiny_shape();
    moe.ranks = ranks;
    DecodeShape s = dense_shape(moe, 768);
    const RandomLayer layer(s, 17);
    const LayerTensors& t = layer.tensors;
    const auto code = [](const Fp8Matrix& m, std::int64_t row, std::int64_t col) {
      return m.data.as<std::uint8_t>()[row * m.data.dim(1) + col];
    };
    const auto scale = [](const Fp8Matrix& m, std::int64_t row, std::int64_t col) {
      return m.scale.as<float>()[row / 128 * m.scale.dim(1) + col / 128];
    };
    for (s.rank = 0; s.rank < ranks; ++s.rank) {
      std::vector<std::uint8_t> prepared(static_cast<std::size_t>(weight_layout(s).bytes));
      prepare_weights(s, t, prepared);
      const int inter = s.local_intermediate();
      for (int e = 0; e <= s.experts; ++e) {
        for (int i = 0; i < inter; ++i) {
          const int from = e * s.intermediate + s.rank * inter + i;
          for (int c = 0; c < s.hidden; ++c) {
            const WeightElement gate =
                prepared_element(s, prepared, WeightPart::kUpGate, e, gate_row(i), c);
            const WeightElement up =
                prepared_element(s, prepared, WeightPart::kUpGate, e, gate_row(i) + 8, c);
            const WeightElement down = prepared_element(s, prepared, WeightPart::kDown, e, c, i);
            ASSERT_EQ(gate.code, code(t.dense_gate, from, c)) << "slice " << e << " row " << i;
            ASSERT_EQ(gate.scale, scale(t.dense_gate, from, c)) << "slice " << e << " row " << i;
            ASSERT_EQ(up.code, code(t.dense_up, from, c)) << "slice " << e << " row " << i;
            ASSERT_EQ(up.scale, scale(t.dense_up, from, c)) << "slice " << e << " row " << i;
            ASSERT_EQ(down.code, code(t.dense_down, c, from)) << "slice " << e << " row " << i;
            ASSERT_EQ(down.scale, scale(t.dense_down, c, from)) << "slice " << e << " row " << i;
          }
        }
      }
    }
  }
}

TEST(DecodeWeights, RefusesWrongTensorsWithTheReason) {
  const DecodeShape s = tiny_shape();
  const RandomLayer layer(s, 8);
  std::vector<std::uint8_t> out(static_cast<std::size_t>(weight_layout(s).bytes));
  LayerTensors t = layer.tensors;
  t.q_a.data.shape[0] = 64;
  EXPECT_NE(message_of([&] { prepare_weights(s, t, out); }).find("q_a_proj"), std::string::npos);
  t = layer.tensors;
  t.router.dtype = DType::kF16;
  EXPECT_NE(message_of([&] { prepare_weights(s, t, out); }).find("BF16"), std::string::npos);
  t = layer.tensors;
  t.o.scale.rank = 1;
  EXPECT_NE(message_of([&] { prepare_weights(s, t, out); }).find("per-channel"), std::string::npos);
  t = layer.tensors;
  t.down.pop_back();
  EXPECT_NE(message_of([&] { prepare_weights(s, t, out); }).find("15 down"), std::string::npos);
  t = layer.tensors;
  auto* bytes = const_cast<std::uint8_t*>(t.shared_up.data.as<std::uint8_t>());
  const std::uint8_t saved = bytes[300];
  bytes[300] = 0xFF;
  EXPECT_NE(message_of([&] { prepare_weights(s, t, out); }).find("NaN"), std::string::npos);
  bytes[300] = saved;
  out.pop_back();
  EXPECT_NE(message_of([&] { prepare_weights(s, layer.tensors, out); }).find("bytes"),
            std::string::npos);
}

// Every tensor of MoE and dense layers: missing, of another type, of another shape in any
// dimension.
TEST(DecodeWeights, EveryTensorIsCheckedByName) {
  for (const bool dense : {false, true}) {
    const DecodeShape s = dense ? dense_shape(tiny_shape(), 512) : tiny_shape();
    const RandomLayer layer(s, 8);
    LayerTensors t = layer.tensors;
    std::vector<std::pair<std::string, TensorView*>> views = {
        {"input_layernorm", &t.norm_input},
        {"q_a_layernorm", &t.norm_q},
        {"kv_a_layernorm", &t.norm_kv},
        {"post_attention_layernorm", &t.norm_post}};
    std::vector<std::pair<std::string, Fp8Matrix*>> matrices = {{"q_a_proj", &t.q_a},
                                                                {"kv_a_proj_with_mqa", &t.kv_a},
                                                                {"q_b_proj", &t.q_b},
                                                                {"kv_b_proj", &t.kv_b},
                                                                {"o_proj", &t.o}};
    if (dense) {
      matrices.insert(matrices.end(), {{"mlp.gate_proj", &t.dense_gate},
                                       {"mlp.up_proj", &t.dense_up},
                                       {"mlp.down_proj", &t.dense_down}});
    } else {
      views.insert(views.end(), {{"mlp.gate", &t.router}, {"e_score_correction_bias", &t.bias}});
      matrices.insert(matrices.end(), {{"experts.7.gate_proj", &t.gate[7]},
                                       {"experts.15.up_proj", &t.up[15]},
                                       {"experts.0.down_proj", &t.down[0]},
                                       {"shared_experts.gate_proj", &t.shared_gate},
                                       {"shared_experts.up_proj", &t.shared_up},
                                       {"shared_experts.down_proj", &t.shared_down}});
    }
    for (const auto& [name, matrix] : matrices) {
      views.emplace_back(name, &matrix->data);
      views.emplace_back(name + " scale", &matrix->scale);
    }
    for (const auto& [name, view] : views) {
      const TensorView good = *view;
      const auto refused = [&, &name = name, &view = view](const std::string& word) {
        const std::string message = message_of([&] { validate(s, t); });
        EXPECT_NE(message.find("tensor " + name + " "), std::string::npos)
            << name << ": " << message;
        EXPECT_NE(message.find(word), std::string::npos) << name << ": " << message;
        *view = good;
      };
      view->data = nullptr;
      refused("missing");
      view->dtype = DType::kF16;
      refused("F16");
      for (int i = 0; i < good.rank; ++i) {
        view->shape[static_cast<std::size_t>(i)] += 1;
        refused("wanted");
      }
    }
    validate(s, t);
  }
}

TEST(DecodeWeights, ScalesPerChannelAreForAttentionThatSaysSo) {
  DecodeShape s = tiny_shape();
  const RandomLayer blocks(s, 8);
  const RandomLayer channels(s, 8, 5, true);
  validate(s, blocks.tensors);
  EXPECT_NE(message_of([&] { validate(s, channels.tensors); }).find("attention_scales"),
            std::string::npos);
  s.attention_scales = AttentionScales::kChannel;
  validate(s, channels.tensors);
  EXPECT_NE(message_of([&] { validate(s, blocks.tensors); }).find("q_a_proj"), std::string::npos);
  LayerTensors t = channels.tensors;
  t.o.scale.rank = 2;  // [rows, 1] is the same
  t.o.scale.shape[1] = 1;
  validate(s, t);
  t.o.scale.shape[0] -= 1;
  EXPECT_NE(message_of([&] { validate(s, t); }).find("scales of o_proj"), std::string::npos);
  t = channels.tensors;
  t.kv_b.scale.dtype = DType::kBF16;
  EXPECT_NE(message_of([&] { validate(s, t); }).find("kv_b_proj scale"), std::string::npos);
  // Experts stay per block.
  t = channels.tensors;
  t.shared_up.scale.rank = 1;
  t.shared_up.scale.shape[0] = s.intermediate;
  EXPECT_NE(message_of([&] { validate(s, t); }).find("shared_experts.up_proj"), std::string::npos);
}

// The same weights, written once with a scale a block and once with a scale a row.
TEST(DecodeReference, ScalesPerChannelMeanWhatScalesPerBlockMean) {
  DecodeShape s = tiny_shape();
  s.rows = 2;
  const RandomLayer layer(s, 19);
  LayerTensors blocks = layer.tensors;
  LayerTensors channels = layer.tensors;
  std::vector<std::vector<float>> kept;
  kept.reserve(10);
  for (const auto& matrix : {&LayerTensors::q_a, &LayerTensors::kv_a, &LayerTensors::q_b,
                             &LayerTensors::kv_b, &LayerTensors::o}) {
    const Fp8Matrix& m = layer.tensors.*matrix;
    const std::int64_t rows = m.data.dim(0);
    const std::int64_t width = m.scale.dim(1);
    // One scale for a row of blocks.
    std::vector<float>& block = kept.emplace_back();
    std::vector<float>& row = kept.emplace_back();
    for (std::int64_t i = 0; i < m.scale.elements(); ++i) {
      block.push_back(m.scale.as<float>()[i / width * width]);
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      row.push_back(block[static_cast<std::size_t>(r / 128 * width)]);
    }
    (blocks.*matrix).scale.data = block.data();
    TensorView& scale = (channels.*matrix).scale;
    scale.data = row.data();
    scale.rank = 1;
    scale.shape = {rows};
  }
  const RandomCache cache(KvFormat::kBf16, 8, 13);
  const RandomStep step(s, cache.slots(), {100, 33}, 14);
  std::vector<std::uint16_t> out[2] = {std::vector<std::uint16_t>(step.x.size()),
                                       std::vector<std::uint16_t>(step.x.size())};
  for (const int i : {0, 1}) {
    s.attention_scales = i == 0 ? AttentionScales::kBlock : AttentionScales::kChannel;
    RandomCache own = cache;
    run_reference_layer(s, i == 0 ? blocks : channels, step.input(), own.host(), own.slots(),
                        step.x, out[i]);
  }
  EXPECT_EQ(out[0], out[1]);
  // A scale of one row of W_UK, which is an input there, shows in the result.
  kept[7][5] *= 4.0F;
  RandomCache own = cache;
  run_reference_layer(s, channels, step.input(), own.host(), own.slots(), step.x, out[0]);
  EXPECT_NE(out[0], out[1]);
}

TEST(DecodeReference, RefusalsNameTheValue) {
  DecodeShape s = tiny_shape();
  s.rows = 2;
  const RandomLayer layer(s, 20);
  RandomCache cache(KvFormat::kBf16, 8, 13);
  const RandomStep good(s, cache.slots(), {10, 33}, 14);
  std::vector<std::uint16_t> out(good.x.size());
  const auto refusal = [&](const RandomStep& step, const HostCache& at) {
    return message_of([&] {
      run_reference_layer(s, layer.tensors, step.input(), at, cache.slots(), step.x, out);
    });
  };
  EXPECT_EQ(refusal(good, cache.host()), "");
  RandomStep bad = good;
  bad.x.pop_back();
  EXPECT_NE(refusal(bad, cache.host()).find("511"), std::string::npos);
  bad = good;
  bad.positions[1] = -5;
  EXPECT_NE(refusal(bad, cache.host()).find("position -5"), std::string::npos);
  bad = good;
  bad.slots[0] = 512;
  EXPECT_NE(refusal(bad, cache.host()).find("slot 512 of 512"), std::string::npos);
  bad = good;
  bad.picks[12] = 512;
  EXPECT_NE(refusal(bad, cache.host()).find("row 1 picks slot 512"), std::string::npos);
  bad = good;
  bad.pick_offsets[2] = 99;
  EXPECT_NE(refusal(bad, cache.host()).find("picks 10 to 99 of 43"), std::string::npos);
  bad = good;
  bad.picks.assign(5000, 3);
  bad.pick_offsets = {0, 1, 2050};
  EXPECT_NE(refusal(bad, cache.host()).find("at most 2048"), std::string::npos);
  HostCache overlapping = cache.host();
  overlapping.page_stride = 64 * 1152 - 2;
  EXPECT_NE(refusal(good, overlapping).find("73726 bytes apart"), std::string::npos);
  EXPECT_NE(refusal(good, HostCache{}).find("a page of 64 rows"), std::string::npos);
}

TEST(DecodeReference, RoutingTellsTheChoiceAndItsGap) {
  DecodeShape s = tiny_shape();
  s.rows = 3;
  RandomLayer layer(s, 20);
  const RandomCache cache(KvFormat::kBf16, 8, 13);
  const RandomStep step(s, cache.slots(), {10, -1, 33}, 14);
  const auto run = [&] {
    RandomCache own = cache;
    std::vector<std::uint16_t> out(step.x.size());
    std::vector<RowRouting> routing;
    run_reference_layer(s, layer.tensors, step.input(), own.host(), own.slots(), step.x, out,
                        &routing);
    return routing;
  };
  std::vector<RowRouting> routing = run();
  ASSERT_EQ(routing.size(), 3U);
  EXPECT_EQ(routing[0].experts.size(), 4U);
  EXPECT_TRUE(routing[1].experts.empty());
  EXPECT_GT(routing[2].gap, 0.0F);
  layer.tie_all();
  routing = run();
  EXPECT_EQ(routing[2].experts, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(routing[2].gap, 0.0F);
}

TEST(DecodeReference, RowsDoNotDependOnEachOtherOrOnPadding) {
  DecodeShape s = tiny_shape();
  s.rows = 3;
  const RandomLayer layer(s, 9);
  for (const KvFormat format : {KvFormat::kBf16, KvFormat::kFp8Scaled, KvFormat::kFp8}) {
    RandomCache cache(format, 8, 10);
    RandomCache untouched = cache;
    const RandomStep step(s, cache.slots(), {70, -1, 5}, 11);
    const auto h = static_cast<std::size_t>(s.hidden);
    std::vector<std::uint16_t> out(3 * h, 0x1234);
    run_reference_layer(s, layer.tensors, step.input(), cache.host(), cache.slots(), step.x, out);
    for (std::size_t i = 0; i < h; ++i) ASSERT_EQ(out[h + i], 0x1234);
    // The last row alone.
    DecodeShape one = s;
    one.rows = 1;
    RandomCache again = untouched;
    std::vector<std::int32_t> offsets = {0, step.pick_offsets[3] - step.pick_offsets[2]};
    const StepInput alone{
        std::span(step.positions).subspan(2), std::span(step.slots).subspan(2), offsets,
        std::span(step.picks).subspan(static_cast<std::size_t>(step.pick_offsets[2]))};
    std::vector<std::uint16_t> single(h);
    run_reference_layer(one, layer.tensors, alone, again.host(), cache.slots(),
                        std::span(step.x).subspan(2 * h), single);
    for (std::size_t i = 0; i < h; ++i) ASSERT_EQ(out[2 * h + i], single[i]);
    // Exactly the two new rows changed.
    std::size_t changed = 0;
    for (std::int64_t slot = 0; slot < cache.slots(); ++slot) {
      changed += std::memcmp(cache.row_of(slot), untouched.row_of(slot),
                             static_cast<std::size_t>(kv_row_bytes(format))) != 0;
    }
    EXPECT_EQ(changed, 2U);
  }
}

// A dense layer equals, bit for bit, the MoE layer of the same slices whose router scores them all
// 1/2 (zero weights and bias) with routed scale 2: what a kernel that runs the router computes.
TEST(DecodeReference, DenseEqualsEveryExpertChosenWithWeightOne) {
  DecodeShape dense = dense_shape(tiny_shape(), 768);
  dense.rows = 3;
  const RandomLayer layer(dense, 15);
  LayerTensors t = layer.tensors;
  const auto rows_of = [&](const Fp8Matrix& m, int e) {
    Fp8Matrix part = m;
    part.data.data = m.data.as<std::uint8_t>() + std::int64_t{256} * e * dense.hidden;
    part.data.shape[0] = 256;
    part.scale.data = m.scale.as<float>() + std::int64_t{2} * e * m.scale.dim(1);
    part.scale.shape[0] = 2;
    return part;
  };
  std::vector<std::vector<std::uint8_t>> codes;
  std::vector<std::vector<float>> scales;
  codes.reserve(3);
  scales.reserve(3);
  const auto columns_of = [&](const Fp8Matrix& m, int e) {
    codes.emplace_back();
    scales.emplace_back();
    for (std::int64_t r = 0; r < dense.hidden; ++r) {
      const auto* from = m.data.as<std::uint8_t>() + r * m.data.dim(1) + std::int64_t{256} * e;
      codes.back().insert(codes.back().end(), from, from + 256);
    }
    for (std::int64_t b = 0; b < m.scale.dim(0); ++b) {
      const auto* from = m.scale.as<float>() + b * m.scale.dim(1) + std::int64_t{2} * e;
      scales.back().insert(scales.back().end(), from, from + 2);
    }
    Fp8Matrix part = m;
    part.data.data = codes.back().data();
    part.data.shape[1] = 256;
    part.scale.data = scales.back().data();
    part.scale.shape[1] = 2;
    return part;
  };
  for (int e = 0; e < 2; ++e) {
    t.gate.push_back(rows_of(t.dense_gate, e));
    t.up.push_back(rows_of(t.dense_up, e));
    t.down.push_back(columns_of(t.dense_down, e));
  }
  t.shared_gate = rows_of(t.dense_gate, 2);
  t.shared_up = rows_of(t.dense_up, 2);
  t.shared_down = columns_of(t.dense_down, 2);
  const std::vector<std::uint16_t> router(static_cast<std::size_t>(2 * dense.hidden), 0);
  const std::vector<float> bias(2, 0.0F);
  t.router.data = router.data();
  t.router.dtype = DType::kBF16;
  t.router.rank = 2;
  t.router.shape = {2, dense.hidden};
  t.bias.data = bias.data();
  t.bias.dtype = DType::kF32;
  t.bias.rank = 1;
  t.bias.shape = {2};
  DecodeShape moe = dense;
  moe.dense = false;
  moe.norm_topk = false;
  moe.routed_scale = 2.0F;
  RandomCache cache(KvFormat::kBf16, 8, 16);
  RandomCache again = cache;
  const RandomStep step(dense, cache.slots(), {90, -1, 5}, 18);
  std::vector<std::uint16_t> out(step.x.size());
  std::vector<std::uint16_t> want(step.x.size());
  run_reference_layer(dense, t, step.input(), cache.host(), cache.slots(), step.x, out);
  run_reference_layer(moe, t, step.input(), again.host(), again.slots(), step.x, want);
  EXPECT_EQ(out, want);
  EXPECT_EQ(cache.bytes, again.bytes);
}

TEST(DecodeReference, ShardsAddUpToTheWholeLayer) {
  DecodeShape s = tiny_shape();
  s.rows = 2;
  const RandomLayer layer(s, 12);
  std::vector<float> whole;
  for (const int ranks : {1, 2, 4}) {
    s.ranks = ranks;
    RandomCache cache(KvFormat::kBf16, 8, 13);
    const RandomStep step(s, cache.slots(), {100, 33}, 14);
    std::vector<std::uint16_t> out(step.x.size());
    run_reference_layer(s, layer.tensors, step.input(), cache.host(), cache.slots(), step.x, out);
    std::vector<float> values;
    for (const std::uint16_t bits : out) values.push_back(bf16_value(bits));
    if (ranks == 1) {
      whole = values;
    } else {
      EXPECT_LT(relative_l2(values, whole), 5e-3) << ranks << " ranks";
    }
  }
}

}  // namespace
}  // namespace penstock::decode::test
