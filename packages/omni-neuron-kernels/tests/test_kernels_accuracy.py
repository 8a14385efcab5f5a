# SPDX-License-Identifier: Apache-2.0
"""Each kernel against float64: float32 within 1e-5 relative L2, bfloat16 within 1.25 × of torch's bfloat16 error."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F

from omni_neuron_nkisim import TensorSpec, settings

DTYPES = [torch.float32, torch.bfloat16]
EPSILON = 1e-6
parametrize_all = pytest.mark.parametrize(
    ("dtype", "lnc"), [(dtype, lnc) for dtype in DTYPES for lnc in (1, 2)], ids=str
)


def kernels(module):
    """Imported when a test runs: the simulator is `nki` from then on only."""
    return importlib.import_module(f"omni_neuron_kernels.nki_kernels.{module}")


def error(value, exact):
    return float((value.double() - exact).norm() / exact.norm())


def check(value, exact, torchs):
    """`torchs` is what torch makes of the same inputs in their own dtype."""
    assert value.dtype == torchs.dtype
    limit = 1e-5 if value.dtype == torch.float32 else 1.25 * error(torchs, exact)
    assert error(value, exact) <= limit


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@parametrize_all
@pytest.mark.parametrize(("rows", "width"), [(200, 333), (1, 1), (128, 640), (257, 5)])
def test_rms_norm(dtype, lnc, rows, width):
    x, weight = random(rows, width, dtype=dtype), random(1, width, seed=1)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.double()
    torchs = F.rms_norm(x, (width,), weight[0].to(dtype), EPSILON)
    check(kernels("norms").rms_norm[lnc](x, weight, EPSILON), exact, torchs)


@parametrize_all
@pytest.mark.parametrize("shape", [(2, 131, 777), (1, 3, 512), (3, 128, 1025)])
def test_adaln_modulate(dtype, lnc, shape):
    hidden, branch = random(*shape, dtype=dtype) + 3, random(*shape, dtype=dtype, seed=1)
    gate, scale, shift = random(3, shape[0], shape[2], seed=2)
    updated = (hidden.double() + gate.double()[:, None] * branch.double()).to(dtype)
    exact = F.layer_norm(updated.double(), shape[2:], eps=EPSILON) * (1 + scale.double()[:, None])
    exact += shift.double()[:, None]
    torchs = F.layer_norm(updated, shape[2:], eps=EPSILON) * (1 + scale[:, None].to(dtype)) + shift[:, None].to(dtype)
    gated, stream = kernels("norms").gated_adaln_modulate[lnc](hidden, branch, gate, scale, shift, EPSILON)
    assert error(stream, updated.double()) <= 1e-5
    check(gated, exact, torchs)
    check(kernels("norms").adaln_modulate[lnc](updated, scale, shift, EPSILON), exact, torchs)


@parametrize_all
@pytest.mark.parametrize(
    ("rows", "width", "inner", "columns"), [(300, 200, 600, 250), (700, 129, 128, 513), (1, 5, 3, 2)]
)
def test_mlp(dtype, lnc, rows, width, inner, columns):
    x = random(rows, width, dtype=dtype)
    up, down = (random(a, b, seed=2) / math.sqrt(a) for a, b in ((width, inner), (inner, columns)))
    up, down, up_bias, down_bias = up.to(dtype), down.to(dtype), random(inner, 1, seed=3), random(1, columns, seed=4)
    exact = F.gelu(x.double() @ up.double() + up_bias.double().T, approximate="tanh") @ down.double()
    exact += down_bias.double()
    torchs = F.gelu(x @ up + up_bias.T.to(dtype), approximate="tanh") @ down + down_bias.to(dtype)
    check(kernels("feed_forward").mlp[lnc](x, up, up_bias, down, down_bias), exact, torchs)


@parametrize_all
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize(("rows", "width", "inner", "columns"), [(300, 200, 900, 250), (1, 5, 3, 2)])
def test_gated_mlp(dtype, lnc, silu, rows, width, inner, columns):
    x, shapes = random(rows, width, dtype=dtype), ((width, inner), (width, inner), (inner, columns))
    gate, up, down = ((random(a, b, seed=a + n) / math.sqrt(a)).to(dtype) for n, (a, b) in enumerate(shapes))

    def compute(x, gate, up, down):
        gates = F.silu(x @ gate) if silu else F.gelu(x @ gate, approximate="tanh")
        return (gates * (x @ up)) @ down

    exact = compute(*(tensor.double() for tensor in (x, gate, up, down)))
    check(kernels("feed_forward").gated_mlp[lnc](x, gate, up, down, silu), exact, compute(x, gate, up, down))


@parametrize_all
@pytest.mark.parametrize(("rows", "width", "columns"), [(300, 200, 600), (700, 129, 1), (1, 5, 513)])
def test_output_projection(dtype, lnc, rows, width, columns):
    x, weight, bias = random(rows, width, dtype=dtype), random(width, columns, dtype=dtype), random(1, columns)
    exact = x.double() @ weight.double() + bias.double()
    torchs = x @ weight + bias.to(dtype)
    check(kernels("feed_forward").output_projection[lnc](x, weight, bias), exact, torchs)


def specs(dtype, *shapes):
    return [TensorSpec(shape, dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_shapes_fit(dtype):
    """Limits of instructions and of memory at the sizes of a video model, on shapes alone."""
    columns = TensorSpec((1, 5120), "float32")
    with settings(target="trn2", execute=False, check_live_capacity=True):
        kernels("norms").rms_norm(*specs(dtype, (1000, 5120)), columns, EPSILON)
        stream, vector = TensorSpec((1, 1000, 5120), dtype), columns
        kernels("norms").gated_adaln_modulate(stream, stream, vector, vector, vector, EPSILON)
        x, up, down = specs(dtype, (600, 5120), (5120, 1728), (1728, 5120))
        kernels("feed_forward").mlp(x, up, TensorSpec((1728, 1), "float32"), down, columns)
        kernels("feed_forward").gated_mlp(x, up, up, down, True)
        kernels("feed_forward").output_projection(x, TensorSpec((5120, 5120), dtype), columns)
