# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: the eager product on a CPU and the one that is traced are the same rotation."""

from __future__ import annotations

import pytest
import torch

from omni_neuron_kernels import qkv_projection
from omni_neuron_wan22.rope import WanRotaryPosEmbed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_traced_rotation_holds_no_complex_number_and_is_the_eager_one(dtype: torch.dtype) -> None:
    rotation = WanRotaryPosEmbed(16, (1, 2, 2), 64)(torch.zeros(1, 16, 3, 8, 6))
    hidden = torch.randn(2, 3 * 4 * 3, 5 * 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def rotate(hidden: torch.Tensor) -> torch.Tensor:
        identity = torch.eye(hidden.shape[2], dtype=dtype)
        return qkv_projection(hidden, identity, None, heads=(5, 0), head_dim=16, rotation=rotation)[0]

    traced = torch.compile(rotate, backend=keep, fullgraph=True)(hidden)
    eager = rotate(hidden)
    assert eager.dtype == traced.dtype == dtype
    torch.testing.assert_close(eager, traced, rtol=0, atol=1e-6 if dtype == torch.float32 else 0)
    assert "complex" not in str(graphs[0].graph)
    # Rotations keep the length of every pair.
    lengths = hidden.float().unflatten(-1, (5, -1, 2)).norm(dim=-1)
    torch.testing.assert_close(eager.float().unflatten(-1, (-1, 2)).norm(dim=-1), lengths, rtol=1e-2, atol=1e-5)
