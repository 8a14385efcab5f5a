# SPDX-License-Identifier: Apache-2.0
"""The ops as torch.compile sees them: one node `omni_neuron_kernels::…` for each call, whoever computes it.

A node's arguments are tensors and plain numbers, and it returns new tensors. Where a public function is more than that
(a stream that it hands back, a sum over ranks that the caller makes), it is traced around the node: `traced`.
`ring_attention` has a node where a kernel takes it, with the collectives inside and without a torch reference; where
none does (`ring_refusal`), its reference is traced, which gathers.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from omni_neuron_kernels import dispatch, reference_attention
from omni_neuron_kernels.__about__ import __version__
from omni_neuron_kernels.nki_attention import ring_mask
from omni_neuron_kernels.reference import REFERENCE
from omni_neuron_kernels.reference_attention import RingAttention, RingGroup
from omni_neuron_kernels.reference_fp8 import MX_DTYPES, MX_GROUP
from omni_neuron_kernels.reference_projection import AllReduce, norm_over_ranks
from omni_neuron_runtime import KernelOp, register_kernel_op

NAMESPACE = "omni_neuron_kernels"
OPS = getattr(torch.ops, NAMESPACE)

# What runs an op of the dispatcher's names: the dispatcher, or the torch reference.
Call = Callable[..., Any]
Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@functools.cache
def kernel_version() -> str:
    """The distribution's version and a digest of the kernels' sources, which decide what a compiler makes of a node."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).with_name("nki_kernels").glob("*.py")):
        digest.update(path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


def _reference(op: str, *tensors: Any, **options: Any) -> Any:
    return REFERENCE[op].run(*tensors, **options)


def _graph_op(shapes: Callable[..., Any]) -> Callable[[Callable[..., Any]], None]:
    """Register a function of a `Call` and a node's arguments as an op; torch reads its schema from the annotations."""

    def register(function: Callable[..., Any]) -> None:
        def run(*arguments: Any, **named: Any) -> Any:
            result = function(dispatch.run, *arguments, **named)
            return tuple(map(_own, result)) if isinstance(result, tuple) else result.contiguous()

        signature = inspect.signature(function)
        run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        run.__annotations__ = {name: kind for name, kind in function.__annotations__.items() if name != "call"}
        run.__name__ = run.__qualname__ = function.__name__.lstrip("_")
        reference = functools.partial(function, _reference)
        register_kernel_op(KernelOp(f"{NAMESPACE}.{run.__name__}", run, shapes, reference, kernel_version))

    return register


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """One of several results, which may be views of one tensor; a node's share no memory."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _like(tensor: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return tensor.new_empty(shape or tensor.shape, dtype=dtype)


def _one_like_first(first: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
    return _like(first)


def _two_like_first(first: torch.Tensor, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(first), _like(first)


@_graph_op(_one_like_first)
def _rms_norm(call: Call, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return call("rms_norm", x, weight, epsilon=epsilon)


@_graph_op(_one_like_first)
def _adaln_modulate(
    call: Call, hidden: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, epsilon: float
) -> torch.Tensor:
    options: dict[str, Any] = {"branch": None, "gate": None, "epsilon": epsilon}
    return call("adaln_modulate", hidden, scale, shift, **options)[0]


@_graph_op(_two_like_first)
def _gated_adaln_modulate(
    call: Call,
    hidden: torch.Tensor,
    branch: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return call("adaln_modulate", hidden, scale, shift, branch=branch, gate=gate, epsilon=epsilon)


@_graph_op(_one_like_first)
def _flash_attention(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    key_length: int,
    key_mask: torch.Tensor | None,
) -> torch.Tensor:
    return call("flash_attention", q, k, v, scale=scale, key_length=key_length, key_mask=key_mask)


@_graph_op(_one_like_first)
def _ring_attention(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_mask: torch.Tensor | None,
    scale: float,
    replica_groups: list[int],
    group_size: int,
    kv_prefetch_depth: int,
) -> torch.Tensor:
    options = {"key_mask": key_mask, "scale": scale, "kv_prefetch_depth": kv_prefetch_depth}
    return call("ring_in_graph", q, k, v, replica_groups=_groups(replica_groups, group_size), **options)


def _groups(ranks: list[int], size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(ranks[first : first + size]) for first in range(0, len(ranks), size))


def _mlp_shape(x: torch.Tensor, *tensors: torch.Tensor, **named: Any) -> torch.Tensor:
    return _like(x, *x.shape[:-1], tensors[2].shape[1])


@_graph_op(_mlp_shape)
def _mlp(
    call: Call,
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor,
) -> torch.Tensor:
    return call("mlp", x, up_weight, up_bias, down_weight, down_bias)


@_graph_op(_mlp_shape)
def _gated_mlp(
    call: Call,
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    return call("gated_mlp", x, gate_weight, up_weight, down_weight, activation=activation)


def _projection_shape(x: torch.Tensor, weight: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
    return _like(x, *x.shape[:-1], weight.shape[1])


@_graph_op(_projection_shape)
def _output_projection(call: Call, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return call("output_projection", x, weight, bias)


def _convolution_shape(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, padding: list[int], past: torch.Tensor | None
) -> torch.Tensor:
    frames = padding[0] + x.shape[2] + (0 if past is None else past.shape[2])
    padded = (frames, x.shape[3] + 2 * padding[1], x.shape[4] + 2 * padding[2])
    sizes = (size - kernel + 1 for size, kernel in zip(padded, weight.shape[2:], strict=True))
    return _like(x, x.shape[0], weight.shape[0], *sizes)


@_graph_op(_convolution_shape)
def _causal_conv3d(
    call: Call,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    padding: list[int],
    past: torch.Tensor | None,
) -> torch.Tensor:
    return call("causal_conv3d", x, weight, bias, padding=tuple(padding), past=past)


def _qkv_shapes(x: torch.Tensor, heads: list[int], head_dim: int, dtype: torch.dtype) -> Tensors3:
    query, key, value = (
        _like(x, x.shape[0], x.shape[1], count, head_dim, dtype=dtype) for count in (heads[0], heads[1], heads[1])
    )
    return query, key, value


def _sums_shape(x: torch.Tensor, heads: list[int]) -> torch.Tensor:
    return _like(x, x.shape[0], x.shape[1], sum(count > 0 for count in heads), dtype=torch.float32)


def _qkv_options(
    heads: list[int],
    head_dim: int,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    cosines: torch.Tensor | None,
    sines: torch.Tensor | None,
) -> dict[str, Any]:
    return {
        "heads": tuple(heads),
        "head_dim": head_dim,
        "query_gain": query_gain,
        "key_gain": key_gain,
        "rotation": None if cosines is None else (cosines, sines),
    }


def _of_one_rank(epsilon: float) -> dict[str, Any]:
    return {"epsilon": epsilon, "ranks": 1, "all_reduce": None, "replica_groups": None}


@_graph_op(lambda x, weight, bias, heads, head_dim, *arguments: _qkv_shapes(x, heads, head_dim, x.dtype))
def _qkv_projection(
    call: Call,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    heads: list[int],
    head_dim: int,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    cosines: torch.Tensor | None,
    sines: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options = _qkv_options(heads, head_dim, query_gain, key_gain, cosines, sines)
    return call("qkv_projection", x, weight, bias, **options, **_of_one_rank(epsilon))


@_graph_op(
    lambda x, weight, bias, heads, head_dim, *arguments: (
        *_qkv_shapes(x, heads, head_dim, x.dtype),
        _sums_shape(x, heads),
    )
)
def _qkv_partial(
    call: Call,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    heads: list[int],
    head_dim: int,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    cosines: torch.Tensor | None,
    sines: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    options = _qkv_options(heads, head_dim, query_gain, key_gain, cosines, sines)
    return call("qkv_partial", x, weight, bias, **options)


def _rows_shapes(x: torch.Tensor, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(x, dtype=torch.float8_e4m3fn), _like(x, *x.shape[:-1], 1, dtype=torch.float32)


@_graph_op(_rows_shapes)
def _row_quantize(call: Call, x: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    return call("row_quantize", x, form=form)


def _mx_shapes(x: torch.Tensor, form: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    groups = (*x.shape[:-1], x.shape[-1] // MX_GROUP)
    return _like(x, dtype=MX_DTYPES[form]), _like(x, *groups, dtype=torch.uint8)


@_graph_op(_mx_shapes)
def _quantize_mx(call: Call, x: torch.Tensor, form: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    return call("quantize_mx", x, form=form, rule=rule)


@_graph_op(_rows_shapes)
def _adaln_modulate_fp8(
    call: Call, hidden: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, epsilon: float, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    options: dict[str, Any] = {"branch": None, "gate": None, "epsilon": epsilon, "form": form}
    return call("adaln_modulate_fp8", hidden, scale, shift, **options)[:2]


@_graph_op(lambda hidden, *arguments: (*_rows_shapes(hidden), _like(hidden)))
def _gated_adaln_modulate_fp8(
    call: Call,
    hidden: torch.Tensor,
    branch: torch.Tensor,
    gate: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    epsilon: float,
    form: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options: dict[str, Any] = {"branch": branch, "gate": gate, "epsilon": epsilon, "form": form}
    return call("adaln_modulate_fp8", hidden, scale, shift, **options)


@_graph_op(
    lambda x, x_scale, weight, weight_scale, bias, dtype, native, heads, head_dim, *arguments: _qkv_shapes(
        x, heads, head_dim, dtype
    )
)
def _fp8_qkv_projection(
    call: Call,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    native: bool,
    heads: list[int],
    head_dim: int,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    cosines: torch.Tensor | None,
    sines: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options = _qkv_options(heads, head_dim, query_gain, key_gain, cosines, sines)
    options |= {"dtype": dtype, "native": native, **_of_one_rank(epsilon)}
    return call("fp8_qkv_projection", x, x_scale, weight, weight_scale, bias, **options)


@_graph_op(
    lambda x, x_scale, weight, weight_scale, bias, dtype, native, heads, head_dim, *arguments: (
        *_qkv_shapes(x, heads, head_dim, dtype),
        _sums_shape(x, heads),
    )
)
def _fp8_qkv_partial(
    call: Call,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    native: bool,
    heads: list[int],
    head_dim: int,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    cosines: torch.Tensor | None,
    sines: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    options = _qkv_options(heads, head_dim, query_gain, key_gain, cosines, sines)
    options |= {"dtype": dtype, "native": native}
    return call("fp8_qkv_partial", x, x_scale, weight, weight_scale, bias, **options)


@_graph_op(_projection_shape)
def _fp8_output_projection(
    call: Call,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    native: bool,
) -> torch.Tensor:
    return call("fp8_output_projection", x, weight, weight_scale, bias, native=native)


def _fp8_mlp_shape(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    dtype, down_weight = arguments[7], arguments[4]
    return _like(x, *x.shape[:-1], down_weight.shape[1], dtype=dtype)


@_graph_op(_fp8_mlp_shape)
def _fp8_mlp(
    call: Call,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    up_weight: torch.Tensor,
    up_scale: torch.Tensor,
    up_bias: torch.Tensor,
    down_weight: torch.Tensor,
    down_scale: torch.Tensor,
    down_bias: torch.Tensor,
    dtype: torch.dtype,
    native: bool,
) -> torch.Tensor:
    tensors = (x, x_scale, up_weight, up_scale, up_bias, down_weight, down_scale, down_bias)
    return call("fp8_mlp", *tensors, dtype=dtype, native=native)


def _trace_adaln(
    hidden: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if branch is None or gate is None:
        return OPS.adaln_modulate(hidden, scale, shift, epsilon), hidden
    return OPS.gated_adaln_modulate(hidden, branch, gate, scale, shift, epsilon)


def _trace_adaln_fp8(
    hidden: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    epsilon: float,
    form: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if branch is None or gate is None:
        return (*OPS.adaln_modulate_fp8(hidden, scale, shift, epsilon, form), hidden)
    return OPS.gated_adaln_modulate_fp8(hidden, branch, gate, scale, shift, epsilon, form)


def _trace_qkv(*tensors: Any, **options: Any) -> Tensors3:
    return _trace_qkv_op(OPS.qkv_projection, OPS.qkv_partial, tensors, **options)


def _trace_fp8_qkv(*tensors: Any, dtype: torch.dtype, native: bool, **options: Any) -> Tensors3:
    return _trace_qkv_op(OPS.fp8_qkv_projection, OPS.fp8_qkv_partial, (*tensors, dtype, native), **options)


def _trace_qkv_op(
    whole: Call,
    partial: Call,
    arguments: tuple[Any, ...],
    *,
    heads: tuple[int, int],
    head_dim: int,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
    ranks: int,
    all_reduce: AllReduce | None,
    replica_groups: tuple[tuple[int, ...], ...] | None,
) -> Tensors3:
    cosines, sines = (None, None) if rotation is None else rotation
    shared = (*arguments, list(heads), head_dim, query_gain, key_gain, cosines, sines)
    if all_reduce is None or (query_gain is None and key_gain is None):
        return whole(*shared, epsilon)
    query, key, value, sums = partial(*shared)
    query, key = norm_over_ranks((query, key), all_reduce(sums), ranks, epsilon)
    return query, key, value


def ring_refusal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: RingGroup, scale: float) -> str | None:
    """Why compiled code has no ring of a kernel for these arguments of `ring_attention`; None where it has one.

    Callable in code that torch.compile traces, which cannot see into `explain`.
    """
    dtypes = (q.dtype, k.dtype, v.dtype)
    return _ring_refusal(tuple(q.shape), tuple(k.shape), dtypes, q.device.type, group.size, scale) or None


@torch.compiler.assume_constant_result
def _ring_refusal(
    query: tuple[int, ...],
    keys: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: str,
    ranks: int,
    scale: float,
) -> str:
    with FakeTensorMode():
        shapes = (query, keys, keys)
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]
    groups = (tuple(range(ranks)),)
    try:
        dispatch.explain(
            "ring_in_graph", *tensors, key_mask=None, scale=scale, replica_groups=groups, kv_prefetch_depth=1
        )
    except ValueError as error:
        return str(error)
    return ""


def _trace_ring(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool, **options: Any
) -> RingAttention:
    if return_lse or ring_refusal(q, k, v, group=options["group"], scale=options["scale"]) is not None:
        return reference_attention.ring_attention(q, k, v, return_lse=return_lse, **options)
    return _trace_ring_op(q, k, v, **options)


def _trace_ring_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: RingGroup,
    replica_groups: tuple[tuple[int, ...], ...],
    scale: float,
    key_length: int,
    key_mask: torch.Tensor | None,
    kv_prefetch_depth: int,
) -> RingAttention:
    mask = ring_mask(k, group.rank, group.size, key_length, key_mask)
    if mask is not None:
        # A key that takes no part becomes the mean of those that do, whose score is below the row's largest.
        chosen = mask[:, :, None, None]
        sums = torch.where(chosen, k, 0).float().sum(1)
        counts = mask.sum(1).float()[:, None, None].expand(*sums.shape[:2], 1)
        totals = group.all_gather(torch.cat([sums, counts], dim=-1)[None], dim=0).sum(0)
        mean = totals[..., :-1] / totals[..., -1:]
        k, v = torch.where(chosen, k, mean[:, None].to(k.dtype)), torch.where(chosen, v, 0)
    ranks = [rank for one in replica_groups for rank in one]
    output = OPS.ring_attention(q, k, v, mask, scale, ranks, group.size, kv_prefetch_depth)
    return RingAttention(output, None, torch.zeros((), dtype=torch.int64, device=q.device))


_TRACED: dict[str, Call] = {
    "rms_norm": lambda x, weight, *, epsilon: OPS.rms_norm(x, weight, epsilon),
    "adaln_modulate": _trace_adaln,
    "flash_attention": lambda q, k, v, *, scale, key_length, key_mask: OPS.flash_attention(
        q, k, v, scale, key_length, key_mask
    ),
    "ring_attention": _trace_ring,
    "mlp": lambda *tensors: OPS.mlp(*tensors),
    "gated_mlp": lambda *tensors, activation: OPS.gated_mlp(*tensors, activation),
    "output_projection": lambda *tensors: OPS.output_projection(*tensors),
    "causal_conv3d": lambda x, weight, bias, *, padding, past: OPS.causal_conv3d(x, weight, bias, list(padding), past),
    "qkv_projection": _trace_qkv,
    "row_quantize": lambda x, *, form: OPS.row_quantize(x, form),
    "quantize_mx": lambda x, *, form, rule: OPS.quantize_mx(x, form, rule),
    "adaln_modulate_fp8": _trace_adaln_fp8,
    "fp8_qkv_projection": _trace_fp8_qkv,
    "fp8_output_projection": lambda *tensors, native: OPS.fp8_output_projection(*tensors, native),
    "fp8_mlp": lambda *tensors, dtype, native: OPS.fp8_mlp(*tensors, dtype, native),
}


def traced(reference_function: Call, *tensors: Any, **options: Any) -> Any:
    """What a public function is in code that torch.compile traces: its node, or the reference where it has none.

    Args:
        reference_function: of the op, and named after it.
        tensors: the op's.
        options: the op's.
    """
    function = _TRACED.get(reference_function.__name__)
    return (reference_function if function is None else function)(*tensors, **options)
