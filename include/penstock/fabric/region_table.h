// An operator's window as one constexpr table of regions. Allocation, kernels, the CPU twin, the
// printout and the tests all read the same table; no offset is typed anywhere else. Plain
// constexpr, safe in device code; layout.h adds the host's view (text, digest exchange).
//
//   struct MyShape { std::uint64_t rows, ranks; };
//   enum MyRegion : int { kRows, kArrived };
//   inline constexpr RegionTable<MyShape, 2> kMyTable{
//       "my_op",
//       {{{"rows", [](const MyShape& s) { return s.rows * 512; }, 128, Access::kPeers,
//       Access::kOwner},
//         {"arrived", [](const MyShape& s) { return s.ranks * 8; }, 64, Access::kPeers,
//          Access::kOwner}}}};
//   constexpr auto offsets = kMyTable.at(shape);   // offsets.offset[kArrived], offsets.total_bytes
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// Who touches a region of a rank's window.
enum class Access : std::uint8_t {
  kNobody,
  kOwner,  // the rank whose window it is
  kPeers,  // other ranks (and the owner, as its own peer)
  kAll,
};

// Larger totals are mistakes (an overflowed product), not windows.
inline constexpr std::uint64_t kMaxWindowBytes = 1ULL << 48;

template <typename Shape>
struct Region {
  const char* name;                      // unique inside the table
  std::uint64_t (*bytes)(const Shape&);  // size at a shape; 0 is allowed
  std::uint64_t alignment;               // power of two, <= 4096
  Access writer;
  Access reader;
};

// What kernels get by value: byte offsets from the window's base, the same at every rank.
template <int N>
struct LayoutOffsets {
  std::uint64_t offset[N] = {};
  std::uint64_t bytes[N] = {};
  std::uint64_t total_bytes = 0;  // a multiple of the largest alignment
  bool valid = false;             // false: an alignment is no power of two, or the total is too big
};

template <typename Shape, int N>
struct RegionTable {
  const char* name;  // the operator
  Region<Shape> region[N];

  static constexpr int size() { return N; }

  // Evaluates the table at a shape. Never throws: look at valid (Layout does, and says why).
  constexpr LayoutOffsets<N> at(const Shape& shape) const {
    LayoutOffsets<N> out{};
    std::uint64_t cursor = 0;
    std::uint64_t largest = 1;
    for (int i = 0; i < N; ++i) {
      const std::uint64_t alignment = region[i].alignment;
      if (alignment == 0 || (alignment & (alignment - 1)) != 0 || alignment > 4096) return out;
      if (alignment > largest) largest = alignment;
      cursor = (cursor + alignment - 1) & ~(alignment - 1);
      out.offset[i] = cursor;
      out.bytes[i] = region[i].bytes(shape);
      if (out.bytes[i] > kMaxWindowBytes || cursor + out.bytes[i] > kMaxWindowBytes) return out;
      cursor += out.bytes[i];
    }
    out.total_bytes = (cursor + largest - 1) & ~(largest - 1);
    out.valid = true;
    return out;
  }
};

}  // namespace penstock
