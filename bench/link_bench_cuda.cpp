// penstock_link_bench_cuda: what the link and the transports give, and what NCCL gives beside them
// in the same run. With two GPUs the ranks are on different ones; with one they share it, and
// figures are of that GPU's own memory. One JSON line a figure (--json FILE), one line of text a
// figure on standard output.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "fabric/cuda/copy_engine.h"
#include "fabric/cuda/device_packets.h"
#include "fabric/cuda/device_rank.h"
#include "fabric/cuda/driver.h"
#include "fabric/cuda/packet_all_reduce_sm90.h"
#include "fabric/cuda/put_sm90.h"
#include "link_kernels_sm90.h"

namespace penstock::bench {
namespace {

using cuda::DeviceBuffer;
using nlohmann::json;

constexpr std::uint64_t kLargest = 256ULL << 20;
constexpr std::uint64_t kChunk =
    16 * 7 * 12872;  // 1.44 MB: 16 tiles of rows, the chunk of the expert layer
constexpr std::uint64_t kWords = 2 * kLargest;  // offset of the signal words in the window
constexpr std::uint64_t kWordStride = 128;

struct Options {
  std::string json_path;
  std::string commit = "unknown";
  std::string nccl = "libnccl.so.2";
};

struct Samples {
  std::vector<double> values;
  double at(double q) {
    std::sort(values.begin(), values.end());
    return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
  }
};

class Report {
 public:
  Report(Options options, json common) : options_(std::move(options)), common_(std::move(common)) {
    if (!options_.json_path.empty()) file_.open(options_.json_path, std::ios::app);
  }
  // `figure` names what was measured, `unit` its unit; `more` says under which conditions.
  void add(const std::string& figure, const std::string& unit, Samples samples, json more) {
    const std::lock_guard lock(mutex_);
    json row = common_;
    row["figure"] = figure;
    row["unit"] = unit;
    row["samples"] = samples.values.size();
    row["median"] = samples.at(0.5);
    row["p10"] = samples.at(0.1);
    row["p90"] = samples.at(0.9);
    row.update(more);
    if (file_.is_open()) file_ << row.dump() << '\n' << std::flush;
    std::string text;
    for (const auto& [key, value] : more.items()) text += fmt::format(" {}={}", key, value.dump());
    fmt::print("{:<26} {:>9.2f} {:<4} [{:.2f}, {:.2f}]{}\n", figure, samples.at(0.5), unit,
               samples.at(0.1), samples.at(0.9), text);
    std::fflush(stdout);
  }

 private:
  Options options_;
  json common_;
  std::ofstream file_;
  std::mutex mutex_;
};

struct Timer {
  Timer() {
    PENSTOCK_CUDA_CHECK(cudaEventCreate(&start));
    PENSTOCK_CUDA_CHECK(cudaEventCreate(&stop));
  }
  ~Timer() {
    (void)cudaEventDestroy(start);
    (void)cudaEventDestroy(stop);
  }
  // Seconds that what `enqueue` puts on `stream` takes there.
  template <typename Enqueue>
  double seconds(cudaStream_t stream, Enqueue&& enqueue) const {
    PENSTOCK_CUDA_CHECK(cudaEventRecord(start, stream));
    enqueue();
    PENSTOCK_CUDA_CHECK(cudaEventRecord(stop, stream));
    PENSTOCK_CUDA_CHECK(cudaEventSynchronize(stop));
    float ms = 0.0F;
    PENSTOCK_CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
    return static_cast<double>(ms) * 1e-3;
  }
  cudaEvent_t start = nullptr;
  cudaEvent_t stop = nullptr;
};

struct Stream {
  Stream() { PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~Stream() { (void)cudaStreamDestroy(handle); }
  void wait() const { PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(handle)); }
  cudaStream_t handle = nullptr;
};

// One of two ranks and its window.
struct Rank {
  Rank(const TeamHandle& team_handle, int device)
      : team(team_handle),
        rank(cuda::DeviceRank::create(team_handle, device)),
        window(Window::create(
            team_handle,
            Layout("link_bench", "",
                   {{"from", 0, kLargest, 256, Access::kOwner, Access::kOwner},
                    {"to", kLargest, kLargest, 256, Access::kPeers, Access::kOwner},
                    {"words", kWords, 64 * kWordStride, 128, Access::kPeers, Access::kOwner}}),
            cuda::device_window_backend(device))),
        engine(rank, window),
        mapping(cuda::device_mapping(*window)),
        peer(1 - team_handle->rank()) {
    PENSTOCK_CUDA_CHECK(load_link_kernels());
    rank->prepare(stream.handle);
    PENSTOCK_CUDA_CHECK(cuda::load_sm_put());
    std::vector<std::uint32_t> noise(kLargest / 4);
    std::minstd_rand random(static_cast<unsigned>(team->rank()) + 1);
    for (auto& x : noise) x = static_cast<std::uint32_t>(random());
    cuda::write_device(window->local(), noise.data(), kLargest);
    team->barrier();
  }
  bool lead() const { return team->rank() == 0; }
  bool local() const { return mapping->same_device(peer); }
  std::uint64_t* word(int r, int index) const {
    return reinterpret_cast<std::uint64_t*>(window->base(r) + kWords +
                                            static_cast<std::uint64_t>(index) * kWordStride);
  }
  TeamHandle team;
  std::shared_ptr<cuda::DeviceRank> rank;
  std::shared_ptr<Window> window;
  cuda::DeviceCopyEngine engine;
  std::shared_ptr<cuda::DeviceWindowMapping> mapping;
  int peer;
  Stream stream;
  Timer timer;
};

int repeats_of(std::uint64_t bytes) {
  return static_cast<int>(std::clamp<std::uint64_t>((512ULL << 20) / bytes, 3, 64));
}

// Whether the peer's "to" region holds what this rank's "from" region does, in its first `bytes`.
void verify(Rank& r, std::uint64_t bytes, const char* what) {
  std::vector<std::uint32_t> mine(bytes / 4);
  std::vector<std::uint32_t> theirs(bytes / 4);
  cuda::read_device(mine.data(), r.window->local(), bytes);
  cuda::read_device(theirs.data(), r.window->base(r.peer) + kLargest, bytes);
  require(mine == theirs, ErrorKind::kBackend,
          [&] { return fmt::format("{}: the bytes did not arrive", what); });
  cuda::zero_device(r.window->base(r.peer) + kLargest, bytes);
}

void copy_engine_curve(Rank& r, Report& report, bool both) {
  for (const std::uint64_t bytes :
       {4096ULL, 16384ULL, 65536ULL, 262144ULL, 1ULL << 20, static_cast<unsigned long long>(kChunk),
        4ULL << 20, 8ULL << 20, 32ULL << 20, 128ULL << 20, 256ULL << 20}) {
    const int repeats = repeats_of(bytes);
    Samples rate;
    for (int sample = 0; sample < 7; ++sample) {
      r.team->barrier();
      if (!both && !r.lead()) continue;
      cudaStream_t stream = r.rank->proxy()->stream();
      const double seconds = r.timer.seconds(stream, [&] {
        for (int i = 0; i < repeats; ++i) {
          cuda::check(r.rank->proxy()->copy(r.window->base(r.peer) + kLargest, r.window->local(),
                                            bytes, r.local()),
                      "copy");
        }
      });
      if (sample > 0) rate.values.push_back(static_cast<double>(bytes) * repeats / seconds * 1e-9);
    }
    if (r.lead()) {
      verify(r, std::min<std::uint64_t>(bytes, 1 << 20), "copy engine");
      report.add("rate", "GB/s", rate,
                 {{"transport", "copy_engine"},
                  {"bytes", bytes},
                  {"direction", both ? "both" : "one"},
                  {"method", "back-to-back copies enqueued by the host"}});
    }
    r.team->barrier();
  }
}

void sm_curve(Rank& r, Report& report, bool both) {
  DeviceBuffer<std::uint32_t> arrivals(std::vector<std::uint32_t>{0});
  for (const int blocks : {1, 4, 8, 16, 32, 132}) {
    for (const std::uint64_t bytes :
         {4096ULL, 65536ULL, 1ULL << 20, static_cast<unsigned long long>(kChunk), 4ULL << 20,
          32ULL << 20, 256ULL << 20}) {
      if (both && bytes != 32ULL << 20) continue;
      const int repeats = std::max(3, repeats_of(bytes) / (blocks < 8 ? 4 : 1));
      Samples rate;
      cuda::SmPut put;
      put.dst = r.window->base(r.peer) + kLargest;
      put.src = r.window->local();
      put.bytes = bytes;
      put.word = r.word(r.peer, 9);
      put.epoch = 1;
      put.arrivals = arrivals.data();
      for (int sample = 0; sample < 5; ++sample) {
        r.team->barrier();
        if (!both && !r.lead()) continue;
        const double seconds = r.timer.seconds(r.stream.handle, [&] {
          for (int i = 0; i < repeats; ++i)
            PENSTOCK_CUDA_CHECK(cuda::launch_sm_put(put, blocks, r.stream.handle));
        });
        if (sample > 0)
          rate.values.push_back(static_cast<double>(bytes) * repeats / seconds * 1e-9);
      }
      if (r.lead()) {
        verify(r, std::min<std::uint64_t>(bytes, 1 << 20), "copy CTAs");
        report.add("rate", "GB/s", rate,
                   {{"transport", "sm"},
                    {"bytes", bytes},
                    {"ctas", blocks},
                    {"direction", both ? "both" : "one"},
                    {"method", "back-to-back launches, signal behind each"}});
      }
      r.team->barrier();
    }
  }
}

// Round trips in microseconds: put and signal there, one direct store back.
Samples round_trips(Rank& r, std::uint64_t bytes, bool direct, int burst, int rounds,
                    std::uint64_t& epoch, const OccupyArgs* occupy = nullptr,
                    cudaStream_t occupied = nullptr, int sms = 0) {
  DeviceBuffer<std::uint32_t> cycles(static_cast<std::size_t>(rounds));
  DeviceBuffer<std::uint64_t> clock(4);
  DeviceBuffer<std::uint32_t> status(std::vector<std::uint32_t>{0});
  EchoArgs args;
  args.guard = r.rank->guard_view(1);
  if (!direct) args.ring = r.engine.ring_view();
  args.put.peer = r.peer;
  args.put.dst_offset = kLargest;
  args.put.bytes = bytes;
  args.put.signal_offset = kWords;
  args.peer_word = r.word(r.peer, 0);
  args.own_word = r.lead() ? r.word(0, 1) : r.word(1, 0);
  args.answer_word = r.word(r.peer, 1);
  args.first = epoch;
  args.rounds = rounds;
  args.burst = burst;
  args.stride = bytes;
  args.cycles = cycles.data();
  args.clock = clock.data();
  args.status = status.data();
  if (occupy != nullptr) {
    args.start_word = occupy->arrived;
    args.start_value = static_cast<std::uint64_t>(occupy->enough);
    args.end_word = occupy->end;
  }
  epoch += static_cast<std::uint64_t>(rounds);
  r.team->barrier();
  PENSTOCK_CUDA_CHECK(r.lead() ? launch_measure(args, r.stream.handle)
                               : launch_answer(args, r.stream.handle));
  r.rank->track(r.stream.handle);
  if (occupy != nullptr) {
    if (r.local())
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the answering kernel first
    PENSTOCK_CUDA_CHECK(launch_occupy(*occupy, 2 * sms, occupied));
    r.rank->track(occupied);
  }
  r.stream.wait();
  std::uint32_t failed = 0;
  cuda::read_device(&failed, status.data(), sizeof(failed));
  r.team->check();
  require(failed == 0, ErrorKind::kBackend,
          [] { return std::string("a wait of the latency kernel failed"); });
  Samples samples;
  if (r.lead()) {
    std::vector<std::uint32_t> host(static_cast<std::size_t>(rounds));
    std::uint64_t ends[4] = {};
    cuda::read_device(host.data(), cycles.data(), cycles.bytes());
    cuda::read_device(ends, clock.data(), sizeof(ends));
    const double us_per_cycle =
        static_cast<double>(ends[3] - ends[1]) / static_cast<double>(ends[2] - ends[0]) * 1e-3;
    // The first rounds find the proxy asleep and the pages cold.
    for (std::size_t i = static_cast<std::size_t>(rounds) / 5; i < host.size(); ++i)
      samples.values.push_back(host[i] * us_per_cycle);
  }
  r.team->barrier();
  return samples;
}

void latencies(Rank& r, Report& report) {
  std::uint64_t epoch = 1;
  Samples direct = round_trips(r, 0, true, 1, 400, epoch);
  const double one_way = r.lead() ? direct.at(0.5) / 2 : 0.0;
  if (r.lead()) {
    Samples half = direct;
    for (double& x : half.values) x /= 2;
    report.add("flag_one_way", "us", half,
               {{"transport", "direct"},
                {"method", "half of a ping-pong of st.release.sys / ld.acquire.sys"}});
  }
  for (const std::uint64_t bytes :
       {8ULL, 4096ULL, 65536ULL, 1ULL << 20, static_cast<unsigned long long>(kChunk), 4ULL << 20}) {
    Samples trip = round_trips(r, bytes, false, 1, 250, epoch);
    if (!r.lead()) continue;
    for (double& x : trip.values) x -= one_way;
    report.add(
        "descriptor_to_visible", "us", trip,
        {{"transport", "copy_engine"},
         {"bytes", bytes},
         {"signal", std::string(to_string(r.rank->signal_probe(r.peer).chosen))},
         {"method",
          "post in a kernel to signal seen by a kernel: round trip less half a flag ping-pong"}});
  }
  for (const std::uint64_t bytes : {static_cast<unsigned long long>(kChunk), 4ULL << 20}) {
    const TransportCounters before = r.engine.counters();
    constexpr int kBurst = 16;
    Samples trip = round_trips(r, bytes, false, kBurst, 60, epoch);
    if (!r.lead()) continue;
    r.engine.quiet();
    const TransportCounters after = r.engine.counters();
    for (double& x : trip.values)
      x = static_cast<double>(bytes) * kBurst / ((x - one_way) * 1e-6) * 1e-9;
    report.add(
        "burst_rate", "GB/s", trip,
        {{"transport", "copy_engine"},
         {"bytes", bytes},
         {"descriptors", kBurst},
         {"puts", after.puts - before.puts},
         {"copies", after.copies - before.copies},
         {"method", "16 adjacent descriptors posted by one thread, first post to last signal"}});
  }
}

// The same with every thread slot of the measuring GPU taken by a kernel that waits: does the copy
// engine need SMs?
void latency_when_occupied(Rank& r, Report& report) {
  DeviceBuffer<std::uint64_t> words(32);
  cuda::zero_device(words.data(), words.bytes());
  const Stream occupied;
  r.rank->prepare(occupied.handle);
  r.team->barrier();
  const bool occupy = r.lead();
  int sms = 0;
  PENSTOCK_CUDA_CHECK(
      cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, r.rank->device()));
  std::uint64_t epoch = 1000000;
  const OccupyArgs args{r.rank->guard_view(3), words.data(), words.data() + 16, 2 * sms - 2};
  Samples trip =
      round_trips(r, 65536, false, 1, 250, epoch, occupy ? &args : nullptr, occupied.handle, sms);
  occupied.wait();
  if (r.lead()) {
    report.add(
        "round_trip_when_occupied", "us", trip,
        {{"transport", "copy_engine"},
         {"bytes", 65536},
         {"method", "post to answer, with 2048 threads resident on every SM of the posting GPU"}});
  }
}

void packets(const TeamHandle& team, int device, Report& report) {
  constexpr std::uint64_t kRowPackets = 1024;  // 6144 bf16
  const auto rank = cuda::DeviceRank::create(team, device);
  cuda::DevicePackets mailboxes(rank, 16 * kRowPackets);
  PENSTOCK_CUDA_CHECK(cuda::load_packet_kernels());
  constexpr std::uint64_t kInputs = 4;
  std::vector<std::uint16_t> host(16 * 6144 * kInputs);
  std::minstd_rand random(static_cast<unsigned>(team->rank()) + 7);
  for (auto& x : host)
    x = static_cast<std::uint16_t>(0x3f00 + random() % 256 + (random() % 2 << 15));  // +-[0.5, 2)
  DeviceBuffer<std::uint16_t> in(host.size());
  cuda::write_device(in.data(), host.data(), in.bytes());
  DeviceBuffer<std::uint16_t> out(host.size());
  DeviceBuffer<std::uint64_t> words(32);
  cuda::zero_device(words.data(), words.bytes());
  DeviceBuffer<std::uint32_t> status(1);
  cuda::zero_device(status.data(), 4);
  cuda::PacketCalls args;
  args.guard = rank->guard_view(2);
  args.packets = mailboxes.view();
  args.epoch = words.data();
  args.barrier = words.data() + 16;
  args.status = status.data();
  args.in = reinterpret_cast<const std::uint32_t*>(in.data());
  args.out = reinterpret_cast<std::uint32_t*>(out.data());
  args.inputs = kInputs;
  args.calls = 2000;
  const Stream stream;
  rank->prepare(stream.handle);
  const Timer timer;
  for (const std::uint64_t rows : {1, 2, 4, 8, 16}) {
    args.count = rows * kRowPackets;
    const int blocks =
        std::min<int>(static_cast<int>(args.count) / cuda::kPacketThreads, rank->sms());
    for (const bool two_shot : {false, true}) {
      args.two_shot = two_shot;
      Samples us;
      for (int sample = 0; sample < 10; ++sample) {
        team->barrier();
        const double seconds = timer.seconds(stream.handle, [&] {
          PENSTOCK_CUDA_CHECK(cuda::launch_packet_calls(args, blocks, stream.handle));
          rank->track(stream.handle);
        });
        if (sample > 0) us.values.push_back(seconds * 1e6 / static_cast<double>(args.calls));
      }
      team->check();
      std::uint32_t failed = 0;
      cuda::read_device(&failed, status.data(), 4);
      require(failed == 0, ErrorKind::kBackend,
              [] { return std::string("a packet all-reduce failed"); });
      if (team->rank() == 0) {
        report.add(
            "packet_all_reduce", "us", us,
            {{"ranks", team->size()},
             {"rows", rows},
             {"hidden", 6144},
             {"kind", two_shot ? "two_shot" : "one_shot"},
             {"blocks", blocks},
             {"method",
              "2000 calls in one launch, input read from and result written to memory in each"}});
      }
    }
  }
  team->barrier();
}

void busy_beside_copies(Rank& r, Report& report) {
  constexpr std::uint64_t kBytes = 512ULL << 20;
  if (r.lead()) {
    DeviceBuffer<std::uint16_t> data(kBytes / 2);
    std::vector<std::uint16_t> noise(kBytes / 2);
    std::minstd_rand random(5);
    for (auto& x : noise)
      x = static_cast<std::uint16_t>(0x3e00 + random() % 512 + (random() % 2 << 15));
    cuda::write_device(data.data(), noise.data(), kBytes);
    int sms = 0;
    PENSTOCK_CUDA_CHECK(
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, r.rank->device()));
    DeviceBuffer<float> sink(static_cast<std::size_t>(sms) * 256);
    const BusyArgs args{data.data(), kBytes, 6000, sink.data()};
    Samples alone;
    Samples beside;
    Samples copied;
    for (int sample = 0; sample < 8; ++sample) {
      for (const bool copies : {false, true}) {
        r.stream.wait();
        PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(r.rank->proxy()->stream()));
        constexpr int kCopies = 1500;
        cudaEvent_t first = nullptr;
        PENSTOCK_CUDA_CHECK(cudaEventCreateWithFlags(&first, cudaEventDisableTiming));
        Timer copy_timer;
        if (copies) {
          PENSTOCK_CUDA_CHECK(cudaEventRecord(copy_timer.start, r.rank->proxy()->stream()));
          for (int i = 0; i < kCopies; ++i) {
            if (i == 20) PENSTOCK_CUDA_CHECK(cudaEventRecord(first, r.rank->proxy()->stream()));
            cuda::check(r.rank->proxy()->copy(r.window->base(r.peer) + kLargest, r.window->local(),
                                              kChunk, r.local()),
                        "copy");
          }
          PENSTOCK_CUDA_CHECK(cudaEventRecord(copy_timer.stop, r.rank->proxy()->stream()));
          PENSTOCK_CUDA_CHECK(cudaStreamWaitEvent(r.stream.handle, first));
        }
        const double seconds = r.timer.seconds(
            r.stream.handle, [&] { PENSTOCK_CUDA_CHECK(launch_busy(args, sms, r.stream.handle)); });
        PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(r.rank->proxy()->stream()));
        if (copies) {
          float ms = 0.0F;
          PENSTOCK_CUDA_CHECK(cudaEventElapsedTime(&ms, copy_timer.start, copy_timer.stop));
          if (sample > 0)
            copied.values.push_back(static_cast<double>(kChunk) * kCopies / (ms * 1e-3) * 1e-9);
        }
        (void)cudaEventDestroy(first);
        if (sample > 0) (copies ? beside : alone).values.push_back(seconds * 1e3);
      }
    }
    const double tflops = busy_flop(args, sms) / (alone.at(0.5) * 1e-3) * 1e-12;
    report.add("busy_kernel", "ms", alone,
               {{"copies", "none"},
                {"tflops", tflops},
                {"method", "m16n8k16 bf16 on tiles streamed from 512 MB, all SMs"}});
    report.add("busy_kernel", "ms", beside,
               {{"copies", "1.44 MB by copy engine throughout"},
                {"slowdown_percent", (beside.at(0.5) / alone.at(0.5) - 1) * 100},
                {"method", "interleaved with the above"}});
    report.add("rate", "GB/s", copied,
               {{"transport", "copy_engine"},
                {"bytes", kChunk},
                {"beside", "busy_kernel"},
                {"method", "back-to-back copies while every SM computes"}});
  }
  r.team->barrier();
}

// ---- NCCL, found at run time ------------------------------------------------------------------

struct Nccl {
  using Comm = void*;
  int (*init_all)(Comm*, int, const int*) = nullptr;
  int (*destroy)(Comm) = nullptr;
  int (*all_reduce)(const void*, void*, std::size_t, int, int, Comm, cudaStream_t) = nullptr;
  int (*send)(const void*, std::size_t, int, int, Comm, cudaStream_t) = nullptr;
  int (*recv)(void*, std::size_t, int, int, Comm, cudaStream_t) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*version)(int*) = nullptr;
};
constexpr int kNcclChar = 0;
constexpr int kNcclBf16 = 9;
constexpr int kNcclSum = 0;

void nccl_check(int status, const char* call) {
  require(status == 0, ErrorKind::kBackend,
          [&] { return fmt::format("{} returned {}", call, status); });
}

void nccl_baseline(Report& report, const std::string& name) {
  std::string problem;
  void* library = cuda::open_library(name.c_str(), &problem);
  if (library == nullptr) {
    fmt::print("NCCL baseline not run: {}\n", problem);
    return;
  }
  Nccl n;
  const auto find = [&](const char* symbol, auto& slot) {
    slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(
        cuda::find_symbol(library, symbol));
    require(slot != nullptr, ErrorKind::kUnsupported,
            [&] { return fmt::format("{} has no {}", name, symbol); });
  };
  find("ncclCommInitAll", n.init_all);
  find("ncclCommDestroy", n.destroy);
  find("ncclAllReduce", n.all_reduce);
  find("ncclSend", n.send);
  find("ncclRecv", n.recv);
  find("ncclGroupStart", n.group_start);
  find("ncclGroupEnd", n.group_end);
  find("ncclGetVersion", n.version);
  int version = 0;
  nccl_check(n.version(&version), "ncclGetVersion");
  constexpr int kRanks = 2;
  Nccl::Comm comms[kRanks] = {};
  const int devices[kRanks] = {0, 1};
  nccl_check(n.init_all(comms, kRanks, devices), "ncclCommInitAll");
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<DeviceBuffer<std::byte>>> buffers;
  for (int d = 0; d < kRanks; ++d) {
    const cuda::ScopedDevice scope(d);
    streams.push_back(std::make_unique<Stream>());
    for (int k = 0; k < 2; ++k) {
      buffers.push_back(std::make_unique<DeviceBuffer<std::byte>>(kLargest));
      buffers.back()->fill(1);
    }
  }
  const cuda::ScopedDevice scope(0);
  const Timer timer;
  const auto time_us = [&](int repeats, auto&& operation) {
    Samples us;
    for (int sample = 0; sample < 8; ++sample) {
      const double seconds = timer.seconds(streams[0]->handle, [&] {
        for (int i = 0; i < repeats; ++i) {
          nccl_check(n.group_start(), "ncclGroupStart");
          for (int d = 0; d < kRanks; ++d) operation(d);
          nccl_check(n.group_end(), "ncclGroupEnd");
        }
      });
      streams[1]->wait();
      if (sample > 0) us.values.push_back(seconds * 1e6 / repeats);
    }
    return us;
  };
  for (const std::size_t rows : {1, 2, 4, 8, 16}) {
    report.add(
        "nccl_all_reduce", "us",
        time_us(200,
                [&](int d) {
                  const auto at = static_cast<std::size_t>(d);
                  nccl_check(
                      n.all_reduce(buffers[2 * at]->data(), buffers[2 * at + 1]->data(),
                                   rows * 6144, kNcclBf16, kNcclSum, comms[d], streams[at]->handle),
                      "ncclAllReduce");
                }),
        {{"ranks", kRanks},
         {"rows", rows},
         {"hidden", 6144},
         {"nccl", version},
         {"method", "200 eager calls in one stream"}});
  }
  for (const std::size_t bytes :
       {std::size_t{65536}, std::size_t{1} << 20, static_cast<std::size_t>(kChunk),
        std::size_t{4} << 20, std::size_t{32} << 20, std::size_t{256} << 20}) {
    for (const bool both : {false, true}) {
      Samples us = time_us(20, [&](int d) {
        const auto at = static_cast<std::size_t>(d);
        if (both || d == 0)
          nccl_check(n.send(buffers[2 * at]->data(), bytes, kNcclChar, 1 - d, comms[d],
                            streams[at]->handle),
                     "ncclSend");
        if (both || d == 1)
          nccl_check(n.recv(buffers[2 * at + 1]->data(), bytes, kNcclChar, 1 - d, comms[d],
                            streams[at]->handle),
                     "ncclRecv");
      });
      for (double& x : us.values) x = static_cast<double>(bytes) / (x * 1e-6) * 1e-9;
      report.add("nccl_send_recv", "GB/s", us,
                 {{"bytes", bytes},
                  {"direction", both ? "both" : "one"},
                  {"nccl", version},
                  {"method", "20 eager grouped send/recv in one stream"}});
    }
  }
  for (Nccl::Comm comm : comms) nccl_check(n.destroy(comm), "ncclCommDestroy");
}

int run(const Options& options) {
  const int devices = cuda::device_count();
  require(devices > 0, ErrorKind::kUnsupported, [] { return cuda::unavailable_reason(); });
  const bool spread = devices >= 2;
  const cuda::GpuState gpu = cuda::gpu_state(0);
  json common = {{"commit", options.commit},
                 {"bench", "link"},
                 {"backend", "cuda"},
                 {"gpu", gpu.name},
                 {"gpus", spread ? 2 : 1},
                 {"driver", gpu.driver_version},
                 {"nvlinks", gpu.nvlinks_active},
                 {"sm_clock_mhz_at_start", gpu.sm_clock_mhz},
                 {"placement", spread ? "one rank a GPU" : "ranks share one GPU"}};
  Report report(options, common);
  fmt::print("{} x {}, driver {}, {} links up, {}\n", spread ? 2 : 1, gpu.name, gpu.driver_version,
             gpu.nvlinks_active, common["placement"].get<std::string>());
  const auto on_team = [&](int ranks, auto&& body) {
    run_local_team(ranks,
                   [&](const TeamHandle& team) {
                     const int device = spread ? team->rank() % 2 : 0;
                     const cuda::ScopedDevice scope(device);
                     body(team, device);
                   },
                   {.deadline = std::chrono::seconds(5)});
  };
  on_team(2, [&](const TeamHandle& team, int device) { packets(team, device, report); });
  on_team(2, [&](const TeamHandle& team, int device) {
    Rank r(team, device);
    if (r.lead()) {
      const cuda::SignalProbe& probe = r.rank->signal_probe(r.peer);
      report.add("signal_probe", "us", {{probe.device_copy_us}},
                 {{"signal", "device_copy"}, {"method", "4 KB copy and signal, back to back"}});
      report.add("signal_probe", "us", {{probe.stream_write_us}},
                 {{"signal", "stream_write"}, {"method", "the same; -1: refused"}});
    }
    latencies(r, report);
    copy_engine_curve(r, report, false);
    if (spread) copy_engine_curve(r, report, true);
    sm_curve(r, report, false);
    if (spread) sm_curve(r, report, true);
    busy_beside_copies(r, report);
    latency_when_occupied(r, report);
  });
  for (const int ranks : {4, 8}) {
    on_team(ranks, [&](const TeamHandle& team, int device) { packets(team, device, report); });
  }
  if (spread) nccl_baseline(report, options.nccl);
  return 0;
}

}  // namespace
}  // namespace penstock::bench

int main(int argc, char** argv) {
  penstock::cuda::prepare_process();
  (void)setenv("NCCL_NVLS_ENABLE", "0", 0);  // the baseline, too, stays off NVLink multicast
  CLI::App app{"Link benchmark on GPUs: rates, latencies, packet all-reduce, NCCL beside them"};
  penstock::bench::Options options;
  app.add_option("--json", options.json_path, "append one JSON line a figure to this file");
  app.add_option("--commit", options.commit, "commit to write into the JSON lines");
  app.add_option("--nccl", options.nccl, "NCCL library to load for the baseline (two GPUs)");
  CLI11_PARSE(app, argc, argv);
  try {
    return penstock::bench::run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "penstock_link_bench_cuda: {}\n", error.what());
    return 1;
  }
}
