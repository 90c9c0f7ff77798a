#include "penstock/model/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <unordered_map>

#include "model/atomic_file.h"
#include "model/json_text.h"
#include "penstock/core/error.h"

// File format (huggingface.co/docs/safetensors): u64 little-endian header length, that many bytes
// of JSON, then the tensors' bytes without gaps.

namespace penstock {
namespace {

using model::kind_of;
using model::printable;
using nlohmann::json;

static_assert(std::endian::native == std::endian::little,
              "safetensors stores little-endian values; views point straight at them");

constexpr std::uint64_t kPrefixBytes = 8;
// The limit of the reference implementation; a larger header is an attack or a mistake.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::uint64_t kDataAlignment = 64;
constexpr std::int64_t kMaxInt64 = std::numeric_limits<std::int64_t>::max();

[[noreturn]] void invalid(const std::string& text) {
  throw_error(ErrorKind::kInvalidArgument, text);
}

std::optional<DType> parse_dtype(std::string_view name) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3,
                            DType::kE5M2, DType::kE8M0, DType::kE2M1, DType::kI64, DType::kI32,
                            DType::kI16, DType::kI8, DType::kU8, DType::kBool}) {
    if (to_string(dtype) == name) return dtype;
  }
  return std::nullopt;
}

// Bytes of a tensor whose dimensions are not yet trusted. Zero dimensions do not hide an overflow:
// TensorView::elements() multiplies from the left and must not overflow on the way.
std::int64_t checked_bytes(std::string_view name, DType dtype,
                           std::span<const std::int64_t> shape) {
  std::int64_t product = 1;
  bool empty = false;
  for (const std::int64_t d : shape) {
    if (d < 0) {
      invalid(fmt::format("tensor '{}': shape {} has a negative dimension", printable(name),
                          describe_shape(shape)));
    }
    empty = empty || d == 0;
    if (__builtin_mul_overflow(product, std::max<std::int64_t>(d, 1), &product)) {
      invalid(fmt::format("tensor '{}': the elements of shape {} overflow 64 bits", printable(name),
                          describe_shape(shape)));
    }
  }
  std::int64_t bits = 0;
  if (__builtin_mul_overflow(product, std::int64_t{bits_of(dtype)}, &bits) ||
      bits > kMaxInt64 - 7) {
    invalid(fmt::format("tensor '{}': the bytes of {} {} overflow 64 bits", printable(name),
                        describe_shape(shape), to_string(dtype)));
  }
  if (empty) return 0;
  if (bits % 8 != 0) {
    invalid(fmt::format("tensor '{}': {} {} does not fill whole bytes", printable(name),
                        describe_shape(shape), to_string(dtype)));
  }
  return bits / 8;
}

// A non-negative integer that fits int64; floats, negatives and larger ones are refused.
std::int64_t natural(const json& value, std::string_view name, std::string_view field) {
  if (!value.is_number_integer()) {
    invalid(fmt::format("tensor '{}': {} must hold integers, not {}", printable(name), field,
                        kind_of(value)));
  }
  // nlohmann stores every non-negative integer as unsigned.
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > std::uint64_t{kMaxInt64}) {
    invalid(fmt::format("tensor '{}': {} holds {}; 0 .. 2^63 - 1 are accepted", printable(name),
                        field, value.dump()));
  }
  return value.get<std::int64_t>();
}

struct Entry {
  NamedTensor tensor;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

Entry parse_entry(const std::string& name, const json& value) {
  if (!value.is_object()) {
    invalid(fmt::format("tensor '{}': must be an object, not {}", printable(name), kind_of(value)));
  }
  for (const auto& [field, unused] : value.items()) {
    if (field != "dtype" && field != "shape" && field != "data_offsets") {
      invalid(
          fmt::format("tensor '{}': unknown field '{}'; dtype, shape and data_offsets are accepted",
                      printable(name), printable(field)));
    }
  }
  for (const char* field : {"dtype", "shape", "data_offsets"}) {
    if (!value.contains(field)) {
      invalid(fmt::format("tensor '{}': the field '{}' is missing", printable(name), field));
    }
  }
  Entry entry;
  entry.tensor.name = name;
  TensorView& view = entry.tensor.view;

  const json& dtype = value["dtype"];
  if (!dtype.is_string()) {
    invalid(fmt::format("tensor '{}': dtype must be a string, not {}", printable(name),
                        kind_of(dtype)));
  }
  const auto parsed = parse_dtype(dtype.get_ref<const std::string&>());
  if (!parsed) {
    invalid(fmt::format("tensor '{}': unknown dtype '{}'", printable(name),
                        printable(dtype.get_ref<const std::string&>())));
  }
  view.dtype = *parsed;

  const json& shape = value["shape"];
  if (!shape.is_array()) {
    invalid(
        fmt::format("tensor '{}': shape must be a list, not {}", printable(name), kind_of(shape)));
  }
  if (shape.size() > std::size_t{kMaxRank}) {
    invalid(fmt::format("tensor '{}': {} dimensions; at most {} are supported", printable(name),
                        shape.size(), kMaxRank));
  }
  view.rank = static_cast<int>(shape.size());
  for (std::size_t i = 0; i < shape.size(); ++i) {
    view.shape[i] = natural(shape[i], name, "shape");
  }

  const json& offsets = value["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2) {
    invalid(
        fmt::format("tensor '{}': data_offsets must be a list of two integers", printable(name)));
  }
  entry.begin = natural(offsets[0], name, "data_offsets");
  entry.end = natural(offsets[1], name, "data_offsets");
  if (entry.begin > entry.end) {
    invalid(fmt::format("tensor '{}': data_offsets [{}, {}] run backwards", printable(name),
                        entry.begin, entry.end));
  }
  const std::int64_t bytes =
      checked_bytes(name, view.dtype, {view.shape.data(), static_cast<std::size_t>(view.rank)});
  if (entry.end - entry.begin != bytes) {
    invalid(fmt::format("tensor '{}': data_offsets [{}, {}] hold {} bytes, {} needs {}",
                        printable(name), entry.begin, entry.end, entry.end - entry.begin,
                        describe(view), bytes));
  }
  return entry;
}

}  // namespace

std::vector<NamedTensor> parse_safetensors_header(std::string_view header, const std::byte* data,
                                                  std::uint64_t data_bytes,
                                                  std::map<std::string, std::string>* metadata) {
  if (header.size() > kMaxHeaderBytes) {
    invalid(fmt::format("header has {} bytes; at most {} are accepted", header.size(),
                        kMaxHeaderBytes));
  }
  if (header.empty() || header.front() != '{') {
    invalid("header must begin with '{': this is not a safetensors file");
  }
  const json root = model::parse_json(header, "header");
  std::vector<Entry> entries;
  for (const auto& [name, value] : root.items()) {
    if (name != "__metadata__") {
      entries.push_back(parse_entry(name, value));
      continue;
    }
    if (!value.is_object()) {
      invalid(fmt::format("__metadata__ must be an object, not {}", kind_of(value)));
    }
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) {
        invalid(fmt::format("__metadata__: '{}' must be a string, not {}", printable(key),
                            kind_of(text)));
      }
      if (metadata != nullptr) (*metadata)[key] = text.get_ref<const std::string&>();
    }
  }

  // Every byte belongs to exactly one tensor: sorted by offset, each starts where the one before
  // ends. Empty tensors may stand anywhere between two others.
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    if (a.begin != b.begin) return a.begin < b.begin;
    if (a.end != b.end) return a.end < b.end;
    return a.tensor.name < b.tensor.name;
  });
  std::int64_t position = 0;
  std::vector<NamedTensor> out;
  out.reserve(entries.size());
  for (Entry& entry : entries) {
    const std::string name = printable(entry.tensor.name);
    if (entry.begin < position) {
      invalid(
          fmt::format("tensor '{}' overlaps another: it starts at byte {}, which is inside a "
                      "tensor that ends at {}",
                      name, entry.begin, position));
    }
    if (entry.begin > position) {
      invalid(fmt::format("gap before tensor '{}': bytes {} .. {} belong to no tensor", name,
                          position, entry.begin));
    }
    if (static_cast<std::uint64_t>(entry.end) > data_bytes) {
      invalid(fmt::format("tensor '{}' ends at byte {} of {}: the file is truncated", name,
                          entry.end, data_bytes));
    }
    position = entry.end;
    // Integer arithmetic: `data` may be null where only the header is of interest.
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    entry.tensor.view.data = reinterpret_cast<const void*>(
        reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(entry.begin));
    out.push_back(std::move(entry.tensor));
  }
  if (static_cast<std::uint64_t>(position) != data_bytes) {
    invalid(fmt::format("gap at the end: {} bytes after the last tensor belong to no tensor",
                        data_bytes - static_cast<std::uint64_t>(position)));
  }
  return out;
}

// ---- reading -----------------------------------------------------------------------------------

struct SafetensorsFile::State {
  std::string path;
  std::vector<NamedTensor> tensors;
  std::map<std::string, std::string> metadata;
  std::unordered_map<std::string_view, std::size_t> by_name;
  void* mapping = nullptr;  // the whole file, page-aligned
  std::size_t mapping_bytes = 0;
  std::byte* copy = nullptr;  // the unaligned fall-back's buffer

  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    unmap();
    ::operator delete[](copy, std::align_val_t{kDataAlignment});
  }
  void unmap() {
    if (mapping != nullptr) ::munmap(mapping, mapping_bytes);
    mapping = nullptr;
  }
};

namespace {

std::int64_t alignment_of(DType dtype) { return std::max(bits_of(dtype) / 8, 1); }

bool aligned(const TensorView& view) {
  return reinterpret_cast<std::uintptr_t>(view.data) %
             static_cast<std::uintptr_t>(alignment_of(view.dtype)) ==
         0;
}

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.path = path;
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) {
    invalid(fmt::format("cannot open {}: {}", path, std::strerror(errno)));
  }
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) {
    throw_error(ErrorKind::kBackend, fmt::format("fstat {}: {}", path, std::strerror(errno)));
  }
  if (!S_ISREG(info.st_mode)) invalid(fmt::format("{} is not a regular file", path));
  const auto size = static_cast<std::uint64_t>(info.st_size);
  if (size < kPrefixBytes) {
    invalid(fmt::format("{}: {} bytes are too few for a safetensors file", path, size));
  }
  s.mapping_bytes = static_cast<std::size_t>(size);
  void* mapping = ::mmap(nullptr, s.mapping_bytes, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (mapping == MAP_FAILED) {
    throw_error(ErrorKind::kBackend,
                fmt::format("mmap {} ({} bytes): {}", path, size, std::strerror(errno)));
  }
  s.mapping = mapping;
  const auto* base = static_cast<const std::byte*>(s.mapping);
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, base, kPrefixBytes);
  if (header_bytes > kMaxHeaderBytes) {
    invalid(fmt::format("{}: the header claims {} bytes; at most {} are accepted", path,
                        header_bytes, kMaxHeaderBytes));
  }
  if (header_bytes > size - kPrefixBytes) {
    invalid(fmt::format("{}: the header claims {} bytes, the file has {} behind its length", path,
                        header_bytes, size - kPrefixBytes));
  }
  const std::uint64_t data_start = kPrefixBytes + header_bytes;
  try {
    s.tensors = parse_safetensors_header({reinterpret_cast<const char*>(base) + kPrefixBytes,
                                          static_cast<std::size_t>(header_bytes)},
                                         base + data_start, size - data_start, &s.metadata);
  } catch (const Error& e) {
    throw_error(e.kind(), fmt::format("{}: {}", path, e.what()));
  }
  const bool all_aligned = std::all_of(s.tensors.begin(), s.tensors.end(),
                                       [](const NamedTensor& t) { return aligned(t.view); });
  if (!all_aligned) {
    // Each tensor gets an aligned place of its own: no single shift of the file aligns all of them.
    std::size_t total = 0;
    for (const NamedTensor& t : s.tensors) {
      total += round_up(static_cast<std::size_t>(t.view.bytes()), kDataAlignment);
    }
    s.copy = static_cast<std::byte*>(
        ::operator new[](total, std::align_val_t{kDataAlignment}, std::nothrow));
    require(s.copy != nullptr, ErrorKind::kResourceExhausted, [&] {
      return fmt::format(
          "{}: no memory for {} bytes; its tensors are not aligned, so it cannot "
          "be used by mapping",
          path, total);
    });
    std::size_t position = 0;
    for (NamedTensor& t : s.tensors) {
      const auto bytes = static_cast<std::size_t>(t.view.bytes());
      if (bytes > 0) std::memcpy(s.copy + position, t.view.data, bytes);
      t.view.data = s.copy + position;
      position += round_up(bytes, kDataAlignment);
    }
    s.unmap();
  }
  for (std::size_t i = 0; i < s.tensors.size(); ++i) s.by_name.emplace(s.tensors[i].name, i);
}

SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;

const std::string& SafetensorsFile::path() const noexcept { return state_->path; }
bool SafetensorsFile::is_mapped() const noexcept { return state_->mapping != nullptr; }
const std::vector<NamedTensor>& SafetensorsFile::tensors() const noexcept {
  return state_->tensors;
}
const std::map<std::string, std::string>& SafetensorsFile::metadata() const noexcept {
  return state_->metadata;
}

const TensorView* SafetensorsFile::find(std::string_view name) const noexcept {
  const auto it = state_->by_name.find(name);
  return it == state_->by_name.end() ? nullptr : &state_->tensors[it->second].view;
}

const TensorView& SafetensorsFile::at(std::string_view name) const {
  const TensorView* view = find(name);
  require(view != nullptr, ErrorKind::kInvalidArgument,
          [&] { return fmt::format("{} has no tensor '{}'", state_->path, printable(name)); });
  return *view;
}

void SafetensorsFile::release(const TensorView& view) const noexcept {
  if (state_->mapping == nullptr) return;
  // Whole pages inside the tensor only: neighbours share the pages at its ends.
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto base = reinterpret_cast<std::uintptr_t>(state_->mapping);
  const auto begin = reinterpret_cast<std::uintptr_t>(view.data);
  const std::uintptr_t end = begin + static_cast<std::uintptr_t>(view.bytes());
  if (begin < base || end > base + state_->mapping_bytes) return;
  const std::uintptr_t first = (begin + page - 1) / page * page;
  const std::uintptr_t last = end / page * page;
  // The mapping is read-only and backed by the file, so a later read only faults the page in again.
  if (first >= last) return;
  ::madvise(static_cast<std::byte*>(state_->mapping) + (first - base), last - first, MADV_DONTNEED);
}

// ---- writing -----------------------------------------------------------------------------------

namespace {

std::string build_header(std::span<const NamedTensor> tensors,
                         const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json root = nlohmann::ordered_json::object();
  if (!metadata.empty()) root["__metadata__"] = metadata;
  std::set<std::string_view> names;
  std::int64_t position = 0;
  for (const NamedTensor& t : tensors) {
    if (t.name == "__metadata__") {
      invalid("a tensor cannot be named '__metadata__': the format keeps that name for itself");
    }
    if (!names.insert(t.name).second) {
      invalid(fmt::format("two tensors are named '{}'", printable(t.name)));
    }
    if (t.view.rank < 0 || t.view.rank > kMaxRank) {
      invalid(fmt::format("tensor '{}': rank {}; 0 .. {} are accepted", printable(t.name),
                          t.view.rank, kMaxRank));
    }
    const std::span<const std::int64_t> shape(t.view.shape.data(),
                                              static_cast<std::size_t>(t.view.rank));
    const std::int64_t bytes = checked_bytes(t.name, t.view.dtype, shape);
    if (bytes > 0 && t.view.data == nullptr) {
      invalid(fmt::format("tensor '{}' has no data", printable(t.name)));
    }
    if (bytes > kMaxInt64 - position) {
      invalid(fmt::format("the bytes up to tensor '{}' overflow 64 bits", printable(t.name)));
    }
    // emplace_back keeps this linear: ordered_json's operator[] searches the whole list.
    nlohmann::ordered_json entry;
    entry["dtype"] = std::string(to_string(t.view.dtype));
    entry["shape"] = shape;
    entry["data_offsets"] = {position, position + bytes};
    root.get_ref<nlohmann::ordered_json::object_t&>().emplace_back(t.name, std::move(entry));
    position += bytes;
  }
  std::string text;
  try {
    text = root.dump();
  } catch (const json::exception& e) {
    invalid(fmt::format("a tensor name or metadata text is not UTF-8: {}", e.what()));
  }
  // Spaces pad the header so that the data starts on a 64-byte boundary of the file.
  text.resize(round_up(text.size() + kPrefixBytes, kDataAlignment) - kPrefixBytes, ' ');
  if (text.size() > kMaxHeaderBytes) {
    invalid(fmt::format("the header would have {} bytes; at most {} are accepted: use more files",
                        text.size(), kMaxHeaderBytes));
  }
  return text;
}

}  // namespace

void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  const std::string header = build_header(tensors, metadata);
  model::AtomicFile file(path);
  const std::uint64_t length = header.size();
  file.write(&length, kPrefixBytes);
  file.write(header.data(), header.size());
  for (const NamedTensor& t : tensors) {
    if (t.view.elements() > 0) file.write(t.view.data, static_cast<std::size_t>(t.view.bytes()));
  }
  file.commit();
}

}  // namespace penstock
