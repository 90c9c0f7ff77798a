// Scale rules and block quantisation against exact arithmetic and ml_dtypes (tables.h), the edges
// that block.h states, and error bounds as properties.
#include "penstock/numerics/block.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "numerics/probes.h"
#include "numerics/tables.h"

namespace penstock {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kMaxFloat = std::numeric_limits<float>::max();

// --- Scales

template <typename ScaleOf, std::size_t kSize>
void check_scale_rule(ScaleOf scale_of, const std::uint32_t (&thresholds)[kSize]) {
  std::int64_t failures = 0;
  const auto check = [&](std::uint32_t amax) {
    const std::uint32_t expected = amax >= kF32InfBits ? 0xFF : tables::lookup(thresholds, amax);
    const std::uint32_t actual = scale_of(amax).bits;
    if (actual != expected && ++failures <= 5) {
      ADD_FAILURE() << std::hex << "amax bits 0x" << amax << ": got 0x" << actual << ", expected 0x"
                    << expected;
    }
  };
  for (int b = 0; b < 256; ++b) {
    for (int m = 0; m < probes::kMantissas; ++m) check(probes::probe_bits(b, m));
  }
  for (const std::uint32_t threshold : thresholds) {
    check(threshold - 1);
    check(threshold);
    check(threshold + 1);
  }
  EXPECT_EQ(failures, 0);
}

TEST(BlockScaleTest, MxRulesAreExact) {
  const auto mx = []<typename Elem>(Elem, MxScaleRule rule) {
    return [rule](std::uint32_t amax) { return mx_scale<Elem>(amax, rule); };
  };
  check_scale_rule(mx(E4M3{}, MxScaleRule::kOcpFloor), tables::kScaleMxE4M3OcpFloor);
  check_scale_rule(mx(E4M3{}, MxScaleRule::kCeil), tables::kScaleMxE4M3Ceil);
  check_scale_rule(mx(E5M2{}, MxScaleRule::kOcpFloor), tables::kScaleMxE5M2OcpFloor);
  check_scale_rule(mx(E5M2{}, MxScaleRule::kCeil), tables::kScaleMxE5M2Ceil);
  check_scale_rule(mx(E2M1{}, MxScaleRule::kOcpFloor), tables::kScaleMxE2M1OcpFloor);
  check_scale_rule(mx(E2M1{}, MxScaleRule::kCeil), tables::kScaleMxE2M1Ceil);
}

TEST(BlockScaleTest, Ue8m0IndexRuleIsExact) {
  check_scale_rule([](std::uint32_t amax) { return ue8m0_index_scale(amax); },
                   tables::kScaleUe8m0Index);
}

// The claim in block.h: the rule's rounded division gives the exact ceil(log2).
TEST(BlockScaleTest, Ue8m0IndexRuleIsCeilOverTheFlooredAmax) {
  for (int b = 0; b < 255; ++b) {
    for (int m = 0; m < probes::kMantissas; ++m) {
      const std::uint32_t amax = probes::probe_bits(b, m);
      const std::uint32_t floored = max_bits(amax, float_bits(kActivationAmaxFloor));
      ASSERT_EQ(ue8m0_index_scale(amax), mx_scale<E4M3>(floored, MxScaleRule::kCeil))
          << std::hex << amax;
    }
  }
}

// The other claim: the constant 1/448 gives the same codes.
TEST(BlockScaleTest, Ue8m0IndexRuleMayMultiplyByTheConstant) {
  const auto by_constant = [](std::uint32_t amax) {
    const float floored = float_from_bits(max_bits(amax, float_bits(kActivationAmaxFloor)));
    const std::uint32_t y = float_bits(floored * (1.0f / 448.0f));
    return (y >> 23) + ((y & 0x7FFFFFu) != 0 ? 1u : 0u);
  };
  for (int b = 0; b < 255; ++b) {
    for (int m = 0; m < probes::kMantissas; ++m) {
      const std::uint32_t amax = probes::probe_bits(b, m);
      ASSERT_EQ(ue8m0_index_scale(amax).bits, by_constant(amax)) << std::hex << amax;
    }
  }
}

TEST(BlockScaleTest, Fp8ScalesAreExact) {
  for (int b = 0; b < 256; ++b) {
    probes::RowDigest weight;
    probes::RowDigest activation;
    for (int m = 0; m < probes::kMantissas; ++m) {
      weight.add(float_bits(fp8_weight_scale(probes::probe_bits(b, m))), 4);
      activation.add(float_bits(fp8_activation_scale(probes::probe_bits(b, m))), 4);
    }
    EXPECT_EQ(weight.value(), tables::kFp8WeightScale[b]) << "exponent field " << b;
    EXPECT_EQ(activation.value(), tables::kFp8ActivationScale[b]) << "exponent field " << b;
  }
}

TEST(BlockScaleTest, AroundPowersOfTwoAndLargestValues) {
  const auto ocp4 = [](float x) {
    return mx_scale<E2M1>(abs_bits(x), MxScaleRule::kOcpFloor).bits;
  };
  const auto ceil4 = [](float x) { return mx_scale<E2M1>(abs_bits(x), MxScaleRule::kCeil).bits; };
  const auto ocp8 = [](float x) {
    return mx_scale<E4M3>(abs_bits(x), MxScaleRule::kOcpFloor).bits;
  };
  const auto ceil8 = [](float x) { return mx_scale<E4M3>(abs_bits(x), MxScaleRule::kCeil).bits; };
  const auto above = [](float x) { return std::nextafter(x, kInfinity); };
  const auto below = [](float x) { return std::nextafter(x, 0.0f); };
  EXPECT_EQ(ocp4(4.0f), 127);
  EXPECT_EQ(ocp4(below(4.0f)), 126);
  EXPECT_EQ(ocp4(above(6.0f)), 127);  // saturates
  EXPECT_EQ(ceil4(6.0f), 127);
  EXPECT_EQ(ceil4(above(6.0f)), 128);
  EXPECT_EQ(ceil4(above(4.0f)), 127);
  EXPECT_EQ(ocp8(256.0f), 127);
  EXPECT_EQ(ocp8(above(256.0f)), 127);
  EXPECT_EQ(ocp8(below(256.0f)), 126);
  EXPECT_EQ(ocp8(511.0f), 127);  // saturates
  EXPECT_EQ(ceil8(448.0f), 127);
  EXPECT_EQ(ceil8(above(448.0f)), 128);
  EXPECT_EQ(ceil8(below(448.0f)), 127);
  EXPECT_EQ(ceil8(above(512.0f)), 128);
  EXPECT_EQ(ocp8(kMaxFloat), 127 + 127 - 8);
  EXPECT_EQ(ceil8(kMaxFloat), 127 + 127 - 8 + 1);
  EXPECT_EQ(ceil4(kMaxFloat), 127 + 127 - 2 + 1);
  for (const float tiny : {0.0f, std::numeric_limits<float>::denorm_min(), 0x1p-126f}) {
    EXPECT_EQ(ocp4(tiny), 0) << tiny;
    EXPECT_EQ(ceil4(tiny), 0) << tiny;
    EXPECT_EQ(ocp8(tiny), 0) << tiny;
    EXPECT_EQ(ceil8(tiny), 0) << tiny;
  }
  EXPECT_EQ(fp8_weight_scale(0), 1.0f);
  EXPECT_EQ(fp8_weight_scale(1), 0x1p-126f);
  EXPECT_EQ(fp8_activation_scale(0), 1e-4f / 448.0f);
  EXPECT_EQ(ue8m0_index_scale(0).to_float(), 0x1p-22f);  // 1e-4 / 448 = 2^-22.095
  EXPECT_EQ(ue8m0_index_scale(abs_bits(448.0f)).to_float(), 1.0f);
  EXPECT_EQ(ue8m0_index_scale(abs_bits(above(448.0f))).to_float(), 2.0f);
}

TEST(BlockScaleTest, NanAndInfMakeTheScaleNan) {
  for (const float bad : {kInfinity, -kInfinity, kNan, -kNan}) {
    std::array<float, 32> x{};
    x[5] = 3.0f;
    x[17] = bad;
    const std::uint32_t amax = amax_bits(x.data(), 32);
    EXPECT_FALSE(is_finite_bits(amax));
    EXPECT_TRUE(std::isnan(fp8_weight_scale(amax)));
    EXPECT_TRUE(std::isnan(fp8_activation_scale(amax)));
    EXPECT_EQ(ue8m0_index_scale(amax).bits, 0xFF);
    for (const MxScaleRule rule : {MxScaleRule::kOcpFloor, MxScaleRule::kCeil}) {
      std::array<E4M3, 32> q8{};
      std::array<std::uint8_t, 16> q4{};
      std::array<float, 32> back{};
      E8M0 scale = quantise_mxfp8_block(x.data(), rule, q8.data());
      EXPECT_EQ(scale.bits, 0xFF);
      dequantise_mxfp8_block(q8.data(), scale, back.data());
      for (const float v : back) EXPECT_TRUE(std::isnan(v));
      for (const E4M3 q : q8) EXPECT_EQ(q.bits, 0x7F);
      scale = quantise_mxfp4_block(x.data(), rule, q4.data());
      EXPECT_EQ(scale.bits, 0xFF);
      dequantise_mxfp4_block(q4.data(), scale, back.data());
      for (const float v : back) EXPECT_TRUE(std::isnan(v));
      for (const std::uint8_t pair : q4) EXPECT_EQ(pair, 0x77);
    }
  }
}

TEST(BlockScaleTest, AmaxKeepsNanWhereverItStands) {
  for (int at = 0; at < 4; ++at) {
    std::array<float, 4> x{kInfinity, -5.0f, kMaxFloat, 0.0f};
    x[static_cast<std::size_t>(at)] = -kNan;
    EXPECT_GT(amax_bits(x.data(), 4), kF32InfBits);
    std::array<Bf16, 4> b{};
    for (std::size_t i = 0; i < 4; ++i) b[i] = Bf16::from_float(x[i]);
    EXPECT_GT(amax_bits(b.data(), 4), kF32InfBits);
  }
  const std::array<float, 6> strided{1.0f, 100.0f, -2.0f, 100.0f, 1.5f, 100.0f};
  EXPECT_EQ(amax_bits(strided.data(), 3, 2), float_bits(2.0f));
  EXPECT_EQ(amax_bits(strided.data(), 0), 0u);
}

// --- Elements: every code under every scale is code * 2^(e - 127), rounded once to f32.

template <typename Elem>
void check_every_product(int codes) {
  for (int s = 0; s < 255; ++s) {
    const E8M0 scale{static_cast<std::uint8_t>(s)};
    for (int code = 0; code < codes; ++code) {
      const auto q = Elem::from_bits(static_cast<std::uint8_t>(code));
      const float value = dequantise_mx(q, scale);
      if (std::isnan(q.to_float())) {
        ASSERT_TRUE(std::isnan(value));
        continue;
      }
      const double exact = std::ldexp(static_cast<double>(q.to_float()), s - 127);
      ASSERT_EQ(float_bits(value), float_bits(static_cast<float>(exact))) << code << " x " << s;
      // and back, where the value did not leave f32
      if (std::isfinite(value) && static_cast<double>(value) == exact) {
        ASSERT_EQ(quantise_mx<Elem>(value, scale), q) << code << " x " << s;
      }
    }
  }
}

TEST(BlockElementTest, EveryCodeUnderEveryScale) {
  check_every_product<E4M3>(256);
  check_every_product<E2M1>(16);
}

// x / scale is the correctly rounded quotient, not x * (1 / scale).
TEST(BlockElementTest, Fp8DividesByTheScale) {
  int apart = 0;
  for (const auto& [x, scale] : probes::tie_quotients()) {
    // f64 has more than twice f32's bits: rounding its quotient once more gives f32's own.
    const auto quotient = static_cast<float>(static_cast<double>(x) / static_cast<double>(scale));
    const E4M3 q = quantise_fp8(x, scale);
    ASSERT_EQ(q.bits, tables::lookup(tables::kEncodeE4M3, float_bits(quotient)))
        << x << ", " << scale;
    apart += q == E4M3::from_float(x * (1.0f / scale)) ? 0 : 1;
  }
  EXPECT_GT(apart, 100);  // so the inputs can tell
}

// --- Properties

// RapidCheck draws small integers first; mixing makes every draw equally likely from the start.
rc::Gen<std::uint32_t> scrambled() {
  return rc::gen::map(rc::gen::arbitrary<std::uint32_t>(), probes::mix);
}

// Any finite f32 by its bits, so that binades are equally likely; now and then zero.
rc::Gen<float> finite_float() {
  return rc::gen::map(scrambled(), [](std::uint32_t bits) {
    return (bits & 0x7F800000u) == 0x7F800000u ? 0.0f : float_from_bits(bits);
  });
}

// 32 values in 14 binades below 2^e, e in [lowest, highest].
rc::Gen<std::vector<float>> finite_block(int lowest = -148, int highest = 127) {
  const auto values = rc::gen::container<std::vector<std::uint32_t>>(33, scrambled());
  return rc::gen::map(values, [=](const std::vector<std::uint32_t>& drawn) {
    const int top = lowest + static_cast<int>(drawn[32] % (highest - lowest + 1));
    std::vector<float> x;
    for (int i = 0; i < 32; ++i) {
      const std::uint32_t h = drawn[static_cast<std::size_t>(i)];
      const double unit = (static_cast<double>(h >> 8) + 0.5) / (1 << 24);  // (0, 1)
      const double v = std::ldexp(unit, top - static_cast<int>((h >> 1) % 14));
      x.push_back(static_cast<float>((h & 1u) != 0 ? -v : v));
    }
    return x;
  });
}

// Half a unit in the last place of an element's binade, or of the subnormals: the most that
// rounding may move a value. `mantissa_bits` and `min_exponent` of the element format.
double half_ulp(double scaled, int mantissa_bits, int min_exponent) {
  const int exponent = scaled == 0.0 ? min_exponent : std::max(std::ilogb(scaled), min_exponent);
  return std::ldexp(1.0, exponent - mantissa_bits - 1);
}

template <typename Elem>
void check_mx_error(const std::vector<float>& x, const std::vector<float>& back, E8M0 scale,
                    MxScaleRule rule, int mantissa_bits, int min_exponent) {
  const double s = scale.to_float();
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double scaled = std::fabs(x[i] / s);
    const double error = std::fabs(static_cast<double>(back[i]) - x[i]);
    if (scaled > Elem::kMax) {
      RC_ASSERT(rule == MxScaleRule::kOcpFloor);  // the other rule never clips
      RC_ASSERT(scaled < std::ldexp(2.0, Elem::kEmax));
      RC_ASSERT(std::fabs(back[i]) == Elem::kMax * s);
    } else {
      // Dequantisation may meet a subnormal f32: half of its unit comes on top.
      RC_ASSERT(error <= half_ulp(scaled, mantissa_bits, min_exponent) * s + 0x1p-150);
    }
    RC_ASSERT(back[i] == 0.0f || std::signbit(back[i]) == std::signbit(x[i]));
  }
}

RC_GTEST_PROP(BlockProperty, Mxfp8ErrorIsHalfAnUlp, ()) {
  const auto x = *finite_block();
  const auto rule = *rc::gen::element(MxScaleRule::kOcpFloor, MxScaleRule::kCeil);
  std::vector<E4M3> q(32);
  std::vector<float> back(32);
  const E8M0 scale = quantise_mxfp8_block(x.data(), rule, q.data());
  dequantise_mxfp8_block(q.data(), scale, back.data());
  check_mx_error<E4M3>(x, back, scale, rule, 3, -6);
}

RC_GTEST_PROP(BlockProperty, Mxfp4ErrorIsHalfAnUlp, ()) {
  const auto x = *finite_block();
  const auto rule = *rc::gen::element(MxScaleRule::kOcpFloor, MxScaleRule::kCeil);
  std::vector<std::uint8_t> pairs(16);
  std::vector<float> back(32);
  const E8M0 scale = quantise_mxfp4_block(x.data(), rule, pairs.data());
  dequantise_mxfp4_block(pairs.data(), scale, back.data());
  check_mx_error<E2M1>(x, back, scale, rule, 1, 0);
}

// Nearest: no other code is closer.
RC_GTEST_PROP(BlockProperty, NoOtherE2M1CodeIsNearer, ()) {
  const auto unit = static_cast<float>(static_cast<std::int32_t>(*scrambled() >> 7) - (1 << 24));
  const float x = unit * 0x1p-21f;  // [-8, 8)
  const double chosen = std::fabs(static_cast<double>(E2M1::from_float(x).to_float()) - x);
  for (std::uint8_t code = 0; code < 16; ++code) {
    RC_ASSERT(chosen <= std::fabs(static_cast<double>(E2M1{code}.to_float()) - x));
  }
}

RC_GTEST_PROP(BlockProperty, Fp8WithF32ScaleKeepsItsBound, ()) {
  const auto x = *finite_block();
  const bool weight = *rc::gen::arbitrary<bool>();
  const std::uint32_t amax = amax_bits(x.data(), 32);
  const float s = weight ? fp8_weight_scale(amax) : fp8_activation_scale(amax);
  RC_ASSERT(s >= std::numeric_limits<float>::min());
  for (const float v : x) {
    const double back = static_cast<double>(quantise_fp8(v, s).to_float()) * s;
    // Half an ulp of E4M3 plus the rounding of the division (2^-24 of the quotient), which also
    // covers the largest element: amax / s may come out one ulp above 448.
    const double scaled = std::fabs(static_cast<double>(v) / s);
    RC_ASSERT(scaled <= 448.0 * (1 + 0x1p-23));
    const double bound = half_ulp(std::min(scaled, 448.0), 3, -6) + scaled * 0x1p-24 + 0x1p-150;
    RC_ASSERT(std::fabs(back - v) <= bound * s);
  }
}

// Quantising what was dequantised changes nothing, with the scale kept: rows may be re-encoded.
RC_GTEST_PROP(BlockProperty, RequantisingIsTheIdentity, ()) {
  const auto x = *finite_block();
  const std::uint32_t amax = amax_bits(x.data(), 32);
  const E8M0 scale = mx_scale<E4M3>(amax, MxScaleRule::kCeil);
  for (const float v : x) {
    const E4M3 q = quantise_mx<E4M3>(v, scale);
    const float back = dequantise_mx(q, scale);
    if (static_cast<double>(q.to_float()) * scale.to_float() == back) {  // else below f32
      RC_ASSERT(quantise_mx<E4M3>(back, scale) == q);
    }
  }
}

// Multiplying a block by a power of two moves the scale and leaves the elements.
RC_GTEST_PROP(BlockProperty, PowersOfTwoMoveOnlyTheScale, ()) {
  auto x = *finite_block(-60, 60);  // and so exact under the shift, and far from the scale's ends
  const int shift = static_cast<int>(*scrambled() % 41) - 20;
  const auto rule = *rc::gen::element(MxScaleRule::kOcpFloor, MxScaleRule::kCeil);
  std::vector<E4M3> q(32);
  std::vector<E4M3> moved(32);
  const E8M0 scale = quantise_mxfp8_block(x.data(), rule, q.data());
  for (float& v : x) v = std::ldexp(v, shift);
  const E8M0 moved_scale = quantise_mxfp8_block(x.data(), rule, moved.data());
  RC_ASSERT(moved_scale.bits == scale.bits + shift);
  RC_ASSERT(q == moved);
}

RC_GTEST_PROP(BlockProperty, ConversionsAreMonotoneAndOdd, ()) {
  const float a = *finite_float();
  const float b = *finite_float();
  const float lo = std::min(a, b);
  const float hi = std::max(a, b);
  RC_ASSERT(Bf16::from_float(lo).to_float() <= Bf16::from_float(hi).to_float());
  RC_ASSERT(E4M3::from_float(lo).to_float() <= E4M3::from_float(hi).to_float());
  RC_ASSERT(E5M2::from_float(lo).to_float() <= E5M2::from_float(hi).to_float());
  RC_ASSERT(E2M1::from_float(lo).to_float() <= E2M1::from_float(hi).to_float());
  RC_ASSERT(Bf16::from_float(-a).bits == (Bf16::from_float(a).bits ^ 0x8000));
  RC_ASSERT(E4M3::from_float(-a).bits == (E4M3::from_float(a).bits ^ 0x80));
  RC_ASSERT(E5M2::from_float(-a).bits == (E5M2::from_float(a).bits ^ 0x80));
  RC_ASSERT(E2M1::from_float(-a).bits == (E2M1::from_float(a).bits ^ 0x8));
}

// Bf16 input gives what its f32 value gives.
RC_GTEST_PROP(BlockProperty, Bf16InputEqualsItsFloat, ()) {
  const auto drawn = *finite_block();
  std::vector<Bf16> b;
  std::vector<float> f;
  for (const float v : drawn) {
    b.push_back(Bf16::from_float(v));
    f.push_back(b.back().to_float());
  }
  std::vector<std::uint8_t> row_b(static_cast<std::size_t>(wire_row_bytes(32)));
  std::vector<std::uint8_t> row_f(row_b.size());
  write_wire_row(b.data(), 32, row_b.data());
  write_wire_row(f.data(), 32, row_f.data());
  RC_ASSERT(row_b == row_f);
}

}  // namespace
}  // namespace penstock
