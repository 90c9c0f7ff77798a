// penstock layout OP: what an operator's window holds, before anything is allocated.
#include "penstock/fabric/layout.h"

#include <fmt/format.h>

#include "cli/command.h"
#include "penstock/core/digest.h"
#include "penstock/core/error.h"
#include "penstock/fabric/all_reduce.h"
#include "penstock/ops/a2a_gemm/layout.h"
#include "penstock/ops/decode_layer/plan.h"
#include "penstock/ops/moe_stage2/layout.h"

namespace penstock::cli {
namespace {

// A region's bytes as the product of named numbers.
struct Factor {
  std::string_view name;
  std::uint64_t value;
};
using Formula = std::vector<Factor>;

// "2 slots x 8 ranks x 6336 row bytes". Throws where the product is not what the layout holds: a
// formula that is printed has to be the one that allocates.
std::string formula_text(const RegionSpan& region, const Formula& formula) {
  std::uint64_t product = 1;
  std::string text;
  for (const Factor& factor : formula) {
    product *= factor.value;
    if (!text.empty()) text += " x ";
    text += fmt::format("{} {}", factor.value, factor.name);
  }
  require(product == region.bytes, ErrorKind::kBackend, [&] {
    return fmt::format("region {}: {} is {} bytes, the layout has {}", region.name, text, product,
                       region.bytes);
  });
  return text;
}

// `formulas` has one a region, in their order; `words` say where the numbers come from.
int run(const Command& command, const Layout& layout, const std::vector<Formula>& formulas,
        const std::string& words) {
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < formulas.size(); ++i) {
    texts.push_back(formula_text(layout.regions()[i], formulas[i]));
  }
  if (!command.json) {
    std::string text = layout.describe() + "bytes of each region\n";
    for (std::size_t i = 0; i < texts.size(); ++i) {
      text += fmt::format("  {:>2}  {}\n", i, texts[i]);
    }
    write_stdout(text + words);
    return kExitOk;
  }
  Json regions = Json::array();
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const RegionSpan& region = layout.regions()[i];
    regions.push_back({{"name", region.name},
                       {"formula", texts[i]},
                       {"offset", region.offset},
                       {"bytes", region.bytes},
                       {"alignment", region.alignment},
                       {"writer", to_string(region.writer)},
                       {"reader", to_string(region.reader)}});
  }
  print_json({{"operator", layout.name()},
              {"shape", layout.shape_text()},
              {"bytes", layout.total_bytes()},
              {"digest", to_hex(layout.digest())},
              {"regions", regions}});
  return kExitOk;
}

int run_all_reduce(const Command& command, const AllReduceShape& shape) {
  const auto ranks = static_cast<int>(shape.ranks);
  const std::uint64_t capacity = all_reduce_capacity(shape);
  const Factor packet{"bytes of a packet", sizeof(Packet)};
  return run(
      command, all_reduce_layout(shape),
      {{{"packets", one_shot_packets(ranks, capacity)}, packet},
       {{"packets", two_shot_reduce_packets(ranks, capacity)}, packet},
       {{"packets", two_shot_gather_packets(capacity)}, packet}},
      "packets: 3 f32 each, of two calls; one_shot holds those of all ranks, reduce a rank's "
      "share from each rank, gather every rank's sums\n");
}

int run_moe_stage2(const Command& command, const moe_stage2::Shape& shape, bool staged) {
  const Layout layout = window_layout(shape, staged);
  const moe_stage2::WindowShape w = window_shape(shape, staged);
  const Factor slots{"calls", moe_stage2::kSlots};
  const Factor ranks{"ranks", w.ranks};
  const Factor row{"row bytes", w.row_bytes};
  const Factor table{"table bytes", moe_stage2::table_bytes(w)};
  const Factor line{"bytes of a line", moe_stage2::kLineBytes};
  return run(
      command, layout,
      {{slots, ranks, {"staged rows", w.staged}, row},
       {slots, ranks, table},
       {slots, ranks, {"reserved rows", w.reserved}, row},
       {slots, ranks, table},
       {ranks, {"spill rows", w.spill}, row},
       {slots, ranks, line},
       {slots, ranks, line}},
      fmt::format(
          "row bytes: hidden {} as {}, rounded up to 16\n"
          "reserved rows: tokens {} x top-k {} / ranks {} x row slack {:g}, rounded up, at most a "
          "pair's worst case {}\n"
          "staged rows: the reserved ones, or none where rows are stored at the peer directly\n"
          "spill rows: a pair's worst case less the reserved rows\n"
          "table bytes: a head of {} and 4 for each row of a pair's worst case, rounded up to {}\n",
          shape.hidden,
          shape.wire == moe_stage2::WireFormat::kFp8 ? "E4M3 and an E8M0 for 32 of them" : "bf16",
          shape.max_tokens_per_rank, shape.top_k, shape.ranks, shape.row_slack,
          worst_rows_per_pair(shape), moe_stage2::kLineBytes, moe_stage2::kLineBytes));
}

// GLM-5 on eight ranks unless told otherwise.
void add_moe_stage2(CLI::App& parent, Command& command) {
  struct Choice {
    moe_stage2::Shape shape;
    bool fp8 = true;
    bool direct = false;
  };
  CLI::App* sub = parent.add_subcommand("moe-stage2", "Down projection and combine of the experts");
  const auto choice = std::make_shared<Choice>();
  moe_stage2::Shape& shape = choice->shape;
  shape.ranks = 8;
  shape.experts = 256;
  shape.top_k = 8;
  shape.hidden = 6144;
  shape.intermediate = 2048;
  shape.max_tokens_per_rank = 4096;
  sub->add_option("--ranks", shape.ranks, "Ranks of the team")->capture_default_str();
  sub->add_option("--experts", shape.experts, "Routed experts of all ranks")->capture_default_str();
  sub->add_option("--top-k", shape.top_k, "Experts of a token")->capture_default_str();
  sub->add_option("--hidden", shape.hidden, "Columns of a row")->capture_default_str();
  sub->add_option("--intermediate", shape.intermediate, "Depth of the product")
      ->capture_default_str();
  sub->add_option("--tokens", shape.max_tokens_per_rank, "Most tokens of a rank")
      ->capture_default_str();
  sub->add_option("--row-slack", shape.row_slack, "Reservation of a pair over the even share")
      ->capture_default_str();
  sub->add_flag("--fp8,!--bf16", choice->fp8, "Wire format of the rows (fp8)");
  sub->add_flag("--direct", choice->direct, "Rows go to the peer without a send region");
  bind(*sub, command, [&command, choice] {
    choice->shape.wire = choice->fp8 ? moe_stage2::WireFormat::kFp8 : moe_stage2::WireFormat::kBf16;
    return run_moe_stage2(command, choice->shape, !choice->direct);
  });
}

int run_a2a_gemm(const Command& command, const a2a_gemm::Shape& shape, std::int32_t row_block,
                 bool staged) {
  const Layout layout = a2a_gemm::window_layout(shape, row_block, staged);
  const a2a_gemm::WindowShape w = a2a_gemm::window_shape(shape, row_block, staged);
  const Factor slots{"calls", a2a_gemm::kSlots};
  const Factor ranks{"ranks", w.ranks};
  const Factor row{"row bytes", w.row_bytes};
  const Factor blocks{"scales of a row", w.scale_blocks};
  const Factor f32{"bytes of a scale", 4};
  return run(
      command, layout,
      {{slots, {"staged rows", w.staged_rows}, row},
       {slots, blocks, {"staged rows, padded", a2a_gemm::scale_stride(w.staged_rows)}, f32},
       {slots, ranks, {"rows", w.max_rows}, row},
       {slots, ranks, blocks, {"rows, padded", a2a_gemm::scale_stride(w.max_rows)}, f32},
       {slots,
        ranks,
        {"bytes of the words of the row blocks", a2a_gemm::arrival_stride(w.row_blocks)}},
       {slots, ranks, {"bytes of a line", a2a_gemm::kLineBytes}}},
      fmt::format("rows: of the rank that has most; row bytes: depth {} of a chunk as {}\n"
                  "staged rows: all rows of X, or none where they are stored at the peer directly\n"
                  "scales of a row: one for {} columns (fp8); padded: rounded up to {}\n"
                  "words: 8 bytes for each of {} row blocks of {} rows, rounded up to {}\n",
                  shape.depth, to_string(shape.format), a2a_gemm::kScaleBlock,
                  a2a_gemm::kScaleRowUnit, w.row_blocks, row_block, a2a_gemm::kLineBytes));
}

// Hidden 8192 and a sequence of 16384 over two ranks unless told otherwise.
void add_a2a_gemm(CLI::App& parent, Command& command) {
  struct Choice {
    int ranks = 2;
    std::int32_t sequence = 16384;
    std::int32_t hidden = 8192;
    std::int32_t row_block = 256;
    bool fp8 = false;
    bool direct = false;
  };
  CLI::App* sub =
      parent.add_subcommand("a2a-gemm", "All-to-all and the projection that consumes it");
  const auto choice = std::make_shared<Choice>();
  sub->add_option("--ranks", choice->ranks, "Ranks of the team")
      ->check(CLI::Range(1, a2a_gemm::kMaxRanks))
      ->capture_default_str();
  sub->add_option("--sequence", choice->sequence, "Rows of all ranks together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub->add_option("--hidden", choice->hidden, "Columns, and depth of all chunks together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub->add_option("--row-block", choice->row_block, "Rows that are announced together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub->add_flag("--fp8,!--bf16", choice->fp8, "Elements of X and W (bf16)");
  sub->add_flag("--direct", choice->direct, "X goes to the peer without a send region");
  bind(*sub, command, [&command, choice] {
    if (choice->sequence % choice->ranks != 0 || choice->hidden % choice->ranks != 0) {
      throw UsageError(
          fmt::format("--sequence {} and --hidden {} have to be multiples of --ranks {}",
                      choice->sequence, choice->hidden, choice->ranks));
    }
    const auto shape = a2a_gemm::even_shape(
        choice->ranks, choice->sequence / choice->ranks, choice->hidden / choice->ranks,
        choice->hidden, choice->fp8 ? a2a_gemm::Format::kFp8 : a2a_gemm::Format::kBf16);
    return run_a2a_gemm(command, shape, choice->row_block, !choice->direct);
  });
}

// The window of decode_layer depends on how many multiprocessors work: an H200's unless told
// otherwise.
void add_decode_layer(CLI::App& parent, Command& command) {
  struct Choice {
    decode::DecodeShape shape;
    int sms = 132;
    int smem = 232448;
  };
  CLI::App* sub = parent.add_subcommand("decode-layer", "A GLM-5 layer as one launch");
  const auto choice = std::make_shared<Choice>();
  choice->shape.ranks = 8;
  choice->shape.rows = 8;
  sub->add_option("--ranks", choice->shape.ranks, "Ranks of the team")->capture_default_str();
  sub->add_option("--rows", choice->shape.rows, "Most rows of a step")->capture_default_str();
  sub->add_option("--sms", choice->sms, "Multiprocessors of a rank")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  sub->add_option("--smem", choice->smem, "Shared memory of a block, bytes")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  bind(*sub, command, [&command, choice] {
    const decode::DecodePlan plan = decode::make_plan(choice->shape, choice->sms, choice->smem, 1);
    constexpr std::uint64_t kPacketBytes = 16;
    const auto count = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
    const std::uint64_t each = count(plan.win_experts - plan.win_attention) * kPacketBytes;
    std::vector<RegionSpan> regions;
    std::vector<Formula> formulas;
    for (int parity = 0; parity < 2; ++parity) {
      for (const char* stage : {"attention", "experts"}) {
        regions.push_back({fmt::format("{}_{}", stage, parity), each * regions.size(), each,
                           kPacketBytes, Access::kPeers, Access::kOwner});
        formulas.push_back({{"rows", count(plan.capacity)},
                            {"ranks", count(plan.ranks)},
                            {"blocks of columns", count(plan.grid)},
                            {"packets", count(plan.o.packets)},
                            {"bytes of a packet", kPacketBytes}});
      }
    }
    return run(
        command, Layout("decode_layer", describe(choice->shape), std::move(regions)), formulas,
        fmt::format("parities 0 and 1: layers alternate\n"
                    "rows: of one launch; blocks of columns: one a working CTA, {} tiles of 8 "
                    "columns each; packets: 3 f32 sums each\n",
                    plan.o.block_tiles));
  });
}

}  // namespace

void add_layout(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand("layout", "Print the regions of an operator's window");
  sub->require_subcommand(1);
  CLI::App* all_reduce = sub->add_subcommand("all_reduce", "The packet all-reduce");
  const auto shape = std::make_shared<AllReduceShape>();
  shape->ranks = 2;
  shape->max_elements = 16 * 6144;
  all_reduce->add_option("--ranks", shape->ranks, "Ranks of the team")
      ->check(CLI::Range(1, kMaxRanks))
      ->capture_default_str();
  all_reduce->add_option("--elements", shape->max_elements, "f32 elements of the largest call")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1} << 32))
      ->capture_default_str();
  bind(*all_reduce, command, [&command, shape] { return run_all_reduce(command, *shape); });
  add_moe_stage2(*sub, command);
  add_a2a_gemm(*sub, command);
  add_decode_layer(*sub, command);
}

}  // namespace penstock::cli
