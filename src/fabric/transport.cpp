#include "penstock/fabric/transport.h"

#include <fmt/format.h>

#include "fabric/cpu/transports.h"
#include "fabric/transport_checks.h"
#include "penstock/core/error.h"

namespace penstock {

std::string_view to_string(TransportKind kind) {
  switch (kind) {
    case TransportKind::kCopyEngine:
      return "copy_engine";
    case TransportKind::kSm:
      return "sm";
    case TransportKind::kDirect:
      return "direct";
  }
  return "unknown";
}

TransportKind parse_transport(std::string_view text) {
  for (const auto kind : {TransportKind::kCopyEngine, TransportKind::kSm, TransportKind::kDirect}) {
    if (text == to_string(kind)) return kind;
  }
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("transport '{}': give copy_engine, sm or direct", text));
}

void Transport::signal(int peer, std::uint64_t signal_offset, std::uint64_t epoch) {
  PutDescriptor descriptor;
  descriptor.peer = peer;
  descriptor.signal_offset = signal_offset;
  descriptor.signal_epoch = epoch;
  put(descriptor);
}

namespace detail {

void check_put(const Window& window, const PutDescriptor& put, std::string_view transport) {
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{} put into window {}: {}", transport, window.layout().name(), why));
  };
  const std::uint64_t size = window.bytes();
  if (put.peer < 0 || put.peer >= window.team()->size()) {
    refuse(fmt::format("peer {} is no rank of a team of {}", put.peer, window.team()->size()));
  }
  if (put.bytes > size || put.src_offset > size - put.bytes) {
    refuse(fmt::format("source [{}, +{}) passes the window's {} bytes", put.src_offset, put.bytes,
                       size));
  }
  if (put.dst_offset > size - put.bytes) {
    refuse(fmt::format("destination [{}, +{}) passes the window's {} bytes", put.dst_offset,
                       put.bytes, size));
  }
  if (put.signal_offset != kNoSignal) {
    if (size < 8 || put.signal_offset > size - 8 || put.signal_offset % 8 != 0) {
      refuse(fmt::format("signal word at {}: give a multiple of 8 up to {}", put.signal_offset,
                         size - 8));
    }
    if (put.signal_epoch == kNoEpoch) refuse("signal of epoch 0: epochs start at 1");
  } else if (put.bytes == 0) {
    refuse("neither data nor a signal");
  }
  if (put.flags != 0) refuse(fmt::format("flags {:#x} are reserved: give 0", put.flags));
}

}  // namespace detail

std::unique_ptr<Transport> make_cpu_transport(TransportKind kind, std::shared_ptr<Window> window,
                                              const CpuEngineOptions& engine) {
  require(window != nullptr && window->backend() == Backend::kCpu, ErrorKind::kInvalidArgument,
          [] { return std::string("a CPU transport needs a window in host memory"); });
  switch (kind) {
    case TransportKind::kCopyEngine:
      return detail::make_cpu_copy_engine(std::move(window), engine);
    case TransportKind::kSm:
      return detail::make_cpu_sm_transport(std::move(window));
    case TransportKind::kDirect:
      return detail::make_cpu_direct_transport(std::move(window));
  }
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("transport kind {} is not known", static_cast<int>(kind)));
}

}  // namespace penstock
