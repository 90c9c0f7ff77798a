// What benchmarks print: JSON lines, aligned tables, who measured.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "cli/bench/rounds.h"

namespace penstock::bench {

using Json = nlohmann::ordered_json;

// Appends samples, median_us, p10_us and p90_us.
void add_times(Json& line, const Quantiles& times);

// One JSON object a line, so that runs can be joined with cat. Every line starts with the common
// keys. Bytes that are no UTF-8 become U+FFFD.
class JsonLines {
 public:
  explicit JsonLines(Json common) : common_(std::move(common)) {}
  void add(const Json& line);
  const std::string& text() const { return text_; }

 private:
  Json common_;
  std::string text_;
};

// Columns as wide as their widest cell, two spaces apart; all but the first align right.
class Table {
 public:
  explicit Table(std::vector<std::string> heads) : rows_{std::move(heads)} {}
  // As many cells as there are heads.
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// The processor's name as the system gives it, or "unknown".
std::string processor_name();

}  // namespace penstock::bench
