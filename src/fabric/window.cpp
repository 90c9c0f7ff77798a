#include "penstock/fabric/window.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

namespace penstock {
namespace {

std::uint64_t round_up(std::uint64_t value, std::uint64_t to) { return (value + to - 1) / to * to; }

// Collective. Refuses on every rank, with what each brought, unless all brought the same.
void agree_on_layout(Team& team, const Layout& layout, const std::string& key) {
  const std::string mine =
      key.empty() ? layout.describe() : fmt::format("key '{}': {}", key, layout.describe());
  const std::uint64_t digest = layout.digest();
  std::vector<std::uint64_t> digests(static_cast<std::size_t>(team.size()));
  team.all_gather(std::as_bytes(std::span(&digest, 1)), std::as_writable_bytes(std::span(digests)));
  const bool same_digest =
      std::all_of(digests.begin(), digests.end(), [&](std::uint64_t d) { return d == digests[0]; });
  if (same_digest && key.empty()) return;
  const auto texts = team.all_gather_varying(std::as_bytes(std::span(mine)));
  std::vector<std::pair<std::string, std::vector<std::size_t>>> kinds;
  for (std::size_t r = 0; r < texts.size(); ++r) {
    const std::string text(reinterpret_cast<const char*>(texts[r].data()), texts[r].size());
    const auto known = std::find_if(kinds.begin(), kinds.end(),
                                    [&](const auto& kind) { return kind.first == text; });
    if (known == kinds.end()) {
      kinds.push_back({text, {r}});
    } else {
      known->second.push_back(r);
    }
  }
  if (kinds.size() == 1 && same_digest) return;
  std::string message =
      "ranks brought different window layouts; construct the operator with the same shape and "
      "options, in the same order, on every rank:";
  for (const auto& [text, ranks] : kinds) {
    message += fmt::format("\nrank {}: {}", fmt::join(ranks, ", "), text);
  }
  throw Error(ErrorKind::kInvalidArgument, message);
}

}  // namespace

Window::Window(TeamHandle team, Layout layout, Backend kind, std::shared_ptr<WindowMapping> mapping,
               std::uint64_t offset, std::uint64_t bytes)
    : team_(std::move(team)),
      layout_(std::move(layout)),
      kind_(kind),
      mapping_(std::move(mapping)),
      offset_(offset),
      bytes_(bytes) {
  team_->add_hook(this);
}

Window::~Window() { team_->remove_hook(this); }

std::shared_ptr<Window> Window::create(TeamHandle team, Layout layout,
                                       std::shared_ptr<WindowBackend> backend) {
  agree_on_layout(*team, layout, {});
  const std::uint64_t granule = backend->granule();
  const std::uint64_t bytes = round_up(std::max<std::uint64_t>(layout.total_bytes(), 1), granule);
  auto mapping = backend->map(*team, bytes);
  return std::shared_ptr<Window>(new Window(std::move(team), std::move(layout), backend->kind(),
                                            std::move(mapping), 0, bytes));
}

std::byte* Window::base(int rank) const noexcept { return mapping_->base(rank) + offset_; }

void Window::add_user(WindowUser* user) { users_.push_back(user); }

void Window::remove_user(WindowUser* user) noexcept {
  users_.erase(std::remove(users_.begin(), users_.end(), user), users_.end());
}

void Window::close() {
  if (closed_) return;
  for (WindowUser* user : users_) user->drain();
  team_->barrier();
  closed_ = true;
}

// Transports are hooks of their own and stop themselves; host stores of this rank have ended, since
// it is the rank's thread that rearms.
void Window::quiesce() {}

WindowPool::WindowPool(TeamHandle team, std::uint64_t budget_bytes,
                       std::shared_ptr<WindowBackend> backend)
    : team_(std::move(team)), kind_(backend->kind()), budget_(0) {
  std::vector<std::uint64_t> budgets(static_cast<std::size_t>(team_->size()));
  team_->all_gather(std::as_bytes(std::span(&budget_bytes, 1)),
                    std::as_writable_bytes(std::span(budgets)));
  for (std::size_t r = 0; r < budgets.size(); ++r) {
    require(budgets[r] == budgets[0], ErrorKind::kInvalidArgument, [&] {
      return fmt::format("window pool budgets differ: rank 0 has {} bytes, rank {} has {}",
                         budgets[0], r, budgets[r]);
    });
  }
  require(budget_bytes > 0 && budget_bytes <= kMaxWindowBytes, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("a window pool of {} bytes: give 1 to {}", budget_bytes, kMaxWindowBytes);
  });
  budget_ = round_up(budget_bytes, backend->granule());
  mapping_ = backend->map(*team_, budget_);
}

std::shared_ptr<Window> WindowPool::lease(const std::string& key, Layout layout) {
  require(!key.empty(), ErrorKind::kInvalidArgument,
          [] { return std::string("a window pool lease needs a key, e.g. the operator's name"); });
  agree_on_layout(*team_, layout, key);
  for (const auto& slice : slices_) {
    if (slice.first != key) continue;
    const Window* window = slice.second.get();
    require(window->layout().digest() == layout.digest(), ErrorKind::kInvalidArgument, [&] {
      return fmt::format(
          "window pool key '{}' is taken by another layout; use another key, or "
          "one shape for all its users\ntaken: {}asked: {}",
          key, window->layout().describe(), layout.describe());
    });
    return slice.second;
  }
  // A page: enough for every alignment that a layout may ask for.
  const std::uint64_t bytes = round_up(std::max<std::uint64_t>(layout.total_bytes(), 1), 4096);
  require(bytes <= budget_ - used_, ErrorKind::kResourceExhausted, [&] {
    return fmt::format(
        "window pool: '{}' needs {} bytes, {} of {} are left; raise the budget by "
        "{} bytes\n{}",
        key, bytes, budget_ - used_, budget_, bytes - (budget_ - used_), describe());
  });
  std::shared_ptr<Window> window(
      new Window(team_, std::move(layout), kind_, mapping_, used_, bytes));
  slices_.emplace_back(key, window);
  used_ += bytes;
  return window;
}

std::string WindowPool::describe() const {
  std::string out;
  for (const auto& [key, window] : slices_) {
    out += fmt::format("  {:<24} {:<24} offset {:>14}  bytes {:>14}\n", key,
                       window->layout().name(), window->mapping_offset(), window->bytes());
  }
  out += fmt::format("  used {} of {} bytes\n", used_, budget_);
  return out;
}

}  // namespace penstock
