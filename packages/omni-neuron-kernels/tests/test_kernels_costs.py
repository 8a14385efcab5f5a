# SPDX-License-Identifier: Apache-2.0
"""The README's table of the cost model is what the model says of the kernels as they are."""

import importlib
from pathlib import Path

import pytest

from omni_neuron_nkisim import TensorSpec, last_stats, settings

README = Path(__file__).parents[1] / "README.md"
QUERIES, KEYS, DIM = 32_760 // 8, 32_760, 128
WIDTH, INNER = 5120, 13_824 // 4


def spec(*shape, dtype="bfloat16"):
    return TensorSpec(shape, dtype)


def attention(lnc, regime, heads=2):
    kernel = importlib.import_module("omni_neuron_kernels.nki_kernels.attention").flash_attention[lnc]
    keys = spec(heads, KEYS, DIM)
    kernel(spec(heads, QUERIES, DIM), keys, keys, DIM**-0.5, KEYS, (regime,) * heads)
    return 4.0 * heads * QUERIES * KEYS * DIM


def mlp(lnc):
    kernel = importlib.import_module("omni_neuron_kernels.nki_kernels.feed_forward").mlp[lnc]
    biases = spec(INNER, 1, dtype="float32"), spec(1, WIDTH, dtype="float32")
    kernel(spec(QUERIES, WIDTH), spec(WIDTH, INNER), biases[0], spec(INNER, WIDTH), biases[1])
    return 4.0 * QUERIES * WIDTH * INNER


def projection(lnc):
    kernel = importlib.import_module("omni_neuron_kernels.nki_kernels.feed_forward").output_projection[lnc]
    kernel(spec(QUERIES, WIDTH // 4), spec(WIDTH // 4, WIDTH), spec(1, WIDTH, dtype="float32"))
    return 2.0 * QUERIES * WIDTH // 4 * WIDTH


def norm(lnc):
    kernel = importlib.import_module("omni_neuron_kernels.nki_kernels.norms").rms_norm[lnc]
    kernel(spec(QUERIES, WIDTH), spec(1, WIDTH, dtype="float32"), 1e-6)
    return 0.0


def modulation(lnc):
    kernel = importlib.import_module("omni_neuron_kernels.nki_kernels.norms").gated_adaln_modulate[lnc]
    stream, vector = spec(1, QUERIES, WIDTH), spec(1, WIDTH, dtype="float32")
    kernel(stream, stream, vector, vector, vector, 1e-6)
    return 0.0


ROWS = {
    "`flash_attention`, unshifted": lambda lnc: attention(lnc, "unshifted"),
    "`flash_attention`, running maximum": lambda lnc: attention(lnc, "running_maximum"),
    "`mlp`": mlp,
    "`output_projection`": projection,
    "`rms_norm`": norm,
    "`adaln_modulate`, gated": modulation,
}


def row(name, lnc):
    with settings(target="trn2", execute=False):
        flops = ROWS[name](lnc)
    stats = last_stats()
    core = max(stats.cores.values(), key=lambda core: core.in_order_ns)
    useful = flops / lnc / core.in_order_ns / 1e3 / core.target.bf16_tflops
    busy = " | ".join(f"{core.in_order_fraction(engine):.0%}" for engine in ("tensor", "vector", "scalar", "dma"))
    return f"| {name} | {lnc} | {core.in_order_ns / 1e3:,.0f} | {busy} | {useful:.0%} |"


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("name", ROWS)
def test_the_readme_says_what_the_model_says(name, lnc):
    assert row(name, lnc) in README.read_text().splitlines()
