# SPDX-License-Identifier: Apache-2.0
"""The commands `lower` and `cache`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omni_neuron_runtime import ArtifactCache
from vllm_omni_neuron.cli import app

runner = CliRunner()
# Two modulated norms and the last one behind the blocks, projections of one rank of several, self- and cross-attention.
KERNELS = {
    "adaln_modulate": 3,
    "gated_adaln_modulate": 1,
    "qkv_partial": 1,
    "flash_attention": 2,
    "output_projection": 2,
    "mlp": 1,
}


def lower(output: Path, *arguments: str) -> tuple[int, str, str]:
    command = ["lower", "--model", "wan22-t2v-a14b", "--output", str(output), "--json", *arguments]
    result = runner.invoke(app, command)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def _extra() -> None:
    pytest.importorskip("omni_neuron_wan22")
    pytest.importorskip("torch_mlir", reason="the extra [stablehlo] of omni-neuron-runtime is not installed")


def test_one_block_of_the_real_size(tmp_path: Path) -> None:
    shape = ("--height", "480", "--width", "832", "--frames", "81", "--layers", "1", "--tp", "4", "--cp", "8")
    code, stdout, stderr = lower(tmp_path, *shape, "--cfg", "2")
    assert code == 0, stderr
    [report] = json.loads(stdout)
    text = Path(report["file"]).read_text()
    assert text.count("stablehlo.all_reduce") == 5 and "f64" not in text
    assert json.loads((tmp_path / "transformer.json").read_text()) == report
    kernels: Counter[str] = Counter()
    for row in report["composites"]:
        kernels[row["name"].partition(".")[2]] += row["count"]
    assert kernels == KERNELS
    assert all(text.count(f'composite "omni_neuron_kernels.{name}"') == n for name, n in KERNELS.items())
    [mlp] = [row for row in report["composites"] if row["name"].endswith(".mlp")]
    assert mlp["operands"]["up_weight"] == "tensor<5120x3456xbf16>" and mlp["results"] == ["tensor<1x4095x5120xbf16>"]
    # S = 21 · 30 · 52 = 32760 tokens, 4095 of them on each of 8 ranks, 5120 bfloat16 wide.
    largest = max(report["collectives"], key=lambda row: row["bytes_each"])
    assert (largest["operation"], largest["bytes_each"]) == ("all_reduce", 4095 * 5120 * 2)
    assert [len(row["groups"]) * len(row["groups"][0]) for row in report["collectives"]] == [64] * len(
        report["collectives"]
    )
    # Of a rank: projections, feed-forward and attention of a block; 2 FLOPs a product.
    tokens, keys, heads, width, inner = 4095, 32760, 10, 5120, 13824 // 4
    products = tokens * width * (3 * 1280 + 1280 + 1280 + 1280 + 2 * inner) + 2 * heads * 128 * tokens * (keys + 512)
    assert 2 * products < report["flops"] < 2.2 * products
    # The key is a function of what was asked for.
    assert json.loads(lower(tmp_path / "again", *shape, "--cfg", "2")[1])[0]["key"] == report["key"]


def test_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, stderr = lower(tmp_path, "--component", "vae", "--layers", "1")
    assert code == 1 and "layers = 1: the VAE is lowered whole" in stderr
    code, _, stderr = lower(tmp_path, "--tp", "3")
    assert code == 1 and "tensor_parallel_size = 3" in stderr
    code, _, stderr = lower(tmp_path, "--cfg", "3")
    assert code == 2 and "takes at most 2" in " ".join(stderr.replace("│", " ").split())
    result = runner.invoke(app, ["lower", "--model", "gpt", "--output", str(tmp_path)])
    assert result.exit_code == 2 and "wan22-t2v-a14b" in result.stderr
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "0")
    code, _, stderr = lower(tmp_path)
    assert code == 1 and "VLLM_NEURON_CPU_MODE=1" in stderr
    assert list(tmp_path.iterdir()) == []


def test_cache_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_NEURON_COMPILE_CACHE_DIR", str(tmp_path / "a"))
    for index in range(3):
        ArtifactCache.from_environment().module(f"dit {index}", f"{index:064x}", {}, lambda i=index: f"module {i}")  # type: ignore[misc]
    entries = json.loads(runner.invoke(app, ["cache", "ls", "--json"]).stdout)
    assert {entry["name"] for entry in entries} == {"dit 0", "dit 1", "dit 2"}
    listed = runner.invoke(app, ["cache", "ls"])
    assert entries[0]["key"][:12] in listed.stdout and "3 modules" in listed.stderr

    archive = str(tmp_path / "cache.tar.gz")
    assert "3 modules written" in runner.invoke(app, ["cache", "export", archive]).stderr
    elsewhere = ["--dir", str(tmp_path / "b")]
    assert "3 new modules" in runner.invoke(app, ["cache", "import", archive, *elsewhere]).stderr
    assert "1 modules removed" in runner.invoke(app, ["cache", "rm", entries[0]["key"][:12]]).stderr
    assert len(json.loads(runner.invoke(app, ["cache", "ls", "--json"]).stdout)) == 2
    assert len(json.loads(runner.invoke(app, ["cache", "ls", "--json", *elsewhere]).stdout)) == 3

    unknown = runner.invoke(app, ["cache", "rm", "xyz"])
    assert unknown.exit_code == 1 and "starts with 'xyz'" in unknown.stderr
    assert runner.invoke(app, ["cache", "rm"]).exit_code == 2
    assert "2 modules removed" in runner.invoke(app, ["cache", "rm", "--all"]).stderr
