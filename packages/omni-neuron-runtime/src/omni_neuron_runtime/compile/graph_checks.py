# SPDX-License-Identifier: Apache-2.0
"""What a graph may hold: operations that are lowered, dtypes that Neuron has, static shapes, registered groups."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator

import torch
from torch import fx

from omni_neuron_runtime.compile.errors import DATA_DEPENDENT_SHAPE, CompileError, node_error
from omni_neuron_runtime.compile.kernel_ops import kernel_op
from omni_neuron_runtime.compile.replica_groups import partition_of

# Of the core ATen operations (https://docs.pytorch.org/docs/stable/torch.compiler_ir.html) those that torch-mlir lowers
# to StableHLO after the decompositions of this package. Neuron's own list is not public.
# fmt: off
_ATEN_OPS = frozenset({
    "_adaptive_avg_pool2d", "_log_softmax", "_softmax", "_to_copy", "_unsafe_view", "abs", "acos", "add", "addcmul",
    "addmm", "alias", "all", "amax", "amin", "any", "arange", "argmax", "argmin", "as_strided", "asin", "atan",
    "atan2", "avg_pool2d", "baddbmm", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "bmm", "cat",
    "ceil", "clamp", "clone", "constant_pad_nd", "convolution", "copy", "cos", "cosh", "cumsum", "detach", "div",
    "elu", "embedding", "eq", "erf", "exp", "expand", "expm1", "fill", "flip", "floor", "floor_divide", "fmod",
    "full", "full_like", "gather", "ge", "gelu", "gt", "hardtanh", "index", "index_put", "index_select", "isfinite",
    "isinf", "isnan", "le", "leaky_relu", "lift_fresh_copy", "log", "log10", "log1p", "log2", "logical_and",
    "logical_not", "logical_or", "logical_xor", "logsumexp", "lt", "masked_fill", "max", "max_pool2d_with_indices",
    "maximum", "mean", "min", "minimum", "mm", "mul", "nan_to_num", "native_group_norm", "native_layer_norm", "ne",
    "neg", "ones_like", "permute", "pow", "reciprocal", "relu", "remainder", "repeat", "reshape", "round", "rsqrt",
    "rsub", "scalar_tensor", "scatter", "scatter_add", "scatter_reduce", "select", "select_scatter", "sigmoid",
    "sign", "silu", "sin", "sinh", "slice", "slice_scatter", "softmax", "sort", "split", "split_with_sizes", "sqrt",
    "squeeze", "stack", "sub", "sum", "t", "tan", "tanh", "topk", "transpose", "tril", "triu", "trunc", "unbind",
    "unfold", "unsqueeze", "upsample_nearest2d", "var", "view", "where", "zeros_like",
})
# fmt: on

_COLLECTIVES = {
    "_c10d_functional.all_reduce": 2,
    "_c10d_functional.all_gather_into_tensor": 2,
    "_c10d_functional.reduce_scatter_tensor": 3,
    "_c10d_functional.all_to_all_single": 3,
    "omni_neuron.collective_permute": 2,
}
_REDUCTIONS = ("sum", "max")
_OTHER_OPS = frozenset(
    {"_c10d_functional.wait_tensor", "prims.convert_element_type", "prims.iota", "prims.sqrt", "prims.squeeze"}
)

_FORBIDDEN_DTYPES = {
    torch.float64: "Neuron has no float64: compute in float32, or compute the value on the host before the component",
    torch.complex64: "Neuron has no complex numbers: rotate pairs with cosines and sines (real RoPE)",
    torch.complex128: "Neuron has no complex numbers: rotate pairs with cosines and sines (real RoPE)",
    torch.complex32: "Neuron has no complex numbers: rotate pairs with cosines and sines (real RoPE)",
}

_ADVICE = {
    "nonzero": DATA_DEPENDENT_SHAPE,
    "masked_select": DATA_DEPENDENT_SHAPE,
    "_local_scalar_dense": "it reads a value on the host: keep the value a tensor",
    "rand": "random numbers are drawn outside of graphs: pass them in as a tensor",
    "randn": "random numbers are drawn outside of graphs: pass them in as a tensor",
    "randint": "random numbers are drawn outside of graphs: pass them in as a tensor",
    "bernoulli": "random numbers are drawn outside of graphs: pass them in as a tensor",
    "native_dropout": "random numbers are drawn outside of graphs: call eval() on the component",
    "view_as_complex": _FORBIDDEN_DTYPES[torch.complex64],
    "view_as_real": _FORBIDDEN_DTYPES[torch.complex64],
    "complex": _FORBIDDEN_DTYPES[torch.complex64],
    "polar": _FORBIDDEN_DTYPES[torch.complex64],
}


_ATTENTION = (torch.nn.functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
_ATTENTION_MASK, _ATTENTION_CAUSAL = (3, "attn_mask"), (5, "is_causal")


def check_captured(graph: fx.GraphModule, name: str) -> None:
    """Refuse what Lite is reported not to legalise, and what nobody can tell any more once it is decomposed.

    That is torch's attention with a mask or `is_causal`. Kernel ops are single nodes here, and may hold one.

    Args:
        graph: as Dynamo captured it.
        name: for messages.

    Raises:
        CompileError: naming the first node, its source line and what to do.
    """
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op == "call_function" and node.target in _ATTENTION:
                given = [word for place, word in (_ATTENTION_MASK, _ATTENTION_CAUSAL) if _argument(node, place, word)]
                if given:
                    raise node_error(
                        name,
                        node,
                        f"is torch's attention with {' and '.join(given)}, which Lite is reported not to legalise",
                        "write it as a matrix product plus a bias, a softmax in float32 and a matrix product, or call "
                        "omni_neuron_kernels.flash_attention, which takes a key mask",
                    )


def _argument(node: fx.Node, place: int, word: str) -> bool:
    value = node.args[place] if len(node.args) > place else node.kwargs.get(word)
    return value is not None and value is not False


def check_graph(graph: fx.GraphModule, name: str) -> None:
    """Refuse a graph that cannot be lowered for Neuron, before anything is lowered.

    Args:
        graph: of ATen operations, after decomposition, with fake tensors in `meta["val"]`.
        name: for messages.

    Raises:
        CompileError: naming the first node, its source line and what to do.
    """
    for node in graph.graph.nodes:
        # An operation's own advice comes before that about the dtype or shape of what it makes.
        if node.op == "call_function":
            _check_target(node, name)
        _check_values(node, name)


def collective_group(node: fx.Node) -> str | None:
    """The process group's name of a collective; None for any other node."""
    place = _COLLECTIVES.get(operation(node))
    if place is None:
        return None
    return str(node.args[place] if len(node.args) > place else node.kwargs["group_name"])


def forget_group(node: fx.Node) -> None:
    """Empty the process group's name in a collective."""
    place = _COLLECTIVES[operation(node)]
    if len(node.args) > place:
        node.update_arg(place, "")
    else:
        node.update_kwarg("group_name", "")


def operation(node: fx.Node) -> str:
    """`namespace.name` of the operation that a node calls, without overload; empty for anything else."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return ""
    return f"{target.namespace}.{target._schema.name.partition('::')[2]}"


def tensor_values(node: fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors that a node returns."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return (item for item in values if isinstance(item, torch.Tensor))


def _check_values(node: fx.Node, name: str) -> None:
    if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
        raise _dynamic(node, name)
    for value in tensor_values(node):
        if any(isinstance(size, torch.SymInt) for size in value.shape):
            raise _dynamic(node, name)
        if value.dtype in _FORBIDDEN_DTYPES:
            raise node_error(
                name, node, f"makes a tensor {list(value.shape)} of {value.dtype}", _FORBIDDEN_DTYPES[value.dtype]
            )


def _dynamic(node: fx.Node, name: str) -> CompileError:
    shape = str(node.meta.get("val"))
    if re.search(r"\bu\d+\b", shape):  # torch's name of a size that only running the graph can tell
        advice = DATA_DEPENDENT_SHAPE
    else:
        advice = "compile with dynamic=False and give every request of one shape the same sizes"
    return node_error(name, node, f"has a dynamic shape ({shape})", advice)


def _check_target(node: fx.Node, name: str) -> None:
    called = operation(node)
    namespace, _, op = called.partition(".")
    if called in _COLLECTIVES:
        _check_collective(node, called, name)
        return
    lowered = called in _OTHER_OPS or kernel_op(called) is not None or node.target is operator.getitem
    if not lowered and (namespace != "aten" or op not in _ATEN_OPS):
        family = next((advice for start, advice in _ADVICE.items() if op == start or op.startswith(f"{start}_")), None)
        if op.startswith(("_fft", "fft")):
            family = "Neuron has no FFT: write it as a matrix product, or compute it on the host"
        raise node_error(
            name, node, "is not lowered for Neuron", family or "write it with other operations, or run it on the host"
        )


def _check_collective(node: fx.Node, called: str, name: str) -> None:
    group = collective_group(node)
    assert group is not None
    try:
        partition_of(group)
    except CompileError as error:
        raise node_error(name, node, "is a collective that cannot be compiled", str(error)) from None
    if called in ("_c10d_functional.all_reduce", "_c10d_functional.reduce_scatter_tensor"):
        reduction = str(node.args[1])
        if reduction not in _REDUCTIONS:
            raise node_error(
                name,
                node,
                f"reduces with {reduction!r}",
                f"valid are {', '.join(_REDUCTIONS)}; an average is a sum divided by the group's size",
            )
    if called == "_c10d_functional.all_to_all_single":
        sent, received = node.args[2], node.args[1]
        sizes = {*sent, *received}  # type: ignore[misc]
        if len(sizes) > 1:
            raise node_error(
                name, node, f"sends parts of different sizes ({sent} to {received})", "make all parts of one size"
            )
