#include "model/paged_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "penstock/core/error.h"

namespace penstock::engine {
namespace {

std::int64_t count_full(const ModelConfig& config) {
  return std::count(config.full_indexer.begin(), config.full_indexer.end(), true);
}

}  // namespace

SequenceId PageTable::create() {
  const SequenceId id = next_++;
  sequences_[id].id = id;
  return id;
}

Sequence& PageTable::at(SequenceId id) {
  const auto found = sequences_.find(id);
  require(found != sequences_.end(), ErrorKind::kInvalidArgument, [&] {
    return fmt::format("sequence {} does not exist: create_sequence() gives a valid one", id);
  });
  return found->second;
}

const Sequence& PageTable::at(SequenceId id) const { return const_cast<PageTable*>(this)->at(id); }

void PageTable::remove(SequenceId id) {
  shrink(at(id), 0);
  sequences_.erase(id);
}

void PageTable::grow(Sequence& sequence, std::int64_t tokens) {
  const std::int64_t want = pages_for(tokens);
  while (static_cast<std::int64_t>(sequence.pages.size()) < want) {
    if (free_.empty()) {
      sequence.pages.push_back(never_used_++);
    } else {
      sequence.pages.push_back(free_.back());
      free_.pop_back();
    }
  }
}

void PageTable::shrink(Sequence& sequence, std::int64_t tokens) {
  const std::int64_t want = pages_for(tokens);
  while (static_cast<std::int64_t>(sequence.pages.size()) > want) {
    free_.push_back(sequence.pages.back());
    sequence.pages.pop_back();
  }
}

std::int64_t CacheStorage::page_bytes(const ModelConfig& config) {
  return Engine::kPageTokens *
         (config.layers * config.cache_dim() + count_full(config) * config.index_dim) * 4;
}

CacheStorage::CacheStorage(const ModelConfig& config, std::int64_t pages)
    : layers_(config.layers),
      full_layers_(count_full(config)),
      row_floats_(config.cache_dim()),
      index_dim_(config.index_dim),
      index_offset_(config.layers * Engine::kPageTokens * config.cache_dim()),
      page_floats_(page_bytes(config) / 4) {
  const std::int64_t limit = std::numeric_limits<std::int64_t>::max() / 8 / page_bytes(config);
  require(pages <= limit, ErrorKind::kResourceExhausted, [&] {
    return fmt::format("{} cache pages of {} bytes: ask for fewer pages", pages,
                       page_bytes(config));
  });
  data_ = FloatBuffer(pages * page_floats_, "cache pages");
}

void CacheStorage::fill(Slot slot, float value) {
  for (std::int64_t layer = 0; layer < layers_; ++layer) {
    std::fill_n(latent(layer, slot), row_floats_, value);
  }
  for (std::int64_t full = 0; full < full_layers_; ++full) {
    float* page = index_page(full, slot / Engine::kPageTokens) + slot % Engine::kPageTokens;
    for (std::int64_t i = 0; i < index_dim_; ++i) page[i * Engine::kPageTokens] = value;
  }
}

}  // namespace penstock::engine
