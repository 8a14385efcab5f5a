# SPDX-License-Identifier: Apache-2.0
"""Ring attention on 1, 2, 4 and 8 ranks of one and two cores, against float64, where static bounds fail too."""

import math

import attention_cases as cases
import pytest
import torch

from omni_neuron_kernels import explain, ring_attention, ring_refusal
from omni_neuron_nkisim import TensorSpec, last_stats, run_spmd, settings

RANKS = [1, 2, 4, 8]
DTYPES = [torch.float32, torch.bfloat16]
REGIMES = ("unshifted", "tile_shift", "running_maximum")


def one_head_of_each(rows, dtype, **options):
    """Three heads whose softmax takes the three ways; the second one's keys have a large mean in common."""
    q, k, v = cases.heads(rows, **options)
    q[:, :, 1] = q[:, :, 1] * 0.5 + 8
    k[:, :, 1] += 4
    q[:, :, 2] *= 60
    return tuple(tensor.to(dtype) for tensor in (q, k, v))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("ranks", RANKS)
def test_every_regime_in_one_launch(ranks, lnc, dtype):
    q, k, v = one_head_of_each(296, dtype)
    assert set(cases.check_ring(q, k, v, ranks, lnc=lnc)) == {REGIMES}


@pytest.mark.parametrize("ranks", RANKS)
def test_grouped_heads_of_two_batch_elements(ranks):
    q, k, v = cases.heads(40, batch=2, count=4, key_heads=2, dim=24)
    q[1, :, 3] *= 100
    regimes = cases.check_ring(q, k, v, ranks, lnc=2)
    assert set(regimes) == {("unshifted",) * 7 + ("running_maximum",)}


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_pads_and_masked_blocks(ranks, lnc):
    """13 valid keys of 16: the last blocks hold some or none; 3 and 1: fewer keys than a block."""
    q, k, v = cases.heads(16)
    q[:, :, 1] *= 100
    for valid in (13, 3, 1):
        keys, values = k[:, :valid], v[:, :valid]
        cases.check_ring(q, keys, values, ranks, lnc=lnc, shard=16 // ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_masks(ranks):
    q, k, v = cases.heads(70, batch=2)
    q[:, :, 1] *= 100
    mask = torch.rand(2, 70, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[0, :35] = False  # the first blocks of one batch element have no key
    mask[:, 66:] = False
    chosen = mask[:, :, None, None]
    dirty = (torch.where(chosen, tensor, torch.nan) for tensor in (k, v))
    output, _, lost, _ = cases.ring(q, *dirty, ranks, lnc=2, key_mask=mask, key_length=66)
    cases.check(output, q, torch.where(chosen, k, 0), torch.where(chosen, v, 0), mask)
    assert lost == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("gap", "way"), list(zip((50, 100, 300), REGIMES, strict=True)))
def test_an_outlier_key_that_no_query_sees(gap, way, ranks, dtype):
    q, k, v = cases.outlier(gap, dtype=dtype)
    bound = q[:, :, 1].norm(dim=-1).max() * k[:, :, 1].norm(dim=-1).max() / 4
    assert abs(bound - cases.exact(q, k, v)[2][:, 1].max() - gap) < (1e-3 if dtype == torch.float32 else 2)
    regimes = cases.check_ring(q, k, v, ranks, lnc=1 + ranks % 2)
    # Each head is judged alone: the ordinary ones need nothing whatever the outlier in head 1.
    assert set(regimes) == {("unshifted", way, "unshifted")}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("gain", "way"), [(1, 0), (6, 0), (12, 1), (40, 2)])
def test_learned_gains(gain, way, ranks):
    q, k, v = cases.learned_gains(gain, 64, 1024)
    for dtype in DTYPES:
        case = [tensor.to(dtype) for tensor in (q, k, v)]
        assert set(cases.check_ring(*case, ranks)) == {(REGIMES[way],) * 2}


def test_ranks_whose_queries_differ_run_one_program():
    """Only the last rank's queries are long: in head 1 they need a shift, in head 2 the maximum."""
    q, k, v = cases.learned_gains(1, 64, 64, count=3)
    q[:, 32:, 1] *= 9
    q[:, 32:, 2] *= 20
    assert cases.check_ring(q[:, :32], k, v, 2) == [("unshifted",) * 3] * 2
    for lnc in (1, 2):
        assert cases.check_ring(q, k, v, 2, lnc=lnc) == [REGIMES] * 2


def test_a_static_bound_alone_loses_these_rows():
    """What the cases are for: subtracting scale · ‖q‖ · max‖k‖ returns nothing from a gap of 100 on."""
    for gap in (100, 300):
        q, k, v = cases.outlier(gap)
        queries, keys, values = (tensor.transpose(1, 2) for tensor in (q, k, v))
        bound = queries.norm(dim=-1, keepdim=True) * keys.norm(dim=-1).amax(-1)[..., None, None] / 4
        weights = (queries @ keys.mT / 4 - bound).exp()
        naive = (weights @ values / weights.sum(-1, keepdim=True).clamp_min(1e-37)).transpose(1, 2)
        with pytest.raises(AssertionError):
            cases.check(naive, q, k, v)


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
@pytest.mark.parametrize("lnc", [1, 2])
def test_prefetch_depths_chunks_and_sections(depth, lnc, monkeypatch):
    """Rings one after the other, each over several sections; at 9 every block is on its way at once."""
    monkeypatch.setattr(cases.kernels("ring_attention"), "CHUNK_BYTES", 1)
    monkeypatch.setattr(cases.kernels("attention_layout"), "SECTION_BYTES", 512)
    q, k, v = one_head_of_each(600, torch.float32)
    cases.check_ring(q, k, v, 4, lnc=lnc, depth=depth)
    assert last_stats().count("collective_permute") == 3 * 3 * 4 * lnc


@pytest.mark.parametrize("groups", [[[0, 2], [1, 3]], [[3, 1], [2, 0]], [[0, 3, 1, 2]]])
def test_groups_of_a_world_in_their_own_order(groups):
    q, k, v = cases.heads(50)
    cases.check_ring(q, k, v, len(groups[0]), groups=groups, lnc=2)


def test_rows_that_hold_no_result_are_counted():
    q, k, v = cases.heads(40)
    q[0, 3, 1] = torch.nan
    k[0, 2, 0] = torch.inf
    assert cases.ring(q, k, v, 4, lnc=2)[2] == 40 + 1
    # Without the proof: sums of exp(300) are infinite, one of exp(-300) is zero, and both are counted.
    q, k, v = torch.ones(1, 40, 1, 16), torch.ones(1, 8, 1, 16), torch.ones(1, 8, 1, 16)
    for score, lost in ((300, 40), (-300, 40), (10, 0)):
        assert cases.ring(q * score / 4, k, v, 2, regime="unshifted")[2] == lost


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_block_travels_before_this_one_is_computed(depth, monkeypatch):
    pipeline, events = cases.kernels("softmax_pipeline"), []
    transfer, sum_item = pipeline._transfer, pipeline._sum_item
    monkeypatch.setattr(pipeline, "_transfer", lambda *a: events.append("hop") or transfer(*a))
    monkeypatch.setattr(pipeline, "_sum_item", lambda *a: events.append("compute") or sum_item(*a))
    tensors = [TensorSpec((1, 100, 128), "bfloat16")] * 3
    with settings(execute=False, symmetric_ranks=4):
        cases.kernels("ring_attention").ring_attention(*tensors, 0.1, ("unshifted",), ((0, 1, 2, 3),), depth, False)
    hops = ["hop"] * depth
    assert events == [*hops, *["compute", "hop"] * (3 - depth), *["compute"] * (depth + 1)]


class Group:
    ranks, rank, size = (0,), 0, 1


class TwoRanks:
    ranks, rank, size = (4, 6), 1, 2

    def all_gather(self, tensor, dim):
        return torch.cat([tensor, tensor], dim)


def test_the_simulator_runs_a_ring_of_one_and_refuses_processes():
    q, k, v = cases.heads(20, dim=32)
    result = ring_attention(q, k, v, group=Group(), return_lse=True, key_length=15)
    assert last_stats().kernel == "ring_attention"
    cases.check(result.output, q, k[:, :15], v[:, :15])
    assert result.lse.shape == (1, 3, 20) and int(result.lost_rows) == 0
    assert explain("ring_attention", q, k, v, group=Group()).provider == "nki-simulator"
    choice = explain("ring_attention", q, k, v, group=TwoRanks())
    assert choice.provider == "torch"
    assert "a ring of 2 ranks, each a process of its own" in choice.refusals["nki-simulator"]


def test_the_reference_gathers():
    q, k, v = cases.heads(20)
    mask = torch.arange(20)[None] % 3 > 0
    result = ring_attention(q, k, v, group=TwoRanks(), key_length=31, key_mask=mask, return_lse=True)
    twice, both = [torch.cat([t, t], 1) for t in (k, v)], torch.cat([mask, mask], 1)
    both[:, 31:] = False
    cases.check(result.output, q, *twice, both)
    torch.testing.assert_close(result.lse.double(), cases.exact(q, *twice, mask=both)[1])
    assert int(result.lost_rows) == 0
    assert ring_attention(q, k, v, group=TwoRanks()).lse is None


def test_on_a_device_the_kernel_is_launched_with_everyone_s_statistics(monkeypatch):
    """The device's provider, with the launch itself taken out: what each rank decides about both ranks' keys."""
    from omni_neuron_kernels import nki_attention

    launches = []

    class Module:
        @staticmethod
        def launch(*arguments):
            launches.append(arguments)
            q = arguments[0]
            return q, torch.zeros(q.shape[:2]), torch.zeros(2, 128, dtype=torch.int32)

        ring_attention = {nki_attention.CORES: launch}  # noqa: RUF012

    class Longer(TwoRanks):
        def all_gather(self, tensor, dim):
            other = tensor.clone()
            if tensor.dtype == torch.float32:
                other[..., 1:3] *= 1000  # of norms and radii
            return torch.cat([tensor, other], dim)

    class Needier(TwoRanks):
        """Whose other rank needs a shift for head 1 and the maximum for head 2; this one needs nothing."""

        def all_gather(self, tensor, dim):
            other = tensor if tensor.dtype == torch.float32 else torch.tensor([[[0, 1, 2]]])
            return torch.cat([tensor, other], dim)

    monkeypatch.setattr(nki_attention, "kernels_of", lambda name: Module)
    q, k, v = cases.heads(20)
    given = {"scale": 0.25, "key_mask": None, "return_lse": True, "kv_prefetch_depth": 2, "key_length": 40}
    for group, way in ((TwoRanks(), "unshifted"), (Longer(), "running_maximum")):
        result = nki_attention.ring_attention(q, k, v, group=group, replica_groups=((4, 6),), **given)
        assert launches[-1][3:] == (0.25, (way,) * 3, ((4, 6),), 2, True, (), ())
        assert result.output.shape == q.shape and result.lse.shape == (1, 3, 20)
    nki_attention.ring_attention(q, k, v, group=Needier(), replica_groups=((4, 6),), **given)
    assert launches[-1][4] == REGIMES
    (biases,) = launches[-1][-1]
    assert torch.equal(biases, torch.zeros(3, 1)), "a head that needs no shift here has one of zero"
    nki_attention.ring_attention(q, k, v, group=TwoRanks(), replica_groups=((4, 6),), **{**given, "key_length": 31})
    (mask,) = launches[-1][-2]
    assert mask.tolist() == [[1.0] * 11 + [0.0] * 9], "rank 1 of 2 has keys 20 to 39"


REFUSED = {
    "head dim": ({"dim": 256}, {}, "head dim 256, at most 128"),
    "scale": ({}, {"scale": -1.0}, "above zero"),
    "dtype": ({"dtype": torch.float16}, {}, "torch.float16"),
    "queries": ({"queries": 40_000, "keys": 8, "count": 1, "dim": 128}, {}, "bytes of SBUF per partition"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_outside_a_limit_torch_runs_and_says_why(name):
    shape, options, reason = REFUSED[name]
    tensors = cases.heads(**{"queries": 8, **shape})
    choice = explain("ring_attention", *tensors, group=Group(), **options)
    assert choice.provider == "torch" and reason in choice.refusals["nki-simulator"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_length": 17}, r"valid are 1\.\.16 \(2 ranks of 8 keys each\)"),
        ({"key_length": 0}, r"valid are 1\.\.16"),
        ({"replica_groups": [[0, 1]]}, r"\(4, 6\) among them"),
        ({"replica_groups": [[4, 6], [1]]}, "of one size"),
        ({"kv_prefetch_depth": 0}, "valid are 1 and more"),
        ({"key_mask": torch.ones(1, 8)}, "valid is torch.bool"),
        ({"key_mask": torch.ones(1, 9, dtype=torch.bool)}, "key_mask has shape"),
    ],
)
def test_arguments_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        ring_attention(*cases.heads(8), group=TwoRanks(), **options)


def _launches_of_compiled_ranks(monkeypatch, q, k, v, key_mask, key_length):
    """`ring_attention` compiled on two ranks, with a provider that takes it on the CPU: nodes and kernel arguments."""
    from omni_neuron_kernels import dispatch, nki_attention

    launches, nodes = [], []

    class Module:
        @staticmethod
        def launch(*arguments):
            launches.append(arguments)
            return arguments[0], None

        ring_attention = {nki_attention.CORES: launch}  # noqa: RUF012

    def backend(graph, inputs):
        nodes.append([node for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    candidates = dispatch._candidates
    taking = dispatch.Implementation(nki_attention.ring_in_graph, nki_attention.ring_limits, 100)
    fake = (dispatch._Candidate("nki", "here", taking),)
    monkeypatch.setattr(dispatch, "_candidates", lambda op: fake if op == "ring_in_graph" else candidates(op))
    monkeypatch.setattr(nki_attention, "kernels_of", lambda name: Module)
    rows = k[0].shape[1]
    masks = [nki_attention.ring_mask(k[n], n, 2, key_length, key_mask and key_mask[n]) for n in range(2)]
    packed = []
    for keys, mask in zip(k, masks, strict=True):
        chosen = torch.ones(len(keys), rows, dtype=torch.bool) if mask is None else mask
        sums, counts = torch.where(chosen[..., None, None], keys, 0).float().sum(1), chosen.sum(1).float()
        packed.append(torch.cat([sums, counts[:, None, None].expand(*sums.shape[:2], 1)], -1))

    class OfTwo:
        ranks, size = (1, 0), 2

        def __init__(self, rank):
            self.rank = rank

        def all_gather(self, tensor, dim):
            torch._assert(tensor.shape[0] == 1 and dim == 0, "one tensor of a rank")
            other = packed[1 - self.rank][None]
            return torch.cat([tensor, other] if self.rank == 0 else [other, tensor], 0)

    for rank in range(2):
        torch._dynamo.reset()

        options = {"group": OfTwo(rank), "replica_groups": [(1, 0)], "key_length": key_length}

        def attend(q, k, v, mask, options=options):
            return ring_attention(q, k, v, key_mask=mask, **options).output

        compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=False)
        with torch.inference_mode():
            compiled(q[rank], k[rank], v[rank], key_mask and key_mask[rank])
    return nodes, launches


@pytest.mark.parametrize("masked", [False, True])
def test_compiled_the_ring_is_one_node_whose_kernel_is_exact(masked, monkeypatch):
    q, k, v = (tensor.chunk(2, 1) for tensor in cases.heads(40))
    length, key_mask, whole = 40, None, None
    if masked:
        # Keys beyond the length and masked ones hold anything; half of the scores are far below zero.
        length = 31
        key_mask = [torch.arange(20)[None] % 3 > 0, torch.arange(20)[None] % 2 > 0]
        whole = torch.cat(key_mask, 1) & (torch.arange(40) < length)
        k = [torch.where(mask[..., None, None], keys - 100, math.nan) for mask, keys in zip(key_mask, k, strict=True)]
    nodes, launches = _launches_of_compiled_ranks(monkeypatch, q, k, v, key_mask, length)
    monkeypatch.undo()
    for calls in nodes:
        [node] = [node for node in calls if "ring_attention" in str(node.target)]
        assert node.args[4:] == (0.25, [1, 0], 2, 1)
        assert not any("scaled_dot" in str(call.target) for call in calls)
    world = {1: launches[0], 0: launches[1]}
    results = run_spmd(cases.kernels("ring_attention").ring_attention, [world[n] for n in range(2)], lnc=2)
    output = torch.cat([results[n][0].unflatten(0, (1, -1)).transpose(1, 2) for n in (1, 0)], 1)
    clean = torch.cat([torch.nan_to_num(keys) for keys in k], 1)
    cases.check(output, torch.cat(q, 1), clean, torch.cat(v, 1), whole)
    assert [int(result[-1].sum()) for result in results] == [0, 0]


def test_where_no_kernel_takes_a_compiled_ring_its_reference_is_traced():
    q, k, v = cases.heads(20)
    reasons = ring_refusal(q, k, v, group=TwoRanks(), scale=0.25)
    assert "not on a Neuron device" in reasons and "each a process of its own" in reasons
    assert "no torch reference" in reasons
    assert ring_refusal(q, k, v, group=Group(), scale=0.25) is None

    def attend(q, k, v):
        return ring_attention(q, k, v, group=TwoRanks()).output

    torch._dynamo.reset()
    with torch.inference_mode():
        compiled = torch.compile(attend, backend="eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(compiled, attend(q, k, v))
