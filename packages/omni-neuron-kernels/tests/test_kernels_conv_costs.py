# SPDX-License-Identifier: Apache-2.0
"""The README's table of the convolution's costs is what the model says of the kernel as it is."""

import importlib
import math
from pathlib import Path

import pytest

from omni_neuron_kernels import nki_convolution
from omni_neuron_nkisim import TensorSpec, last_stats, settings

README = Path(__file__).parents[1] / "README.md"
# Layers of the decoder of Wan's VAE (base width 96) for a later latent frame of a tile of 256 × 256 pixels:
# channels, output channels, kernel, output frames, height and width.
ROWS = [
    (384, 384, (3, 3, 3), 1, 32),
    (384, 768, (3, 1, 1), 1, 32),
    (384, 384, (3, 3, 3), 2, 64),
    (384, 192, (1, 3, 3), 2, 64),
    (192, 192, (3, 3, 3), 4, 128),
    (96, 96, (3, 3, 3), 4, 256),
    (96, 3, (3, 3, 3), 4, 256),
]


def row(channels, columns, size, frames, side, lnc):
    past, padding = size[0] - 1, (0, size[1] // 2, size[2] // 2)
    shape = (columns, channels, *size)
    plan = nki_convolution.plan_convolution((side, side), past + frames, shape, padding, 2, lnc)
    parts = tuple(TensorSpec((1, channels, count, side, side), "bfloat16") for count in (past, frames) if count)
    kernel = importlib.import_module("omni_neuron_kernels.nki_kernels.conv").causal_conv3d[lnc]
    with settings(target="trn2", execute=False):
        kernel(parts, TensorSpec(shape, "bfloat16"), TensorSpec((1, columns), "float32"), padding, *plan)
    stats = last_stats()
    core = max(stats.cores.values(), key=lambda core: core.in_order_ns)
    flops = 2.0 * columns * channels * math.prod(size) * frames * side * side
    useful = flops / lnc / core.in_order_ns / 1e3 / core.target.bf16_tflops
    engines = ("tensor", "vector", "scalar", "gpsimd", "dma")
    busy = " | ".join(f"{core.in_order_fraction(engine):.0%}" for engine in engines)
    name = f"{channels} → {columns}, {' × '.join(map(str, size))} | {frames} × {side} × {side}"
    return f"| {name} | {lnc} | {core.in_order_ns / 1e3:,.0f} | {busy} | {useful:.0%} |"


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("layer", ROWS, ids=str)
def test_the_readme_says_what_the_model_says_of_convolutions(layer, lnc):
    assert row(*layer, lnc) in README.read_text().splitlines()
