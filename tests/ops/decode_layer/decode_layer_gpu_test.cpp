// decode_layer on a GPU against the reference: every stage fed with the kernel's own inputs, read
// back from its mailboxes; the layer as a whole; replays, graphs, padding, batch width, deadlines.
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "core/cuda/check.h"
#include "core/cuda/device_buffer.h"
#include "ops/decode_layer/cuda/launch.h"
#include "ops/decode_layer/delay_sm90.h"
#include "ops/decode_layer/random_layer.h"
#include "penstock/core/error.h"
#include "penstock/ops/decode_layer/decode_layer.h"

namespace penstock::decode::test {
namespace {

using cuda::DeviceBuffer;

// One operator with everything it needs on the device.
struct Rig {
  DecodeShape shape;
  const RandomLayer* layer;
  RandomCache cache;
  DeviceBuffer<std::uint8_t> weights;
  DeviceBuffer<std::uint8_t> device_cache;
  DeviceBuffer<std::uint16_t> x, out;
  DeviceBuffer<std::int32_t> positions, offsets, picks;
  DeviceBuffer<std::int64_t> slots;
  DecodeLayer op;

  Rig(const DecodeShape& s, const DecodeOptions& options, const RandomLayer& l, int pages,
      int layers = 1)
      : shape(s),
        layer(&l),
        cache(s.kv_format, pages, 77),
        weights(prepared(s, l)),
        device_cache(cache.bytes),
        x(static_cast<std::size_t>(s.rows * s.hidden)),
        out(x.size()),
        positions(static_cast<std::size_t>(s.rows)),
        offsets(static_cast<std::size_t>(s.rows + 1)),
        picks(static_cast<std::size_t>(s.rows) * kMaxPicks),
        slots(static_cast<std::size_t>(s.rows)),
        op(s, options) {
    std::vector<LayerBinding> bindings(
        static_cast<std::size_t>(layers),
        {weights.data(), device_cache.data(), cache.stride(), offsets.data(), picks.data()});
    op.set_layers(bindings);
  }
  static std::vector<std::uint8_t> prepared(const DecodeShape& s, const RandomLayer& l) {
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(weight_layout(s).bytes));
    prepare_weights(s, l.tensors, bytes);
    return bytes;
  }
  void upload(const RandomStep& step) {
    x.upload(step.x);
    positions.upload(step.positions);
    slots.upload(step.slots);
    offsets.upload(step.pick_offsets);
    picks.upload(step.picks);
    device_cache.upload(cache.bytes);
    out.fill(0xEE);
  }
  void launch(int rows, int count = 1, cudaStream_t stream = nullptr) {
    op.run(Stream{stream}, {rows, x.data(), out.data(), positions.data(), slots.data()}, 0, count);
  }
  std::vector<std::uint16_t> result(int rows) {
    PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
    op.check();
    std::vector<std::uint16_t> all = out.download();
    all.resize(static_cast<std::size_t>(rows * shape.hidden));
    return all;
  }
};

std::vector<float> floats(const std::vector<std::uint16_t>& bits) {
  std::vector<float> v;
  for (const std::uint16_t b : bits) v.push_back(bf16_value(b));
  return v;
}

// Values of a box: packet j of block b of row s holds values 6 j .. of the block.
std::vector<float> read_box(const std::vector<std::uint32_t>& words, std::int64_t at, int rows,
                            int blocks, int packets, int block_columns, int columns) {
  std::vector<float> v;
  for (int s = 0; s < rows; ++s) {
    for (int c = 0; c < columns; ++c) {
      const int block = c / block_columns;
      const int j = c % block_columns / kPacketValues;
      const int i = c % block_columns % kPacketValues;
      const std::uint32_t w = words[static_cast<std::size_t>(
          (at + (static_cast<std::int64_t>(s) * blocks + block) * packets + j) * 4 + i / 2)];
      v.push_back(bf16_value(static_cast<std::uint16_t>(i % 2 == 0 ? w : w >> 16)));
    }
  }
  return v;
}

struct StageErrors {
  std::vector<std::pair<std::string, double>> stages;
  int routing_flips = 0;
  double layer = 0;
};

std::vector<float> row(const std::vector<float>& m, std::size_t s, std::size_t columns) {
  return {m.begin() + static_cast<std::ptrdiff_t>(s * columns),
          m.begin() + static_cast<std::ptrdiff_t>((s + 1) * columns)};
}

// Runs one layer and compares every stage. Rows are those of one launch.
StageErrors compare(Rig& rig, const RandomStep& step, int rows) {
  rig.op.rearm();
  rig.upload(step);
  rig.launch(rows);
  const std::vector<float> out = floats(rig.result(rows));
  const DecodeShape& s = rig.shape;
  const DecodePlan& p = rig.op.plan(rows);
  const std::vector<std::uint32_t> box = rig.op.mailboxes(0);
  const std::vector<std::uint32_t> window = rig.op.window_words(0);
  const ReferenceStages ref(s, rig.layer->tensors);
  const auto h = static_cast<std::size_t>(s.hidden);
  const auto heads = static_cast<std::size_t>(p.heads);
  StageErrors e;
  const auto add = [&](const char* name, const std::vector<float>& got,
                       const std::vector<float>& want) {
    e.stages.emplace_back(name, relative_l2(got, want));
  };

  const std::vector<float> x = floats(step.x);
  const std::vector<float> c = read_box(box, p.box_qkv_a, rows, p.qkv_a.blocks, p.qkv_a.packets,
                                        p.qkv_a.block_tiles * kTileRows, s.q_lora + kKvRow);
  add("qkv_a", c, ref.qkv_a(x, rows));
  const std::vector<float> q = read_box(box, p.box_q_b, rows, p.q_b.blocks, p.q_b.packets,
                                        p.q_b.block_tiles * kTileRows, p.heads * kQueryHead);
  add("q_b", q, ref.q_b(c, rows, step.positions));
  const std::vector<float> q_lat = read_box(box, p.box_uk, rows, p.uk.blocks, p.uk.packets,
                                            p.uk.block_tiles * kTileRows, p.heads * kLatent);
  add("uk", q_lat, ref.uk(q, rows));

  std::vector<std::uint8_t> new_cache = rig.device_cache.download();
  std::vector<std::vector<float>> fresh;
  std::vector<float> stored;
  std::vector<float> expected;
  RandomCache after = rig.cache;
  after.bytes = new_cache;
  for (std::size_t i = 0; i < static_cast<std::size_t>(rows); ++i) {
    std::vector<std::uint8_t> bytes(1152);
    const auto c_columns = static_cast<std::size_t>(s.q_lora) + kKvRow;
    fresh.push_back(
        ref.cache_row(row(c, i, c_columns), step.positions[i], s.kv_format, bytes.data()));
    if (step.slots[i] < 0) continue;
    // What the kernel stored, read as attention reads it (a pick of exactly this slot, all weight
    // on it).
    RandomCache host = after;
    std::memcpy(host.row_of(step.slots[i]), after.row_of(step.slots[i]),
                static_cast<std::size_t>(kv_row_bytes(s.kv_format)));
    std::size_t differing = 0;
    for (int b = 0; b < kv_row_bytes(s.kv_format); ++b)
      differing += host.row_of(step.slots[i])[b] != bytes[static_cast<std::size_t>(b)];
    stored.push_back(static_cast<float>(differing));
  }
  // A byte may differ where the last bit of a norm falls on a rounding boundary.
  double differing = 0;
  for (const float d : stored) differing += static_cast<double>(d);
  if (!stored.empty()) {
    e.stages.emplace_back("cache_row", differing / static_cast<double>(stored.size()) /
                                           kv_row_bytes(s.kv_format) / 10);
  }
  // Nothing but the new rows changed.
  for (std::int64_t slot = 0; slot < rig.cache.slots(); ++slot) {
    if (std::find(step.slots.begin(), step.slots.end(), slot) != step.slots.end()) continue;
    if (std::memcmp(after.row_of(slot), rig.cache.row_of(slot),
                    static_cast<std::size_t>(kv_row_bytes(s.kv_format))) != 0) {
      ADD_FAILURE() << "cache row " << slot << " changed";
      break;
    }
  }

  const int parts = p.uv_parts;
  const std::vector<float> o = read_box(box, p.box_o, rows, p.heads * parts, p.uv_part_packets(),
                                        kValue / parts, p.heads * kValue);
  std::vector<float> o_want;
  for (std::size_t i = 0; i < static_cast<std::size_t>(rows); ++i) {
    const auto begin = static_cast<std::size_t>(step.pick_offsets[i]);
    const auto count =
        step.slots[i] < 0 ? 0 : static_cast<std::size_t>(step.pick_offsets[i + 1]) - begin;
    const std::vector<float> o_lat = ref.attention(
        row(q, i, heads * kQueryHead), row(q_lat, i, heads * kLatent),
        std::span(step.picks).subspan(begin, count), rig.cache.host(), step.slots, fresh);
    const std::vector<float> o_row = ref.uv(o_lat);
    o_want.insert(o_want.end(), o_row.begin(), o_row.end());
  }
  add("attention+uv", o, o_want);
  const std::vector<float> y = read_box(
      window,
      p.win_attention + static_cast<std::int64_t>(s.rank) * p.capacity * p.grid * p.o.packets, rows,
      p.grid, p.o.packets, p.o.block_tiles * kTileRows, s.hidden);
  add("o", y, ref.o(o, rows));
  const std::vector<float> a =
      read_box(box, p.box_a, rows, p.grid, p.o.packets, p.o.block_tiles * kTileRows, s.hidden);
  add("reduce", a,
      reduce(std::span(x).subspan(0, a.size()), std::vector(static_cast<std::size_t>(s.ranks), y)));
  std::vector<float> scores;
  for (int i = 0; i < rows; ++i) {
    for (int ex = 0; ex < s.experts; ++ex) {
      const std::int64_t packet =
          p.box_router +
          (static_cast<std::int64_t>(i) * p.grid + ex / p.router_rows) * p.router_packets +
          ex % p.router_rows / 3;
      float v;
      std::memcpy(&v, &box[static_cast<std::size_t>(packet * 4 + ex % p.router_rows % 3)], 4);
      scores.push_back(v);
    }
  }
  const std::vector<float> score_want = ref.scores(a, rows);
  if (s.dense) {
    scores = score_want;  // a kernel may leave the router out
  } else {
    add("router", scores, score_want);
  }

  const std::vector<float> y2 = read_box(
      window, p.win_experts + static_cast<std::int64_t>(s.rank) * p.capacity * p.grid * p.o.packets,
      rows, p.grid, p.o.packets, p.o.block_tiles * kTileRows, s.hidden);
  std::vector<float> mids;
  std::vector<float> mid_want;
  std::vector<float> y2_got;
  std::vector<float> y2_want;
  std::vector<float> out_got;
  std::vector<float> out_want;
  for (std::size_t i = 0; i < static_cast<std::size_t>(rows); ++i) {
    if (step.slots[i] < 0) continue;
    std::vector<int> experts;
    std::vector<int> by_reference;
    std::vector<float> weights;
    std::vector<float> unused;
    ref.select(row(score_want, i, static_cast<std::size_t>(s.experts)), by_reference, unused);
    ref.select(row(scores, i, static_cast<std::size_t>(s.experts)), experts, weights);
    e.routing_flips += experts != by_reference;
    std::vector<double> sum(h, 0.0);
    for (std::size_t k = 0; k <= experts.size(); ++k) {
      const int expert = k == 0 ? s.experts : experts[k - 1];
      std::vector<float> mid;
      for (int m = 0; m < p.inter; ++m) {
        const std::int64_t packet =
            p.box_mid +
            (static_cast<std::int64_t>(i) * (s.top_k + 1) + static_cast<std::int64_t>(k)) *
                p.mid_packets() +
            m / 4;
        const std::uint32_t w = box[static_cast<std::size_t>(packet * 4 + m % 4 / 2)];
        mid.push_back(bf16_value(static_cast<std::uint16_t>(m % 2 == 0 ? w : w >> 16)));
      }
      const std::vector<float> want = ref.mid(row(a, i, h), expert);
      mids.insert(mids.end(), mid.begin(), mid.end());
      mid_want.insert(mid_want.end(), want.begin(), want.end());
      ref.down(mid, expert, k == 0 ? 1.0F : weights[k - 1], sum);
    }
    std::vector<float> y2_row;
    for (const double v : sum) y2_row.push_back(bf16_value(bf16_bits(static_cast<float>(v))));
    y2_want.insert(y2_want.end(), y2_row.begin(), y2_row.end());
    const std::vector<float> kernel_row = row(y2, i, h);
    y2_got.insert(y2_got.end(), kernel_row.begin(), kernel_row.end());
    const std::vector<float> x_row =
        reduce(row(a, i, h), std::vector(static_cast<std::size_t>(s.ranks), kernel_row));
    out_want.insert(out_want.end(), x_row.begin(), x_row.end());
    const std::vector<float> got = row(out, i, h);
    out_got.insert(out_got.end(), got.begin(), got.end());
  }
  add("mid", mids, mid_want);
  add("down", y2_got, y2_want);
  add("output", out_got, out_want);

  if (s.ranks == 1) {
    DecodeShape now = s;
    now.rows = rows;
    RandomCache cache = rig.cache;
    std::vector<std::uint16_t> whole(step.x.size());
    run_reference_layer(now, rig.layer->tensors, step.input(), cache.host(), cache.slots(), step.x,
                        whole);
    std::vector<float> got;
    std::vector<float> want;
    for (std::size_t i = 0; i < static_cast<std::size_t>(rows); ++i) {
      if (step.slots[i] < 0) continue;
      const std::vector<float> g = row(out, i, h);
      const std::vector<float> w = row(floats(whole), i, h);
      got.insert(got.end(), g.begin(), g.end());
      want.insert(want.end(), w.begin(), w.end());
    }
    e.layer = relative_l2(got, want);
  }
  return e;
}

void expect_close(const StageErrors& e, const std::string& what) {
  std::string line = what + ":";
  for (const auto& [name, error] : e.stages) {
    EXPECT_LE(error, 2e-3) << what << " stage " << name;
    line += fmt::format(" {} {:.1e}", name, error);
  }
  // A flip of two near-tied experts changes a row for good reason: counted, not compared.
  if (e.routing_flips == 0) {
    EXPECT_LE(e.layer, 5e-3) << what;
  }
  fmt::print("{} layer {:.1e} flips {}\n", line, e.layer, e.routing_flips);
}

DecodeShape glm5_shard(int rows) {
  DecodeShape s;
  s.rows = rows;
  s.ranks = 8;
  s.rank = 3;
  s.experts = 32;  // geometry of GLM-5; fewer experts keep the test's memory and time down
  return s;
}

std::vector<int> pick_counts(int rows) {
  const std::vector<int> all = {2048, 1, 64, 65, 2000, 33, 1024, 500};
  return {all.begin(), all.begin() + rows};
}

TEST(DecodeLayerGpu, KernelResources) {
  for (const int rows : {1, 2, 4, 8}) {
    KernelResources r{};
    ASSERT_EQ(decode_kernel_resources(rows, &r), 0);
    fmt::print("rows {}: {} registers, {} B local\n", rows, r.registers, r.local_bytes);
    EXPECT_LE(r.registers, 168);
  }
}

TEST(DecodeLayerGpu, TinyStagesMatchTheReference) {
  for (const KvFormat format : {KvFormat::kBf16, KvFormat::kFp8Scaled, KvFormat::kFp8}) {
    DecodeShape s = tiny_shape();
    s.rows = 8;
    s.kv_format = format;
    const RandomLayer layer(s, 21);
    Rig rig(s, {}, layer, 64);
    for (const int rows : {1, 2, 3, 4, 7, 8}) {
      const RandomStep step(s, rig.cache.slots(), pick_counts(rows),
                            100U + static_cast<unsigned>(rows));
      expect_close(compare(rig, step, rows),
                   fmt::format("tiny kv {} rows {}", static_cast<int>(format), rows));
    }
  }
}

TEST(DecodeLayerGpu, Glm5ShardStagesMatchTheReference) {
  DecodeShape s = glm5_shard(8);
  const RandomLayer layer(s, 22, 3);
  DecodeOptions options;
  options.self_loop = true;
  Rig rig(s, options, layer, 64);
  for (const int rows : {1, 2, 4, 8}) {
    const RandomStep step(s, rig.cache.slots(), pick_counts(rows),
                          200U + static_cast<unsigned>(rows));
    expect_close(compare(rig, step, rows), fmt::format("glm5 tp8 rows {}", rows));
  }
}

TEST(DecodeLayerGpu, DenseLayersMatchTheReference) {
  for (const int width : {512, 1536}) {  // 1 and 5 slices beside the first
    DecodeShape s = dense_shape(tiny_shape(), width);
    s.rows = 8;
    const RandomLayer layer(s, 28);
    Rig rig(s, {}, layer, 64);
    for (const int rows : {1, 2, 8}) {
      // Few picks: attention is the other tests' subject.
      const RandomStep step(s, rig.cache.slots(),
                            std::vector<int>(static_cast<std::size_t>(rows), 60),
                            500U + static_cast<unsigned>(rows));
      expect_close(compare(rig, step, rows), fmt::format("dense {} rows {}", width, rows));
    }
  }
}

TEST(DecodeLayerGpu, ReplaysWidthAndPaddingKeepTheBits) {
  DecodeShape s = tiny_shape();
  s.rows = 16;
  const RandomLayer layer(s, 23);
  Rig rig(s, {}, layer, 64);
  std::vector<int> counts;
  for (int i = 0; i < 16; ++i) counts.push_back(i % 5 == 3 ? -1 : 40 * i + 1);
  const RandomStep step(s, rig.cache.slots(), counts, 31);
  rig.upload(step);
  rig.launch(16);
  const std::vector<std::uint16_t> first = rig.result(16);
  const std::vector<std::uint8_t> cache = rig.device_cache.download();
  for (int replay = 0; replay < 20; ++replay) {
    rig.out.fill(replay);
    rig.launch(16);
    std::vector<std::uint16_t> again = rig.result(16);
    for (std::size_t i = 0; i < 16; ++i) {
      const auto h = static_cast<std::size_t>(s.hidden);
      for (std::size_t k = i * h; k < (i + 1) * h; ++k) {
        ASSERT_EQ(again[k], counts[i] < 0 ? static_cast<std::uint16_t>(replay * 257) : first[k])
            << "row " << i;
      }
    }
    ASSERT_EQ(rig.device_cache.download(), cache);
  }
  // Each row alone.
  const auto h = static_cast<std::size_t>(s.hidden);
  for (std::size_t i = 0; i < 16; ++i) {
    if (counts[i] < 0) continue;
    RandomStep one = step;
    one.x.assign(step.x.begin() + static_cast<std::ptrdiff_t>(i * h),
                 step.x.begin() + static_cast<std::ptrdiff_t>((i + 1) * h));
    one.positions = {step.positions[i]};
    one.slots = {step.slots[i]};
    one.picks.assign(step.picks.begin() + step.pick_offsets[i],
                     step.picks.begin() + step.pick_offsets[i + 1]);
    one.pick_offsets = {0, static_cast<std::int32_t>(one.picks.size())};
    rig.upload(one);
    rig.launch(1);
    const std::vector<std::uint16_t> alone = rig.result(1);
    for (std::size_t k = 0; k < h; ++k)
      ASSERT_EQ(alone[k], first[i * h + k]) << "row " << i << " column " << k;
  }
}

TEST(DecodeLayerGpu, SeveralLayersALaunchAndGraphsEqualSingleLaunches) {
  DecodeShape s = tiny_shape();
  s.rows = 4;
  const RandomLayer layer(s, 24);
  constexpr int kLayers = 3;
  Rig rig(s, {}, layer, 16, kLayers);
  cudaStream_t stream;
  PENSTOCK_CUDA_CHECK(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  PENSTOCK_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  rig.op.run(Stream{stream},
             {4, rig.x.data(), rig.out.data(), rig.positions.data(), rig.slots.data()}, 0, 1);
  rig.op.run(Stream{stream},
             {4, rig.out.data(), rig.out.data(), rig.positions.data(), rig.slots.data()}, 1, 2);
  PENSTOCK_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  PENSTOCK_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  for (unsigned round = 0; round < 50; ++round) {
    const RandomStep step(s, rig.cache.slots(), {100, 3, -1, 700}, 300 + round);
    rig.upload(step);
    for (int i = 0; i < kLayers; ++i) {
      rig.op.run(Stream{},
                 {4, i == 0 ? rig.x.data() : rig.out.data(), rig.out.data(), rig.positions.data(),
                  rig.slots.data()},
                 i, 1);
    }
    const std::vector<std::uint16_t> single = rig.result(4);
    rig.upload(step);
    rig.launch(4, kLayers);
    const std::vector<std::uint16_t> together = rig.result(4);
    rig.upload(step);
    PENSTOCK_CUDA_CHECK(cudaGraphLaunch(exec, stream));
    const std::vector<std::uint16_t> replayed = rig.result(4);
    for (std::size_t i = 0; i < single.size(); ++i) {
      if (i / static_cast<std::size_t>(s.hidden) == 2) continue;  // padding: out is not written
      ASSERT_EQ(single[i], together[i]) << "round " << round << " at " << i;
      ASSERT_EQ(single[i], replayed[i]) << "round " << round << " at " << i;
    }
  }
  PENSTOCK_CUDA_CHECK(cudaGraphExecDestroy(exec));
  PENSTOCK_CUDA_CHECK(cudaGraphDestroy(graph));
  PENSTOCK_CUDA_CHECK(cudaStreamDestroy(stream));
}

TEST(DecodeLayerGpu, TwoVirtualRanksEqualTheReference) {
  DecodeShape s = tiny_shape();
  s.rows = 4;
  s.ranks = 2;
  const RandomLayer layer(s, 25);
  DecodeOptions options;
  options.deadline_s = 2;
  Rig first(s, options, layer, 16);
  DecodeShape other = s;
  other.rank = 1;
  Rig second(other, options, layer, 16);
  void* const windows[2] = {first.op.window(), second.op.window()};
  first.op.connect(windows);
  second.op.connect(windows);
  cudaStream_t streams[2];
  for (auto& stream : streams)
    PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (unsigned round = 0; round < 20; ++round) {
    const RandomStep step(s, first.cache.slots(), {100, 3, 64, 700}, 400 + round);
    first.upload(step);
    second.upload(step);
    first.launch(4, 1, streams[0]);
    second.launch(4, 1, streams[1]);
    const std::vector<std::uint16_t> a = first.result(4);
    const std::vector<std::uint16_t> b = second.result(4);
    ASSERT_EQ(a, b) << "ranks must agree bit for bit";
    RandomCache cache = first.cache;
    std::vector<std::uint16_t> want(step.x.size());
    run_reference_layer(s, layer.tensors, step.input(), cache.host(), cache.slots(), step.x, want);
    EXPECT_LE(relative_l2(floats(a), floats(want)), 5e-3);
  }
  for (auto& stream : streams) PENSTOCK_CUDA_CHECK(cudaStreamDestroy(stream));
}

// Both ranks replay a graph of three layers, each behind a delay of its own and another one at
// every replay, so that now this rank and now the other one comes late.
TEST(DecodeLayerGpu, TenThousandGraphLaunchesWithDelayedRanksKeepTheBits) {
  constexpr int kLaunches = 10000;
  constexpr int kLayers = 3;
  DecodeShape s = tiny_shape();
  s.rows = 4;
  s.ranks = 2;
  const RandomLayer layer(s, 29);
  DecodeOptions options;
  options.deadline_s = 2;
  Rig first(s, options, layer, 16, kLayers);
  DecodeShape other = s;
  other.rank = 1;
  Rig second(other, options, layer, 16, kLayers);
  void* const windows[2] = {first.op.window(), second.op.window()};
  Rig* const rigs[2] = {&first, &second};
  const RandomStep step(s, first.cache.slots(), {100, 3, -1, 700}, 600);
  cudaStream_t streams[2];
  cudaGraph_t graphs[2];
  cudaGraphExec_t execs[2];
  DeviceBuffer<std::uint32_t> calls(std::vector<std::uint32_t>{0, 77});
  for (int r = 0; r < 2; ++r) {
    rigs[r]->op.connect(windows);
    rigs[r]->upload(step);
    PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking));
    PENSTOCK_CUDA_CHECK(cudaStreamBeginCapture(streams[r], cudaStreamCaptureModeThreadLocal));
    PENSTOCK_CUDA_CHECK(launch_delay(calls.data() + r, 40'000, streams[r]));
    rigs[r]->launch(4, kLayers, streams[r]);
    PENSTOCK_CUDA_CHECK(cudaStreamEndCapture(streams[r], &graphs[r]));
    PENSTOCK_CUDA_CHECK(cudaGraphInstantiate(&execs[r], graphs[r], 0));
  }
  PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
  std::vector<std::uint16_t> want;
  int differing = 0;
  for (int i = 0; i < kLaunches && differing == 0; ++i) {
    for (int r = 0; r < 2; ++r) PENSTOCK_CUDA_CHECK(cudaGraphLaunch(execs[r], streams[r]));
    for (int r = 0; r < 2; ++r) PENSTOCK_CUDA_CHECK(cudaStreamSynchronize(streams[r]));
    for (Rig* rig : rigs) {
      rig->op.check();
      const std::vector<std::uint16_t> got = rig->out.download();
      if (want.empty()) want = got;
      differing += got != want ? 1 : 0;
    }
    EXPECT_EQ(differing, 0) << "launch " << i;
  }
  EXPECT_EQ(calls.download(), (std::vector<std::uint32_t>{kLaunches, kLaunches + 77}));
  for (int r = 0; r < 2; ++r) {
    PENSTOCK_CUDA_CHECK(cudaGraphExecDestroy(execs[r]));
    PENSTOCK_CUDA_CHECK(cudaGraphDestroy(graphs[r]));
    PENSTOCK_CUDA_CHECK(cudaStreamDestroy(streams[r]));
  }
}

TEST(DecodeLayerGpu, AMissingPeerIsAFaultAndRearmGoesOn) {
  DecodeShape s = tiny_shape();
  s.ranks = 2;
  const RandomLayer layer(s, 26);
  DecodeOptions options;
  options.deadline_s = 0.05;
  Rig first(s, options, layer, 16);
  DecodeShape other = s;
  other.rank = 1;
  Rig second(other, options, layer, 16);
  void* const windows[2] = {first.op.window(), second.op.window()};
  first.op.connect(windows);
  second.op.connect(windows);
  const RandomStep step(s, first.cache.slots(), {100}, 27);
  first.upload(step);
  second.upload(step);
  first.launch(1);
  PENSTOCK_CUDA_CHECK(cudaDeviceSynchronize());
  try {
    first.op.check();
    FAIL() << "no fault";
  } catch (const Fault& fault) {
    EXPECT_EQ(fault.record().stage, kStageReduceAttention) << fault.what();
    EXPECT_GE(fault.record().waited_ns, 50'000'000U);
  }
  first.op.rearm();
  second.op.rearm();
  cudaStream_t streams[2];
  for (auto& stream : streams)
    PENSTOCK_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  first.launch(1, 1, streams[0]);
  second.launch(1, 1, streams[1]);
  EXPECT_EQ(first.result(1), second.result(1));
  for (auto& stream : streams) PENSTOCK_CUDA_CHECK(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace penstock::decode::test
