// Which operators run a model's layers, and where: --device and --layers of generate and eval.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "penstock/model/engine.h"

namespace penstock::cli {

struct DeviceOptions {
  std::string device = "cpu";  // cpu, cuda
  std::string layers;          // engine, decode-layer; empty: engine on the CPU, else decode-layer
  std::string kv_format = "bf16";  // of decode-layer's cache

  // "engine" or "decode-layer".
  std::string layers_in_force() const;
  // Puts the choice into `engine`. Throws UsageError for the engine's own layers on a GPU and for a
  // cache format of the engine's own layers.
  void apply(EngineOptions& engine) const;
};

// Adds --device, --layers and --kv-format.
void add_device_options(CLI::App& subcommand, DeviceOptions& options);

}  // namespace penstock::cli
