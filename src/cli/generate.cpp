// penstock generate: continues a prompt.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "cli/command.h"
#include "cli/device.h"
#include "cli/tokens.h"
#include "penstock/core/error.h"
#include "penstock/model/checkpoint.h"
#include "penstock/model/engine.h"
#include "penstock/model/sampling.h"

namespace penstock::cli {
namespace {

struct Options {
  std::string model;
  std::string prompt, prompt_file, standard_input, prompt_tokens;
  bool has_prompt = false;
  std::string output_tokens;
  std::int64_t max_tokens = 256;
  SamplingOptions sampling;
  bool ignore_eos = false, quiet = false;
  std::string activations = "f32";
  EngineOptions engine;
  DeviceOptions device;
};

std::vector<std::int32_t> read_prompt(const Options& options, const Checkpoint& checkpoint) {
  const ModelConfig& config = checkpoint.config();
  std::vector<std::int32_t> tokens;
  if (!options.prompt_tokens.empty()) {
    tokens = parse_token_ids(read_file(options.prompt_tokens), config.vocab, options.prompt_tokens);
  } else {
    require_byte_tokens(checkpoint);  // before standard input is waited for
    const std::string file =
        options.standard_input.empty() ? options.prompt_file : options.standard_input;
    tokens = tokens_of_text(checkpoint, options.has_prompt ? options.prompt : read_file(file));
  }
  require(!tokens.empty(), ErrorKind::kInvalidArgument,
          [] { return "the prompt is empty and the model has no bos token to begin with"; });
  require(static_cast<std::int64_t>(tokens.size()) <= config.max_positions,
          ErrorKind::kInvalidArgument, [&] {
            return fmt::format("the prompt has {} tokens, the model takes {}", tokens.size(),
                               config.max_positions);
          });
  return tokens;
}

double per_second(std::size_t count, double seconds) {
  return seconds > 0.0 ? static_cast<double>(count) / seconds : 0.0;
}

Sampler make_sampler(const SamplingOptions& options) {
  try {
    return Sampler(options);
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
}

int run(Options options, const Command& command) {
  Sampler sampler = make_sampler(options.sampling);
  const double start = now_seconds();
  const Checkpoint checkpoint(options.model);
  const ModelConfig& config = checkpoint.config();
  const std::vector<std::int32_t> prompt = read_prompt(options, checkpoint);
  std::optional<OutputFile> ids;  // before the long part, so that a bad path shows at once
  if (!options.output_tokens.empty()) ids.emplace(options.output_tokens);

  const auto prompt_size = static_cast<std::int64_t>(prompt.size());
  options.engine.max_context =
      std::min(config.max_positions, prompt_size + std::max<std::int64_t>(options.max_tokens, 1));
  options.engine.activations =
      options.activations == "fp8" ? ActivationFormat::kFp8 : ActivationFormat::kF32;
  options.device.apply(options.engine);
  Engine engine(checkpoint, options.engine);
  const SequenceId sequence = engine.create_sequence();
  const double loaded = now_seconds();

  StepResult logits = engine.step({{sequence, prompt}});
  const double prefilled = now_seconds();

  const bool bytes = has_byte_tokens(checkpoint);
  std::vector<std::int32_t> generated;
  std::string text;  // for JSON
  Utf8Stream utf8;
  const auto show = [&](const std::string& part) {
    if (command.json) {
      text += part;
    } else {
      write_stdout(part);
    }
  };
  std::string finish = "length";
  std::size_t decode_steps = 0;
  double decode_seconds = 0.0;
  while (static_cast<std::int64_t>(generated.size()) < options.max_tokens) {
    const std::int32_t token = sampler.next(logits.row(0));
    generated.push_back(token);
    if (ids) ids->write(fmt::format("{}{}", generated.size() == 1 ? "" : " ", token));
    const bool end = std::find(config.eos.begin(), config.eos.end(), token) != config.eos.end();
    if (end && !options.ignore_eos) {
      finish = "eos";
      break;
    }
    if (bytes) {
      show(utf8.push(static_cast<unsigned char>(token)));
    } else {
      show(fmt::format("{}{}", generated.size() == 1 ? "" : " ", token));
    }
    if (static_cast<std::int64_t>(generated.size()) == options.max_tokens) break;
    if (engine.length(sequence) == config.max_positions) {
      finish = "context";
      break;
    }
    const double before = now_seconds();
    logits = engine.step({{sequence, {token}}});
    decode_seconds += now_seconds() - before;
    ++decode_steps;
  }
  show(utf8.flush());
  if (ids) {
    ids->write("\n");
    ids->close();
  }

  const double load_seconds = loaded - start, prefill_seconds = prefilled - loaded;
  if (command.json) {
    print_json({{"model", options.model},
                {"prompt_tokens", prompt},
                {"tokens", generated},
                {"text", bytes ? Json(text) : Json()},
                {"finish", finish},
                {"load_seconds", load_seconds},
                {"prefill",
                 {{"tokens", prompt.size()},
                  {"seconds", prefill_seconds},
                  {"tokens_per_second", per_second(prompt.size(), prefill_seconds)}}},
                {"decode",
                 {{"tokens", decode_steps},
                  {"seconds", decode_seconds},
                  {"tokens_per_second", per_second(decode_steps, decode_seconds)}}},
                {"device", options.device.device},
                {"layers", options.device.layers_in_force()},
                {"ranks", engine.options().ranks},
                {"threads_per_rank", engine.options().threads},
                {"activations", to_string(engine.options().activations)},
                {"memory_bytes", engine.memory_bytes()}});
  } else if (isatty(STDOUT_FILENO) == 1) {
    write_stdout("\n");
  }
  if (!options.quiet) {
    print_log(fmt::format(
        "load {:.3f} s; prefill {} tokens in {:.3f} s ({:.0f} tokens/s); decode {} tokens in "
        "{:.3f} s ({:.0f} tokens/s); {} on {}, ranks {}, threads per rank {}; ended by {}",
        load_seconds, prompt.size(), prefill_seconds, per_second(prompt.size(), prefill_seconds),
        decode_steps, decode_seconds, per_second(decode_steps, decode_seconds),
        options.device.layers_in_force(), options.device.device, engine.options().ranks,
        engine.options().threads, finish));
  }
  return kExitOk;
}

}  // namespace

void add_generate(CLI::App& app, Command& command) {
  const auto options = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("generate", "Continue a prompt");
  sub->footer(
      "Standard output gets the continuation alone: bytes for byte-level vocabularies, whole UTF-8 "
      "characters at a time; ids separated by spaces for other vocabularies. The timing summary "
      "goes to standard error. Text prompts get the model's bos token in front.");
  sub->add_option("MODEL", options->model, "Checkpoint directory")
      ->required()
      ->check(CLI::ExistingDirectory);
  CLI::Option_group* prompt = sub->add_option_group("Prompt", "How the prompt is given");
  prompt->add_option("-p,--prompt", options->prompt, "The prompt's text")
      ->each([options](const std::string&) { options->has_prompt = true; });
  prompt->add_option("--prompt-file", options->prompt_file, "File with the prompt, - for stdin")
      ->check(readable_file());
  prompt
      ->add_option("--prompt-tokens", options->prompt_tokens,
                   "File with the prompt's token ids (decimal; spaces, commas or a JSON array), "
                   "taken as they are: no bos is added")
      ->check(readable_file());
  prompt->add_option("stdin", options->standard_input, "- reads the prompt from standard input")
      ->check(CLI::IsMember({"-"}));
  prompt->require_option(1);
  sub->add_option("--output-tokens", options->output_tokens,
                  "Write the generated ids to FILE, EOS included")
      ->type_name("FILE");
  sub->add_option("-n,--max-tokens", options->max_tokens, "Most tokens to generate")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40))
      ->type_name("N")
      ->capture_default_str();
  CLI::Option* temperature =
      sub->add_option("--temperature", options->sampling.temperature, "0 is greedy")
          ->check(CLI::Range(0.0, 1e6))
          ->type_name("T")
          ->capture_default_str();
  sub->add_option("--top-p", options->sampling.top_p,
                  "Draw from the likeliest tokens that sum to P, in (0, 1]")
      ->needs(temperature)
      ->type_name("P")
      ->capture_default_str();
  sub->add_option("--seed", options->sampling.seed, "Seed of the draws")
      ->needs(temperature)
      ->type_name("N")
      ->capture_default_str();
  sub->add_flag("--ignore-eos", options->ignore_eos, "Go on after an end-of-sequence token");
  sub->add_option("--ranks", options->engine.ranks, "Tensor-parallel ranks, as threads")
      ->check(CLI::IsMember({1, 2, 4, 8}))
      ->capture_default_str();
  sub->add_option("--threads", options->engine.threads,
                  "Compute threads of one rank; 0: hardware threads / ranks")
      ->check(CLI::Range(0, 1024))
      ->type_name("N")
      ->capture_default_str();
  sub->add_option("--activations", options->activations,
                  "f32, or fp8: quantised per token and 128 columns before FP8 weights")
      ->check(CLI::IsMember({"f32", "fp8"}))
      ->capture_default_str();
  add_device_options(*sub, options->device);
  sub->add_flag("-q,--quiet", options->quiet, "No timing summary");
  bind(*sub, command, [options, &command] { return run(*options, command); });
}

}  // namespace penstock::cli
