#include "model/rank_worker.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/cpu/attention.h"
#include "ops/cpu/elementwise.h"
#include "ops/cpu/linear.h"

namespace penstock::engine {
namespace {

// Outputs of a product that one task computes: a decoded tile, or twice that for one or two rows,
// where a task would otherwise last less than the hand-out of tasks.
constexpr std::int64_t kTileOutputs = 16;
constexpr std::int64_t kDirectOutputs = 32;
// Rows of an attention task: W_UK and W_UV of its heads are decoded once for all of them.
constexpr std::int64_t kAttentionRows = 32;
constexpr std::int64_t kAttentionHeads = 4;
// Rows that one round of the all-reduce takes; longer chunks take several.
constexpr std::int64_t kReduceRows = 16;
// Stages of less work than this stay on the calling thread: starting the others takes 1-2 us.
constexpr std::int64_t kSerialRows = 4;
constexpr std::int64_t kSerialProducts = 32768;

std::int64_t output_block(std::int64_t rows) { return rows <= 2 ? kDirectOutputs : kTileOutputs; }

}  // namespace

RankWorker::RankWorker(const ModelConfig& config, const EngineOptions& options,
                       const ModelWeights& weights, int rank, const TeamHandle& team)
    : config_(config),
      options_(options),
      weights_(weights),
      rank_(rank),
      pool_(options.threads),
      cache_(config, options.pages),
      heads_(config.heads / options.ranks),
      latent_eps_(static_cast<float>(options.latent_eps)) {
  const std::int64_t rows = options.max_rows;
  const ModelConfig& c = config;
  if (options.ranks > 1) {
    const std::int64_t most = std::min(rows, kReduceRows) * c.hidden;
    all_reduce_ = std::make_unique<AllReduce>(team, static_cast<std::uint64_t>(most));
  }
  const std::int64_t picks = std::min(c.index_top_k, options.max_context);
  // f32 frequencies and angles, as the model was trained and is served (reference.h has the
  // numbers).
  for (std::int64_t i = 0; i < c.rope; i += 2) {
    const float exponent = static_cast<float>(i) / static_cast<float>(c.rope);
    frequencies_.push_back(1.0f / std::pow(static_cast<float>(c.rope_theta), exponent));
  }
  const auto buffer = [&](std::int64_t count) { return FloatBuffer(count, "activations"); };
  const std::int64_t expert_width = c.expert_intermediate / options.ranks;
  const std::int64_t routed = rows * c.top_k;
  hidden_floats_ = std::max(rows * c.dense_intermediate / options.ranks,
                            (routed + rows * c.shared_experts) * expert_width);
  x_ = buffer(rows * c.hidden);
  normed_ = buffer(rows * c.hidden);
  c_q_ = buffer(rows * c.q_lora);
  c_kv_ = buffer(rows * c.cache_dim());
  q_ = buffer(rows * heads_ * c.qk_dim());
  index_q_ = buffer(rows * c.index_heads * c.index_dim);
  index_k_ = buffer(rows * c.index_dim);
  index_w_ = buffer(rows * c.index_heads);
  heads_out_ = buffer(rows * heads_ * c.v_dim);
  router_ = buffer(rows * c.experts);
  gathered_ = buffer(routed * c.hidden);
  hidden_ = buffer(hidden_floats_);
  expert_out_ = buffer((routed + rows) * c.hidden);
  partial_ = buffer(rows * c.hidden);
  cosines_ = buffer(rows * c.rope / 2);
  sines_ = buffer(rows * c.rope / 2);
  const std::int64_t context = PageTable::pages_for(options.max_context) * Engine::kPageTokens;
  scores_ = buffer(context);
  if (options.activations == ActivationFormat::kFp8) {
    // The widest input of a product.
    const std::int64_t widest = std::max({rows * c.hidden, rows * c.q_lora, rows * heads_ * c.v_dim,
                                          routed * c.hidden, hidden_floats_});
    rounded_ = buffer(widest);
    rounded_experts_ = buffer(routed * c.hidden);
  }
  expert_row_.resize(static_cast<std::size_t>(routed));
  expert_id_.resize(static_cast<std::size_t>(routed));
  expert_weight_.resize(static_cast<std::size_t>(routed));
  pick_stride_ = picks;
  pick_positions_.resize(static_cast<std::size_t>(rows * picks));
  pick_slots_.resize(static_cast<std::size_t>(rows * picks));
  pick_count_.resize(static_cast<std::size_t>(rows));
  std::int64_t linear = 0;
  for (const std::int64_t cols :
       {c.hidden, c.q_lora, c.kv_lora, heads_ * c.v_dim, c.dense_intermediate / options.ranks,
        expert_width * std::max<std::int64_t>(c.shared_experts, 1)}) {
    linear = std::max(linear, cpu::linear_scratch(c.nope, cols));
  }
  const std::int64_t task_rows = std::min(rows, kAttentionRows);
  scratch_.resize(static_cast<std::size_t>(options.threads));
  for (ThreadScratch& scratch : scratch_) {
    scratch.linear = buffer(linear);
    scratch.queries = buffer(task_rows * kAttentionHeads * c.cache_dim());
    scratch.latents = buffer(task_rows * kAttentionHeads * c.kv_lora);
    scratch.logits = buffer(cpu::attend_scratch(picks));
    scratch.up = buffer(rows * kDirectOutputs);
    scratch.scores = buffer(context);
    scratch.keys.resize(static_cast<std::size_t>(context));
    scratch.row_pointers.resize(static_cast<std::size_t>(picks));
  }
}

std::int64_t RankWorker::scratch_bytes() const {
  std::int64_t bytes = 0;
  for (const FloatBuffer* buffer :
       {&x_, &normed_, &rounded_, &rounded_experts_, &c_q_, &c_kv_, &q_, &index_q_, &index_k_,
        &index_w_, &heads_out_, &router_, &gathered_, &hidden_, &expert_out_, &partial_, &cosines_,
        &sines_, &scores_}) {
    bytes += buffer->bytes();
  }
  for (const ThreadScratch& s : scratch_) {
    for (const FloatBuffer* buffer :
         {&s.linear, &s.queries, &s.latents, &s.logits, &s.up, &s.scores}) {
      bytes += buffer->bytes();
    }
    bytes += static_cast<std::int64_t>(s.keys.size() * 8 + s.row_pointers.size() * 8);
  }
  return bytes + static_cast<std::int64_t>(expert_row_.size() * 16 + pick_slots_.size() * 12);
}

// Calls body(task, thread) for each task; threads take them as they come.
template <typename Body>
void RankWorker::tasks(std::int64_t count, const Body& body) {
  if (count <= 1 || pool_.threads() == 1) {
    for (std::int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
  std::atomic<std::int64_t> next{0};
  pool_.run([&](int thread) {
    while (true) {
      const std::int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) return;
      body(i, thread);
    }
  });
}

template <typename Body>
void RankWorker::for_rows(const Body& body) {
  if (count_ <= kSerialRows) {
    for (std::int64_t row = 0; row < count_; ++row) body(row);
  } else {
    tasks(count_, [&](std::int64_t row, int) { body(row); });
  }
}

bool RankWorker::rounds(const cpu::Matrix& matrix) const {
  return options_.activations == ActivationFormat::kFp8 && matrix.quantised();
}

// x [rows, count], or its rounded copy in `to` where the product of `matrix` reads FP8.
const float* RankWorker::operand(const cpu::Matrix& matrix, const float* x, std::int64_t rows,
                                 std::int64_t count, const FloatBuffer& to) {
  if (!rounds(matrix)) return x;
  tasks(rows, [&](std::int64_t row, int) {
    cpu::round_to_fp8(x + row * count, count, to.data() + row * count);
  });
  return to.data();
}

void RankWorker::add_blocks(const cpu::Matrix& matrix, const float* x, std::int64_t rows, float* y,
                            std::int64_t ldy) {
  const std::int64_t step = output_block(rows);
  for (std::int64_t n = 0; n < matrix.rows; n += step) {
    blocks_.push_back({&matrix, n, std::min(n + step, matrix.rows), x, rows, y, ldy});
  }
}

void RankWorker::run_blocks() {
  std::int64_t products = 0;
  for (const Block& b : blocks_) products += (b.end - b.begin) * b.matrix->cols * b.rows;
  const auto body = [&](std::int64_t i, int thread) {
    const Block& b = blocks_[static_cast<std::size_t>(i)];
    cpu::linear(*b.matrix, b.begin, b.end, b.x, b.matrix->cols, b.rows, b.y, b.ldy,
                scratch(thread).linear.data());
  };
  const auto count = static_cast<std::int64_t>(blocks_.size());
  if (products <= kSerialProducts) {
    for (std::int64_t i = 0; i < count; ++i) body(i, 0);
  } else {
    tasks(count, body);
  }
  blocks_.clear();
}

void RankWorker::embed() {
  const std::int64_t half = config_.rope / 2;
  for_rows([&](std::int64_t row) {
    const Row& r = rows_[static_cast<std::size_t>(row)];
    cpu::decode_row(weights_.embedding, r.token, x_.data() + row * config_.hidden);
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(static_cast<float>(r.position) *
                                               frequencies_[static_cast<std::size_t>(i)]);
      cosines_.data()[row * half + i] = static_cast<float>(std::cos(angle));
      sines_.data()[row * half + i] = static_cast<float>(std::sin(angle));
    }
  });
}

void RankWorker::rotate(float* x, std::int64_t row) const {
  const std::int64_t half = config_.rope / 2;
  cpu::rotate_pairs(x, cosines_.data() + row * half, sines_.data() + row * half, half);
}

// n = RMS(x); c_q, cache rows, index keys; then q and the indexer's queries from c_q.
void RankWorker::attention_inputs(const LayerWeights& layer, std::int64_t index) {
  const ModelConfig& c = config_;
  for_rows([&](std::int64_t row) {
    cpu::rms_norm(x_.data() + row * c.hidden, layer.input_norm.data(), c.hidden,
                  static_cast<float>(c.rms_eps), normed_.data() + row * c.hidden);
  });
  const float* n = normed_.data();
  const float* n8 = operand(layer.q_a, n, count_, c.hidden, rounded_);
  const auto from_hidden = [&](const cpu::Matrix& matrix, const FloatBuffer& to) {
    add_blocks(matrix, rounds(matrix) ? n8 : n, count_, to.data(), matrix.rows);
  };
  from_hidden(layer.q_a, c_q_);
  from_hidden(layer.kv_a, c_kv_);
  if (layer.full_indexer) {
    from_hidden(layer.index_k, index_k_);
    from_hidden(layer.index_w, index_w_);
  }
  run_blocks();
  for_rows([&](std::int64_t row) {
    const Row& r = rows_[static_cast<std::size_t>(row)];
    const Slot slot = r.sequence->slot(r.position);
    float* c_q = c_q_.data() + row * c.q_lora;
    cpu::rms_norm(c_q, layer.q_norm.data(), c.q_lora, latent_eps_, c_q);
    const float* c_kv = c_kv_.data() + row * c.cache_dim();
    float* cached = cache_.latent(index, slot);
    cpu::rms_norm(c_kv, layer.kv_norm.data(), c.kv_lora, latent_eps_, cached);
    std::copy_n(c_kv + c.kv_lora, c.rope, cached + c.kv_lora);
    rotate(cached + c.kv_lora, row);
    if (!layer.full_indexer) return;
    float* key = index_k_.data() + row * c.index_dim;
    cpu::layer_norm(key, layer.index_gain.data(), layer.index_bias.data(), c.index_dim,
                    static_cast<float>(c.index_norm_eps), key);
    rotate(key, row);
    float* page = cache_.index_page(full_layer_, slot / Engine::kPageTokens);
    for (std::int64_t i = 0; i < c.index_dim; ++i) {
      page[i * Engine::kPageTokens + slot % Engine::kPageTokens] = key[i];
    }
  });
  const float* c_q8 = operand(layer.q_b, c_q_.data(), count_, c.q_lora, rounded_);
  const cpu::Matrix q_b = layer.q_b.row_window(rank_ * heads_ * c.qk_dim(), heads_ * c.qk_dim());
  add_blocks(q_b, c_q8, count_, q_.data(), q_b.rows);
  if (layer.full_indexer) {
    add_blocks(layer.index_q, rounds(layer.index_q) ? c_q8 : c_q_.data(), count_, index_q_.data(),
               layer.index_q.rows);
  }
  run_blocks();
}

// The exact top-k of the indexer's scores, as positions and as slots.
void RankWorker::pick() {
  const ModelConfig& c = config_;
  const float factor =
      1.0f / std::sqrt(static_cast<float>(c.index_dim) * static_cast<float>(c.index_heads));
  const auto prepare = [&](std::int64_t row) {
    float* q = index_q_.data() + row * c.index_heads * c.index_dim;
    for (std::int64_t h = 0; h < c.index_heads; ++h) rotate(q + h * c.index_dim, row);
    float* w = index_w_.data() + row * c.index_heads;
    for (std::int64_t h = 0; h < c.index_heads; ++h) w[h] *= factor;
  };
  const auto score = [&](std::int64_t row, std::int64_t page, float* scores) {
    const Sequence& sequence = *rows_[static_cast<std::size_t>(row)].sequence;
    cpu::index_scores(
        index_q_.data() + row * c.index_heads * c.index_dim, index_w_.data() + row * c.index_heads,
        c.index_heads, c.index_dim,
        cache_.index_page(full_layer_, sequence.pages[static_cast<std::size_t>(page)]),
        scores + page * Engine::kPageTokens);
  };
  const auto choose = [&](std::int64_t row, const float* scores, std::uint64_t* keys) {
    const Row& r = rows_[static_cast<std::size_t>(row)];
    std::int32_t* positions = pick_positions_.data() + row * pick_stride_;
    Slot* slots = pick_slots_.data() + row * pick_stride_;
    const std::int64_t n = cpu::top_k(scores, r.position + 1, c.index_top_k, keys, positions);
    for (std::int64_t i = 0; i < n; ++i) slots[i] = r.sequence->slot(positions[i]);
    pick_count_[static_cast<std::size_t>(row)] = n;
  };
  // Few rows with long contexts: the threads share a row's pages instead of the rows.
  constexpr std::int64_t kPagesPerTask = 8;
  const auto pages_of = [&](std::int64_t row) {
    return rows_[static_cast<std::size_t>(row)].position / Engine::kPageTokens + 1;
  };
  const auto all_picked = [&](std::int64_t row) {
    return rows_[static_cast<std::size_t>(row)].position < c.index_top_k;
  };
  const auto whole_row = [&](std::int64_t row, int thread) {
    ThreadScratch& s = scratch(thread);
    if (!all_picked(row)) {
      prepare(row);
      for (std::int64_t page = 0; page < pages_of(row); ++page) score(row, page, s.scores.data());
    }
    choose(row, s.scores.data(), s.keys.data());
  };
  if (count_ >= pool_.threads() && count_ > 1) {
    tasks(count_, whole_row);
    return;
  }
  for (std::int64_t row = 0; row < count_; ++row) {
    if (all_picked(row) || pages_of(row) <= kPagesPerTask) {
      whole_row(row, 0);
      continue;
    }
    prepare(row);
    tasks((pages_of(row) + kPagesPerTask - 1) / kPagesPerTask, [&](std::int64_t task, int) {
      const std::int64_t end = std::min(pages_of(row), (task + 1) * kPagesPerTask);
      for (std::int64_t page = task * kPagesPerTask; page < end; ++page) {
        score(row, page, scores_.data());
      }
    });
    choose(row, scores_.data(), scratch(0).keys.data());
  }
}

// Absorbed MLA over the picks, then W_o's share of this rank's heads.
void RankWorker::attend(const LayerWeights& layer, std::int64_t index) {
  const ModelConfig& c = config_;
  const std::int64_t dim = c.cache_dim();
  const std::int64_t head_rows = c.nope + c.v_dim;
  const std::int64_t blocks = (count_ + kAttentionRows - 1) / kAttentionRows;
  const std::int64_t fours = (heads_ + kAttentionHeads - 1) / kAttentionHeads;
  const std::int64_t per_task = blocks * fours < pool_.threads() ? 1 : kAttentionHeads;
  const std::int64_t groups = (heads_ + per_task - 1) / per_task;
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.qk_dim())));
  tasks(blocks * groups, [&](std::int64_t task, int thread) {
    ThreadScratch& s = scratch(thread);
    const std::int64_t row0 = task / groups * kAttentionRows;
    const std::int64_t rows = std::min(kAttentionRows, count_ - row0);
    const std::int64_t head0 = task % groups * per_task;
    const std::int64_t heads = std::min(per_task, heads_ - head0);
    float* queries = s.queries.data();  // [rows, heads, dim]
    float* latents = s.latents.data();  // [rows, heads, kv_lora]
    for (std::int64_t h = 0; h < heads; ++h) {
      const float* q = q_.data() + (row0 * heads_ + head0 + h) * c.qk_dim();
      const cpu::Matrix w_uk =
          layer.kv_b.row_window((rank_ * heads_ + head0 + h) * head_rows, c.nope);
      cpu::linear_transposed(w_uk, 0, c.kv_lora, q, heads_ * c.qk_dim(), rows, queries + h * dim,
                             heads * dim, s.linear.data());
      for (std::int64_t i = 0; i < rows; ++i) {
        float* q_pe = queries + (i * heads + h) * dim + c.kv_lora;
        std::copy_n(q + i * heads_ * c.qk_dim() + c.nope, c.rope, q_pe);
        rotate(q_pe, row0 + i);
      }
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t row = row0 + i;
      const std::int64_t picks = pick_count_[static_cast<std::size_t>(row)];
      const Slot* slots = pick_slots_.data() + row * pick_stride_;
      for (std::int64_t t = 0; t < picks; ++t) {
        s.row_pointers[static_cast<std::size_t>(t)] = cache_.latent(index, slots[t]);
      }
      cpu::attend(queries + i * heads * dim, dim, heads, s.row_pointers.data(), picks, dim,
                  c.kv_lora, scale, s.logits.data(), latents + i * heads * c.kv_lora, c.kv_lora);
    }
    for (std::int64_t h = 0; h < heads; ++h) {
      const cpu::Matrix w_uv =
          layer.kv_b.row_window((rank_ * heads_ + head0 + h) * head_rows + c.nope, c.v_dim);
      cpu::linear(w_uv, 0, c.v_dim, latents + h * c.kv_lora, heads * c.kv_lora, rows,
                  heads_out_.data() + (row0 * heads_ + head0 + h) * c.v_dim, heads_ * c.v_dim,
                  s.linear.data());
    }
  });
  const cpu::Matrix o = layer.o.col_window(rank_ * heads_ * c.v_dim, heads_ * c.v_dim);
  add_blocks(o, operand(o, heads_out_.data(), count_, o.cols, rounded_), count_, partial_.data(),
             c.hidden);
  run_blocks();
  reduce();
}

// x += the sum of all ranks' parts.
void RankWorker::reduce() {
  if (all_reduce_) {
    all_reduce_->run({partial_.data(), static_cast<std::size_t>(count_ * config_.hidden)});
  }
  for_rows([&](std::int64_t row) {
    cpu::add_to(x_.data() + row * config_.hidden, partial_.data() + row * config_.hidden,
                config_.hidden);
  });
}

void RankWorker::choose_experts(const LayerWeights& layer, std::int64_t row) {
  const ModelConfig& c = config_;
  const float lowest = -std::numeric_limits<float>::infinity();
  const float* logits = router_.data() + row * c.experts;
  std::vector<float> gate(static_cast<std::size_t>(c.experts));
  std::vector<float> choice(static_cast<std::size_t>(c.experts));
  for (std::size_t e = 0; e < gate.size(); ++e) {
    gate[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    const float biased = gate[e] + layer.router_bias[e];
    choice[e] = std::isnan(biased) ? lowest : biased;
  }
  // The index of the greatest value that is not taken yet; the first of equals.
  const auto take_best = [](const std::vector<float>& values, std::vector<bool>& taken,
                            std::size_t begin, std::size_t end) {
    std::size_t best = end;
    for (std::size_t i = begin; i < end; ++i) {
      if (!taken[i] && (best == end || values[i] > values[best])) best = i;
    }
    taken[best] = true;
    return best;
  };
  std::vector<bool> taken(gate.size(), false);
  if (c.groups > 1) {
    const auto groups = static_cast<std::size_t>(c.groups);
    const std::size_t size = gate.size() / groups;
    std::vector<float> group_score(groups);
    for (std::size_t g = 0; g < groups; ++g) {
      std::vector<bool> seen(gate.size(), false);
      for (std::size_t i = 0; i < std::min<std::size_t>(2, size); ++i) {
        group_score[g] += choice[take_best(choice, seen, g * size, (g + 1) * size)];
      }
    }
    std::vector<bool> kept(groups, false);
    for (std::int64_t i = 0; i < c.top_groups; ++i) take_best(group_score, kept, 0, groups);
    for (std::size_t e = 0; e < gate.size(); ++e) taken[e] = !kept[e / size];
  }
  std::int32_t* ids = expert_id_.data() + row * c.top_k;
  float* weights = expert_weight_.data() + row * c.top_k;
  float sum = 0.0f;
  for (std::int64_t i = 0; i < c.top_k; ++i) {
    const std::size_t e = take_best(choice, taken, 0, gate.size());
    ids[i] = static_cast<std::int32_t>(e);
    weights[i] = gate[e];
    sum += gate[e];
  }
  const float scale = static_cast<float>(c.routed_scale) / (c.norm_top_k ? sum + 1e-20f : 1.0f);
  for (std::int64_t i = 0; i < c.top_k; ++i) weights[i] *= scale;
}

// m = RMS(a); for sparse layers also the choice of experts and their rows, expert by expert.
void RankWorker::route(const LayerWeights& layer) {
  const ModelConfig& c = config_;
  for_rows([&](std::int64_t row) {
    cpu::rms_norm(x_.data() + row * c.hidden, layer.post_norm.data(), c.hidden,
                  static_cast<float>(c.rms_eps), normed_.data() + row * c.hidden);
  });
  runs_.clear();
  if (!layer.sparse) return;
  add_blocks(layer.router, operand(layer.router, normed_.data(), count_, c.hidden, rounded_),
             count_, router_.data(), c.experts);
  run_blocks();
  for_rows([&](std::int64_t row) { choose_experts(layer, row); });

  const auto routed = static_cast<std::size_t>(count_ * c.top_k);
  std::vector<std::int64_t> begin(static_cast<std::size_t>(c.experts) + 1, 0);
  for (std::size_t i = 0; i < routed; ++i) ++begin[static_cast<std::size_t>(expert_id_[i]) + 1];
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
  const std::int64_t width = c.expert_intermediate / options_.ranks;
  for (std::size_t e = 0; e < layer.experts.size(); ++e) {
    const std::int64_t rows = begin[e + 1] - begin[e];
    if (rows == 0) continue;
    runs_.push_back({&layer.experts[e], rows, width, gathered_.data() + begin[e] * c.hidden,
                     hidden_.data() + begin[e] * width, expert_out_.data() + begin[e] * c.hidden});
    // One token: all experts read the same row, no copies.
    if (count_ == 1) runs_.back().x = normed_.data();
  }
  for (std::size_t i = 0; i < routed; ++i) {
    expert_row_[i] = begin[static_cast<std::size_t>(expert_id_[i])]++;
  }
  if (count_ == 1) return;
  for_rows([&](std::int64_t row) {
    for (std::int64_t i = row * c.top_k; i < (row + 1) * c.top_k; ++i) {
      std::copy_n(normed_.data() + row * c.hidden, c.hidden,
                  gathered_.data() + expert_row_[static_cast<std::size_t>(i)] * c.hidden);
    }
  });
}

// Dense or shared expert and the chosen experts, x += sum of all.
void RankWorker::mlp(const LayerWeights& layer) {
  const ModelConfig& c = config_;
  const bool dense = layer.dense.gate.rows > 0;
  const std::int64_t routed = layer.sparse ? count_ * c.top_k : 0;
  float* dense_out = expert_out_.data() + routed * c.hidden;
  if (dense) {
    runs_.push_back({&layer.dense, count_, layer.dense.gate.rows / options_.ranks, normed_.data(),
                     hidden_.data() + routed * (c.expert_intermediate / options_.ranks),
                     dense_out});
  }
  if (options_.activations == ActivationFormat::kFp8) {
    for (ExpertRun& run : runs_) {
      if (!rounds(run.weights->gate)) continue;
      const bool gathered = run.x != normed_.data();
      const FloatBuffer& to = gathered ? rounded_experts_ : rounded_;
      const std::int64_t at = gathered ? run.x - gathered_.data() : 0;
      tasks(run.rows, [&](std::int64_t row, int) {
        cpu::round_to_fp8(run.x + row * c.hidden, c.hidden, to.data() + at + row * c.hidden);
      });
      run.x = to.data() + at;
    }
  }
  // Blocks of gate and up outputs together, so that silu(gate) * up follows in the same task.
  struct Part {
    const ExpertRun* run;
    std::int64_t begin, end;
  };
  std::vector<Part> parts;
  for (const ExpertRun& run : runs_) {
    const std::int64_t step = output_block(run.rows);
    for (std::int64_t n = 0; n < run.width; n += step) {
      parts.push_back({&run, n, std::min(n + step, run.width)});
    }
  }
  tasks(static_cast<std::int64_t>(parts.size()), [&](std::int64_t task, int thread) {
    ThreadScratch& s = scratch(thread);
    const Part& part = parts[static_cast<std::size_t>(task)];
    const ExpertRun& run = *part.run;
    const std::int64_t shard = rank_ * run.width;
    const std::int64_t count = part.end - part.begin;
    float* gate = run.hidden + part.begin;  // [rows, width]
    float* up = s.up.data();                // [rows, count]
    cpu::linear(run.weights->gate.row_window(shard + part.begin, count), 0, count, run.x, c.hidden,
                run.rows, gate, run.width, s.linear.data());
    cpu::linear(run.weights->up.row_window(shard + part.begin, count), 0, count, run.x, c.hidden,
                run.rows, up, count, s.linear.data());
    for (std::int64_t row = 0; row < run.rows; ++row) {
      cpu::silu_mul(gate + row * run.width, up + row * count, count, gate + row * run.width);
    }
  });
  down_.clear();
  for (const ExpertRun& run : runs_) {
    down_.push_back(run.weights->down.col_window(rank_ * run.width, run.width));
  }
  for (std::size_t i = 0; i < runs_.size(); ++i) {
    const ExpertRun& run = runs_[i];
    if (rounds(down_[i])) {
      tasks(run.rows, [&](std::int64_t row, int) {
        cpu::round_to_fp8(run.hidden + row * run.width, run.width, run.hidden + row * run.width);
      });
    }
    add_blocks(down_[i], run.hidden, run.rows, run.out, c.hidden);
  }
  run_blocks();
  float* partial = partial_.data();
  for_rows([&](std::int64_t row) {
    float* y = partial + row * c.hidden;
    if (dense) {
      std::copy_n(dense_out + row * c.hidden, c.hidden, y);
    } else {
      std::fill_n(y, c.hidden, 0.0f);
    }
    if (!layer.sparse) return;
    for (std::int64_t i = row * c.top_k; i < (row + 1) * c.top_k; ++i) {
      const auto slot = static_cast<std::size_t>(i);
      cpu::add_scaled_to(y, expert_weight_[slot], expert_out_.data() + expert_row_[slot] * c.hidden,
                         c.hidden);
    }
  });
  reduce();
}

void RankWorker::logits(const Chunk& chunk) {
  const ModelConfig& c = config_;
  const auto wanted = static_cast<std::int64_t>(chunk.logit_rows.size());
  if (wanted == 0) return;
  for (std::int64_t i = 0; i < wanted; ++i) {
    cpu::rms_norm(x_.data() + chunk.logit_rows[static_cast<std::size_t>(i)] * c.hidden,
                  weights_.final_norm.data(), c.hidden, static_cast<float>(c.rms_eps),
                  normed_.data() + i * c.hidden);
  }
  const std::int64_t begin = c.vocab * rank_ / options_.ranks;
  const std::int64_t end = c.vocab * (rank_ + 1) / options_.ranks;
  const cpu::Matrix head = weights_.lm_head.row_window(begin, end - begin);
  add_blocks(head, operand(head, normed_.data(), wanted, c.hidden, rounded_), wanted,
             chunk.logits + begin, c.vocab);
  run_blocks();
}

void RankWorker::capture(const char* stage, std::int64_t layer, std::int64_t row,
                         std::span<const float> values,
                         std::span<const std::int32_t> indices) const {
  const Row& r = rows_[static_cast<std::size_t>(row)];
  (*chunk_->capture)({stage, layer, r.sequence->id, r.position, values, indices});
}

void RankWorker::capture_stream(const char* stage, std::int64_t layer) const {
  const auto hidden = static_cast<std::size_t>(config_.hidden);
  for (std::int64_t row = 0; row < count_; ++row) {
    capture(stage, layer, row, {x_.data() + row * config_.hidden, hidden}, {});
  }
}

void RankWorker::forward(const Chunk& chunk) {
  chunk_ = &chunk;
  rows_.clear();
  for (const Segment& segment : chunk.segments) {
    for (std::size_t i = 0; i < segment.tokens.size(); ++i) {
      rows_.push_back(
          {segment.sequence, segment.first + static_cast<std::int64_t>(i), segment.tokens[i]});
    }
  }
  count_ = static_cast<std::int64_t>(rows_.size());
  blocks_.clear();
  full_layer_ = 0;
  const bool captures = rank_ == 0 && chunk.capture != nullptr && *chunk.capture;
  embed();
  if (captures) capture_stream("embedding", -1);
  for (std::size_t index = 0; index < weights_.layers.size(); ++index) {
    const LayerWeights& layer = weights_.layers[index];
    const auto number = static_cast<std::int64_t>(index);
    attention_inputs(layer, number);
    if (layer.full_indexer) {
      pick();
      ++full_layer_;
      for (std::int64_t row = 0; captures && row < count_; ++row) {
        capture("indexer.picks", number, row, {},
                {pick_positions_.data() + row * pick_stride_,
                 static_cast<std::size_t>(pick_count_[static_cast<std::size_t>(row)])});
      }
    }
    attend(layer, number);
    route(layer);
    for (std::int64_t row = 0; captures && layer.sparse && row < count_; ++row) {
      const auto k = static_cast<std::size_t>(config_.top_k);
      capture("router.logits", number, row,
              {router_.data() + row * config_.experts, static_cast<std::size_t>(config_.experts)},
              {});
      capture("router.choice", number, row, {expert_weight_.data() + row * config_.top_k, k},
              {expert_id_.data() + row * config_.top_k, k});
    }
    mlp(layer);
    if (captures) capture_stream("layer.out", number);
  }
  logits(chunk);
}

}  // namespace penstock::engine
