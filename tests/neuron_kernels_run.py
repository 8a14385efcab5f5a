# SPDX-License-Identifier: Apache-2.0
"""Run by test_on_neuron.py: every op of omni-neuron-kernels, compiled as a model's is, against torch on the host.

Prints one JSON object: for each op the provider that runs it on the device, and the relative L2 error of its results.
In CPU mode, with VLLM_NEURON_BACKEND=neuron_check, it does the same with the torch references.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import omni_neuron_kernels as kernels
import omni_neuron_runtime as runtime


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.25).to(dtype)


def cases() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of each op, on the host."""
    x, up, down = random(1, 200, 256), random(256, 384, seed=1), random(384, 256, seed=2)
    vectors = random(6, 1, 256, seed=3, dtype=torch.float32)
    up_bias, bias = random(384, seed=4), random(256, seed=5)
    angles = random(200, 32, seed=6, dtype=torch.float32)
    q, k, v = random(3, 1, 200, 4, 64, seed=7)
    tokens, token_scale = kernels.row_quantize(x)
    packed = [kernels.pack_fp8_weight(weight.to(torch.float8_e4m3fn)) for weight in (up, down)]
    scales = torch.ones(384), torch.ones(256)
    heads = {"heads": (2, 2), "head_dim": 64}
    norm_and_rotation = {
        "query_gain": vectors[0, 0, :128],
        "key_gain": vectors[1, 0, :128],
        "rotation": (angles.cos(), angles.sin()),
    }
    return {
        "rms_norm": ((x, vectors[0, 0]), {}),
        "adaln_modulate": ((x, vectors[1], vectors[2]), {"branch": random(1, 200, 256, seed=8), "gate": vectors[3]}),
        "mlp": ((x, up, up_bias, down, bias), {}),
        "gated_mlp": ((x, up, random(256, 384, seed=9), down), {}),
        "output_projection": ((x, up, up_bias), {}),
        "qkv_projection": ((x, up, up_bias), {**heads, **norm_and_rotation}),
        "flash_attention": ((q, k, v), {"key_length": 190}),
        "causal_conv3d": (
            (random(1, 32, 3, 12, 20), random(32, 32, 3, 3, 3, seed=10), bias[:32]),
            {"padding": (2, 1, 1)},
        ),
        "row_quantize": ((x,), {}),
        "quantize_mx": ((x,), {}),
        "adaln_modulate_fp8": ((x, vectors[1], vectors[2]), {}),
        "fp8_qkv_projection": (
            (tokens, token_scale, packed[0], scales[0], up_bias),
            {**heads, **norm_and_rotation},
        ),
        "fp8_output_projection": ((x, packed[0], scales[0], up_bias), {}),
        "fp8_mlp": ((tokens, token_scale, packed[0], scales[0], up_bias, packed[1], scales[1], bias), {}),
    }


def on(device: torch.device, value: Any) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)


def error(value: Any, expected: Any) -> float:
    """The largest relative L2 error of the tensors that an op returns."""
    pairs = zip(tree_leaves(value), tree_leaves(expected), strict=True)
    return max(float((one.cpu().float() - other.float()).norm() / other.float().norm()) for one, other in pairs)


def main() -> None:
    device = torch.device("cpu")
    if not runtime.is_cpu_mode():
        cores = runtime.visible_cores() or (0,)
        runtime.initialize_device_runtime(cores[0], 1)
        device = torch.device("neuron", 0)
    backend = runtime.get_compile_backend()
    results = {}
    for name, (tensors, options) in cases().items():
        op = getattr(kernels, name)
        compiled = torch.compile(
            op, backend=backend, fullgraph=True, dynamic=False,
            options=runtime.compile_options(name, runtime.component_compiler_args("transformer")),
        )  # fmt: skip
        there, options_there = on(device, tensors), on(device, options)
        value = compiled(*there, **options_there)
        results[name] = {
            "provider": kernels.explain(name, *there, **options_there).provider,
            "error": error(value, op(*tensors, **options)),
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
