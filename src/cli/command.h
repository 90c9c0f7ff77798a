// What all subcommands share: exit codes, standard output that notices a lost reader, files, JSON.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

namespace penstock::cli {

using Json = nlohmann::ordered_json;

// Documented in --help.
inline constexpr int kExitOk = 0;     // also when the reader of standard output went away
inline constexpr int kExitFault = 1;  // a mismatch, a fault, a file that is not what it should be
inline constexpr int kExitUsage = 2;  // the command line itself
inline constexpr int kExitSkipped = 77;  // this build or machine cannot do it (kind unsupported)

// The subcommand that was chosen: its body, and whether it prints JSON.
struct Command {
  bool json = false;
  std::function<int()> run;
};

// A fault of the command line that only shows after parsing.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Thrown by write_stdout when nobody reads any more (`penstock ... | head -c 1`).
class ReaderGone : public std::exception {
 public:
  const char* what() const noexcept override { return "the reader of standard output went away"; }
};

// Makes SIGPIPE an error return, and keeps descriptors 0, 1 and 2 occupied where the caller closed
// them, so that no file opened later is taken for standard output. Reading a closed 0 or writing a
// closed 1 fails; what goes to a closed 2 is dropped.
void protect_standard_streams();
// Writes all bytes, unbuffered. Throws ReaderGone, or Error(kBackend) with the system's words.
void write_stdout(std::string_view bytes);
// A line for people. Never throws: a standard error that is full or closed must not end a run.
void print_log(std::string_view line) noexcept;
// One JSON document and a newline. Bytes that are no UTF-8 become U+FFFD.
void print_json(const Json& document);
// Adds --json to a subcommand and its body.
void bind(CLI::App& subcommand, Command& command, std::function<int()> run);

// The whole of a file, or of standard input for "-". Throws Error(kBackend).
std::string read_file(const std::string& path);

// A text file written as it grows. Throws Error(kBackend) naming the path.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path);
  void write(std::string_view text);
  void close();  // reports what the system held back until now

 private:
  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

// Accepts an existing file or "-".
CLI::Validator readable_file();

// One line on a terminal's standard error that says how far a long run is; nothing elsewhere.
class Progress {
 public:
  explicit Progress(std::string what);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void show(double fraction, std::string_view note);

 private:
  std::string what_;
  bool terminal_;
  double last_ = -1.0;  // seconds, of the last redraw
};

// Seconds of a clock that never goes back.
double now_seconds();

// Subcommands, one file each.
void add_generate(CLI::App& app, Command& command);
void add_eval(CLI::App& app, Command& command);
void add_info(CLI::App& app, Command& command);
void add_convert(CLI::App& app, Command& command);
void add_env(CLI::App& app, Command& command);
void add_doctor(CLI::App& app, Command& command);
void add_layout(CLI::App& app, Command& command);
void add_bench(CLI::App& app, Command& command);
void add_tune(CLI::App& app, Command& command);
void add_trace(CLI::App& app, Command& command);
// Under bench.
void add_bench_link(CLI::App& bench, Command& command);
void add_bench_moe_stage2(CLI::App& bench, Command& command);
void add_bench_a2a_gemm(CLI::App& bench, Command& command);
void add_bench_decode(CLI::App& bench, Command& command);

}  // namespace penstock::cli
