#include "penstock/ops/moe_stage2/tuning.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "penstock/core/error.h"
#include "penstock/ops/moe_stage2/heuristics.h"

namespace penstock::moe_stage2 {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kSchema = 1;

const char* wire_name(WireFormat wire) { return wire == WireFormat::kFp8 ? "fp8" : "bf16"; }

Crossover parse(const Json& entry) {
  Crossover c;
  c.machine = entry.at("machine").get<std::string>();
  c.ranks = entry.at("ranks").get<std::int32_t>();
  c.hidden = entry.at("hidden").get<std::int32_t>();
  c.wire = entry.at("wire") == "fp8" ? WireFormat::kFp8 : WireFormat::kBf16;
  for (const Json& point : entry.at("points")) {
    c.points.push_back({point.at("tokens").get<std::int64_t>(),
                        parse_transport(point.at("transport").get<std::string>())});
  }
  return c;
}

// All entries of the file; none if there is no file.
std::vector<Crossover> load(const std::string& path) {
  std::vector<Crossover> all;
  std::ifstream file(path);
  if (!file.is_open()) return all;
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  try {
    const Json document = Json::parse(text);
    require(document.at("schema") == kSchema, ErrorKind::kInvalidArgument,
            [] { return std::string("an unknown schema"); });
    for (const Json& entry : document.at("crossovers")) all.push_back(parse(entry));
  } catch (const std::exception& error) {
    throw_error(ErrorKind::kInvalidArgument,
                fmt::format("{} is no table of `penstock tune` ({}): remove it and tune again",
                            path, error.what()));
  }
  return all;
}

bool same_key(const Crossover& a, const Crossover& b) {
  return a.machine == b.machine && a.ranks == b.ranks && a.hidden == b.hidden && a.wire == b.wire;
}

Json to_json(const Crossover& c) {
  Json points = Json::array();
  for (const Crossover::Point& p : c.points) {
    points.push_back({{"tokens", p.tokens}, {"transport", to_string(p.transport)}});
  }
  return {{"machine", c.machine},
          {"ranks", c.ranks},
          {"hidden", c.hidden},
          {"wire", wire_name(c.wire)},
          {"points", points}};
}

}  // namespace

std::string tuning_path() {
  const auto variable = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    return value != nullptr ? value : "";
  };
  if (const std::string config = variable("XDG_CONFIG_HOME"); !config.empty()) {
    return config + "/penstock/moe_stage2.json";
  }
  const std::string home = variable("HOME");
  return home.empty() ? home : home + "/.config/penstock/moe_stage2.json";
}

void store_crossover(const Crossover& crossover) {
  const std::string path = tuning_path();
  require(!path.empty(), ErrorKind::kUnsupported, [] {
    return std::string("no place for the measured crossovers: set HOME or XDG_CONFIG_HOME");
  });
  std::vector<Crossover> all = load(path);
  std::erase_if(all, [&](const Crossover& c) { return same_key(c, crossover); });
  all.push_back(crossover);
  Json list = Json::array();
  for (const Crossover& c : all) list.push_back(to_json(c));
  const Json document = {{"schema", kSchema}, {"crossovers", list}};

  const std::string beside = fmt::format("{}.{}", path, getpid());
  try {
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream file(beside, std::ios::trunc);
    file << document.dump(2, ' ', false, Json::error_handler_t::replace) << "\n";
    file.close();
    if (!file) {
      throw_error(ErrorKind::kBackend,
                  fmt::format("cannot write {}: {}", beside, std::strerror(errno)));
    }
    std::filesystem::rename(beside, path);
  } catch (const std::filesystem::filesystem_error& error) {
    throw_error(ErrorKind::kBackend, error.what());
  }
}

std::optional<TransportKind> tuned_transport(std::string_view machine, const Shape& shape) {
  const std::string path = tuning_path();
  if (path.empty()) return {};
  const Crossover key{std::string(machine), shape.ranks, shape.hidden, shape.wire, {}};
  for (const Crossover& c : load(path)) {
    if (!same_key(c, key) || c.points.empty()) continue;
    TransportKind chosen = c.points.front().transport;
    for (const Crossover::Point& p : c.points) {
      if (p.tokens <= shape.max_tokens_per_rank) chosen = p.transport;
    }
    return chosen;
  }
  return {};
}

TransportKind choose_transport(std::string_view machine, const Shape& shape, bool ranks_share_gpu) {
  return tuned_transport(machine, shape)
      .value_or(ranks_share_gpu ? TransportKind::kDirect : choose_transport(shape));
}

}  // namespace penstock::moe_stage2
