#include "cli/bench/report.h"

#include <fmt/format.h>

#include <fstream>

namespace penstock::bench {

void add_times(Json& line, const Quantiles& times) {
  line["samples"] = times.samples;
  line["median_us"] = times.median_us;
  line["p10_us"] = times.p10_us;
  line["p90_us"] = times.p90_us;
}

void JsonLines::add(const Json& line) {
  Json whole = common_;
  whole.update(line);
  text_ += whole.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string Table::text() const {
  std::vector<std::size_t> width(rows_.front().size(), 0);
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      out += i == 0 ? fmt::format("{:<{}}", row[i], width[i])
                    : fmt::format("  {:>{}}", row[i], width[i]);
    }
    out += "\n";
  }
  return out;
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const std::size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

}  // namespace penstock::bench
