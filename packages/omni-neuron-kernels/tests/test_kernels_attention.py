# SPDX-License-Identifier: Apache-2.0
"""Flash attention against float64: float32 within 1e-5 relative L2, bfloat16 within 1.25 × of torch's own error."""

import attention_cases as cases
import pytest
import torch
import torch.nn.functional as F

from omni_neuron_kernels import explain, flash_attention, nki_attention
from omni_neuron_kernels.softmax_regimes import QUERY_TILE
from omni_neuron_nkisim import NkiValidationError, TensorSpec, last_stats, run_spmd, settings

DTYPES = [torch.float32, torch.bfloat16]
REGIMES = ("unshifted", "tile_shift", "running_maximum")
parametrize_all = pytest.mark.parametrize(
    ("dtype", "lnc"), [(dtype, lnc) for dtype in DTYPES for lnc in (1, 2)], ids=str
)


def launch(q, k, v, regime, lnc=1, length=None, bias=0.0):
    """The kernel on `[B, S, N, D]`, every head in one regime."""
    flat = [tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (q, k, v)]
    biases = torch.full((len(flat[0]), -(-q.shape[1] // 512)), bias)
    kernel, regimes = cases.kernels("attention").flash_attention, (regime,) * len(flat[0])
    arguments = (*flat, q.shape[3] ** -0.5, length or k.shape[1], regimes, (), (biases,))
    return run_spmd(kernel, [arguments], lnc=lnc)[0].unflatten(0, (q.shape[0], -1)).transpose(1, 2)


@parametrize_all
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(
    ("queries", "keys", "dim", "length"), [(300, 517, 64, 500), (129, 128, 128, 128), (5, 3, 17, 2), (128, 1, 128, 1)]
)
def test_flash_attention(dtype, lnc, regime, queries, keys, dim, length):
    q, k, v = cases.heads(queries, keys, count=4, key_heads=2, dim=dim, dtype=dtype)
    k[:, length:], v[:, length:] = torch.nan, torch.nan
    result = launch(q, k, v, regime, lnc, length, bias=-3.0)
    cases.check(result, q, k[:, :length], v[:, :length])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dim", [384, 200, 129])
def test_the_head_dim_is_contracted_in_chunks(dim, regime, dtype):
    q, k, v = cases.heads(150, 140, count=1, dim=dim, dtype=dtype)
    cases.check(launch(q, k, v, regime, 2), q, k, v)


@pytest.mark.parametrize("regime", REGIMES)
def test_several_sections_and_blocks(regime, monkeypatch):
    monkeypatch.setattr(cases.kernels("attention_layout"), "SECTION_BYTES", 1024)
    monkeypatch.setattr(cases.kernels("attention"), "BLOCK_PIECES", 1)
    q, k, v = cases.heads(1200, 900, count=1, dim=32)
    cases.check(launch(q, k, v, regime), q, k, v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gain", [50.0, 300.0, 30_000.0])
def test_heads_past_every_bound_lose_no_row(dtype, gain):
    """Without a maximum these scores overflow, with a static bound rows vanish.

    With the largest gain a maximum that is rounded to bfloat16 is hundreds of nats off.
    """
    q, k, v = cases.heads(200, 300, dim=128, gain=gain, dtype=dtype)
    expected, own = cases.exact(q, k, v)[0], cases.torchs(q, k, v)
    result = launch(q, k, v, "running_maximum", 2)
    # Rounding of scores as large as these is most of the error, torch's in float32 as well.
    assert cases.relative_error(result, expected) <= max(1e-5, 1.25 * cases.relative_error(own, expected))
    assert bool((result.double().norm(dim=-1) > 0.5 * expected.norm(dim=-1)).all())
    assert not launch(q, k, v, "unshifted").isfinite().all()


def test_each_512_queries_have_a_shift_of_their_own():
    """Scores around 120, -60, and 60: no one shift fits all three groups of queries."""
    q, k, v = cases.heads(1100, 200, count=2, dim=32)
    k[:, :, 1] += 3
    factors = torch.tensor([120.0, -60.0, 60.0]).repeat_interleave(QUERY_TILE)[:1100]
    q[:, :, 1] = q[:, :, 1] * 0.1 + factors[:, None] * 32**0.5 / (3 * 32)
    cases.check(flash_attention(q, k, v), q, k, v)
    given = nki_attention.prepared(q, k, v, None, cases.key_statistics(k, v), 32**-0.5)
    assert given.regimes == ("unshifted", "tile_shift")
    assert given.biases[0][0].tolist() == [0.0] * 3 and given.biases[0][1].diff().abs().min() > 50
    assert cases.kernels("softmax_pipeline").PIECE_ROWS == QUERY_TILE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gain", [1, 100])
def test_key_masks(gain, dtype):
    q, k, v = cases.heads(150, 200, batch=2, count=4, key_heads=2, gain=gain, dtype=dtype)
    mask = torch.rand(2, 200, generator=torch.Generator().manual_seed(1)) < 0.3
    mask[1], mask[1, 130] = False, True  # whose score is hundreds below zero for many queries
    chosen = mask[:, :, None, None]
    assert explain("flash_attention", q, k, v, key_mask=mask).provider == "nki-simulator"
    for garbage in (torch.nan, torch.inf, 1e30):
        dirty = [torch.where(chosen, tensor, garbage).to(dtype) for tensor in (k, v)]
        result = flash_attention(q, *dirty, key_mask=mask, key_length=190)
        mask_of_all = mask & (torch.arange(200) < 190)
        cases.check(result, q, torch.where(chosen, k, 0), torch.where(chosen, v, 0), mask_of_all)


def test_masks_of_the_reference(monkeypatch):
    monkeypatch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", "1")
    q, k, v = cases.heads(30, 20, batch=2, count=4, key_heads=2)
    mask = torch.arange(20)[None] % torch.tensor([[2], [3]]) == 0
    dirty = [torch.where(mask[:, :, None, None], tensor, torch.nan) for tensor in (k, v)]
    result = flash_attention(q, *dirty, key_mask=mask, key_length=15)
    cases.check(result, q, *(torch.where(mask[:, :, None, None], t, 0) for t in (k, v)), mask & (torch.arange(20) < 15))


def test_the_reference_is_torchs_attention_to_the_bit(monkeypatch):
    monkeypatch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", "1")
    for dtype in DTYPES:
        q, k, v = cases.heads(40, dtype=dtype)
        plain = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        assert torch.equal(flash_attention(q, k, v), plain)


def test_only_heads_past_the_bound_take_the_maximum():
    q, k, v = cases.heads(40, 70, count=4, dim=32)
    q[:, :, 1] *= 100
    flash_attention(q, k, v)
    exponentials, reductions = last_stats().count("activation"), last_stats().count("tensor_reduce")
    assert exponentials == 4 and reductions == 2  # over the keys, and over the pieces of keys


def specs(dtype, *shapes):
    return [TensorSpec(shape, dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_shapes_fit(dtype):
    """Limits of instructions and of memory at the sizes of a video model, on shapes alone."""
    attention, ring = cases.kernels("attention").flash_attention, cases.kernels("ring_attention").ring_attention
    biases = (TensorSpec((2, 10), "float32"),)
    with settings(target="trn2", execute=False, check_live_capacity=True):
        heads = specs(dtype, (2, 4095, 128), (2, 9000, 128), (2, 9000, 128))
        attention[2](*heads, 128**-0.5, 8_999, ("running_maximum", "tile_shift"), (), biases)
        attention[2](*specs(dtype, *[(1, 6240, 384)] * 3), 384**-0.5, 6240, ("running_maximum",))
        with settings(symmetric_ranks=2):
            rank = specs(dtype, *[(2, 4725, 128)] * 3), 128**-0.5, ("running_maximum", "tile_shift"), ((0, 1),)
            ring[2](*rank[0], *rank[1:], 1, True, (TensorSpec((1, 4725), dtype),), biases)


def vector_work(queries, keys, regime):
    with settings(target="trn2", execute=False):
        heads = specs("bfloat16", (1, queries, 128), (1, keys, 128), (1, keys, 128))
        biases = (TensorSpec((1, queries // 512), "float32"),)
        cases.kernels("attention").flash_attention(*heads, 128**-0.5, keys, (regime,), (), biases)
    return last_stats()


@pytest.mark.parametrize("regime", ["unshifted", "tile_shift"])
def test_without_a_maximum_nothing_but_scalar_touches_the_scores(regime):
    few, many = vector_work(512, 2048, regime), vector_work(4 * 512, 2048, regime)
    tiles = 16  # of keys, each with one exponential for every 512 queries
    assert many.count("activation") - few.count("activation") == 3 * tiles
    # 12 tiles of queries more: each is copied after its transpose, leaves PSUM, and is divided in two instructions.
    assert many.count("tensor_copy", "vector") - few.count("tensor_copy", "vector") == 2 * 12
    assert many.count("reciprocal") - few.count("reciprocal") == 12
    assert many.count("tensor_scalar") - few.count("tensor_scalar") == 12
    assert many.count("tensor_reduce") == many.count("tensor_tensor") == many.count("scalar_tensor_tensor") == 0
    assert vector_work(512, 2048, "running_maximum").count("tensor_reduce") > 0


def test_a_broken_limit_is_refused_by_the_simulator():
    with pytest.raises(NkiValidationError):
        launch(*cases.heads(128, count=1, dim=512), "unshifted")
