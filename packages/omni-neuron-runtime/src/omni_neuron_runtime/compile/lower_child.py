# SPDX-License-Identifier: Apache-2.0
"""Run as a script by `lowering`: torch-mlir's two pipelines over one file, under a memory limit. Imports no torch.

usage: lower_child.py INPUT OUTPUT MEMORY_LIMIT_BYTES
"""

from __future__ import annotations

import math
import os
import re
import resource
import struct
import sys
from pathlib import Path
from typing import Any

_PIPELINES = (
    "builtin.module(func.func(torch-match-quantized-custom-ops), torchdynamo-export-to-torch-backend-pipeline)",
    "builtin.module(torch-backend-to-stablehlo-backend-pipeline{allow-non-finites=true})",
)
# Static sizes written as computations, such as those of an iota, become static; what nobody reads goes.
_SIMPLIFICATION = "builtin.module(func.func(stablehlo-aggressive-simplification,cse))"
# The binding of the dialect `torch_c` (conversions between torch's tensors and builtin ones) registers nothing; a pass
# that makes its operations loads it.
_LOADS_TORCH_C = (
    "func.func @f(%a: !torch.vtensor<[1],f32>) -> !torch.vtensor<[1],f32> { return %a : !torch.vtensor<[1],f32> }"
)

_CONSTANT = re.compile(r"^ *(%\w+) = stablehlo\.constant dense<(.+)> : tensor<([\dx]*)(f64|i64)>$")
_DERIVED = re.compile(
    r"^( *(%\w+)) = stablehlo\.(?:convert|reshape) (%\w+) : (?:\(tensor<[\dx]*(?:f64|i64)>\) -> )?"
    r"tensor<([\dx]*)(f64|f32|bf16|f16)>$"
)
_WHOLE = re.compile(r"-?\d+")
_SCALAR = re.compile(r"[-+\d.eE]+|0x[0-9A-F]{16}")  # not a list of values
_INFINITY = {"f64": "7FF0000000000000", "f32": "7F800000", "bf16": "7F80", "f16": "7C00"}


def main() -> None:
    """See the module."""
    source, target, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    from torch_mlir import ir
    from torch_mlir._mlir_libs import _stablehlo
    from torch_mlir.dialects import torch as torch_dialect
    from torch_mlir.passmanager import PassManager

    _stablehlo.register_stablehlo_passes()

    context = ir.Context()
    # One thread: the same memory, and the same order of messages, on every machine.
    context.enable_multithreading(False)
    torch_dialect.register_dialect(context)
    _stablehlo.register_dialect(context, True)
    with context:
        PassManager.parse("builtin.module(torch-func-backend-type-conversion)").run(
            ir.Module.parse(_LOADS_TORCH_C).operation
        )
        module = ir.Module.parse(Path(source).read_text())
        for pipeline in _PIPELINES:
            PassManager.parse(pipeline).run(module.operation)
        _make_composites(ir, module)
        module = ir.Module.parse(tidy(str(module)))
        PassManager.parse(_SIMPLIFICATION).run(module.operation)
        Path(target).write_text(f"{module}\n")


def _make_composites(ir: Any, module: Any) -> None:
    """Turn the calls that `composites` wrote into composites, and their references into private functions."""
    functions = list(module.body.operations)
    calls = [
        operation
        for function in functions
        for operation in function.regions[0].blocks[0].operations
        if operation.operation.name == "stablehlo.custom_call" and "called_computations" in operation.attributes
    ]
    for call in calls:
        attributes = {
            "name": call.attributes["call_target_name"],
            "composite_attributes": call.attributes["backend_config"],
            "decomposition": call.attributes["called_computations"][0],
        }
        with call.location:
            composite = ir.Operation.create(
                "stablehlo.composite",
                results=[result.type for result in call.results],
                operands=list(call.operands),
                attributes=attributes,
                ip=ir.InsertionPoint(call),
            )
        for result, replacement in zip(call.results, composite.results, strict=True):
            result.replace_all_uses_with(replacement)
        call.operation.erase()
    for function in functions:
        if ir.StringAttr(function.attributes["sym_name"]).value != "main":
            function.attributes["sym_visibility"] = ir.StringAttr.get("private")


def tidy(text: str) -> str:
    """StableHLO alone, without the double-precision scalars that torch's Python numbers are lowered to.

    torch-mlir leaves `arith.constant`, and turns the 2.0 of `x * 2.0` into a float64 constant that is converted to x's
    dtype. Here the constant gets that dtype itself, which is the same number: a compiler parses its digits at the
    precision of the type, and the conversion would round the same digits once more.
    """
    text = text.replace(" = arith.constant dense", " = stablehlo.constant dense")
    # Values are named anew in each function.
    return "".join(_tidy_function(part) for part in re.split(r"^(?= *func\.func )", text, flags=re.MULTILINE))


def _tidy_function(text: str) -> str:
    constants: dict[str, str] = {}
    converted = []
    for line in text.splitlines():
        constant, derived = _CONSTANT.match(line), _DERIVED.match(line)
        if constant and _SCALAR.fullmatch(constant[2]):
            constants[constant[1]] = constant[2]
        elif derived and derived[3] in constants:
            number = _literal(constants[derived[3]], derived[5])
            if derived[5] == "f64":  # on its way to the dtype that is wanted
                constants[derived[2]] = number
            line = f"{derived[1]} = stablehlo.constant dense<{number}> : tensor<{derived[4]}{derived[5]}>"
        converted.append(line)
    used = set()
    for line in converted:
        used.update(re.findall(r"%\w+", line.partition(" = ")[2] if " = " in line else line))
    kept = [line for line in converted if not ((match := _CONSTANT.match(line)) and match[1] not in used)]
    return "\n".join(kept) + "\n"


def _literal(value: str, dtype: str) -> str:
    """A float64 or int64 literal as one of `dtype`."""
    if not value.startswith("0x"):
        return f"{value}.0" if _WHOLE.fullmatch(value) else value
    [number] = struct.unpack(">d", bytes.fromhex(value[2:]))
    if math.isinf(number):
        bits = int(_INFINITY[dtype], 16) | (number < 0) << 4 * len(_INFINITY[dtype]) - 1
        return f"0x{bits:0{len(_INFINITY[dtype])}X}"
    return f"{number:.17e}"


if __name__ == "__main__":
    main()
    # Without the interpreter's way out: tearing down a large module takes longer than reading it.
    sys.stdout.flush()
    os._exit(0)
