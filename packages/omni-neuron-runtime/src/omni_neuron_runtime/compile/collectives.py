# SPDX-License-Identifier: Apache-2.0
"""Collectives of a traced graph as StableHLO, each with the replica groups of the whole world.

torch-mlir imports them as `torch.operator "torch._c10d_functional.…"` and can go no further. In that text each is
replaced by conversions to and from builtin tensors around the StableHLO operation; torch-mlir's pipelines leave these
alone and take the conversions away.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import fx

from omni_neuron_runtime.compile.errors import CompileError
from omni_neuron_runtime.compile.graph_checks import collective_group, forget_group, operation, tensor_values
from omni_neuron_runtime.compile.replica_groups import Partition, partition_of

_LINE = re.compile(
    r'^(?P<indent> *)(?P<result>%\w+) = torch\.operator "torch\.(?P<operation>(?:_c10d_functional|omni_neuron)\.\w+)"'
    r"\((?P<input>%[\w#]+)[^)]*\) : .* -> (?P<type>!torch\.vtensor<.*>) *$"
)
_ELEMENT_TYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "ui8",
    torch.bool: "i1",
    torch.float8_e4m3fn: "f8E4M3FN",
    torch.float8_e5m2: "f8E5M2",
}


@dataclass(frozen=True)
class Collective:
    """One collective of a graph.

    Attributes:
        operation: its StableHLO name, such as "all_reduce".
        groups: the whole partition; for `collective_permute` the pairs (source, target).
        group_size: ranks of a group.
        reduction: "sum" or "max"; None where nothing is reduced.
        input_type, output_type: builtin tensor types.
        input_bytes: of one rank's operand.
    """

    operation: str
    groups: Partition
    group_size: int
    reduction: str | None
    input_type: str
    output_type: str
    input_bytes: int


_NAMES = {
    "_c10d_functional.all_reduce": "all_reduce",
    "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional.all_to_all_single": "all_to_all",
    "omni_neuron.collective_permute": "collective_permute",
}


def take_collectives(graph: fx.Graph) -> list[Collective]:
    """Every collective of a checked graph, in order; the graph no longer says which process groups they are on.

    A process group's name is its rank's own, and would make a different text of the same graph.
    """
    nodes = [node for node in graph.nodes if operation(node) in _NAMES]
    collectives = [_describe(node) for node in nodes]
    for node in nodes:
        forget_group(node)
    return collectives


def _describe(node: fx.Node) -> Collective:
    called = operation(node)
    group = collective_group(node)
    assert group is not None
    partition = partition_of(group)
    groups = partition
    if called == "omni_neuron.collective_permute":
        targets = node.args[1]
        groups = tuple((ranks[place], ranks[int(to)]) for ranks in partition for place, to in enumerate(targets))  # type: ignore[arg-type]
    reduces = called in ("_c10d_functional.all_reduce", "_c10d_functional.reduce_scatter_tensor")
    [source] = tensor_values(node.args[0])  # type: ignore[arg-type]
    [result] = tensor_values(node)
    return Collective(
        _NAMES[called],
        groups,
        len(partition[0]),
        str(node.args[1]) if reduces else None,
        builtin_type(source),
        builtin_type(result),
        source.numel() * source.element_size(),
    )


def builtin_type(tensor: torch.Tensor) -> str:
    """The builtin MLIR type of a tensor.

    Raises:
        CompileError: a dtype that neither collectives nor kernel ops take.
    """
    if tensor.dtype not in _ELEMENT_TYPES:
        valid = ", ".join(str(dtype).removeprefix("torch.") for dtype in _ELEMENT_TYPES)
        raise CompileError(f"{tensor.dtype} cannot be lowered here; valid are {valid}")
    return f"tensor<{''.join(f'{size}x' for size in tensor.shape)}{_ELEMENT_TYPES[tensor.dtype]}>"


def write_collectives(text: str, collectives: list[Collective]) -> str:
    """Put the StableHLO collectives into torch-mlir's RAW text of the graph that they were taken from.

    Raises:
        CompileError: the text does not hold these collectives in this order; the version of torch-mlir is not the
            pinned one.
    """
    remaining = enumerate(collectives)
    lines = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            lines.append(line)
            continue
        number, collective = next(remaining, (0, None))
        if collective is None or _NAMES.get(match["operation"]) != collective.operation:
            raise CompileError(f"torch-mlir imported {line.strip()!r} where {collective} was expected")
        lines += [match["indent"] + part for part in _stablehlo(match, collective, number)]
    missing = [collective.operation for _, collective in remaining]
    if missing:
        raise CompileError(f"torch-mlir imported no {', '.join(missing)}")
    return "\n".join(lines) + "\n"


def _stablehlo(match: re.Match[str], collective: Collective, number: int) -> list[str]:
    result = match["result"]
    torch_input = match.string.partition(" : (")[2].partition(">")[0] + ">"
    operand, value = f"%operand_{number}", f"%value_{number}"
    name, attributes, body = collective.operation, [], []
    if name == "collective_permute":
        attributes.append(f"source_target_pairs = {_dense(collective.groups)}")
    else:
        attributes.append(f"replica_groups = {_dense(collective.groups)}")
    if name == "all_gather":
        attributes.append("all_gather_dim = 0 : i64")
    elif name == "reduce_scatter":
        attributes.append("scatter_dimension = 0 : i64")
    elif name == "all_to_all":
        attributes += ["split_dimension = 0 : i64", "concat_dimension = 0 : i64"]
        attributes.append(f"split_count = {collective.group_size} : i64")
    if collective.reduction is not None:
        element = re.sub(r"<(?:\d+x)*", "<", collective.input_type)
        combine = {"sum": "add", "max": "maximum"}[collective.reduction]
        left, right, both = "%left", "%right", "%both"
        body = [
            " ({",
            f"^bb0({left}: {element}, {right}: {element}):",
            f"  {both} = stablehlo.{combine} {left}, {right} : {element}",
            f"  stablehlo.return {both} : {element}",
            "})",
        ]
    head = f'{value} = "stablehlo.{name}"({operand}) <{{{", ".join(attributes)}}}>'
    tail = f" : ({collective.input_type}) -> {collective.output_type}"
    lines = [f"{operand} = torch_c.to_builtin_tensor {match['input']} : {torch_input} -> {collective.input_type}"]
    first, *rest = body or [""]
    lines += [head + first, *rest]
    lines[-1] += tail
    lines.append(f"{result} = torch_c.from_builtin_tensor {value} : {collective.output_type} -> {match['type']}")
    return lines


def _dense(rows: Partition) -> str:
    written = ", ".join(f"[{', '.join(map(str, row))}]" for row in rows)
    return f"dense<[{written}]> : tensor<{len(rows)}x{len(rows[0])}xi64>"
