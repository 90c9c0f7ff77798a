// Packets on the host: 12 bytes of payload that prove themselves by their tag. The device twin is
// packet_device.cuh (one 16-byte access each way).
#pragma once

#include <atomic>
#include <cstdint>

#include "penstock/fabric/protocol.h"

namespace penstock {

// Writes a packet: payload[0..1] relaxed, then {payload[2], tag} with release. A reader that finds
// the tag has the whole payload. One writer a slot; the slot must be free (protocol.h: parity).
inline void store_packet(Packet* slot, const std::uint32_t payload[3], std::uint32_t tag) noexcept {
  auto* halves = reinterpret_cast<std::uint64_t*>(slot);
  const std::uint64_t first = payload[0] | static_cast<std::uint64_t>(payload[1]) << 32;
  const std::uint64_t second = payload[2] | static_cast<std::uint64_t>(tag) << 32;
  std::atomic_ref<std::uint64_t>(halves[0]).store(first, std::memory_order_relaxed);
  std::atomic_ref<std::uint64_t>(halves[1]).store(second, std::memory_order_release);
}
// True and the payload if the slot holds this tag (acquire), else false and payload untouched.
inline bool load_packet(const Packet* slot, std::uint32_t tag, std::uint32_t payload[3]) noexcept {
  auto* halves = reinterpret_cast<std::uint64_t*>(const_cast<Packet*>(slot));
  const std::uint64_t second =
      std::atomic_ref<std::uint64_t>(halves[1]).load(std::memory_order_acquire);
  if (static_cast<std::uint32_t>(second >> 32) != tag) return false;
  const std::uint64_t first =
      std::atomic_ref<std::uint64_t>(halves[0]).load(std::memory_order_relaxed);
  payload[0] = static_cast<std::uint32_t>(first);
  payload[1] = static_cast<std::uint32_t>(first >> 32);
  payload[2] = static_cast<std::uint32_t>(second);
  return true;
}
// The slot's tag alone, relaxed: what a fault record says was seen.
inline std::uint32_t load_tag_relaxed(const Packet* slot) noexcept {
  auto* halves = reinterpret_cast<std::uint64_t*>(const_cast<Packet*>(slot));
  return static_cast<std::uint32_t>(
      std::atomic_ref<std::uint64_t>(halves[1]).load(std::memory_order_relaxed) >> 32);
}
// Empties a slot (tag 0). Relaxed: publish something with release before the sender may go on.
inline void clear_packet_relaxed(Packet* slot) noexcept {
  auto* halves = reinterpret_cast<std::uint64_t*>(slot);
  std::atomic_ref<std::uint64_t>(halves[1]).store(0, std::memory_order_relaxed);
  std::atomic_ref<std::uint64_t>(halves[0]).store(0, std::memory_order_relaxed);
}

}  // namespace penstock
