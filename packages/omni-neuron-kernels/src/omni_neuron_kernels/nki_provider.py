# SPDX-License-Identifier: Apache-2.0
"""The NKI kernels as providers: on a device, and in the simulator where that is switched on."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from omni_neuron_kernels import nki_convolution, nki_fp8, nki_projection
from omni_neuron_kernels.dispatch import Implementation
from omni_neuron_kernels.nki_launch import CORES, SBUF_BYTES, dtype_limit, kernels_of
from omni_neuron_kernels.softmax_regimes import bounded_heads
from omni_neuron_runtime import env, platform_target

TARGETS = ("trn2", "trn3")
RMS_NORM_WIDTH = 8192
ADALN_WIDTH = 5632
HEAD_DIM = 128

Refusal = Callable[..., str | None]


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, *, epsilon: float) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return kernels_of("norms").rms_norm[CORES](rows, weight.float().reshape(1, -1), epsilon).reshape(x.shape)


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


def _flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, key_length: int
) -> torch.Tensor:
    # The regime of each head is part of the kernel that is compiled, so the norms are read back here.
    bounded = bounded_heads(q, k, v, scale=scale, key_length=key_length).flatten().tolist()
    heads = [tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (q, k, v)]
    result = kernels_of("attention").flash_attention[CORES](*heads, scale, key_length, tuple(bounded))
    return result.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def _mlp(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor,
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    up = (up_weight.contiguous(), up_bias.float().reshape(-1, 1))
    down = (down_weight.contiguous(), down_bias.float().reshape(1, -1))
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
    result = kernels_of("feed_forward").output_projection[CORES](rows, weight.contiguous(), bias.float().reshape(1, -1))
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


def _flash_attention_limits(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, **options: Any
) -> str | None:
    if q.shape[-1] > HEAD_DIM:
        return f"head dim {q.shape[-1]}, at most {HEAD_DIM}"
    if scale is not None and not 0 < scale < math.inf:
        return f"scale {scale}, has to be above zero"
    return dtype_limit(q=q, k=k, v=v)


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
    """What holds for every kernel, then where it would run, then the kernel's own limits."""
    if env.get("VLLM_NEURON_DISABLE_NKI_KERNELS"):
        return "VLLM_NEURON_DISABLE_NKI_KERNELS=1"
    given = [value for value in (*tensors, *options.values()) if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return "a gradient is recorded, and the kernels have no backward"
    if any(tensor.numel() == 0 for tensor in given):
        return "a tensor without elements"
    return place(given) or limits(*tensors, **options)


def _not_on_device(given: list[torch.Tensor]) -> str | None:
    elsewhere = sorted({tensor.device.type for tensor in given} - {"neuron"})
    if elsewhere:
        return f"tensors on {', '.join(elsewhere)}, not on a Neuron device"
    target = platform_target()
    return None if target in TARGETS else f"platform target {target}; the kernels need {' or '.join(TARGETS)}"


def _not_in_simulator(given: list[torch.Tensor]) -> str | None:
    if any(tensor.device.type != "cpu" for tensor in given):
        return "the simulator takes CPU tensors"
    # Asked by the variable, it is imported here, which switches it on; by a call of install(), it is already there.
    if env.get("OMNI_NEURON_NKISIM") and importlib.util.find_spec("omni_neuron_nkisim") is not None:
        importlib.import_module("omni_neuron_nkisim")
    simulator = sys.modules.get("omni_neuron_nkisim")
    if simulator is None or not simulator.is_installed():
        return "the simulator is not switched on (OMNI_NEURON_NKISIM=1 with omni-neuron-nkisim installed)"
    return None


_OPS: dict[str, tuple[Callable[..., Any], Refusal]] = {
    "adaln_modulate": (_adaln_modulate, _adaln_limits),
    "adaln_modulate_fp8": (nki_fp8.adaln_modulate_fp8, nki_fp8.adaln_limits),
    "causal_conv3d": (nki_convolution.causal_conv3d, nki_convolution.causal_conv3d_limits),
    "flash_attention": (_flash_attention, _flash_attention_limits),
    "fp8_mlp": (nki_fp8.fp8_mlp, nki_fp8.mlp_limits),
    "fp8_output_projection": (nki_fp8.fp8_output_projection, nki_fp8.output_limits),
    "fp8_qkv_projection": (nki_fp8.fp8_qkv_projection, nki_fp8.qkv_limits),
    "gated_mlp": (_gated_mlp, _gated_mlp_limits),
    "mlp": (_mlp, _mlp_limits),
    "output_projection": (_output_projection, _output_projection_limits),
    "qkv_projection": (nki_projection.qkv_projection, nki_projection.qkv_limits),
    "quantize_mx": (nki_fp8.quantize_mx, nki_fp8.quantize_mx_limits),
    "row_quantize": (nki_fp8.row_quantize, nki_fp8.row_quantize_limits),
    "rms_norm": (_rms_norm, _rms_norm_limits),
}


def _provider(place: Refusal, priority: int) -> dict[str, Implementation]:
    return {
        op: Implementation(run, functools.partial(_either, place, limits), priority)
        for op, (run, limits) in _OPS.items()
    }


ON_DEVICE = _provider(_not_on_device, 100)
IN_SIMULATOR = _provider(_not_in_simulator, 50)
