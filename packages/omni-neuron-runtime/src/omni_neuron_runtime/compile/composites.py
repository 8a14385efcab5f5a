# SPDX-License-Identifier: Apache-2.0
"""Kernel ops of a traced graph as `stablehlo.composite`, each with its torch reference as decomposition.

torch-mlir imports them as `torch.operator "torch.<namespace>.<name>"` and can go no further. In that text each becomes
a `stablehlo.custom_call` between conversions to and from builtin tensors, which torch-mlir's pipelines leave alone, and
each reference a function of its own, one for all calls that are alike. `lower_child` then turns the calls into
composites: a composite that calls a function of torch's tensors would not pass MLIR's verifier.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from omni_neuron_runtime.compile.collectives import builtin_type
from omni_neuron_runtime.compile.decompositions import decompositions
from omni_neuron_runtime.compile.errors import CompileError, node_error
from omni_neuron_runtime.compile.graph_checks import check_graph, collective_group, operation, tensor_values
from omni_neuron_runtime.compile.kernel_ops import KernelOp, kernel_op

_LINE = re.compile(
    r'^(?P<indent> *)(?P<result>%\w+)(?::\d+)? = torch\.operator "torch\.(?P<operation>[\w.]+)"'
    r"\((?P<operands>[^)]*)\) : \((?P<types>.*)\) -> \(?(?P<results>.*?)\)? *$"
)
_TORCH_TYPE = re.compile(r"!torch\.[\w.]+(?:<(?:[^<>]|<[^<>]*>)*>)?")
_RESULT_OF_SEVERAL = re.compile(r"%\w+#\d+")


@dataclass(frozen=True)
class Composite:
    """One call of a kernel op.

    Attributes:
        name: of the op, such as "omni_neuron_kernels.mlp".
        version: of its kernel.
        attributes: arguments that are not tensors, by name.
        operands: tensors by name, with their builtin types; those that are None are left out.
        results: builtin types.
        function: the decomposition's name in the module.
        decomposition: the reference as a graph of ATen operations.
    """

    name: str
    version: str
    attributes: tuple[tuple[str, Any], ...]
    operands: tuple[tuple[str, str], ...]
    results: tuple[str, ...]
    function: str
    decomposition: fx.GraphModule = field(compare=False, repr=False)


def find_composites(graph: fx.Graph, name: str) -> list[Composite]:
    """The calls of kernel ops in a checked graph, in order.

    Args:
        graph: of ATen operations and kernel ops, with fake tensors in `meta["val"]`.
        name: for messages.

    Raises:
        CompileError: a reference cannot be lowered for Neuron, or communicates.
    """
    found: list[Composite] = []
    alike: dict[Any, Composite] = {}
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        op = kernel_op(operation(node))
        if op is None:
            continue
        arguments = _arguments(node)
        tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
        attributes = tuple(
            (key, tuple(value) if isinstance(value, list | tuple) else value)
            for key, value in arguments.items()
            if value is not None and key not in tensors
        )
        operands = tuple((key, builtin_type(tensor)) for key, tensor in tensors.items())
        kind = (op.name, attributes, operands)
        if kind not in alike:
            alike[kind] = Composite(
                op.name,
                op.version(),
                attributes,
                operands,
                tuple(builtin_type(result) for result in tensor_values(node)),
                f"{op.name}_{counts[op.name]}",
                _traced(op, node, arguments, name),
            )
            counts[op.name] += 1
        found.append(alike[kind])
    return found


def _arguments(node: fx.Node) -> dict[str, Any]:
    """What the op is called with, by name; tensors as fake ones."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    values = {argument.name: given.get(argument.name, argument.default_value) for argument in schema.arguments}
    return {name: value.meta["val"] if isinstance(value, fx.Node) else value for name, value in values.items()}


def _traced(op: KernelOp, node: fx.Node, arguments: Mapping[str, Any], name: str) -> fx.GraphModule:
    from torch._guards import detect_fake_mode
    from torch.fx.experimental.proxy_tensor import make_fx

    names = [key for key, value in arguments.items() if isinstance(value, torch.Tensor)]

    def reference(*tensors: torch.Tensor) -> Any:
        return op.reference(**{**arguments, **dict(zip(names, tensors, strict=True))})

    mode = detect_fake_mode([arguments[key] for key in names])
    assert mode is not None
    with mode, torch.no_grad():
        # New ones: strides are not in a composite's types, and must not be in its reference.
        fresh = [torch.empty(arguments[key].shape, dtype=arguments[key].dtype) for key in names]
        table: Any = decompositions()
        graph = make_fx(reference, decomposition_table=table)(*fresh)
    graph.graph.eliminate_dead_code()
    title = f"{name}, reference of {op.name}"
    check_graph(graph, title)
    for inner in graph.graph.nodes:
        if inner.op == "get_attr" or collective_group(inner) is not None:
            problem = "holds a tensor" if inner.op == "get_attr" else "communicates"
            raise node_error(title, inner, problem, "do that outside of the op, and pass the result in")
    return graph


def raw_text(graph: fx.GraphModule, function: str, failure: str) -> str:
    """torch-mlir's RAW text of a graph, as a module with one function.

    Args:
        graph: without parameters of its own.
        function: the function's name.
        failure: what the error says where torch-mlir cannot import it.

    Raises:
        CompileError: it cannot.
    """
    from torch_mlir import fx as torch_mlir_fx

    try:
        return str(torch_mlir_fx.stateless_fx_import(graph, model_name=function))
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise CompileError(f"{failure}: {error}") from error


def decomposition_texts(composites: Sequence[Composite]) -> Iterator[str]:
    """torch-mlir's RAW text of each reference, once, a function each."""
    for function, composite in {composite.function: composite for composite in composites}.items():
        failure = f"torch-mlir cannot import the reference of {composite.name}"
        text = raw_text(composite.decomposition, function, failure)
        yield text.strip().removeprefix("module {").removesuffix("}").strip("\n")


def write_composites(text: str, composites: Sequence[Composite]) -> str:
    """Put calls and references into torch-mlir's RAW text of the graph that the composites were found in.

    Raises:
        CompileError: the text does not hold these ops in this order, or a reference cannot be imported.
    """
    if not composites:
        return text
    remaining = enumerate(composites)
    renamed: dict[str, str] = {}
    lines = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or kernel_op(match["operation"]) is None:
            lines.append(line)
            continue
        number, composite = next(remaining, (0, None))
        if composite is None or match["operation"] != composite.name:
            raise CompileError(f"torch-mlir imported {line.strip()!r} where {composite} was expected")
        lines += [match["indent"] + part for part in _call(match, composite, number, renamed)]
    missing = [composite.name for _, composite in remaining]
    if missing:
        raise CompileError(f"torch-mlir imported no {', '.join(missing)}")
    called = _RESULT_OF_SEVERAL.sub(lambda match: renamed.get(match[0], match[0]), "\n".join(lines))
    end = called.rindex("}")
    return "\n".join([called[:end].rstrip("\n"), *decomposition_texts(composites), "}", ""])


def _call(match: re.Match[str], composite: Composite, number: int, renamed: dict[str, str]) -> Iterator[str]:
    values, types = match["operands"].split(", "), _TORCH_TYPE.findall(match["types"])
    given = [pair for pair in zip(values, types, strict=True) if pair[1].startswith("!torch.vtensor")]
    inputs = [f"%kernel_{number}_in_{place}" for place in range(len(given))]
    for name, (value, torch_type), (_, builtin) in zip(inputs, given, composite.operands, strict=True):
        yield f"{name} = torch_c.to_builtin_tensor {value} : {torch_type} -> {builtin}"
    outputs, count = f"%kernel_{number}", len(composite.results)
    config = {"kernel_version": composite.version, "operands": [name for name, _ in composite.operands]}
    properties = (
        f'call_target_name = "{composite.name}", api_version = 4 : i32, '
        f"backend_config = {_dictionary({**dict(composite.attributes), **config})}, "
        f"called_computations = [@{composite.function}]"
    )
    operand_types = ", ".join(builtin for _, builtin in composite.operands)
    yield (
        f'{outputs}{f":{count}" if count > 1 else ""} = "stablehlo.custom_call"({", ".join(inputs)}) '
        f"<{{{properties}}}> : ({operand_types}) -> ({', '.join(composite.results)})"
    )
    for place, torch_type in enumerate(_TORCH_TYPE.findall(match["results"])):
        result = match["result"] if count == 1 else f"%kernel_{number}_out_{place}"
        source = outputs if count == 1 else f"{outputs}#{place}"
        renamed[f"{match['result']}#{place}"] = result
        yield f"{result} = torch_c.from_builtin_tensor {source} : {composite.results[place]} -> {torch_type}"


def _dictionary(values: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name} = {_attribute(value)}" for name, value in values.items()) + "}"


def _attribute(value: Any) -> str:
    """A Python value as an MLIR attribute."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value} : i64"
    if isinstance(value, float):
        digits, _, exponent = repr(value).partition("e")
        return f"{digits if '.' in digits else f'{digits}.0'}{f'e{exponent}' if exponent else ''} : f32"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_attribute, value))}]"
    return json.dumps(str(value))
