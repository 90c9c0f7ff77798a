// The reference's stages against hand-computed values and brute force that shares no code with it.
#include "penstock/model/reference.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "penstock/core/error.h"
#include "penstock/numerics/formats.h"

namespace penstock::reference {
namespace {

constexpr double kTiny = 1e-12;

template <typename T>
Array<T> array(std::vector<std::int64_t> shape, std::vector<T> values) {
  Array<T> out(std::move(shape));
  EXPECT_EQ(out.data.size(), values.size());
  out.data = std::move(values);
  return out;
}

Array<double> random_array(std::mt19937& rng, std::vector<std::int64_t> shape) {
  std::normal_distribution<double> normal;
  Array<double> out(std::move(shape));
  for (double& v : out.data) v = normal(rng);
  return out;
}

// A plain f32 matrix that owns its values.
struct Matrix {
  std::vector<float> values;
  std::int64_t rows, cols;

  Matrix(std::int64_t r, std::int64_t c, std::vector<float> v)
      : values(std::move(v)), rows(r), cols(c) {
    EXPECT_EQ(values.size(), static_cast<std::size_t>(r * c));
  }
  Matrix(std::mt19937& rng, std::int64_t r, std::int64_t c) : rows(r), cols(c) {
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < r * c; ++i) values.push_back(normal(rng));
  }
  double at(std::int64_t r, std::int64_t c) const {
    return values[static_cast<std::size_t>(r * cols + c)];
  }
  Weight weight() const {
    Weight out;
    out.data.data = values.data();
    out.data.dtype = DType::kF32;
    out.data.rank = 2;
    out.data.shape = {rows, cols};
    out.rows = rows;
    out.cols = cols;
    return out;
  }
};

// ---- Building blocks ----

TEST(ReferenceDotTest, AddsEveryTermAtEveryLength) {
  for (std::int64_t n = 0; n < 40; ++n) {
    std::vector<float> a;
    std::vector<double> b;
    double want = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      a.push_back(static_cast<float>(i + 1));
      b.push_back(static_cast<double>(2 * i - 5));
      want += static_cast<double>((i + 1) * (2 * i - 5));
    }
    EXPECT_EQ(dot(a.data(), b.data(), n), want) << n;
  }
}

TEST(ReferenceNormTest, RmsNormAndLayerNormMatchHandValues) {
  const auto x = array<double>({1, 2}, {3, 4});
  const std::vector<float> gain{2, -1}, beta{10, 20};
  const Array<double> rms = rms_norm<double>(x, gain, 0.5);  // mean square 12.5
  EXPECT_NEAR(rms.data[0], 6 / std::sqrt(13.0), kTiny);
  EXPECT_NEAR(rms.data[1], -4 / std::sqrt(13.0), kTiny);
  const Array<double> layer = layer_norm<double>(x, gain, beta, 0.75);  // mean 3.5, variance 0.25
  EXPECT_NEAR(layer.data[0], -0.5 * 2 + 10, kTiny);
  EXPECT_NEAR(layer.data[1], 0.5 * -1 + 20, kTiny);
}

TEST(ReferenceRopeTest, PairsNeighboursNotHalves) {
  // theta 256, 4 dims: the pairs turn by 2 and by 2 * 256^(-2/4) = 0.125, exact in f32
  std::vector<double> v{1, 0, 0, 1};
  rotate(v.data(), 4, 2, 256.0);
  EXPECT_NEAR(v[0], std::cos(2.0), kTiny);
  EXPECT_NEAR(v[1], std::sin(2.0), kTiny);
  EXPECT_NEAR(v[2], -std::sin(0.125), kTiny);
  EXPECT_NEAR(v[3], std::cos(0.125), kTiny);
}

TEST(ReferenceRopeTest, AnglesAreRoundedToF32) {
  // Position 5000, theta 1e4, pair 1 of 32: numpy's float32 arithmetic gives the angle
  // 3749.4709472656; in exact arithmetic it is 3749.4710466623.
  std::vector<double> v(64, 0.0);
  v[2] = 1;
  rotate(v.data(), 64, 5000, 1e4);
  EXPECT_NEAR(v[2], std::cos(3749.4709472656), 1e-9);
  EXPECT_GT(std::abs(v[2] - std::cos(3749.4710466623)), 1e-5);
}

RC_GTEST_PROP(ReferenceRopeTest, ScoresDependOnTheDistanceOnly, ()) {
  const auto q_at = *rc::gen::inRange<std::int64_t>(0, 500);
  const auto k_at = *rc::gen::inRange<std::int64_t>(0, 500);
  const auto shift = *rc::gen::inRange<std::int64_t>(0, 500);
  std::mt19937 rng(7);
  const Array<double> q = random_array(rng, {64}), k = random_array(rng, {64});
  const auto score = [&](std::int64_t a, std::int64_t b) {
    Array<double> x = q, y = k;
    rotate(x.data.data(), 64, a, 1e4);
    rotate(y.data.data(), 64, b, 1e4);
    return dot(x.data.data(), y.data.data(), 64);
  };
  // f32 angles below 1000 are off by 3e-5; 64 products of size 1.
  RC_ASSERT(std::abs(score(q_at, k_at) - score(q_at + shift, k_at + shift)) < 5e-3);
}

TEST(ReferenceRoundTest, RoundsByTheNamedRule) {
  std::vector<double> bf16{1.00390625, 1.01171875};  // ties: to even, down and up
  round_rows<double>(Round::kBF16, 2, bf16);
  EXPECT_EQ(bf16, (std::vector<double>{1.0, 1.015625}));

  std::vector<double> token{448, 17, -1, 0};  // scale 1: 17 is a tie of 16 and 18, even is 16
  round_rows<double>(Round::kFp8Token, 4, token);
  EXPECT_EQ(token, (std::vector<double>{448, 16, -1, 0}));

  // amax 449: 449 / 448 lies just above 1, the power-of-two rule goes to 2; 449 / 2 rounds to 224
  std::vector<double> index{449, 2, 0, 0};
  round_rows<double>(Round::kFp8Ue8m0, 4, index);
  EXPECT_EQ(index, (std::vector<double>{448, 2, 0, 0}));

  // Groups of 128 columns keep their own scales: the second group's 3 is exact beside a huge first.
  std::vector<double> groups(130, 1e6);
  groups[128] = 448;
  groups[129] = 3;
  round_rows<double>(Round::kFp8Token, 130, groups);
  EXPECT_EQ(groups[129], 3.0);

  std::vector<double> zeros(4, 0.0);
  round_rows<double>(Round::kFp8Token, 4, zeros);
  EXPECT_EQ(zeros, std::vector<double>(4, 0.0));
}

// ---- Indexer ----

ModelConfig indexer_config(std::int64_t heads, std::int64_t dim, std::int64_t top_k) {
  ModelConfig config;
  config.index_heads = heads;
  config.index_dim = dim;
  config.index_top_k = top_k;
  return config;
}

TEST(ReferenceIndexerTest, ReluComesBeforeANegativeWeight) {
  const ModelConfig config = indexer_config(2, 2, 4);
  const std::vector<double> q{1, 0, 0, 1}, w{-3, 5};
  const auto k = array<double>({3, 2}, {-2, -2, 2, -2, 2, 2});
  const auto scores = indexer_scores<double>(config, q.data(), w.data(), k, 3);
  // scale 2^-1/2 * 2^-1/2; key 0: both products negative; key 1: -3 * 2; key 2: -3 * 2 + 5 * 2
  ASSERT_EQ(scores.size(), 3U);
  EXPECT_NEAR(scores[0], 0.0, kTiny);
  EXPECT_NEAR(scores[1], -3.0, kTiny);
  EXPECT_NEAR(scores[2], 2.0, kTiny);
}

TEST(ReferenceIndexerTest, TiesGoToTheSmallerPosition) {
  const std::vector<double> scores{1, 2, 2, 0, 2, 1};
  EXPECT_EQ(select_picks<double>(scores, 2), (std::vector<std::int32_t>{1, 2}));
  EXPECT_EQ(select_picks<double>(scores, 4), (std::vector<std::int32_t>{0, 1, 2, 4}));
  const std::vector<double> zeros{0.0, -0.0, 0.0};  // -0 equals 0
  EXPECT_EQ(select_picks<double>(zeros, 2), (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(select_picks<double>(zeros, 9), (std::vector<std::int32_t>{0, 1, 2}));
}

TEST(ReferenceIndexerTest, RefusesNaN) {
  const std::vector<double> scores{1, std::nan(""), 2};
  EXPECT_THROW(select_picks<double>(scores, 2), Error);
}

RC_GTEST_PROP(ReferenceIndexerTest, PicksAreTheLargestByCounting, ()) {
  const auto raw = *rc::gen::nonEmpty(rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 6)));
  const auto top_k = *rc::gen::inRange<std::int64_t>(1, 12);
  const std::vector<float> scores(raw.begin(), raw.end());
  std::vector<std::int32_t> want;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    std::int64_t ahead = 0;  // how many beat position i
    for (std::size_t j = 0; j < scores.size(); ++j) {
      ahead += scores[j] > scores[i] || (scores[j] == scores[i] && j < i);
    }
    if (ahead < top_k) want.push_back(static_cast<std::int32_t>(i));
  }
  RC_ASSERT(select_picks<float>(scores, top_k) == want);
}

TEST(ReferenceIndexerTest, PicksStayCausalAndPadWithMinusOne) {
  const ModelConfig config = indexer_config(1, 2, 3);
  IndexerInput<double> input;
  input.q = array<double>({5, 1, 2}, {1, 0, 1, 0, 1, 0, 1, 0, 1, 0});
  input.w = array<double>({5, 1}, {1, 1, 1, 1, 1});
  input.k = array<double>({5, 2}, {1, 0, 5, 0, 3, 0, 4, 0, 9, 0});
  const std::vector<std::int64_t> positions{0, 1, 2, 3, 4};
  std::vector<double> last;
  const auto picks = indexer_picks<double>(config, input, input.k, positions, serial(), &last);
  EXPECT_EQ(picks.data,
            (std::vector<std::int32_t>{0, -1, -1, 0, 1, -1, 0, 1, 2, 1, 2, 3, 1, 3, 4}));
  ASSERT_EQ(last.size(), 5U);
  EXPECT_NEAR(last[4], 9 / std::sqrt(2.0), kTiny);
}

// ---- Attention ----

TEST(ReferenceAttentionTest, AbsorbedFormEqualsExpandedHeadsAcrossScaleBlocks) {
  // Three heads of 192 + 256 rows: their borders lie inside 128-row scale blocks, every one of
  // which has its own scale here. The expanded form below reads the scale of each row itself.
  ModelConfig config;
  config.heads = 3;
  config.nope = 192;
  config.rope = 4;
  config.v_dim = 256;
  config.kv_lora = 256;
  const std::int64_t head_rows = 448, rows = 3 * head_rows, lora = 256;
  std::mt19937 rng(11);
  std::vector<std::uint8_t> codes;
  std::vector<float> scales;
  for (std::int64_t i = 0; i < rows * lora; ++i) {
    codes.push_back(E4M3::from_float(std::normal_distribution<float>(0, 30)(rng)).bits);
  }
  for (std::int64_t i = 0; i < (rows + 127) / 128 * 2; ++i) {
    scales.push_back(0.001F * static_cast<float>(1 + i * i));
  }
  Weight kv_b;
  kv_b.format = WeightFormat::kFp8Block;
  kv_b.rows = rows;
  kv_b.cols = lora;
  kv_b.data = {codes.data(), DType::kE4M3, 2, {rows, lora}};
  kv_b.scale = {scales.data(), DType::kF32, 2, {(rows + 127) / 128, 2}};
  const auto w = [&](std::int64_t r, std::int64_t c) {
    const auto code = codes[static_cast<std::size_t>(r * lora + c)];
    const float scale = scales[static_cast<std::size_t>(r / 128 * 2 + c / 128)];
    return static_cast<double>(E4M3::from_bits(code).to_float() * scale);
  };

  const std::int64_t context = 6;
  const Array<double> q_nope = random_array(rng, {2, 3, 192}), q_pe = random_array(rng, {2, 3, 4});
  const Array<double> c_kv = random_array(rng, {context, lora});
  const Array<double> k_pe = random_array(rng, {context, 4});
  const auto picks = array<std::int32_t>({2, 4}, {0, 2, -1, -1, 1, 2, 4, 5});
  const Roundings none;

  const auto q_lat = absorb_query<double>(config, kv_b, q_nope, {0, 3}, none, serial());
  const auto o_lat =
      sparse_attention<double>(config, q_lat, q_pe, c_kv, k_pe, picks, none, serial());
  const auto o = expand_values<double>(config, kv_b, o_lat, {0, 3}, none, serial());

  for (std::int64_t s = 0; s < 2; ++s) {
    for (std::int64_t h = 0; h < 3; ++h) {
      std::vector<double> p;
      std::vector<std::int64_t> at;
      for (std::int64_t i = 0; i < 4; ++i) {
        if (picks.row(s)[i] >= 0) at.push_back(picks.row(s)[i]);
      }
      double total = 0;
      for (const std::int64_t t : at) {
        double logit = 0;
        for (std::int64_t d = 0; d < 192; ++d) {
          double key = 0;
          for (std::int64_t c = 0; c < lora; ++c) key += w(h * head_rows + d, c) * c_kv.row(t)[c];
          logit += q_nope.row(s)[h * 192 + d] * key;
        }
        for (std::int64_t d = 0; d < 4; ++d) logit += q_pe.row(s)[h * 4 + d] * k_pe.row(t)[d];
        p.push_back(logit / std::sqrt(196.0));
      }
      const double largest = *std::max_element(p.begin(), p.end());
      for (double& v : p) total += v = std::exp(v - largest);
      for (std::int64_t d = 0; d < 256; ++d) {
        double want = 0, size = 0;
        for (std::size_t i = 0; i < at.size(); ++i) {
          double value = 0;
          for (std::int64_t c = 0; c < lora; ++c) {
            value += w(h * head_rows + 192 + d, c) * c_kv.row(at[i])[c];
          }
          want += p[i] / total * value;
          size += std::abs(value);
        }
        ASSERT_NEAR(o.row(s)[h * 256 + d], want, 1e-9 * (1 + size)) << s << " " << h << " " << d;
      }
    }
  }

  // Ranks: heads [1, 3) alone are the tail of all heads, bit for bit.
  Array<double> tail({2, 2, 192});
  for (std::int64_t s = 0; s < 2; ++s) std::copy_n(q_nope.row(s) + 192, 384, tail.row(s));
  const auto part = absorb_query<double>(config, kv_b, tail, {1, 3}, none, serial());
  for (std::int64_t s = 0; s < 2; ++s) {
    EXPECT_TRUE(std::equal(part.row(s), part.row(s) + 2 * lora, q_lat.row(s) + lora));
  }
}

TEST(ReferenceAttentionTest, RefusesPicksOutsideTheContextAndEmptyRows) {
  ModelConfig config;
  config.kv_lora = 2;
  config.rope = 2;
  config.nope = 2;
  const Array<double> q_lat({1, 1, 2}), q_pe({1, 1, 2}), c_kv({3, 2}), k_pe({3, 2});
  const auto run = [&](std::int32_t a, std::int32_t b) {
    return sparse_attention<double>(config, q_lat, q_pe, c_kv, k_pe,
                                    array<std::int32_t>({1, 2}, {a, b}), {}, serial());
  };
  EXPECT_NO_THROW(run(0, 2));
  EXPECT_THROW(run(0, 3), Error);
  EXPECT_THROW(run(0, -2), Error);
  EXPECT_THROW(run(-1, -1), Error);
}

TEST(ReferenceAttentionTest, OutputShardsAddUpToTheWhole) {
  ModelConfig config;
  config.heads = 4;
  config.v_dim = 8;
  config.hidden = 6;
  std::mt19937 rng(3);
  const Matrix o_weight(rng, 6, 32);
  const Array<double> o = random_array(rng, {3, 4, 8});
  const auto whole = attention_output<double>(config, o_weight.weight(), o, {0, 4}, serial());
  Array<double> sum({3, 6});
  for (const Range heads : {Range{0, 1}, Range{1, 4}}) {
    Array<double> mine({3, heads.size(), 8});
    for (std::int64_t s = 0; s < 3; ++s) {
      std::copy_n(o.row(s) + heads.begin * 8, heads.size() * 8, mine.row(s));
    }
    const auto part = attention_output<double>(config, o_weight.weight(), mine, heads, serial());
    for (std::size_t i = 0; i < sum.data.size(); ++i) sum.data[i] += part.data[i];
  }
  for (std::size_t i = 0; i < sum.data.size(); ++i) {
    EXPECT_NEAR(sum.data[i], whole.data[i], 1e-12);
  }
}

// ---- Router ----

ModelConfig router_config(std::int64_t experts, std::int64_t top_k, std::int64_t groups = 1,
                          std::int64_t top_groups = 1) {
  ModelConfig config;
  config.experts = experts;
  config.top_k = top_k;
  config.groups = groups;
  config.top_groups = top_groups;
  config.routed_scale = 2.5;
  return config;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

TEST(ReferenceRouterTest, TiesGoToTheSmallerExpert) {
  const std::vector<double> logits{0, 1, 1, 1, 0};
  const std::vector<float> bias(5, 0.0F);
  EXPECT_EQ(route<double>(router_config(5, 2), logits, bias).experts,
            (std::vector<std::int32_t>{1, 2}));
  EXPECT_EQ(route<double>(router_config(5, 4), logits, bias).experts,
            (std::vector<std::int32_t>{1, 2, 3, 0}));
}

TEST(ReferenceRouterTest, WeightsComeFromTheSigmoidNotFromTheChoice) {
  const std::vector<double> logits{2, -1, 0.5};
  const std::vector<float> bias{0, 5, 0};  // lifts expert 1 to the front
  ModelConfig config = router_config(3, 2);
  Route<double> got = route<double>(config, logits, bias);
  EXPECT_EQ(got.experts, (std::vector<std::int32_t>{1, 0}));
  const double total = sigmoid(-1) + sigmoid(2);
  EXPECT_NEAR(got.weights[0], 2.5 * sigmoid(-1) / total, kTiny);
  EXPECT_NEAR(got.weights[1], 2.5 * sigmoid(2) / total, kTiny);
  config.norm_top_k = false;
  got = route<double>(config, logits, bias);
  EXPECT_NEAR(got.weights[0], 2.5 * sigmoid(-1), kTiny);
  EXPECT_NEAR(got.weights[1], 2.5 * sigmoid(2), kTiny);
}

TEST(ReferenceRouterTest, ABiasOf34KeepsTheOrderThatBf16WouldLose) {
  const std::vector<float> logits{0.00F, 0.02F, 0.01F, 0.03F};
  const std::vector<float> bias(4, 34.0F);
  for (const float logit : logits) {  // the premise: in bf16 all four choices are one number
    const auto choice = static_cast<float>(sigmoid(static_cast<double>(logit))) + 34.0F;
    EXPECT_EQ(Bf16::from_float(choice).to_float(), 34.5F);
  }
  EXPECT_EQ(route<float>(router_config(4, 3), logits, bias).experts,
            (std::vector<std::int32_t>{3, 1, 2}));
  // Choices are f32 in the f64 reference too: below its step of 3.8e-6 they tie.
  const std::vector<double> close{0.0, 1e-9};
  const std::vector<float> two(2, 34.0F);
  EXPECT_EQ(route<double>(router_config(2, 1), close, two).experts, (std::vector<std::int32_t>{0}));
}

TEST(ReferenceRouterTest, GroupsCompeteByTheirTwoBest) {
  // Logits such that group 0 has the single best expert, group 1 the best pair, group 2 is weak.
  const std::vector<double> logits{5, -5, -5, 2, 2, -5, -1, -1, -1};
  const std::vector<float> bias(9, 0.0F);
  EXPECT_EQ(route<double>(router_config(9, 3, 3, 1), logits, bias).experts,
            (std::vector<std::int32_t>{3, 4, 5}));
  EXPECT_EQ(route<double>(router_config(9, 3, 3, 2), logits, bias).experts,
            (std::vector<std::int32_t>{0, 3, 4}));
  // Equal groups: the smaller group stays.
  const std::vector<double> equal{1, 1, 1, 1};
  const std::vector<float> none(4, 0.0F);
  EXPECT_EQ(route<double>(router_config(4, 2, 2, 1), equal, none).experts,
            (std::vector<std::int32_t>{0, 1}));
  // Groups of one expert: the two best are the one.
  const std::vector<double> ones{0, 3, 1, 2};
  EXPECT_EQ(route<double>(router_config(4, 2, 4, 2), ones, none).experts,
            (std::vector<std::int32_t>{1, 3}));
}

TEST(ReferenceRouterTest, AMaskedGroupLosesEvenToNegativeChoices) {
  const std::vector<double> logits{0, 0, 0, 0};
  const std::vector<float> bias{-2, -2, -9, -9};
  EXPECT_EQ(route<double>(router_config(4, 2, 2, 1), logits, bias).experts,
            (std::vector<std::int32_t>{0, 1}));
}

TEST(ReferenceRouterTest, RefusesNaNAndImpossibleGroups) {
  const std::vector<float> bias(4, 0.0F);
  const std::vector<double> bad{0, std::nan(""), 0, 0}, good{0, 0, 0, 0};
  EXPECT_THROW(route<double>(router_config(4, 2), bad, bias), Error);
  EXPECT_THROW(route<double>(router_config(4, 3, 2, 1), good, bias), Error);  // 3 of 2 experts
  EXPECT_THROW(route<double>(router_config(4, 1, 3, 1), good, bias), Error);  // 4 % 3
  EXPECT_THROW(route<double>(router_config(5, 1), good, bias), Error);
}

RC_GTEST_PROP(ReferenceRouterTest, GroupedRoutingMatchesCounting, ()) {
  const auto group_size = *rc::gen::inRange<std::int64_t>(1, 5);
  const auto groups = *rc::gen::inRange<std::int64_t>(1, 5);
  const auto top_groups = *rc::gen::inRange<std::int64_t>(1, groups + 1);
  const auto top_k = *rc::gen::inRange<std::int64_t>(1, top_groups * group_size + 1);
  const auto experts = group_size * groups;
  // Logit 0 throughout and small integer biases: exact choices with many ties.
  const auto raw = *rc::gen::container<std::vector<int>>(static_cast<std::size_t>(experts),
                                                         rc::gen::inRange(-3, 4));
  const std::vector<float> logits(raw.size(), 0.0F);
  const std::vector<float> bias(raw.begin(), raw.end());
  const auto choice = [&](std::int64_t e) { return 0.5F + bias[static_cast<std::size_t>(e)]; };
  const auto group_score = [&](std::int64_t g) {
    if (group_size == 1) return choice(g);
    float score = -1e30F;  // best pair, by trying all
    for (std::int64_t a = 0; a < group_size; ++a) {
      for (std::int64_t b = 0; b < a; ++b) {
        score = std::max(score, choice(g * group_size + a) + choice(g * group_size + b));
      }
    }
    return score;
  };
  const auto kept = [&](std::int64_t g) {
    std::int64_t ahead = 0;
    for (std::int64_t o = 0; o < groups; ++o) {
      ahead += group_score(o) > group_score(g) || (group_score(o) == group_score(g) && o < g);
    }
    return ahead < top_groups;
  };
  std::map<std::int64_t, std::int32_t> want;  // by rank
  for (std::int64_t e = 0; e < experts; ++e) {
    if (!kept(e / group_size)) continue;
    std::int64_t ahead = 0;
    for (std::int64_t o = 0; o < experts; ++o) {
      if (!kept(o / group_size)) continue;
      ahead += choice(o) > choice(e) || (choice(o) == choice(e) && o < e);
    }
    if (ahead < top_k) want[ahead] = static_cast<std::int32_t>(e);
  }
  std::vector<std::int32_t> order;
  for (const auto& [rank, e] : want) order.push_back(e);
  RC_ASSERT(route<float>(router_config(experts, top_k, groups, top_groups), logits, bias).experts ==
            order);
}

// ---- Feed-forward ----

TEST(ReferenceMlpTest, SwiGluMatchesHandValues) {
  const Matrix gate(2, 1, {1, -2}), up(2, 1, {3, 4}), down(1, 2, {1, 10});
  const MlpWeights mlp{gate.weight(), up.weight(), down.weight()};
  const auto x = array<double>({1, 1}, {2});
  const double first = 2 * sigmoid(2) * 6, second = -4 * sigmoid(-4) * 8;
  EXPECT_NEAR(swiglu<double>(mlp, x, {0, 2}, {}, serial()).data[0], first + 10 * second, kTiny);
  EXPECT_NEAR(swiglu<double>(mlp, x, {1, 2}, {}, serial()).data[0], 10 * second, kTiny);
}

TEST(ReferenceMlpTest, MixtureMatchesATokenByTokenSumAndItsShardsAddUp) {
  std::mt19937 rng(5);
  const std::int64_t hidden = 6, width = 10, rows = 7;
  ModelConfig config = router_config(4, 2);
  config.hidden = hidden;
  std::vector<Matrix> matrices;
  matrices.reserve(16);
  const auto add = [&](std::int64_t r, std::int64_t c) {
    matrices.emplace_back(rng, r, c);
    return matrices.back().weight();
  };
  MoeWeights moe;
  moe.router = add(4, hidden);
  moe.bias = {0.1F, -0.2F, 0.3F, 0.0F};
  for (int e = 0; e < 4; ++e) {
    moe.experts.push_back({add(width, hidden), add(width, hidden), add(hidden, width)});
  }
  moe.shared = {add(width, hidden), add(width, hidden), add(hidden, width)};
  const Array<double> m = random_array(rng, {rows, hidden});

  const auto out = mixture_of_experts<double>(config, moe, m, 0, 1, {}, serial());
  for (std::int64_t s = 0; s < rows; ++s) {
    const auto one = array<double>({1, hidden}, {m.row(s), m.row(s) + hidden});
    const Range all{0, width};
    Array<double> want = swiglu<double>(moe.shared, one, all, {}, serial());
    for (std::int64_t i = 0; i < 2; ++i) {
      const auto e = static_cast<std::size_t>(out.experts.row(s)[i]);
      const auto y = swiglu<double>(moe.experts[e], one, all, {}, serial());
      for (std::size_t c = 0; c < y.data.size(); ++c) {
        want.data[c] += out.weights.row(s)[i] * y.data[c];
      }
    }
    for (std::int64_t c = 0; c < hidden; ++c) {
      EXPECT_NEAR(out.y.row(s)[c], want.row(0)[c], 1e-10);
    }
  }

  Array<double> sum({rows, hidden});
  for (std::int64_t shard = 0; shard < 3; ++shard) {  // 10 columns over 3 ranks: 3, 3, 4
    const auto part = mixture_of_experts<double>(config, moe, m, shard, 3, {}, serial());
    EXPECT_EQ(part.experts.data, out.experts.data);
    for (std::size_t i = 0; i < sum.data.size(); ++i) sum.data[i] += part.y.data[i];
  }
  for (std::size_t i = 0; i < sum.data.size(); ++i) {
    EXPECT_NEAR(sum.data[i], out.y.data[i], 1e-10);
  }
}

TEST(ReferenceShapeTest, NamesTheArrayThatDoesNotFit) {
  const Matrix w(2, 3, std::vector<float>(6, 1.0F));
  const Array<double> x({4, 2});
  try {
    linear<double>(w.weight(), {0, 2}, {0, 3}, x, serial());
    FAIL() << "accepted [4, 2] for a map of 3 columns";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("[4, 2]"), std::string::npos) << error.what();
  }
  EXPECT_THROW(linear<double>(w.weight(), {0, 3}, {0, 3}, Array<double>({4, 3}), serial()), Error);
}

// ---- The whole model ----

const Checkpoint& tiny() {
  static const Checkpoint checkpoint(PENSTOCK_TEST_MODELS "/tiny-glm");
  return checkpoint;
}

TEST(ReferenceModelTest, EarlierRowsDoNotSeeLaterTokensNorThreads) {
  const std::vector<std::int32_t> tokens{2, 71, 101, 49, 58, 49, 32, 73};
  ReferenceModel<float> one(tiny(), {});
  ReferenceModel<float> three(tiny(), {.threads = 3, .roundings = {}, .capture = {}});
  const Array<float> whole = one.forward(tokens);
  EXPECT_EQ(three.forward(tokens).data, whole.data);
  const Array<float> first = one.forward(std::span(tokens).first(1));
  EXPECT_EQ(first.shape, (std::vector<std::int64_t>{1, 256}));
  EXPECT_TRUE(std::equal(first.data.begin(), first.data.end(), whole.data.begin()));
}

TEST(ReferenceModelTest, CapturesEveryStageByNameWithItsShape) {
  std::map<std::string, std::vector<std::int64_t>> shapes;
  ReferenceOptions options;
  options.capture = [&](std::string_view name, const TensorView& view) {
    EXPECT_TRUE(
        shapes
            .emplace(std::string(name),
                     std::vector<std::int64_t>(view.shape.begin(), view.shape.begin() + view.rank))
            .second)
        << name << " twice";
  };
  ReferenceModel<double> model(tiny(), options);
  model.forward(std::vector<std::int32_t>{2, 71, 101});
  using Shape = std::vector<std::int64_t>;
  EXPECT_EQ(shapes.at("layer3.attn.q_lat"), (Shape{3, 8, 512}));
  EXPECT_EQ(shapes.at("layer3.attn.c_kv"), (Shape{3, 512}));
  EXPECT_EQ(shapes.at("layer0.index.q"), (Shape{3, 8, 128}));
  EXPECT_EQ(shapes.at("layer2.index.picks"), (Shape{3, 128}));
  EXPECT_EQ(shapes.count("layer2.index.q"), 0U);  // layer 2 shares layer 1's picks
  EXPECT_EQ(shapes.count("layer0.mlp.experts"), 0U);
  EXPECT_EQ(shapes.at("layer1.mlp.experts"), (Shape{3, 4}));
  EXPECT_EQ(shapes.at("logits"), (Shape{3, 256}));
}

TEST(ReferenceModelTest, NamedRoundingsActWhereTheySay) {
  std::map<std::string, bool> is_bf16;
  ReferenceOptions options;
  options.roundings.residual = Round::kBF16;
  options.capture = [&](std::string_view name, const TensorView& view) {
    if (view.dtype != DType::kF32) return;
    bool all = true;
    for (std::int64_t i = 0; i < view.elements(); ++i) {
      const float v = view.as<float>()[i];
      all = all && Bf16::from_float(v).to_float() == v;
    }
    is_bf16[std::string(name)] = all;
  };
  ReferenceModel<float> rounded(tiny(), options);
  const std::vector<std::int32_t> tokens{2, 71, 101};
  const Array<float> a = rounded.forward(tokens);
  EXPECT_TRUE(is_bf16.at("layer0.out") && is_bf16.at("layer3.out"));
  EXPECT_FALSE(is_bf16.at("layer0.attn.n") || is_bf16.at("layer0.mlp.y"));
  options.roundings = {};
  ReferenceModel<float> plain(tiny(), options);
  EXPECT_NE(plain.forward(tokens).data, a.data);
  EXPECT_FALSE(is_bf16.at("layer0.out"));
}

TEST(ReferenceModelTest, RefusesBadTokensAndLengths) {
  ReferenceModel<float> model(tiny(), {});
  EXPECT_THROW(model.forward({}), Error);
  EXPECT_THROW(model.forward(std::vector<std::int32_t>{2, 256}), Error);
  EXPECT_THROW(model.forward(std::vector<std::int32_t>{-1}), Error);
  EXPECT_THROW(model.forward(std::vector<std::int32_t>(8193, 2)), Error);
  EXPECT_THROW(ReferenceModel<float>(tiny(), {.threads = 0, .roundings = {}, .capture = {}}),
               Error);
}

TEST(ReferenceModelTest, LossIsTheLogOfTheSoftmax) {
  const auto logits = array<float>({3, 2}, {0, 0, 1000, 0, 7, 7});
  const std::vector<std::int32_t> tokens{0, 1, 1};
  const auto nll = negative_log_likelihood<float>(logits, tokens);
  ASSERT_EQ(nll.size(), 2U);
  EXPECT_NEAR(nll[0], std::log(2.0), kTiny);
  EXPECT_NEAR(nll[1], 1000, kTiny);
}

}  // namespace
}  // namespace penstock::reference
