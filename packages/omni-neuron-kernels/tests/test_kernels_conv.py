# SPDX-License-Identifier: Apache-2.0
"""Causal convolution: the kernel against float64, its division of the work, its limits."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F

from omni_neuron_kernels import causal_conv3d, explain, nki_convolution
from omni_neuron_nkisim import TensorSpec, last_stats, settings

parametrize_all = pytest.mark.parametrize(
    ("dtype", "lnc"), [(dtype, lnc) for dtype in (torch.float32, torch.bfloat16) for lnc in (1, 2)], ids=str
)


def kernel(lnc):
    """Imported when a test runs: the simulator is `nki` from then on only."""
    return importlib.import_module("omni_neuron_kernels.nki_kernels.conv").causal_conv3d[lnc]


def error(value, exact):
    return float((value.double() - exact).norm() / exact.norm())


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def convolve(frames, weight, bias, padding):
    """What torch makes of it in the dtype of `frames`."""
    frames = F.pad(frames, (0, 0, 0, 0, padding[0], 0))
    return F.conv3d(frames, weight, bias.to(frames.dtype), padding=(0, *padding[1:]))


def case(dtype, channels, columns, kernel_size, frames, image, batch=1):
    weight = random(columns, channels, *kernel_size, seed=1) / math.sqrt(channels * math.prod(kernel_size))
    return random(batch, channels, frames, *image, dtype=dtype), weight.to(dtype), random(columns, seed=2)


def check(result, frames, weight, bias, padding):
    exact = convolve(*(tensor.double() for tensor in (frames, weight, bias)), padding)
    torchs = convolve(frames, weight, bias, padding)
    assert (result.dtype, result.shape) == (torchs.dtype, torchs.shape)
    assert error(result, exact) <= (1e-5 if result.dtype == torch.float32 else 1.25 * error(torchs, exact))


# channels, output channels, kernel, frames, frames of the past, image, padding
CASES = {
    "few output channels": (5, 3, (3, 3, 3), 5, 2, (7, 9), (0, 1, 1)),
    "a full tile of channels and one of three copies": (160, 130, (3, 3, 3), 1, 2, (5, 6), (0, 1, 1)),
    "two copies, a frame alone": (192, 7, (1, 3, 3), 2, 0, (6, 5), (0, 1, 1)),
    "temporal": (64, 150, (3, 1, 1), 2, 2, (5, 3), (0, 0, 0)),
    "pointwise": (130, 9, (1, 1, 1), 2, 0, (11, 13), (0, 0, 0)),
    "zero frames in front, no rows": (7, 5, (3, 3, 3), 3, 0, (5, 4), (2, 0, 2)),
    "zero frames before the past, odd kernel": (33, 40, (4, 2, 5), 2, 1, (3, 7), (3, 1, 4)),
    "one pixel": (1, 1, (1, 1, 1), 1, 0, (1, 1), (0, 0, 0)),
}


@parametrize_all
@pytest.mark.parametrize("name", CASES)
def test_causal_conv3d(dtype, lnc, name):
    channels, columns, size, present, past, image, padding = CASES[name]
    frames, weight, bias = case(dtype, channels, columns, size, past + present, image)
    parts = (frames,) if past == 0 else (frames[:, :, :past].contiguous(), frames[:, :, past:].contiguous())
    itemsize = frames.element_size()
    plan = nki_convolution.plan_convolution(image, past + present, tuple(weight.shape), padding, itemsize, lnc)
    check(kernel(lnc)(parts, weight, bias[None], padding, *plan), frames, weight, bias, padding)


@pytest.mark.parametrize(("group", "rows", "unroll"), [(10, 2, 1), (4, 3, 2), (3, 7, 4), (10, 4, 3)])
@pytest.mark.parametrize("lnc", [1, 2])
def test_however_the_work_is_divided(group, rows, unroll, lnc):
    frames, weight, bias = case(torch.float32, 64, 10, (3, 3, 3), 6, (7, 40), batch=2)
    result = kernel(lnc)((frames,), weight, bias[None], (1, 1, 1), group, rows, unroll)
    check(result, frames, weight, bias, (1, 1, 1))


def test_a_frame_reads_no_later_one():
    frames, weight, bias = case(torch.float32, 6, 4, (3, 3, 3), 5, (4, 4))
    before = causal_conv3d(frames, weight, bias, padding=(2, 1, 1))
    frames[:, :, 3:] *= -1e3
    after = causal_conv3d(frames, weight, bias, padding=(2, 1, 1))
    assert last_stats().kernel == "causal_conv3d"
    assert torch.equal(after[:, :, :3], before[:, :, :3]) and (after[:, :, 3:] != before[:, :, 3:]).all()


# The decoder of Wan's VAE (base width 96): channels, output channels, kernel, frames of a later chunk, side of the
# image of a tile of 256 × 256 pixels.
WAN_VAE = [
    (16, 384, (3, 3, 3), 1, 32),
    (384, 384, (3, 3, 3), 1, 32),
    (384, 768, (3, 1, 1), 1, 32),
    (384, 192, (1, 3, 3), 2, 64),
    (192, 384, (3, 3, 3), 2, 64),
    (192, 384, (1, 1, 1), 2, 64),
    (192, 192, (3, 3, 3), 4, 128),
    (192, 96, (1, 3, 3), 4, 256),
    (96, 96, (3, 3, 3), 4, 256),
    (96, 3, (3, 3, 3), 4, 256),
]


def launch_on_shapes(dtype, lnc, channels, columns, size, frames, image):
    """One block of rows of a Wan VAE convolution, on shapes alone."""
    past, padding = size[0] - 1, (0, size[1] // 2, size[2] // 2)
    itemsize = 4 if dtype == "float32" else 2
    plan = nki_convolution.plan_convolution(image, past + frames, (columns, channels, *size), padding, itemsize, lnc)
    assert isinstance(plan, nki_convolution.ConvPlan), plan
    counts = (past, frames) if past else (frames,)
    rows = min(image[0], 2 * plan.rows)
    parts = tuple(TensorSpec((1, channels, count, rows, image[1]), dtype) for count in counts)
    weight, bias = TensorSpec((columns, channels, *size), dtype), TensorSpec((1, columns), "float32")
    kernel(lnc)(parts, weight, bias, padding, *plan)
    return plan


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", WAN_VAE, ids=str)
def test_real_shapes_fit(dtype, shape):
    """Limits of instructions and of memory, for tiles of 256 × 256 pixels."""
    *shape, frames, side = shape
    with settings(target="trn2", execute=False, check_live_capacity=True):
        launch_on_shapes(dtype, 2, *shape, min(frames, 2), (side, side))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_frame_of_720p_fits(dtype):
    """The widest layers of the decoder, without tiles."""
    layers = [((96, 96, (3, 3, 3)), 1), ((96, 3, (3, 3, 3)), 1), ((192, 96, (1, 3, 3)), 1), ((192, 192, (3, 3, 3)), 2)]
    with settings(target="trn2", execute=False, check_live_capacity=True):
        for layer, part in layers:
            launch_on_shapes(dtype, 2, *layer, 1, (720 // part, 1280 // part))


def matmuls(channels, columns, frames, padding=(0, 1, 1)):
    with settings(target="trn2", execute=False):
        plan = nki_convolution.plan_convolution((8, 16), frames, (columns, channels, 3, 3, 3), padding, 2, 1)
        part = TensorSpec((1, channels, frames, 8, 16), "bfloat16")
        weight, bias = TensorSpec((columns, channels, 3, 3, 3), "bfloat16"), TensorSpec((1, columns), "float32")
        kernel(1)((part,), weight, bias, padding, *plan)
    return last_stats().count("nc_matmul")


def test_how_many_matmuls_the_taps_take():
    positions = 2  # runs of 128, of 7 · 18 + 16
    assert matmuls(96, 96, 6) == positions * 4 * 27
    assert matmuls(256, 96, 6) == positions * 4 * 27 * 2
    # Half a tile of channels: two columns of the kernel in one matmul, the third alone.
    assert matmuls(192, 96, 6) == positions * 4 * (27 + 18)
    # Few output channels: four frames at once, so each input frame is read by 9 matmuls, not by 27.
    assert matmuls(96, 3, 6) == positions * 6 * 9
    # A zero frame costs nothing.
    assert matmuls(96, 96, 1, (2, 1, 1)) == positions * 9


def specs(channels=8, columns=4, size=(3, 3, 3), frames=3, image=(5, 6), dtype=torch.float32):
    x = torch.empty(1, channels, frames, *image, dtype=dtype)
    return x, torch.empty(columns, channels, *size, dtype=dtype), torch.empty(columns, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (specs(channels=1281), "at most 1280 and 2048"),
        (specs(columns=2049, size=(1, 1, 1)), "2049 output channels"),
        (specs(image=(3, 20_000)), "a row of 20000 and its weights need"),
        (specs(dtype=torch.float16), "torch.float16"),
        (specs(channels=1280, size=(3, 9, 9), image=(9, 9)), "bytes of SBUF"),
    ],
)
def test_outside_a_limit_torch_runs_and_says_why(arguments, reason):
    choice = explain("causal_conv3d", *arguments)
    assert choice.provider == "torch"
    assert reason in choice.refusals["nki-simulator"]


@pytest.mark.parametrize("past", [None, 2])
def test_the_reference_is_torchs_convolution(monkeypatch, past):
    frames, weight, bias = case(torch.bfloat16, 8, 6, (3, 3, 3), 4, (5, 6))
    given = {"padding": (0, 1, 1)} if past is None else {"padding": (0, 1, 1), "past": frames[:, :, :past]}
    x, bias = frames if past is None else frames[:, :, past:], bias.bfloat16()
    simulated = causal_conv3d(x, weight, bias, **given)
    monkeypatch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", "1")
    reference = causal_conv3d(x, weight, bias, **given)
    assert torch.equal(reference, F.conv3d(frames, weight, bias, padding=(0, 1, 1)))
    assert simulated.shape == reference.shape and error(simulated, reference.double()) < 0.01


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w, b: causal_conv3d(x[0], w, b), "are not"),
        (lambda x, w, b: causal_conv3d(x[:, :7], w, b), "are not"),
        (lambda x, w, b: causal_conv3d(x, w, b[:3]), "bias has shape"),
        (lambda x, w, b: causal_conv3d(x, w, b, past=x[:, :, :, :4]), "past has shape"),
        (lambda x, w, b: causal_conv3d(x, w, b, padding=(0, 3, 1)), r"0 to less than the kernel's \(3, 3, 3\)"),
        (lambda x, w, b: causal_conv3d(x, w, b, padding=(1, 1)), "padding = "),
        (lambda x, w, b: causal_conv3d(x[:, :, :2], w, b), r"\(2, 5, 6\) padded frames"),
    ],
)
def test_arguments_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call(*specs())
