// Pages of the latent and index caches: which are whose (PageTable) and one rank's bytes
// (CacheStorage).
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "model/float_buffer.h"
#include "ops/cpu/attention.h"
#include "penstock/model/config.h"
#include "penstock/model/engine.h"

namespace penstock::engine {

static_assert(Engine::kPageTokens == cpu::kIndexPageTokens);

// A token's place in every layer's cache: page * kPageTokens + offset. The same on all ranks and
// layers, so that a full layer's picks serve the shared layers behind it as they are.
using Slot = std::int64_t;

struct Sequence {
  SequenceId id = -1;
  std::int64_t length = 0;
  std::vector<std::int64_t> pages;
  Slot slot(std::int64_t position) const {
    return pages[static_cast<std::size_t>(position / Engine::kPageTokens)] * Engine::kPageTokens +
           position % Engine::kPageTokens;
  }
};

// Who holds which page. Not thread-safe: the engine's caller is alone.
class PageTable {
 public:
  explicit PageTable(std::int64_t pages) : total_(pages) {}

  SequenceId create();
  void remove(SequenceId id);
  Sequence& at(SequenceId id);
  const Sequence& at(SequenceId id) const;
  std::int64_t free_pages() const {
    return total_ - never_used_ + static_cast<std::int64_t>(free_.size());
  }
  std::int64_t total_pages() const { return total_; }
  static std::int64_t pages_for(std::int64_t tokens) {
    return (tokens + Engine::kPageTokens - 1) / Engine::kPageTokens;
  }
  // Takes pages until `tokens` fit; the caller has checked that enough are free.
  void grow(Sequence& sequence, std::int64_t tokens);
  // Gives back the pages that `tokens` do not need.
  void shrink(Sequence& sequence, std::int64_t tokens);
  // Calls use(slot) for every slot that holds no token.
  template <typename Use>
  void for_unused(const Use& use) const {
    std::vector<std::int64_t> used(static_cast<std::size_t>(total_), 0);
    for (const auto& [id, sequence] : sequences_) {
      for (std::int64_t p = 0; p < sequence.length; ++p) {
        ++used[static_cast<std::size_t>(sequence.slot(p) / Engine::kPageTokens)];
      }
    }
    for (std::int64_t page = 0; page < total_; ++page) {
      for (std::int64_t i = used[static_cast<std::size_t>(page)]; i < Engine::kPageTokens; ++i) {
        use(page * Engine::kPageTokens + i);
      }
    }
  }

 private:
  std::int64_t total_;
  SequenceId next_ = 0;
  std::int64_t never_used_ = 0;     // first page that has had no owner yet
  std::vector<std::int64_t> free_;  // pages given back
  std::unordered_map<SequenceId, Sequence> sequences_;
};

// One rank's cache, all pages and layers, f32. Page after page, so that a page's bytes lie
// together:
//   latent rows [layers][64][kv_lora + rope] | index keys [full layers][index_dim][64]
class CacheStorage {
 public:
  // Throws ResourceExhausted with the byte count.
  CacheStorage(const ModelConfig& config, std::int64_t pages);

  static std::int64_t page_bytes(const ModelConfig& config);

  float* latent(std::int64_t layer, Slot slot) {
    return data_.data() + slot / Engine::kPageTokens * page_floats_ +
           (layer * Engine::kPageTokens + slot % Engine::kPageTokens) * row_floats_;
  }
  // [index_dim, 64] of the page; full_layer counts layers that run the indexer.
  float* index_page(std::int64_t full_layer, std::int64_t page) {
    return data_.data() + page * page_floats_ + index_offset_ +
           full_layer * index_dim_ * Engine::kPageTokens;
  }
  void fill(Slot slot, float value);

 private:
  std::int64_t layers_ = 0;
  std::int64_t full_layers_ = 0;
  std::int64_t row_floats_ = 0;
  std::int64_t index_dim_ = 0;
  std::int64_t index_offset_ = 0;
  std::int64_t page_floats_ = 0;
  FloatBuffer data_;
};

}  // namespace penstock::engine
