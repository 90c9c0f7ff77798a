#include "cli/command.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>

#include "penstock/core/error.h"

namespace penstock::cli {
namespace {

[[noreturn]] void system_error(const std::string& what) {
  const int code = errno;
  throw_error(ErrorKind::kBackend, fmt::format("{}: {}", what, std::strerror(code)));
}

}  // namespace

void protect_standard_streams() {
  std::signal(SIGPIPE, SIG_IGN);
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(descriptor, F_GETFD) != -1) continue;
    // 0 and 1 the wrong way round, so that using what the caller closed is an error and no silence.
    // open() takes the lowest free descriptor, which is this one.
    const int flags = descriptor == STDOUT_FILENO ? O_RDONLY : O_WRONLY;
    if (open("/dev/null", flags) != descriptor) std::_Exit(kExitFault);
  }
}

void write_stdout(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(STDOUT_FILENO, bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EPIPE) {
      throw ReaderGone();
    } else if (errno != EINTR) {
      system_error("cannot write to standard output");
    }
  }
}

void print_log(std::string_view line) noexcept {
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fputc('\n', stderr);
}

void print_json(const Json& document) {
  write_stdout(document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

void bind(CLI::App& subcommand, Command& command, std::function<int()> run) {
  subcommand.add_flag("--json", command.json,
                      "Print one JSON document on standard output; logs go to standard error");
  subcommand.callback([&command, body = std::move(run)] { command.run = body; });
}

std::string read_file(const std::string& path) {
  const bool standard = path == "-";
  const std::string name = standard ? "standard input" : path;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(
      standard ? fdopen(dup(STDIN_FILENO), "rb") : std::fopen(path.c_str(), "rb"),
      [](std::FILE* f) { return f != nullptr ? std::fclose(f) : 0; });
  if (file == nullptr) system_error("cannot open " + name);
  std::string out;
  char buffer[65536];
  while (const std::size_t count = std::fread(buffer, 1, sizeof buffer, file.get())) {
    out.append(buffer, count);
  }
  if (std::ferror(file.get()) != 0) system_error("cannot read " + name);
  return out;
}

OutputFile::OutputFile(const std::string& path)
    : path_(path), file_(std::fopen(path.c_str(), "wb"), [](std::FILE* f) {
        return f != nullptr ? std::fclose(f) : 0;
      }) {
  if (file_ == nullptr) system_error("cannot create " + path);
}

void OutputFile::write(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), file_.get()) != text.size()) {
    system_error("cannot write " + path_);
  }
}

void OutputFile::close() {
  if (std::fclose(file_.release()) != 0) system_error("cannot write " + path_);
}

CLI::Validator readable_file() {
  return CLI::Validator(
      [](const std::string& path) -> std::string {
        struct stat info {};
        if (path == "-") return {};
        if (stat(path.c_str(), &info) != 0) return path + ": " + std::strerror(errno);
        if (S_ISDIR(info.st_mode)) return path + " is a directory, not a file";
        return {};
      },
      "FILE");
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Progress::Progress(std::string what)
    : what_(std::move(what)), terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (terminal_ && last_ >= 0.0) std::fputs("\r\033[K", stderr);
}

void Progress::show(double fraction, std::string_view note) {
  const double now = now_seconds();
  if (!terminal_ || now - last_ < 0.1) return;
  last_ = now;
  constexpr int kWidth = 30;
  const auto filled = static_cast<int>(fraction * kWidth);
  const std::string line = fmt::format("\r\033[K{} [{:<{}}] {:3.0f}%  {}", what_,
                                       std::string(static_cast<std::size_t>(filled), '#'), kWidth,
                                       100.0 * fraction, note);
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace penstock::cli
