#!/usr/bin/env python3
"""Writes the fuzzer's seeds and its dictionary: tools/fuzz_corpus.py CORPUS_DIR DICTIONARY_FILE.

Seeds are well-formed inputs (and near misses) for both parsers, so that mutation starts where the
checks are and not at "this is no JSON".
"""

import json
import pathlib
import struct
import sys

CONFIG = pathlib.Path(__file__).parent.parent / "models" / "tiny-glm" / "config.json"
BITS = {"F64": 64, "F32": 32, "BF16": 16, "F16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
        "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}


def header_seed(tensors, metadata=None):
    """An 'h' input: tensors is a list of (name, dtype, shape)."""
    header, position = {}, 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, dtype, shape in tensors:
        elements = 1
        for dim in shape:
            elements *= dim
        end = position + elements * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    return b"h" + struct.pack("<I", position) + json.dumps(header, separators=(",", ":")).encode()


def header_seeds():
    yield header_seed([])
    yield header_seed([], {"format": "pt"})
    yield header_seed([(dtype, dtype, [2, 4]) for dtype in BITS])
    yield header_seed([("scalar", "F32", []), ("empty", "I8", [3, 0]), ("six", "U8", [1, 2, 1, 2, 1, 2])])
    yield header_seed([("w.weight_packed", "U8", [4, 16]), ("w.weight_scale", "F8_E8M0", [4, 1])])
    good = header_seed([("a", "F32", [2]), ("b", "U8", [8])])
    yield good.replace(b"[8,16]", b"[4,16]")
    yield good.replace(b'"b"', b'"a"')
    yield good.replace(b"[2]", b"[9223372036854775807,4]")
    yield good.replace(b"[2]", b"[-1]")
    yield good.replace(b"[2]", b"[2.0]")


def config_seeds():
    config = json.loads(CONFIG.read_text())
    variants = [{}]
    variants.append({"indexer_types": None, "index_topk_pattern": "FFSF"})
    variants.append({"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 2})
    variants.append({"first_k_dense_replace": None, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]})
    variants.append({"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None})
    variants.append({"rope_scaling": {"type": "yarn", "factor": 4.0}})
    variants.append({"eos_token_id": [3, 4], "n_group": 4, "topk_group": 2, "experts_format": "mxfp4"})
    variants.append({"quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True}}}}})
    for variant in variants:
        yield b"c" + json.dumps({**config, **variant}, separators=(",", ":")).encode()


def words():
    config = json.loads(CONFIG.read_text())
    yield from (f'"{key}"' for key in config)
    yield from (f'"{name}"' for name in BITS)
    yield from ('"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', '"mlp_layer_types"', '"index_topk_freq"',
                '"index_topk_pattern"', '"index_skip_topk_offset"', '"rope_theta"', '"rope_scaling"', '"experts_format"',
                '"full"', '"shared"', '"sparse"', '"dense"', "null", "true", "false", "9223372036854775807",
                "18446744073709551615", "-1", "1e308", "1e-320", "0", "[]", "{}")


def main():
    corpus, dictionary = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    for i, seed in enumerate([*header_seeds(), *config_seeds()]):
        (corpus / f"seed-{i:02}").write_bytes(seed)
    dictionary.write_text("".join('"{}"\n'.format(w.replace("\\", "\\\\").replace('"', '\\"')) for w in words()))


if __name__ == "__main__":
    main()
