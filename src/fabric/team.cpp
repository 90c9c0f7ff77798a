#include "penstock/fabric/team.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstring>
#include <exception>
#include <system_error>
#include <thread>

namespace penstock {

void UniqueFd::reset() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void collectively(Team& team, const std::function<void()>& body) {
  // First byte: 0 for success, else 1 + the error's kind; then the text.
  std::vector<std::byte> mine(1, std::byte{0});
  const auto failed = [&](ErrorKind kind, std::string_view text) {
    mine.resize(1 + text.size());
    mine[0] = static_cast<std::byte>(1 + static_cast<unsigned>(kind));
    std::memcpy(mine.data() + 1, text.data(), text.size());
  };
  try {
    body();
  } catch (const Fault&) {
    throw;  // the whole team has it already
  } catch (const Error& error) {
    failed(error.kind(), error.what());
  } catch (const std::bad_alloc&) {
    failed(ErrorKind::kResourceExhausted, "out of memory");
  } catch (const std::exception& error) {
    failed(ErrorKind::kBackend, error.what());
  }
  const auto all = team.all_gather_varying(mine);
  std::string text;
  std::byte first{0};
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty() || all[r][0] == std::byte{0}) continue;
    if (first == std::byte{0}) first = all[r][0];
    text += fmt::format(
        "{}rank {}: {}", text.empty() ? "" : "; ", r,
        std::string_view(reinterpret_cast<const char*>(all[r].data() + 1), all[r].size() - 1));
  }
  if (first != std::byte{0}) {
    throw Error(static_cast<ErrorKind>(static_cast<unsigned>(first) - 1), text);
  }
}

void run_local_team(int size, const std::function<void(const TeamHandle&)>& body,
                    const LocalTeamOptions& options) {
  std::vector<TeamHandle> teams = make_local_teams(size, options);
  std::vector<std::exception_ptr> errors(teams.size());
  std::vector<std::thread> threads;
  threads.reserve(teams.size());
  const auto play = [&](std::size_t r) {
    // The handle dies with its rank's body, so that peers of a rank that threw learn it at once.
    const TeamHandle team = std::move(teams[r]);
    try {
      body(team);
    } catch (...) {
      errors[r] = std::current_exception();
    }
  };
  std::exception_ptr start_error;
  for (std::size_t r = 0; r < teams.size(); ++r) {
    try {
      threads.emplace_back(play, r);
    } catch (const std::system_error& error) {
      start_error = std::make_exception_ptr(Error(
          ErrorKind::kResourceExhausted,
          fmt::format("could not start the thread of rank {} of {}: {}", r, size, error.what())));
      for (std::size_t q = r; q < teams.size(); ++q) teams[q].reset();
      break;
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (start_error) std::rethrow_exception(start_error);
  std::exception_ptr fault;
  for (const std::exception_ptr& error : errors) {
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const Fault&) {
      if (!fault) fault = error;
    }
  }
  if (fault) std::rethrow_exception(fault);
}

}  // namespace penstock
