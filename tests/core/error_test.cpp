#include "penstock/core/error.h"

#include <gtest/gtest.h>

namespace penstock {
namespace {

TEST(ErrorTest, CarriesKindAndText) {
  try {
    throw_error(ErrorKind::kUnsupported, "no such thing: take another");
    FAIL() << "nothing thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_STREQ(error.what(), "no such thing: take another");
  }
}

TEST(ErrorTest, RequireBuildsTheMessageOnlyOnFailure) {
  int built = 0;
  const auto message = [&] {
    ++built;
    return std::string("bad");
  };
  require(true, ErrorKind::kInvalidArgument, message);
  EXPECT_EQ(built, 0);
  EXPECT_THROW(require(false, ErrorKind::kInvalidArgument, message), Error);
  EXPECT_EQ(built, 1);
}

TEST(ErrorTest, FaultNamesEveryFieldOfItsRecord) {
  FaultRecord record;
  record.rank = 2;
  record.peer = 5;
  record.op = 3;
  record.stage = 1;
  record.region = 4;
  record.index = 17;
  record.expected = 9;
  record.seen = 8;
  record.waited_ns = 1'500'000'000;
  record.cause = static_cast<std::uint32_t>(FaultCause::kDeadline);
  const Fault fault(record, "moe_stage2");
  EXPECT_EQ(fault.kind(), ErrorKind::kFault);
  EXPECT_STREQ(fault.what(),
               "moe_stage2: rank 2 waited 1.500 s for rank 5 in op 3 stage 1, region 4[17]: "
               "expected epoch 9, saw 8 "
               "(deadline passed)");
}

TEST(ErrorTest, EveryKindAndCauseHasItsOwnName) {
  EXPECT_EQ(to_string(ErrorKind::kInvalidArgument), "invalid_argument");
  EXPECT_EQ(to_string(ErrorKind::kUnsupported), "unsupported");
  EXPECT_EQ(to_string(ErrorKind::kResourceExhausted), "resource_exhausted");
  EXPECT_EQ(to_string(ErrorKind::kFault), "fault");
  EXPECT_EQ(to_string(ErrorKind::kBackend), "backend");
  EXPECT_EQ(to_string(FaultCause::kPeerDead), "peer is gone");
  EXPECT_EQ(to_string(FaultCause::kRingFull), "descriptor ring stayed full");
}

}  // namespace
}  // namespace penstock
