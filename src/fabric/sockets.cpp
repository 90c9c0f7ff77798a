#include "fabric/sockets.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "penstock/core/error.h"

namespace penstock::detail {
namespace {

int poll_ms(TimePoint until) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 1000));
}

sockaddr_in resolve(const std::string& address, int port) {
  sockaddr_in out{};
  out.sin_family = AF_INET;
  out.sin_port = htons(static_cast<std::uint16_t>(port));
  if (::inet_pton(AF_INET, address.c_str(), &out.sin_addr) == 1) return out;
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(address.c_str(), nullptr, &hints, &found);
  require(error == 0 && found != nullptr, ErrorKind::kInvalidArgument, [&] {
    return fmt::format("rendezvous address '{}' cannot be resolved: {}", address,
                       ::gai_strerror(error));
  });
  std::memcpy(&out.sin_addr, &reinterpret_cast<const sockaddr_in*>(found->ai_addr)->sin_addr,
              sizeof out.sin_addr);
  ::freeaddrinfo(found);
  return out;
}

std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& name) {
  sockaddr_un out{};
  out.sun_family = AF_UNIX;
  // A leading zero byte selects the abstract namespace; the length says where the name ends.
  std::memcpy(out.sun_path + 1, name.data(), std::min(name.size(), sizeof out.sun_path - 1));
  return {out, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

}  // namespace

void throw_system(const std::string& what) {
  const int error = errno;
  const auto kind = error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS
                        ? ErrorKind::kResourceExhausted
                        : ErrorKind::kBackend;
  throw Error(kind, fmt::format("{}: {}", what, std::strerror(error)));
}

bool wait_readable(int fd, TimePoint until) {
  while (true) {
    pollfd entry{fd, POLLIN, 0};
    const int ready = ::poll(&entry, 1, poll_ms(until));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) throw_system("poll");
    if (std::chrono::steady_clock::now() >= until) return false;
  }
}

UniqueFd listen_tcp(const std::string& address, int port, int backlog) {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) throw_system("could not make a TCP socket");
  const int one = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  const sockaddr_in at = resolve(address, port);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at) != 0 ||
      ::listen(fd.get(), backlog) != 0) {
    throw_system(
        fmt::format("rank 0 cannot listen at {}:{}; choose a free port with --port or MASTER_PORT",
                    address, port));
  }
  return fd;
}

UniqueFd try_connect_tcp(const std::string& address, int port, TimePoint until) {
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw_system("could not make a TCP socket");
  const sockaddr_in at = resolve(address, port);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at) != 0) {
    if (errno != EINPROGRESS) return {};
    pollfd entry{fd.get(), POLLOUT, 0};
    if (::poll(&entry, 1, poll_ms(until)) <= 0) return {};
    int error = 0;
    socklen_t length = sizeof error;
    ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return {};
  }
  // A connect to a free port of the ephemeral range can meet itself.
  sockaddr_in here{};
  sockaddr_in there{};
  socklen_t here_size = sizeof here;
  socklen_t there_size = sizeof there;
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&here), &here_size) != 0 ||
      ::getpeername(fd.get(), reinterpret_cast<sockaddr*>(&there), &there_size) != 0 ||
      (here.sin_port == there.sin_port && here.sin_addr.s_addr == there.sin_addr.s_addr)) {
    return {};
  }
  return fd;
}

UniqueFd accept_until(int listener, TimePoint until) {
  while (wait_readable(listener, until)) {
    UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (fd) return fd;
    if (errno != EINTR && errno != ECONNABORTED && errno != EAGAIN) throw_system("accept");
  }
  return {};
}

UniqueFd listen_unix(const std::string& name, int backlog) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) throw_system("could not make a Unix socket");
  const auto [at, length] = abstract_address(name);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&at), length) != 0 ||
      ::listen(fd.get(), backlog) != 0) {
    throw_system(fmt::format("could not listen at the Unix socket @{}", name));
  }
  return fd;
}

UniqueFd connect_unix(const std::string& name) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd) throw_system("could not make a Unix socket");
  const auto [at, length] = abstract_address(name);
  int result = 0;
  do {
    result = ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&at), length);
  } while (result != 0 && errno == EINTR);
  if (result != 0) return {};
  return fd;
}

bool send_all(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && (errno == EINTR || errno == EAGAIN)) {
      pollfd entry{fd, POLLOUT, 0};
      if (::poll(&entry, 1, 1000) <= 0) return false;
      continue;
    }
    if (sent <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(sent));
  }
  return true;
}

bool receive_all(int fd, std::span<std::byte> bytes, TimePoint until) {
  while (!bytes.empty()) {
    if (!wait_readable(fd, until)) return false;
    const ssize_t got = ::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
  return true;
}

bool send_packet(int fd, std::span<const std::byte> bytes, int descriptor) {
  iovec vector{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(fd, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes.size());
}

Received receive_packet(int fd, std::span<std::byte> bytes, UniqueFd& descriptor, TimePoint until,
                        const std::function<bool()>& give_up) {
  while (true) {
    const auto slice =
        std::min(until, std::chrono::steady_clock::now() + std::chrono::milliseconds(20));
    if (wait_readable(fd, slice)) break;
    if (std::chrono::steady_clock::now() >= until || (give_up && give_up())) {
      return Received::kDeadline;
    }
  }
  iovec vector{bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got = 0;
  do {
    got = ::recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got != static_cast<ssize_t>(bytes.size())) return Received::kHungUp;
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    throw Error(ErrorKind::kResourceExhausted,
                "a passed descriptor was dropped: the process has too many open files");
  }
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    int passed = -1;
    std::memcpy(&passed, CMSG_DATA(header), sizeof passed);
    descriptor = UniqueFd(passed);
  }
  return Received::kPacket;
}

}  // namespace penstock::detail
