#include "penstock/ops/decode_layer/shape.h"

#include <fmt/format.h>

#include <cmath>

#include "penstock/core/error.h"

namespace penstock::decode {
namespace {

void in_range(const char* name, int value, int low, int high) {
  require(value >= low && value <= high, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("decode_layer: {} is {}, accepted are {} to {}", name, value, low, high);
  });
}

void multiple(const char* name, int value, int of, const char* why) {
  require(value > 0 && value % of == 0, ErrorKind::kUnsupported, [&] {
    return fmt::format("decode_layer: {} is {}, it must be a positive multiple of {}: {}", name,
                       value, of, why);
  });
}

}  // namespace

void validate(const DecodeShape& shape) {
  in_range("rows", shape.rows, 1, kMaxRows);
  require(shape.ranks == 1 || shape.ranks == 2 || shape.ranks == 4 || shape.ranks == 8,
          ErrorKind::kUnsupported, [&] {
            return fmt::format("decode_layer: {} ranks, supported are 1, 2, 4 and 8", shape.ranks);
          });
  in_range("rank", shape.rank, 0, shape.ranks - 1);
  multiple("hidden", shape.hidden, 256, "the router's units span 256 columns");
  multiple("q_lora", shape.q_lora, 128, "weight units span 128 columns");
  require(shape.hidden <= 8192 && shape.q_lora <= 8192, ErrorKind::kUnsupported, [&] {
    return fmt::format(
        "decode_layer: hidden {} and q_lora {} must be at most 8192: rows are held in shared "
        "memory",
        shape.hidden, shape.q_lora);
  });
  multiple("heads", shape.heads, shape.ranks, "every rank takes the same number of heads");
  in_range("experts", shape.experts, 1, kMaxExperts);
  in_range("top_k", shape.top_k, 1, kMaxTopK);
  require(shape.top_k <= shape.experts, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("decode_layer: top_k {} exceeds the number of experts {}", shape.top_k,
                       shape.experts);
  });
  require(!shape.dense || shape.top_k == shape.experts, ErrorKind::kInvalidArgument, [&] {
    return fmt::format(
        "decode_layer: a dense layer of {} + 1 slices with top_k {}: every slice runs for every "
        "row, top_k must be {}",
        shape.experts, shape.top_k, shape.experts);
  });
  multiple("intermediate", shape.intermediate, 64 * shape.ranks,
           "a rank's slice of an expert is a whole number of 64-column steps");
  const int inter = shape.local_intermediate();
  require(inter % 128 == 0 || 128 % inter == 0, ErrorKind::kUnsupported, [&] {
    return fmt::format(
        "decode_layer: a rank's slice of an expert is {} wide; it must divide 128 or be a "
        "multiple of 128, so that no slice crosses a 128x128 scale block",
        inter);
  });
  require(inter <= kMaxIntermediate, ErrorKind::kUnsupported, [&] {
    return fmt::format("decode_layer: a rank's slice of an expert is {} wide, at most {} fit",
                       inter, kMaxIntermediate);
  });
  require(shape.eps > 0 && shape.eps_latent > 0 && std::isfinite(shape.routed_scale) &&
              shape.rope_theta > 1,
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format(
                "decode_layer: eps {}, eps_latent {}, routed_scale {}, rope_theta {}: the first "
                "two must be positive, the third finite, the last above 1",
                shape.eps, shape.eps_latent, shape.routed_scale, shape.rope_theta);
          });
}

DecodeShape dense_shape(const DecodeShape& moe, int width) {
  DecodeShape s = moe;
  s.dense = true;
  const auto cut = [&](int slices) {
    if (slices < 2 || slices > kMaxTopK + 1 || width % slices != 0) return false;
    s.experts = s.top_k = slices - 1;
    s.intermediate = width / slices;
    const int inter = s.local_intermediate();
    return s.intermediate % (64 * s.ranks) == 0 && (inter % 128 == 0 || 128 % inter == 0) &&
           inter <= kMaxIntermediate;
  };
  bool found = width > 0 && width % moe.intermediate == 0 && cut(width / moe.intermediate);
  for (int slices = 2; !found && slices <= kMaxTopK + 1; ++slices) found = cut(slices);
  require(found, ErrorKind::kUnsupported, [&] {
    return fmt::format(
        "decode_layer: a dense layer of width {} cannot be cut into 2 to {} equal slices whose {} "
        "ranks' parts are multiples of 64 columns that divide 128 or are multiples of it, at most "
        "{}",
        width, kMaxTopK + 1, s.ranks, kMaxIntermediate);
  });
  validate(s);
  return s;
}

std::string describe(const DecodeShape& s) {
  const char* scales =
      s.attention_scales == AttentionScales::kChannel ? ", attention scaled per channel" : "";
  if (s.dense) {
    return fmt::format(
        "{} rows, hidden {}, q_lora {}, {} heads, dense of width {} in {} slices, rank {} of {}{}",
        s.rows, s.hidden, s.q_lora, s.heads, s.dense_width(), s.experts + 1, s.rank, s.ranks,
        scales);
  }
  return fmt::format(
      "{} rows, hidden {}, q_lora {}, {} heads, {} + 1 experts top-{} of width {}, rank {} of {}{}",
      s.rows, s.hidden, s.q_lora, s.heads, s.experts, s.top_k, s.intermediate, s.rank, s.ranks,
      scales);
}

}  // namespace penstock::decode
