#include "ops/a2a_gemm/operands.h"

#include <fmt/format.h>

#include "penstock/core/error.h"

namespace penstock::a2a_gemm {

void check_operands(const Operands& o, const Shape& shape, std::int32_t rank, bool quantise_x) {
  const auto need = [](bool ok, const char* what) {
    require(ok, ErrorKind::kInvalidArgument, [&] { return fmt::format("a2a_gemm: {}", what); });
  };
  const std::int64_t rows = total_rows(shape);
  need(o.x != nullptr || rows == 0, "x is null");
  need(o.w != nullptr, "w is null");
  need(o.out != nullptr || shape.rows[static_cast<std::size_t>(rank)] == 0, "out is null");
  if (shape.format != Format::kFp8) return;
  need(o.w_scales != nullptr, "w_scales is null; fp8 needs scales");
  if (quantise_x) return;
  need(o.x_scales != nullptr || rows == 0, "x_scales is null; fp8 needs scales");
  require(o.x_scale_stride >= rows && o.x_scale_stride % kUnit == 0, ErrorKind::kInvalidArgument,
          [&] {
            return fmt::format(
                "a2a_gemm: x_scale_stride is {}; give a multiple of {} of at least the {} rows of "
                "x",
                o.x_scale_stride, kUnit, rows);
          });
}

void check_quantise_x(const Shape& shape, bool quantise_x) {
  require(!quantise_x || shape.format == Format::kFp8, ErrorKind::kInvalidArgument, [&] {
    return fmt::format(
        "a2a_gemm: quantise_x with format {}: E4M3 rows meet E4M3 weights, so give an fp8 shape",
        to_string(shape.format));
  });
}

void check_mirror_operands(const Operands& o, const Shape& shape, std::int32_t rank) {
  const auto need = [](bool ok, const char* what) {
    require(ok, ErrorKind::kInvalidArgument, [&] { return fmt::format("gemm_a2a: {}", what); });
  };
  const std::int32_t mine = shape.rows[static_cast<std::size_t>(rank)];
  need(o.x != nullptr || mine == 0, "x is null");
  need(o.w != nullptr, "w is null");
  need(o.out != nullptr || total_rows(shape) == 0, "out is null");
  if (shape.format != Format::kFp8) return;
  need(o.x_scales != nullptr || mine == 0, "x_scales is null; fp8 needs scales");
  need(o.w_scales != nullptr, "w_scales is null; fp8 needs scales");
  require(
      o.x_scale_stride >= mine && o.x_scale_stride % kUnit == 0, ErrorKind::kInvalidArgument, [&] {
        return fmt::format(
            "gemm_a2a: x_scale_stride is {}; give a multiple of {} of at least the {} rows of x",
            o.x_scale_stride, kUnit, mine);
      });
}

void check_mirror_options(const Options& options) {
  require(!options.quantise_x && options.order == ChunkOrder::kRotation,
          ErrorKind::kInvalidArgument, [] {
            return std::string(
                "gemm_a2a: quantise_x and arrival order are a2a_gemm's: here X stays at home and "
                "nothing is summed over ranks; leave them at their defaults");
          });
}

}  // namespace penstock::a2a_gemm
