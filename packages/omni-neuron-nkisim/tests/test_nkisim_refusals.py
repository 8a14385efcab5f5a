# SPDX-License-Identifier: Apache-2.0
"""Every documented constraint is broken once and refused with instruction, argument, value and limit."""

import re

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import nkisim_probe as probe
import numpy as np
import pytest
from nkisim_probe import tile

from omni_neuron_nkisim import NkiValidationError

BF16, F8, F8N, I32, U8 = "bfloat16", "float8_e4m3", "float8_e4m3fn", "int32", "uint8"
X4 = "float8_e4m3fn_x4"


def t(*shape, dtype="float32"):
    return nl.ndarray(shape, dtype)


def p(*shape, dtype="float32"):
    return nl.ndarray(shape, dtype, buffer=nl.psum)


def h(*shape, dtype="float32"):
    return nl.ndarray(shape, dtype, buffer=nl.shared_hbm)


def ones(*shape, dtype="float32"):
    return nl.ones(shape, dtype)


def group(*ranks):
    return ncc.ReplicaGroup([ranks])


def mm(dst, st, mv, **options):
    nisa.nc_matmul(dst, st, mv, accumulate=options.pop("accumulate", False), **options)


def mx(dst, st, mv, ss, ms):
    nisa.nc_matmul_mx(dst, st, mv, ss, ms, accumulate=False)


# name: (target, body, what the message has to hold)
PROBES = {
    # memory and views
    "tile of 129 partitions": ("trn2", lambda: t(129, 4), "nl.ndarray: shape.*129.*128 partitions"),
    "tile of one dim": ("trn2", lambda: t(128), "nl.ndarray: shape.*at least 2 dims"),
    "empty tile": ("trn2", lambda: t(4, 0), "nl.ndarray: shape.*at least 1 element"),
    "sbuf of trn2": ("trn2", lambda: t(1, 57345), "sbuf bytes per partition is 229380; trn2 has 229376"),
    "sbuf of trn3": ("trn3", lambda: t(1, 65537), "sbuf bytes per partition is 262148; trn3 has 262144"),
    "psum": ("trn2", lambda: p(1, 4097), "psum bytes per partition is 16388; trn2 has 16384"),
    "psum bank": (
        "trn2",
        lambda: nl.ndarray((4, 4), "float32", buffer=nl.psum, address=(0, 100)),
        "address is .*multiple of 2048",
    ),
    "address beyond": ("trn2", lambda: nl.ndarray((64, 4), "float32", address=(96, 0)), "64 partitions.*exceed 128"),
    "string buffer": ("trn2", lambda: nl.ndarray((4, 4), "float32", buffer="sbuf"), "buffer is 'sbuf'.*nl.sbuf"),
    "unknown dtype": ("trn2", lambda: t(4, 4, dtype="float64"), "dtype is 'float64'"),
    "slice beyond": ("trn2", lambda: t(4, 4)[:, 2:5], "dim 1 has size 4, index is 2:5"),
    "index beyond": ("trn2", lambda: t(4, 4)[:, 4], "dim 1 has size 4, index is 4"),
    "permuted partitions": ("trn2", lambda: t(4, 4).permute((1, 0)), r"dims\[0\] is 0 on chip"),
    "broadcast of 4": ("trn2", lambda: t(4, 4).broadcast(1, 8), "dim 1 has size 4; only size 1"),
    "broadcast of partitions": ("trn2", lambda: t(1, 4).broadcast(0, 8), "dim is 0, the partition dim"),
    "reshape of partitions": ("trn2", lambda: t(4, 4).reshape((8, 2)), "on chip dim 0 keeps its 4"),
    "reshape to another size": ("trn2", lambda: t(4, 4).reshape((4, 5)), "there are 16 elements"),
    "reshape that copies": ("trn2", lambda: t(4, 4, 4)[:, :, 0:2].reshape((4, 8)), "needs a copy"),
    "flatten of uneven dims": ("trn2", lambda: t(4, 4, 4)[:, :, 0:2].flatten_dims(1, 2), "do not lie evenly"),
    "view of a strided dim": ("trn2", lambda: t(4, 8)[:, 0:8:2].view(BF16), "another size needs a contiguous one"),
    "view of odd size": ("trn2", lambda: t(4, 3, dtype=BF16).view("float32"), "4 bytes divide not all"),
    "ap beyond": ("trn2", lambda: h(4, 4).ap([[4, 5], [1, 4]]), "touches byte 79 of 64"),
    "ap beyond a partition": ("trn2", lambda: t(4, 4).ap([[4, 4], [1, 5]]), "runs past a partition's 4 elements"),
    "ap of partitions": ("trn2", lambda: t(4, 4).ap([[8, 2], [1, 4]]), r"on chip it begins with \[4, partitions\]"),
    "ap on a sub-view": ("trn2", lambda: h(4, 4)[1:].ap([[4, 2], [1, 4]], offset=4), "documented in two ways"),
    "two runtime offsets": (
        "trn2",
        lambda: h(4, 4).ap([[4, 1], [1, 4]], scalar_offset=nisa.register_alloc(0), vector_offset=t(1, 1, dtype=I32)),
        "both given; at most one",
    ),
    "runtime offset beyond": (
        "trn2",
        lambda: nisa.dma_copy(t(1, 4), h(4, 4).ap([[4, 1], [1, 4]], scalar_offset=nisa.register_alloc(4))),
        "touches byte 79 of 64",
    ),
    "register in Python": ("trn2", lambda: range(nisa.register_alloc(1)), "no value at trace time"),
    "empty register": ("trn2", lambda: nisa.register_store(t(1, 1), nisa.register_alloc()), "register is uninit"),
    "register from a row": ("trn2", lambda: nisa.register_load(nisa.register_alloc(), t(1, 2)), "one element"),
    "index of floats": (
        "trn2",
        lambda: h(4, 4).ap([[4, 2], [1, 4]], vector_offset=t(2, 1)),
        "vector_offset is of float32; has to be of an integer dtype",
    ),
    "index in hbm": (
        "trn2",
        lambda: h(4, 4).ap([[4, 2], [1, 4]], vector_offset=h(2, 1, dtype=I32)),
        "vector_offset is in shared_hbm; has to be in sbuf",
    ),
    "index of a row": (
        "trn2",
        lambda: h(4, 4).ap([[4, 2], [1, 4]], vector_offset=t(1, 2, dtype=I32)),
        r"vector_offset is of shape \(1, 2\); has to be \[2, 1\]",
    ),
    "runtime offset of floats": (
        "trn2",
        lambda: h(4, 4).ap([[4, 1], [1, 4]], scalar_offset=t(1, 1)),
        "scalar_offset is of float32; has to be of an integer dtype",
    ),
    "runtime select of a row": ("trn2", lambda: h(4, 4).select(0, t(1, 2, dtype=I32)), r"index is of shape \(1, 2\)"),
    # operands that all share
    "elements of sbuf": (
        "trn2",
        lambda: nisa.memset(t(1, 2, 32769, dtype=U8), 0),
        "dst is of 65538 elements per partition; at most 65536 in sbuf",
    ),
    "elements of psum": (
        "trn2",
        lambda: nisa.memset(p(1, 4097, dtype=BF16), 0.0),
        "dst is of 4097 elements per partition; at most 4096 in psum",
    ),
    "count of a dim": (
        "trn2",
        lambda: nisa.memset(t(1, 65536, dtype=U8), 0),
        "dst is of 65536 elements at stride 1 in dim 1; at most 65535 at a stride of at most 32767",
    ),
    "stride of a dim": (
        "trn2",
        lambda: nisa.memset(t(1, 2, 32768, dtype=U8)[:, :, 0:4], 0),
        "dst is of 2 elements at stride 32768 in dim 1",
    ),
    "partition start": (
        "trn2",
        lambda: nisa.tensor_copy(t(96, 4)[0:33], t(96, 4)[32:65]),
        "tensor_copy: src's first partition is 32; 33 partitions begin at a multiple of 64",
    ),
    "start of a row": ("trn2", lambda: nisa.reciprocal(t(8, 4)[3:4], t(8, 4)[0:1]), "first partition is 3.*of 32"),
    "hbm operand": ("trn2", lambda: nisa.tensor_copy(t(4, 4), h(4, 4)), "tensor_copy: src is in shared_hbm"),
    "six dims": (
        "trn2",
        lambda: nisa.tensor_copy(t(4, 4), t(4, 4).ap([[4, 4], [1, 1], [1, 1], [1, 1], [1, 2], [2, 2]])),
        "src is of shape .*at most 5 dims",
    ),
    "dma of six dims": (
        "trn2",
        lambda: nisa.dma_copy(t(4, 4), t(4, 4).ap([[4, 4], [1, 1], [1, 1], [1, 1], [1, 2], [2, 2]])),
        "src is of shape .*at most 5 dims",
    ),
    "no tensor": ("trn2", lambda: nisa.tensor_copy(t(4, 4), 3.0), "src is 3.0; has to be an NkiTensor"),
    "counts": (
        "trn2",
        lambda: nisa.tensor_copy(t(4, 4), t(4, 5)),
        r"dst is \[P=4, F=4\]; has to match src \[P=4, F=5\]",
    ),
    "engine as int": ("trn2", lambda: nisa.tensor_copy(t(4, 4), t(4, 4), engine=5), "engine is 5.*nisa.engine"),
    "op as string": ("trn2", lambda: nisa.tensor_tensor(t(4, 4), t(4, 4), t(4, 4), "add"), "op is 'add'.*nl.add"),
    "token called": ("trn2", lambda: nl.add(t(4, 4), t(4, 4)), "calling a token is not simulated"),
    # matmul
    "matmul into sbuf": ("trn2", lambda: mm(t(4, 4), t(8, 4), t(8, 4)), "nc_matmul: dst is in sbuf"),
    "matmul from psum": ("trn2", lambda: mm(p(4, 4), p(8, 4), t(8, 4)), "nc_matmul: stationary is in psum"),
    "matmul K": ("trn2", lambda: mm(p(4, 4), t(8, 4), t(16, 4)), "moving's K is 16; has to be stationary's 8"),
    "matmul M": ("trn2", lambda: mm(p(128, 4), t(8, 129), t(8, 4)), "M is 129; at most 128"),
    "matmul N on trn2": ("trn2", lambda: mm(p(4, 513), t(8, 4), t(8, 513)), "N is 513; at most 512"),
    "matmul N on trn3": ("trn3", lambda: mm(p(4, 4096), t(8, 4), t(8, 4097)), "N is 4097; at most 4096"),
    "matmul result shape": ("trn2", lambda: mm(p(4, 5), t(8, 4), t(8, 4)), r"dst is of shape \(4, 5\).*\[4, 4\]"),
    "matmul of integers": ("trn2", lambda: mm(p(4, 4), t(8, 4, dtype=I32), t(8, 4)), "stationary.dtype is int32"),
    "matmul of wide and narrow": (
        "trn2",
        lambda: mm(p(4, 4), t(8, 4, dtype=BF16), t(8, 4)),
        "do not mix with narrower",
    ),
    "matmul of two E4M3": (
        "trn3",
        lambda: mm(p(4, 4), t(8, 4, dtype=F8), t(8, 4, dtype=F8N)),
        "the two E4M3 types do not mix",
    ),
    "matmul of E4M3FN": (
        "trn2",
        lambda: mm(p(4, 4), t(8, 4, dtype=F8N), t(8, 4, dtype=F8N)),
        "float8_e4m3fn; needs gen4",
    ),
    "matmul to bfloat16": ("trn2", lambda: mm(p(4, 4, dtype=BF16), t(8, 4), t(8, 4)), "has to be float32 on trn2"),
    "matmul to float16": (
        "trn3",
        lambda: mm(p(4, 4, dtype="float16"), t(8, 4), t(8, 4)),
        "dst.dtype is float16; has to be float32 or bfloat16",
    ),
    "matmul over two banks": (
        "trn2",
        lambda: mm(p(4, 1024)[:, 300:700], t(8, 4), t(8, 400)),
        "nc_matmul writes one PSUM bank",
    ),
    "double row of bfloat16": (
        "trn2",
        lambda: mm(p(4, 4), t(8, 2, 4, dtype=BF16), t(8, 2, 4, dtype=BF16), perf_mode=nisa.matmul_perf_mode.double_row),
        r"double_row takes FP8 of shape \[K, 2, F\]",
    ),
    "accumulate on fresh memory": (
        "trn2",
        lambda: mm(p(4, 4), ones(8, 4), ones(8, 4), accumulate=True),
        "accumulate is True; no matmul has written 16 elements",
    ),
    "accumulate on a memset": (
        "trn2",
        lambda: mm(nl.zeros((4, 4), "float32", nl.psum), ones(8, 4), ones(8, 4), accumulate=True),
        "no matmul has written 16 elements",
    ),
    "transpose mode": ("trn2", lambda: mm(p(4, 4), t(4, 4), t(4, 4), is_transpose=True), "use nc_transpose"),
    "tile position alone": ("trn2", lambda: mm(p(4, 4), t(8, 4), t(8, 4), tile_position=(0, 0)), "both are given"),
    "tile rows": (
        "trn2",
        lambda: mm(p(4, 4), t(8, 4), t(8, 4), tile_position=(0, 0), tile_size=(16, 128)),
        "has 32, 64 or 128 rows",
    ),
    "tile start": (
        "trn2",
        lambda: mm(p(4, 4), t(8, 4), t(8, 4), tile_position=(32, 0), tile_size=(64, 128)),
        "multiple of its 64 rows",
    ),
    "column tile": (
        "trn2",
        lambda: mm(p(4, 4), t(8, 4), t(8, 4), tile_position=(0, 32), tile_size=(32, 32)),
        "column tiling is not supported",
    ),
    "tile too small": (
        "trn2",
        lambda: mm(p(4, 4), t(64, 4), t(64, 4), tile_position=(0, 0), tile_size=(32, 128)),
        "fit the tile's 32 rows",
    ),
    # transposes
    "transpose dtype": ("trn2", lambda: nisa.nc_transpose(p(4, 8, dtype=BF16), t(8, 4)), "has to be data's float32"),
    "transpose shape": ("trn2", lambda: nisa.nc_transpose(p(4, 9), t(8, 4)), r"has to be \[4, 8\]"),
    "transpose on vector": ("trn2", lambda: nisa.nc_transpose(t(64, 8), t(8, 64)), r"at most \[32, 32\]"),
    "transpose on tensor into sbuf": (
        "trn2",
        lambda: nisa.nc_transpose(t(4, 8), t(8, 4), engine=nisa.engine.tensor),
        "TensorE transposes from sbuf to psum",
    ),
    "transpose on scalar": (
        "trn2",
        lambda: nisa.nc_transpose(t(4, 8), t(8, 4), engine=nisa.engine.scalar),
        "tensor or vector",
    ),
    "transpose over two banks": (
        "trn2",
        lambda: nisa.nc_transpose(p(4, 1024)[:, 448:576], t(128, 4), engine=nisa.engine.tensor),
        "bytes 1792 to 2303 of its partitions; nc_transpose writes one PSUM bank",
    ),
    "transpose of integers on tensor": (
        "trn2",
        lambda: nisa.nc_transpose(p(4, 8, dtype=I32), t(8, 4, dtype=I32)),
        "data.dtype is int32; TensorE transposes bfloat16, float16, float32, tfloat32",
    ),
    "transpose of FP8 on tensor": (
        "trn3",
        lambda: nisa.nc_transpose(p(4, 8, dtype=F8), t(8, 4, dtype=F8)),
        "data.dtype is float8_e4m3; TensorE transposes",
    ),
    "dma transpose axes": ("trn2", lambda: nisa.dma_transpose(t(4, 8), h(8, 4), axes=(0, 1)), r"has to be \(1, 0\)"),
    "dma transpose shape": ("trn2", lambda: nisa.dma_transpose(t(8, 4), h(8, 4)), r"has to be \(4, 8\)"),
    "dma transpose of bytes": (
        "trn2",
        lambda: nisa.dma_transpose(t(4, 8, dtype=U8), h(8, 4, dtype=U8)),
        "has to be of 2 or 4 bytes",
    ),
    "dma transpose rows": (
        "trn2",
        lambda: nisa.dma_transpose(t(4, 8, dtype=BF16), h(8, 4, dtype=BF16), dge_mode=nisa.dge_mode.hwdge),
        "src's rows is 8; has to be 16",
    ),
    "dma transpose of 4 bytes": (
        "trn2",
        lambda: nisa.dma_transpose(t(4, 16), h(16, 4), dge_mode=nisa.dge_mode.hwdge),
        "has to be of 2 bytes",
    ),
    "dma transpose into hbm": ("trn2", lambda: nisa.dma_transpose(h(4, 8), h(8, 4)), "dst is in shared_hbm"),
    # elementwise
    "both in psum": (
        "trn2",
        lambda: nisa.tensor_tensor(t(4, 4), p(4, 4), p(4, 4), nl.add),
        "data1 and data2 is both in psum",
    ),
    "gpsimd on psum": (
        "trn2",
        lambda: nisa.tensor_tensor(p(4, 4), t(4, 4), t(4, 4), nl.add, engine=nisa.engine.gpsimd),
        "dst is in psum; GpSimd cannot access PSUM",
    ),
    "gpsimd on a scalar in psum": (
        "trn2",
        lambda: nisa.tensor_scalar(
            t(4, 4), t(4, 4), nl.add, 1.0, op1=nl.multiply, operand1=p(4, 1), engine=nisa.engine.gpsimd
        ),
        "operand1 is in psum; GpSimd cannot access PSUM",
    ),
    "power on vector": (
        "trn2",
        lambda: nisa.tensor_tensor(t(4, 4), t(4, 4), t(4, 4), nl.power, engine=nisa.engine.vector),
        "nl.power runs on gpsimd only",
    ),
    "power from psum": ("trn2", lambda: nisa.tensor_tensor(t(4, 4), p(4, 4), t(4, 4), nl.power), "GpSimd cannot"),
    "bits of floats": (
        "trn2",
        lambda: nisa.tensor_tensor(t(4, 4), t(4, 4), t(4, 4), nl.bitwise_and),
        "one integer dtype",
    ),
    "activation as ALU": ("trn2", lambda: nisa.tensor_tensor(t(4, 4), t(4, 4), t(4, 4), nl.exp), "nl.exp; is no ALU"),
    "scalar of bfloat16": (
        "trn2",
        lambda: nisa.tensor_scalar(t(4, 4), t(4, 4), nl.add, t(4, 1, dtype=BF16)),
        "operand0.dtype is bfloat16; has to be float32",
    ),
    "scalar of two columns": (
        "trn2",
        lambda: nisa.tensor_scalar(t(4, 4), t(4, 4), nl.add, t(4, 2)),
        r"operand0 is of shape \(4, 2\); has to be \[4, 1\]",
    ),
    "unary second": (
        "trn2",
        lambda: nisa.tensor_scalar(t(4, 4), t(4, 4), nl.add, 1.0, op1=nl.abs),
        "op1 is nl.abs; is no",
    ),
    "unary with a tile": (
        "trn2",
        lambda: nisa.scalar_tensor_tensor(t(4, 4), t(4, 4), nl.abs, None, nl.add, t(4, 4)),
        "op0 is nl.abs; is no ALU",
    ),
    "abs_max of tiles": ("trn3", lambda: nisa.tensor_tensor(t(4, 4), t(4, 4), t(4, 4), nl.abs_max), "op is nl.abs_max"),
    "mixed kinds": (
        "trn2",
        lambda: nisa.tensor_scalar(t(4, 4), t(4, 4), nl.add, 1.0, op1=nl.bitwise_or, operand1=1),
        "has to be of op0's kind",
    ),
    "operand without op": (
        "trn2",
        lambda: nisa.tensor_scalar(t(4, 4), t(4, 4), nl.add, 1.0, operand1=1.0),
        "without op1",
    ),
    "operand of a unary": ("trn2", lambda: nisa.tensor_scalar(t(4, 4), t(4, 4), nl.abs, 2.0), "nl.abs takes none"),
    "abs_max on trn2": (
        "trn2",
        lambda: nisa.tensor_scalar(t(4, 4), t(4, 4), nl.abs_max, 1.0),
        "nl.abs_max; needs gen4",
    ),
    "square on trn2": ("trn2", lambda: nisa.tensor_scalar(t(4, 4), t(4, 4), nl.square, None), "nl.square; needs gen4"),
    "rsqrt on vector": (
        "trn2",
        lambda: nisa.tensor_scalar(t(4, 4), t(4, 4), nl.rsqrt, None, engine=nisa.engine.vector),
        "engine is engine.vector; has to be gpsimd",
    ),
    "subtract on scalar engine": (
        "trn2",
        lambda: nisa.tensor_scalar(t(4, 4), t(4, 4), nl.subtract, 1.0, engine=nisa.engine.scalar),
        "engine is engine.scalar",
    ),
    "memset type": ("trn2", lambda: nisa.memset(t(4, 4, dtype=I32), 1.0), "value is 1.0; has to be an int"),
    "memset of a float": ("trn2", lambda: nisa.memset(t(4, 4), 1), "value is 1; has to be a float"),
    "memset of packed": ("trn3", lambda: nisa.memset(t(4, 4, dtype=X4), 1), "takes 0 only"),
    "copy of packed": (
        "trn3",
        lambda: nisa.tensor_copy(t(4, 4), t(4, 4, dtype=X4)),
        "packed types are copied as they are",
    ),
    "predicate dtype": (
        "trn2",
        lambda: nisa.tensor_copy_predicated(t(4, 4), 0.0, t(4, 4)),
        "predicate.dtype is float32",
    ),
    "predicated dtype": (
        "trn2",
        lambda: nisa.tensor_copy_predicated(t(4, 4), t(4, 4, dtype=BF16), t(4, 4, dtype=U8)),
        "src.dtype is bfloat16",
    ),
    "shuffle mask": ("trn2", lambda: nisa.nc_stream_shuffle(t(32, 4), t(32, 4), [32] * 32), "32 ints below 32, or 255"),
    "shuffle dtype": ("trn2", lambda: nisa.nc_stream_shuffle(t(32, 4), t(32, 4, dtype=BF16), [0] * 32), "src's dtype"),
    "bitwise scan": (
        "trn2",
        lambda: nisa.tensor_tensor_scan(t(4, 4), t(4, 4), t(4, 4), 0.0, nl.bitwise_or, nl.add),
        "op0 is nl.bitwise_or; has to be an arithmetic",
    ),
    # activations
    "ALU as activation": ("trn2", lambda: nisa.activation(t(4, 4), nl.maximum, t(4, 4)), "is no activation function"),
    "activation scale": (
        "trn2",
        lambda: nisa.activation(t(4, 4), nl.exp, t(4, 4), scale=t(4, 1, dtype=BF16)),
        "scale.dtype is bfloat16",
    ),
    "activation bias of a row": (
        "trn2",
        lambda: nisa.activation(t(4, 4), nl.exp, t(4, 4), bias=t(1, 4)),
        r"bias is of shape \(1, 4\); has to be \[4, 1\]",
    ),
    "activation bias of tf32": (
        "trn2",
        lambda: nisa.activation(t(4, 4), nl.exp, t(4, 4), bias=t(4, 1, dtype="tfloat32")),
        "bias.dtype is tfloat32",
    ),
    "activation maximum": (
        "trn2",
        lambda: nisa.activation_reduce(t(4, 4), nl.exp, t(4, 4), nl.maximum, t(4, 1)),
        "reduce_op is nl.maximum; has to be one of nl.add",
    ),
    "activation result": (
        "trn2",
        lambda: nisa.activation_reduce(t(4, 4), nl.exp, t(4, 4), nl.add, t(4, 2)),
        "reduce_res is of shape",
    ),
    "activation load": (
        "trn2",
        lambda: nisa.activation(t(4, 4), nl.exp, t(4, 4), reduce_cmd=nisa.reduce_cmd.load_reduce),
        "reduce_cmd is reduce_cmd.load_reduce",
    ),
    "exponential on trn2": (
        "trn2",
        lambda: nisa.exponential(t(4, 4), t(4, 4)),
        "exponential: target is trn2; needs gen4",
    ),
    "exponential reset": (
        "trn3",
        lambda: nisa.exponential(t(4, 4), t(4, 4), reduce_cmd=nisa.reduce_cmd.reset),
        "reduce_cmd is reduce_cmd.reset",
    ),
    "exponential init": ("trn3", lambda: nisa.exponential(t(4, 4), t(4, 4), reduce_init=1.0), "goes with load_reduce"),
    "exponential dims": ("trn3", lambda: nisa.exponential(t(4, 2, 2, 2, 2), t(4, 16)), "at most 4 dims"),
    # reductions
    "reduce over partitions": (
        "trn2",
        lambda: nisa.tensor_reduce(t(1, 4), nl.add, t(4, 4), 0),
        "axis is 0.*never dim 0",
    ),
    "reduce a middle dim": ("trn2", lambda: nisa.tensor_reduce(t(4, 4), nl.add, t(4, 2, 4), 1), "axis is 1.*trailing"),
    "reduce by abs_max": ("trn3", lambda: nisa.tensor_reduce(t(4, 1), nl.abs_max, t(4, 4), 1), "op is nl.abs_max"),
    "reduce result": ("trn2", lambda: nisa.tensor_reduce(t(4, 2), nl.add, t(4, 4), 1), r"has to be \[4, 1\]"),
    "reduce negated bits": (
        "trn2",
        lambda: nisa.tensor_reduce(t(4, 1, dtype=U8), nl.bitwise_or, t(4, 4, dtype=U8), 1, negate=True),
        "goes with arithmetic",
    ),
    "load_reduce without init": (
        "trn2",
        lambda: nisa.tensor_scalar_reduce(
            t(4, 4), t(4, 4), nl.add, 0.0, nl.add, t(4, 1), reduce_cmd=nisa.reduce_cmd.load_reduce
        ),
        "reduce_init is None; goes with load_reduce",
    ),
    "reverse0 of a reduction": (
        "trn2",
        lambda: nisa.tensor_scalar_reduce(t(4, 4), t(4, 4), nl.add, 0.0, nl.add, t(4, 1), reverse0=True),
        "reverse0 is True; is not supported",
    ),
    "subtracting reduction": (
        "trn2",
        lambda: nisa.tensor_scalar_reduce(t(4, 4), t(4, 4), nl.add, 0.0, nl.subtract, t(4, 1)),
        "reduce_op is nl.subtract",
    ),
    "bn_stats length": ("trn2", lambda: nisa.bn_stats(t(4, 6), t(4, 513)), "data's F is 513; at most 512"),
    "bn_stats result": ("trn2", lambda: nisa.bn_stats(t(4, 5), t(4, 16)), r"has to be \[4, 6\]"),
    "bn_aggr triples": ("trn2", lambda: nisa.bn_aggr(t(4, 2), t(4, 7)), "data's F is 7; has to be a multiple of 3"),
    # patterns and selects
    "iota in psum": ("trn2", lambda: nisa.iota(p(4, 4), [[1, 4]]), "iota: dst is in psum"),
    "iota count": ("trn2", lambda: nisa.iota(t(4, 4), [[1, 5]]), "has to cover F=4"),
    "iota dims": ("trn2", lambda: nisa.iota(t(4, 1), [[1, 1]] * 5), "one to four pairs"),
    "iota offset": (
        "trn2",
        lambda: nisa.iota(t(4, 4), [[1, 4]], offset=2**31),
        "offset is 2147483648; has to be a 32-bit",
    ),
    "affine_select from psum": (
        "trn2",
        lambda: nisa.affine_select(t(4, 4), [[1, 4]], 1, p(4, 4), 0.0),
        "affine_select: on_true_tile is in psum",
    ),
    "affine_select operator": (
        "trn2",
        lambda: nisa.affine_select(t(4, 4), [[1, 4]], 1, t(4, 4), 0.0, cmp_op=nl.add),
        "cmp_op is nl.add; has to be a comparison",
    ),
    "affine_select of a tile": (
        "trn2",
        lambda: nisa.affine_select(t(4, 4), [[1, 4]], 1, t(4, 4), t(4, 1)),
        "on_false_value is .*has to be a number",
    ),
    "select predicate": (
        "trn2",
        lambda: nisa.select_reduce(t(4, 4), t(4, 4), t(4, 4), 0.0),
        "predicate.dtype is float32; has to be int8",
    ),
    "select of int32": (
        "trn2",
        lambda: nisa.select_reduce(t(4, 4), t(4, 4, dtype=U8), t(4, 4, dtype=I32), 0.0),
        "on_true.dtype is int32",
    ),
    "select by sum": (
        "trn2",
        lambda: nisa.select_reduce(t(4, 4), t(4, 4, dtype=U8), t(4, 4), 0.0, reduce_op=nl.add),
        "reduce_op is nl.add; has to be one of nl.maximum",
    ),
    "range_select operator": (
        "trn2",
        lambda: nisa.range_select(t(4, 4), t(4, 4), nl.not_equal, nl.less, t(4, 1), t(4, 1)),
        "comp_op0 is nl.not_equal",
    ),
    "range_select value": (
        "trn2",
        lambda: nisa.range_select(t(4, 4), t(4, 4), nl.less, nl.less, t(4, 1), t(4, 1), on_false_value=0.0),
        "on_false_value is 0.0; has to be -3.4028235e[+]38",
    ),
    "range_select bound": (
        "trn2",
        lambda: nisa.range_select(t(4, 4), t(4, 4), nl.less, nl.less, 1.0, t(4, 1)),
        r"bound0 is 1.0; has to be a \[P, 1\]",
    ),
    # DMA
    "dma from psum": ("trn2", lambda: nisa.dma_copy(t(4, 4), p(4, 4)), "dma_copy: src is in psum"),
    "dma counts": ("trn2", lambda: nisa.dma_copy(t(4, 4), h(4, 5)), "dst is of 16 elements; has to have src's 20"),
    "dma cast with hwdge": (
        "trn2",
        lambda: nisa.dma_copy(t(4, 4, dtype=BF16), h(4, 4), dge_mode=nisa.dge_mode.hwdge),
        "packed types and hwdge do not cast",
    ),
    "dma cast of packed": ("trn3", lambda: nisa.dma_copy(t(4, 4, dtype=X4), h(4, 4)), "packed types and hwdge do not"),
    "dma priority on trn2": ("trn2", lambda: nisa.dma_copy(t(4, 4), h(4, 4), priority=1), "priority is 1; needs gen4"),
    "dma priority": ("trn3", lambda: nisa.dma_copy(t(4, 4), h(4, 4), priority=4), "priority is 4; has to be 0 to 3"),
    "dma engine": (
        "trn2",
        lambda: nisa.dma_copy(t(4, 4), h(4, 4), engine=nisa.engine.sync),
        "has to be sync or scalar, with hwdge",
    ),
    "dma skip": (
        "trn2",
        lambda: nisa.dma_copy(t(4, 4), h(4, 4), oob_mode=nisa.oob_mode.skip),
        "oob_mode is oob_mode.skip; goes with indirect",
    ),
    "dma gather beyond": (
        "trn2",
        lambda: nisa.dma_copy(t(1, 4), h(4, 4).ap([[4, 1], [1, 4]], vector_offset=nl.full((1, 1), 9, I32))),
        "an index leaves the tensor",
    ),
    "dma gather with hwdge": (
        "trn2",
        lambda: nisa.dma_copy(
            t(1, 4), h(4, 4).ap([[4, 1], [1, 4]], vector_offset=t(1, 1, dtype=I32)), dge_mode=nisa.dge_mode.hwdge
        ),
        "vector_offset needs swdge",
    ),
    "indirect compute": (
        "trn2",
        lambda: nisa.tensor_copy(t(1, 4), h(4, 4).ap([[4, 1], [1, 4]], vector_offset=t(1, 1, dtype=I32))),
        "in shared_hbm",
    ),
    "dma sum by maximum": ("trn2", lambda: nisa.dma_compute(t(4, 4), [h(4, 4)], nl.maximum), "reduce_op is nl.maximum"),
    "dma sum of 17": ("trn2", lambda: nisa.dma_compute(t(4, 4), [h(4, 4)] * 17, nl.add), "17 tensors; 1 to 16"),
    "dma scales": ("trn2", lambda: nisa.dma_compute(t(4, 4), [h(4, 4)], nl.add, scales=[2.0]), "have to be 1.0"),
    # MX
    "quantize_mx on trn2": (
        "trn2",
        lambda: nisa.quantize_mx(t(32, 4, dtype=X4), t(32, 16, dtype=BF16), t(4, 4, dtype=U8)),
        "quantize_mx: target is trn2; needs gen4",
    ),
    "quantize_mx source": (
        "trn3",
        lambda: nisa.quantize_mx(t(32, 4, dtype=X4), t(32, 16), t(4, 4, dtype=U8)),
        "src.dtype is float32; has to be float16 or bfloat16",
    ),
    "quantize_mx to FP4": (
        "trn3",
        lambda: nisa.quantize_mx(t(32, 4, dtype="float4_e2m1fn_x4"), t(32, 16, dtype=BF16), t(4, 4, dtype=U8)),
        "dst.dtype is float4_e2m1fn_x4",
    ),
    "quantize_mx partitions": (
        "trn3",
        lambda: nisa.quantize_mx(t(16, 4, dtype=X4), t(16, 16, dtype=BF16), t(2, 4, dtype=U8)),
        "src's partitions is 16; has to be 32, 64, 96 or 128",
    ),
    "quantize_mx F": (
        "trn3",
        lambda: nisa.quantize_mx(t(32, 4, dtype=X4), t(32, 18, dtype=BF16), t(4, 4, dtype=U8)),
        "src's F is 18; has to be a multiple of 4",
    ),
    "quantize_mx scales": (
        "trn3",
        lambda: nisa.quantize_mx(t(64, 4, dtype=X4), t(64, 16, dtype=BF16), t(8, 4, dtype=U8)),
        r"dst_scale is of shape \(8, 4\); has to be \[at least 36, 4\]",
    ),
    "matmul_mx K": (
        "trn3",
        lambda: mx(p(4, 4), t(16, 4, dtype=X4), t(16, 4, dtype=X4), t(4, 4, dtype=U8), t(4, 4, dtype=U8)),
        "stationary's K is 16; a multiple of 32",
    ),
    "matmul_mx M": (
        "trn3",
        lambda: mx(p(3, 4), t(32, 3, dtype=X4), t(32, 4, dtype=X4), t(4, 3, dtype=U8), t(4, 4, dtype=U8)),
        "M is 3; has to be even",
    ),
    "matmul_mx scale start": (
        "trn3",
        lambda: mx(p(4, 4), t(32, 4, dtype=X4), t(32, 4, dtype=X4), t(32, 4, dtype=U8)[2:6], t(4, 4, dtype=U8)),
        "stationary_scale's first partition is 2; 0, 4, 8 or 12",
    ),
    "matmul_mx of plain FP8": (
        "trn3",
        lambda: mx(p(4, 4), t(32, 4, dtype=F8), t(32, 4, dtype=X4), t(4, 4, dtype=U8), t(4, 4, dtype=U8)),
        "stationary.dtype is float8_e4m3",
    ),
    "packed arithmetic": ("trn3", lambda: nisa.reciprocal(t(4, 4), t(4, 4, dtype=X4)), "packed types go to MX"),
    # two cores
    "barrier on one core": (
        "trn2",
        lambda: nisa.core_barrier(h(4, 4), (0, 1)),
        "lnc is 1; needs a launch on two cores",
    ),
    "sendrecv on one core": ("trn2", lambda: nisa.sendrecv(t(4, 4), t(4, 4), 1, 1, 0), "lnc is 1"),
    # collectives, on one rank
    "collective in psum": ("trn2", lambda: ncc.all_reduce([p(4, 4)], [p(4, 4)], group(0), nl.add), "in psum"),
    "collective of two memories": (
        "trn2",
        lambda: ncc.all_reduce([t(4, 4)], [h(4, 4)], group(0), nl.add),
        "all are in one kind of memory",
    ),
    "collective of a tensor": ("trn2", lambda: ncc.all_reduce(h(4), [h(4)], group(0), nl.add), "a list of tensors"),
    "collective counts": ("trn2", lambda: ncc.all_reduce([h(4)], [h(4), h(4)], group(0), nl.add), "as many as srcs, 1"),
    "collective dtypes": (
        "trn2",
        lambda: ncc.all_reduce([h(4)], [h(4, dtype=BF16)], group(0), nl.add),
        "has to have src's dtype float32",
    ),
    "all_reduce by product": (
        "trn2",
        lambda: ncc.all_reduce([h(4)], [h(4)], group(0), nl.multiply),
        "op is nl.multiply",
    ),
    "coalesced in sbuf": (
        "trn2",
        lambda: ncc.all_reduce([t(4, 4)] * 2, [t(4, 4)] * 2, group(0), nl.add),
        "coalesced collectives are in HBM only",
    ),
    "all_gather dim": (
        "trn2",
        lambda: ncc.all_gather([h(4, 4)], [h(4, 4)], group(0), 1),
        "collective_dim is 1; has to be 0",
    ),
    "all_gather dims in sbuf": (
        "trn2",
        lambda: ncc.all_gather([t(4, 2, 2)], [t(4, 2, 2)], group(0), 1),
        "are 2-D in SBUF",
    ),
    "all_gather shape": ("trn2", lambda: ncc.all_gather([h(4)], [h(8)], group(0), 0), r"has to be \(4,\) for 1 ranks"),
    "reduce_scatter shape": (
        "trn2",
        lambda: ncc.reduce_scatter([h(4)], [h(3)], group(0), 0, nl.add),
        "has to be a 1th of src's",
    ),
    "all_to_all in sbuf": ("trn2", lambda: ncc.all_to_all([t(4, 4)], [t(4, 4)], group(0), 0), "has to be in HBM"),
    "permute in sbuf": ("trn2", lambda: ncc.collective_permute([t(4, 4)], [t(4, 4)], [(0, 0)]), "has to be in HBM"),
    "permute of two": ("trn2", lambda: ncc.collective_permute([h(4)] * 2, [h(4)] * 2, [(0, 0)]), "at most 1"),
    "permute targets": (
        "trn2",
        lambda: ncc.collective_permute([h(4)], [h(4)], [(0, 0), (0, 0)]),
        "have to be distinct ranks",
    ),
    "channels": (
        "trn2",
        lambda: ncc.collective_permute_implicit([h(4)], [h(4)], group(0), channel_ids=[1]),
        r"channel_ids is \[1\]; has to be 0 to 0",
    ),
    "collective of a gather": (
        "trn2",
        lambda: ncc.all_reduce(
            [h(4, 4).ap([[4, 1], [1, 4]], vector_offset=t(1, 1, dtype=I32))], [h(1, 4)], group(0), nl.add
        ),
        "collectives take plain views",
    ),
    "five channels": (
        "trn2",
        lambda: ncc.collective_permute_implicit([h(4)] * 5, [h(4)] * 5, group(0), channel_ids=list(range(5))),
        "at most 4 channels",
    ),
    "collective priority": (
        "trn2",
        lambda: ncc.all_reduce([h(4)], [h(4)], group(0), nl.add, priority=0),
        "priority is 0; needs gen4",
    ),
    "unknown rank": ("trn2", lambda: ncc.all_reduce([h(4)], [h(4)], group(0, 1), nl.add), r"names ranks \[1\] of 1"),
    "overlapping groups": ("trn2", lambda: ncc.ReplicaGroup([[0, 1], [1]]), "disjoint"),
    "group as a list": ("trn2", lambda: ncc.all_reduce([h(4)], [h(4)], [[0]], nl.add), "ncc.ReplicaGroup"),
    "write to rank_id": ("trn2", lambda: nisa.register_move(ncc.rank_id(), 3), "frozen register"),
}


@pytest.mark.parametrize("name", PROBES)
def test_the_constraint_is_checked(name):
    target, body, message = PROBES[name]

    def kernel():
        body()

    with pytest.raises(NkiValidationError) as error:
        probe.run(kernel, target=target)
    assert re.search(message, str(error.value)), str(error.value)


def test_there_are_enough_probes():
    assert len(PROBES) >= 60


@pytest.mark.parametrize("name", PROBES)
def test_checks_need_no_data(name):
    # What only the data tells is not known where nothing is executed.
    if name in ("runtime offset beyond", "dma gather beyond", "accumulate on fresh memory", "accumulate on a memset",
                "packed arithmetic"):  # fmt: skip
        return
    target, body, message = PROBES[name]

    def kernel():
        body()

    with pytest.raises(NkiValidationError, match=message):
        probe.run(kernel, target=target, execute=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([np.ones(4, np.float32)],), "argument x is a list; kernels take tuples"),
        ((np.ones(4),), "float64; NKI has"),
        ((np.ones((4, 4), np.float32).T,), "arguments are C-contiguous"),
        ((np.float32(1)[None][:0],), "at least one element"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(NkiValidationError, match=message):
        probe.run(lambda x: None, *arguments)


def test_results_are_in_shared_hbm():
    with pytest.raises(NkiValidationError, match="returned tensors are in shared_hbm"):
        probe.run(lambda: tile((4, 4)))


def test_instructions_run_in_kernels_only():
    with pytest.raises(NkiValidationError, match="called outside of a kernel"):
        nl.ndarray((4, 4), "float32")


def test_versions_gate_what_changed():
    def body():
        nisa.quantize_mx(t(32, 4, dtype=X4), t(32, 16, dtype=BF16), t(4, 4, dtype="float8_e8m0fnu"))

    with pytest.raises(NkiValidationError, match=r"exists from NKI 0.5 on, this is 0.4.0"):
        probe.run(body, target="trn3", nki_version="0.4.0")

    def silent():
        nisa.tensor_scalar_reduce(t(4, 4), t(4, 4), nl.add, 0.0, nl.add)

    with pytest.raises(NkiValidationError, match=r"optional from NKI 0.6 on, this is 0.5.0"):
        probe.run(silent, nki_version="0.5.0")
    with pytest.raises(NkiValidationError, match=r"nki_version is '0\.9\.0'"):
        probe.run(silent, nki_version="0.9.0")
    with pytest.raises(NkiValidationError, match=r"trn1. is not simulated"):
        probe.run(silent, target="trn1")


@pytest.mark.parametrize(
    "call",
    [
        lambda a: a.slice(1, 0, 2),
        lambda a: a.select(1, 0),
        lambda a: a.permute((0, 1)),
        lambda a: a[:, 0:1].broadcast(1, 2),
        lambda a: a.expand_dim(1),
        lambda a: a.reshape_dim(1, (2, 2)),
        lambda a: a.flatten_dims(1, 1),
        lambda a: a.rearrange(("p", "f"), ("p", "f")),
    ],
)
def test_views_by_method_came_with_nki_5(call):
    def body():
        call(t(4, 4))

    probe.run(body, nki_version="0.5.0")
    with pytest.raises(NkiValidationError, match=r"exists from NKI 0.5 on, this is 0.3.0; use ap or an index"):
        probe.run(body, nki_version="0.3.0")


def test_live_capacity_is_checked_on_request():
    def body():
        kept = [t(128, 16384) for _ in range(4)]
        assert len(kept) == 4

    probe.run(body)
    with pytest.raises(NkiValidationError, match="live sbuf bytes per partition is 262144; trn2 has 229376"):
        probe.run(body, check_live_capacity=True)
