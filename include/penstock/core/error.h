// Errors: one typed exception for everything that a caller can act on, and the record that a failed
// wait leaves.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "penstock/core/fault_record.h"

namespace penstock {

// What went wrong, by what the caller can do about it.
enum class ErrorKind : std::uint8_t {
  kInvalidArgument,  // the call is wrong: the text names the value and what is accepted
  kUnsupported,      // the call is right, this build or machine cannot do it: the text says why and
                     // what would
  kResourceExhausted,  // memory, descriptors, threads: the text says how much was asked for
  kFault,              // a wait's deadline passed or a peer died: a FaultRecord comes with it
  kBackend,  // the operating system, driver or a library refused: the text carries its words
};

// Returns the kind's name as it appears in messages and JSON, e.g. "invalid_argument".
std::string_view to_string(ErrorKind kind);

// The one exception type of the library. what() is a full sentence: value, reason, remedy.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

std::string_view to_string(FaultCause cause);

// Says a record in words: "rank 2 waited 5.0 s for rank 0 in op 3 stage 1, region 4[17]: expected
// epoch 9, saw 8".
std::string describe(const FaultRecord& record);

// Error of kind kFault with its record.
class Fault : public Error {
 public:
  explicit Fault(const FaultRecord& record, std::string_view context = {});
  const FaultRecord& record() const noexcept { return record_; }

 private:
  FaultRecord record_;
};

// Throws Error(kInvalidArgument, message) unless ok. The message is only built on failure when
// passed as a callable.
[[noreturn]] void throw_error(ErrorKind kind, const std::string& message);

template <typename MakeMessage>
void require(bool ok, ErrorKind kind, MakeMessage&& make_message) {
  if (!ok) [[unlikely]] {
    throw_error(kind, make_message());
  }
}

}  // namespace penstock
