#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <mutex>

#include "fabric/team_base.h"

namespace penstock {
namespace {

// What the threads share beside the control block: places to hand shared pointers over.
struct Shared {
  explicit Shared(int size) : handed(static_cast<std::size_t>(size)) {}
  detail::TeamControl control;
  std::mutex mutex;
  std::vector<std::shared_ptr<void>> handed;  // [rank], only filled during all_gather_shared
};

// Ranks are threads that share one block on the heap; it goes with the last handle.
class LocalTeam final : public detail::TeamBase {
 public:
  LocalTeam(std::shared_ptr<Shared> shared, int rank, int size, std::chrono::nanoseconds deadline)
      : TeamBase(&shared->control, rank, size, deadline), shared_(std::move(shared)) {
    join();
  }
  ~LocalTeam() override { leave(); }

  int local_rank() const noexcept override { return rank(); }
  bool in_process() const noexcept override { return true; }
  std::string_view source() const noexcept override { return "in-process"; }

  std::vector<UniqueFd> all_gather_descriptor(int fd) override {
    std::vector<UniqueFd> out(static_cast<std::size_t>(size()));
    std::vector<int> all(out.size());
    all_gather(std::as_bytes(std::span(&fd, 1)), std::as_writable_bytes(std::span(all)));
    // Nobody may close its descriptor before all have duplicated it: collectively() meets again.
    collectively(*this, [&] {
      for (std::size_t r = 0; r < all.size(); ++r) {
        if (all[r] < 0) continue;
        out[r] = UniqueFd(::fcntl(all[r], F_DUPFD_CLOEXEC, 0));
        if (!out[r]) {
          throw Error(ErrorKind::kResourceExhausted,
                      fmt::format("could not duplicate descriptor {} of rank {}: {}", all[r], r,
                                  std::strerror(errno)));
        }
      }
    });
    return out;
  }

  std::vector<std::shared_ptr<void>> all_gather_shared(std::shared_ptr<void> mine) override {
    {
      const std::scoped_lock lock(shared_->mutex);
      shared_->handed[static_cast<std::size_t>(rank())] = std::move(mine);
    }
    barrier();
    std::vector<std::shared_ptr<void>> all;
    {
      const std::scoped_lock lock(shared_->mutex);
      all = shared_->handed;
    }
    barrier();
    const std::scoped_lock lock(shared_->mutex);
    shared_->handed[static_cast<std::size_t>(rank())].reset();
    return all;
  }

 private:
  std::shared_ptr<Shared> shared_;
};

}  // namespace

std::vector<TeamHandle> make_local_teams(int size, const LocalTeamOptions& options) {
  require(size >= 1 && size <= kMaxRanks, ErrorKind::kInvalidArgument,
          [&] { return fmt::format("a team of {} ranks: give 1 to {}", size, kMaxRanks); });
  const auto deadline = detail::deadline_or_default(options.deadline);
  const auto shared = std::make_shared<Shared>(size);
  shared->control.size = static_cast<std::uint64_t>(size);
  std::vector<TeamHandle> teams;
  teams.reserve(static_cast<std::size_t>(size));
  for (int r = 0; r < size; ++r) {
    teams.push_back(std::make_shared<LocalTeam>(shared, r, size, deadline));
  }
  return teams;
}

}  // namespace penstock
