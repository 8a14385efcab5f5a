# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron lower` on HunyuanVideo-1.5: a block of the published size, in StableHLO."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_omni_neuron.cli import app


def lower(output: Path, *arguments: str) -> tuple[int, str, str]:
    command = ["lower", "--model", "hunyuan-video15-t2v", "--layers", "1", "--output", str(output), "--json"]
    result = CliRunner().invoke(app, [*command, *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_block_of_the_published_size(tmp_path: Path) -> None:
    pytest.importorskip("torch_mlir", reason="the extra [stablehlo] of omni-neuron-runtime is not installed")
    shape = ("--height", "720", "--width", "1280", "--frames", "121")
    code, stdout, stderr = lower(tmp_path, *shape, "--tp", "2", "--cp", "4", "--cfg", "2", "--sp")
    assert code == 0, stderr
    [report] = json.loads(stdout)
    assert {len(row["groups"]) * len(row["groups"][0]) for row in report["collectives"]} == {16}
    attention = [row for row in report["composites"] if row["name"].endswith(".flash_attention")]
    # The refiner's two blocks and the joint one; 8 of 16 heads. 31 · 45 · 80 tokens of video and 1256 of text.
    assert sum(row["count"] for row in attention) == 3
    assert any("1x112856x8x128xbf16" in row["operands"]["k"] for row in attention)


def test_what_is_not_lowered_is_named(tmp_path: Path) -> None:
    code, _, stderr = lower(tmp_path, "--component", "text_encoder")
    assert code == 1 and "only 'transformer' is lowered" in stderr
