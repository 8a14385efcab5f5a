# SPDX-License-Identifier: Apache-2.0
"""Views agree with NumPy's, in HBM and on chip; dtypes cast as documented."""

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import nkisim_probe as probe
import numpy as np
import pytest
from nkisim_probe import load, normal, store, through, tile

from omni_neuron_nkisim import NkiValidationError
from omni_neuron_nkisim.dtypes import DTYPES, cast, pack, round_to_tf32, unpack
from omni_neuron_nkisim.layout import reshaped_strides, row_major

X = normal(4, 6, 10)
VIEWS = {
    "slices": (lambda t: t[1:3, ::2, 3:], X[1:3, ::2, 3:]),
    "negative": (lambda t: t[:, -2:, -4:-1], X[:, -2:, -4:-1]),
    "ellipsis": (lambda t: t[..., 4:7], X[..., 4:7]),
    "slice": (lambda t: t.slice(2, 1, 9, 3), X[:, :, 1:9:3]),
    "ds": (lambda t: t[:, nl.ds(2, 3)], X[:, 2:5]),
    "select": (lambda t: t.select(1, 2), X[:, 2]),
    "permute": (lambda t: t.permute((0, 2, 1)), X.transpose(0, 2, 1)),
    "broadcast": (lambda t: t[:, 0:1].broadcast(1, 5), np.broadcast_to(X[:, 0:1], (4, 5, 10))),
    "expand and squeeze": (lambda t: t.expand_dim(1).squeeze_dim(1), X),
    "reshape_dim": (lambda t: t.reshape_dim(2, (2, -1)), X.reshape(4, 6, 2, 5)),
    "flatten_dims": (lambda t: t.flatten_dims(1, 2), X.reshape(4, 60)),
    "reshape": (lambda t: t.reshape((4, 3, 20)), X.reshape(4, 3, 20)),
    "reshape of a slice": (lambda t: t[:, :, 0:4].reshape((4, 6, 2, 2)), X[:, :, 0:4].reshape(4, 6, 2, 2)),
    "rearrange": (
        lambda t: t.rearrange(("p", ("a", "b"), "c"), ("p", "b", ("a", "c")), {"a": 1}),
        X.reshape(4, 1, 6, 10).transpose(0, 2, 1, 3).reshape(4, 6, 10),
    ),
    "rearrange and split": (
        lambda t: t.rearrange(("p", "a", ("b", "c")), ("p", "c", "a", "b"), {"b": 2}),
        X.reshape(4, 6, 2, 5).transpose(0, 3, 1, 2),
    ),
    "ap": (lambda t: t.ap([[60, 4], [1, 3], [10, 6]], offset=2), X[:, :, 2:5].transpose(0, 2, 1)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_numpys(name):
    make, wanted = VIEWS[name]

    def body(a):
        whole = load(a)
        in_hbm, on_chip = make(a), make(whole)
        assert in_hbm.shape == on_chip.shape == wanted.shape
        first, second = tile(wanted.shape), tile(wanted.shape)
        nisa.dma_copy(first, in_hbm)
        nisa.dma_copy(second, on_chip)
        return store(first), store(second)

    first, second = probe.run(body, X)
    np.testing.assert_array_equal(first, wanted)
    np.testing.assert_array_equal(second, wanted)


def test_int_indices_keep_the_partition_on_chip_and_drop_dims_in_hbm():
    def body(a):
        whole = load(a)
        assert whole[2].shape == (1, 6, 10)
        assert whole[2, 3].shape == (1, 10)
        assert whole[:, 3, 4].shape == (4, 1)
        assert a[2].shape == (6, 10)
        assert a[2, 3, 4].shape == (1,)
        assert whole.get_pattern() == [[60, 4], [10, 6], [1, 10]]
        assert whole.is_contiguous()
        assert not whole[:, :, ::2].is_contiguous()

    probe.run(body, X)


def test_views_of_other_dtypes_share_bits():
    def body(a):
        data = load(a)
        halves = tile((4, 12), "uint16")
        nisa.tensor_copy(halves, data.view("uint16"))
        assert data.reinterpret_cast("uint8").shape == (4, 24)
        assert data.view("uint16").view("float32").shape == (4, 6)
        return store(halves)

    x = normal(4, 6)
    np.testing.assert_array_equal(probe.run(body, x), x.view(np.uint16))


def test_runtime_select():
    def body(a, index):
        register, out = nisa.register_alloc(), tile((1, 10))
        nisa.register_load(register, index)
        nisa.dma_copy(out, a[2].select(0, register).expand_dim(0))
        return store(out)

    got = probe.run(body, X, np.array([[5]], np.int32))
    np.testing.assert_array_equal(got[0], X[2, 5])


def test_runtime_select_on_chip_and_no_views_of_indirect_ones():
    def body(a, index):
        data, register, out = load(a), nisa.register_alloc(), tile((4, 1))
        nisa.register_load(register, index)
        nisa.tensor_copy(out, data.select(1, register))
        with pytest.raises(NkiValidationError, match="one runtime index per view"):
            data.expand_dim(1).select(2, register).select(1, register)
        with pytest.raises(NkiValidationError, match="an indirect view is used as it is"):
            a.ap([[10, 1], [1, 10]], vector_offset=load(index))[0:1]
        return store(out)

    x = normal(4, 10)
    np.testing.assert_array_equal(probe.run(body, x, np.array([[7]], np.int32))[:, 0], x[:, 7])


def test_a_broadcast_destination_discards():
    def body(a):
        data, row = load(a), tile((4, 1))
        nisa.activation(row.broadcast(1, 6), nl.exp, data)
        return store(data)

    x = normal(4, 6)
    np.testing.assert_array_equal(probe.run(body, x), x)


def test_what_is_missing_says_what_there_is():
    def body(a):
        with pytest.raises(AttributeError, match=r"no 'indirect' in this simulator; it has ap, .*rearrange"):
            a.indirect(a)

    probe.run(body, X)


@pytest.mark.parametrize(
    ("shape", "strides", "new", "wanted"),
    [
        ((4, 6), (6, 1), (2, 12), (12, 1)),
        ((4, 6), (8, 1), (4, 2, 3), (8, 3, 1)),
        ((4, 6), (8, 1), (24,), None),
        ((4, 6), (1, 4), (24,), None),
        ((4, 1, 6), (6, 99, 1), (24,), (1,)),
        ((1, 5), (0, 0), (5, 1), (0, 0)),
        ((2, 3, 4), (12, 4, 1), (1, 24, 1), None),
    ],
)
def test_reshapes_without_a_copy(shape, strides, new, wanted):
    got = reshaped_strides(shape, strides, new)
    if wanted is None and new != (1, 24, 1):
        assert got is None
    else:
        view = np.lib.stride_tricks.as_strided(np.arange(200), shape, [8 * s for s in strides])
        again = np.lib.stride_tricks.as_strided(np.arange(200), new, [8 * s for s in got])
        np.testing.assert_array_equal(again, view.reshape(new))


def test_reshapes_of_every_factorisation_match_numpy():
    generator = np.random.default_rng(0)
    for _ in range(300):
        sizes = tuple(generator.choice([1, 2, 3, 4], size=generator.integers(1, 4)).tolist())
        base = np.arange(4096)
        order = tuple(generator.permutation(len(sizes)).tolist())
        padded = row_major(tuple(size + int(generator.integers(0, 2)) for size in sizes))
        strides = tuple(padded[n] for n in order)
        shape = tuple(sizes[n] for n in order)
        view = np.lib.stride_tricks.as_strided(base, shape, [8 * s for s in strides])
        count = int(np.prod(shape))
        divisor = int(generator.choice([n for n in range(1, count + 1) if count % n == 0]))
        new = (divisor, count // divisor)
        got = reshaped_strides(shape, strides, new)
        try:
            expected = np.reshape(view, new, copy=False) if np.lib.NumpyVersion(np.__version__) >= "2.1.0" else None
        except ValueError:
            assert got is None
            continue
        if expected is not None:
            assert got is not None
            again = np.lib.stride_tricks.as_strided(base, new, [8 * s for s in got])
            np.testing.assert_array_equal(again, expected)


def test_tf32_rounds_to_nearest_even():
    step = 2.0**-10
    values = np.array([1 + step / 2, 1 + 3 * step / 2, 1 + step / 4, -(1 + step), np.inf, -np.inf], np.float32)
    wanted = [1, 1 + 2 * step, 1, -(1 + step), np.inf, -np.inf]
    assert round_to_tf32(values).tolist() == wanted
    assert np.isnan(round_to_tf32(np.array([np.nan], np.float32)))[0]
    got = through(nisa.tensor_copy, values[None], dtype="tfloat32", shape=(1, 6))
    assert got[0].tolist() == wanted


@pytest.mark.parametrize(
    ("name", "largest", "beyond"),
    [("float8_e4m3", 240, np.inf), ("float8_e4m3fn", 448, np.nan), ("float8_e5m2", 57344, np.inf)],
)
def test_fp8_types(name, largest, beyond):
    element = DTYPES[name]
    assert element.largest == largest
    got = cast(np.array([largest, 10.0 * largest, 0.3], np.float32), element, "test").astype(np.float32)
    assert got[0] == largest
    np.testing.assert_equal(got[1], np.float32(beyond))
    assert abs(got[2] - 0.3) < 0.05


def test_integers_round_to_even_and_saturate():
    values = np.array([0.5, 1.5, 2.5, -0.5, 1e10, -1e10, np.inf, np.nan], np.float32)
    assert cast(values, DTYPES["uint8"], "test").tolist() == [0, 2, 2, 0, 255, 0, 255, 0]
    assert cast(values, DTYPES["int32"], "test").tolist() == [0, 2, 2, 0, 2**31 - 1, -(2**31), 2**31 - 1, 0]


def test_packed_types_unpack_lowest_first():
    element = DTYPES["float8_e5m2_x4"]
    values = np.array([[1.0, 2.0, -4.0, 0.5]], ml_dtypes.float8_e5m2)
    packed = pack(values, element)
    assert packed.dtype == np.uint32 and packed.shape == (1,)
    assert int(packed[0]) & 0xFF == int(values.view(np.uint8)[0, 0])
    np.testing.assert_array_equal(unpack(packed, element), values.astype(np.float32))


def test_all_dtypes_store_and_load():
    def body():
        results = []
        for name, element in DTYPES.items():
            fresh = tile((2, 4), name)
            assert fresh.view("uint8").shape == (2, 4 * element.itemsize)
            results.append(store(fresh.view("uint8")))
        return tuple(results)

    for (name, element), got in zip(DTYPES.items(), probe.run(body), strict=True):
        values = got.view(element.storage)
        if element.kind == "integer":
            assert (values == 4).all(), name
        elif element.kind == "float":
            assert np.isnan(values.astype(np.float32)).all(), name
        elif name != "float4_e2m1fn_x4":
            assert np.isnan(unpack(values, element)).all(), name
