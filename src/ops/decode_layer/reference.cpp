#include "penstock/ops/decode_layer/reference.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "penstock/core/error.h"
#include "penstock/numerics/formats.h"

namespace penstock::decode {
namespace {

float bf16(double x) { return Bf16::from_float(static_cast<float>(x)).to_float(); }

const std::array<float, 256>& e4m3_values() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> t{};
    for (int i = 0; i < 256; ++i) {
      t[static_cast<std::size_t>(i)] = E4M3::from_bits(static_cast<std::uint8_t>(i)).to_float();
    }
    return t;
  }();
  return table;
}

// Row `row` of W times x, columns [column0, column0 + x.size()).
double dot(const Fp8Matrix& w, std::int64_t row, std::int64_t column0, std::span<const float> x) {
  const auto& value = e4m3_values();
  const std::int64_t cols = w.data.dim(1);
  const auto* code = w.data.as<std::uint8_t>() + row * cols + column0;
  if (per_channel(w)) {
    double sum = 0;
    for (std::size_t k = 0; k < x.size(); ++k) {
      sum += static_cast<double>(value[code[k]]) * static_cast<double>(x[k]);
    }
    return sum * static_cast<double>(w.scale.as<float>()[row]);
  }
  const float* scale = w.scale.as<float>() + row / 128 * w.scale.dim(1);
  double sum = 0;
  const auto n = static_cast<std::int64_t>(x.size());
  for (std::int64_t k = 0; k < n;) {
    const std::int64_t end = std::min(n, (column0 + k) / 128 * 128 + 128 - column0);
    double part = 0;
    const float s = scale[(column0 + k) / 128];
    for (; k < end; ++k) {
      part +=
          static_cast<double>(value[code[k]]) * static_cast<double>(x[static_cast<std::size_t>(k)]);
    }
    sum += part * static_cast<double>(s);
  }
  return sum;
}

std::vector<float> norm(std::span<const float> x, const TensorView& gain, float eps) {
  double sum = 0;
  for (const float v : x) sum += static_cast<double>(v) * static_cast<double>(v);
  const double scale =
      1.0 / std::sqrt(sum / static_cast<double>(x.size()) + static_cast<double>(eps));
  std::vector<float> out(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float g = Bf16::from_bits(gain.as<std::uint16_t>()[i]).to_float();
    out[i] = bf16(static_cast<double>(x[i]) * scale * static_cast<double>(g));
  }
  return out;
}

// Rotates the pairs (2i, 2i + 1) of 64 values in place.
void rotate(std::span<float> v, int position, double theta) {
  for (std::size_t i = 0; i < kRope / 2; ++i) {
    const double angle = static_cast<double>(static_cast<float>(position) *
                                             rope_frequency(theta, static_cast<int>(i)));
    const double c = std::cos(angle);
    const double s = std::sin(angle);
    const double a = static_cast<double>(v[2 * i]);
    const double b = static_cast<double>(v[2 * i + 1]);
    v[2 * i] = static_cast<float>(a * c - b * s);
    v[2 * i + 1] = static_cast<float>(a * s + b * c);
  }
}

std::span<const float> row_of(std::span<const float> m, std::size_t row, std::size_t columns) {
  return m.subspan(row * columns, columns);
}

void read_cache_row(const std::uint8_t* row, KvFormat format, std::span<float> out) {
  const auto& value = e4m3_values();
  const auto bf16_at = [&](std::size_t byte) {
    std::uint16_t bits;
    std::memcpy(&bits, row + byte, 2);
    return Bf16::from_bits(bits).to_float();
  };
  for (std::size_t i = 0; i < kKvRow; ++i) {
    if (format == KvFormat::kBf16) {
      out[i] = bf16_at(2 * i);
    } else if (format == KvFormat::kFp8) {
      out[i] = value[row[i]];
    } else if (i < kLatent) {
      float scale;
      std::memcpy(&scale, row + kLatent + i / 128 * 4, 4);
      out[i] = bf16(static_cast<double>(value[row[i]] * scale));
    } else {
      out[i] = bf16_at(kLatent + 16 + 2 * (i - kLatent));
    }
  }
}

}  // namespace

ReferenceStages::ReferenceStages(const DecodeShape& shape, const LayerTensors& tensors)
    : shape_(shape), tensors_(&tensors) {
  validate(shape, tensors);
}

std::vector<float> ReferenceStages::qkv_a(std::span<const float> x, int rows) const {
  const auto h = static_cast<std::size_t>(shape_.hidden);
  std::vector<float> out;
  for (std::size_t s = 0; s < static_cast<std::size_t>(rows); ++s) {
    const std::vector<float> n = norm(row_of(x, s, h), tensors_->norm_input, shape_.eps);
    for (int r = 0; r < shape_.q_lora; ++r) out.push_back(bf16(dot(tensors_->q_a, r, 0, n)));
    for (int r = 0; r < kKvRow; ++r) out.push_back(bf16(dot(tensors_->kv_a, r, 0, n)));
  }
  return out;
}

std::vector<float> ReferenceStages::q_b(std::span<const float> c, int rows,
                                        std::span<const std::int32_t> positions) const {
  const auto q_lora = static_cast<std::size_t>(shape_.q_lora);
  const int local = shape_.local_heads() * kQueryHead;
  std::vector<float> out;
  for (std::size_t s = 0; s < static_cast<std::size_t>(rows); ++s) {
    const std::vector<float> n =
        norm(c.subspan(s * (q_lora + kKvRow), q_lora), tensors_->norm_q, shape_.eps_latent);
    std::vector<float> q;
    q.reserve(static_cast<std::size_t>(local));
    for (int r = 0; r < local; ++r) {
      q.push_back(static_cast<float>(
          dot(tensors_->q_b, static_cast<std::int64_t>(shape_.rank) * local + r, 0, n)));
    }
    for (std::size_t h = 0; h < static_cast<std::size_t>(shape_.local_heads()); ++h) {
      rotate(std::span(q).subspan(h * kQueryHead + kNope, kRope), positions[s], shape_.rope_theta);
    }
    for (const float v : q) out.push_back(bf16(static_cast<double>(v)));
  }
  return out;
}

std::vector<float> ReferenceStages::uk(std::span<const float> q, int rows) const {
  const auto& value = e4m3_values();
  const auto heads = static_cast<std::size_t>(shape_.local_heads());
  const Fp8Matrix& w = tensors_->kv_b;
  std::vector<float> out;
  for (std::size_t s = 0; s < static_cast<std::size_t>(rows); ++s) {
    for (std::size_t h = 0; h < heads; ++h) {
      std::array<double, kLatent> sum{};
      for (std::size_t d = 0; d < kNope; ++d) {
        const std::size_t row =
            (static_cast<std::size_t>(shape_.rank) * heads + h) * (kNope + kValue) + d;
        const double x = static_cast<double>(q[(s * heads + h) * kQueryHead + d]);
        const float* scale = w.scale.as<float>() + (per_channel(w) ? row : row / 128 * 4);
        for (std::size_t l = 0; l < kLatent; ++l) {
          sum[l] += x * static_cast<double>(value[w.data.as<std::uint8_t>()[row * kLatent + l]]) *
                    static_cast<double>(scale[per_channel(w) ? 0 : l / 128]);
        }
      }
      for (const double v : sum) out.push_back(bf16(v));
    }
  }
  return out;
}

std::vector<float> ReferenceStages::cache_row(std::span<const float> c_row, int position,
                                              KvFormat format, std::uint8_t* to) const {
  const auto q_lora = static_cast<std::size_t>(shape_.q_lora);
  std::vector<float> row =
      norm(c_row.subspan(q_lora, kLatent), tensors_->norm_kv, shape_.eps_latent);
  row.insert(row.end(), c_row.begin() + shape_.q_lora + kLatent, c_row.end());
  rotate(std::span(row).subspan(kLatent), position, shape_.rope_theta);
  for (float& v : row) v = bf16(static_cast<double>(v));
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(kv_row_bytes(format)));
  const auto put_bf16 = [&](std::size_t at, float v) {
    const std::uint16_t bits = Bf16::from_float(v).bits;
    std::memcpy(bytes.data() + at, &bits, 2);
  };
  if (format == KvFormat::kBf16) {
    for (std::size_t i = 0; i < kKvRow; ++i) put_bf16(2 * i, row[i]);
  } else if (format == KvFormat::kFp8) {
    for (std::size_t i = 0; i < kKvRow; ++i) bytes[i] = E4M3::from_float(row[i]).bits;
  } else {
    for (std::size_t b = 0; b < 4; ++b) {
      float amax = 1e-4F;
      for (std::size_t i = 0; i < 128; ++i) amax = std::max(amax, std::fabs(row[b * 128 + i]));
      const std::uint32_t bits = float_bits(amax / 448.0F);
      const std::uint32_t e = (bits >> 23) + ((bits & 0x7FFFFFu) != 0 ? 1u : 0u);
      const float scale = float_from_bits(e << 23);
      std::memcpy(bytes.data() + kLatent + 4 * b, &scale, 4);
      for (std::size_t i = 0; i < 128; ++i) {
        bytes[b * 128 + i] = E4M3::from_float(row[b * 128 + i] / scale).bits;
      }
    }
    for (std::size_t i = 0; i < kRope; ++i) put_bf16(kLatent + 16 + 2 * i, row[kLatent + i]);
  }
  read_cache_row(bytes.data(), format, row);
  if (to != nullptr) std::memcpy(to, bytes.data(), bytes.size());
  return row;
}

std::vector<float> ReferenceStages::attention(std::span<const float> q_row,
                                              std::span<const float> q_lat_row,
                                              std::span<const std::int32_t> picks,
                                              const HostCache& cache,
                                              std::span<const std::int64_t> slots,
                                              const std::vector<std::vector<float>>& fresh) const {
  const auto heads = static_cast<std::size_t>(shape_.local_heads());
  std::vector<std::vector<float>> keys;
  for (const std::int32_t pick : picks) {
    const auto found = std::find(slots.begin(), slots.end(), pick);
    if (found != slots.end()) {
      keys.push_back(fresh[static_cast<std::size_t>(found - slots.begin())]);
    } else {
      keys.emplace_back(kKvRow);
      read_cache_row(cache.data + pick / kPageTokens * cache.page_stride +
                         static_cast<std::int64_t>(pick % kPageTokens) * kv_row_bytes(cache.format),
                     cache.format, keys.back());
    }
  }
  std::vector<float> out(heads * kLatent, 0.0F);
  if (picks.empty()) return out;
  for (std::size_t h = 0; h < heads; ++h) {
    std::vector<double> p;
    double top = -std::numeric_limits<double>::infinity();
    for (const auto& key : keys) {
      double x = 0;
      for (std::size_t i = 0; i < kLatent; ++i) {
        x += static_cast<double>(q_lat_row[h * kLatent + i]) * static_cast<double>(key[i]);
      }
      for (std::size_t i = 0; i < kRope; ++i) {
        x += static_cast<double>(q_row[h * kQueryHead + kNope + i]) *
             static_cast<double>(key[kLatent + i]);
      }
      p.push_back(x / 16.0);
      top = std::max(top, p.back());
    }
    double sum = 0;
    for (double& x : p) sum += x = std::exp(x - top);
    std::array<double, kLatent> o{};
    for (std::size_t t = 0; t < keys.size(); ++t) {
      for (std::size_t i = 0; i < kLatent; ++i) o[i] += p[t] * static_cast<double>(keys[t][i]);
    }
    for (std::size_t i = 0; i < kLatent; ++i) {
      out[h * kLatent + i] = static_cast<float>(o[i] / sum);
    }
  }
  return out;
}

std::vector<float> ReferenceStages::uv(std::span<const float> o_lat_row) const {
  std::vector<float> out;
  for (int h = 0; h < shape_.local_heads(); ++h) {
    const std::int64_t row0 =
        static_cast<std::int64_t>(shape_.rank * shape_.local_heads() + h) * (kNope + kValue) +
        kNope;
    for (int v = 0; v < kValue; ++v) {
      out.push_back(bf16(dot(tensors_->kv_b, row0 + v, 0,
                             o_lat_row.subspan(static_cast<std::size_t>(h) * kLatent, kLatent))));
    }
  }
  return out;
}

std::vector<float> ReferenceStages::o(std::span<const float> o_rows, int rows) const {
  const auto columns = static_cast<std::size_t>(shape_.local_heads()) * kValue;
  std::vector<float> out;
  for (std::size_t s = 0; s < static_cast<std::size_t>(rows); ++s) {
    for (int r = 0; r < shape_.hidden; ++r) {
      out.push_back(
          bf16(dot(tensors_->o, r,
                   static_cast<std::int64_t>(shape_.rank) * static_cast<std::int64_t>(columns),
                   row_of(o_rows, s, columns))));
    }
  }
  return out;
}

std::vector<float> ReferenceStages::scores(std::span<const float> a, int rows) const {
  if (shape_.dense) {
    return std::vector<float>(static_cast<std::size_t>(rows * shape_.experts), 0.5F);
  }
  const auto h = static_cast<std::size_t>(shape_.hidden);
  std::vector<float> out;
  for (std::size_t s = 0; s < static_cast<std::size_t>(rows); ++s) {
    const std::vector<float> m = norm(row_of(a, s, h), tensors_->norm_post, shape_.eps);
    for (std::size_t e = 0; e < static_cast<std::size_t>(shape_.experts); ++e) {
      const auto* w = tensors_->router.as<std::uint16_t>() + e * h;
      double sum = 0;
      for (std::size_t i = 0; i < h; ++i) {
        sum += static_cast<double>(Bf16::from_bits(w[i]).to_float()) * static_cast<double>(m[i]);
      }
      out.push_back(static_cast<float>(1.0 / (1.0 + std::exp(-sum))));
    }
  }
  return out;
}

void ReferenceStages::select(std::span<const float> score_row, std::vector<int>& experts,
                             std::vector<float>& weights) const {
  if (shape_.dense) {
    experts.resize(static_cast<std::size_t>(shape_.experts));
    std::iota(experts.begin(), experts.end(), 0);
    weights.assign(experts.size(), 1.0F);
    return;
  }
  std::vector<int> order(score_row.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  const float* bias = tensors_->bias.as<float>();
  std::stable_sort(order.begin(), order.end(), [&](int x, int y) {
    return score_row[static_cast<std::size_t>(x)] + bias[x] >
           score_row[static_cast<std::size_t>(y)] + bias[y];
  });
  experts.assign(order.begin(), order.begin() + shape_.top_k);
  float sum = 0;
  for (const int e : experts) sum += score_row[static_cast<std::size_t>(e)];
  weights.clear();
  for (const int e : experts) {
    const float r = shape_.routed_scale * score_row[static_cast<std::size_t>(e)];
    weights.push_back(shape_.norm_topk ? r / (sum + 1e-20F) : r);
  }
}

RowRouting ReferenceStages::route(std::span<const float> score_row) const {
  RowRouting r;
  std::vector<float> weights;
  select(score_row, r.experts, weights);
  r.gap = std::numeric_limits<float>::infinity();
  if (r.experts.size() == score_row.size()) return r;
  const float* bias = tensors_->bias.as<float>();
  const auto value = [&](int e) { return score_row[static_cast<std::size_t>(e)] + bias[e]; };
  float next = -std::numeric_limits<float>::infinity();
  for (int e = 0; e < shape_.experts; ++e) {
    if (std::find(r.experts.begin(), r.experts.end(), e) == r.experts.end()) {
      next = std::max(next, value(e));
    }
  }
  r.gap = value(r.experts.back()) - next;
  return r;
}

std::vector<float> ReferenceStages::mid(std::span<const float> a_row, int expert) const {
  const ExpertTensors w = expert_tensors(shape_, *tensors_, expert);
  const std::vector<float> m = norm(a_row, tensors_->norm_post, shape_.eps);
  std::vector<float> out;
  for (int i = 0; i < shape_.local_intermediate(); ++i) {
    const std::int64_t row =
        w.first + static_cast<std::int64_t>(shape_.rank) * shape_.local_intermediate() + i;
    const double g = dot(*w.gate, row, 0, m);
    out.push_back(bf16(g / (1.0 + std::exp(-g)) * dot(*w.up, row, 0, m)));
  }
  return out;
}

void ReferenceStages::down(std::span<const float> mid, int expert, float weight,
                           std::span<double> sum) const {
  const ExpertTensors w = expert_tensors(shape_, *tensors_, expert);
  const std::int64_t column0 =
      w.first + static_cast<std::int64_t>(shape_.rank) * shape_.local_intermediate();
  for (int r = 0; r < shape_.hidden; ++r) {
    sum[static_cast<std::size_t>(r)] += static_cast<double>(weight) * dot(*w.down, r, column0, mid);
  }
}

std::vector<float> reduce(std::span<const float> residual,
                          const std::vector<std::vector<float>>& partials) {
  std::vector<float> out;
  for (std::size_t i = 0; i < residual.size(); ++i) {
    float sum = 0;
    for (const auto& partial : partials) sum += partial[i];
    out.push_back(bf16(static_cast<double>(residual[i] + sum)));
  }
  return out;
}

void run_reference_layer(const DecodeShape& shape, const LayerTensors& tensors,
                         const StepInput& step, const HostCache& cache, std::int64_t cache_slots,
                         std::span<const std::uint16_t> x_in, std::span<std::uint16_t> x_out,
                         std::vector<RowRouting>* routing) {
  const auto rows = static_cast<std::size_t>(shape.rows);
  const auto h = static_cast<std::size_t>(shape.hidden);
  require(x_in.size() == rows * h && x_out.size() == rows * h && step.positions.size() == rows &&
              step.slots.size() == rows && step.pick_offsets.size() == rows + 1,
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format(
                "decode_layer: {} rows need x of {} values, {} positions and slots, {} offsets; "
                "given are {} / {}, {} / {}, {}",
                rows, rows * h, rows, rows + 1, x_in.size(), x_out.size(), step.positions.size(),
                step.slots.size(), step.pick_offsets.size());
          });
  require(
      cache.data != nullptr && cache.page_stride >= kPageTokens * kv_row_bytes(cache.format),
      ErrorKind::kInvalidArgument, [&] {
        return fmt::format(
            "decode_layer: a cache at {} whose pages lie {} bytes apart; a page of {} rows takes "
            "{}",
            static_cast<const void*>(cache.data), cache.page_stride, kPageTokens,
            kPageTokens * kv_row_bytes(cache.format));
      });
  std::vector<ReferenceStages> ranks;
  for (int r = 0; r < shape.ranks; ++r) {
    DecodeShape of_rank = shape;
    of_rank.rank = r;
    ranks.emplace_back(of_rank, tensors);
  }
  std::vector<float> x(rows * h);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = Bf16::from_bits(x_in[i]).to_float();
  const std::vector<float> c = ranks[0].qkv_a(x, shape.rows);
  const std::size_t c_columns = static_cast<std::size_t>(shape.q_lora) + kKvRow;
  std::vector<std::vector<float>> fresh(rows, std::vector<float>(kKvRow, 0.0F));
  for (std::size_t s = 0; s < rows; ++s) {
    const std::int64_t slot = step.slots[s];
    if (slot < 0) continue;
    require(step.positions[s] >= 0 && (cache_slots == 0 || slot < cache_slots),
            ErrorKind::kInvalidArgument, [&] {
              return fmt::format("decode_layer: row {} has position {} and slot {} of {}", s,
                                 step.positions[s], slot, cache_slots);
            });
    fresh[s] = ranks[0].cache_row(row_of(c, s, c_columns), step.positions[s], cache.format,
                                  cache.data + slot / kPageTokens * cache.page_stride +
                                      slot % kPageTokens * kv_row_bytes(cache.format));
  }
  std::vector<std::vector<float>> partials;
  for (const ReferenceStages& rank : ranks) {
    const std::vector<float> q = rank.q_b(c, shape.rows, step.positions);
    const std::vector<float> q_lat = rank.uk(q, shape.rows);
    std::vector<float> o;
    for (std::size_t s = 0; s < rows; ++s) {
      const auto begin = static_cast<std::size_t>(step.pick_offsets[s]);
      const auto end = static_cast<std::size_t>(step.pick_offsets[s + 1]);
      require(begin <= end && end <= step.picks.size() && end - begin <= kMaxPicks,
              ErrorKind::kInvalidArgument, [&] {
                return fmt::format(
                    "decode_layer: row {} has picks {} to {} of {}, at most {} a row", s, begin,
                    end, step.picks.size(), kMaxPicks);
              });
      const auto picks = step.picks.subspan(begin, step.slots[s] < 0 ? 0 : end - begin);
      for (const std::int32_t pick : picks) {
        require(pick >= 0 && (cache_slots == 0 || pick < cache_slots), ErrorKind::kInvalidArgument,
                [&] {
                  return fmt::format("decode_layer: row {} picks slot {} of {}", s, pick,
                                     cache_slots);
                });
      }
      const std::size_t heads = static_cast<std::size_t>(rank.shape().local_heads());
      const std::vector<float> o_lat =
          rank.attention(row_of(q, s, heads * kQueryHead), row_of(q_lat, s, heads * kLatent), picks,
                         cache, step.slots, fresh);
      const std::vector<float> row = rank.uv(o_lat);
      o.insert(o.end(), row.begin(), row.end());
    }
    partials.push_back(rank.o(o, shape.rows));
  }
  const std::vector<float> a = reduce(x, partials);
  const std::vector<float> scores = ranks[0].scores(a, shape.rows);
  if (routing != nullptr) {
    routing->assign(rows, {});
    for (std::size_t s = 0; s < rows; ++s) {
      if (step.slots[s] < 0) continue;
      (*routing)[s] = ranks[0].route(row_of(scores, s, static_cast<std::size_t>(shape.experts)));
    }
  }
  partials.clear();
  for (const ReferenceStages& rank : ranks) {
    std::vector<float> y;
    for (std::size_t s = 0; s < rows; ++s) {
      std::vector<double> sum(h, 0.0);
      if (step.slots[s] >= 0) {
        std::vector<int> experts;
        std::vector<float> weights;
        rank.select(row_of(scores, s, static_cast<std::size_t>(shape.experts)), experts, weights);
        const auto a_row = row_of(a, s, h);
        rank.down(rank.mid(a_row, shape.experts), shape.experts, 1.0F, sum);
        for (std::size_t k = 0; k < experts.size(); ++k) {
          rank.down(rank.mid(a_row, experts[k]), experts[k], weights[k], sum);
        }
      }
      for (const double v : sum) y.push_back(bf16(v));
    }
    partials.push_back(std::move(y));
  }
  const std::vector<float> out = reduce(a, partials);
  for (std::size_t s = 0; s < rows; ++s) {
    if (step.slots[s] < 0) continue;
    for (std::size_t i = 0; i < h; ++i) x_out[s * h + i] = Bf16::from_float(out[s * h + i]).bits;
  }
}

}  // namespace penstock::decode
