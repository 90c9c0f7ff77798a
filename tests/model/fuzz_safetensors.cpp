// libFuzzer target: safetensors headers and config.json from strangers.
//
// The first byte of an input chooses the parser: 'h' a header, whose next four bytes are the number
// of data bytes (little-endian), anything else a config.json. Whatever the text, the parser must
// return or throw penstock::Error; what it returns must hold its promises. Everything else
// (another exception, a sanitizer's report, a time-out) is a finding.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <string_view>

#include "penstock/core/error.h"
#include "penstock/model/config.h"
#include "penstock/model/safetensors.h"

namespace {

void check(bool ok, const char* promise) {
  if (ok) return;
  std::fprintf(stderr, "broken promise: %s\n", promise);
  std::abort();
}

void fuzz_header(std::string_view input) {
  std::uint32_t data_bytes = 0;
  if (input.size() < sizeof data_bytes) return;
  std::memcpy(&data_bytes, input.data(), sizeof data_bytes);
  std::map<std::string, std::string> metadata;
  const auto tensors = penstock::parse_safetensors_header(input.substr(sizeof data_bytes), nullptr,
                                                          data_bytes, &metadata);
  std::uintptr_t position = 0;
  std::set<std::string> names;
  for (const penstock::NamedTensor& t : tensors) {
    check(reinterpret_cast<std::uintptr_t>(t.view.data) == position, "tensors are contiguous");
    check(t.view.rank >= 0 && t.view.rank <= penstock::kMaxRank, "rank is bounded");
    check(t.view.elements() >= 0 && t.view.bytes() >= 0, "sizes do not overflow");
    check(names.insert(t.name).second, "names are unique");
    position += static_cast<std::uintptr_t>(t.view.bytes());
  }
  check(position == data_bytes, "every byte belongs to a tensor");
}

void fuzz_config(std::string_view input) {
  const penstock::ModelConfig c = penstock::parse_config(input);
  check(c.hidden > 0 && c.layers > 0 && c.vocab > 0 && c.heads > 0, "sizes are positive");
  check(c.full_indexer.size() == static_cast<std::size_t>(c.layers), "one indexer type a layer");
  check(c.sparse_mlp.size() == static_cast<std::size_t>(c.layers), "one MLP type a layer");
  check(c.full_indexer.front(), "the first layer is full");
  check(c.experts % c.groups == 0 && c.top_groups <= c.groups, "groups divide the experts");
  check(c.top_k >= 1 && c.top_k <= c.experts / c.groups * c.top_groups, "top-k can be filled");
  check(c.rope % 2 == 0 && c.rope <= c.index_dim, "rope is even and fits the indexer");
  check(c.rms_eps > 0 && c.rms_eps <= 1 && c.rope_theta > 1 && c.routed_scale > 0,
        "reals are in range");
  for (const std::int64_t token : c.eos) check(token >= 0 && token < c.vocab, "eos is a token");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  try {
    if (input.front() == 'h') {
      fuzz_header(input.substr(1));
    } else {
      fuzz_config(input.substr(1));
    }
  } catch (const penstock::Error&) {
    // Refused: the normal end.
  }
  return 0;
}
