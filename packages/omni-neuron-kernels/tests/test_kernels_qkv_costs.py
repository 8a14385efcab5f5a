# SPDX-License-Identifier: Apache-2.0
"""The README's table of the projections' costs is what the model says of the kernels as they are."""

import importlib
from pathlib import Path

import pytest

from omni_neuron_nkisim import TensorSpec, last_stats, settings

README = Path(__file__).parents[1] / "README.md"
TOKENS = {"480p": 32_760 // 8, "720p": 75_600 // 8}
WIDTH, TP, HEADS, DIM = 5120, 4, 10, 128
COLUMNS, INNER = HEADS * DIM, 13_824 // TP
FP8 = "float8_e4m3fn"
FP8_TFLOPS = 315.0
GROUPS = ((0, 1, 2, 3),)


def spec(*shape, dtype="bfloat16"):
    return TensorSpec(shape, dtype)


def wide(*shape):
    return spec(*shape, dtype="float32")


def launch(module, kernel, lnc, *arguments):
    getattr(importlib.import_module(f"omni_neuron_kernels.nki_kernels.{module}"), kernel)[lnc](*arguments)


def norm_and_rotation(rows):
    gains, tables = (wide(1, COLUMNS),) * 2, (wide(rows, DIM // 2),) * 2
    return (HEADS, HEADS), DIM, gains, tables, 1e-6, TP, GROUPS


def qkv(rows, lnc):
    weight = spec(WIDTH, 3 * COLUMNS)
    launch("qkv", "qkv_projection", lnc, spec(rows, WIDTH), weight, wide(1, 3 * COLUMNS), *norm_and_rotation(rows))
    return 2.0 * rows * WIDTH * 3 * COLUMNS


def fp8_qkv(rows, lnc):
    tokens = spec(rows, WIDTH, dtype=FP8), wide(rows, 1)
    weight = spec(WIDTH // 4, 4 * 3 * COLUMNS, dtype=FP8), wide(1, 3 * COLUMNS), wide(1, 3 * COLUMNS)
    launch("qkv", "fp8_qkv_projection", lnc, *tokens, *weight, *norm_and_rotation(rows), "bfloat16")
    return 2.0 * rows * WIDTH * 3 * COLUMNS


def fp8_output(rows, lnc):
    weight = spec(COLUMNS // 4, 4 * WIDTH, dtype=FP8)
    launch("fp8", "fp8_output_projection", lnc, spec(rows, COLUMNS), weight, wide(1, WIDTH), wide(1, WIDTH))
    return 2.0 * rows * COLUMNS * WIDTH


def fp8_mlp(rows, lnc):
    up = spec(WIDTH // 4, 4 * INNER, dtype=FP8), wide(INNER // 4, 4), wide(INNER // 4, 4)
    down = spec(INNER // 4, 4 * WIDTH, dtype=FP8), wide(1, WIDTH), wide(1, WIDTH)
    launch("fp8", "fp8_mlp", lnc, spec(rows, WIDTH, dtype=FP8), wide(1, rows), *up, *down, "bfloat16")
    return 4.0 * rows * WIDTH * INNER


def modulation(rows, lnc):
    stream, vector = spec(1, rows, WIDTH), wide(1, WIDTH)
    launch("norms", "quantized_adaln_modulate", lnc, stream, (stream, vector), vector, vector, 1e-6, 448.0, FP8)
    return 0.0


def row_quantize(rows, lnc):
    launch("norms", "row_quantize", lnc, spec(rows, WIDTH), 448.0, FP8)
    return 0.0


def quantize_mx(rows, lnc):
    launch("fp8", "quantize_mx", lnc, spec(rows, WIDTH), FP8)
    return 0.0


ROWS = {
    "`qkv_projection`": ("trn2", qkv),
    "`fp8_qkv_projection`": ("trn3", fp8_qkv),
    "`fp8_output_projection`": ("trn3", fp8_output),
    "`fp8_mlp`": ("trn3", fp8_mlp),
    "`adaln_modulate_fp8`, gated": ("trn3", modulation),
    "`row_quantize`": ("trn3", row_quantize),
    "`quantize_mx`": ("trn3", quantize_mx),
}


def row(name, size, lnc):
    target, run = ROWS[name]
    # The MX matmul takes an even number of tokens.
    rows = TOKENS[size] + (TOKENS[size] % 2 if target == "trn3" else 0)
    with settings(target=target, execute=False, symmetric_ranks=TP):
        flops = run(rows, lnc)
    stats = last_stats()
    core = max(stats.cores.values(), key=lambda core: core.in_order_ns)
    peak = core.target.bf16_tflops if target == "trn2" else FP8_TFLOPS
    useful = flops / lnc / core.in_order_ns / 1e3 / peak
    engines = ("tensor", "vector", "scalar", "gpsimd", "dma", "collective")
    busy = " | ".join(f"{core.in_order_fraction(engine):.0%}" for engine in engines)
    return f"| {name} | {target} | {size} | {lnc} | {core.in_order_ns / 1e3:,.0f} | {busy} | {useful:.0%} |"


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("size", TOKENS)
@pytest.mark.parametrize("name", ROWS)
def test_the_readme_says_what_the_model_says_of_projections(name, size, lnc):
    assert row(name, size, lnc) in README.read_text().splitlines()
