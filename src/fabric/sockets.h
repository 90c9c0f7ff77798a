// The few socket calls that a team of processes needs, each with a deadline and typed errors.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "penstock/fabric/team.h"

namespace penstock::detail {

using TimePoint = std::chrono::steady_clock::time_point;

// Throws Backend: "<what>: <errno's words>".
[[noreturn]] void throw_system(const std::string& what);

// Waits until fd is readable; false at the deadline.
bool wait_readable(int fd, TimePoint until);

// TCP. address: IPv4 dotted or a host name.
UniqueFd listen_tcp(const std::string& address, int port, int backlog);
// One attempt; empty while nobody listens.
UniqueFd try_connect_tcp(const std::string& address, int port, TimePoint until);
// Empty at the deadline.
UniqueFd accept_until(int listener, TimePoint until);

// Unix sockets of type SEQPACKET in the abstract namespace: no file, gone with the process.
UniqueFd listen_unix(const std::string& name, int backlog);
UniqueFd connect_unix(const std::string& name);

// Whole-message transfer on a stream. False: the peer hung up or the deadline passed.
bool send_all(int fd, std::span<const std::byte> bytes);
bool receive_all(int fd, std::span<std::byte> bytes, TimePoint until);

// One packet with at most one descriptor on a SEQPACKET socket.
bool send_packet(int fd, std::span<const std::byte> bytes, int descriptor);
enum class Received : std::uint8_t { kPacket, kDeadline, kHungUp };
// Waits no longer than `slice` at a time and calls give_up() in between; kDeadline if it says so.
Received receive_packet(int fd, std::span<std::byte> bytes, UniqueFd& descriptor, TimePoint until,
                        const std::function<bool()>& give_up);

}  // namespace penstock::detail
