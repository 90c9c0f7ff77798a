#include "penstock/ops/decode_layer/weights.h"

#include <fmt/format.h>

#include <cstring>
#include <string>

#include "penstock/core/error.h"

namespace penstock::decode {
namespace {

constexpr int kHeadRows = kNope + kValue;  // of W_kv_b

void check_tensor(const std::string& name, const TensorView& view, DType dtype,
                  std::initializer_list<std::int64_t> want) {
  const std::string wanted =
      describe_shape(std::span<const std::int64_t>(want.begin(), want.size()));
  require(view.data != nullptr, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("decode_layer: tensor {} is missing, wanted {} {}", name, wanted,
                       to_string(dtype));
  });
  require(view.dtype == dtype, ErrorKind::kUnsupported, [&] {
    return fmt::format("decode_layer: tensor {} is {}, supported is {}", name, describe(view),
                       to_string(dtype));
  });
  require(view.has_shape(want), ErrorKind::kInvalidArgument, [&] {
    return fmt::format("decode_layer: tensor {} is {}, wanted {}", name, describe(view), wanted);
  });
}

void check_matrix(const std::string& name, const Fp8Matrix& m, std::int64_t rows, std::int64_t cols,
                  AttentionScales scales = AttentionScales::kBlock) {
  check_tensor(name, m.data, DType::kE4M3, {rows, cols});
  if (scales == AttentionScales::kChannel) {
    require(m.scale.data == nullptr || per_channel(m), ErrorKind::kInvalidArgument, [&] {
      return fmt::format(
          "decode_layer: the scales of {} are {}, wanted are [{}] or [{}, 1]: the shape says one "
          "a row (attention_scales kChannel)",
          name, describe(m.scale), rows, rows);
    });
    TensorView flat = m.scale;
    flat.rank = 1;
    check_tensor(name + " scale", flat, DType::kF32, {rows});
    return;
  }
  require(m.scale.data == nullptr || m.scale.rank == 2, ErrorKind::kUnsupported, [&] {
    return fmt::format(
        "decode_layer: the scales of {} are {}, i.e. not per 128x128 block; per-channel scales are "
        "for attention matrices, with attention_scales kChannel in the shape",
        name, describe(m.scale));
  });
  check_tensor(name + " scale", m.scale, DType::kF32, {(rows + 127) / 128, (cols + 127) / 128});
}

// Reads a checkpoint matrix: codes and scales by global row and column.
struct Source {
  const Fp8Matrix* m;
  std::int64_t cols;
  std::int64_t scale_cols;
  explicit Source(const Fp8Matrix& matrix)
      : m(&matrix), cols(matrix.data.dim(1)), scale_cols(matrix.scale.dim(1)) {}
  const std::uint8_t* at(std::int64_t row, std::int64_t col) const {
    return m->data.as<std::uint8_t>() + row * cols + col;
  }
  float scale(std::int64_t row, std::int64_t col) const {
    return m->scale.as<float>()[row / 128 * scale_cols + col / 128];
  }
};

[[noreturn]] void refuse_nan(const char* name, std::int64_t row, std::int64_t col) {
  throw_error(ErrorKind::kUnsupported,
              fmt::format("decode_layer: weight {} holds NaN at [{}, {}]; a layer with NaN weights "
                          "has no defined result",
                          name, row, col));
}

// Where a unit holds the code of (row, column) and the scale that belongs to it.
std::int64_t unit_offset(int row, int column) {
  return (2 * (column / 64) + row / 8) * 512 + (row % 8 * 4 + column % 64 / 16) * 16 + column % 16;
}
std::int64_t scale_offset(const MatrixPlan& plan, int row, int column) {
  return kTileRows * plan.unit_k + (2 * (column / 64) + row / 8) * 4;
}

// Packs a matrix of row-contiguous columns. source_of(row) gives (source, source row); columns
// start at `column0` of the source.
template <typename SourceOf>
void pack(const char* name, int rows, int columns, std::int64_t column0, SourceOf&& source_of,
          std::uint8_t* out) {
  const MatrixPlan plan = matrix_plan(rows, columns, 1);
  for (int tile = 0; tile < plan.tiles; ++tile) {
    for (int unit = 0; unit < plan.units; ++unit, out += plan.unit_bytes()) {
      const std::int64_t column = column0 + static_cast<std::int64_t>(unit) * plan.unit_k;
      for (int r = 0; r < kTileRows; ++r) {
        const auto [source, row] = source_of(tile * kTileRows + r);
        const std::uint8_t* from = source.at(row, column);
        for (int k = 0; k < plan.unit_k; ++k) {
          if ((from[k] & 0x7F) == 0x7F) refuse_nan(name, row, column + k);
        }
        for (int k = 0; k < plan.unit_k; k += 16) {
          std::memcpy(out + unit_offset(r, k), from + k, 16);
        }
        for (int j = 0; j * 64 < plan.unit_k && r % 8 == 0; ++j) {
          const float scale = source.scale(row, column + 64 * j);
          std::memcpy(out + scale_offset(plan, r, 64 * j), &scale, 4);
        }
      }
    }
  }
}

void widen_bf16(const TensorView& from, std::uint8_t* out) {
  for (std::int64_t i = 0; i < from.elements(); ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(from.as<std::uint16_t>()[i]) << 16;
    std::memcpy(out + i * 4, &bits, 4);
  }
}

}  // namespace

void validate(const DecodeShape& shape, const LayerTensors& t) {
  validate(shape);
  const std::int64_t h = shape.hidden;
  const std::int64_t inter = shape.intermediate;
  const AttentionScales scales = shape.attention_scales;
  const auto heads = static_cast<std::int64_t>(shape.heads);
  check_matrix("q_a_proj", t.q_a, shape.q_lora, h, scales);
  check_matrix("kv_a_proj_with_mqa", t.kv_a, kKvRow, h, scales);
  check_matrix("q_b_proj", t.q_b, heads * kQueryHead, shape.q_lora, scales);
  check_matrix("kv_b_proj", t.kv_b, heads * kHeadRows, kLatent, scales);
  check_matrix("o_proj", t.o, h, heads * kValue, scales);
  check_tensor("input_layernorm", t.norm_input, DType::kBF16, {h});
  check_tensor("q_a_layernorm", t.norm_q, DType::kBF16, {shape.q_lora});
  check_tensor("kv_a_layernorm", t.norm_kv, DType::kBF16, {kLatent});
  check_tensor("post_attention_layernorm", t.norm_post, DType::kBF16, {h});
  if (shape.dense) {
    check_matrix("mlp.gate_proj", t.dense_gate, shape.dense_width(), h);
    check_matrix("mlp.up_proj", t.dense_up, shape.dense_width(), h);
    check_matrix("mlp.down_proj", t.dense_down, h, shape.dense_width());
    return;
  }
  check_tensor("mlp.gate", t.router, DType::kBF16, {shape.experts, h});
  check_tensor("e_score_correction_bias", t.bias, DType::kF32, {shape.experts});
  const auto experts = static_cast<std::size_t>(shape.experts);
  require(t.gate.size() == experts && t.up.size() == experts && t.down.size() == experts,
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format(
                "decode_layer: {} gate, {} up and {} down matrices given for {} experts",
                t.gate.size(), t.up.size(), t.down.size(), experts);
          });
  for (std::size_t e = 0; e < experts; ++e) {
    check_matrix(fmt::format("experts.{}.gate_proj", e), t.gate[e], inter, h);
    check_matrix(fmt::format("experts.{}.up_proj", e), t.up[e], inter, h);
    check_matrix(fmt::format("experts.{}.down_proj", e), t.down[e], h, inter);
  }
  check_matrix("shared_experts.gate_proj", t.shared_gate, inter, h);
  check_matrix("shared_experts.up_proj", t.shared_up, inter, h);
  check_matrix("shared_experts.down_proj", t.shared_down, h, inter);
}

ExpertTensors expert_tensors(const DecodeShape& shape, const LayerTensors& t, int expert) {
  if (shape.dense) {
    return {&t.dense_gate, &t.dense_up, &t.dense_down,
            static_cast<std::int64_t>(expert) * shape.intermediate};
  }
  if (expert == shape.experts) return {&t.shared_gate, &t.shared_up, &t.shared_down, 0};
  const auto e = static_cast<std::size_t>(expert);
  return {&t.gate[e], &t.up[e], &t.down[e], 0};
}

void prepare_weights(const DecodeShape& shape, const LayerTensors& t, std::span<std::uint8_t> out) {
  validate(shape, t);
  require(shape.attention_scales == AttentionScales::kBlock, ErrorKind::kUnsupported, [] {
    return std::string(
        "decode_layer: the kernel's layout has no place for attention scales per channel; the CPU "
        "operator takes them");
  });
  const WeightLayout layout = weight_layout(shape);
  require(static_cast<std::int64_t>(out.size()) == layout.bytes, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("decode_layer: {} bytes given for prepared weights of {} bytes", out.size(),
                       layout.bytes);
  });
  std::memset(out.data(), 0, out.size());
  std::uint8_t* const base = out.data();
  const int heads = shape.local_heads();
  const int inter = shape.local_intermediate();
  const int head0 = shape.rank * heads;
  struct Row {
    const Source& source;
    std::int64_t row;
  };

  const Source q_a(t.q_a);
  const Source kv_a(t.kv_a);
  pack(
      "q_a_proj / kv_a_proj_with_mqa", shape.q_lora + kKvRow, shape.hidden, 0,
      [&](int row) {
        return row < shape.q_lora ? Row{q_a, row} : Row{kv_a, row - shape.q_lora};
      },
      base + layout.qkv_a);
  const Source q_b(t.q_b);
  pack(
      "q_b_proj", heads * kQueryHead, shape.q_lora, 0,
      [&](int row) {
        return Row{q_b, head0 * kQueryHead + row};
      },
      base + layout.q_b);

  const Source kv_b(t.kv_b);
  const MatrixPlan uk = matrix_plan(heads * kLatent, kNope, 1);
  std::uint8_t* out_unit = base + layout.uk;
  for (int tile = 0; tile < uk.tiles; ++tile) {
    const std::int64_t row0 =
        static_cast<std::int64_t>(head0 + tile * kTileRows / kLatent) * kHeadRows;
    const int latent0 = tile * kTileRows % kLatent;
    for (int unit = 0; unit < uk.units; ++unit, out_unit += uk.unit_bytes()) {
      for (int r = 0; r < kTileRows; ++r) {
        for (int k = 0; k < uk.unit_k; ++k) {
          const std::int64_t row = row0 + unit * uk.unit_k + k;
          const std::uint8_t code = *kv_b.at(row, latent0 + r);
          if ((code & 0x7F) == 0x7F) refuse_nan("kv_b_proj", row, latent0 + r);
          out_unit[unit_offset(r, k)] = code;
          if (r % 8 != 0 || k % 64 != 0) continue;
          const float scale = kv_b.scale(row, latent0);
          std::memcpy(out_unit + scale_offset(uk, r, k), &scale, 4);
        }
      }
    }
  }
  pack(
      "kv_b_proj", heads * kValue, kLatent, 0,
      [&](int row) {
        return Row{kv_b, static_cast<std::int64_t>(head0 + row / kValue) * kHeadRows + kNope +
                             row % kValue};
      },
      base + layout.uv);
  const Source o(t.o);
  pack(
      "o_proj", shape.hidden, heads * kValue, static_cast<std::int64_t>(head0) * kValue,
      [&](int row) {
        return Row{o, row};
      },
      base + layout.o);

  if (!shape.dense) {
    std::memcpy(base + layout.router, t.router.data, static_cast<std::size_t>(t.router.bytes()));
    std::memcpy(base + layout.bias, t.bias.data, static_cast<std::size_t>(t.bias.bytes()));
  }
  const std::int64_t up_gate_bytes = matrix_plan(2 * inter, shape.hidden, 1).bytes();
  const std::int64_t down_bytes = matrix_plan(shape.hidden, inter, 1).bytes();
  for (int e = 0; e <= shape.experts; ++e) {
    const ExpertTensors expert = expert_tensors(shape, t, e);
    const Source gate(*expert.gate);
    const Source up(*expert.up);
    const Source down(*expert.down);
    const std::int64_t first = expert.first + static_cast<std::int64_t>(shape.rank) * inter;
    pack(
        "gate_proj / up_proj", 2 * inter, shape.hidden, 0,
        [&](int row) {
          // Eight gate rows, then the eight up rows that belong to them.
          return Row{row % kTileRows < 8 ? gate : up, first + row / kTileRows * 8 + row % 8};
        },
        base + layout.up_gate + e * up_gate_bytes);
    pack(
        "down_proj", shape.hidden, inter, first,
        [&](int row) {
          return Row{down, row};
        },
        base + layout.down + e * down_bytes);
  }
  widen_bf16(t.norm_input, base + layout.norm_input);
  widen_bf16(t.norm_q, base + layout.norm_q);
  widen_bf16(t.norm_kv, base + layout.norm_kv);
  widen_bf16(t.norm_post, base + layout.norm_post);
}

WeightElement prepared_element(const DecodeShape& shape, std::span<const std::uint8_t> prepared,
                               WeightPart part, int expert, int row, int column) {
  const WeightLayout layout = weight_layout(shape);
  const int heads = shape.local_heads();
  const int inter = shape.local_intermediate();
  int rows = 0;
  int columns = 0;
  std::int64_t at = 0;
  switch (part) {
    case WeightPart::kQkvA:
      rows = shape.q_lora + kKvRow, columns = shape.hidden, at = layout.qkv_a;
      break;
    case WeightPart::kQB:
      rows = heads * kQueryHead, columns = shape.q_lora, at = layout.q_b;
      break;
    case WeightPart::kUk:
      rows = heads * kLatent, columns = kNope, at = layout.uk;
      break;
    case WeightPart::kUv:
      rows = heads * kValue, columns = kLatent, at = layout.uv;
      break;
    case WeightPart::kO:
      rows = shape.hidden, columns = heads * kValue, at = layout.o;
      break;
    case WeightPart::kUpGate:
      rows = 2 * inter, columns = shape.hidden, at = layout.up_gate;
      break;
    case WeightPart::kDown:
      rows = shape.hidden, columns = inter, at = layout.down;
      break;
  }
  const bool per_expert = part == WeightPart::kUpGate || part == WeightPart::kDown;
  require(row >= 0 && row < rows && column >= 0 && column < columns && expert >= 0 &&
              expert <= (per_expert ? shape.experts : 0) &&
              static_cast<std::int64_t>(prepared.size()) == layout.bytes,
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format(
                "decode_layer: element [{}, {}] of expert {} does not exist in a part of [{}, {}], "
                "or {} bytes are not the {} of the layout",
                row, column, expert, rows, columns, prepared.size(), layout.bytes);
          });
  const MatrixPlan plan = matrix_plan(rows, columns, 1);
  const std::uint8_t* unit =
      prepared.data() + at + expert * plan.bytes() +
      (static_cast<std::int64_t>(row / kTileRows) * plan.units + column / plan.unit_k) *
          plan.unit_bytes();
  const int r = row % kTileRows;
  const int k = column % plan.unit_k;
  WeightElement element{};
  element.code = unit[unit_offset(r, k)];
  std::memcpy(&element.scale, unit + scale_offset(plan, r, k), 4);
  return element;
}

}  // namespace penstock::decode
