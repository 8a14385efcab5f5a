# SPDX-License-Identifier: Apache-2.0
"""The NKI kernels as providers: on a device, and in the simulator where that is switched on."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from omni_neuron_kernels import nki_attention, nki_convolution, nki_fp8, nki_projection
from omni_neuron_kernels.dispatch import Implementation
from omni_neuron_kernels.nki_launch import CORES, SBUF_BYTES, dtype_limit, kernels_of, vector_row
from omni_neuron_runtime import env, platform_target

TARGETS = ("trn2", "trn3")
RMS_NORM_WIDTH = 8192
ADALN_WIDTH = 5632

Refusal = Callable[..., str | None]
Op = tuple[Callable[..., Any], Refusal]  # what runs it, and its kernel's limits


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, *, epsilon: float) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return kernels_of("norms").rms_norm[CORES](rows, vector_row(weight), epsilon).reshape(x.shape)


def _adaln_modulate(
    hidden: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    kernels, vectors = kernels_of("norms"), (scale.float().contiguous(), shift.float().contiguous())
    if branch is None or gate is None:
        return kernels.adaln_modulate[CORES](hidden.contiguous(), *vectors, epsilon), hidden
    gated = (hidden.contiguous(), branch.contiguous(), gate.float().contiguous())
    return kernels.gated_adaln_modulate[CORES](*gated, *vectors, epsilon)


def _mlp(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor,
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    up = (up_weight.contiguous(), up_bias.float().reshape(-1, 1))
    down = (down_weight.contiguous(), vector_row(down_bias))
    return kernels_of("feed_forward").mlp[CORES](rows, *up, *down).reshape(*x.shape[:-1], down_weight.shape[1])


def _gated_mlp(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor, *, activation: str
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    weights = [weight.contiguous() for weight in (gate_weight, up_weight, down_weight)]
    result = kernels_of("feed_forward").gated_mlp[CORES](rows, *weights, activation == "silu")
    return result.reshape(*x.shape[:-1], down_weight.shape[1])


def _output_projection(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    result = kernels_of("feed_forward").output_projection[CORES](rows, weight.contiguous(), vector_row(bias))
    return result.reshape(*x.shape[:-1], weight.shape[1])


def _rms_norm_limits(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> str | None:
    return dtype_limit(x=x) or _width_limit(x, RMS_NORM_WIDTH)


def _adaln_limits(
    hidden: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    branch: torch.Tensor | None = None,
    **options: Any,
) -> str | None:
    streams = {"hidden": hidden} if branch is None else {"hidden": hidden, "branch": branch}
    return dtype_limit(**streams) or _width_limit(hidden, ADALN_WIDTH)


def _mlp_limits(
    x: torch.Tensor, up_weight: torch.Tensor, up_bias: torch.Tensor, down_weight: torch.Tensor, down_bias: torch.Tensor
) -> str | None:
    return _sbuf_limit(x, up_weight.shape[0], up_weight.shape[1], down_weight) or dtype_limit(
        x=x, up_weight=up_weight, down_weight=down_weight
    )


def _gated_mlp_limits(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor, **options: Any
) -> str | None:
    return _sbuf_limit(x, up_weight.shape[0], up_weight.shape[1], down_weight) or dtype_limit(
        x=x, gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight
    )


def _output_projection_limits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> str | None:
    return _sbuf_limit(x, weight.shape[0], 0, weight) or dtype_limit(x=x, weight=weight)


def _sbuf_limit(x: torch.Tensor, width: int, inner: int, last_weight: torch.Tensor) -> str | None:
    """Of 512 tokens the inputs, transposed too, and hidden activations lie on chip at once, and the broadcast bias."""
    tiles = math.ceil(width / 128) + math.ceil(inner / 128)
    needed = (tiles * 512 + width) * x.element_size() + last_weight.shape[1] * 4
    if needed > SBUF_BYTES:
        widths = f"widths {width}, {inner} and {last_weight.shape[1]}"
        return f"{widths} need {needed} bytes of SBUF per partition in {x.dtype}, at most {SBUF_BYTES}"
    return None


def _width_limit(tensor: torch.Tensor, limit: int) -> str | None:
    return f"rows of {tensor.shape[-1]} elements, at most {limit}" if tensor.shape[-1] > limit else None


def _either(place: Refusal, limits: Refusal, *tensors: Any, **options: Any) -> str | None:
    """The place, which refuses every call on a CPU, then what holds for every kernel, then the kernel's own limits."""
    elsewhere = place(tensors[0].device.type)
    if elsewhere is not None:
        return elsewhere
    if env.get("VLLM_NEURON_DISABLE_NKI_KERNELS"):
        return "VLLM_NEURON_DISABLE_NKI_KERNELS=1"
    values = [*tensors, *options.values()]
    parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    given = [part for part in parts if isinstance(part, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return "a gradient is recorded, and the kernels have no backward"
    if any(tensor.numel() == 0 for tensor in given):
        return "a tensor without elements"
    devices = sorted({tensor.device.type for tensor in given})
    return f"tensors on {' and '.join(devices)}" if len(devices) > 1 else limits(*tensors, **options)


def _not_on_device(device: str) -> str | None:
    if device != "neuron":
        return f"tensors on {device}, not on a Neuron device"
    target = platform_target()
    return None if target in TARGETS else f"platform target {target}; the kernels need {' or '.join(TARGETS)}"


def _not_in_simulator(device: str) -> str | None:
    if device != "cpu":
        return "the simulator takes CPU tensors"
    # Asked by the variable, it is imported here, which switches it on; by a call of install(), it is already there.
    if env.get("OMNI_NEURON_NKISIM") and importlib.util.find_spec("omni_neuron_nkisim") is not None:
        importlib.import_module("omni_neuron_nkisim")
    simulator = sys.modules.get("omni_neuron_nkisim")
    if simulator is None or not simulator.is_installed():
        return "the simulator is not switched on (OMNI_NEURON_NKISIM=1 with omni-neuron-nkisim installed)"
    return None


_OPS: dict[str, Op] = {
    "adaln_modulate": (_adaln_modulate, _adaln_limits),
    "adaln_modulate_fp8": (nki_fp8.adaln_modulate_fp8, nki_fp8.adaln_limits),
    "causal_conv3d": (nki_convolution.causal_conv3d, nki_convolution.causal_conv3d_limits),
    "flash_attention": (nki_attention.flash_attention, nki_attention.flash_limits),
    "fp8_mlp": (nki_fp8.fp8_mlp, nki_fp8.mlp_limits),
    "fp8_output_projection": (nki_fp8.fp8_output_projection, nki_fp8.output_limits),
    "fp8_qkv_partial": (nki_fp8.fp8_qkv_partial, nki_fp8.qkv_limits),
    "fp8_qkv_projection": (nki_fp8.fp8_qkv_projection, nki_fp8.qkv_limits),
    "gated_mlp": (_gated_mlp, _gated_mlp_limits),
    "mlp": (_mlp, _mlp_limits),
    "output_projection": (_output_projection, _output_projection_limits),
    "qkv_partial": (nki_projection.qkv_partial, nki_projection.qkv_limits),
    "qkv_projection": (nki_projection.qkv_projection, nki_projection.qkv_limits),
    "quantize_mx": (nki_fp8.quantize_mx, nki_fp8.quantize_mx_limits),
    "ring_attention": (nki_attention.ring_attention, nki_attention.ring_limits),
    "ring_in_graph": (nki_attention.ring_in_graph, nki_attention.ring_limits),
    "row_quantize": (nki_fp8.row_quantize, nki_fp8.row_quantize_limits),
    "rms_norm": (_rms_norm, _rms_norm_limits),
}


def _provider(place: Refusal, priority: int, ops: Mapping[str, Op]) -> dict[str, Implementation]:
    return {
        op: Implementation(run, functools.partial(_either, place, limits), priority)
        for op, (run, limits) in ops.items()
    }


ON_DEVICE = _provider(_not_on_device, 100, _OPS)
IN_SIMULATOR = _provider(
    _not_in_simulator,
    50,
    {
        **_OPS,
        "ring_attention": (nki_attention.ring_attention, nki_attention.ring_limits_in_simulator),
        "ring_in_graph": (nki_attention.ring_in_graph, nki_attention.graph_limits_in_simulator),
    },
)
