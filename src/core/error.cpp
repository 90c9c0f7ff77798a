#include "penstock/core/error.h"

#include <fmt/format.h>

namespace penstock {

std::string_view to_string(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return "invalid_argument";
    case ErrorKind::kUnsupported:
      return "unsupported";
    case ErrorKind::kResourceExhausted:
      return "resource_exhausted";
    case ErrorKind::kFault:
      return "fault";
    case ErrorKind::kBackend:
      return "backend";
  }
  return "unknown";
}

std::string_view to_string(FaultCause cause) {
  switch (cause) {
    case FaultCause::kNone:
      return "none";
    case FaultCause::kDeadline:
      return "deadline passed";
    case FaultCause::kPeerDead:
      return "peer is gone";
    case FaultCause::kPeerAborted:
      return "peer aborted";
    case FaultCause::kRingFull:
      return "descriptor ring stayed full";
    case FaultCause::kTransport:
      return "transport failed";
  }
  return "unknown";
}

std::string describe(const FaultRecord& r) {
  return fmt::format(
      "rank {} waited {:.3f} s for rank {} in op {} stage {}, region {}[{}]: expected epoch {}, "
      "saw {} ({})",
      r.rank, static_cast<double>(r.waited_ns) * 1e-9, r.peer, r.op, r.stage, r.region, r.index,
      r.expected, r.seen, to_string(static_cast<FaultCause>(r.cause)));
}

Fault::Fault(const FaultRecord& record, std::string_view context)
    : Error(ErrorKind::kFault,
            context.empty() ? describe(record) : fmt::format("{}: {}", context, describe(record))),
      record_(record) {}

void throw_error(ErrorKind kind, const std::string& message) { throw Error(kind, message); }

}  // namespace penstock
