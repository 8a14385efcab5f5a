# SPDX-License-Identifier: Apache-2.0
"""The planner's sizes against the modules at the published size, on the meta device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from omni_neuron_hunyuan_video15.config import HunyuanVideo15Config
from omni_neuron_hunyuan_video15.planning import from_checkpoint, t2v
from omni_neuron_hunyuan_video15.tiny import TinyHunyuanVideo15
from omni_neuron_hunyuan_video15.transformer import HunyuanVideo15Transformer
from omni_neuron_parallel import AxisGroup


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("tp", [1, 8])
def test_weights_are_those_of_the_transformer(tp: int) -> None:
    group = AxisGroup("tp", tuple(range(tp)), 0, process_group=object())  # type: ignore[arg-type]  # never used
    with torch.device("meta"):
        ours = HunyuanVideo15Transformer(HunyuanVideo15Config(), group=group, context_group=AxisGroup("cp"))
    assert t2v().dit.parameters(tp) == count(ours)


def test_a_checkpoints_sizes(tiny: Path) -> None:
    sizes, tiny_sizes = from_checkpoint(tiny), TinyHunyuanVideo15()
    assert (sizes.heads, sizes.layers) == (tiny_sizes.num_attention_heads, tiny_sizes.num_layers)
    assert sizes.vae.latent_channels == tiny_sizes.latent_channels
    # The largest layer at the published size: what follows the last upsampling, four times 128 channels at 4 · 256
    # positions, or that upsampling itself, from 256 channels at a quarter of them.
    assert t2v().vae.peak_elements == 256 * 4 * 64 + 4 * 128 * 4 * 256
