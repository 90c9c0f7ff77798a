#include "cli/tokens.h"

#include <fmt/format.h>

#include <charconv>
#include <filesystem>
#include <utility>

#include "penstock/core/error.h"

namespace penstock::cli {
namespace {

std::string tokenizer_path(const Checkpoint& checkpoint) {
  return (std::filesystem::path(checkpoint.directory()) / "tokenizer.json").string();
}

constexpr const char* kIdsInstead =
    "give token ids with --prompt-tokens (generate) or --tokens (eval) instead of text";

}  // namespace

bool has_byte_tokens(const Checkpoint& checkpoint) {
  return checkpoint.config().vocab == 256 && !std::filesystem::exists(tokenizer_path(checkpoint));
}

void require_byte_tokens(const Checkpoint& checkpoint) {
  const std::string path = tokenizer_path(checkpoint);
  require(!std::filesystem::exists(path), ErrorKind::kUnsupported, [&] {
    return fmt::format(
        "{} is not read: Debian packages no C++ library for its byte-level BPE, and Penstock takes "
        "its libraries from there; {}",
        path, kIdsInstead);
  });
  require(checkpoint.config().vocab == 256, ErrorKind::kUnsupported, [&] {
    return fmt::format(
        "{} has a vocabulary of {} and no byte-level tokens (those need 256), so text has no "
        "meaning for it; {}",
        checkpoint.directory(), checkpoint.config().vocab, kIdsInstead);
  });
}

std::vector<std::int32_t> tokens_of_text(const Checkpoint& checkpoint, std::string_view text) {
  require_byte_tokens(checkpoint);
  const std::int64_t bos = checkpoint.config().bos;
  std::vector<std::int32_t> tokens;
  tokens.reserve(text.size() + 1);
  if (bos >= 0 && (text.empty() || static_cast<unsigned char>(text[0]) != bos)) {
    tokens.push_back(static_cast<std::int32_t>(bos));
  }
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

std::vector<std::int32_t> parse_token_ids(std::string_view text, std::int64_t vocab,
                                          std::string_view origin) {
  constexpr std::string_view kSeparators = " \t\r\n,[]";
  std::vector<std::int32_t> tokens;
  for (std::size_t at = text.find_first_not_of(kSeparators); at != std::string_view::npos;
       at = text.find_first_not_of(kSeparators, at)) {
    const std::size_t end = std::min(text.find_first_of(kSeparators, at), text.size());
    const std::string_view word = text.substr(at, end - at);
    std::int32_t id = -1;
    const auto [rest, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    require(error == std::errc{} && rest == word.data() + word.size() && id >= 0 && id < vocab,
            ErrorKind::kInvalidArgument, [&] {
              return fmt::format("{}: '{}' (number {}) is no token id in [0, {})", origin,
                                 word.substr(0, 40), tokens.size(), vocab);
            });
    tokens.push_back(id);
    at = end;
  }
  return tokens;
}

std::string Utf8Stream::push(unsigned char byte) {
  std::string out;
  const bool continues = (byte & 0xC0U) == 0x80U;
  if (!pending_.empty() && !continues) out = flush();  // cut short: no longer worth waiting
  pending_.push_back(static_cast<char>(byte));
  const auto lead = static_cast<unsigned char>(pending_[0]);
  std::size_t length = 1;
  if (lead >= 0xC2 && lead <= 0xDF) length = 2;
  if (lead >= 0xE0 && lead <= 0xEF) length = 3;
  if (lead >= 0xF0 && lead <= 0xF4) length = 4;
  if (pending_.size() >= length) out += flush();
  return out;
}

std::string Utf8Stream::flush() { return std::exchange(pending_, {}); }

}  // namespace penstock::cli
