#include "cli/device.h"

#include "cli/command.h"
#include "penstock/model/decode_layers.h"

namespace penstock::cli {

std::string DeviceOptions::layers_in_force() const {
  if (!layers.empty()) return layers;
  return device == "cpu" ? "engine" : "decode-layer";
}

void DeviceOptions::apply(EngineOptions& engine) const {
  if (layers_in_force() == "engine") {
    if (device != "cpu") {
      throw UsageError("--layers engine runs on the CPU: leave it out, or give --device cpu");
    }
    if (kv_format != "bf16") {
      throw UsageError("--kv-format is for --layers decode-layer: the engine's cache is f32");
    }
    return;
  }
  engine.decode_layers = device == "cpu" ? cpu_decode_layers : cuda_decode_layers;
  engine.kv_format = kv_format == "fp8-scaled" ? decode::KvFormat::kFp8Scaled
                     : kv_format == "fp8"      ? decode::KvFormat::kFp8
                                               : decode::KvFormat::kBf16;
}

void add_device_options(CLI::App& subcommand, DeviceOptions& options) {
  subcommand
      .add_option("--device", options.device,
                  "cpu, or cuda: the decoder layers run on GPUs, rank r on GPU r modulo their "
                  "number")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  subcommand
      .add_option(
          "--layers", options.layers,
          "What runs the decoder layers: engine (CPU; the default there) or decode-layer, "
          "the operator of one launch a layer (prefill in chunks of up to 16 rows; contexts "
          "up to the indexer's top-k; with --device cpu its CPU operator)")
      ->check(CLI::IsMember({"engine", "decode-layer"}));
  subcommand
      .add_option("--kv-format", options.kv_format,
                  "Cache rows of decode-layer: bf16 (1152 B), fp8-scaled (656 B), fp8 (576 B)")
      ->check(CLI::IsMember({"bf16", "fp8-scaled", "fp8"}))
      ->capture_default_str();
}

}  // namespace penstock::cli
