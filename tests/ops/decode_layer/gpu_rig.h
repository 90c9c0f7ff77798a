// decode_layer on a GPU for tests: one rank with everything it needs on the device, a group of
// ranks, and the comparison of a launch with the reference, stage by stage and as a whole.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "core/cuda/stream.h"
#include "ops/decode_layer/cuda/inspect.h"
#include "ops/decode_layer/cuda/launch.h"
#include "ops/decode_layer/random_layer.h"
#include "penstock/core/error.h"
#include "penstock/ops/decode_layer/decode_layer.h"

namespace penstock::decode::test {

using cuda::DeviceBuffer;

// Under compute-sanitizer kernels run tens of times slower (tools/gpu_sanitize.sh): all times that
// tests set or bound stretch by this.
inline double slowdown() {
  static const double factor = [] {
    const char* text = std::getenv("PENSTOCK_GPU_TEST_SLOWDOWN");
    return text == nullptr ? 1.0 : std::max(1.0, std::atof(text));
  }();
  return factor;
}

// Runs f(0) .. f(count - 1) on the machine's threads.
template <typename F>
void parallel(std::size_t count, F&& f) {
  std::atomic<std::size_t> next{0};
  std::vector<std::thread> threads;
  const std::size_t n =
      std::min<std::size_t>(count, std::max(1U, std::thread::hardware_concurrency()));
  for (std::size_t t = 0; t < n; ++t) {
    threads.emplace_back([&] {
      for (std::size_t i = next++; i < count; i = next++) f(i);
    });
  }
  for (std::thread& t : threads) t.join();
}

inline std::vector<float> floats(const std::vector<std::uint16_t>& bits) {
  std::vector<float> v;
  v.reserve(bits.size());
  for (const std::uint16_t b : bits) v.push_back(bf16_value(b));
  return v;
}
inline std::span<const float> row_of(const std::vector<float>& m, std::size_t s,
                                     std::size_t columns) {
  return std::span(m).subspan(s * columns, columns);
}
inline void append(std::vector<float>& to, std::span<const float> from) {
  to.insert(to.end(), from.begin(), from.end());
}

// A paged cache on the device, whose pages may lie further apart than on the host.
class DeviceCache {
 public:
  DeviceCache(const RandomCache& host, std::int64_t stride)
      : bytes_(static_cast<std::size_t>(host.pages() * stride)), stride_(stride) {
    upload(host);
  }
  void upload(const RandomCache& host) {
    PENSTOCK_CUDA_CHECK(cudaMemcpy2D(
        bytes_.data(), static_cast<std::size_t>(stride_), host.bytes.data(),
        static_cast<std::size_t>(host.stride()), static_cast<std::size_t>(host.page_bytes()),
        static_cast<std::size_t>(host.pages()), cudaMemcpyHostToDevice));
  }
  void download(RandomCache& host) const {
    PENSTOCK_CUDA_CHECK(
        cudaMemcpy2D(host.bytes.data(), static_cast<std::size_t>(host.stride()), bytes_.data(),
                     static_cast<std::size_t>(stride_), static_cast<std::size_t>(host.page_bytes()),
                     static_cast<std::size_t>(host.pages()), cudaMemcpyDeviceToHost));
  }
  std::uint8_t* data() const { return bytes_.data(); }
  std::int64_t stride() const { return stride_; }

 private:
  DeviceBuffer<std::uint8_t> bytes_;
  std::int64_t stride_;
};

// One rank.
struct Rig {
  DecodeShape shape;
  const RandomLayer* layer;
  const RandomCache* pages;
  int device;
  DeviceBuffer<std::uint8_t> weights;
  DeviceCache cache;
  DeviceBuffer<std::uint16_t> x, out;
  DeviceBuffer<std::int32_t> positions, offsets, picks;
  DeviceBuffer<std::int64_t> slots;
  cuda::OwnedStream stream;
  DecodeLayer op;

  // `layers` layers that all have the same weights and cache; pages `device_stride` bytes apart (0:
  // as on the host).
  Rig(const DecodeShape& s, const DecodeOptions& options, const RandomLayer& l,
      const RandomCache& host, int layers = 1, std::int64_t device_stride = 0)
      : shape(s),
        layer(&l),
        pages(&host),
        device(on(options.device)),
        weights(prepared(s, l)),
        cache(host, device_stride == 0 ? host.stride() : device_stride),
        x(static_cast<std::size_t>(s.rows * s.hidden)),
        out(x.size()),
        positions(static_cast<std::size_t>(s.rows)),
        offsets(static_cast<std::size_t>(s.rows + 1)),
        picks(static_cast<std::size_t>(s.rows) * kMaxPicks),
        slots(static_cast<std::size_t>(s.rows)),
        op(s, options) {
    std::vector<LayerBinding> bindings(
        static_cast<std::size_t>(layers),
        {weights.data(), cache.data(), cache.stride(), offsets.data(), picks.data()});
    op.set_layers(bindings);
  }
  static int on(int device) {
    PENSTOCK_CUDA_CHECK(cudaSetDevice(device));
    return device;
  }
  static std::vector<std::uint8_t> prepared(const DecodeShape& s, const RandomLayer& l) {
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(weight_layout(s).bytes));
    prepare_weights(s, l.tensors, bytes);
    return bytes;
  }
  void upload(const RandomStep& step) {
    on(device);
    x.upload(step.x);
    positions.upload(step.positions);
    slots.upload(step.slots);
    offsets.upload(step.pick_offsets);
    picks.upload(step.picks);
    cache.upload(*pages);
    out.fill(0xEE);
    PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
  }
  DecodeStep step(int rows) const {
    return {rows, x.data(), out.data(), positions.data(), slots.data()};
  }
  void launch(int rows, int count = 1) {
    on(device);
    op.run(Stream{stream.handle}, step(rows), 0, count);
  }
  // Waits.
  std::vector<std::uint16_t> result(int rows) {
    on(device);
    stream.wait();
    op.check();
    std::vector<std::uint16_t> all = out.download();
    all.resize(static_cast<std::size_t>(rows * shape.hidden));
    return all;
  }
};

// All ranks of a group, sharing one GPU's multiprocessors or (spread) one on each GPU; with
// options.self_loop shape.rank alone.
class Group {
 public:
  Group(const DecodeShape& shape, const RandomLayer& layer, const RandomCache& pages,
        int layers = 1, DecodeOptions options = {}, std::int64_t device_stride = 0,
        bool spread = false) {
    int sms = 0;
    PENSTOCK_CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    options.deadline_s = (options.deadline_s == 0 ? 5 : options.deadline_s) * slowdown();
    if (shape.ranks > 1 && options.sm_budget == 0 && !spread && !options.self_loop) {
      options.sm_budget = sms / shape.ranks;
    }
    std::vector<void*> windows;
    for (int r = 0; r < shape.ranks; ++r) {
      if (options.self_loop && r != shape.rank) continue;
      DecodeShape s = shape;
      s.rank = r;
      options.device = spread ? r : 0;
      ranks.push_back(std::make_unique<Rig>(s, options, layer, pages, layers, device_stride));
      windows.push_back(ranks.back()->op.window());
    }
    if (shape.ranks == 1 || options.self_loop) return;
    for (const auto& rank : ranks) rank->op.connect(windows);
  }
  void upload(const RandomStep& step) {
    for (const auto& rank : ranks) rank->upload(step);
  }
  void launch(int rows, int count = 1) {
    for (const auto& rank : ranks) rank->launch(rows, count);
  }
  void rearm() {
    for (const auto& rank : ranks) rank->op.rearm();
  }
  void stall(int rank, const DecodeStall& stall) {
    ranks[static_cast<std::size_t>(rank)]->op.set_stall(stall);
  }
  // Of rank 0; expects the same bits and cache of all.
  std::vector<std::uint16_t> result(int rows) {
    const std::vector<std::uint16_t> first = ranks[0]->result(rows);
    for (std::size_t r = 1; r < ranks.size(); ++r) {
      EXPECT_EQ(ranks[r]->result(rows), first) << "rank " << r << " differs from rank 0";
    }
    return first;
  }
  Rig& operator[](std::size_t r) { return *ranks[r]; }

  std::vector<std::unique_ptr<Rig>> ranks;
};

// What comparisons found, over as many launches as were added.
struct Comparison {
  // Relative L2 over the rows of a launch: the largest of each stage.
  std::map<std::string, double> stages;
  double layer = 0;        // of a run's rows that went to the reference's experts
  double cache_bytes = 0;  // largest share of a new cache row's bytes that differ
  int rows = 0;
  int stage_flips = 0;           // rows whose experts differ from the reference's, same input
  int layer_flips = 0;           // the same with the reference's own input
  double widest_stage_flip = 0;  // score + bias that separates experts which changed places
  double widest_layer_flip = 0;

  void add(const std::string& stage, std::span<const float> got, std::span<const float> want) {
    if (want.empty()) return;
    double& worst = stages[stage];
    worst = std::max(worst, relative_l2({got.begin(), got.end()}, {want.begin(), want.end()}));
  }
};

// How far apart, in score + bias, the experts lie that one choice has and the other one lacks.
inline double flip_width(const std::vector<int>& got, const std::vector<int>& want,
                         std::span<const float> scores, const float* bias) {
  float low = INFINITY;
  float high = -INFINITY;
  for (const auto& [a, b] : {std::pair(&got, &want), std::pair(&want, &got)}) {
    for (const int e : *a) {
      if (std::find(b->begin(), b->end(), e) != b->end()) continue;
      low = std::min(low, scores[static_cast<std::size_t>(e)] + bias[e]);
      high = std::max(high, scores[static_cast<std::size_t>(e)] + bias[e]);
    }
  }
  return high < low ? 0.0 : static_cast<double>(high) - static_cast<double>(low);
}

// Stages of one launch, rows [first, first + rows) of the step, against the reference fed with the
// kernel's own inputs. `after`: the cache behind the launch.
inline void compare_stages(Comparison& into, const Rig& rig, const StageValues& v,
                           const RandomStep& step, int first, int rows, RandomCache& after) {
  const DecodeShape& s = rig.shape;
  const ReferenceStages ref(s, rig.layer->tensors);
  const auto h = static_cast<std::size_t>(s.hidden);
  const auto heads = static_cast<std::size_t>(s.local_heads());
  const auto experts = static_cast<std::size_t>(s.experts);
  const auto inter = static_cast<std::size_t>(s.local_intermediate());
  const std::size_t c_columns = static_cast<std::size_t>(s.q_lora) + kKvRow;
  const auto count = static_cast<std::size_t>(rows);
  const std::vector<float> x = floats(step.x);
  struct Row {
    std::vector<float> c, q, q_lat, o, y, scores, mid_got, mid, y2;
    double cache_bytes = 0;
    bool flip = false;
    double width = 0;
  };
  std::vector<Row> done(count);
  std::vector<std::vector<float>> fresh(count);
  std::vector<std::int64_t> slots;
  for (std::size_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(first) + i;
    slots.push_back(step.slots[at]);
    if (step.slots[at] < 0) continue;
    std::vector<std::uint8_t> bytes(1152);
    fresh[i] = ref.cache_row(row_of(v.c, i, c_columns), step.positions[at], rig.pages->format(),
                             bytes.data());
    const int row_bytes = kv_row_bytes(rig.pages->format());
    int differing = 0;
    for (int b = 0; b < row_bytes; ++b) {
      differing += after.row_of(step.slots[at])[b] != bytes[static_cast<std::size_t>(b)] ? 1 : 0;
    }
    done[i].cache_bytes = static_cast<double>(differing) / row_bytes;
  }
  parallel(count, [&](std::size_t i) {
    Row& row = done[i];
    const auto at = static_cast<std::size_t>(first) + i;
    if (step.slots[at] < 0) return;
    const auto x_row = row_of(x, at, h);
    row.c = ref.qkv_a(x_row, 1);
    row.q = ref.q_b(row_of(v.c, i, c_columns), 1, std::span(step.positions).subspan(at, 1));
    row.q_lat = ref.uk(row_of(v.q, i, heads * kQueryHead), 1);
    const auto begin = static_cast<std::size_t>(step.pick_offsets[at]);
    const auto end = static_cast<std::size_t>(step.pick_offsets[at + 1]);
    row.o = ref.uv(ref.attention(
        row_of(v.q, i, heads * kQueryHead), row_of(v.q_lat, i, heads * kLatent),
        std::span(step.picks).subspan(begin, end - begin), rig.pages->host(), slots, fresh));
    row.y = ref.o(row_of(v.o, i, heads * kValue), 1);
    const auto a_row = row_of(v.a, i, h);
    row.scores = ref.scores(a_row, 1);
    // A kernel may leave a dense layer's router out.
    const auto got = s.dense ? std::span<const float>(row.scores) : row_of(v.scores, i, experts);
    std::vector<int> chosen;
    std::vector<float> weights;
    ref.select(got, chosen, weights);
    if (!s.dense) {
      const RowRouting want = ref.route(row.scores);
      row.flip = std::set(chosen.begin(), chosen.end()) !=
                 std::set(want.experts.begin(), want.experts.end());
      row.width = flip_width(chosen, want.experts, row.scores, rig.layer->tensors.bias.as<float>());
    }
    std::vector<double> sum(h, 0.0);
    for (std::size_t k = 0; k <= chosen.size(); ++k) {
      const int expert = k == 0 ? s.experts : chosen[k - 1];
      const auto mid = row_of(v.mid, i * (chosen.size() + 1) + k, inter);
      append(row.mid_got, mid);
      append(row.mid, ref.mid(a_row, expert));
      ref.down(mid, expert, k == 0 ? 1.0F : weights[k - 1], sum);
    }
    for (const double y : sum) row.y2.push_back(bf16_value(bf16_bits(static_cast<float>(y))));
  });
  // Stage by stage over the launch's live rows.
  const auto stage = [&](const char* name, const auto& got_of, const auto& want_of) {
    std::vector<float> got;
    std::vector<float> want;
    for (std::size_t i = 0; i < count; ++i) {
      if (slots[i] < 0) continue;
      append(got, got_of(i));
      append(want, want_of(done[i]));
    }
    into.add(name, got, want);
  };
  const auto rows_of = [](const std::vector<float>& m, std::size_t columns) {
    return [&m, columns](std::size_t i) { return row_of(m, i, columns); };
  };
  stage("qkv_a", rows_of(v.c, c_columns), [](const Row& r) { return r.c; });
  stage("q_b", rows_of(v.q, heads * kQueryHead), [](const Row& r) { return r.q; });
  stage("uk", rows_of(v.q_lat, heads * kLatent), [](const Row& r) { return r.q_lat; });
  stage("attention+uv", rows_of(v.o, heads * kValue), [](const Row& r) { return r.o; });
  stage("o", rows_of(v.y_attention, h), [](const Row& r) { return r.y; });
  if (!s.dense) stage("router", rows_of(v.scores, experts), [](const Row& r) { return r.scores; });
  stage(
      "mid", [&](std::size_t i) { return std::span<const float>(done[i].mid_got); },
      [](const Row& r) { return r.mid; });
  stage("down", rows_of(v.y_experts, h), [](const Row& r) { return r.y2; });
  for (std::size_t i = 0; i < count; ++i) {
    if (slots[i] < 0) continue;
    into.cache_bytes = std::max(into.cache_bytes, done[i].cache_bytes);
    into.stage_flips += done[i].flip ? 1 : 0;
    into.widest_stage_flip = std::max(into.widest_stage_flip, done[i].width);
  }
}

// Both all-reduces of one launch: bit for bit the sum of the ranks' parts in rank order.
inline void compare_reductions(const std::vector<StageValues>& ranks, const RandomStep& step,
                               std::size_t hidden, int first, int rows,
                               const std::vector<float>& out, const std::string& what) {
  const std::vector<float> x = floats(step.x);
  for (std::size_t i = 0; i < static_cast<std::size_t>(rows); ++i) {
    const auto at = static_cast<std::size_t>(first) + i;
    if (step.slots[at] < 0) continue;
    std::vector<std::vector<float>> attention;
    std::vector<std::vector<float>> experts;
    for (const StageValues& v : ranks) {
      const auto y = row_of(v.y_attention, i, hidden);
      const auto y2 = row_of(v.y_experts, i, hidden);
      attention.emplace_back(y.begin(), y.end());
      experts.emplace_back(y2.begin(), y2.end());
    }
    const auto a = row_of(ranks[0].a, i, hidden);
    EXPECT_EQ(reduce(row_of(x, at, hidden), attention), std::vector<float>(a.begin(), a.end()))
        << what << " row " << at;
    const auto got = row_of(out, at, hidden);
    EXPECT_EQ(reduce(a, experts), std::vector<float>(got.begin(), got.end()))
        << what << " row " << at;
  }
}

// Runs one layer on `rows` rows (of all rows of the step) on all ranks and adds what differs from
// the reference: all stages of the last two launches, the output of all rows.
inline void compare(Comparison& into, Group& group, const RandomStep& step, int rows,
                    const std::string& what) {
  group.rearm();
  group.upload(step);
  group.launch(rows);
  const std::vector<float> out = floats(group.result(rows));
  const DecodeShape& s = group[0].shape;
  const auto h = static_cast<std::size_t>(s.hidden);
  const int per_launch = group[0].op.rows_per_launch();
  const int launches = group[0].op.launches(rows);
  std::vector<RandomCache> after;
  for (const auto& rank : group.ranks) {
    after.push_back(*rank->pages);
    rank->cache.download(after.back());
    // Nothing but the new rows changed.
    RandomCache expected = *rank->pages;
    for (int i = 0; i < rows; ++i) {
      const std::int64_t slot = step.slots[static_cast<std::size_t>(i)];
      if (slot < 0) continue;
      std::memcpy(expected.row_of(slot), after.back().row_of(slot),
                  static_cast<std::size_t>(kv_row_bytes(s.kv_format)));
    }
    EXPECT_EQ(expected.bytes, after.back().bytes)
        << what << ": a cache row that is not new changed";
  }
  // Two halves of the mailboxes hold two launches; the first launch since rearm has parity 0.
  for (int launch = std::max(0, launches - 2); launch < launches; ++launch) {
    const int first = launch * per_launch;
    const int count = std::min(per_launch, rows - first);
    std::vector<StageValues> values;
    for (std::size_t r = 0; r < group.ranks.size(); ++r) {
      values.push_back(read_stages(group[r].op, group[r].shape, count, launch % 2));
      compare_stages(into, group[r], values[r], step, first, count, after[r]);
    }
    // A shard without peers adds its own part once for every rank.
    if (values.size() == 1) values.resize(static_cast<std::size_t>(s.ranks), values[0]);
    compare_reductions(values, step, h, first, count, out, what);
  }
  if (group.ranks.size() != static_cast<std::size_t>(s.ranks)) {
    for (int i = 0; i < rows; ++i) into.rows += step.slots[static_cast<std::size_t>(i)] >= 0;
    return;
  }

  // The layer as a whole, each row alone: rows do not depend on each other.
  struct Whole {
    std::vector<std::uint16_t> out;
    std::vector<RowRouting> routing;
  };
  std::vector<Whole> want(static_cast<std::size_t>(rows));
  RandomCache host = *group[0].pages;
  parallel(want.size(), [&](std::size_t i) {
    if (step.slots[i] < 0) return;
    DecodeShape one = s;
    one.rows = 1;
    const auto begin = static_cast<std::size_t>(step.pick_offsets[i]);
    const auto picks = static_cast<std::size_t>(step.pick_offsets[i + 1]) - begin;
    const std::vector<std::int32_t> offsets = {0, static_cast<std::int32_t>(picks)};
    want[i].out.resize(h);
    run_reference_layer(
        one, group[0].layer->tensors,
        {std::span(step.positions).subspan(i, 1), std::span(step.slots).subspan(i, 1), offsets,
         std::span(step.picks).subspan(begin, picks)},
        host.host(), host.slots(), std::span(step.x).subspan(i * h, h), want[i].out,
        &want[i].routing);
  });
  // Which experts the kernel's rows went to: known for the rows of the last two launches.
  std::vector<float> got_rows;
  std::vector<float> want_rows;
  for (int launch = 0; launch < launches; ++launch) {
    const int first = launch * per_launch;
    const int count = std::min(per_launch, rows - first);
    const bool readable = launch >= launches - 2 && !s.dense;
    StageValues v;
    if (readable) v = read_stages(group[0].op, group[0].shape, count, launch % 2);
    const ReferenceStages ref(group[0].shape, group[0].layer->tensors);
    for (int i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(first + i);
      if (step.slots[at] < 0) continue;
      ++into.rows;
      if (readable) {
        const auto scores =
            row_of(v.scores, static_cast<std::size_t>(i), static_cast<std::size_t>(s.experts));
        const RowRouting got = ref.route(scores);
        const std::vector<int>& expected = want[at].routing[0].experts;
        if (std::set(got.experts.begin(), got.experts.end()) !=
            std::set(expected.begin(), expected.end())) {
          ++into.layer_flips;
          into.widest_layer_flip = std::max(
              into.widest_layer_flip,
              flip_width(got.experts, expected, scores, group[0].layer->tensors.bias.as<float>()));
          continue;
        }
      }
      append(got_rows, row_of(out, at, h));
      append(want_rows, floats(want[at].out));
    }
  }
  if (!want_rows.empty()) into.layer = std::max(into.layer, relative_l2(got_rows, want_rows));
}

// The bounds. Two experts whose score + bias differ by less than the kernel's error may
// change places: such rows are counted, must have been near ties, and must be few.
inline void expect_close(const Comparison& c, const std::string& what) {
  std::string line = what + ":";
  for (const auto& [name, error] : c.stages) {
    EXPECT_LE(error, 2e-3) << what << " stage " << name;
    line += fmt::format(" {} {:.1e}", name, error);
  }
  EXPECT_LE(c.layer, 5e-3) << what;
  // A byte may differ where a norm's last bit falls on a rounding boundary.
  EXPECT_LE(c.cache_bytes, 0.02) << what;
  EXPECT_LE(c.widest_stage_flip, 1e-4) << what;
  EXPECT_LE(c.widest_layer_flip, 5e-3) << what;
  EXPECT_LE(c.stage_flips, 1 + c.rows / 100) << what;
  EXPECT_LE(c.layer_flips, 1 + c.rows / 10) << what;
  fmt::print("{} layer {:.1e} rows {} flips {} + {} (widest {:.1e} + {:.1e})\n", line, c.layer,
             c.rows, c.stage_flips, c.layer_flips, c.widest_stage_flip, c.widest_layer_flip);
}

}  // namespace penstock::decode::test
