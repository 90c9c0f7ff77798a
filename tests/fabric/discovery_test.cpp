#include <gtest/gtest.h>

#include <map>
#include <string>

#include "penstock/fabric/team.h"

namespace penstock {
namespace {

using Variables = std::map<std::string, std::string>;

Discovery find(const Variables& variables, const TeamOptions& options = {}) {
  return discover(options, [&](const char* name) -> const char* {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  });
}

const Variables kSlurm{{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "1"}};
const Variables kPmi{{"PMI_RANK", "2"}, {"PMI_SIZE", "6"}};
const Variables kOmpi{{"OMPI_COMM_WORLD_RANK", "3"},
                      {"OMPI_COMM_WORLD_SIZE", "7"},
                      {"OMPI_COMM_WORLD_LOCAL_RANK", "2"}};
const Variables kTorch{{"RANK", "1"},
                       {"WORLD_SIZE", "4"},
                       {"LOCAL_RANK", "1"},
                       {"MASTER_ADDR", "10.0.0.1"},
                       {"MASTER_PORT", "29500"}};

TEST(DiscoveryTest, OrderIsFlagsTorchrunMpiSlurmNone) {
  Variables all;
  EXPECT_EQ(find(all).source, "none");
  EXPECT_EQ(find(all).size, 1);
  all.insert(kSlurm.begin(), kSlurm.end());
  EXPECT_EQ(find(all).source, "slurm");
  EXPECT_EQ(find(all).rank, 5);
  EXPECT_EQ(find(all).local_rank, 1);
  all.insert(kPmi.begin(), kPmi.end());
  EXPECT_EQ(find(all).source, "mpi");
  EXPECT_EQ(find(all).size, 6);
  EXPECT_EQ(find(all).local_rank, 2);
  all.insert(kOmpi.begin(), kOmpi.end());
  EXPECT_EQ(find(all).source, "mpi");
  EXPECT_EQ(find(all).size, 7);
  all.insert(kTorch.begin(), kTorch.end());
  EXPECT_EQ(find(all).source, "torchrun");
  EXPECT_EQ(describe(find(all)),
            "rank 1 of 4 (local rank 1) from torchrun, rendezvous at 10.0.0.1:29500");
  TeamOptions flags;
  flags.rank = 0;
  flags.size = 2;
  EXPECT_EQ(find(all, flags).source, "flags");
  EXPECT_EQ(find(all, flags).size, 2);
  EXPECT_EQ(find(all, flags).port, 29500);  // address and port have an order of their own
  flags.port = 1234;
  flags.address = "127.0.0.2";
  flags.local_rank = 3;
  EXPECT_EQ(describe(find(all, flags)),
            "rank 0 of 2 (local rank 3) from flags, rendezvous at 127.0.0.2:1234");
}

TEST(DiscoveryTest, DefaultsHoldWithoutAddressAndPort) {
  EXPECT_EQ(find(kPmi).address, "127.0.0.1");
  EXPECT_EQ(find(kPmi).port, kDefaultPort);
  // A SLURM batch script knows the size, but is no rank.
  EXPECT_EQ(find({{"SLURM_NTASKS", "8"}}).source, "none");
}

TEST(DiscoveryTest, MalformedVariablesAreRefusedByNameAndNeverSkipped) {
  const auto refuse = [](Variables variables, const std::string& word, TeamOptions options = {}) {
    variables.insert(kSlurm.begin(), kSlurm.end());  // a good source further down must not win
    try {
      (void)find(variables, options);
      ADD_FAILURE() << "accepted, expected: " << word;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  refuse({{"RANK", "1"}}, "RANK is set but WORLD_SIZE is not");
  refuse({{"WORLD_SIZE", "2"}}, "WORLD_SIZE is set but RANK is not");
  refuse({{"RANK", "one"}, {"WORLD_SIZE", "2"}}, "RANK='one'");
  refuse({{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK='2'");
  refuse({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, "RANK='-1'");
  refuse({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE='0'");
  refuse({{"RANK", "0"}, {"WORLD_SIZE", "65"}}, "WORLD_SIZE='65'");
  refuse({{"RANK", "0"}, {"WORLD_SIZE", "2x"}}, "WORLD_SIZE='2x'");
  refuse({{"RANK", "0"}, {"WORLD_SIZE", "99999999999999999999"}}, "WORLD_SIZE=");
  refuse({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "x"}}, "LOCAL_RANK='x'");
  refuse({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "70000"}}, "MASTER_PORT='70000'");
  refuse({{"PMI_RANK", "0"}}, "PMI_SIZE");
  refuse({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", ""}}, "OMPI_COMM_WORLD_SIZE");
  TeamOptions half;
  half.rank = 0;
  refuse({}, "both or neither", half);
  TeamOptions beyond;
  beyond.rank = 3;
  beyond.size = 3;
  refuse({}, "rank 3 of 3", beyond);
  TeamOptions many;
  many.rank = 0;
  many.size = 65;
  refuse({}, "65 ranks", many);
}

}  // namespace
}  // namespace penstock
