# SPDX-License-Identifier: Apache-2.0
"""Each instruction computes its formula. Constraints are in test_nkisim_refusals, MX in test_nkisim_mx."""

import math

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import nkisim_probe as probe
import numpy as np
import pytest
from nkisim_probe import load, normal, store, through, tile

ALU = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "less": np.less,
    "greater_equal": np.greater_equal,
    "logical_xor": lambda x, y: np.logical_xor(x != 0, y != 0),
}


@pytest.mark.parametrize("name", ALU)
def test_tensor_tensor(name):
    x, y = normal(8, 12), normal(8, 12, seed=1)
    x[:, ::3], y[:, ::4] = 0, 0
    got = through(lambda dst, a, b: nisa.tensor_tensor(dst, a, b, getattr(nl, name)), x, y)
    np.testing.assert_array_equal(got, ALU[name](x, y).astype(np.float32))


def test_tensor_tensor_on_integers_is_exact_on_gpsimd_and_float32_on_vector():
    x = np.full((4, 4), 2**24, np.int32)
    y = np.ones((4, 4), np.int32)
    exact = through(lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.add), x, y)
    rounded = through(lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.add, engine=nisa.engine.vector), x, y)
    assert (exact == 2**24 + 1).all()
    assert (rounded == 2**24).all()


def test_bitwise_operators():
    x = np.arange(32, dtype=np.uint8).reshape(4, 8)
    got = through(lambda dst, a: nisa.tensor_tensor(dst, a, a, nl.bitwise_xor), x)
    assert (got == 0).all()
    shifted = through(lambda dst, a: nisa.tensor_scalar(dst, a, nl.left_shift, 2, op1=nl.bitwise_or, operand1=1), x)
    np.testing.assert_array_equal(shifted, (x << 2) | 1)


def test_power_runs_on_gpsimd():
    x = np.abs(normal(4, 4)) + 0.5
    got = through(lambda dst, a, b: nisa.tensor_tensor(dst, a, b, nl.power), x, x)
    np.testing.assert_allclose(got, x**x, rtol=1e-6)


def test_tensor_scalar_with_numbers_rows_and_reversed_operands():
    x, row = normal(8, 6), normal(8, 1, seed=1)
    got = through(lambda dst, a, r: nisa.tensor_scalar(dst, a, nl.subtract, r, op1=nl.multiply, operand1=3.0), x, row)
    np.testing.assert_allclose(got, (x - row) * 3, rtol=1e-6)
    back = through(lambda dst, a: nisa.tensor_scalar(dst, a, nl.subtract, 1.0, reverse0=True), x)
    np.testing.assert_allclose(back, 1 - x, rtol=1e-6)


def test_tensor_scalar_unary_operators():
    x = normal(4, 8)
    np.testing.assert_array_equal(through(lambda dst, a: nisa.tensor_scalar(dst, a, nl.abs, 0.0), x), np.abs(x))
    root = through(lambda dst, a: nisa.tensor_scalar(dst, a, nl.rsqrt, None), np.abs(x) + 1)
    np.testing.assert_allclose(root, 1 / np.sqrt(np.abs(x) + 1), rtol=1e-6)
    squared = through(lambda dst, a: nisa.tensor_scalar(dst, a, nl.square, None), x, target="trn3")
    np.testing.assert_array_equal(squared, x * x)


def test_scalar_tensor_tensor():
    x, y = normal(8, 6), normal(8, 6, seed=1)
    got = through(lambda dst, a, b: nisa.scalar_tensor_tensor(dst, a, nl.multiply, 2.0, nl.subtract, b), x, y)
    np.testing.assert_allclose(got, 2 * x - y, rtol=1e-6)
    got = through(
        lambda dst, a, b: nisa.scalar_tensor_tensor(dst, a, nl.multiply, 2.0, nl.subtract, b, reverse1=True), x, y
    )
    np.testing.assert_allclose(got, y - 2 * x, rtol=1e-6)


def test_reciprocal_and_copies():
    x = normal(8, 6)
    np.testing.assert_allclose(through(nisa.reciprocal, x), 1 / x, rtol=1e-6)
    rounded = through(nisa.tensor_copy, x, dtype="bfloat16")
    np.testing.assert_array_equal(rounded, x.astype(ml_dtypes.bfloat16))
    to_int = through(nisa.tensor_copy, np.array([[0.5, 1.5, -2.5, 300.0, -300.0, np.nan]], np.float32), dtype="int8")
    assert to_int.tolist() == [[0, 2, -2, 127, -128, 0]]


def test_tensor_copy_reorders_within_a_partition():
    x = normal(4, 6)
    got = through(lambda dst, a: nisa.tensor_copy(dst, a.reshape((4, 2, 3)).permute((0, 2, 1))), x, shape=(4, 3, 2))
    np.testing.assert_array_equal(got, x.reshape(4, 2, 3).transpose(0, 2, 1))


def test_tensor_copy_predicated_leaves_the_rest():
    x, p = normal(4, 6), (np.arange(24).reshape(4, 6) % 2).astype(np.uint8)

    def body(a, predicate):
        dst = nl.full((4, 6), 7.0, "float32")
        nisa.tensor_copy_predicated(dst, load(a), load(predicate))
        return store(dst)

    np.testing.assert_array_equal(probe.run(body, x, p), np.where(p, x, 7))


def test_memset_and_poison():
    def body():
        a, b, c = tile((4, 3)), tile((4, 3), "int32"), tile((4, 3), "bfloat16")
        nisa.memset(c, 2.5)
        return store(a), store(b), store(c)

    fresh, integers, filled = probe.run(body)
    assert np.isnan(fresh).all()
    assert (integers == 4).all()
    assert (filled == 2.5).all()


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("copy", lambda x: x),
        ("square", np.square),
        ("sigmoid", lambda x: 1 / (1 + np.exp(-x))),
        ("relu", lambda x: np.maximum(x, 0)),
        ("gelu", lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))),
        ("gelu_apprx_tanh", lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ("gelu_apprx_sigmoid", lambda x: x / (1 + np.exp(-1.702 * x))),
        ("silu", lambda x: x / (1 + np.exp(-x))),
        ("tanh", np.tanh),
        ("softplus", lambda x: np.log1p(np.exp(x))),
        ("mish", lambda x: x * np.tanh(np.log1p(np.exp(x)))),
        ("erf", np.vectorize(math.erf)),
        ("exp", np.exp),
        ("sign", np.sign),
        ("abs", np.abs),
        ("sin", np.sin),
    ],
)
def test_activation_functions(name, formula):
    x = np.clip(normal(8, 40), -3, 3)
    if name != "sin":
        x[:, 0] = -14  # where 1 + tanh and 1 + erf cancel in float32
    got = through(lambda dst, a: nisa.activation(dst, getattr(nl, name), a), x)
    np.testing.assert_allclose(got, formula(x.astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("name", ["gelu_dx", "silu_dx", "erf_dx"])
def test_derivatives_match_their_functions(name):
    x, step = np.clip(normal(2, 16), -3, 3), 1e-2

    def at(values, op):
        return through(lambda dst, a: nisa.activation(dst, op, a), values.astype(np.float32)).astype(np.float64)

    function = getattr(nl, name.removesuffix("_dx"))
    slope = (at(x + step, function) - at(x - step, function)) / (2 * step)
    np.testing.assert_allclose(at(x, getattr(nl, name)), slope, atol=2e-4)


def test_activations_outside_their_range_are_nan():
    x = np.array([[2.0**-65, 1.0, -1.0, 4.0]], np.float32)
    for name, valid in (("log", [0, 1, 0, 1]), ("sin", [1, 1, 1, 0]), ("sqrt", [1, 1, 0, 1]), ("rsqrt", [1, 1, 0, 1])):
        op = getattr(nl, name)
        got = through(lambda dst, a, op=op: nisa.activation(dst, op, a), x)
        assert np.isfinite(got[0]).tolist() == [bool(v) for v in valid], name


def test_activation_scales_biases_and_sums_over_calls():
    x, bias = normal(8, 6), normal(8, 1, seed=1)

    def body(a, b):
        data, row, y, total = load(a), load(b), tile((8, 6)), tile((8, 1))
        nisa.activation(y, nl.exp, data, bias=row, scale=0.5, reduce_op=nl.add, reduce_cmd=nisa.reduce_cmd.reset_reduce)
        nisa.activation(
            y, nl.exp, data, bias=row, scale=0.5, reduce_op=nl.add, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reduce
        )
        return store(y), store(total)

    y, total = probe.run(body, x, bias)
    wanted = np.exp(x * 0.5 + bias)
    np.testing.assert_allclose(y, wanted, rtol=1e-6)
    np.testing.assert_allclose(total, 2 * wanted.sum(1, keepdims=True), rtol=1e-6)


def test_activation_reduce():
    x = normal(8, 6)

    def body(a):
        y, total = tile((8, 6)), tile((8, 1))
        nisa.activation_reduce(y, nl.square, load(a), nl.add, total)
        return store(total)

    np.testing.assert_allclose(probe.run(body, x), np.square(x).sum(1, keepdims=True), rtol=1e-6)


def test_exponential_accumulates():
    x = normal(8, 6)

    def body(a):
        data, top, y, total = load(a), tile((8, 1)), tile((8, 6)), tile((8, 1))
        nisa.tensor_reduce(top, nl.maximum, data, 1)
        nisa.exponential(y, data, top, reduce_cmd=nisa.reduce_cmd.reset_reduce)
        nisa.exponential(y, data, top, total, nisa.reduce_cmd.reduce)
        return store(y), store(total)

    y, total = probe.run(body, x, target="trn3")
    wanted = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(y, wanted, rtol=1e-6)
    np.testing.assert_allclose(total, 2 * wanted.sum(1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize(("name", "formula"), [("add", np.sum), ("maximum", np.max), ("multiply", np.prod)])
def test_tensor_reduce(name, formula):
    x = normal(8, 12)
    got = through(
        lambda dst, a: nisa.tensor_reduce(dst, getattr(nl, name), a.reshape((8, 3, 4)), 2, negate=True), x, shape=(8, 3)
    )
    np.testing.assert_allclose(got, -formula(x.reshape(8, 3, 4), axis=2), rtol=1e-5)


def test_tensor_reduce_over_two_dims_and_with_subtract():
    x = normal(4, 6)
    both = through(
        lambda dst, a: nisa.tensor_reduce(dst, nl.add, a.reshape((4, 2, 3)), (1, 2), keepdims=True), x, shape=(4, 1)
    )
    np.testing.assert_allclose(both, x.sum(1, keepdims=True), rtol=1e-5)
    rest = through(lambda dst, a: nisa.tensor_reduce(dst, nl.subtract, a, 1), x, shape=(4, 1))
    np.testing.assert_allclose(rest[:, 0], x[:, 0] - x[:, 1:].sum(1), rtol=1e-5, atol=1e-6)


def test_tensor_scalar_reduce_takes_the_largest_magnitude_over_chunks():
    x = normal(8, 12)

    def body(a):
        data, y, top = load(a), tile((8, 6)), tile((8, 1))
        nisa.tensor_scalar_reduce(y, data[:, 0:6], nl.abs, 0.0, nl.maximum, top)
        nisa.tensor_scalar_reduce(
            y, data[:, 6:12], nl.abs, 0.0, nl.maximum, top, reduce_cmd=nisa.reduce_cmd.reduce, reduce_res_negate=True
        )
        return store(top)

    np.testing.assert_array_equal(probe.run(body, x), -np.abs(x).max(1, keepdims=True))


def test_an_idle_reduction_leaves_the_accumulator_unknown():
    def body(a):
        data, y, top = load(a), tile((8, 6)), tile((8, 1))
        nisa.tensor_scalar_reduce(y, data, nl.abs, 0.0, nl.add, top)
        nisa.select_reduce(y, load(a, dtype="uint8"), data, 0.0)
        nisa.tensor_scalar_reduce(y, data, nl.abs, 0.0, nl.add, top, reduce_cmd=nisa.reduce_cmd.reduce)
        return store(top)

    assert np.isnan(probe.run(body, np.ones((8, 6), np.float32))).all()


def test_load_reduce_starts_from_a_value():
    def body(a):
        y, total = tile((8, 6)), tile((8, 1))
        nisa.tensor_scalar_reduce(
            y, load(a), nl.add, 1.0, nl.add, total, reduce_cmd=nisa.reduce_cmd.load_reduce, reduce_init=100.0
        )
        return store(total)

    assert (probe.run(body, np.ones((8, 6), np.float32)) == 112).all()


@pytest.mark.parametrize("free", [7, 512])
def test_batch_statistics(free):
    x = normal(8, free)

    def body(a):
        stats, both = tile((8, 6)), tile((8, 2))
        nisa.bn_stats(stats, load(a))
        nisa.bn_aggr(both, stats)
        return store(stats), store(both)

    stats, both = probe.run(body, x)
    even = x[:, ::2]
    wanted = np.stack([np.full(8, even.shape[1]), even.mean(1), even.var(1) * even.shape[1]], 1)
    np.testing.assert_allclose(stats[:, :3], wanted, rtol=1e-4)
    np.testing.assert_allclose(both, np.stack([x.mean(1), x.var(1)], 1), rtol=1e-4, atol=1e-5)


def test_tensor_tensor_scan():
    x, y = normal(4, 7), normal(4, 7, seed=1)
    got = through(lambda dst, a, b: nisa.tensor_tensor_scan(dst, a, b, 0.5, nl.multiply, nl.add), x, y)
    state, wanted = np.full(4, 0.5), []
    for column in range(7):
        state = x[:, column] * state + y[:, column]
        wanted.append(state)
    np.testing.assert_allclose(got, np.stack(wanted, 1), rtol=1e-5, atol=1e-6)


def test_stream_shuffle_within_quadrants():
    x = normal(64, 4)
    mask = [(n + 1) % 32 for n in range(31)] + [255]

    def body(a):
        dst = nl.full((64, 4), -1.0, "float32")
        nisa.nc_stream_shuffle(dst, load(a), mask)
        return store(dst)

    got = probe.run(body, x)
    np.testing.assert_array_equal(got[:31], x[1:32])
    np.testing.assert_array_equal(got[32:63], x[33:64])
    assert (got[[31, 63]] == -1).all()


def test_iota():
    got = through(
        lambda dst, a: nisa.iota(dst, [[10, 2], [1, 3]], offset=5, channel_multiplier=100),
        np.zeros((4, 6), np.int32),
    )
    wanted = 5 + 100 * np.arange(4)[:, None] + (10 * np.arange(2)[:, None] + np.arange(3)).reshape(-1)
    np.testing.assert_array_equal(got, wanted)


def test_affine_select_makes_a_causal_mask():
    x = normal(8, 8)
    got = through(lambda dst, a: nisa.affine_select(dst, [[-1, 8]], 1, a, -1e30, cmp_op=nl.greater_equal, offset=2), x)
    np.testing.assert_array_equal(got, np.where(np.arange(8)[:, None] + 2 >= np.arange(8), x, np.float32(-1e30)))


def test_select_reduce():
    x, p = normal(8, 6), (np.arange(48).reshape(8, 6) % 3 == 0).astype(np.uint8)

    def body(a, predicate):
        y, top = tile((8, 6)), tile((8, 1))
        nisa.select_reduce(y, load(predicate), load(a), -9.0, top, nisa.reduce_cmd.reset_reduce)
        return store(y), store(top)

    y, top = probe.run(body, x, p)
    np.testing.assert_array_equal(y, np.where(p, x, -9))
    np.testing.assert_array_equal(top, y.max(1, keepdims=True))


def test_range_select():
    x = normal(4, 10)
    low, high = np.array([[0], [2], [5], [20]], np.float32), np.array([[10], [4], [6], [30]], np.float32)

    def body(a, start, end):
        y, top = tile((4, 10)), tile((4, 1))
        nisa.range_select(y, load(a), nl.greater_equal, nl.less, load(start), load(end), reduce_res=top)
        return store(y), store(top)

    y, top = probe.run(body, x, low, high)
    keep = (np.arange(10) >= low) & (np.arange(10) < high)
    np.testing.assert_array_equal(y, np.where(keep, x, np.float32(-3.4028235e38)))
    np.testing.assert_array_equal(top, y.max(1, keepdims=True))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3])
def test_matmul(dtype):
    left, right = normal(96, 64).astype(dtype), normal(96, 200, seed=1).astype(dtype)
    got = through(
        lambda dst, a, b: nisa.nc_matmul(dst, a, b, accumulate=False), left, right, shape=(64, 200), dtype="float32",
        into="psum",
    )  # fmt: skip
    np.testing.assert_allclose(got, left.astype(np.float64).T @ right.astype(np.float64), rtol=1e-4, atol=1e-4)


def test_matmul_double_row_contracts_two_rows():
    left = normal(64, 2, 32).astype(ml_dtypes.float8_e4m3)
    right = normal(64, 2, 48, seed=1).astype(ml_dtypes.float8_e4m3)
    mode = nisa.matmul_perf_mode.double_row
    got = through(
        lambda dst, a, b: nisa.nc_matmul(dst, a, b, accumulate=False, perf_mode=mode), left, right, shape=(32, 48),
        dtype="float32", into="psum",
    )  # fmt: skip
    wanted = np.einsum("kjm,kjn->mn", left.astype(np.float64), right.astype(np.float64))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_matmul_accumulates():
    x = normal(32, 16)

    def body(a):
        data = load(a)
        added, first, over = (tile((16, 16), "float32", nl.psum) for _ in range(3))
        nisa.nc_matmul(added, data, data, accumulate=False)
        nisa.nc_matmul(added, data, data, accumulate=True)
        nisa.nc_matmul(first[:, 0:8], data, data[:, 0:8])  # the first write of each place overwrites
        nisa.nc_matmul(first, data, data)
        nisa.nc_matmul(over, data, data, accumulate=False)
        nisa.nc_matmul(over, data, data, accumulate=False)
        return store(added), store(first), store(over)

    once = x.T @ x
    added, first, over = probe.run(body, x)
    np.testing.assert_allclose(added, 2 * once, rtol=1e-5)
    np.testing.assert_allclose(first[:, :8], 2 * once[:, :8], rtol=1e-5)
    np.testing.assert_allclose(first[:, 8:], once[:, 8:], rtol=1e-5)
    np.testing.assert_allclose(over, once, rtol=1e-5)


def test_transposes_keep_bits():
    x = normal(100, 50)
    x[3, 4] = np.nan
    got = through(nisa.nc_transpose, x, shape=(50, 100), into="psum")
    assert got.tobytes() == np.ascontiguousarray(x.T).tobytes()
    small = normal(16, 32)
    got = through(nisa.nc_transpose, small, shape=(32, 16))
    np.testing.assert_array_equal(got, small.T)
    got = through(lambda dst, a: nisa.nc_transpose(dst, a.reshape((8, 2, 3))), normal(8, 6), shape=(6, 8))
    np.testing.assert_array_equal(got, normal(8, 6).T)


@pytest.mark.parametrize(
    ("shape", "axes"), [((24, 16), (1, 0)), ((8, 4, 16), (2, 1, 0)), ((8, 3, 4, 16), (3, 1, 2, 0))]
)
def test_dma_transpose(shape, axes):
    x = normal(*shape).astype(ml_dtypes.bfloat16)

    def body(a):
        dst = tile(tuple(shape[axis] for axis in axes), "bfloat16")
        nisa.dma_transpose(dst, a, axes)
        return store(dst)

    np.testing.assert_array_equal(probe.run(body, x), x.transpose(axes))


def test_dma_copy_casts_broadcasts_and_gathers():
    x, rows = normal(16, 8), np.array([[3], [0], [15], [3]], np.uint32)

    def body(a, indices):
        wide, picked = tile((32, 8), "bfloat16"), tile((4, 8))
        nisa.dma_copy(wide, a.ap([[0, 32], [1, 8]], offset=16))
        nisa.dma_copy(picked, a.ap([[8, 4], [1, 8]], vector_offset=load(indices)))
        return store(wide), store(picked)

    wide, picked = probe.run(body, x, rows)
    np.testing.assert_array_equal(wide, np.broadcast_to(x[2].astype(ml_dtypes.bfloat16), (32, 8)))
    np.testing.assert_array_equal(picked, x[rows[:, 0]])


def test_dma_copy_scatters_and_skips_what_is_outside():
    x, rows = normal(3, 4), np.array([[1], [99], [0]], np.uint32)

    def body(a, indices, out):
        nisa.dma_copy(out.ap([[4, 3], [1, 4]], vector_offset=load(indices)), load(a), oob_mode=nisa.oob_mode.skip)

    out = np.zeros((5, 4), np.float32)
    probe.run(body, x, rows, out)
    np.testing.assert_array_equal(out[:2], x[[2, 0]])
    assert (out[2:] == 0).all()


def test_dma_copy_gathers_and_keeps_what_is_outside():
    def body(a, indices):
        dst = nl.full((3, 4), 5.0, "float32")
        nisa.dma_copy(dst, a.ap([[4, 3], [1, 4]], vector_offset=load(indices)), oob_mode=nisa.oob_mode.skip)
        return store(dst)

    x = normal(3, 4)
    got = probe.run(body, x, np.array([[2], [77], [1]], np.uint32))
    np.testing.assert_array_equal(got, np.stack([x[2], np.full(4, 5, np.float32), x[1]]))


def test_dma_compute_adds():
    x, y = normal(8, 4), normal(8, 4, seed=1)
    got = through(lambda dst, a, b: nisa.dma_compute(dst, [a, b, a], nl.add), x, y)
    np.testing.assert_allclose(got, 2 * x + y, rtol=1e-6, atol=1e-6)


def test_registers_choose_at_run_time():
    x, which = normal(6, 4), np.array([[4]], np.int32)

    def body(a, index):
        register, moved, row = nisa.register_alloc(), nisa.register_alloc(0), tile((1, 4))
        nisa.register_load(register, index)
        nisa.register_move(moved, register)
        nisa.dma_copy(row, a.ap([[4, 1], [1, 4]], scalar_offset=moved))
        number = tile((1, 1), "int32")
        nisa.register_store(number, register)
        return store(row), store(number)

    row, number = probe.run(body, x, which)
    np.testing.assert_array_equal(row[0], x[4])
    assert number.item() == 4


def test_in_place_arguments_show(tmp_path):
    torch = pytest.importorskip("torch")

    def body(a):
        data = load(a)
        nisa.tensor_scalar(data, data, nl.multiply, 2.0)
        nisa.dma_copy(a, data)
        return a

    array, tensor = np.ones((4, 4), np.float32), torch.ones(4, 4, dtype=torch.bfloat16)
    assert (probe.run(body, array) == 2).all()
    assert (array == 2).all()
    result = probe.run(body, tensor)
    assert isinstance(result, torch.Tensor) and result.dtype is torch.bfloat16
    assert (tensor == 2).all()
