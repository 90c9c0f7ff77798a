// Text and token ids. Text works for byte-level vocabularies (256 tokens, id = byte) only.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/model/checkpoint.h"

namespace penstock::cli {

// Whether ids are bytes: a vocabulary of 256 and no tokenizer.json.
bool has_byte_tokens(const Checkpoint& checkpoint);
// Throws Unsupported with the reason and the way around it where they are not.
void require_byte_tokens(const Checkpoint& checkpoint);

// One token a byte, whatever the bytes mean; the configuration's bos in front where there is one
// and the text does not start with it.
std::vector<std::int32_t> tokens_of_text(const Checkpoint& checkpoint, std::string_view text);

// Decimal ids separated by white space, commas or brackets (so a JSON array of numbers will do).
// Throws InvalidArgument naming what is no id or not in [0, vocab).
std::vector<std::int32_t> parse_token_ids(std::string_view text, std::int64_t vocab,
                                          std::string_view origin);

// Holds back the bytes of an unfinished UTF-8 sequence, so that a terminal sees whole characters.
// Bytes that cannot begin or continue one pass through as they are.
class Utf8Stream {
 public:
  // What may be shown after this byte; empty while a character is unfinished.
  std::string push(unsigned char byte);
  // The rest, finished or not.
  std::string flush();

 private:
  std::string pending_;
};

}  // namespace penstock::cli
