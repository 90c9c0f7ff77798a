#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "penstock/fabric/team.h"

namespace penstock {
namespace {

using Lookup = std::function<const char*(const char*)>;

bool is_set(const Lookup& lookup, const char* name) {
  const char* value = lookup(name);
  return value != nullptr && *value != '\0';
}

int parse(std::string_view text, std::string_view name, int low, int high) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(error == std::errc{} && end == text.data() + text.size() && value >= low && value <= high,
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format("{}='{}' is not a number from {} to {}: correct or unset it", name,
                               text, low, high);
          });
  return value;
}

int read(const Lookup& lookup, const char* name, int low, int high) {
  return parse(lookup(name), name, low, high);
}

// The variables of one launcher. A launcher is there if either its rank or its size is.
struct Launcher {
  const char* source;
  const char* rank;
  const char* size;
  const char* local_rank;
};
constexpr Launcher kLaunchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
    {"mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"mpi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
    {"slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
};

bool from_launcher(const Launcher& launcher, const Lookup& lookup, Discovery& out) {
  const bool has_rank = is_set(lookup, launcher.rank);
  const bool has_size = is_set(lookup, launcher.size);
  if (!has_rank && !has_size) return false;
  // SLURM sets the size for the batch script too, which is no rank of anything.
  if (!has_rank && std::string_view(launcher.source) == "slurm") return false;
  require(has_rank && has_size, ErrorKind::kInvalidArgument, [&] {
    return fmt::format(
        "{} is set but {} is not: set both or neither, or give rank and size as "
        "flags",
        has_rank ? launcher.rank : launcher.size, has_rank ? launcher.size : launcher.rank);
  });
  out.size = read(lookup, launcher.size, 1, kMaxRanks);
  out.rank = read(lookup, launcher.rank, 0, out.size - 1);
  out.local_rank = is_set(lookup, launcher.local_rank)
                       ? read(lookup, launcher.local_rank, 0, kMaxRanks - 1)
                       : out.rank;
  out.source = launcher.source;
  return true;
}

}  // namespace

Discovery discover(const TeamOptions& options, const Lookup& given) {
  const Lookup lookup = given ? given : [](const char* name) { return std::getenv(name); };
  Discovery out;
  if (options.rank >= 0 || options.size >= 0) {
    require(options.rank >= 0 && options.size >= 0, ErrorKind::kInvalidArgument, [&] {
      return fmt::format("rank {} and size {} were given as flags: give both or neither",
                         options.rank, options.size);
    });
    require(options.size >= 1 && options.size <= kMaxRanks, ErrorKind::kInvalidArgument, [&] {
      return fmt::format("a team of {} ranks: give 1 to {}", options.size, kMaxRanks);
    });
    require(options.rank < options.size, ErrorKind::kInvalidArgument, [&] {
      return fmt::format("rank {} of {}: ranks run from 0 to {}", options.rank, options.size,
                         options.size - 1);
    });
    out.rank = out.local_rank = options.rank;
    out.size = options.size;
    out.source = "flags";
  } else {
    out.source = "none";
    for (const Launcher& launcher : kLaunchers) {
      if (from_launcher(launcher, lookup, out)) break;
    }
  }
  if (options.local_rank >= 0) out.local_rank = options.local_rank;

  if (!options.address.empty()) {
    out.address = options.address;
  } else if (is_set(lookup, "MASTER_ADDR")) {
    out.address = lookup("MASTER_ADDR");
  } else {
    out.address = "127.0.0.1";
  }
  require(options.port >= 0 && options.port <= 65535, ErrorKind::kInvalidArgument,
          [&] { return fmt::format("port {}: give 1 to 65535", options.port); });
  if (options.port > 0) {
    out.port = options.port;
  } else if (is_set(lookup, "MASTER_PORT")) {
    out.port = read(lookup, "MASTER_PORT", 1, 65535);
  } else {
    out.port = kDefaultPort;
  }
  return out;
}

std::string describe(const Discovery& d) {
  return fmt::format("rank {} of {} (local rank {}) from {}, rendezvous at {}:{}", d.rank, d.size,
                     d.local_rank, d.source, d.address, d.port);
}

}  // namespace penstock
