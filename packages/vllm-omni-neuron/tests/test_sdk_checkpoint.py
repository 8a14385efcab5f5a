# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the SDK: what is checked from headers, what a rank loads, and what tiny ones are made of."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from omni_neuron_parallel import AxisGroup
from omni_neuron_runtime import CheckpointError, set_weight_loader, sharding_weight_loader
from vllm_omni_neuron.sdk import (
    DiffusersCheckpoint,
    Mapping,
    ModelConfig,
    ModelConfigError,
    ShardedComponent,
    ascii_tokenizer,
    check_tensor_parallel,
    mapping_coverage,
    numbered,
    perturb_constants,
    prefixed,
    save_components,
    tokenize,
    with_biases,
    write_model_index,
)


class FakeGroup(AxisGroup):
    """Ranks without processes: only construction needs them."""

    def __post_init__(self) -> None:
        pass


class Block(nn.Module):
    """A weight whose rows the ranks share, and a float32 gain that each has whole."""

    def __init__(self, group: AxisGroup, rows: int = 8, read: int | None = None) -> None:
        super().__init__()
        shard = rows // group.size
        self.up = nn.Parameter(torch.empty(shard, 4))
        set_weight_loader(self.up, sharding_weight_loader(0, shard, read or group.size))
        self.gain = nn.Parameter(torch.empty(4, dtype=torch.float32))


MAPPING: Mapping = {"up": "ff.weight", "gain": "norm.weight"}
SHAPES = {"ff.weight": (8, 4), "norm.weight": (4,), "rope.freqs": (2,)}
UNUSED = ("rope.",)


def block(size: int = 1, **changes: Any) -> Block:
    with torch.device("meta"):
        return Block(FakeGroup("tp", tuple(range(size)), 0), **changes)


def test_a_mapping_that_covers_both_sides_has_no_problems() -> None:
    for size in (1, 2, 4):
        assert mapping_coverage(block(size), MAPPING, SHAPES, UNUSED, size=size).problems == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"shapes": {"ff.weight": (8, 4), "rope.freqs": (2,)}}, "missing 1 tensor(s): norm.weight"),
        ({"unused": ()}, "1 tensor(s) that nothing uses: rope.freqs"),
        ({"mapping": {"up": "ff.weight"}, "unused": ("rope.", "norm.")}, "1 parameter(s) that the mapping does not"),
        ({"mapping": {**MAPPING, "down": "rope.freqs"}}, "1 name(s) in the mapping that are no parameters: down"),
        ({"mapping": {**MAPPING, "gain": "ff.weight"}, "unused": ("rope.", "norm.")}, "that make more than one"),
        ({"shapes": {**SHAPES, "ff.weight": (7, 4)}}, "ff.weight [7, 4] does not fit up [8, 4] of the configuration"),
        ({"shapes": {**SHAPES, "norm.weight": (5,)}}, "norm.weight [5] does not fit gain [4]"),
        ({"module": block(2, read=4), "shapes": {**SHAPES, "ff.weight": (16, 4)}, "size": 2}, "read 32 of its 64"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], problem: str) -> None:
    arguments = {"module": block(), "mapping": MAPPING, "shapes": SHAPES, "unused": UNUSED, **changes}
    problems = mapping_coverage(**arguments).problems
    assert any(problem in sentence for sentence in problems), problems


def test_prefixes_and_the_heads_that_tensor_parallelism_divides() -> None:
    assert prefixed({"qkv": ["q", "k"], "o": "out"}, "blocks.0.", "layers.0.") == {
        "blocks.0.qkv": ["layers.0.q", "layers.0.k"],
        "blocks.0.o": "layers.0.out",
    }
    assert numbered({"o": "out"}, "blocks.", "layers.", 2) == {
        "blocks.0.o": "layers.0.out",
        "blocks.1.o": "layers.1.out",
    }
    assert with_biases({"qkv": ["q", "k"], "o": "out"}) == {
        "qkv.weight": ["q.weight", "k.weight"],
        "qkv.bias": ["q.bias", "k.bias"],
        "o.weight": "out.weight",
        "o.bias": "out.bias",
    }
    check_tensor_parallel(2, 6)
    with pytest.raises(ModelConfigError, match=r"tensor_parallel_size = 4: the encoder has 6 .* valid sizes are 1, 2,"):
        check_tensor_parallel(4, 6, "the encoder")


@pytest.fixture
def checkpoint(tmp_path: Path) -> DiffusersCheckpoint:
    """A component of two tensors, and one that nothing needs."""
    (tmp_path / "transformer").mkdir()
    tensors = {key: torch.arange(torch.Size(shape).numel()).reshape(shape).float() for key, shape in SHAPES.items()}
    save_file(tensors, tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    components = {"transformer": ("diffusers", "X"), "scheduler": ("diffusers", "Y"), "vae": None}
    write_model_index(tmp_path, "XPipeline", components, boundary=0.5)
    return DiffusersCheckpoint(tmp_path)


def test_a_component_is_checked_and_loaded(checkpoint: DiffusersCheckpoint) -> None:
    checkpoint.check_weights("transformer", Block, MAPPING, UNUSED)
    whole = checkpoint.load("transformer", Block, MAPPING, dtype=torch.bfloat16, device="cpu", unused=UNUSED)
    assert (whole.up.dtype, whole.gain.dtype, whole.training) == (torch.bfloat16, torch.float32, False)
    assert whole.gain.tolist() == [0.0, 1.0, 2.0, 3.0] and not whole.up.requires_grad
    second = FakeGroup("tp", (0, 1), 1)
    half = checkpoint.load(
        "transformer", Block, MAPPING, dtype=torch.float32, device="cpu", group=second, unused=UNUSED
    )
    assert half.up[0].tolist() == [16.0, 17.0, 18.0, 19.0] and half.up.shape == (4, 4)


@dataclass(frozen=True)
class BlockConfig(ModelConfig):
    rows: int = 8


def test_a_component_that_is_declared_once(checkpoint: DiffusersCheckpoint) -> None:
    def make(config: BlockConfig, *, group: AxisGroup, read: int | None = None) -> Block:
        return Block(group, config.rows, read)

    component = ShardedComponent("transformer", BlockConfig, make, lambda config: MAPPING, UNUSED)
    config = checkpoint.path / "transformer" / "config.json"
    config.write_text('{"rows": 8}')
    component.check(checkpoint)
    half = component.load(checkpoint, dtype=torch.float32, group=FakeGroup("tp", (0, 1), 1))
    assert half.up[0].tolist() == [16.0, 17.0, 18.0, 19.0]
    with pytest.raises(CheckpointError, match=r"dim 0 of shape \[8, 4\] holds 8, expected 16"):
        component.check(checkpoint, read=2)
    config.write_text('{"rows": 6}')
    with pytest.raises(CheckpointError, match=r"ff.weight \[8, 4\] does not fit up \[6, 4\]"):
        component.check(checkpoint)


def test_tied_parameters_stay_one(checkpoint: DiffusersCheckpoint) -> None:
    class Tied(Block):
        def __init__(self, group: AxisGroup) -> None:
            super().__init__(group)
            self.last = nn.Module()
            self.last.gain = self.gain

    checkpoint.check_weights("transformer", Tied, MAPPING, UNUSED)
    module = checkpoint.load("transformer", Tied, MAPPING, dtype=torch.float32, device="cpu", unused=UNUSED)
    assert module.last.gain is module.gain and module.gain.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_what_nothing_uses_or_fills_is_refused(checkpoint: DiffusersCheckpoint) -> None:
    with pytest.raises(CheckpointError, match=r"transformer: 1 tensor\(s\) that nothing uses: rope.freqs"):
        checkpoint.check_weights("transformer", Block, MAPPING)
    with pytest.raises(CheckpointError, match=r"1 tensor\(s\) that nothing uses: rope.freqs"):
        checkpoint.load("transformer", Block, MAPPING, dtype=torch.float32, device="cpu")

    class WithTable(Block):
        def __init__(self, group: AxisGroup) -> None:
            super().__init__(group)
            self.register_buffer("table", torch.zeros(2), persistent=False)

    with pytest.raises(ValueError, match=r"WithTable has the buffer\(s\) table, which no checkpoint fills"):
        checkpoint.load("transformer", WithTable, MAPPING, dtype=torch.float32, device="cpu", unused=UNUSED)


def test_the_index(checkpoint: DiffusersCheckpoint, tmp_path: Path) -> None:
    assert (checkpoint.architecture, checkpoint.index["boundary"]) == ("XPipeline", 0.5)
    assert [checkpoint.lists(name) for name in ("transformer", "vae", "other")] == [True, False, False]
    with pytest.raises(ModelConfigError, match="no folder vae; a checkpoint of this model has transformer, vae"):
        checkpoint.check_components("transformer", "vae")
    with pytest.raises(ModelConfigError, match="is not a folder on this machine"):
        _ = DiffusersCheckpoint(tmp_path / "nowhere").index
    with pytest.raises(ModelConfigError, match=r"config\.json is missing"):
        checkpoint.raw_config("transformer")


def test_schedulers_are_the_checkpoints(checkpoint: DiffusersCheckpoint) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    save_components(checkpoint.path, {"scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0)})
    scheduler = checkpoint.scheduler()
    assert isinstance(scheduler, FlowMatchEulerDiscreteScheduler) and scheduler.config.shift == 3.0
    assert checkpoint.scheduler() is not scheduler
    (checkpoint.path / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "Unknown"}')
    with pytest.raises(ModelConfigError, match="_class_name = 'Unknown' is no class of diffusers"):
        checkpoint.scheduler()


@dataclass(frozen=True)
class Config(ModelConfig):
    dim: int
    axes: tuple[tuple[int, ...], ...] = ()


def test_configurations(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"dim": 4, "axes": [[1, 2], [3]], "other": 1}))
    assert Config.from_file(path) == Config(4, ((1, 2), (3,)))
    with pytest.raises(ModelConfigError, match="the configuration lacks dim, which Config needs"):
        Config.from_dict({"axes": []})
    path.write_text("{")
    with pytest.raises(ModelConfigError, match=r"config\.json is not valid JSON"):
        Config.from_file(path)


@pytest.mark.parametrize("kind", ["t5", "qwen2"])
def test_tokenizers_and_what_is_cut(kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_components(tmp_path, {"tokenizer": ascii_tokenizer(kind)})
    tokenizer = DiffusersCheckpoint(tmp_path).tokenizer()
    ids, mask = tokenize(tokenizer, "A  cat", 12, clean=lambda text: text.lower().replace("  ", " "))
    assert ids.shape == mask.shape == (1, 12) and ids.dtype == torch.int64
    length = int(mask.sum())
    assert mask[0].tolist() == [1] * length + [0] * (12 - length)
    assert tokenizer.decode(ids[0, :length], skip_special_tokens=True) == "a cat"
    with caplog.at_level(logging.WARNING):
        assert tokenize(tokenizer, "a cat", 3)[0].shape == (1, 3)
    assert f"the prompt has {length} tokens; only the first 3 reach the model" in caplog.text
    if kind == "qwen2":
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        assert chat == "<|im_start|>user\nhi<|im_end|>\n"


def test_constants_are_perturbed() -> None:
    norm = nn.LayerNorm(8)
    perturb_constants(norm)
    assert len(set(norm.weight.tolist())) == len(set(norm.bias.tolist())) == 8
    with pytest.raises(ValueError, match="kind = 'gpt': valid values are t5, qwen2"):
        ascii_tokenizer("gpt")  # type: ignore[arg-type]
