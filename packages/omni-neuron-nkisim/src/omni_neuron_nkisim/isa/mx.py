# SPDX-License-Identifier: Apache-2.0
"""Microscaling (MX) formats: quantisation, scale layout. trn3 only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from omni_neuron_nkisim import costs
from omni_neuron_nkisim.checks import here, need_generation, read, read_exact, tile
from omni_neuron_nkisim.context import Core
from omni_neuron_nkisim.dtypes import FLOAT16S, pack, unpack
from omni_neuron_nkisim.errors import fail
from omni_neuron_nkisim.memory import SBUF
from omni_neuron_nkisim.tensors import NkiTensor

_SCALES = ("uint8", "float8_e8m0fnu")
_LARGEST_EXPONENT = {"float8_e4m3fn_x4": 8, "float8_e5m2_x4": 15}
_GROUP_PARTITIONS, _GROUP_FREE = 8, 4


def scale_rows(partitions: int) -> NDArray[np.int64]:
    """The partition of each group of eight data partitions in the scale tile."""
    groups = np.arange(partitions // _GROUP_PARTITIONS)
    return groups if partitions <= 32 else 32 * (groups // 4) + groups % 4


def check_scales(what: str, argument: str, scales: NkiTensor, partitions: int, free: int) -> None:
    """A scale tile or view for data `[partitions, free]` packed values.

    Views that begin at partition 4, 8 or 12 share one tile and end short of its last partition, so only the last row
    that holds a scale is asked for.
    """
    tile(what, argument, scales, (SBUF,), _SCALES, start_rule=False)
    if scales.start_partition % 32 not in (0, 4, 8, 12):
        fail(what, f"{argument}'s first partition", scales.start_partition, "0, 4, 8 or 12 of a quadrant of 32")
    least = int(scale_rows(partitions)[-1]) + 1
    if scales.partitions < least or scales.free != free:
        fail(what, argument, f"of shape {scales.shape}", f"has to be [at least {least}, {free}]")


def quantize_mx(dst: NkiTensor, src: NkiTensor, dst_scale: NkiTensor, name: str | None = None) -> None:
    """Quantise groups of 8 partitions × 4 neighbouring elements with one power of two each.

    `X = 2^(floor(log2 amax) − E)`, `dst = cast(src / X)`, `dst_scale = log2 X + 127`; E is Emax − 1 from NKI 0.5 on and
    Emax before (8 for E4M3FN, 15 for E5M2). `src` `[P, F]` is 16-bit float, P in 32, 64, 96, 128; `dst` `[P, F/4]`
    packed; scales `[P/8, F/4]` for P = 32 (`[P, F/4]` is accepted), else rows `32·(g // 4) + g mod 4` of `[P, F/4]`.
    What the cast does above the largest value is not documented: it saturates, as the OCP MX specification asks. A
    group with NaN or infinity gets scale 255 (NaN).
    """
    core, what = here("quantize_mx"), "quantize_mx"
    need_generation(core, what, 4)
    tile(what, "src", src, (SBUF,), FLOAT16S)
    tile(what, "dst", dst, (SBUF,), tuple(_LARGEST_EXPONENT))
    if src.partitions not in (32, 64, 96, 128):
        fail(what, "src's partitions", src.partitions, "has to be 32, 64, 96 or 128")
    if src.free % _GROUP_FREE:
        fail(what, "src's F", src.free, "has to be a multiple of 4")
    if dst_scale.dtype == "float8_e8m0fnu" and core.settings.version() < (0, 5):
        fail(what, "dst_scale.dtype", dst_scale.dtype, f"exists from NKI 0.5 on, this is {core.settings.nki_version}")
    if (dst.partitions, dst.free) != (src.partitions, src.free // _GROUP_FREE):
        fail(what, "dst", f"of shape {dst.shape}", f"has to be [{src.partitions}, {src.free // _GROUP_FREE}]")
    check_scales(what, "dst_scale", dst_scale, src.partitions, src.free // _GROUP_FREE)
    core.count(what, costs.VECTOR, reads=(src,), writes=(dst, dst_scale), cycles=costs.one_input_cycles(src.free / 4))
    if core.executes:
        _quantize(core, dst, src, dst_scale)


def _quantize(core: Core, dst: NkiTensor, src: NkiTensor, dst_scale: NkiTensor) -> None:
    exponent = _LARGEST_EXPONENT[dst.dtype] - (1 if core.settings.version() >= (0, 5) else 0)
    values = read(core, src).reshape(src.partitions // _GROUP_PARTITIONS, _GROUP_PARTITIONS, -1, _GROUP_FREE)
    largest = np.abs(values).max(axis=(1, 3))
    # frexp gives a mantissa in [0.5, 1), so its exponent is floor(log2) + 1, exactly.
    log2 = np.frexp(largest)[1] - 1 - exponent
    log2 = np.clip(np.where(largest == 0, -127, log2), -127, 127)
    scaled = np.ldexp(values.astype(np.float64), -log2[:, None, :, None])
    top = dst.element.largest
    element = dst.element.element
    assert element is not None
    quantized = np.clip(scaled, -top, top).astype(np.float32).astype(element)
    quantized = quantized.reshape(src.partitions, -1, _GROUP_FREE)
    scales = np.where(np.isfinite(largest), log2 + 127, 255).astype(np.uint8)
    dst.write_raw(core.core, pack(quantized, dst.element).reshape(dst.shape))
    raw = read_exact(core, dst_scale).view(np.uint8)
    raw[scale_rows(src.partitions)] = scales
    dst_scale.write_raw(core.core, raw.view(dst_scale.element.storage).reshape(dst_scale.shape))


def dequantized(core: Core, data: NkiTensor, scales: NkiTensor) -> NDArray[np.float32]:
    """Packed data with its scales as `[4 · K, F]` float32, the rows in some fixed order."""
    elements = unpack(read_exact(core, data), data.element)
    rows = scale_rows(data.partitions)
    raw = read_exact(core, scales).view(np.uint8)[rows].astype(np.int32)
    powers = np.where(raw == 255, np.nan, np.ldexp(1.0, raw - 127)).repeat(_GROUP_PARTITIONS, axis=0)
    scaled = (elements * powers[:, :, None]).astype(np.float32)
    return scaled.transpose(2, 0, 1).reshape(4 * data.partitions, data.free)
