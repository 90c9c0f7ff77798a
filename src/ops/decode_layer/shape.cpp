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
  multiple("hidden", shape.hidden, 256, "weight units span 256 columns");
  multiple("q_lora", shape.q_lora, 128, "weight units span 128 or 256 columns");
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
  multiple("intermediate", shape.intermediate, 64 * shape.ranks,
           "a rank's slice of an expert is a whole number of 64-column steps");
  const int inter = shape.local_intermediate();
  require(inter % 128 == 0 || 128 % inter == 0, ErrorKind::kUnsupported, [&] {
    return fmt::format(
        "decode_layer: a rank's slice of an expert is {} wide; it must divide 128 or be a "
        "multiple of 128, so that no slice crosses a 128x128 scale block",
        inter);
  });
  require(inter <= 2048, ErrorKind::kUnsupported, [&] {
    return fmt::format("decode_layer: a rank's slice of an expert is {} wide, at most 2048 fit",
                       inter);
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

std::string describe(const DecodeShape& s) {
  return fmt::format(
      "{} rows, hidden {}, q_lora {}, {} heads, {} + 1 experts top-{} of width {}, rank {} of {}",
      s.rows, s.hidden, s.q_lora, s.heads, s.experts, s.top_k, s.intermediate, s.rank, s.ranks);
}

}  // namespace penstock::decode
