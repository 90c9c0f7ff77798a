// gpu_bench_link(): what the link and the transports give, measured on the GPUs.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "fabric/cuda/copy_engine.h"
#include "fabric/cuda/device_packets.h"
#include "fabric/cuda/device_rank.h"
#include "fabric/cuda/link_kernels_sm90.h"
#include "fabric/cuda/link_timer.h"
#include "fabric/cuda/nccl_link.h"
#include "fabric/cuda/packet_all_reduce_sm90.h"
#include "fabric/cuda/pattern_sm90.h"
#include "fabric/cuda/put_sm90.h"
#include "fabric/gpu.h"
#include "penstock/core/error.h"
#include "penstock/fabric/region_table.h"

namespace penstock {
namespace cuda {
namespace {

constexpr std::uint64_t kChunk =
    16 * 7 * 12872;  // 1.44 MB: 16 tiles of rows, the chunk of the expert layer
constexpr int kBurst = 16;
constexpr std::uint64_t kLargestBurst = 4ULL << 20;

// Between ranks 0 and 1. Signal words lie a line apart.
struct GpuLinkShape {
  std::uint64_t bytes = 0;
};
enum GpuLinkRegion : int { kFrom = 0, kTo = 1, kWords = 2 };
enum GpuLinkWord : int { kArrivedWord = 0, kAnswerWord = 1, kSmWord = 2, kWordCount = 3 };
constexpr RegionTable<GpuLinkShape, 3> kGpuLinkTable{
    "gpu_link",
    {{"from", [](const GpuLinkShape& s) { return s.bytes; }, 256, Access::kOwner, Access::kOwner},
     {"to", [](const GpuLinkShape& s) { return s.bytes; }, 256, Access::kPeers, Access::kOwner},
     {"words", [](const GpuLinkShape&) { return kWordCount * kDeviceLineBytes; }, kDeviceLineBytes,
      Access::kPeers, Access::kOwner}}};

std::string direction(bool both) { return both ? "both" : "one"; }
std::int64_t integer(std::uint64_t x) { return static_cast<std::int64_t>(x); }

double median(std::vector<double> values) {
  return values.empty() ? 0.0 : summarise(values).median_us;
}

// One rank of the benchmark. Every function is collective: ranks past the first two only keep the
// barriers' count.
class LinkBench {
 public:
  LinkBench(TeamHandle team, int device, const GpuLinkOptions& options)
      : team_(std::move(team)),
        options_(options),
        rank_(DeviceRank::create(team_, device)),
        capacity_(std::max<std::uint64_t>(options.max_bytes, kBurst * kLargestBurst)),
        window_(Window::create(team_,
                               Layout::from(kGpuLinkTable, GpuLinkShape{capacity_},
                                            fmt::format("bytes={}", capacity_)),
                               device_window_backend(device))),
        mapping_(device_mapping(*window_)),
        peer_(team_->rank() < 2 ? 1 - team_->rank() : 0) {
    collectively(*team_, [&] {
      PENSTOCK_CUDA_CHECK(load_link_kernels());
      PENSTOCK_CUDA_CHECK(load_packet_kernels());
      PENSTOCK_CUDA_CHECK(load_pattern_kernels());
      PENSTOCK_CUDA_CHECK(load_sm_put());
      engine_ = std::make_unique<DeviceCopyEngine>(rank_, window_);
      stream_ = std::make_unique<OwnedStream>();
      timer_ = std::make_unique<LinkTimer>();
      rank_->prepare(stream_->handle);
      PENSTOCK_CUDA_CHECK(launch_fill(words_of(window_->region(team_->rank(), kFrom)),
                                      capacity_ / 8, seed_of(team_->rank()), rank_->sms(),
                                      stream_->handle));
      stream_->wait();
    });
    for (int r = 0; r < team_->size(); ++r) {
      shared_ = shared_ || (r != team_->rank() && mapping_->same_device(r));
    }
    shared_ = !team_->agree(!shared_);
    local_ = team_->agree(!plays() || mapping_->same_device(peer_));
    std::vector<int> sms(static_cast<std::size_t>(team_->size()));
    const int mine = rank_->sms();
    team_->all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(sms)));
    most_ctas_ = std::min(sms[0], sms[1]);
  }

  GpuLinkBench run() {
    std::vector<std::uint64_t> sizes;
    for (std::uint64_t bytes = options_.min_bytes; bytes <= options_.max_bytes; bytes *= 2) {
      sizes.push_back(bytes);
    }
    if (kChunk > options_.min_bytes && kChunk < options_.max_bytes) sizes.push_back(kChunk);
    std::sort(sizes.begin(), sizes.end());
    probes();
    latencies();
    // Two ranks of one GPU have no link with two directions.
    for (const bool both : {false, true}) {
      if (both && local_) continue;
      for (const std::uint64_t bytes : sizes) copy_engine_rate(bytes, both);
    }
    for (const int ctas : {1, 4, 8, 16, 32, 132}) {
      if (ctas > most_ctas_) continue;
      for (const std::uint64_t bytes : sizes) sm_rate(bytes, ctas, false);
    }
    if (!local_) {
      for (const std::uint64_t bytes : sizes) sm_rate(bytes, kSmPutBlocks, true);
    }
    for (const int ctas : {8, most_ctas_}) {
      if (ctas == most_ctas_ && ctas <= 8) continue;  // eight are the first curve
      for (const std::uint64_t bytes : sizes) direct_rate(bytes, ctas);
    }
    busy_beside_copies();
    latency_when_occupied();
    packets();
    GpuLinkBench out;
    out.nccl = bench_nccl(*team_, shared_, options_.nccl, sizes, std::min(options_.samples, 8),
                          [&](const std::string& figure, const std::string& unit,
                              std::vector<double> values, Conditions conditions) {
                            add(figure, unit, std::move(values), std::move(conditions));
                          });
    team_->barrier();
    out.figures = std::move(figures_);
    return out;
  }

 private:
  using Conditions = std::vector<std::pair<std::string, LinkValue>>;

  bool plays() const { return team_->rank() < 2; }
  bool lead() const { return team_->rank() == 0; }
  static std::uint64_t* words_of(std::byte* at) { return reinterpret_cast<std::uint64_t*>(at); }
  static std::uint64_t seed_of(int rank) { return static_cast<std::uint64_t>(rank) + 1; }
  std::uint64_t* word(int rank, int index) const {
    return words_of(window_->region(rank, kWords) +
                    static_cast<std::uint64_t>(index) * kDeviceLineBytes);
  }
  std::byte* from() const { return window_->region(team_->rank(), kFrom); }
  std::byte* to_peer() const { return window_->region(peer_, kTo); }

  void add(const std::string& figure, const std::string& unit, std::vector<double> values,
           Conditions conditions) {
    if (!lead()) return;
    const Samples s = summarise(values);
    LinkFigure out{figure, unit, s.count, s.median_us, s.p10_us, s.p90_us, {}};
    out.conditions = {{"ranks", std::int64_t{team_->size()}},
                      {"placement", std::string(local_ ? "one GPU" : "a GPU each")}};
    out.conditions.insert(out.conditions.end(), conditions.begin(), conditions.end());
    figures_.push_back(std::move(out));
  }

  // Before a rate is measured the receiver forgets; after it every byte must be the sender's.
  void forget(std::uint64_t bytes, bool both) {
    if (receives(both)) zero_device(window_->region(team_->rank(), kTo), bytes);
    team_->barrier();
  }
  void verify(std::uint64_t bytes, bool both, const char* what) {
    team_->barrier();
    collectively(*team_, [&] {
      if (!receives(both)) return;
      DeviceBuffer<std::uint64_t> result(std::vector<std::uint64_t>{~0ULL, 0, 1});
      Receive args;
      args.guard = rank_->guard_view(1);
      args.word = result.data() + 2;  // already there: the senders have finished
      args.epoch = 1;
      args.data = words_of(window_->region(team_->rank(), kTo));
      args.words = bytes / 8;
      args.seed = seed_of(peer_);
      args.first_wrong = result.data();
      args.status = reinterpret_cast<std::uint32_t*>(result.data() + 1);
      PENSTOCK_CUDA_CHECK(launch_receive(args, rank_->sms(), stream_->handle));
      stream_->wait();
      std::uint64_t wrong = 0;
      read_device(&wrong, result.data(), sizeof(wrong));
      require(wrong == ~0ULL, ErrorKind::kBackend, [&] {
        return fmt::format("{}: of {} bytes from rank {}, byte {} is wrong", what, bytes, peer_,
                           wrong * 8);
      });
    });
  }
  bool receives(bool both) const { return plays() && (both || !lead()); }
  bool sends(bool both) const { return plays() && (both || lead()); }

  void probes() {
    const SignalProbe& probe = rank_->signal_probe(peer_);
    add("signal_probe", "us", {probe.device_copy_us},
        {{"signal", std::string("device_copy")},
         {"method", std::string("4 KB copy and signal, back to back")}});
    if (probe.stream_write_us >= 0) {
      add("signal_probe", "us", {probe.stream_write_us},
          {{"signal", std::string("stream_write")},
           {"method", std::string("4 KB copy and signal, back to back")}});
    }
  }

  void copy_engine_rate(std::uint64_t bytes, bool both) {
    forget(bytes, both);
    const int repeats = repeats_of(bytes);
    std::vector<double> rate;
    for (int sample = 0; sample <= options_.samples; ++sample) {
      team_->barrier();
      if (!sends(both)) continue;
      const double seconds = timer_->seconds(rank_->proxy()->stream(), [&] {
        for (int i = 0; i < repeats; ++i) {
          check(rank_->proxy()->copy(to_peer(), from(), bytes, local_), "copy");
        }
      });
      if (sample > 0) rate.push_back(static_cast<double>(bytes) * repeats / seconds * 1e-9);
    }
    verify(bytes, both, "copy engine");
    add("rate", "GB/s", std::move(rate),
        {{"transport", std::string("copy_engine")},
         {"bytes", integer(bytes)},
         {"direction", direction(both)},
         {"method", std::string("back-to-back copies enqueued by the host")}});
  }

  void sm_rate(std::uint64_t bytes, int ctas, bool both) {
    forget(bytes, both);
    const int repeats = std::max(3, repeats_of(bytes) / (ctas < 8 ? 4 : 1));
    DeviceBuffer<std::uint32_t> arrivals(std::vector<std::uint32_t>{0});
    SmPut put;
    put.dst = to_peer();
    put.src = from();
    put.bytes = bytes;
    put.word = word(peer_, kSmWord);
    put.epoch = 1;
    put.arrivals = arrivals.data();
    std::vector<double> rate;
    for (int sample = 0; sample <= std::min(options_.samples, 8); ++sample) {
      team_->barrier();
      if (!sends(both)) continue;
      const double seconds = timer_->seconds(stream_->handle, [&] {
        for (int i = 0; i < repeats; ++i) {
          PENSTOCK_CUDA_CHECK(launch_sm_put(put, ctas, stream_->handle));
        }
      });
      if (sample > 0) rate.push_back(static_cast<double>(bytes) * repeats / seconds * 1e-9);
    }
    verify(bytes, both, "copy CTAs");
    add("rate", "GB/s", std::move(rate),
        {{"transport", std::string("sm")},
         {"bytes", integer(bytes)},
         {"ctas", std::int64_t{ctas}},
         {"direction", direction(both)},
         {"method", std::string("back-to-back launches, signal behind each")}});
  }

  // Stores of the kernel that makes the data: nothing is read.
  void direct_rate(std::uint64_t bytes, int ctas) {
    forget(bytes, false);
    const int repeats = std::max(3, repeats_of(bytes));
    std::vector<double> rate;
    for (int sample = 0; sample <= std::min(options_.samples, 8); ++sample) {
      team_->barrier();
      if (!sends(false)) continue;
      const double seconds = timer_->seconds(stream_->handle, [&] {
        for (int i = 0; i < repeats; ++i) {
          PENSTOCK_CUDA_CHECK(launch_fill(words_of(to_peer()), bytes / 8, seed_of(team_->rank()),
                                          ctas, stream_->handle));
        }
      });
      if (sample > 0) rate.push_back(static_cast<double>(bytes) * repeats / seconds * 1e-9);
    }
    verify(bytes, false, "direct stores");
    add("rate", "GB/s", std::move(rate),
        {{"transport", std::string("direct")},
         {"bytes", integer(bytes)},
         {"ctas", std::int64_t{ctas}},
         {"direction", direction(false)},
         {"method", std::string("back-to-back launches of a kernel that computes and stores")}});
  }

  static int repeats_of(std::uint64_t bytes) {
    return static_cast<int>(std::clamp<std::uint64_t>((256ULL << 20) / bytes, 3, 64));
  }

  struct Trip {
    std::uint64_t bytes = 0;
    bool direct = false;  // a store instead of a descriptor
    int burst = 1;
    bool together = false;  // the burst posted by one post_many() instead of one post() each
    int rounds = 250;
    const OccupyArgs* occupy = nullptr;
    cudaStream_t occupied = nullptr;
    int sms = 0;
  };
  // Microseconds of round trips, on rank 0: put and signal there, one direct store back.
  std::vector<double> round_trips(const Trip& trip) {
    DeviceBuffer<std::uint32_t> cycles(static_cast<std::size_t>(trip.rounds));
    DeviceBuffer<std::uint64_t> clock(4);
    DeviceBuffer<std::uint32_t> status(std::vector<std::uint32_t>{0});
    EchoArgs args;
    args.guard = rank_->guard_view(1);
    if (!trip.direct) args.ring = engine_->ring_view();
    args.put.peer = peer_;
    args.put.src_offset = window_->layout().region(kFrom).offset;
    args.put.dst_offset = window_->layout().region(kTo).offset;
    args.put.bytes = trip.bytes;
    args.put.signal_offset = window_->layout().region(kWords).offset;
    args.peer_word = word(peer_, kArrivedWord);
    args.own_word = lead() ? word(0, kAnswerWord) : word(team_->rank(), kArrivedWord);
    args.answer_word = word(peer_, kAnswerWord);
    args.first = epoch_;
    args.rounds = trip.rounds;
    args.burst = trip.burst;
    args.together = trip.together;
    args.stride = trip.bytes;
    args.cycles = cycles.data();
    args.clock = clock.data();
    args.status = status.data();
    if (trip.occupy != nullptr) {
      args.start_word = trip.occupy->arrived;
      args.start_value = static_cast<std::uint64_t>(trip.occupy->enough);
      args.end_word = trip.occupy->end;
    }
    epoch_ += static_cast<std::uint64_t>(trip.rounds);
    team_->barrier();
    if (plays()) {
      PENSTOCK_CUDA_CHECK(lead() ? launch_measure(args, stream_->handle)
                                 : launch_answer(args, stream_->handle));
      rank_->track(stream_->handle);
      if (trip.occupy != nullptr) {
        // On a shared GPU the answering kernel needs its place first.
        if (local_) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        PENSTOCK_CUDA_CHECK(launch_occupy(*trip.occupy, 2 * trip.sms, trip.occupied));
        rank_->track(trip.occupied);
      }
      stream_->wait();
    }
    std::uint32_t failed = 0;
    read_device(&failed, status.data(), sizeof(failed));
    collectively(*team_, [&] {
      require(failed == 0, ErrorKind::kBackend,
              [] { return std::string("a wait of the latency kernel failed"); });
    });
    std::vector<double> us;
    if (lead()) {
      std::vector<std::uint32_t> host(static_cast<std::size_t>(trip.rounds));
      std::uint64_t ends[4] = {};
      read_device(host.data(), cycles.data(), cycles.bytes());
      read_device(ends, clock.data(), sizeof(ends));
      const double us_per_cycle =
          static_cast<double>(ends[3] - ends[1]) / static_cast<double>(ends[2] - ends[0]) * 1e-3;
      // The first rounds find the proxy asleep and the pages cold.
      for (std::size_t i = host.size() / 5; i < host.size(); ++i) {
        us.push_back(host[i] * us_per_cycle);
      }
    }
    team_->barrier();
    return us;
  }

  void latencies() {
    std::vector<double> flag = round_trips({.direct = true, .rounds = 400});
    for (double& x : flag) x /= 2;
    const double one_way = median(flag);
    add("flag_one_way", "us", std::move(flag),
        {{"transport", std::string("direct")},
         {"method", std::string("half of a ping-pong of st.release.sys / ld.acquire.sys")}});
    for (const std::uint64_t bytes : {std::uint64_t{8}, std::uint64_t{4096}, std::uint64_t{65536},
                                      std::uint64_t{1} << 20, kChunk, std::uint64_t{4} << 20}) {
      std::vector<double> us = round_trips({.bytes = bytes});
      for (double& x : us) x -= one_way;
      add("descriptor_to_visible", "us", std::move(us),
          {{"transport", std::string("copy_engine")},
           {"bytes", integer(bytes)},
           {"signal", std::string(to_string(rank_->signal_probe(peer_).chosen))},
           {"method",
            std::string("post in a kernel to signal seen by a kernel: round trip less half a flag "
                        "ping-pong")}});
    }
    for (const std::uint64_t bytes : {kChunk, kLargestBurst}) {
      for (const bool together : {false, true}) burst(bytes, together, one_way);
    }
  }

  void burst(std::uint64_t bytes, bool together, double one_way) {
    const TransportCounters before = engine_->counters();
    std::vector<double> rate =
        round_trips({.bytes = bytes, .burst = kBurst, .together = together, .rounds = 60});
    engine_->quiet();
    const TransportCounters after = engine_->counters();
    for (double& x : rate) x = static_cast<double>(bytes) * kBurst / (x - one_way) * 1e-3;
    add("burst_rate", "GB/s", std::move(rate),
        {{"transport", std::string("copy_engine")},
         {"bytes", integer(bytes)},
         {"descriptors", std::int64_t{kBurst}},
         {"puts", integer(after.puts - before.puts)},
         {"copies", integer(after.copies - before.copies)},
         {"method", fmt::format("16 adjacent descriptors posted by one thread {}, first post to "
                                "last signal",
                                together ? "at once" : "one by one")}});
  }

  // The same with every thread slot of the measuring GPU taken by a kernel that waits: does the
  // copy engine need SMs?
  void latency_when_occupied() {
    DeviceBuffer<std::uint64_t> words(std::vector<std::uint64_t>(32, 0));
    const OwnedStream occupied;
    rank_->prepare(occupied.handle);
    team_->barrier();
    int sms = 0;
    PENSTOCK_CUDA_CHECK(
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, rank_->device()));
    const OccupyArgs args{rank_->guard_view(3), words.data(), words.data() + 16, 2 * sms - 2};
    std::vector<double> us = round_trips({.bytes = 65536,
                                          .occupy = lead() ? &args : nullptr,
                                          .occupied = occupied.handle,
                                          .sms = sms});
    occupied.wait();
    add("round_trip_when_occupied", "us", std::move(us),
        {{"transport", std::string("copy_engine")},
         {"bytes", std::int64_t{65536}},
         {"method", std::string("post to answer, with 2048 threads resident on every SM of the "
                                "posting GPU")}});
  }

  void packets() {
    constexpr std::uint64_t kRowPackets = 1024;  // 6144 bf16
    constexpr std::uint64_t kInputs = 4;
    if (team_->size() > 8) return;
    DevicePackets mailboxes(rank_, 16 * kRowPackets);
    std::vector<std::uint16_t> host(16 * 6144 * kInputs);
    std::minstd_rand random(static_cast<unsigned>(team_->rank()) + 7);
    for (auto& x : host) {  // +-[0.5, 2)
      x = static_cast<std::uint16_t>(0x3f00 + random() % 256 + (random() % 2 << 15));
    }
    DeviceBuffer<std::uint16_t> in(host);
    DeviceBuffer<std::uint16_t> out(host.size());
    DeviceBuffer<std::uint64_t> words(std::vector<std::uint64_t>(32, 0));
    DeviceBuffer<std::uint32_t> status(std::vector<std::uint32_t>{0});
    PacketCalls args;
    args.guard = rank_->guard_view(2);
    args.packets = mailboxes.view();
    args.epoch = words.data();
    args.barrier = words.data() + 16;
    args.status = status.data();
    args.in = reinterpret_cast<const std::uint32_t*>(in.data());
    args.out = reinterpret_cast<std::uint32_t*>(out.data());
    args.inputs = kInputs;
    args.calls = 2000;
    for (const std::uint64_t rows : {1, 2, 4, 8, 16}) {
      args.count = rows * kRowPackets;
      const int blocks = std::min<int>(static_cast<int>(args.count) / kPacketThreads, rank_->sms());
      for (const bool two_shot : {false, true}) {
        args.two_shot = two_shot;
        std::vector<double> us;
        for (int sample = 0; sample <= std::min(options_.samples, 10); ++sample) {
          team_->barrier();
          const double seconds = timer_->seconds(stream_->handle, [&] {
            PENSTOCK_CUDA_CHECK(launch_packet_calls(args, blocks, stream_->handle));
            rank_->track(stream_->handle);
          });
          if (sample > 0) us.push_back(seconds * 1e6 / static_cast<double>(args.calls));
        }
        std::uint32_t failed = 0;
        read_device(&failed, status.data(), 4);
        collectively(*team_, [&] {
          require(failed == 0, ErrorKind::kBackend,
                  [] { return std::string("a packet all-reduce failed"); });
        });
        add("packet_all_reduce", "us", std::move(us),
            {{"rows", integer(rows)},
             {"hidden", std::int64_t{6144}},
             {"kind", std::string(two_shot ? "two_shot" : "one_shot")},
             {"blocks", std::int64_t{blocks}},
             {"method", std::string("2000 calls in one launch, input read from and result written "
                                    "to memory in each")}});
      }
    }
    team_->barrier();
  }

  // A kernel of tensor-core products with and without copies that never pause, interleaved.
  void busy_beside_copies() {
    std::vector<double> alone;
    std::vector<double> beside;
    std::vector<double> copied;
    double flop = 0;
    if (lead()) {
      constexpr std::uint64_t kBytes = 512ULL << 20;
      constexpr int kCopies = 1500;
      DeviceBuffer<std::uint16_t> data(kBytes / 2);
      std::vector<std::uint16_t> noise(kBytes / 2);
      std::minstd_rand random(5);
      for (auto& x : noise) {
        x = static_cast<std::uint16_t>(0x3e00 + random() % 512 + (random() % 2 << 15));
      }
      write_device(data.data(), noise.data(), kBytes);
      int sms = 0;
      PENSTOCK_CUDA_CHECK(
          cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, rank_->device()));
      DeviceBuffer<float> sink(static_cast<std::size_t>(sms) * 256);
      const BusyArgs args{data.data(), kBytes, 6000, sink.data()};
      flop = busy_flop(args, sms);
      const LinkTimer copy_timer;
      const LinkTimer under_way;
      cudaStream_t copies_stream = rank_->proxy()->stream();
      for (int sample = 0; sample < 8; ++sample) {
        for (const bool copies : {false, true}) {
          stream_->wait();
          PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(copies_stream));
          if (copies) {
            copy_timer.start.record(copies_stream);
            for (int i = 0; i < kCopies; ++i) {
              if (i == 20) under_way.start.record(copies_stream);
              check(rank_->proxy()->copy(to_peer(), from(), kChunk, local_), "copy");
            }
            copy_timer.stop.record(copies_stream);
            under_way.start.hold(stream_->handle);
          }
          const double seconds = timer_->seconds(stream_->handle, [&] {
            PENSTOCK_CUDA_CHECK(launch_busy(args, sms, stream_->handle));
          });
          PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(copies_stream));
          if (sample == 0) continue;
          (copies ? beside : alone).push_back(seconds * 1e3);
          if (copies) {
            copied.push_back(static_cast<double>(kChunk) * kCopies / copy_timer.elapsed() * 1e-9);
          }
        }
      }
      const double slow = (median(beside) / median(alone) - 1) * 100;
      add("busy_kernel", "ms", alone,
          {{"copies", std::string("none")},
           {"tflops", flop / (median(alone) * 1e-3) * 1e-12},
           {"method", std::string("m16n8k16 bf16 on tiles streamed from 512 MB, all SMs")}});
      add("busy_kernel", "ms", std::move(beside),
          {{"copies", std::string("1.44 MB by copy engine throughout")},
           {"slowdown_percent", slow},
           {"method", std::string("interleaved with the above")}});
      add("rate_beside_kernel", "GB/s", std::move(copied),
          {{"transport", std::string("copy_engine")},
           {"bytes", integer(kChunk)},
           {"method", std::string("back-to-back copies while every SM computes")}});
    }
    team_->barrier();
  }

  TeamHandle team_;
  GpuLinkOptions options_;
  std::shared_ptr<DeviceRank> rank_;
  std::uint64_t capacity_;
  std::shared_ptr<Window> window_;
  std::shared_ptr<DeviceWindowMapping> mapping_;
  int peer_;             // of ranks 0 and 1; rank 0 for the others
  bool shared_ = false;  // some ranks share a GPU
  bool local_ = false;   // ranks 0 and 1 do
  int most_ctas_ = 1;    // that both ranks of the link may launch
  std::unique_ptr<DeviceCopyEngine> engine_;
  std::unique_ptr<OwnedStream> stream_;
  std::unique_ptr<LinkTimer> timer_;
  std::uint64_t epoch_ = 1;
  std::vector<LinkFigure> figures_;
};

}  // namespace
}  // namespace cuda

GpuLinkBench gpu_bench_link(const TeamHandle& team, int device, const GpuLinkOptions& options) {
  collectively(*team, [&] {
    require(team->size() >= 2, ErrorKind::kInvalidArgument,
            [] { return std::string("a link has two ends: give at least 2 ranks"); });
    require(options.min_bytes >= 8 && options.min_bytes % 8 == 0 &&
                options.max_bytes >= options.min_bytes && options.max_bytes <= (1ULL << 32),
            ErrorKind::kInvalidArgument, [&] {
              return fmt::format(
                  "sizes from {} to {} bytes: give multiples of 8, in order, up to 2^32",
                  options.min_bytes, options.max_bytes);
            });
    require(options.samples >= 1, ErrorKind::kInvalidArgument,
            [&] { return fmt::format("{} samples: give at least 1", options.samples); });
    cuda::require_sm90(device);
  });
  const cuda::ScopedDevice scope(device);
  return cuda::LinkBench(team, device, options).run();
}

}  // namespace penstock
