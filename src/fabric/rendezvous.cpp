#include "fabric/rendezvous.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <thread>

#include "penstock/core/error.h"

namespace penstock::detail {
namespace {

constexpr std::uint64_t kMagic = 0x70656e73746f0001ULL;  // the last digits are the version

// What a rank says of itself, byte for byte on the wire (one host, one byte order).
struct Hello {
  std::uint64_t magic = kMagic;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  char host[40] = {};    // boot id: the same on one host, different on two
  char socket[40] = {};  // its Unix socket
};
enum class Verdict : std::uint32_t { kWelcome = 0, kRefused = 1, kMissing = 2 };
// Rank 0's answer; a welcome is followed by one Hello for each rank.
struct Answer {
  std::uint64_t magic = kMagic;
  std::uint64_t session = 0;
  std::uint32_t verdict = 0;  // Verdict
  std::int32_t missing = -1;  // first missing rank
  std::uint32_t kind = 0;     // ErrorKind of a refusal
  std::uint32_t reserved = 0;
  char text[480] = {};
};
// First packet on a Unix socket.
struct Introduction {
  std::uint64_t session = 0;
  std::int64_t rank = 0;
};

template <typename T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}
template <typename T>
std::span<std::byte> writable(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

template <std::size_t N>
void copy_text(char (&to)[N], std::string_view text) {
  std::memcpy(to, text.data(), std::min(text.size(), N - 1));
}

std::uint64_t random_bits() {
  std::uint64_t value = 0;
  if (::getrandom(&value, sizeof value, 0) != static_cast<ssize_t>(sizeof value)) {
    throw_system("getrandom");
  }
  return value;
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  require(!id.empty(), ErrorKind::kBackend, [] {
    return std::string("cannot read /proc/sys/kernel/random/boot_id to tell hosts apart");
  });
  return id;
}

[[noreturn]] void throw_missing(const Discovery& me, int missing, FaultCause cause,
                                const std::string& text) {
  FaultRecord record;
  record.rank = me.rank;
  record.peer = missing;
  record.cause = static_cast<std::uint32_t>(cause);
  record.valid = 1;
  throw Fault(record, text);
}

[[noreturn]] void throw_answer(const Discovery& me, const Answer& answer) {
  const std::string text(answer.text, ::strnlen(answer.text, sizeof answer.text));
  if (answer.verdict == static_cast<std::uint32_t>(Verdict::kMissing)) {
    throw_missing(me, answer.missing, FaultCause::kDeadline, text);
  }
  throw Error(static_cast<ErrorKind>(answer.kind), text);
}

// Rank 0's side: collects a Hello from everybody, or tells everybody why not.
class Host {
 public:
  Host(const Discovery& me, const Hello& hello)
      : me_(me),
        listener_(listen_tcp(me.address, me.port, me.size)),
        hellos_(static_cast<std::size_t>(me.size)),
        links_(static_cast<std::size_t>(me.size)) {
    hellos_[0] = hello;
  }

  std::vector<Hello> collect(TimePoint until, std::uint64_t session) {
    int present = 1;
    while (present < me_.size) {
      UniqueFd link = accept_until(listener_.get(), until);
      if (!link) tell_missing();
      Hello hello;
      // Someone else's client must not stop the meeting, nor hold it up for long.
      const auto patience =
          std::min(until, std::chrono::steady_clock::now() + std::chrono::seconds(2));
      if (!receive_all(link.get(), writable(hello), patience) || hello.magic != kMagic) continue;
      check(hello, link);
      hellos_[static_cast<std::size_t>(hello.rank)] = hello;
      links_[static_cast<std::size_t>(hello.rank)] = std::move(link);
      ++present;
    }
    Answer welcome;
    welcome.session = session;
    for (std::size_t r = 1; r < links_.size(); ++r) {
      if (!send_all(links_[r].get(), bytes_of(welcome)) ||
          !send_all(links_[r].get(), std::as_bytes(std::span(hellos_)))) {
        throw_missing(me_, static_cast<int>(r), FaultCause::kPeerDead,
                      fmt::format("rank {} hung up during the rendezvous", r));
      }
    }
    return hellos_;
  }

 private:
  void check(const Hello& hello, const UniqueFd& link) {
    std::string text;
    ErrorKind kind = ErrorKind::kInvalidArgument;
    if (hello.size != me_.size) {
      text = fmt::format(
          "world sizes differ: rank {} says {}, rank 0 says {}; start all ranks "
          "with one size",
          hello.rank, hello.size, me_.size);
    } else if (hello.rank < 1 || hello.rank >= me_.size ||
               links_[static_cast<std::size_t>(hello.rank)]) {
      text = fmt::format(
          "rank {} came twice or is out of range 0 to {}; give every process a "
          "rank of its own",
          hello.rank, me_.size - 1);
    } else if (std::memcmp(hello.host, hellos_[0].host, sizeof hello.host) != 0) {
      kind = ErrorKind::kUnsupported;
      text = fmt::format(
          "rank {} runs on another host than rank 0; a team's ranks share memory, "
          "so start them all on one host",
          hello.rank);
    }
    if (text.empty()) return;
    Answer answer;
    answer.verdict = static_cast<std::uint32_t>(Verdict::kRefused);
    answer.kind = static_cast<std::uint32_t>(kind);
    copy_text(answer.text, text);
    (void)send_all(link.get(), bytes_of(answer));
    tell_all(answer);
    throw Error(kind, text);
  }

  [[noreturn]] void tell_missing() {
    std::vector<int> missing;
    for (int r = 1; r < me_.size; ++r) {
      if (!links_[static_cast<std::size_t>(r)]) missing.push_back(r);
    }
    Answer answer;
    answer.verdict = static_cast<std::uint32_t>(Verdict::kMissing);
    answer.missing = missing.front();
    const std::string text = fmt::format(
        "rendezvous at {}:{}: {} of {} ranks came before the deadline, missing: rank {}",
        me_.address, me_.port, static_cast<std::size_t>(me_.size) - missing.size(), me_.size,
        fmt::join(missing, ", "));
    copy_text(answer.text, text);
    tell_all(answer);
    throw_missing(me_, missing.front(), FaultCause::kDeadline, text);
  }

  void tell_all(const Answer& answer) {
    for (const UniqueFd& link : links_) {
      if (link) (void)send_all(link.get(), bytes_of(answer));
    }
  }

  const Discovery& me_;
  UniqueFd listener_;
  std::vector<Hello> hellos_;
  std::vector<UniqueFd> links_;
};

std::vector<Hello> ask_host(const Discovery& me, const Hello& hello, TimePoint until,
                            std::uint64_t& session) {
  auto pause = std::chrono::milliseconds(1);
  bool reached = false;
  while (std::chrono::steady_clock::now() < until) {
    const UniqueFd link = try_connect_tcp(me.address, me.port, until);
    Answer answer;
    if (link && send_all(link.get(), bytes_of(hello))) {
      reached = true;
      // Rank 0 answers when the last rank has come or its own deadline has passed.
      if (receive_all(link.get(), writable(answer), until + std::chrono::milliseconds(500)) &&
          answer.magic == kMagic) {
        if (answer.verdict != static_cast<std::uint32_t>(Verdict::kWelcome)) {
          throw_answer(me, answer);
        }
        std::vector<Hello> all(static_cast<std::size_t>(me.size));
        if (!receive_all(link.get(), std::as_writable_bytes(std::span(all)), until)) break;
        session = answer.session;
        return all;
      }
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(100));
  }
  throw_missing(me, 0, FaultCause::kDeadline,
                fmt::format("rank {} could not meet rank 0 at {}:{} before the deadline{}", me.rank,
                            me.address, me.port,
                            reached ? " (something answered there, but it was no team of this "
                                      "version or it hung up)"
                                    : " (nobody listened there)"));
}

}  // namespace

Meeting rendezvous(const Discovery& me, TimePoint until) {
  Hello mine;
  mine.rank = me.rank;
  mine.size = me.size;
  copy_text(mine.host, boot_id());
  const std::string name = fmt::format("penstock-{:016x}-{}", random_bits(), me.rank);
  copy_text(mine.socket, name);
  // Open before anybody can learn the name.
  const UniqueFd listener = listen_unix(name, me.size);

  std::uint64_t session = 0;
  std::vector<Hello> all;
  if (me.rank == 0) {
    session = random_bits();
    all = Host(me, mine).collect(until, session);
  } else {
    all = ask_host(me, mine, until, session);
  }

  Meeting meeting;
  meeting.peer.resize(all.size());
  for (int r = 0; r < me.rank; ++r) {
    const Hello& theirs = all[static_cast<std::size_t>(r)];
    UniqueFd link =
        connect_unix(std::string(theirs.socket, ::strnlen(theirs.socket, sizeof theirs.socket)));
    const Introduction introduction{session, me.rank};
    if (!link || !send_packet(link.get(), bytes_of(introduction), -1)) {
      throw_missing(me, r, FaultCause::kPeerDead,
                    fmt::format("rank {} hung up before the team was whole", r));
    }
    meeting.peer[static_cast<std::size_t>(r)] = std::move(link);
  }
  for (int left = me.size - 1 - me.rank; left > 0;) {
    UniqueFd link = accept_until(listener.get(), until);
    if (!link) {
      int missing = me.rank + 1;
      while (meeting.peer[static_cast<std::size_t>(missing)]) ++missing;
      throw_missing(
          me, missing, FaultCause::kDeadline,
          fmt::format("rank {} did not connect to rank {} before the deadline", missing, me.rank));
    }
    Introduction introduction;
    UniqueFd none;
    const auto received = receive_packet(link.get(), writable(introduction), none, until, {});
    if (received != Received::kPacket || introduction.session != session ||
        introduction.rank <= me.rank || introduction.rank >= me.size) {
      continue;  // not of this team
    }
    meeting.peer[static_cast<std::size_t>(introduction.rank)] = std::move(link);
    --left;
  }
  return meeting;
}

}  // namespace penstock::detail
