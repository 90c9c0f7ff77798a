// Rewrites a checkpoint with its routed experts in another storage format.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/model/checkpoint.h"

namespace penstock {

// Storage of the routed experts' gate_proj, up_proj and down_proj, and the tensors written:
//   kFp8    NAME.weight F8_E4M3 [rows, cols], NAME.weight_scale_inv F32 [ceil(rows / 128),
//           ceil(cols / 128)]: the layout of the published FP8 checkpoints
//   kMxfp4  NAME.weight_packed U8 [rows, cols / 2], two E2M1 a byte, the even column in the low
//           nibble; NAME.weight_scale U8 [rows, cols / 32], E8M0 codes, exponent by the OCP floor
//           rule (MxScaleRule::kOcpFloor). U8 and these names because readers without the F4 and
//           F8_E8M0 types of newer safetensors can open the file. cols must be a multiple of 32.
// config.json gets "experts_format": "fp8" or "mxfp4". All other tensors, the MTP layer's and
// surplus ones included, are copied byte for byte.
enum class ExpertsFormat : std::uint8_t { kFp8, kMxfp4 };
std::string_view to_string(ExpertsFormat format);
// "fp8" or "mxfp4"; throws InvalidArgument naming both.
ExpertsFormat parse_experts_format(std::string_view text);

struct ConvertOptions {
  ExpertsFormat experts = ExpertsFormat::kMxfp4;
  // A shard ends before it would exceed this (one larger tensor gets a shard of its own). Peak
  // memory is one shard's converted tensors plus 5 bytes per element of one matrix and thread.
  std::int64_t max_shard_bytes = std::int64_t{2} << 30;
  // Threads that convert, including the caller; 0: as many as the machine has. The output does not
  // depend on it.
  int threads = 0;
  // Called by the calling thread after each shard, bytes written so far and in all; may be empty.
  std::function<void(std::int64_t done, std::int64_t total)> progress;
};

// How far the new values are from the old ones, both as f32, over all tensors of one class.
struct ConvertQuality {
  std::string name;  // "experts.gate_proj", "experts.up_proj", "experts.down_proj"
  std::int64_t tensors = 0;
  std::int64_t elements = 0;
  double relative_l2 = 0.0;  // sqrt(sum (new - old)^2 / sum old^2); 0 where all are equal
  double snr_db = 0.0;       // 10 log10(sum old^2 / sum (new - old)^2); +infinity if equal
  std::int64_t saturated =
      0;  // elements clipped to their block's largest code (MXFP4; FP8 has none)
};

struct ConvertReport {
  ExpertsFormat experts = ExpertsFormat::kMxfp4;
  std::int64_t bytes_before = 0;   // all tensors of the source
  std::int64_t bytes_after = 0;    // all tensors written
  std::vector<std::string> files;  // shards, in order
  std::vector<ConvertQuality> quality;
};

// Writes a complete checkpoint to `directory`: shards, index, config.json (last, so that a run that
// is cut off leaves no directory that opens) and the source's tokenizer files. Deterministic.
// Throws InvalidArgument: the directory exists and is not empty or is no directory; the source's
// routed experts are in that format already; the model has none; a matrix does not fit the format;
// a weight is NaN or Inf (named). Throws Backend where writing fails. On failure everything that
// was written is removed.
ConvertReport convert_experts(const Checkpoint& source, const std::string& directory,
                              const ConvertOptions& options = {});

}  // namespace penstock
