// Windows: memory of every rank that every other rank of the team can reach, all with one layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "penstock/core/stream.h"
#include "penstock/fabric/layout.h"
#include "penstock/fabric/signal.h"
#include "penstock/fabric/team.h"

namespace penstock {

// The memory behind a window, as one rank sees it. Destroying it ends this rank's view; memory
// lives until the last view of any rank is gone (threads: a reference count; processes: the
// kernel's), so that a rank which leaves early never pulls memory from under a peer.
class WindowMapping {
 public:
  virtual ~WindowMapping() = default;
  // Base of `rank`'s part in this process (cpu: host address; cuda: device address valid on this
  // rank's device). base(own rank) is the local part.
  virtual std::byte* base(int rank) const noexcept = 0;
  // Usable bytes of each part, a multiple of the back end's granule.
  virtual std::uint64_t bytes() const noexcept = 0;
};

// How a back end allocates. Implementations: cpu_window_backend() here, the CUDA one in src/.
class WindowBackend {
 public:
  virtual ~WindowBackend() = default;
  virtual Backend kind() const noexcept = 0;
  // Allocation granule, bytes; map() gets multiples of it.
  virtual std::uint64_t granule() const = 0;
  // Collective. All parts have `bytes` bytes, zeroed. Throws on every rank or on none (use
  // collectively()): ResourceExhausted with the size asked for, Backend with the system's words.
  virtual std::shared_ptr<WindowMapping> map(Team& team, std::uint64_t bytes) = 0;
};

// Host memory: one anonymous mapping a rank for in-process teams, one memfd a rank between
// processes. Granule: a page (4096).
std::shared_ptr<WindowBackend> cpu_window_backend();

// Anything that may still read or write a window on behalf of this rank; close() asks it first.
class WindowUser {
 public:
  virtual ~WindowUser() = default;
  // Waits until nothing of this rank is in flight on the window; throws Fault at the deadline.
  virtual void drain() = 0;
};

// One rank's handle of a window, or of a slice of a pooled one.
class Window : public RearmHook {
 public:
  // Collective. Exchanges the layouts' digests first and refuses on every rank (InvalidArgument,
  // with the full description of each distinct layout and the ranks that brought it) if they
  // differ; then allocates, all or none. Size: layout.total_bytes() rounded up to the granule, at
  // least one granule. Memory starts zeroed.
  static std::shared_ptr<Window> create(TeamHandle team, Layout layout,
                                        std::shared_ptr<WindowBackend> backend);
  ~Window() override;  // not collective: drops this rank's view (see WindowMapping)
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  const TeamHandle& team() const noexcept { return team_; }
  const Layout& layout() const noexcept { return layout_; }
  Backend backend() const noexcept { return kind_; }
  // Base of this window (slice) at `rank`; valid until destruction, whatever peers do.
  std::byte* base(int rank) const noexcept;
  std::byte* local() const noexcept { return base(team_->rank()); }
  // Start of a region at a rank. Region index is bounds-checked (InvalidArgument).
  std::byte* region(int rank, int index) const { return base(rank) + layout_.region(index).offset; }
  template <typename T>
  T* region_as(int rank, int index) const {
    return reinterpret_cast<T*>(region(rank, index));
  }
  // Bytes of the slice at each rank, >= layout().total_bytes().
  std::uint64_t bytes() const noexcept { return bytes_; }
  const std::shared_ptr<WindowMapping>& mapping() const noexcept { return mapping_; }
  // Offset of the slice inside mapping().
  std::uint64_t mapping_offset() const noexcept { return offset_; }
  // The window's calls, shared by all operators on this slice. Rearm moves it on every rank.
  EpochCounter& epochs() noexcept { return epochs_; }

  void add_user(WindowUser* user);
  void remove_user(WindowUser* user) noexcept;
  // Collective: drains this rank's users, then waits until every rank has done so. After that no
  // rank touches the window and closed() holds; the memory goes with the handle. With a stuck peer:
  // Fault naming it, closed() stays false and all memory stays mapped while the handle lives.
  // Calling it again after rearm() is allowed.
  void close();
  bool closed() const noexcept { return closed_; }

  void quiesce() override;
  std::uint64_t highest_epoch() const override { return epochs_.last(); }
  void resume(std::uint64_t floor) override { epochs_.advance_to(floor); }

 private:
  friend class WindowPool;
  Window(TeamHandle team, Layout layout, Backend kind, std::shared_ptr<WindowMapping> mapping,
         std::uint64_t offset, std::uint64_t bytes);

  TeamHandle team_;
  Layout layout_;
  Backend kind_;
  std::shared_ptr<WindowMapping> mapping_;
  std::uint64_t offset_;
  std::uint64_t bytes_;
  EpochCounter epochs_;
  std::vector<WindowUser*> users_;
  bool closed_ = false;
};

// One allocation from which several operators take slices, under a stated budget.
class WindowPool {
 public:
  // Collective: maps `budget_bytes` (rounded up to the granule) at once, so that a later lease
  // cannot fail half-way through a model. ResourceExhausted on every rank if one rank cannot.
  WindowPool(TeamHandle team, std::uint64_t budget_bytes, std::shared_ptr<WindowBackend> backend);

  // Collective, same order on all ranks. A slice for `layout`. Leases with the same key share one
  // slice (and its epochs): use one key for all layers of a model whose calls follow each other on
  // one stream. The key's first lease fixes the layout; another layout under the same key is
  // refused (InvalidArgument, both descriptions). ResourceExhausted on every rank, with the budget,
  // what is taken by whom and what was asked, when the slice does not fit. Slices stay taken until
  // the pool and all leases are gone.
  std::shared_ptr<Window> lease(const std::string& key, Layout layout);

  std::uint64_t budget_bytes() const noexcept { return budget_; }
  std::uint64_t used_bytes() const noexcept { return used_; }
  // One line a slice: key, operator, offset, bytes; then used and budget.
  std::string describe() const;

 private:
  TeamHandle team_;
  Backend kind_;
  std::uint64_t budget_;
  std::uint64_t used_ = 0;
  std::shared_ptr<WindowMapping> mapping_;
  std::vector<std::pair<std::string, std::shared_ptr<Window>>> slices_;
};

}  // namespace penstock
