// penstock layout OP: what an operator's window holds, before anything is allocated.
#include "penstock/fabric/layout.h"

#include <fmt/format.h>

#include "cli/command.h"
#include "penstock/core/digest.h"
#include "penstock/fabric/all_reduce.h"
#include "penstock/ops/a2a_gemm/layout.h"
#include "penstock/ops/moe_stage2/layout.h"

namespace penstock::cli {
namespace {

int run(const Command& command, const Layout& layout) {
  if (!command.json) {
    write_stdout(layout.describe());
    return kExitOk;
  }
  Json regions = Json::array();
  for (const RegionSpan& region : layout.regions()) {
    regions.push_back({{"name", region.name},
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
    return run(command, moe_stage2::window_layout(choice->shape, !choice->direct));
  });
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
    return run(command, a2a_gemm::window_layout(
                            a2a_gemm::even_shape(
                                choice->ranks, choice->sequence / choice->ranks,
                                choice->hidden / choice->ranks, choice->hidden,
                                choice->fp8 ? a2a_gemm::Format::kFp8 : a2a_gemm::Format::kBf16),
                            choice->row_block, !choice->direct));
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
  bind(*all_reduce, command, [&command, shape] { return run(command, all_reduce_layout(*shape)); });
  add_moe_stage2(*sub, command);
  add_a2a_gemm(*sub, command);
}

}  // namespace penstock::cli
