# SPDX-License-Identifier: Apache-2.0
"""Operator tokens (`nl.add`, `nl.exp`, …): what the engines compute for them, in float32.

ScalarE computes activations from piecewise polynomials; here they are exact. Outside the range that the documentation
gives for one, its result is invalid on the device, so here it is NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from omni_neuron_nkisim.errors import NkiValidationError

Array = NDArray[Any]
ARITHMETIC, BITWISE = "arithmetic", "bitwise"


@dataclass(frozen=True, eq=False)
class Op:
    """A token that is passed as `op`.

    Attributes:
        name: as in `nki.language`.
        kind: arithmetic or bitwise, if an ALU computes it; else None.
        alu: the ALU's function of one or two operands.
        unary: it takes one.
        reduces: it is legal as a reduction.
        activation: ScalarE's function.
        comparison: it gives 1 or 0.
        gen4: the ALU has it from trn3 on only.
    """

    name: str
    kind: str | None = None
    alu: Callable[..., Array] | None = None
    unary: bool = False
    reduces: bool = False
    activation: Callable[[Array], Array] | None = None
    comparison: bool = False
    gen4: bool = False

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: the convenience functions are not simulated."""
        raise NkiValidationError(
            f"nl.{self.name}(…): calling a token is not simulated; allocate a tile and use the nki.isa instruction"
        )

    def reduce(self, values: Array) -> Array:
        """Reduce the last dim, keeping it with size 1."""
        assert self.alu is not None
        if self.name == "add":
            return values.sum(axis=-1, keepdims=True, dtype=values.dtype)
        if self.name == "multiply":
            return values.prod(axis=-1, keepdims=True, dtype=values.dtype)
        if self.name in ("maximum", "minimum"):
            return (values.max if self.name == "maximum" else values.min)(axis=-1, keepdims=True)
        columns = [values[..., n : n + 1] for n in range(values.shape[-1])]
        return functools.reduce(self.alu, columns)


def _flag(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *operands: function(*operands).astype(np.float32)


def _pick(larger: bool) -> Callable[[Array, Array], Array]:
    def pick(x: Array, y: Array) -> Array:
        first = np.abs(x) > np.abs(y) if larger else np.abs(x) < np.abs(y)
        return np.where(first, x, y)

    return pick


def _within(low: float, high: float, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """NaN outside the documented range of a ScalarE function."""
    return lambda x: np.where((x >= low) & (x <= high), function(x), np.float32(np.nan))


def _exact(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A formula evaluated in float64, since in float32 some of these cancel."""
    return lambda x: function(x.astype(np.float64)).astype(np.float32)


_erf_of = np.frompyfunc(math.erf, 1, 1)


def _erf(x: Array) -> Array:
    return np.asarray(_erf_of(x)).astype(np.float64)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def _gelu_dx(x: Array) -> Array:
    return 0.5 * (1 + _erf(x / math.sqrt(2))) + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _silu_dx(x: Array) -> Array:
    return _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))


def _softplus(x: Array) -> Array:
    return np.logaddexp(0, x)


def _inverse_sqrt(x: Array) -> Array:
    return np.float32(1) / np.sqrt(x)


def _inverse(x: Array) -> Array:
    return np.float32(1) / x


def _inverse_within(x: Array) -> Array:
    size = np.abs(x)
    return np.where((size >= 2.0**-42) & (size <= 2.0**42), _inverse(x), np.float32(np.nan))


def _logical(function: Callable[..., Array]) -> Callable[[Array, Array], Array]:
    return _flag(lambda x, y: function(x != 0, y != 0))


def _copy(x: Array) -> Array:
    return x


def _relu(x: Array) -> Array:
    return np.maximum(x, np.float32(0))


_ALU: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "logical_and": _logical(np.logical_and),
    "logical_or": _logical(np.logical_or),
    "logical_xor": _logical(np.logical_xor),
}
_BITS: dict[str, Callable[..., Array]] = {
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}
_COMPARISONS: dict[str, Callable[..., Array]] = {
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
}
_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "copy": _copy,
    "sigmoid": _exact(_sigmoid),
    "gelu": _exact(_gelu),
    "gelu_dx": _exact(_gelu_dx),
    "gelu_apprx_tanh": _exact(_gelu_tanh),
    "gelu_apprx_sigmoid": _exact(lambda x: x * _sigmoid(1.702 * x)),
    "silu": _exact(lambda x: x * _sigmoid(x)),
    "silu_dx": _exact(_silu_dx),
    "tanh": np.tanh,
    "softplus": _exact(_softplus),
    "mish": _exact(lambda x: x * np.tanh(_softplus(x))),
    "erf": _exact(_erf),
    "erf_dx": _exact(lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x)),
    "exp": np.exp,
    "sign": np.sign,
    "log": _within(2.0**-64, 2.0**64, np.log),
    "sin": _within(-math.pi, math.pi, np.sin),
    "arctan": _within(-math.pi / 2, math.pi / 2, np.arctan),
    "sqrt": _within(2.0**-116, 2.0**118, np.sqrt),
}

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        *(Op(name, ARITHMETIC, function, reduces=True) for name, function in _ALU.items()),
        *(Op(name, BITWISE, function, reduces=True) for name, function in _BITS.items()),
        *(Op(name, ARITHMETIC, _flag(function), comparison=True) for name, function in _COMPARISONS.items()),
        *(Op(name, activation=function) for name, function in _ACTIVATIONS.items()),
        Op("power", ARITHMETIC, np.power),
        Op("abs_max", ARITHMETIC, _pick(True), gen4=True),
        Op("abs_min", ARITHMETIC, _pick(False), gen4=True),
        Op("abs", ARITHMETIC, np.abs, unary=True, activation=np.abs),
        Op("square", ARITHMETIC, np.square, unary=True, activation=np.square, gen4=True),
        Op("relu", ARITHMETIC, _relu, unary=True, activation=_relu, gen4=True),
        Op("rsqrt", ARITHMETIC, _inverse_sqrt, unary=True, activation=_within(2.0**-87, 2.0**97, _inverse_sqrt)),
        Op("reciprocal", activation=_inverse_within),
        Op("left_shift", BITWISE, np.left_shift),
        Op("right_shift", BITWISE, np.right_shift),
        Op("invert", BITWISE, np.invert, unary=True),
    )
}
