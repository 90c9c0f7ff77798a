#include "fabric/cuda/nccl_link.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "fabric/cuda/link_timer.h"
#include "fabric/cuda/nccl.h"
#include "penstock/core/error.h"

namespace penstock::cuda {
namespace {

// A rank's communicator and the buffers that it exchanges.
class LinkRank {
 public:
  LinkRank(Team& team, const Nccl& nccl, std::uint64_t bytes) : team_(team), n_(nccl) {
    collectively(team, [&] {
      from_ = DeviceBuffer<std::byte>(bytes);
      to_ = DeviceBuffer<std::byte>(bytes);
      from_.fill(1);
      to_.fill(0);
    });
    rank_.emplace(team, nccl);
  }

  void all_reduce(std::size_t elements) const {
    nccl_check(n_.all_reduce(from_.data(), to_.data(), elements, kNcclBf16, kNcclSum, rank_->comm(),
                             stream_.handle),
               "ncclAllReduce");
  }
  // Ranks 0 and 1: rank 0 to rank 1, or both at once.
  void send_recv(std::size_t bytes, bool both) const {
    const int peer = 1 - team_.rank();
    nccl_check(n_.group_start(), "ncclGroupStart");
    if (both || team_.rank() == 0)
      nccl_check(n_.send(from_.data(), bytes, kNcclChar, peer, rank_->comm(), stream_.handle),
                 "ncclSend");
    if (both || team_.rank() == 1)
      nccl_check(n_.recv(to_.data(), bytes, kNcclChar, peer, rank_->comm(), stream_.handle),
                 "ncclRecv");
    nccl_check(n_.group_end(), "ncclGroupEnd");
  }
  // Microseconds a call of `repeats` in one stream, warmed up.
  template <typename Call>
  std::vector<double> time_us(int samples, int repeats, Call&& call) const {
    std::vector<double> us;
    for (int sample = 0; sample <= samples; ++sample) {
      team_.barrier();
      const double seconds = timer_.seconds(stream_.handle, [&] {
        for (int i = 0; i < repeats; ++i) call();
      });
      if (sample > 0) us.push_back(seconds * 1e6 / repeats);
    }
    return us;
  }

 private:
  Team& team_;
  const Nccl& n_;
  DeviceBuffer<std::byte> from_;
  DeviceBuffer<std::byte> to_;
  OwnedStream stream_;
  LinkTimer timer_;
  std::optional<NcclRank> rank_;
};

}  // namespace

std::string bench_nccl(Team& team, bool shared, const std::string& library,
                       const std::vector<std::uint64_t>& sizes, int samples,
                       const FigureSink& add) {
  Nccl nccl;
  const std::string problem = open_nccl(team, shared, library, nccl);
  if (!problem.empty()) return "not measured: " + problem;
  std::string version;
  collectively(team, [&] { version = nccl_version(nccl); });
  const LinkRank rank(
      team, nccl,
      std::max<std::uint64_t>(*std::max_element(sizes.begin(), sizes.end()), 16 * 6144 * 2));
  for (const std::size_t rows : {1, 2, 4, 8, 16}) {
    add("nccl_all_reduce", "us", rank.time_us(samples, 200, [&] { rank.all_reduce(rows * 6144); }),
        {{"rows", static_cast<std::int64_t>(rows)},
         {"hidden", std::int64_t{6144}},
         {"nccl", version},
         {"method", std::string("200 eager calls in one stream")}});
  }
  for (const std::uint64_t bytes : sizes) {
    for (const bool both : {false, true}) {
      const int repeats = bytes > (64U << 20) ? 5 : 20;
      auto values = rank.time_us(samples, repeats, [&] {
        if (team.rank() < 2) rank.send_recv(bytes, both);
      });
      for (double& x : values) x = static_cast<double>(bytes) / x * 1e-3;
      add("rate", "GB/s", std::move(values),
          {{"transport", std::string("nccl")},
           {"bytes", static_cast<std::int64_t>(bytes)},
           {"direction", std::string(both ? "both" : "one")},
           {"nccl", version},
           {"method", fmt::format("{} eager send/recv in one stream", repeats)}});
    }
  }
  return version;
}

}  // namespace penstock::cuda
