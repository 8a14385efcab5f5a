# SPDX-License-Identifier: Apache-2.0
"""The DiT against diffusers', on one rank and over TP, SP and CP; the mapping at the published size; refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hunyuan_ranks
import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel

from omni_neuron_hunyuan_video15.config import GuiderConfig, HunyuanVideo15Config
from omni_neuron_hunyuan_video15.mapping import UNUSED_TRANSFORMER_KEYS, transformer_mapping
from omni_neuron_hunyuan_video15.text import glyph_text
from omni_neuron_hunyuan_video15.transformer import HunyuanVideo15Transformer
from omni_neuron_hunyuan_video15.vae import FrameAttnBlock, attend_frame_by_frame
from omni_neuron_parallel import AxisGroup, RankPool, Topology
from vllm_omni_neuron.sdk import ModelConfigError, mapping_coverage


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def reference(tiny: Path) -> dict[bool, torch.Tensor]:
    """diffusers' prediction with and without glyphs; its image embedding of zeros says that there is no image."""
    model = HunyuanVideo15Transformer3DModel.from_pretrained(tiny, subfolder="transformer").eval()
    image_embeds = torch.zeros(1, 4, model.config.image_embed_dim)
    with torch.no_grad():
        return {
            with_glyphs: model(**hunyuan_ranks.inputs(with_glyphs), image_embeds=image_embeds).sample
            for with_glyphs in (False, True)
        }


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, preload=("omni_neuron_hunyuan_video15.checkpoint",)) as ranks:
        yield ranks


@pytest.mark.parametrize("with_glyphs", [False, True])
def test_one_rank(tiny: Path, reference: dict[bool, torch.Tensor], with_glyphs: bool) -> None:
    assert relative_l2(hunyuan_ranks.forward(str(tiny), with_glyphs), reference[with_glyphs]) <= 1e-5
    assert relative_l2(reference[False], reference[True]) > 1e-3


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        (Topology(tp=4), {"sequence_parallel": True}),
        (Topology(cp=4), {}),
        (Topology(tp=2, cp=2), {}),
        (Topology(tp=2, cp=2), {"sequence_parallel": True, "context_method": "ring"}),
        (Topology(tp=2, cfg=2), {}),
    ],
    ids=str,
)
def test_layouts(
    pool: RankPool, tiny: Path, reference: dict[bool, torch.Tensor], topology: Topology, options: dict[str, Any]
) -> None:
    results = pool.run(hunyuan_ranks.forward_on, str(tiny), topology, options)
    assert relative_l2(results[0], reference[True]) <= 1e-5
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("size", [1, 8])
def test_mapping_at_the_published_size(size: int) -> None:
    """Both sides are covered, and 8 ranks read each element once, or all of them."""
    config = HunyuanVideo15Config()
    group = AxisGroup("tp", tuple(range(size)), 0, process_group=object())  # type: ignore[arg-type]  # never used
    with torch.device("meta"):
        theirs = HunyuanVideo15Transformer3DModel(task_type="t2v").state_dict()
        ours = HunyuanVideo15Transformer(config, group=group, context_group=AxisGroup("cp"))
    shapes = {key: tuple(tensor.shape) for key, tensor in theirs.items()}
    coverage = mapping_coverage(ours, transformer_mapping(config), shapes, UNUSED_TRANSFORMER_KEYS, size=size)
    assert coverage.problems == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_meanflow": True}, "use_meanflow = True"),
        ({"qk_norm": "layer_norm"}, "qk_norm = .layer_norm."),
        ({"patch_size": 2}, "patch_size = 2"),
        ({"rope_axes_dim": [16, 56, 54]}, r"rope_axes_dim = \[16, 56, 54\].*128"),
        ({"in_channels": 32}, "in_channels = 32.*65"),
    ],
)
def test_refused_configurations(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        HunyuanVideo15Config.from_dict(change)


def test_a_guider_that_does_something_else_is_refused() -> None:
    plain = {"_class_name": "ClassifierFreeGuidance", "guidance_scale": 6.0}
    assert GuiderConfig.from_dict(plain).scale == 6.0
    assert GuiderConfig.from_dict(plain | {"enabled": False}).scale == 1.0
    for change in ({"guidance_rescale": 0.5}, {"stop": 0.8}, {"_class_name": "AdaptiveProjectedGuidance"}):
        [(name, value)] = change.items()
        with pytest.raises(ModelConfigError, match=f"guider: {name} = {value!r}"):
            GuiderConfig.from_dict(plain | change)


@pytest.mark.parametrize(
    "prompt",
    ["no words", 'a sign "OPEN" and “closed”', 'twice "one" "one" "two"', 'empty ""'],
)
def test_words_to_be_drawn(prompt: str) -> None:
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

    assert glyph_text(prompt) == (extract_glyph_texts(prompt) or "")


def test_the_instruction_is_that_of_diffusers() -> None:
    import inspect

    from diffusers import HunyuanVideo15Pipeline

    from omni_neuron_hunyuan_video15 import text

    parameters = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
    assert parameters["system_message"].default == text.INSTRUCTION
    assert parameters["crop_start"].default == text.INSTRUCTION_TOKENS
    assert parameters["tokenizer_max_length"].default == text.MAX_TEXT_LENGTH


def test_the_vae_attends_as_diffusers_does() -> None:
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

    torch.manual_seed(0)
    vae = torch.nn.Sequential(HunyuanVideo15AttnBlock(8))
    x = torch.randn(1, 8, 3, 2, 4)  # more batch elements are beyond diffusers
    with torch.inference_mode():
        expected = vae(x)
        attend_frame_by_frame(vae)
        assert type(vae[0]) is FrameAttnBlock
        assert relative_l2(vae(x), expected) < 1e-6
