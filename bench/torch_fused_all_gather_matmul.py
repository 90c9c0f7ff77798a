#!/usr/bin/env python3
"""PyTorch's fused_all_gather_matmul as an outside reference beside a2a_gemm.

    torchrun --nproc-per-node 2 bench/torch_fused_all_gather_matmul.py [--hidden 8192] [--seq 8192 16384 65536]

The all-gather form of the same volume: with P ranks, sequence S and hidden H each rank holds A [S / P / P, H] and
B [H, H], gathers A to [S / P, H] and multiplies, which is the M, N, K and the received bytes of one rank of a2a_gemm.
Prints one JSON line a size from rank 0: the fused operator, all-gather then matmul, and the matmul alone, interleaved,
medians over the slowest rank of each round.
"""
import argparse
import json
import os
import statistics
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--seq", type=int, nargs="+", default=[8192, 16384, 65536])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=5)
    arguments = parser.parse_args()
    try:
        import torch
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symm_mem
    except ImportError as error:
        sys.exit(f"this needs PyTorch with symmetric memory: {error}")
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun, one process a GPU")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", world)), torch.cuda.device_count()
    if gpus < here:
        sys.exit(f"{here} ranks on a host with {gpus} GPUs: NCCL and symmetric memory want a GPU a rank")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD.group_name
    if hasattr(symm_mem, "enable_symm_mem_for_group"):
        symm_mem.enable_symm_mem_for_group(group)
    scrub = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    torch.manual_seed(rank)
    for seq in arguments.seq:
        rows = seq // world // world
        a_shard = torch.randn(rows, arguments.hidden, dtype=torch.bfloat16, device=device)
        b = torch.randn(arguments.hidden, arguments.hidden, dtype=torch.bfloat16, device=device).t().contiguous().t()
        gathered = torch.empty(rows * world, arguments.hidden, dtype=torch.bfloat16, device=device)

        def unfused():
            dist.all_gather_into_tensor(gathered, a_shard)
            return gathered @ b

        def fused():
            return torch.ops.symm_mem.fused_all_gather_matmul(a_shard, [b], gather_dim=0, group_name=group)[1][0]

        variants = {"fused_all_gather_matmul": fused, "all_gather_then_matmul": unfused,
                    "matmul": lambda: gathered @ b}
        error = ((fused().float() - unfused().float()).norm() / unfused().float().norm()).item()
        times: dict[str, list[float]] = {name: [] for name in variants}
        names = list(variants)
        for step in range(arguments.warmup + arguments.rounds):
            for i in range(len(names)):
                name = names[(i + step) % len(names)]
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                scrub.fill_(step % 256)
                dist.barrier()
                begin.record()
                variants[name]()
                end.record()
                torch.cuda.synchronize()
                slowest = torch.tensor([begin.elapsed_time(end) * 1e3], device=device)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                if step >= arguments.warmup:
                    times[name].append(slowest.item())
        if rank == 0:
            medians = {name: statistics.median(values) for name, values in times.items()}
            print(json.dumps({"bench": "torch_fused_all_gather_matmul", "torch": torch.__version__,
                              "machine": torch.cuda.get_device_name(device), "ranks": world, "hidden": arguments.hidden,
                              "sequence": seq, "format": "bf16", "samples": arguments.rounds, "relative_error": error,
                              "median_us": medians,
                              "over_matmul": {n: v / medians["matmul"] for n, v in medians.items()}}), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
