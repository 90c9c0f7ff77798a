#!/usr/bin/env python3
"""Decode speed of Hugging Face transformers on the CPU beside Penstock's, same checkpoint, same prompt, same run.

transformers cannot load block-scaled FP8 weights on a CPU, so the weights are dequantised here (w = code * scale, the
checkpoint's own rule) into a plain temporary checkpoint, which transformers loads in --dtype and runs greedily with
its cache. Both sides generate the same number of tokens from the same prompt; the tokens are compared.

Where torch or transformers is missing, or transformers lacks the architecture, the comparison is skipped: one line
says why, and the exit code is 0. Exit code 1: a side failed, or --require was given and Penstock is not that many
times faster. The tokens may differ in --dtype bfloat16 only; in float32 a difference is exit code 1 too."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

SCALE = "_scale_inv"
BLOCK = 128


def skip(reason: str, as_json: bool) -> None:
    """Says why there is nothing to compare and ends the program."""
    print(json.dumps({"bench": "transformers", "skipped": reason}) if as_json else f"transformers: skipped, {reason}")
    sys.exit(0)


def write_plain_checkpoint(torch, model: pathlib.Path, out: pathlib.Path, dtype) -> None:
    """Writes `model` with every FP8 weight multiplied by its 128x128 block scales, and a config that says so."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors = {}
    for path in sorted(model.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                tensors[name] = file.get_tensor(name)
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            continue
        scale = tensors.get(name + SCALE)
        if scale is not None:
            rows, cols = tensor.shape
            wide = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
            tensor = tensor.to(torch.float32) * wide
        # The router's bias needs f32: in bf16 the order of experts is lost.
        keep = name.endswith("e_score_correction_bias")
        plain[name] = tensor.to(torch.float32 if keep else dtype).contiguous()
    save_file(plain, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config.pop("quantization_config", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(config))


def run_transformers(torch, model, prompt: list[int], count: int) -> tuple[list[int], float, list[float]]:
    """Greedy tokens, prefill seconds and the seconds of each decode step."""
    tokens, steps = [], []
    with torch.inference_mode():
        start = time.perf_counter()
        out = model(torch.tensor([prompt]), use_cache=True)
        prefill = time.perf_counter() - start
        while True:
            tokens.append(int(out.logits[0, -1].argmax()))
            if len(tokens) == count:
                return tokens, prefill, steps
            start = time.perf_counter()
            out = model(torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, use_cache=True)
            steps.append(time.perf_counter() - start)


def run_penstock(binary: str, model: pathlib.Path, prompt: list[int], count: int, threads: int) -> dict:
    """What `penstock generate --json` says."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(" ".join(map(str, prompt)))
        file.flush()
        done = subprocess.run(
            [binary, "generate", str(model), "--prompt-tokens", file.name, "--max-tokens", str(count), "--ignore-eos",
             "--threads", str(threads), "--json", "--quiet"],
            capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"compare_transformers: {binary} ended with {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=pathlib.Path, required=True, help="checkpoint directory (byte vocabulary)")
    parser.add_argument("--penstock", required=True, help="the penstock command")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of either side")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of transformers")
    parser.add_argument("--require", type=float, default=0.0, help="least factor between the decode speeds")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    arguments = parser.parse_args()
    if arguments.context < 1 or arguments.tokens < 2:
        parser.error("--context must be at least 1 and --tokens at least 2")
    try:
        import torch
        import transformers
    except ImportError as error:
        skip(f"{error.name} is not installed (pip install torch transformers)", arguments.json)
    if not hasattr(transformers, "GlmMoeDsaForCausalLM"):
        skip(f"transformers {transformers.__version__} has no GlmMoeDsaForCausalLM (5.17 has)", arguments.json)

    text = (arguments.model / "heldout.txt").read_bytes()
    if len(text) < arguments.context:
        parser.error(f"--context {arguments.context} is longer than heldout.txt ({len(text)} bytes)")
    prompt = list(text[: arguments.context])
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    with tempfile.TemporaryDirectory() as folder:
        write_plain_checkpoint(torch, arguments.model, pathlib.Path(folder), dtype)
        model = transformers.GlmMoeDsaForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager").eval()
        run_transformers(torch, model, prompt[:8], 2)  # first calls allocate
        theirs, prefill, steps = run_transformers(torch, model, prompt, arguments.tokens)
    ours = run_penstock(arguments.penstock, arguments.model, prompt, arguments.tokens, arguments.threads)

    decode = 1.0 / statistics.median(steps)
    factor = ours["decode"]["tokens_per_second"] / decode
    equal = sum(a == b for a, b in zip(theirs, ours["tokens"]))
    result = {
        "bench": "transformers",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "context": arguments.context,
        "tokens": arguments.tokens,
        "tokens_equal": equal,
        "transformers_decode_tokens_per_s": decode,
        "transformers_prefill_tokens_per_s": len(prompt) / prefill,
        "penstock_decode_tokens_per_s": ours["decode"]["tokens_per_second"],
        "penstock_prefill_tokens_per_s": ours["prefill"]["tokens_per_second"],
        "decode_factor": factor,
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"{arguments.context} tokens of context, {arguments.threads} threads, {equal} of {arguments.tokens} "
              f"greedy tokens equal")
        print(f"{'tokens/s':<34}{'prefill':>10}{'decode':>10}")
        name = f"transformers {transformers.__version__}, {arguments.dtype}"
        print(f"{name:<34}{len(prompt) / prefill:>10.0f}{decode:>10.1f}")
        print(f"{'penstock, f32 activations':<34}{result['penstock_prefill_tokens_per_s']:>10.0f}"
              f"{result['penstock_decode_tokens_per_s']:>10.1f}")
        print(f"decode: {factor:.1f} times transformers")
    if arguments.dtype == "float32" and equal < arguments.tokens:
        print(f"compare_transformers: the greedy tokens differ ({equal} of {arguments.tokens} equal)", file=sys.stderr)
        return 1
    if factor < arguments.require:
        print(f"compare_transformers: {factor:.1f} times is less than the {arguments.require} required", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
