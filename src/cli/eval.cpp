// penstock eval: how well a model predicts a text, in bits per byte.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <numbers>

#include "cli/command.h"
#include "cli/device.h"
#include "cli/tokens.h"
#include "penstock/core/error.h"
#include "penstock/model/checkpoint.h"
#include "penstock/model/engine.h"
#include "penstock/model/reference.h"
#include "penstock/model/safetensors.h"

namespace penstock::cli {
namespace {

struct Options {
  std::string model, file, tokens, dump;
  std::int64_t max_context = 0;
  std::string activations = "f32";
  std::string reference;  // empty: the engine; else the precision
  EngineOptions engine;
  DeviceOptions device;
};

constexpr std::int64_t kDefaultContext = 2048;
constexpr std::size_t kShortestChapter = 16;  // bytes

// What is scored, one sequence after another, and what is left out.
struct Text {
  std::vector<std::vector<std::int32_t>> sequences;
  std::int64_t short_chapters = 0;
  std::int64_t cut_tokens = 0;  // beyond the context limit or before the first chapter
  std::int64_t predictions() const {
    std::int64_t n = 0;
    for (const auto& s : sequences) n += static_cast<std::int64_t>(s.size()) - 1;
    return n;
  }
};

void add_sequence(Text& text, std::vector<std::int32_t> tokens, std::int64_t limit) {
  const auto size = static_cast<std::int64_t>(tokens.size());
  if (size > limit) {
    text.cut_tokens += size - limit;
    tokens.resize(static_cast<std::size_t>(limit));
  }
  if (tokens.size() >= 2) text.sequences.push_back(std::move(tokens));
}

// Chapters run from one bos byte to before the next. A text without any is one chapter.
Text split_chapters(const Checkpoint& checkpoint, const std::string& bytes, std::int64_t limit) {
  Text text;
  const std::int64_t bos = checkpoint.config().bos;
  const char mark = static_cast<char>(bos);
  std::size_t at = bos >= 0 && bos < 256 ? bytes.find(mark) : std::string::npos;
  if (at == std::string::npos) {
    add_sequence(text, tokens_of_text(checkpoint, bytes), limit);
    return text;
  }
  text.cut_tokens += static_cast<std::int64_t>(at);
  while (at < bytes.size()) {
    const std::size_t end = std::min(bytes.find(mark, at + 1), bytes.size());
    if (end - at < kShortestChapter) {
      ++text.short_chapters;
    } else {
      add_sequence(text, tokens_of_text(checkpoint, bytes.substr(at, end - at)), limit);
    }
    at = end;
  }
  return text;
}

// What --dump writes: of all sequences, one behind the other.
struct Dump {
  std::vector<std::int32_t> tokens;
  std::vector<float> logits, nll;
  std::vector<std::int64_t> offsets{0};

  void write(const std::string& path, std::int64_t vocab, const std::string& model) const {
    const auto count = static_cast<std::int64_t>(tokens.size());
    const std::vector<NamedTensor> tensors{
        {"tokens", {tokens.data(), DType::kI32, 1, {count}}},
        {"logits", {logits.data(), DType::kF32, 2, {count, vocab}}},
        {"nll", {nll.data(), DType::kF32, 1, {static_cast<std::int64_t>(nll.size())}}},
        {"offsets", {offsets.data(), DType::kI64, 1, {static_cast<std::int64_t>(offsets.size())}}},
    };
    write_safetensors(path, tensors, {{"model", model}, {"nll", "nats"}});
  }
};

// -log softmax(row)[target], nats.
template <typename T>
double loss(const T* row, std::int64_t vocab, std::int32_t target) {
  double largest = static_cast<double>(row[0]);
  for (std::int64_t i = 1; i < vocab; ++i) {
    largest = std::max(largest, static_cast<double>(row[i]));
  }
  double total = 0.0;
  for (std::int64_t i = 0; i < vocab; ++i) {
    total += std::exp(static_cast<double>(row[i]) - largest);
  }
  return largest + std::log(total) - static_cast<double>(row[target]);
}

// Adds up one pass over the text.
struct Score {
  std::int64_t vocab = 0;
  double nats = 0.0;
  std::int64_t predicted = 0;
  bool keep = false;
  Dump dump;

  // Rows [begin, begin + rows) of a sequence's logits.
  template <typename T>
  void add(const std::vector<std::int32_t>& tokens, std::size_t begin, const T* logits,
           std::size_t rows) {
    for (std::size_t i = 0; i < rows; ++i) {
      const T* row = logits + static_cast<std::int64_t>(i) * vocab;
      if (keep) {
        dump.tokens.push_back(tokens[begin + i]);
        for (std::int64_t v = 0; v < vocab; ++v) {
          dump.logits.push_back(static_cast<float>(row[v]));
        }
      }
      if (begin + i + 1 == tokens.size()) continue;  // nothing behind it to predict
      const double nll = loss(row, vocab, tokens[begin + i + 1]);
      require(std::isfinite(nll), ErrorKind::kInvalidArgument, [&] {
        return fmt::format("the loss at position {} is {}: the model's output is not usable",
                           begin + i, nll);
      });
      nats += nll;
      ++predicted;
      if (keep) dump.nll.push_back(static_cast<float>(nll));
    }
    if (keep && begin + rows == tokens.size()) {
      dump.offsets.push_back(static_cast<std::int64_t>(dump.tokens.size()));
    }
  }
};

using Tick = std::function<void()>;

void score_with_engine(Engine& engine, const Text& text, Score& score, const Tick& tick) {
  const auto chunk = static_cast<std::size_t>(engine.options().max_rows);
  for (const auto& tokens : text.sequences) {
    const SequenceId sequence = engine.create_sequence();
    for (std::size_t begin = 0; begin < tokens.size(); begin += chunk) {
      const std::size_t rows = std::min(chunk, tokens.size() - begin);
      const auto first = tokens.begin() + static_cast<std::ptrdiff_t>(begin);
      const StepResult out = engine.step(
          {{sequence, {first, first + static_cast<std::ptrdiff_t>(rows)}}}, LogitRows::kAll);
      score.add(tokens, begin, out.logits.data(), rows);
      tick();
    }
    engine.remove_sequence(sequence);
  }
}

template <typename T>
void score_with_reference(const Checkpoint& checkpoint, int threads, const Text& text, Score& score,
                          const Tick& tick) {
  reference::ReferenceOptions options;
  options.threads = threads;
  reference::ReferenceModel<T> model(checkpoint, options);
  for (const auto& tokens : text.sequences) {
    const reference::Array<T> logits = model.forward(tokens);
    score.add(tokens, 0, logits.data.data(), tokens.size());
    tick();
  }
}

int run(Options options, const Command& command) {
  if (options.file.empty() == options.tokens.empty()) {
    throw UsageError("eval needs a text FILE or --tokens IDS, one of the two");
  }
  const bool is_text = options.tokens.empty();
  const Checkpoint checkpoint(options.model);
  const ModelConfig& config = checkpoint.config();
  std::int64_t limit = options.max_context;
  if (limit == 0) {
    limit = is_text ? std::min(kDefaultContext, config.max_positions) : config.max_positions;
  }
  require(limit <= config.max_positions, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("--max-context {} exceeds the model's {} positions", limit,
                       config.max_positions);
  });

  Text text;
  if (is_text) {
    require_byte_tokens(checkpoint);
    text = split_chapters(checkpoint, read_file(options.file), limit);
  } else {
    add_sequence(text, parse_token_ids(read_file(options.tokens), config.vocab, options.tokens),
                 limit);
  }
  const std::int64_t predictions = text.predictions();
  require(predictions > 0, ErrorKind::kInvalidArgument, [&] {
    return fmt::format(
        "{} holds nothing to predict: {} chapters, all under {} bytes, or fewer "
        "than two tokens",
        is_text ? options.file : options.tokens, text.short_chapters, kShortestChapter);
  });

  if (!options.dump.empty()) {  // a bad path shows now, not after minutes
    const auto parent = std::filesystem::absolute(options.dump).parent_path();
    require(access(parent.c_str(), W_OK) == 0, ErrorKind::kBackend,
            [&] { return fmt::format("cannot write {}: {}", options.dump, std::strerror(errno)); });
  }

  Score score;
  score.vocab = config.vocab;
  score.keep = !options.dump.empty();
  Progress progress("eval");
  const double start = now_seconds();
  const Tick tick = [&] {
    progress.show(static_cast<double>(score.predicted) / static_cast<double>(predictions),
                  fmt::format("{:.4f} bits/token, {:.0f} tokens/s",
                              score.nats / std::numbers::ln2 / static_cast<double>(score.predicted),
                              static_cast<double>(score.predicted) / (now_seconds() - start)));
  };
  Json how;
  if (options.reference.empty()) {
    std::size_t longest = 0;
    for (const auto& s : text.sequences) longest = std::max(longest, s.size());
    options.engine.max_context = static_cast<std::int64_t>(longest);
    options.engine.activations =
        options.activations == "fp8" ? ActivationFormat::kFp8 : ActivationFormat::kF32;
    options.device.apply(options.engine);
    Engine engine(checkpoint, options.engine);
    score_with_engine(engine, text, score, tick);
    how = {{"implementation", "engine"},
           {"device", options.device.device},
           {"layers", options.device.layers_in_force()},
           {"ranks", engine.options().ranks},
           {"threads_per_rank", engine.options().threads},
           {"activations", to_string(engine.options().activations)}};
  } else {
    const int threads = options.engine.threads == 0 ? 1 : options.engine.threads;
    if (options.reference == "f64") {
      score_with_reference<double>(checkpoint, threads, text, score, tick);
    } else {
      score_with_reference<float>(checkpoint, threads, text, score, tick);
    }
    how = {{"implementation", "reference_" + options.reference}, {"threads", threads}};
  }
  const double seconds = now_seconds() - start;
  if (score.keep) score.dump.write(options.dump, config.vocab, options.model);

  const auto predicted = static_cast<double>(score.predicted);
  const double bits = score.nats / std::numbers::ln2 / predicted;
  const char* unit = is_text ? "byte" : "token";
  if (command.json) {
    Json out{{"model", options.model},
             {"input", is_text ? options.file : options.tokens},
             {"sequences", text.sequences.size()},
             {fmt::format("predicted_{}s", unit), score.predicted},
             {fmt::format("bits_per_{}", unit), bits},
             {fmt::format("nats_per_{}", unit), score.nats / predicted},
             {"max_context", limit},
             {"short_chapters_skipped", text.short_chapters},
             {"tokens_not_scored", text.cut_tokens},
             {"seconds", seconds},
             {"tokens_per_second", predicted / seconds}};
    out.update(how);
    print_json(out);
  } else {
    write_stdout(fmt::format("{:.6f} bits per {} over {} predicted {}s in {} sequences\n", bits,
                             unit, score.predicted, unit, text.sequences.size()));
    print_log(fmt::format(
        "{:.1f} s, {:.0f} tokens/s; not scored: {} tokens outside the first {} of a sequence, "
        "{} chapters under {} bytes",
        seconds, predicted / seconds, text.cut_tokens, limit, text.short_chapters,
        kShortestChapter));
  }
  return kExitOk;
}

}  // namespace

void add_eval(CLI::App& app, Command& command) {
  const auto options = std::make_shared<Options>();
  CLI::App* sub = app.add_subcommand("eval", "Score a text: bits per byte");
  sub->footer(
      "A text's chapters begin at the model's bos byte (STX for tiny-glm); a text without any is "
      "one "
      "chapter. Of each, the first --max-context bytes count and bytes 1.. are predicted; chapters "
      "under 16 bytes are skipped. --dump writes tokens [n], logits [n, vocab] (f32), nll (nats, "
      "one "
      "less per sequence) and offsets [sequences + 1], sequences one behind the other; it holds "
      "them in memory until the end.");
  sub->add_option("MODEL", options->model, "Checkpoint directory")
      ->required()
      ->check(CLI::ExistingDirectory);
  CLI::Option* file = sub->add_option("FILE", options->file, "The text, - for standard input")
                          ->check(readable_file());
  sub->add_option("--tokens", options->tokens,
                  "Token ids instead of a text (decimal; spaces, commas or a JSON array): one "
                  "sequence, scored in bits per token")
      ->check(readable_file())
      ->excludes(file);
  sub->add_option("--dump", options->dump, "Write nll and logits per position")
      ->type_name("OUT.safetensors");
  sub->add_option("--max-context", options->max_context,
                  "Tokens of a sequence that count; default 2048 for a text, all for --tokens")
      ->check(CLI::Range(std::int64_t{2}, std::int64_t{1} << 40))
      ->type_name("N");
  CLI::Option* activations =
      sub->add_option("--activations", options->activations,
                      "f32, or fp8: quantised per token and 128 columns before FP8 weights")
          ->check(CLI::IsMember({"f32", "fp8"}))
          ->capture_default_str();
  CLI::Option* ranks =
      sub->add_option("--ranks", options->engine.ranks, "Tensor-parallel ranks, as threads")
          ->check(CLI::IsMember({1, 2, 4, 8}))
          ->capture_default_str();
  sub->add_option("--threads", options->engine.threads,
                  "Compute threads of one rank; 0: hardware threads / ranks (reference: 1)")
      ->check(CLI::Range(0, 1024))
      ->type_name("N")
      ->capture_default_str();
  add_device_options(*sub, options->device);
  sub->add_flag("--reference{f32}", options->reference,
                "Run the reference instead of the engine, in f32 or (--reference=f64) f64")
      ->check(CLI::IsMember({"f32", "f64"}))
      ->excludes(activations)
      ->excludes(sub->get_option("--device"))
      ->excludes(sub->get_option("--layers"))
      ->excludes(sub->get_option("--kv-format"))
      ->excludes(ranks);
  bind(*sub, command, [options, &command] { return run(*options, command); });
}

}  // namespace penstock::cli
