# SPDX-License-Identifier: Apache-2.0
"""Launching: forms of arguments and results, grids, nesting, settings, the language's helpers."""

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import nkisim_probe as probe
import numpy as np
import pytest
from nkisim_probe import load, normal, store, tile

from omni_neuron_nkisim import NkiValidationError, last_stats, run_spmd, settings


@nki.jit
def double(a):
    data = load(a)
    nisa.tensor_scalar(data, data, nl.multiply, 2.0)
    return store(data)


def test_entries_of_run_spmd():
    a, b = normal(4, 4), normal(4, 4, seed=1)
    for entries in ([(a,), (b,)], [((a,), {}), ([b], {})], [((), {"a": a}), ((), {"a": b})]):
        first, second = run_spmd(double, entries)
        np.testing.assert_array_equal(first, 2 * a)
        np.testing.assert_array_equal(second, 2 * b)
    with pytest.raises(NkiValidationError, match=r"\(args, kwargs\) or a tuple of args"):
        run_spmd(double, [a])
    with pytest.raises(NkiValidationError, match="per_rank_args is empty"):
        run_spmd(double, [])


def test_grids():
    a = normal(4, 4)
    np.testing.assert_array_equal(double[1](a), 2 * a)
    np.testing.assert_array_equal(nki.simulate(double[2])(a), 2 * a)
    assert len(last_stats().cores) == 2
    run_spmd(double[2], [(a,)])
    assert len(last_stats().cores) == 2
    for grid in (0, 3, True, (2,)):
        with pytest.raises(NkiValidationError, match="the grid is 1 or 2 cores"):
            double[grid]


def test_jit_forms():
    assert nki.jit(double) is double
    assert nki.jit(mode="anything")(lambda: 1)() == 1
    with pytest.raises(NkiValidationError, match="unknown options platform_target"):
        nki.jit(platform_target="trn2")


def test_kernels_call_kernels_inline():
    @nki.jit
    def outer(a):
        return double(a)

    a = normal(4, 4)
    np.testing.assert_array_equal(outer(a), 2 * a)
    assert last_stats().kernel == "outer"

    def launches(a):
        run_spmd(double, [(a,)])

    with pytest.raises(NkiValidationError, match="called inside a kernel"):
        probe.run(launches, a)


def test_structured_arguments_and_results():
    def kernel(pair, named, factor, missing):
        assert missing is None
        first, second = load(pair[0]), load(named["b"])
        nisa.tensor_scalar(first, first, nl.multiply, factor)
        return store(first), (store(second), 7)

    a, b = normal(2, 3), normal(4, 5)
    first, (second, number) = probe.run(kernel, (a, 1), {"b": b}, 3.0, None)
    np.testing.assert_array_equal(first, 3 * a)
    np.testing.assert_array_equal(second, b)
    assert number == 7


@pytest.mark.parametrize(
    "name", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32", "uint8", "int8", "bool"]
)
def test_torch_types_go_in_and_out(name):
    torch = pytest.importorskip("torch")

    def kernel(a):
        out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, a)
        return out

    tensor = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 0.0]]).to(getattr(torch, name))
    result = probe.run(kernel, tensor)
    assert result.dtype is tensor.dtype
    assert torch.equal(result.float(), tensor.float())


def test_torch_tensors_have_to_be_contiguous():
    torch = pytest.importorskip("torch")
    with pytest.raises(NkiValidationError, match=r"strides \(1, 4\); the simulator takes contiguous CPU tensors"):
        double(torch.ones(4, 4).t())


def test_legacy_e4m3_comes_back_as_bits_in_torch_and_as_itself_in_numpy():
    torch = pytest.importorskip("torch")

    def kernel(a):
        return store(load(a, dtype="float8_e4m3"))

    assert probe.run(kernel, torch.ones(2, 2)).dtype is torch.uint8
    assert probe.run(kernel, np.ones((2, 2), np.float32)).dtype == ml_dtypes.float8_e4m3


def test_the_target_comes_from_the_environment_and_from_settings(monkeypatch):
    def kernel():
        assert nl.tile_size.sbuf_size_bytes == 128 * last["bytes"]
        return nisa.get_nc_version()

    last = {"bytes": 224 * 1024}
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    assert probe.run(kernel) == nisa.nc_version.gen3
    last["bytes"] = 256 * 1024
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn3")
    assert probe.run(kernel) == nisa.nc_version.gen4
    last["bytes"] = 224 * 1024
    assert probe.run(kernel, target="gen3") == nisa.nc_version.gen3


def test_settings_nest_and_end():
    with settings(target="trn3"), settings(nki_version="0.4.0") as inner:
        assert (inner.target, inner.nki_version) == ("trn3", "0.4.0")
    assert probe.run(nisa.get_nc_version) == nisa.nc_version.gen3


def test_language_helpers():
    def kernel():
        assert [*nl.affine_range(3)] == [*nl.static_range(0, 3)] == [*nl.sequential_range(0, 3, 1)] == [0, 1, 2]
        assert (nl.program_id(), nl.num_programs(), nl.program_ndim()) == (0, 1, 1)
        assert nl.is_on_chip(nl.psum) and nl.is_hbm(nl.hbm) and nl.is_sbuf(nl.sbuf) and nl.is_psum(nl.psum)
        assert tile((4, 4)).buffer == nl.sbuf
        zeros = nl.zeros_like(nl.ones((4, 4), "int32"))
        assert nl.empty_like(zeros, dtype="float32").dtype == nl.float32
        constant = nl.shared_constant(np.arange(6, dtype=np.float32).reshape(2, 3))
        with nl.no_reorder():
            return store(zeros), store(load(constant)), store(nl.shared_identity_matrix(5, "float32"))

    zeros, constant, identity = probe.run(kernel)
    assert (zeros == 0).all()
    np.testing.assert_array_equal(constant, np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(identity, np.eye(5))


def test_nki_objects_fill_missing_fields():
    class Sizes(nl.NKIObject):
        rows: int
        columns: int = 3
        kind = "plain"

        def __post_init__(self):
            self.area = None if self.rows == None else self.rows * self.columns  # noqa: E711

    assert vars(Sizes(2)) == {"rows": 2, "columns": 3, "kind": "plain", "area": 6}
    assert vars(Sizes(columns=5)) == {"rows": None, "columns": 5, "kind": "plain", "area": None}
    with pytest.raises(TypeError, match="has the fields rows, columns, kind"):
        Sizes(depth=1)


def test_errors_of_a_kernel_pass_through_and_the_thread_is_free_again():
    def kernel(a):
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        probe.run(kernel, normal(4, 4))
    np.testing.assert_array_equal(double(np.ones((2, 2), np.float32)), 2 * np.ones((2, 2)))
