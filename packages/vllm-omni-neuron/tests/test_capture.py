# SPDX-License-Identifier: Apache-2.0
"""Tensor capture without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vllm_omni_neuron.capture import CaptureKey, Ranks, TensorCapture, match_modules, read_step_meta, read_step_tensors

LEADER = Ranks(0, 0, 0)
NAMES = [f"transformer.blocks.{index}.{part}" for index in range(12) for part in ("attn1", "ffn")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn1 = nn.Linear(3, 3)
        self.ffn = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attended = self.attn1(x)
        return self.ffn(attended).add_(1.0), attended


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x * timestep


class Pipeline:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.anything = Denoiser()

    def predict_noise(self, **inputs: Any) -> torch.Tensor:
        output: torch.Tensor = self.anything(**inputs)
        return output


def settings(directory: Path, *modules: str, **more: str) -> dict[str, Any]:
    return {"modules": list(modules), "capture_dir": str(directory), **more}


def capture_of(pipeline: Pipeline, directory: Path, *modules: str, ranks: Ranks = LEADER) -> TensorCapture:
    capture = TensorCapture(settings(directory, *modules), {"anything": pipeline.anything}, lambda: ranks)
    capture.observe(pipeline)
    return capture


@pytest.mark.parametrize(
    ("pattern", "indices", "parts"),
    [
        ("blocks.0-3.attn1", [0, 1, 2, 3], ["attn1"]),
        ("blocks.9-11.ffn", [9, 10, 11], ["ffn"]),
        ("transformer.blocks.2.attn1", [2], ["attn1"]),
        (r"blocks\.(1|10)\.\w+", [1, 10], ["attn1", "ffn"]),
        ("blocks.1.attn1", [1], ["attn1"]),  # neither 10, 11 nor, by the dot, anything else
    ],
)
def test_patterns(pattern: str, indices: list[int], parts: list[str]) -> None:
    expected = [f"transformer.blocks.{index}.{part}" for index in indices for part in parts]
    assert match_modules([pattern], NAMES) == expected


def test_unknown_pattern_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'blocks.1.atn1' matches no module; nearest names: .*blocks\.1\.attn1"):
        match_modules(["blocks.1.atn1"], NAMES)
    with pytest.raises(ValueError, match="not valid"):
        match_modules(["blocks.(1"], NAMES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"module": []}, "unknown setting 'module'"),
        ({"capture_dir": ""}, "needs the setting 'capture_dir'"),
        ({"modules": "blocks.0.ffn"}, "must be a list"),
    ],
)
def test_bad_settings(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorCapture({**settings(tmp_path, "blocks.0.ffn"), **change}, {"anything": Denoiser()})


def test_files_steps_and_branches(tmp_path: Path) -> None:
    pipeline = Pipeline()
    capture = capture_of(pipeline, tmp_path, "blocks.0-1.attn1", ranks=Ranks(1, 2, 3))
    leader = capture_of(pipeline, tmp_path, "blocks.2")
    positive, negative = torch.ones(1, 3), -torch.ones(1, 3)
    pipeline.predict_noise(x=positive, timestep=torch.tensor(1000.0))  # warm-up: nothing is written
    assert list(tmp_path.iterdir()) == []
    for each in (capture, leader):
        each.enable("fox")
    for timestep in (900.0, 500.0):
        for x in (positive, negative):
            pipeline.predict_noise(x=x, timestep=torch.tensor(timestep))
    for each in (capture, leader):
        each.disable()
    pipeline.predict_noise(x=positive, timestep=torch.tensor(1.0))

    names = sorted(path.name for path in (tmp_path / "fox" / "step_001").iterdir())
    assert names == [
        "anything.blocks.0.attn1_tp1_cp2_cfg3.pt",
        "anything.blocks.0.attn1_tp1_cp2_cfg3_call1.pt",
        "anything.blocks.1.attn1_tp1_cp2_cfg3.pt",
        "anything.blocks.1.attn1_tp1_cp2_cfg3_call1.pt",
        "anything.blocks.2_tp0_cp0_cfg0.pt",
        "anything.blocks.2_tp0_cp0_cfg0_call1.pt",
        "meta.json",
    ]
    assert sorted(path.name for path in (tmp_path / "fox").iterdir()) == ["step_000", "step_001"]
    assert read_step_meta(tmp_path, "fox", 1) == {"step": 1, "timestep": 500.0, "modules": ["anything.blocks.2"]}
    tensors = read_step_tensors(tmp_path, "fox", 0)
    first = pipeline.anything.blocks[0].attn1
    torch.testing.assert_close(tensors[CaptureKey("anything.blocks.0.attn1", 1, 2, 3, 0)], first(positive))
    torch.testing.assert_close(tensors[CaptureKey("anything.blocks.0.attn1", 1, 2, 3, 1)], first(negative))
    assert len(tensors[CaptureKey("anything.blocks.2", 0, 0, 0, 0)]) == 2  # what a block returns is a pair


def test_enable_restarts_at_step_0(tmp_path: Path) -> None:
    pipeline = Pipeline()
    capture = capture_of(pipeline, tmp_path, "blocks.0")
    for prompt_hash in ("one", "two"):
        capture.enable(prompt_hash)
        pipeline.predict_noise(x=torch.ones(1, 3), timestep=torch.tensor(7.0))
        assert read_step_meta(tmp_path, prompt_hash, 0)["timestep"] == 7.0
    with pytest.raises(ValueError, match="cannot name a folder"):
        capture.enable("../elsewhere")
    with pytest.raises(FileNotFoundError, match="step 5 of prompt 'two'"):
        read_step_tensors(tmp_path, "two", 5)


def test_capture_filter(tmp_path: Path) -> None:
    capture = TensorCapture(
        settings(tmp_path, "blocks.0-2.ffn", capture_filter=r".*\.[02]\.ffn"), {"anything": Denoiser()}
    )
    assert capture.module_names == ["anything.blocks.0.ffn", "anything.blocks.2.ffn"]


def test_hooks_are_part_of_a_compiled_graph(tmp_path: Path) -> None:
    """One graph with the hooks in it, the same one whether capture is on or off, and copies that later ops spare."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    pipeline = Pipeline()
    capture = TensorCapture(settings(tmp_path, "blocks.0-2.ffn"), {"anything": pipeline.anything}, lambda: LEADER)
    pipeline.anything.compile(backend=backend, fullgraph=True)
    capture.observe(pipeline)
    x = torch.ones(1, 3)
    for prompt_hash in ("on", None, "again"):
        if prompt_hash:
            capture.enable(prompt_hash)
        else:
            capture.disable()
        pipeline.predict_noise(x=x, timestep=torch.tensor(3.0))
    assert len(graphs) == 1
    reference = Pipeline().anything
    for prompt_hash in ("on", "again"):
        tensors = read_step_tensors(tmp_path, prompt_hash, 0)
        assert len(tensors) == 3
        block = reference.blocks[0]
        torch.testing.assert_close(
            tensors[CaptureKey("anything.blocks.0.ffn", 0, 0, 0, 0)], block.ffn(block.attn1(x)).detach()
        )
