# SPDX-License-Identifier: Apache-2.0
"""The ops in compiled graphs: one node and one composite each, which compute what the reference computes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import omni_neuron_nkisim
from omni_neuron_kernels import (
    adaln_modulate,
    adaln_modulate_fp8,
    causal_conv3d,
    flash_attention,
    fp8_mlp,
    fp8_output_projection,
    fp8_qkv_projection,
    gated_mlp,
    graph_ops,
    mlp,
    nki_attention,
    output_projection,
    pack_fp8_weight,
    qkv_projection,
    quantize_mx,
    rms_norm,
    row_quantize,
)
from omni_neuron_kernels.softmax_regimes import key_statistics
from omni_neuron_runtime import COUNTERS, ArtifactCache, compile_errors, compile_options


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    COUNTERS.reset()
    torch.manual_seed(0)
    yield


def tensors() -> tuple[torch.Tensor, ...]:
    heads = (torch.randn(2, 9, 4, 8), torch.randn(2, 11, 2, 8), torch.randn(2, 11, 2, 8))
    mask = torch.rand(2, 11) > 0.3
    mask[:, 0] = True
    layers = (torch.randn(32, 48), torch.randn(48), torch.randn(48, 32), torch.randn(32))
    video = (torch.randn(1, 3, 2, 5, 6), torch.randn(4, 3, 3, 3, 3), torch.randn(4), torch.randn(1, 3, 2, 5, 6))
    tables = (torch.randn(7, 4), torch.randn(7, 4))
    return (torch.randn(2, 7, 32), *torch.randn(4, 2, 32), *heads, mask, *layers, *video, torch.randn(16), *tables)


def every_op(
    x: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    weight: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    video: torch.Tensor,
    kernel: torch.Tensor,
    bias: torch.Tensor,
    past: torch.Tensor,
    gain: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
) -> list[torch.Tensor]:
    normed: dict[str, Any] = {"query_gain": gain, "key_gain": gain, "rotation": (cosines, sines)}
    heads: dict[str, Any] = {"heads": (2, 2), "head_dim": 8}
    return [
        rms_norm(x, weight[0]),
        *adaln_modulate(x, scale, shift),
        *adaln_modulate(x, scale, shift, branch=x * 2, gate=gate),
        flash_attention(q, k, v, key_length=10, key_mask=mask),
        mlp(x, up, up_bias, down, down_bias),
        gated_mlp(x, up, up, down, activation="gelu_tanh"),
        output_projection(x, up, up_bias),
        causal_conv3d(video, kernel, bias, padding=(0, 1, 1), past=past),
        causal_conv3d(video, kernel, bias, padding=(2, 1, 1)),
        *qkv_projection(x, up, up_bias, **heads, **normed),
        *qkv_projection(x, up, None, **heads),
        *qkv_projection(x, up, up_bias, **heads, **normed, ranks=2, all_reduce=lambda sums: sums * 2),
    ]


NODES = Counter(
    {
        **dict.fromkeys(("adaln_modulate", "flash_attention", "gated_adaln_modulate", "gated_mlp", "mlp"), 1),
        **dict.fromkeys(("output_projection", "qkv_partial", "rms_norm"), 1),
        **dict.fromkeys(("causal_conv3d", "qkv_projection"), 2),
    }
)


def compiled(function: Callable[..., Any], backend: str, cache: Path | str = "") -> Callable[..., Any]:
    options = compile_options("ops", (), str(cache))
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False, options=options)  # type: ignore[no-any-return]


def lowered(function: Callable[..., Any], cache: Path, *arguments: torch.Tensor) -> tuple[Any, str]:
    """What `function` computes as StableHLO, and the text of that."""
    torch._dynamo.reset()
    with torch.inference_mode(), compile_errors("ops"):
        results = compiled(function, "neuron_stablehlo", cache)(*arguments)
    [entry] = ArtifactCache(cache).entries()
    return results, (cache / "modules" / entry["key"] / "module.mlir").read_text()


def composites(text: str) -> Counter[str]:
    return Counter(re.findall(r'stablehlo\.composite "omni_neuron_kernels\.(\w+)"', text))


def test_composites_compute_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_mlir", reason="the extra [stablehlo] of omni-neuron-runtime is not installed")
    omni_neuron_nkisim.uninstall()
    arguments = tensors()
    got, text = lowered(every_op, tmp_path / "all", *arguments)
    assert composites(text) == NODES
    for ours, exact in zip(got, every_op(*arguments), strict=True):
        assert ours.shape == exact.shape and ours.dtype == exact.dtype
        assert float((ours - exact).norm() / exact.norm()) < 1e-6

    # Another version of the kernels is another artifact; without kernels there is no composite.
    x, weight = arguments[0], arguments[4][0]
    monkeypatch.setattr(graph_ops, "__version__", "0.2.0")
    graph_ops.kernel_version.cache_clear()
    try:
        text = lowered(rms_norm, tmp_path / "other", x, weight)[1]
    finally:
        graph_ops.kernel_version.cache_clear()
    assert composites(text) == {"rms_norm": 1} and 'kernel_version = "0.2.0+' in text
    monkeypatch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", "1")
    assert not composites(lowered(rms_norm, tmp_path / "none", x, weight)[1])


def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched from now on."""
    from omni_neuron_nkisim import launch

    names: list[str] = []
    original = launch.remember
    monkeypatch.setattr(launch, "remember", lambda stats: (names.append(stats.kernel), original(stats))[1])
    return names


def test_the_nodes_run_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, but in the simulator: what runs a graph's node is who runs the public function."""
    arguments, names = tensors(), launches(monkeypatch)
    with torch.inference_mode():
        got = compiled(every_op, "neuron_check")(*arguments)
        launched = Counter(names)
        monkeypatch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", "1")
        wanted = every_op(*arguments)
    assert launched == NODES and Counter(names) == NODES
    for ours, exact in zip(got, wanted, strict=True):
        assert float((ours - exact).norm() / exact.norm()) < 1e-5


def fp8_case() -> tuple[tuple[torch.Tensor, ...], Callable[..., list[torch.Tensor]]]:
    x, bias = torch.randn(2, 3, 128).bfloat16(), torch.randn(128)
    plain = (torch.randn(128, 128) * 20).to(torch.float8_e4m3fn)
    weight, scale = pack_fp8_weight(plain), torch.rand(128) / 100
    gain, tables = torch.randn(32), (torch.randn(3, 16), torch.randn(3, 16))

    def function(
        x: torch.Tensor,
        bias: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        gain: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        vector: torch.Tensor,
    ) -> list[torch.Tensor]:
        tokens, x_scale = row_quantize(x)
        options: dict[str, Any] = {"heads": (1, 1), "head_dim": 32, "query_gain": gain, "key_gain": gain}
        options["rotation"] = (cosines, sines)
        qkv = (tokens, x_scale, weight[:, :96], scale[:96], bias[:96])
        return [
            tokens.float(),
            x_scale,
            *(part.float() for part in adaln_modulate_fp8(x, vector, vector)),
            *(part.float() for part in adaln_modulate_fp8(x, vector, vector, branch=x, gate=vector)),
            *fp8_qkv_projection(*qkv, **options),
            *fp8_qkv_projection(*qkv, **options, ranks=2, all_reduce=lambda sums: sums * 2),
            fp8_output_projection(x, weight, scale, bias),
            fp8_mlp(tokens, x_scale, weight, scale, bias, weight, scale, bias),
        ]

    return (x, bias, weight, scale, gain, *tables, torch.randn(2, 128)), function


@pytest.mark.parametrize("backend", ["neuron_check", "neuron_stablehlo"])
def test_fp8_nodes(backend: str, tmp_path: Path) -> None:
    if backend == "neuron_stablehlo":
        pytest.importorskip("torch_mlir", reason="the extra [stablehlo] of omni-neuron-runtime is not installed")
    omni_neuron_nkisim.uninstall()
    arguments, function = fp8_case()
    with torch.inference_mode(), compile_errors("ops"):
        for ours, exact in zip(compiled(function, backend, tmp_path)(*arguments), function(*arguments), strict=True):
            assert ours.shape == exact.shape and ours.dtype == exact.dtype
            assert float((ours.float() - exact.float()).norm() / exact.float().norm()) < 5e-3
        if backend == "neuron_check":
            for ours, exact in zip(
                compiled(quantize_mx, backend)(arguments[0]), quantize_mx(arguments[0]), strict=True
            ):
                assert torch.equal(ours.view(torch.uint8), exact.view(torch.uint8))


def test_a_traced_kernel_cannot_read_its_data() -> None:
    with FakeTensorMode():
        q, k, v = torch.empty(1, 9, 4, 8), torch.empty(1, 11, 2, 8), torch.empty(1, 11, 2, 8)
        prepared = nki_attention.prepared(q, k, v, None, key_statistics(k, v, None), 0.3)
    assert prepared.regimes == ("running_maximum",) * 4 and prepared.biases == ()
