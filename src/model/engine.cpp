#include "penstock/model/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <thread>
#include <unordered_set>

#include "model/decode_runner.h"
#include "model/engine_weights.h"
#include "model/paged_cache.h"
#include "model/rank_group.h"
#include "model/rank_worker.h"
#include "penstock/core/env.h"
#include "penstock/core/error.h"

namespace penstock {
namespace {

using engine::Chunk;
using engine::DecodeRunner;
using engine::ModelWeights;
using engine::PageTable;
using engine::RankGroup;
using engine::RankWorker;
using engine::Segment;
using engine::Sequence;

void check_option(bool ok, std::string_view name, std::int64_t value, std::string_view accepted) {
  require(ok, ErrorKind::kInvalidArgument,
          [&] { return fmt::format("EngineOptions::{} is {}: give {}", name, value, accepted); });
}

void check_decode_options(const ModelConfig& config, EngineOptions& options) {
  require(options.activations == ActivationFormat::kF32, ErrorKind::kUnsupported, [] {
    return std::string(
        "decode_layer multiplies FP8 weights with bf16 activations and does not quantise them: use "
        "ActivationFormat::kF32");
  });
  const std::int64_t most =
      std::min<std::int64_t>({config.index_top_k, config.max_positions, decode::kMaxPicks});
  require(options.max_context <= most, ErrorKind::kUnsupported, [&] {
    return fmt::format(
        "a context of {} tokens: decode_layer attends to given picks and has no indexer yet, so "
        "contexts end at the indexer's top-k of {}, below which the picks are all positions: ask "
        "for at most {} tokens, prompt included",
        options.max_context, most, most);
  });
  if (options.max_context == 0) options.max_context = most;
  options.max_rows = std::min<std::int64_t>(options.max_rows, decode::kMaxRows);
}

EngineOptions fill_in(const ModelConfig& config, EngineOptions options) {
  const int ranks = options.ranks;
  check_option(ranks == 1 || ranks == 2 || ranks == 4 || ranks == 8, "ranks", ranks,
               "1, 2, 4 or 8");
  check_option(options.threads >= 0 && options.threads <= 1024, "threads", options.threads,
               "1 to 1024, or 0 for the default");
  if (options.threads == 0) options.threads = Env::threads_count();
  if (options.threads == 0) {
    options.threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / ranks);
  }
  check_option(
      options.max_context >= 0 && options.max_context <= config.max_positions, "max_context",
      options.max_context,
      fmt::format("1 to {} (max_position_embeddings), or 0 for all of it", config.max_positions));
  if (options.decode_layers != nullptr) check_decode_options(config, options);
  if (options.max_context == 0) options.max_context = config.max_positions;
  constexpr std::int64_t kMostRows = 65536;
  check_option(options.max_rows >= 1 && options.max_rows <= kMostRows, "max_rows", options.max_rows,
               fmt::format("1 to {}", kMostRows));
  constexpr std::int64_t kMostPages = std::int64_t{1} << 40;
  constexpr std::int64_t kMostDecodePages = std::int64_t{1} << 24;
  check_option(options.pages >= 0 && options.pages <= kMostPages, "pages", options.pages,
               "at least 1, or 0 for one sequence of max_context tokens");
  if (options.pages == 0) options.pages = PageTable::pages_for(options.max_context);
  check_option(options.decode_layers == nullptr || options.pages <= kMostDecodePages, "pages",
               options.pages, fmt::format("at most {}: picks are 32-bit slots", kMostDecodePages));
  if (!(options.latent_eps >= 0.0)) options.latent_eps = config.latent_eps;
  return options;
}

void check_geometry(const ModelConfig& config, int ranks) {
  const auto refuse = [](bool ok, std::string_view what, std::int64_t value, std::string_view why) {
    require(ok, ErrorKind::kUnsupported,
            [&] { return fmt::format("the CPU engine cannot run {} = {}: {}", what, value, why); });
  };
  refuse(config.heads % ranks == 0, "num_attention_heads", config.heads,
         fmt::format("{} ranks share the heads evenly", ranks));
  refuse(config.kv_lora % 64 == 0, "kv_lora_rank", config.kv_lora,
         "its kernels take 64 latent columns at a time");
  refuse(config.rope % 2 == 0 && config.rope <= config.index_dim, "qk_rope_head_dim", config.rope,
         "it must be even and at most index_head_dim");
  const std::int64_t shared = config.expert_intermediate * config.shared_experts;
  const auto shards = [&](std::string_view what, std::int64_t value) {
    refuse(
        value % ranks == 0 && (ranks == 1 || value / ranks % cpu::kWindowColumns == 0), what, value,
        fmt::format("each of {} ranks needs a multiple of {} columns", ranks, cpu::kWindowColumns));
  };
  shards("heads x v_head_dim", config.heads * config.v_dim);
  const auto has = [&](bool sparse) {
    return std::find(config.sparse_mlp.begin(), config.sparse_mlp.end(), sparse) !=
           config.sparse_mlp.end();
  };
  if (has(false)) shards("intermediate_size", config.dense_intermediate);
  if (has(true)) {
    shards("moe_intermediate_size", config.expert_intermediate);
    if (config.shared_experts > 0) shards("moe_intermediate_size x n_shared_experts", shared);
  }
  refuse(!config.full_indexer.empty() && config.full_indexer[0], "indexer_types[0]", 0,
         "the first layer has no earlier picks to share");
}

}  // namespace

std::string_view to_string(ActivationFormat format) {
  return format == ActivationFormat::kFp8 ? "fp8" : "f32";
}

struct Engine::State {
  State(const Checkpoint& checkpoint, const EngineOptions& given)
      : config(checkpoint.config()),
        options(fill_in(config, given)),
        weights(load(checkpoint)),
        table(options.pages),
        group(options.decode_layers != nullptr ? 1 : options.ranks) {
    if (options.decode_layers != nullptr) {
      decode = std::make_unique<DecodeRunner>(config, options, weights,
                                              options.decode_layers(checkpoint, options));
      return;
    }
    workers.resize(static_cast<std::size_t>(options.ranks));
    group.run([&](int rank) {
      workers[static_cast<std::size_t>(rank)] =
          std::make_unique<RankWorker>(config, options, weights, rank, group.team(rank));
    });
  }

  ModelWeights load(const Checkpoint& checkpoint) const {
    if (options.decode_layers == nullptr) check_geometry(config, options.ranks);
    return engine::load_weights(checkpoint);
  }

  // Throws for anything that is wrong with the batch; changes nothing.
  void check(std::span<const StepEntry> batch) const {
    require(!batch.empty(), ErrorKind::kInvalidArgument,
            [] { return std::string("a step of no entries: give at least one"); });
    std::unordered_set<SequenceId> seen;
    std::int64_t pages = 0;
    for (const StepEntry& entry : batch) {
      const Sequence& sequence = table.at(entry.sequence);
      require(seen.insert(entry.sequence).second, ErrorKind::kInvalidArgument, [&] {
        return fmt::format("sequence {} appears twice in a step: join its tokens in one entry",
                           entry.sequence);
      });
      require(!entry.tokens.empty(), ErrorKind::kInvalidArgument, [&] {
        return fmt::format("the entry of sequence {} has no tokens: leave it out", entry.sequence);
      });
      for (std::size_t i = 0; i < entry.tokens.size(); ++i) {
        const std::int64_t token = entry.tokens[i];
        require(token >= 0 && token < config.vocab, ErrorKind::kInvalidArgument, [&] {
          return fmt::format("token {} at position {} of sequence {}: ids run from 0 to {}", token,
                             sequence.length + static_cast<std::int64_t>(i), entry.sequence,
                             config.vocab - 1);
        });
      }
      const std::int64_t length = sequence.length + static_cast<std::int64_t>(entry.tokens.size());
      require(length <= options.max_context, ErrorKind::kInvalidArgument, [&] {
        return fmt::format("sequence {} would grow to {} tokens, over the context of {}",
                           entry.sequence, length, options.max_context);
      });
      pages += PageTable::pages_for(length) - static_cast<std::int64_t>(sequence.pages.size());
    }
    require(pages <= table.free_pages(), ErrorKind::kResourceExhausted, [&] {
      return fmt::format(
          "the step needs {} cache pages of {} tokens and {} of {} are free: remove or truncate a "
          "sequence, or construct the engine with more pages",
          pages, kPageTokens, table.free_pages(), table.total_pages());
    });
  }

  void run_chunk(const Chunk& chunk) {
    if (decode) {
      decode->forward(chunk);
    } else {
      group.run([&](int rank) { workers[static_cast<std::size_t>(rank)]->forward(chunk); });
    }
  }

  // Splits the batch into chunks of max_rows rows and runs them.
  void run(std::span<const StepEntry> batch, bool all_rows, float* logits) {
    std::vector<Segment> segments;
    std::vector<std::int64_t> wanted;
    std::int64_t rows = 0;
    const auto flush = [&] {
      run_chunk({segments, wanted, logits, &capture});
      logits += static_cast<std::int64_t>(wanted.size()) * config.vocab;
      segments.clear();
      wanted.clear();
      rows = 0;
    };
    for (const StepEntry& entry : batch) {
      const Sequence& sequence = table.at(entry.sequence);
      const auto total = static_cast<std::int64_t>(entry.tokens.size());
      for (std::int64_t begin = 0; begin < total;) {
        const std::int64_t count = std::min(total - begin, options.max_rows - rows);
        segments.push_back(
            {&sequence, sequence.length + begin,
             std::span(entry.tokens)
                 .subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count))});
        for (std::int64_t i = begin; i < begin + count; ++i) {
          if (all_rows || i == total - 1) wanted.push_back(rows + i - begin);
        }
        begin += count;
        rows += count;
        if (rows == options.max_rows) flush();
      }
    }
    if (rows > 0) flush();
  }

  StepResult step(std::span<const StepEntry> batch, LogitRows which) {
    check(batch);
    StepResult result;
    result.vocab = config.vocab;
    for (const StepEntry& entry : batch) {
      result.rows += which == LogitRows::kAll ? static_cast<std::int64_t>(entry.tokens.size()) : 1;
    }
    result.logits.resize(static_cast<std::size_t>(result.rows * result.vocab));
    const auto give_back = [&] {
      for (const StepEntry& entry : batch) {
        Sequence& sequence = table.at(entry.sequence);
        table.shrink(sequence, sequence.length);
      }
    };
    try {
      for (const StepEntry& entry : batch) {
        Sequence& sequence = table.at(entry.sequence);
        table.grow(sequence, sequence.length + static_cast<std::int64_t>(entry.tokens.size()));
      }
      run(batch, which == LogitRows::kAll, result.logits.data());
    } catch (...) {
      give_back();
      throw;
    }
    for (const StepEntry& entry : batch) {
      table.at(entry.sequence).length += static_cast<std::int64_t>(entry.tokens.size());
    }
    return result;
  }

  ModelConfig config;
  EngineOptions options;
  ModelWeights weights;
  PageTable table;
  RankGroup group;
  std::vector<std::unique_ptr<RankWorker>> workers;  // none with decode
  std::unique_ptr<DecodeRunner> decode;              // null: the engine's own layers
  CaptureHook capture;
};

Engine::Engine(const Checkpoint& checkpoint, const EngineOptions& options)
    : state_(std::make_unique<State>(checkpoint, options)) {}
Engine::~Engine() = default;
Engine::Engine(Engine&&) noexcept = default;
Engine& Engine::operator=(Engine&&) noexcept = default;

const ModelConfig& Engine::config() const noexcept { return state_->config; }
const EngineOptions& Engine::options() const noexcept { return state_->options; }

SequenceId Engine::create_sequence() { return state_->table.create(); }
void Engine::remove_sequence(SequenceId sequence) { state_->table.remove(sequence); }
std::int64_t Engine::length(SequenceId sequence) const { return state_->table.at(sequence).length; }

void Engine::truncate(SequenceId sequence, std::int64_t length) {
  Sequence& s = state_->table.at(sequence);
  require(length >= 0 && length <= s.length, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("cannot truncate sequence {} of {} tokens to {}: give 0 to {}", sequence,
                       s.length, length, s.length);
  });
  s.length = length;
  state_->table.shrink(s, length);
}

std::int64_t Engine::free_pages() const noexcept { return state_->table.free_pages(); }
std::int64_t Engine::total_pages() const noexcept { return state_->table.total_pages(); }

StepResult Engine::step(std::span<const StepEntry> batch, LogitRows rows) {
  return state_->step(batch, rows);
}
StepResult Engine::step(std::initializer_list<StepEntry> batch, LogitRows rows) {
  return state_->step({batch.begin(), batch.size()}, rows);
}

void Engine::set_capture(CaptureHook hook) { state_->capture = std::move(hook); }

EngineMemory Engine::memory() const noexcept {
  const State& s = *state_;
  EngineMemory memory;
  memory.weight_bytes = s.weights.weight_bytes;
  memory.converted_bytes = s.weights.converted_bytes;
  if (s.decode) {
    memory.converted_bytes += s.decode->layers().weight_bytes();
    memory.page_bytes = s.decode->layers().page_bytes();
    memory.cache_bytes = memory.page_bytes * s.options.pages;
    memory.scratch_bytes = s.decode->layers().scratch_bytes();
    return memory;
  }
  memory.page_bytes = engine::CacheStorage::page_bytes(s.config) * s.options.ranks;
  memory.cache_bytes = memory.page_bytes * s.options.pages;
  for (const auto& worker : s.workers) memory.scratch_bytes += worker->scratch_bytes();
  return memory;
}

std::int64_t Engine::memory_bytes() const noexcept {
  const EngineMemory m = memory();
  return m.weight_bytes + m.converted_bytes + m.cache_bytes + m.scratch_bytes;
}

void Engine::poison_unused(float value) {
  state_->table.for_unused([&](engine::Slot slot) {
    if (state_->decode) {
      state_->decode->layers().poison(slot);
      return;
    }
    for (const auto& worker : state_->workers) worker->cache().fill(slot, value);
  });
}

}  // namespace penstock
