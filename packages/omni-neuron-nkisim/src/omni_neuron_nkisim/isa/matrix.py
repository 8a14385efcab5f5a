# SPDX-License-Identifier: Apache-2.0
"""TensorE: matmul, MX matmul, transposes (also VectorE's)."""

from __future__ import annotations

from typing import Any

import numpy as np

from omni_neuron_nkisim import costs
from omni_neuron_nkisim.checks import Array, here, member, need_generation, read, read_exact, tile, write
from omni_neuron_nkisim.constants import engine as Engine
from omni_neuron_nkisim.constants import matmul_perf_mode
from omni_neuron_nkisim.context import Core
from omni_neuron_nkisim.dtypes import FP8
from omni_neuron_nkisim.errors import fail
from omni_neuron_nkisim.isa.mx import check_scales, dequantized
from omni_neuron_nkisim.layout import last_element
from omni_neuron_nkisim.memory import PSUM, PSUM_BY_MATMUL, PSUM_BY_OTHER, SBUF
from omni_neuron_nkisim.target import PARTITIONS, PSUM_BANK_BYTES
from omni_neuron_nkisim.tensors import NkiTensor

_WIDE = ("float32", "tfloat32")
_TRANSPOSED_DTYPES = ("bfloat16", "float16", *_WIDE)
_MATMUL_DTYPES = (*FP8, *_TRANSPOSED_DTYPES)
_MX_DTYPES = ("float8_e4m3fn_x4", "float8_e5m2_x4", "float4_e2m1fn_x4")


def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
    name: str | None = None,
) -> None:
    """`dst[m, n] (+)= Σ_k stationary[k, m] · moving[k, n]` in float32.

    K ≤ 128 and M ≤ 128; N ≤ 512 on trn2, ≤ 4096 (float32) or 8192 (bfloat16 dst) on trn3. `double_row` contracts FP8
    `[K, 2, M]` with `[K, 2, N]` over both leading dims. `accumulate`: False overwrites, True adds to what a matmul left
    there (on trn3 also to what another engine wrote), None overwrites where no matmul has written yet.
    `is_transpose` is not simulated: which operand holds the identity is not documented; use `nc_transpose`. Column
    tiling is refused, as the parameter text has it (the prose differs).
    """
    core, what = here("nc_matmul"), "nc_matmul"
    tile(what, "stationary", stationary, (SBUF,), _MATMUL_DTYPES)
    tile(what, "moving", moving, (SBUF,), _MATMUL_DTYPES)
    member(what, "perf_mode", perf_mode, matmul_perf_mode)
    if is_transpose:
        fail(what, "is_transpose", True, "is not simulated; use nc_transpose")
    if stationary.partitions != moving.partitions:
        fail(what, "moving's K", moving.partitions, f"has to be stationary's {stationary.partitions}")
    _check_matmul_dtypes(core, stationary, moving)
    rows = 1
    if perf_mode is matmul_perf_mode.double_row:
        rows = 2
        for argument, operand in (("stationary", stationary), ("moving", moving)):
            if operand.dtype not in FP8 or operand.ndim != 3 or operand.shape[1] != 2:
                fail(what, argument, f"{operand.dtype}{list(operand.shape)}", "double_row takes FP8 of shape [K, 2, F]")
    m, n = stationary.free // rows, moving.free // rows
    _check_matmul_result(core, what, dst, m, n)
    _check_tiling(what, stationary, tile_position, tile_size)
    core.count(
        what, costs.TENSOR,
        reads=(stationary, moving), writes=(dst,),
        cycles=costs.matmul_cycles(stationary, moving, m, n, is_stationary_onezero or is_moving_onezero),
        flops=2.0 * stationary.partitions * rows * m * n,
    )  # fmt: skip
    if core.executes:
        left, right = (read(core, t).reshape(t.partitions * rows, -1) for t in (stationary, moving))
        _accumulate(core, what, dst, left.T @ right, accumulate)


def _check_matmul_dtypes(core: Core, stationary: NkiTensor, moving: NkiTensor) -> None:
    what, pair = "nc_matmul", (stationary.dtype, moving.dtype)
    if (pair[0] in _WIDE) != (pair[1] in _WIDE):
        fail(what, "moving.dtype", pair[1], f"float32 and tfloat32 do not mix with narrower types ({pair[0]})")
    if set(pair) == {"float8_e4m3", "float8_e4m3fn"}:
        fail(what, "moving.dtype", pair[1], f"the two E4M3 types do not mix ({pair[0]})")
    if "float8_e4m3fn" in pair:
        need_generation(core, what, 4, "dtype", "float8_e4m3fn")


def _check_matmul_result(core: Core, what: str, dst: NkiTensor, m: int, n: int) -> None:
    tile(what, "dst", dst, (PSUM,), size_rule=False)
    if core.target.generation < 4 and dst.dtype != "float32":
        fail(what, "dst.dtype", dst.dtype, f"has to be float32 on {core.target.name}")
    if dst.dtype not in ("float32", "bfloat16"):
        fail(what, "dst.dtype", dst.dtype, "has to be float32 or bfloat16")
    if m > PARTITIONS:
        fail(what, "M", m, f"at most {PARTITIONS} stationary columns")
    limit = core.target.matmul_fp32_columns * (1 if dst.dtype == "float32" else 2)
    if n > limit:
        fail(what, "N", n, f"at most {limit} moving columns on {core.target.name} for a {dst.dtype} destination")
    if (dst.partitions, dst.free) != (m, n):
        fail(what, "dst", f"of shape {dst.shape}", f"has to be [{m}, {n}]")
    _check_bank(core, what, dst)


def _check_bank(core: Core, what: str, dst: NkiTensor) -> None:
    """What TensorE writes lies in one bank before trn3; a tile of several begins at one, a smaller one lies in one."""
    if core.target.generation >= 4 or dst.storage.row_bytes <= PSUM_BANK_BYTES:
        return
    size = dst.element.itemsize
    first = dst.offset * size % dst.storage.row_bytes
    last = first + (last_element(dst.shape[1:], dst.strides[1:], 0) + 1) * size - 1
    if first // PSUM_BANK_BYTES != last // PSUM_BANK_BYTES:
        fail(what, "dst", f"bytes {first} to {last} of its partitions",
             f"{what} writes one PSUM bank of {PSUM_BANK_BYTES} bytes on {core.target.name}")  # fmt: skip


def _check_tiling(what: str, stationary: NkiTensor, position: Any, size: Any) -> None:
    position, size = position or (), size or ()
    if bool(position) != bool(size):
        fail(what, "tile_position and tile_size", (position, size), "both are given, or neither")
    if not position:
        return
    (row, column), (rows, columns) = position, size
    if rows not in (32, 64, 128):
        fail(what, "tile_size", size, "has 32, 64 or 128 rows")
    if row % rows or row + rows > PARTITIONS:
        fail(what, "tile_position", position, f"begins at a multiple of its {rows} rows, below {PARTITIONS}")
    if column != 0 or columns != 128:
        fail(what, "tile_position and tile_size", (position, size), "column tiling is not supported: column 0 of 128")
    if stationary.partitions > rows:
        fail(what, "stationary", f"of {stationary.partitions} partitions", f"has to fit the tile's {rows} rows")


def _accumulate(core: Core, what: str, dst: NkiTensor, product: Array, accumulate: bool | None) -> None:
    storage = dst.storage
    assert storage.psum_writers is not None
    extra = dst.runtime_offset(core.core)
    writers = dst.strided(storage.psum_writers, extra, np.dtype(np.uint8))[..., 0].reshape(product.shape)
    if accumulate is True:
        undefined = writers != PSUM_BY_MATMUL
        if core.target.generation >= 4:
            undefined &= writers != PSUM_BY_OTHER
        if undefined.any():
            fail(what, "accumulate", True, f"no matmul has written {int(undefined.sum())} elements of dst {dst.name}")
        product = read(core, dst) + product
    elif accumulate is None:
        product = np.where(writers == PSUM_BY_MATMUL, read(core, dst) + product, product)
    elif accumulate is not False:
        fail(what, "accumulate", repr(accumulate), "has to be True, False or None")
    write(core, dst, product, PSUM_BY_MATMUL)


def nc_matmul_mx(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    stationary_scale: NkiTensor,
    moving_scale: NkiTensor,
    tile_position: tuple[int, ...] | None = None,
    tile_size: tuple[int, ...] | None = None,
    accumulate: bool | None = None,
    name: str | None = None,
) -> None:
    """`dst[m, n] (+)= Σ_k Σ_q st[k, m, q]·2^(ss−127) · mv[k, n, q]·2^(ms−127)`, trn3 only.

    Packed operands `[K, M]` and `[K, N]`, K a multiple of 32, M even; the scale row of k is that of its group of eight
    (`quantize_mx`), and scale views may begin at partition 0, 4, 8 or 12.
    """
    core, what = here("nc_matmul_mx"), "nc_matmul_mx"
    need_generation(core, what, 4)
    for argument, operand in (("stationary", stationary), ("moving", moving)):
        tile(what, argument, operand, (SBUF,), _MX_DTYPES)
        if operand.partitions % 32:
            fail(what, f"{argument}'s K", operand.partitions, f"a multiple of 32, at most {PARTITIONS}")
    if stationary.partitions != moving.partitions:
        fail(what, "moving's K", moving.partitions, f"has to be stationary's {stationary.partitions}")
    if stationary.free % 2:
        fail(what, "M", stationary.free, "has to be even")
    _check_matmul_result(core, what, dst, stationary.free, moving.free)
    check_scales(what, "stationary_scale", stationary_scale, stationary.partitions, stationary.free)
    check_scales(what, "moving_scale", moving_scale, moving.partitions, moving.free)
    _check_tiling(what, stationary, tile_position, tile_size)
    core.count(
        what, costs.TENSOR,
        reads=(stationary, moving, stationary_scale, moving_scale), writes=(dst,),
        cycles=max(costs.LEAST_CYCLES, moving.free, stationary.free / 4),
        flops=2.0 * stationary.partitions * 4 * stationary.free * moving.free,
    )  # fmt: skip
    if core.executes:
        left = dequantized(core, stationary, stationary_scale)
        right = dequantized(core, moving, moving_scale)
        _accumulate(core, what, dst, left.T @ right, accumulate)


def nc_transpose(dst: NkiTensor, data: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None) -> None:
    """`dst[f, p] = data[p, f]` of one dtype, free dims flattened, bit for bit.

    TensorE: SBUF to PSUM, up to 128 × 128, floats of 16 or 32 bits: it passes no integers, and leaves FP8 in PSUM as
    elements of 16 bits, a layout that is documented for the transpose mode of nc_matmul only. VectorE: SBUF or PSUM at
    both ends, up to 32 × 32. Without an engine the one whose memories fit: TensorE from SBUF to PSUM, else VectorE.
    """
    core, what = here("nc_transpose"), "nc_transpose"
    member(what, "engine", engine, Engine)
    tile(what, "data", data)
    tile(what, "dst", dst)
    if dst.dtype != data.dtype:
        fail(what, "dst.dtype", dst.dtype, f"has to be data's {data.dtype}")
    if (dst.partitions, dst.free) != (data.free, data.partitions):
        fail(what, "dst", f"of shape {dst.shape}", f"has to be [{data.free}, {data.partitions}]")
    on_tensor = data.buffer == SBUF and dst.buffer == PSUM if engine is Engine.unknown else engine is Engine.tensor
    if not on_tensor and engine not in (Engine.unknown, Engine.vector):
        fail(what, "engine", engine, "has to be tensor or vector")
    if on_tensor and (data.buffer != SBUF or dst.buffer != PSUM):
        fail(what, "data and dst", f"in {data.buffer} and {dst.buffer}", "TensorE transposes from sbuf to psum")
    if on_tensor:
        if data.dtype not in _TRANSPOSED_DTYPES:
            fail(what, "data.dtype", data.dtype, f"TensorE transposes {', '.join(_TRANSPOSED_DTYPES)}; use .view")
        _check_bank(core, what, dst)
    limit = PARTITIONS if on_tensor else 32
    if max(data.partitions, data.free) > limit:
        fail(what, "data", f"of shape [{data.partitions}, {data.free}]", f"at most [{limit}, {limit}] on this engine")
    weight = 2 if data.dtype == "float32" else 1
    cycles = max(costs.LEAST_CYCLES, data.partitions) * weight if on_tensor else costs.one_input_cycles(dst.free)
    core.count(what, costs.TENSOR if on_tensor else costs.VECTOR, reads=(data,), writes=(dst,), cycles=cycles)
    if core.executes:
        dst.write_raw(core.core, read_exact(core, data).T.reshape(dst.shape), PSUM_BY_OTHER)
