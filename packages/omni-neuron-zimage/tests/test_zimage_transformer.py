# SPDX-License-Identifier: Apache-2.0
"""The transformer against diffusers', on one rank and on several; what it refuses; one graph for all prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zimage_ranks

from omni_neuron_parallel import ContextMethod, RankPool, Topology
from omni_neuron_zimage.config import ZImageConfig
from vllm_omni_neuron.sdk import ModelConfigError


@pytest.fixture(scope="module")
def reference(tiny: Path) -> torch.Tensor:
    from diffusers import ZImageTransformer2DModel

    model = ZImageTransformer2DModel.from_pretrained(tiny / "transformer")
    latents, timestep, text = zimage_ranks.inputs(model.config.cap_feat_dim)
    with torch.no_grad():
        [output] = model([latents[0][:, None]], timestep, [text[0]], return_dict=False)[0]
    return output[:, 0][None]


@pytest.fixture(scope="module")
def six_ranks() -> Iterator[RankPool]:
    with RankPool(6, preload=("omni_neuron_zimage.transformer", "vllm_omni_neuron.sdk.checkpoint")) as pool:
        yield pool


def _close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((got - expected).norm() / expected.norm()) < 1e-5


def test_one_rank_equals_diffusers(tiny: Path, reference: torch.Tensor) -> None:
    model = zimage_ranks.load(str(tiny))
    for rows in (64, 96):  # with and without rows that the mask hides
        assert _close(zimage_ranks.predict(model, rows), reference)


@pytest.mark.parametrize(
    ("tp", "cp", "sequence_parallel", "method"),
    [
        (2, 1, False, "auto"),
        (3, 1, True, "auto"),  # 256 inner features and 64 + 96 rows are not multiples of 3
        (1, 2, False, "auto"),
        (2, 3, False, "auto"),
        (2, 3, True, "ring"),
        (3, 2, True, "auto"),
    ],
)
def test_ranks_equal_diffusers(
    six_ranks: RankPool,
    tiny: Path,
    reference: torch.Tensor,
    tp: int,
    cp: int,
    sequence_parallel: bool,
    method: ContextMethod,
) -> None:
    topology = Topology(tp=tp, cp=cp, cfg=6 // (tp * cp))
    outputs = six_ranks.run(zimage_ranks.forward, str(tiny), topology, sequence_parallel, method)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert _close(outputs[0], reference)


def test_one_graph_serves_prompts_of_any_length(tiny: Path) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    model = zimage_ranks.load(str(tiny))
    latents, timestep, _ = zimage_ranks.inputs(model.config.cap_feat_dim)
    features = torch.zeros(1, 64, model.config.cap_feat_dim)
    refine, forward = (
        torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
        for function in (model.refine_caption, model.forward)
    )
    with torch.no_grad():
        for length in (5, 37):
            caption = refine(features, torch.tensor([length]))
            compiled = forward(latents, timestep, caption)
            eager = model(latents, timestep, model.refine_caption(features, torch.tensor([length])))
            assert torch.allclose(compiled, eager, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 2


def test_limits_are_named(tiny: Path) -> None:
    model = zimage_ranks.load(str(tiny))
    features = torch.zeros(1, 1024, model.config.cap_feat_dim)
    with pytest.raises(ValueError, match="1024 caption rows: valid are multiples of 32 up to 992"):
        model.refine_caption(features, torch.tensor([5]))
    with pytest.raises(ValueError, match=r"an image of \(65, 2\) tokens: axes_lens allows \(64, 64\)"):
        model(
            torch.zeros(1, 16, 130, 4), torch.tensor([0.5]), model.refine_caption(features[:, :32], torch.tensor([5]))
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"siglip_feat_dim": 1152}, "siglip_feat_dim = 1152: the Omni variant"),
        ({"n_kv_heads": 10}, "n_kv_heads = 10: valid is n_heads, 30"),
        ({"axes_dims": [32, 32, 32]}, "whose sum is dim / n_heads = 3840 / 30"),
        ({"all_patch_size": [2, 4], "all_f_patch_size": [1, 1]}, "valid are one patch size"),
        ({"qk_norm": False}, "valid is true"),
    ],
)
def test_variants_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        ZImageConfig.from_dict(changes)


def test_tensor_parallel_sizes_divide_the_heads() -> None:
    ZImageConfig().check_tensor_parallel(15)
    with pytest.raises(ModelConfigError, match="valid sizes are 1, 2, 3, 5, 6, 10, 15, 30"):
        ZImageConfig().check_tensor_parallel(4)
