# SPDX-License-Identifier: Apache-2.0
"""MX quantisation, bit for bit against a golden written from the formulas with code tables, and the MX matmul."""

import math

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import nkisim_probe as probe
import numpy as np
import pytest
from nkisim_probe import load, store, tile

# Exponent bits, mantissa bits, exponent of the largest value, codes above which a sign's half is not finite.
FORMATS = {"float8_e4m3fn": (4, 3, 8, 0x7E), "float8_e5m2": (5, 2, 15, 0x7B)}


def decode(code, exponent_bits, mantissa_bits):
    """The value of a positive FP8 code, from the definition."""
    bias = 2 ** (exponent_bits - 1) - 1
    exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
    if exponent == 0:
        return mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def encode(value, name):
    """The code nearest to `value`, ties to even codes, saturating."""
    exponent_bits, mantissa_bits, _, top = FORMATS[name]
    table = [decode(code, exponent_bits, mantissa_bits) for code in range(top + 1)]
    size = abs(value)
    code = min(range(top + 1), key=lambda c: (abs(table[c] - size), c % 2))
    return code | (0x80 if math.copysign(1, value) < 0 else 0)


def golden(x, name, doubled):
    """Codes `[P, F]` and scale codes `[P/8, F/4]`; `doubled` is the scale rule from NKI 0.5 on."""
    largest = FORMATS[name][2] - (1 if doubled else 0)
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((x.shape[0] // 8, x.shape[1] // 4), np.uint8)
    for row in range(0, x.shape[0], 8):
        for column in range(0, x.shape[1], 4):
            group = [[float(v) for v in line] for line in x[row : row + 8, column : column + 4]]
            amax = max(abs(v) for line in group for v in line)
            power = -127 if amax == 0 else max(math.frexp(amax)[1] - 1 - largest, -127)
            scales[row // 8, column // 4] = power + 127
            for i, line in enumerate(group):
                for j, value in enumerate(line):
                    codes[row + i, column + j] = encode(math.ldexp(value, -power), name)
    return codes, scales


def quantize(x, name, **changes):
    partitions, free = x.shape

    def body(source):
        dst = tile((partitions, free // 4), f"{name}_x4")
        scale = nl.zeros((partitions if partitions > 32 else partitions // 8, free // 4), "uint8")
        nisa.quantize_mx(dst, load(source), scale)
        return store(dst.view("uint8")), store(scale)

    return probe.run(body, x, target="trn3", **changes)


def samples(partitions, free, dtype):
    """Groups of very different size, a group of zeros, subnormal results and halves between codes."""
    generator = np.random.default_rng(partitions)
    x = generator.standard_normal((partitions, free)) * 2.0 ** generator.integers(-12, 12, (partitions, 1))
    x[:8, :4] = 0
    x[8:16, :4] = np.linspace(1, 1.9375, 32).reshape(8, 4)
    x[16:24, :4] = [[1.0, 2.0**-9, 2.0**-12, 0.0]]
    return x.astype(dtype)


@pytest.mark.parametrize("partitions", [32, 64, 128])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("version", "doubled"), [("0.4.0", False), ("0.6.0", True)])
def test_quantize_mx_is_the_golden(partitions, name, version, doubled):
    x = samples(partitions, 16, ml_dtypes.bfloat16)
    data, scale = quantize(x, name, nki_version=version)
    codes, scales = golden(x, name, doubled)
    np.testing.assert_array_equal(data.reshape(partitions, 16), codes)
    groups = range(partitions // 8)
    rows = [g if partitions == 32 else 32 * (g // 4) + g % 4 for g in groups]
    np.testing.assert_array_equal(scale[rows], scales)
    assert (np.delete(scale, rows, axis=0) == 0).all(), "scales are written to their rows only"


def test_the_two_rules_differ_by_one_power_of_two():
    x = samples(32, 16, np.float16)
    _, before = quantize(x, "float8_e4m3fn", nki_version="0.3.0")
    _, since = quantize(x, "float8_e4m3fn", nki_version="0.5.0")
    filled = before > 0
    np.testing.assert_array_equal(since[filled], before[filled] + 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_group_that_is_not_finite_gets_the_nan_scale(bad):
    x = np.ones((32, 8), ml_dtypes.bfloat16)
    x[3, 5] = bad
    _, scale = quantize(x, "float8_e5m2")
    assert scale[0, 1] == 255
    assert scale[1, 1] != 255


@pytest.mark.parametrize("partitions", [32, 128])
def test_matmul_mx_multiplies_what_was_quantised(partitions):
    left, right = samples(partitions, 64, ml_dtypes.bfloat16), samples(partitions, 48, ml_dtypes.bfloat16)

    def body(a, b):
        operands = []
        for source in (a, b):
            data = tile((partitions, source.shape[1] // 4), "float8_e4m3fn_x4")
            scale = nl.zeros((128, source.shape[1] // 4), "uint8")
            view = scale[8:12] if partitions == 32 else scale[4:]
            nisa.quantize_mx(data, load(source), view)
            operands += [data, view]
        dst = tile((16, 12), "float32", nl.psum)
        nisa.nc_matmul_mx(dst, operands[0], operands[2], operands[1], operands[3], accumulate=False)
        return store(dst)

    def rounded(x):
        codes, scales = golden(x, "float8_e4m3fn", True)
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return values * (2.0 ** (scales.astype(np.float64) - 127)).repeat(8, 0).repeat(4, 1)

    got = probe.run(body, left, right, target="trn3")
    wanted = np.einsum(
        "kmq,knq->mn", rounded(left).reshape(partitions, 16, 4), rounded(right).reshape(partitions, 12, 4)
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_matmul_mx_reads_fp4():
    # Codes 0 to 7 of E2M1 are 0, 0.5, 1, 1.5, 2, 3, 4, 6.
    codes = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8 + 7, 8 + 2, 0, 1], np.uint16).reshape(3, 4)
    packed = (codes << np.arange(0, 16, 4, dtype=np.uint16)).sum(1).astype(np.uint16)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -6, -1, 0, 0.5]).reshape(3, 4)
    left = np.broadcast_to(packed[:2], (32, 2)).copy()
    right = np.broadcast_to(packed, (32, 3)).copy()

    def body(a, b):
        st, mv = tile((32, 2), "float4_e2m1fn_x4"), tile((32, 3), "float4_e2m1fn_x4")
        scale = nl.full((4, 3), 127, "uint8")
        nisa.dma_copy(st, a.view("float4_e2m1fn_x4"))
        nisa.dma_copy(mv, b.view("float4_e2m1fn_x4"))
        dst = tile((2, 3), "float32", nl.psum)
        nisa.nc_matmul_mx(dst, st, mv, scale[:, 0:2], scale, accumulate=False)
        return store(dst)

    got = probe.run(body, left, right, target="trn3")
    np.testing.assert_allclose(got, 32 * values[:2] @ values.T)
