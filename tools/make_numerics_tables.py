#!/usr/bin/env python3
"""Expected results of the number formats, from an implementation that is not ours.

Writes tests/numerics/data/conversion_tables.inc, which tests/numerics compares the C++ conversions
with. Conversions come from ml_dtypes, scale rules from exact rational arithmetic, block quantisation
from numpy and ml_dtypes together.

    make_numerics_tables.py --output FILE     write the tables
    make_numerics_tables.py --check FILE      exit 1 if FILE differs from what would be written
Exit code 77 (skipped) if ml_dtypes cannot be imported.

Where ml_dtypes and Penstock differ by definition, the difference is made here and nowhere else:
- Penstock's E4M3 and E5M2 conversions saturate, ml_dtypes' do not (E4M3 gives NaN, E5M2 Inf): the
  input is clipped to the format's range first. The *_no_saturate tables are ml_dtypes' own results.
- Penstock writes one NaN per format (0x7F, Bf16 0x7FFF, f32 0x7FFFFFFF), ml_dtypes keeps the sign and
  writes 0x7FC0 in bf16: NaN results are checked to be NaN and then replaced.
- E2M1 has no NaN: Penstock gives +6 (0x7, as CUDA does), ml_dtypes gives a zero.
- ml_dtypes rounds to E8M0 to nearest; Penstock rounds by a named direction, computed here exactly.
"""

import argparse
import math
import pathlib
import sys
from fractions import Fraction

try:
    import ml_dtypes
    import numpy as np
except ImportError as error:
    print(f"skipped: {error}; install it with: pip install ml_dtypes numpy")
    sys.exit(77)

F32_INF = 0x7F800000
F32_NAN = 0x7FFFFFFF
F32_SIGN = 0x80000000


def f32(bits):
    return np.asarray(bits, dtype=np.uint32).view(np.float32)


def bits_of(x):
    return np.asarray(x, dtype=np.float32).view(np.uint32)


# --- Probes: every exponent x every 8-bit leading mantissa and its two neighbours, both signs. These
# --- hold each tie of each format with the values one ulp to either side, and the ends of each binade.
# --- tests/numerics/probes.h lists the same inputs in the same order.


def probe_mantissas():
    return np.array([((t << 15) + d) & 0x7FFFFF for t in range(256) for d in (-1, 0, 1)], np.uint32)


def probe_bits():  # [512 binades (sign, exponent), 768 mantissas]
    return (np.arange(512, dtype=np.uint32)[:, None] << np.uint32(23)) | probe_mantissas()[None, :]


# --- Scalar formats


def cast(dtype, limit=None):
    """f32 bits -> codes by ml_dtypes, after clipping to +-limit."""

    def apply(bits):
        x = f32(bits)
        if limit is not None:
            x = np.clip(x, np.float32(-limit), np.float32(limit))
        return x.astype(dtype).view(np.uint8).astype(np.uint32)

    return apply


def canonical(cast_bits, nan_code, is_nan_code, sign_shift):
    """Wraps a cast so that NaN results become the documented code."""

    def apply(bits):
        codes = cast_bits(bits)
        nan_in = (np.asarray(bits, np.uint32) & ~np.uint32(F32_SIGN)) > F32_INF
        if is_nan_code is not None:
            nan_out = is_nan_code(codes & ((1 << sign_shift) - 1))
            assert np.all(nan_out[nan_in]), "ml_dtypes lost a NaN"
            return np.where(nan_out, nan_code, codes)
        return np.where(nan_in, nan_code, codes)

    return apply


ENCODERS = {  # name: (f32 bits -> code, largest magnitude code, shift of the sign bit)
    "E4M3": (
        canonical(cast(ml_dtypes.float8_e4m3fn, 448), 0x7F, lambda c: c == 0x7F, 7),
        0x7E,
        7,
    ),
    "E4M3NoSaturate": (
        canonical(cast(ml_dtypes.float8_e4m3fn), 0x7F, lambda c: c == 0x7F, 7),
        0x7F,
        7,
    ),
    "E5M2": (
        canonical(cast(ml_dtypes.float8_e5m2, 57344), 0x7F, lambda c: c > 0x7C, 7),
        0x7B,
        7,
    ),
    "E5M2NoSaturate": (
        canonical(cast(ml_dtypes.float8_e5m2), 0x7F, lambda c: c > 0x7C, 7),
        0x7C,
        7,
    ),
    "E2M1": (canonical(cast(ml_dtypes.float4_e2m1fn), 0x7, None, 3), 0x7, 3),
}


def first_reaching(function, targets):
    """For each target: the smallest f32 magnitude bits in [0, Inf] with function(bits) >= target, or
    Inf + 1 where there is none. function must be monotone; the callers check that on the probes."""
    targets = np.asarray(targets)
    low = np.zeros(targets.shape, np.uint64)
    high = np.full(targets.shape, F32_INF + 1, np.uint64)
    while np.any(low < high):
        middle = (low + high) // 2
        reached = function(np.minimum(middle, F32_INF).astype(np.uint32)) >= targets
        open_ = low < high
        high = np.where(open_ & reached, middle, high)
        low = np.where(open_ & ~reached, middle + 1, low)
    return low.astype(np.uint32)


def encode_thresholds(name):
    encode, largest, sign_shift = ENCODERS[name]
    thresholds = first_reaching(encode, np.arange(1, largest + 1))
    # The thresholds say everything if the conversion is monotone and symmetric: shown on the probes.
    probes = probe_bits().ravel()
    magnitude = probes & ~np.uint32(F32_SIGN)
    codes = encode(probes)
    expected = np.searchsorted(thresholds, magnitude, side="right").astype(np.uint32)
    is_code_nan = (name == "E4M3NoSaturate") & (expected == 0x7F)
    expected = np.where(is_code_nan, expected, expected | ((probes >> np.uint32(31)) << sign_shift))
    finite = magnitude <= F32_INF
    assert np.array_equal(codes[finite], expected[finite]), name
    return thresholds


def decode_table(dtype, count):
    x = np.arange(count, dtype=np.uint8).view(dtype).astype(np.float32)
    return np.where(np.isnan(x), np.uint32(F32_NAN), bits_of(x))


# --- Scale rules, exactly


def exact(bits):
    return Fraction(float(f32(bits)))


def floor_log2(x):
    """floor(log2 x) of a positive Fraction."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def ceil_log2(x):
    e = floor_log2(x)
    return e if Fraction(2) ** e == x else e + 1


def e8m0_code(exponent):
    return min(max(exponent + 127, 0), 254)


def scalar_rule(rule):
    """Lifts a rule on an exact positive Fraction to arrays of finite f32 bits; 0 gives code 0."""

    def apply(bits):
        return np.array([0 if b == 0 else rule(exact(b)) for b in np.atleast_1d(bits).tolist()])

    return apply


def index_rule(bits):
    y = np.maximum(f32(bits), np.float32(1e-4)) / np.float32(448)
    return np.array([e8m0_code(ceil_log2(Fraction(float(v)))) for v in np.atleast_1d(y)])


SCALE_RULES = {
    "E8M0Ceil": scalar_rule(lambda x: e8m0_code(ceil_log2(x))),
    "E8M0Floor": scalar_rule(lambda x: e8m0_code(floor_log2(x))),
    "MxE4M3OcpFloor": scalar_rule(lambda x: e8m0_code(floor_log2(x) - 8)),
    "MxE4M3Ceil": scalar_rule(lambda x: e8m0_code(ceil_log2(x / 448))),
    "MxE5M2OcpFloor": scalar_rule(lambda x: e8m0_code(floor_log2(x) - 15)),
    "MxE5M2Ceil": scalar_rule(lambda x: e8m0_code(ceil_log2(x / 57344))),
    "MxE2M1OcpFloor": scalar_rule(lambda x: e8m0_code(floor_log2(x) - 2)),
    "MxE2M1Ceil": scalar_rule(lambda x: e8m0_code(ceil_log2(x / 6))),
    "Ue8m0Index": index_rule,
}


def scale_thresholds(name):
    """[c - 1]: the smallest finite f32 bits whose code is >= c; Inf + 1 where no finite value is."""
    rule = SCALE_RULES[name]
    top = F32_INF - 1

    def clamped(bits):
        bits = np.atleast_1d(bits)
        codes = rule(np.minimum(bits, top))
        return np.where(bits > top, 255, codes)  # so that bisection ends

    thresholds = first_reaching(clamped, np.arange(1, 255))
    # Monotone: shown on each binade's ends and around the two places where a rule can step.
    mantissas = [0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF]
    probes = np.array([(e << 23) | m for e in range(255) for m in mantissas], np.uint32)
    expected = np.searchsorted(thresholds, probes, side="right")
    assert np.array_equal(rule(probes), expected), name
    return np.where(thresholds > top, F32_INF + 1, thresholds)


def weight_scale(amax):
    amax = np.asarray(amax, np.float32)
    floor = np.float32(448 * 2.0**-126)
    s = np.maximum(amax, floor) / np.float32(448)
    s = np.where(amax == 0, np.float32(1), s)
    return np.where(np.isfinite(amax), s, np.float32(np.nan)).astype(np.float32)


def activation_scale(amax):
    amax = np.asarray(amax, np.float32)
    s = np.maximum(amax, np.float32(1e-4)) / np.float32(448)
    return np.where(np.isfinite(amax), s, np.float32(np.nan)).astype(np.float32)


def canonical_bits(x):
    return np.where(np.isnan(x), np.uint32(F32_NAN), bits_of(x))


# --- Digests: FNV-1a over little-endian bytes, one for each row, all rows at once


def digest_rows(values, width):
    values = np.asarray(values, np.uint64)
    state = np.full(values.shape[0], 0xCBF29CE484222325, np.uint64)
    for column in range(values.shape[1]):
        for byte in range(width):
            step = (values[:, column] >> np.uint64(8 * byte)) & np.uint64(0xFF)
            state = (state ^ step) * np.uint64(0x100000001B3)
    return state


# --- A matrix for the block formats. tests/numerics/probes.h builds the same.

ROWS, COLUMNS = 131, 288  # partial FP8 blocks at both edges; 9 MX blocks a row


def mix(h):
    h = h.astype(np.uint32)
    h = (h * np.uint32(0x9E3779B1)) + np.uint32(0x7F4A7C15)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def block_matrix():
    h = mix(np.arange(ROWS * COLUMNS, dtype=np.uint32))
    significand = (h >> np.uint32(8)).astype(np.int64) - 0x800000
    exponent = (h & np.uint32(0xFF)).astype(np.int64) % 12 - 6 - 23
    x = np.ldexp(significand.astype(np.float64), exponent).astype(np.float32)
    bits = bits_of(x).reshape(ROWS, COLUMNS).copy()
    h = h.reshape(ROWS, COLUMNS)
    bits[0] = 0  # zeros
    bits[1] = h[1] & np.uint32(F32_SIGN)  # signed zeros
    bits[2] = h[2] & np.uint32(0x807FFFFF)  # subnormals
    for b in range(COLUMNS // 32):  # amax just above, at and just below a power of two, and 448, 6
        bits[3, 32 * b] = ((120 + b) << 23) | [1, 0, 0x7FFFFF][b % 3]
        bits[4, 32 * b] = ((128 + b) << 23) | [0x600001, 0x600000, 0x5FFFFF][b % 3]
        bits[5, 32 * b] = ((128 + b) << 23) | [0x400001, 0x400000, 0x3FFFFF][b % 3]
    bits[128] = (h[128] & np.uint32(0x807FFFFF)) | np.uint32(0x7F000000)  # near the largest f32
    bits[129, 40] = 0x7FC01234  # a NaN
    bits[130, 200] = 0xFF800000  # -Inf
    return f32(bits)


def fp8_codes(x, scale):
    return ENCODERS["E4M3"][0](bits_of((x / scale).astype(np.float32)))


def block_amax(x):
    """Largest magnitude along the last axis, NaN if the block holds NaN (np.max keeps it)."""
    return np.max(np.abs(x), axis=-1)


def fp8_tiles(x, tile_rows, tile_columns, scale_of):
    rows, columns = x.shape
    codes = np.zeros(x.shape, np.uint32)
    scales = []
    for r in range(0, rows, tile_rows):
        for c in range(0, columns, tile_columns):
            tile = x[r : r + tile_rows, c : c + tile_columns]
            s = scale_of(block_amax(tile.reshape(1, -1)))[0]
            scales.append(s)
            codes[r : r + tile_rows, c : c + tile_columns] = fp8_codes(tile, s)
    return codes, canonical_bits(np.array(scales, np.float32))


def index_scale(amax):
    if not np.all(np.isfinite(amax)):
        return np.full(amax.shape, np.nan, np.float32)
    return np.ldexp(1.0, index_rule(bits_of(amax)) - 127).astype(np.float32)


def mx_blocks(x, rule_name, encoder):
    rule = SCALE_RULES[rule_name]
    blocks = x.reshape(-1, 32)
    amax = block_amax(blocks)
    finite = np.isfinite(amax)
    scales = np.where(finite, rule(np.where(finite, bits_of(amax), 0)), 255)
    scaled = np.ldexp(blocks.astype(np.float64), (127 - scales)[:, None]).astype(np.float32)
    scaled[~finite] = np.nan
    codes = ENCODERS[encoder][0](bits_of(scaled)).reshape(x.shape)
    return codes, scales.reshape(x.shape[0], -1)


def block_cases():
    x = block_matrix()
    cases = {
        "Fp8Block": fp8_tiles(x, 128, 128, weight_scale),
        "Fp8Channel": fp8_tiles(x, 1, COLUMNS, weight_scale),
        "Fp8Activation": fp8_tiles(x, 1, 128, activation_scale),
        "Fp8Index": fp8_tiles(x[:, :128], 1, 128, index_scale),
        "Mxfp4OcpFloor": mx_blocks(x, "MxE2M1OcpFloor", "E2M1"),
        "Mxfp4Ceil": mx_blocks(x, "MxE2M1Ceil", "E2M1"),
        "Mxfp8OcpFloor": mx_blocks(x, "MxE4M3OcpFloor", "E4M3"),
        "Mxfp8Ceil": mx_blocks(x, "MxE4M3Ceil", "E4M3"),
    }
    for name, (codes, scales) in cases.items():
        if name.startswith("Mxfp4"):
            codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
        yield name, digest_rows(codes, 1), digest_rows(scales.reshape(1, -1), 4)


# --- Output


def array(kind, name, values, digits):
    suffix = "ull" if digits == 16 else "u"
    per_line = 4 if digits == 16 else (8 if digits == 8 else 12)
    items = [f"0x{int(v):0{digits}x}{suffix}" for v in values]
    lines = [
        "    " + ", ".join(items[i : i + per_line]) + "," for i in range(0, len(items), per_line)
    ]
    return "\n".join([f"inline constexpr {kind} {name}[{len(items)}] = {{", *lines, "};", ""])


def tables():
    u32, u64 = "std::uint32_t", "std::uint64_t"
    out = [
        "// Generated by tools/make_numerics_tables.py, which says what each table holds; do not edit.",
        "",
        "// Decoded codes as f32 bits.",
    ]
    for name, dtype, count in [
        ("E4M3", ml_dtypes.float8_e4m3fn, 256),
        ("E5M2", ml_dtypes.float8_e5m2, 256),
        ("E2M1", ml_dtypes.float4_e2m1fn, 16),
        ("E8M0", ml_dtypes.float8_e8m0fnu, 256),
    ]:
        out.append(array(u32, f"kDecode{name}", decode_table(dtype, count), 8))
    out.append("// [c - 1]: the smallest |x| (f32 bits) whose magnitude code is c or above.")
    for name in ENCODERS:
        out.append(array(u32, f"kEncode{name}", encode_thresholds(name), 8))
    out.append("// [c - 1]: the smallest finite |x| (f32 bits) whose E8M0 code is c or above;")
    out.append("// 0x7f800001 if no finite value reaches c.")
    for name in SCALE_RULES:
        out.append(array(u32, f"kScale{name}", scale_thresholds(name), 8))

    probes = probe_bits()
    bf16 = f32(probes).astype(ml_dtypes.bfloat16)
    codes = np.where(np.isnan(f32(probes)), np.uint16(0x7FFF), bf16.view(np.uint16))
    assert np.array_equal(np.isnan(f32(probes)), np.isnan(bf16.astype(np.float32)))
    out.append("// [sign * 256 + exponent]: digest of the Bf16 codes (2 bytes each) of its probes.")
    out.append(array(u64, "kBf16Encode", digest_rows(codes, 2), 16))
    all_bf16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    out.append("// [high byte]: digest of the 256 decoded Bf16 codes (f32 bits, 4 bytes each).")
    out.append(array(u64, "kBf16Decode", digest_rows(bits_of(all_bf16).reshape(256, 256), 4), 16))
    amax = f32(probes[:256])
    out.append("// [exponent]: digest of the scales (f32 bits, 4 bytes each) of its positive probes.")
    for name, rule in [("Weight", weight_scale), ("Activation", activation_scale)]:
        digests = digest_rows(canonical_bits(rule(amax)), 4)
        out.append(array(u64, f"kFp8{name}Scale", digests, 16))

    out.append("// The test matrix: one digest a row of codes (bytes as stored), one of all scales (4")
    out.append("// bytes each: f32 bits or E8M0 code).")
    for name, codes, scales in block_cases():
        out.append(array(u64, f"k{name}Codes", codes, 16))
        out.append(array(u64, f"k{name}Scales", scales, 16))
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description="Expected results of the number formats")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--output", type=pathlib.Path, metavar="FILE")
    group.add_argument("--check", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    np.seterr(all="ignore")  # NaN, Inf, overflow and wrapping hashes are what this is about
    text = tables()
    if arguments.output:
        arguments.output.write_text(text)
        return 0
    if arguments.check.read_text() == text:
        print(f"{arguments.check}: as generated (ml_dtypes {ml_dtypes.__version__})")
        return 0
    print(f"{arguments.check} differs from what ml_dtypes {ml_dtypes.__version__} gives; run --output")
    return 1


if __name__ == "__main__":
    sys.exit(main())
