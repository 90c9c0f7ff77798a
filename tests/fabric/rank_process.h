// A process that a test starts, reads and signals.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace penstock::testing {

// A port that nobody listens at just now.
int free_port();

// One started process with its standard output.
class RankProcess {
 public:
  RankProcess(const std::string& program, const std::vector<std::string>& arguments,
              const std::vector<std::string>& environment = {});
  ~RankProcess();  // kills it if it still runs
  RankProcess(RankProcess&& other) noexcept;
  RankProcess& operator=(RankProcess&&) = delete;
  RankProcess(const RankProcess&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  // Waits until the output holds `text`; false after `limit` or at the output's end.
  bool wait_for_output(const std::string& text, std::chrono::milliseconds limit);
  // Waits for the end; -1 after `limit`, 128 + n for signal n.
  int wait(std::chrono::milliseconds limit);
  const std::string& output() const { return output_; }

 private:
  bool read_some(std::chrono::milliseconds limit);
  pid_t pid_ = -1;
  int fd_ = -1;
  std::string output_;
};

}  // namespace penstock::testing
