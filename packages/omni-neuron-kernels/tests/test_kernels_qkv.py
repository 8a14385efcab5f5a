# SPDX-License-Identifier: Apache-2.0
"""The fused projections against float64, on one rank and on several, and how they are launched."""

import importlib
import math

import pytest
import torch

from omni_neuron_kernels import explain, qkv_projection
from omni_neuron_nkisim import TensorSpec, last_stats, run_spmd, settings

EPSILON = 1e-6
parametrize_all = pytest.mark.parametrize(
    ("dtype", "lnc"), [(dtype, lnc) for dtype in (torch.float32, torch.bfloat16) for lnc in (1, 2)], ids=str
)


def kernels():
    return importlib.import_module("omni_neuron_kernels.nki_kernels.qkv")


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(rows, width, heads, d, dtype=torch.float32, norm=True, rope=True):
    """x, weight, bias, gains and rotation; keys and queries have a mean, so that a wrong sum shows."""
    columns = (heads[0] + 2 * heads[1]) * d
    weight = (random(width, columns, seed=1) / math.sqrt(width)).to(dtype)
    gains = tuple(random(1, count * d, seed=3) + 1 for count in heads if count) if norm else ()
    angles = 10 * random(rows, d // 2, seed=4)
    rotation = (angles.cos(), angles.sin()) if rope else ()
    return random(rows, width, dtype=dtype), weight, random(1, columns, seed=2) + 0.5, gains, rotation


def compute(x, weight, bias, heads, d, gains, rotation):
    """In the dtype of x, step after step."""
    parts = list((x @ weight + bias.to(x.dtype)).split([count * d for count in (heads[0], heads[1], heads[1])], -1))
    left = iter(gains)
    for n in range(2):
        if heads[n] and gains:
            gain = next(left)[0].to(x.dtype)
            parts[n] = parts[n] * (parts[n].square().mean(-1, keepdim=True) + EPSILON).rsqrt() * gain
    if rotation:
        cos, sin = (table[:, None].to(x.dtype) for table in rotation)
        for n in range(2):
            even, odd = parts[n].unflatten(-1, (-1, d // 2, 2)).unbind(-1)
            parts[n] = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-3)
    return [part for part, count in zip(parts, (heads[0], heads[1], heads[1]), strict=True) if count]


def check(results, exact, torchs):
    assert len(results) == len(exact)
    for result, wanted, theirs in zip(results, exact, torchs, strict=True):
        assert result.dtype == theirs.dtype and result.shape == theirs.shape
        error, limit = ((value.double() - wanted).norm() / wanted.norm() for value in (result, theirs))
        assert float(error) <= (1e-5 if result.dtype == torch.float32 else 1.25 * float(limit))


CASES = {
    "grouped keys": (300, 200, (4, 2), 16, True, True),
    "one token": (1, 3, (1, 1), 2, True, True),
    "several blocks": (130, 129, (9, 9), 96, True, True),
    "no norm": (140, 70, (3, 3), 20, False, True),
    "no rotation": (140, 70, (3, 3), 5, True, False),
    "neither": (129, 128, (3, 3), 5, False, False),
    "queries": (140, 70, (6, 0), 10, True, False),
    "several pieces of a row": (130, 1100, (1, 1), 4, True, True),
    "keys and values": (140, 70, (0, 6), 10, True, False),
}


@parametrize_all
@pytest.mark.parametrize("name", CASES)
def test_qkv_projection(dtype, lnc, name):
    rows, width, heads, d, norm, rope = CASES[name]
    case = make(rows, width, heads, d, dtype, norm, rope)
    x, weight, bias, gains, rotation = case
    wide = [tensor.double() for tensor in (x, weight, bias)]
    exact = compute(*wide, heads, d, gains, rotation)
    results = kernels().qkv_projection[lnc](x, weight, bias, heads, d, gains, rotation, EPSILON, 1, ())
    check(results, exact, compute(x, weight, bias, heads, d, gains, rotation))


def shards(case, heads, d, ranks):
    """Each rank's arguments: its heads of queries, keys and values."""
    x, weight, bias, gains, _ = case

    def part(tensor, rank):
        pieces = tensor.split([count * d for count in (heads[0], heads[1], heads[1])], -1)
        return torch.cat([piece.chunk(ranks, -1)[rank] for piece in pieces], -1).contiguous()

    return [
        (x, part(weight, rank), part(bias, rank), tuple(gain.chunk(ranks, -1)[rank].contiguous() for gain in gains))
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("ranks", "lnc"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 2)])
def test_the_norm_spans_the_heads_of_all_ranks(dtype, ranks, lnc, monkeypatch):
    # Three tiles of tokens in steps of one: sums are on their way while others are computed, and a core runs out.
    monkeypatch.setattr(kernels(), "TOKEN_TILES", 1)
    heads, d = (8, 8), 4
    case = make(300 if ranks < 8 else 20, 60, heads, d, dtype)
    x, weight, bias, gains, rotation = case
    local, group = tuple(count // ranks for count in heads), tuple(range(ranks))
    arguments = [
        (*shard[:3], local, d, shard[3], rotation, EPSILON, ranks, (group,) if ranks > 1 else ())
        for shard in shards(case, heads, d, ranks)
    ]
    per_rank = run_spmd(kernels().qkv_projection, arguments, lnc=lnc)
    results = [torch.cat(parts, -1) for parts in zip(*per_rank, strict=True)]
    exact = compute(x.double(), weight.double(), bias.double(), heads, d, gains, rotation)
    check(results, exact, compute(x, weight, bias, heads, d, gains, rotation))
    if ranks > 1:
        assert last_stats().count("all_reduce") == ranks * lnc * (3 if lnc == 1 else 2) // (1 if ranks < 8 else 2)


def test_two_groups_do_not_mix():
    heads, d = (2, 2), 4
    cases = [make(20, 30, heads, d), make(20, 30, heads, d)]
    cases[1] = (3 * cases[1][0], *cases[1][1:])
    arguments = []
    for case in cases:
        for shard in shards(case, heads, d, 2):
            arguments.append((*shard[:3], (1, 1), d, shard[3], case[4], EPSILON, 2, ((0, 1), (2, 3))))
    per_rank = run_spmd(kernels().qkv_projection, arguments)
    for n, case in enumerate(cases):
        results = [torch.cat(parts, -1) for parts in zip(*per_rank[2 * n : 2 * n + 2], strict=True)]
        wanted = compute(*(tensor.double() for tensor in case[:3]), heads, d, *case[3:])
        check(results, wanted, [part.float() for part in wanted])


def public(case, heads, d, **options):
    """The arguments of the public function: two batches of half the tokens."""
    x, weight, bias, gains, rotation = case
    left = iter(gains)
    for name, count in zip(("query_gain", "key_gain"), heads, strict=True):
        if count and gains:
            options[name] = next(left)[0]
    if rotation:
        options["rotation"] = tuple(table[: x.shape[0] // 2] for table in rotation)
    return (x.unflatten(0, (2, -1)), weight, bias[0]), {"heads": heads, "head_dim": d, "epsilon": EPSILON, **options}


def flat(results):
    return [part.flatten(2).flatten(0, 1) for part in results if part.shape[2]]


@pytest.mark.parametrize("simulated", [True, False])
@pytest.mark.parametrize("name", [name for name in CASES if name != "one token"])
def test_the_public_function_and_its_reference(name, simulated, monkeypatch):
    monkeypatch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", str(int(not simulated)))
    rows, width, heads, d, norm, rope = CASES[name]
    rows = rows // 2 * 2
    case = make(rows, width, heads, d, torch.float32, norm, rope)
    arguments, options = public(case, heads, d)
    assert explain("qkv_projection", *arguments, **options).provider == ("nki-simulator" if simulated else "torch")
    tables = tuple(table[: rows // 2].repeat(2, 1) for table in case[4])
    wide = [tensor.double() for tensor in case[:3]]
    exact = compute(*wide, heads, d, case[3], tables)
    check(flat(qkv_projection(*arguments, **options)), exact, [part.float() for part in exact])


@pytest.mark.parametrize("simulated", [True, False])
def test_a_rank_in_a_process_of_its_own_asks_for_the_sums(simulated, monkeypatch):
    """Two ranks of the same heads: what all_reduce returns is twice what it gets."""
    monkeypatch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", str(int(not simulated)))
    heads, d = (3, 2), 8
    case = make(40, 50, heads, d)
    asked = []

    def all_reduce(squares):
        asked.append(squares.dtype)
        return 2 * squares

    arguments, options = public(case, heads, d, ranks=2, all_reduce=all_reduce, replica_groups=[[0, 1]])
    both = flat(qkv_projection(*arguments, **options))
    assert asked == [torch.float32]
    tables = tuple(table[:20].repeat(2, 1) for table in case[4])
    exact = compute(*(tensor.double() for tensor in case[:3]), heads, d, case[3], tables)
    check(both, exact, [part.float() for part in exact])


def test_a_single_query_projection_needs_no_bias():
    x, weight = random(1, 3, 20), random(20, 8)
    query, key, value = qkv_projection(x, weight, None, heads=(2, 0), head_dim=4)
    torch.testing.assert_close(query.flatten(2), x @ weight)
    assert key.shape == value.shape == (1, 3, 0, 4)


def test_the_reference_in_a_compiled_graph():
    case = make(12, 30, (2, 2), 8)
    arguments, options = public(case, (2, 2), 8)
    compiled = torch.compile(lambda *tensors: qkv_projection(*tensors, **options), backend="eager", fullgraph=True)
    for ours, eager in zip(compiled(*arguments), qkv_projection(*arguments, **options), strict=True):
        torch.testing.assert_close(ours, eager)


X, W = torch.zeros(1, 2, 8), torch.zeros(8, 12)
REFUSED = {
    "a head wider than a bank": ((X, torch.zeros(8, 3 * 514), None), {"heads": (1, 1), "head_dim": 514}, "at most 512"),
    "float16": ((X.half(), W.half(), None), {"heads": (1, 1), "head_dim": 4}, "torch.float16"),
    "two dtypes": ((X, W.bfloat16(), None), {"heads": (1, 1), "head_dim": 4}, "weight torch.bfloat16"),
    "no room in SBUF": (
        (torch.zeros(1, 1, 20_000), torch.zeros(20_000, 12), None),
        {"heads": (1, 1), "head_dim": 4},
        "fit into SBUF",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_outside_a_limit_torch_runs_and_says_why(name):
    tensors, options, reason = REFUSED[name]
    choice = explain("qkv_projection", *tensors, **options)
    assert choice.provider == "torch"
    assert reason in choice.refusals["nki-simulator"]
    if "two" not in name:
        assert qkv_projection(*tensors, **options)[0].shape == (*tensors[0].shape[:2], 1, options["head_dim"])


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ((X[0], W, None), {}, r"\[B, S, H\]"),
        ((X, W, None), {"heads": (0, 0)}, "at least 1"),
        ((X, W, None), {"head_dim": 0}, "head_dim = 0; valid"),
        ((X, W, None), {"ranks": 0}, "ranks = 0; valid"),
        ((X, W, None), {"rotation": (torch.zeros(2, 2),)}, "1 tables; valid are two"),
        ((X, W[:, :3], None), {}, "weight has shape"),
        ((X, W, torch.zeros(3)), {}, "bias has shape"),
        ((X, W, None), {"query_gain": torch.zeros(4)}, "go together"),
        ((X, W, None), {"query_gain": torch.zeros(3), "key_gain": torch.zeros(4)}, "query_gain has shape"),
        ((X, W, None), {"rotation": (torch.zeros(2, 3), torch.zeros(2, 2))}, "cosines has shape"),
        ((X, torch.zeros(8, 9), None), {"head_dim": 3, "rotation": (torch.zeros(2, 1),) * 2}, "an even number"),
        ((X, W, None), {"ranks": 2, "query_gain": torch.zeros(4), "key_gain": torch.zeros(4)}, "needs all_reduce"),
        ((X, W, None), {"ranks": 2, "replica_groups": [[0, 1, 2]]}, "groups of ranks = 2"),
    ],
)
def test_arguments_that_do_not_fit(tensors, options, message):
    with pytest.raises(ValueError, match=message):
        qkv_projection(*tensors, **{"heads": (1, 1), "head_dim": 4, **options})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_real_shapes_fit(dtype, tp):
    """The sizes of Wan2.2 A14B, on shapes alone."""
    count = 40 // tp
    gains = (TensorSpec((1, count * 128), "float32"),) * 2
    tables = (TensorSpec((700, 64), "float32"),) * 2
    tensors = (TensorSpec((700, 5120), dtype), TensorSpec((5120, 3 * count * 128), dtype))
    bias = TensorSpec((1, 3 * count * 128), "float32")
    with settings(target="trn2", execute=False, check_live_capacity=True):
        kernels().qkv_projection(*tensors, bias, (count, count), 128, gains, tables, EPSILON, 1, ())
    with settings(target="trn2", execute=False, check_live_capacity=True, symmetric_ranks=tp):
        group = (tuple(range(tp)),) if tp > 1 else ()
        kernels().qkv_projection[2](*tensors, bias, (count, count), 128, gains, tables, EPSILON, tp, group)
