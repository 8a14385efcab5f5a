# SPDX-License-Identifier: Apache-2.0
"""Planning on a model of round numbers: tokens, memory, traffic, times, errors and suggestions."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import pytest

from omni_neuron_parallel.planning import (
    GIB,
    MEASURED,
    TARGETS,
    Case,
    Figure,
    Layout,
    Linear,
    ModelSizes,
    PlanError,
    Target,
    TokenSplit,
    Traffic,
    VaeSizes,
    Vector,
    VideoShape,
    Weights,
    plan,
    plan_as_json,
    plan_memory,
    plan_traffic,
    plan_work,
    suggest,
    suggestions_as_json,
)
from omni_neuron_runtime import hbm_bytes_per_core

TRN2 = TARGETS["trn2"]
SHAPE = VideoShape(64, 128, 9)  # latent 3×8×16, 96 tokens


def model(layers: int = 2, heads: int = 8, head_dim: int = 16) -> ModelSizes:
    dim = heads * head_dim
    return ModelSizes(
        name="toy",
        experts=2,
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        ffn=4 * dim,
        text_length=10,
        patch=(1, 2, 2),
        branches=2,
        norm_across_heads=True,
        dit=Weights(
            (
                Linear("attention", dim, 3 * dim, layers, "column"),
                Linear("attention", dim, dim, layers, "row"),
                Linear("feed-forward", dim, 4 * dim, layers, "column"),
                Linear("feed-forward", 4 * dim, dim, layers, "row"),
            ),
            (Vector(dim, layers, split=True), Vector(dim, itemsize=4)),
        ),
        text_encoder=Weights((Linear("text", 8, 30, split="column", rows="lookup", bias=False),)),
        vae=VaeSizes(
            parameters=1000,
            latent_channels=16,
            spatial_stride=8,
            temporal_stride=4,
            cached_elements=100,
            peak_elements=50,
            tile_pixels=64,
            tile_stride=48,
        ),
    )


def case(layout: Layout, shape: VideoShape = SHAPE) -> Case:
    return Case(model(), layout, shape)


def test_every_figure_has_a_source_and_a_unit() -> None:
    for target in TARGETS.values():
        for field in dataclasses.fields(Target):
            figure = getattr(target, field.name)
            if field.name != "name":
                assert isinstance(figure, Figure)
                assert figure.value > 0
                assert figure.unit
                assert len(figure.source) > 20
    assert "fork" in MEASURED.source


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_memory_of_a_core_is_the_runtimes(target: str) -> None:
    assert TARGETS[target].hbm_bytes.value == hbm_bytes_per_core(target)


def test_tokens_and_their_padding() -> None:
    assert SHAPE.tokens(model()) == 96
    split = TokenSplit.of(96, Layout(4, 5, sequence_parallel=True))
    assert (split.rows, split.stream, split.padded) == (20, 5, 100)
    assert split.waste == pytest.approx(0.04)
    assert TokenSplit.of(96, Layout(4, 5)).stream == 20
    assert TokenSplit.of(3, Layout(1, 8)).padded == 8


def joint_model() -> ModelSizes:
    """The toy with its text as a second stream of 10 tokens, and a modulation that TP splits."""
    one = model()
    text = tuple(replace(linear, rows="joint") for linear in one.dit.linears)
    modulation = Linear("modulation", one.hidden, 6 * one.hidden, 2 * one.layers, "column", "step")
    weights = Weights((*one.dit.linears, *text, modulation), one.dit.vectors)
    return replace(one, dit=weights, joint_text=True, norm_across_heads=False, vae=replace(one.vae, at_once=True))


def test_a_text_that_joins_self_attention() -> None:
    plain, joint = (Case(sizes, Layout(2, 3), SHAPE) for sizes in (model(), joint_model()))
    assert (joint.tokens.rows, joint.tokens.joint, plain.tokens.joint) == (32, 10, 0)
    work = {item.name: item for item in plan_work(joint)}
    alone = {item.name: item for item in plan_work(plain)}
    assert "cross-attention scores and values" not in work
    scores = "self-attention scores and values"
    assert work[scores].flops == pytest.approx(alone[scores].flops * 106**2 / 96**2)
    assert work[scores].rank_flops == pytest.approx(alone[scores].rank_flops * (42 * 106) / (32 * 96))
    assert work["feed-forward"].rank_flops == pytest.approx(alone["feed-forward"].rank_flops * 42 / 32)
    assert "cross-attention K and V" not in {item.name for item in plan_memory(joint, GIB).items}

    def sent(case: Case) -> dict[str, tuple[int, int]]:
        return {item.name: (item.calls, item.message) for item in plan_traffic(case) if item.axis == "tp"}

    assert sent(joint)["sums of feed-forward"] == (4, 42 * 128 * 2)
    assert sent(joint)["modulation"] == (2, 4 * 6 * 128 * 2)
    with pytest.raises(PlanError, match="ring cannot be compiled for a device: the text joins self-attention"):
        plan(Case(joint_model(), Layout(2, 3, method="ring"), SHAPE), TRN2)
    assert plan_as_json(plan(joint, TRN2), 6)["other_method"] is None
    found = suggest(joint_model(), SHAPE, TRN2, 8)
    assert {choice.case.layout.method for each in found for choice in (each.plan, *each.others)} == {"gather"}
    split = sent(Case(joint_model(), Layout(2, 3, sequence_parallel=True), SHAPE))
    assert split["sums of feed-forward"] == (4, 32 * 128 * 2)
    assert split["sums of the text's feed-forward"] == (4, 10 * 128 * 2)


def test_a_text_in_the_stream() -> None:
    one = Case(replace(model(), single_stream=True, text_length=24), Layout(2, 3), SHAPE)
    assert (one.tokens.total, one.tokens.rows) == (120, 40)
    work, alone = ({item.name: item for item in plan_work(each)} for each in (one, Case(model(), Layout(2, 3), SHAPE)))
    assert "cross-attention scores and values" not in work
    assert work["feed-forward"].rank_flops == pytest.approx(alone["feed-forward"].rank_flops * 40 / 32)
    assert "cross-attention K and V" not in {item.name for item in plan_memory(one, GIB).items}


def test_a_vae_that_decodes_all_frames_together() -> None:
    [frame], [clip] = (
        [item.bytes for item in plan_memory(Case(sizes, Layout(), SHAPE), GIB).items if "largest layer" in item.name]
        for sizes in (model(), joint_model())
    )
    assert clip == 3 * frame


@pytest.mark.parametrize(
    ("shape", "setting", "message"),
    [
        (VideoShape(100, 128, 9), "height", "100 is not a multiple of 16; the nearest are 96 and 112"),
        (VideoShape(64, 8, 9), "width", "8 is not a multiple of 16; the nearest are 16 and 32"),
        (VideoShape(64, 128, 12), "frames", "12 is not 4 k [+] 1 frames; the nearest are 9 and 13"),
        (VideoShape(64, 128, 0), "frames", "0 is not 4 k [+] 1 frames; the nearest are 1 and 5"),
    ],
)
def test_videos_that_cannot_be(shape: VideoShape, setting: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        plan(case(Layout(), shape), TRN2)
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("layout", "setting", "message"),
    [
        (Layout(3), "tp", "3 does not divide the 8 attention heads; valid are 1, 2, 4, 8"),
        (Layout(0), "tp", "0 is not 1 or more"),
        (Layout(cfg=4), "cfg", "4 ranks for 2 branches of guidance; valid are 1, 2"),
        (Layout(8, 8, 2), "devices", "TP8×CP8×CFG2 is a world of 128 ranks, one a core, and there are 64"),
        (Layout(4, 2, 1, 3), "vae_patch", "3 does not divide the world of 8 ranks; valid are 1, 2, 4, 8"),
        (Layout(method="both"), "method", "'both' is not one of gather, ring"),  # type: ignore[arg-type]
    ],
)
def test_layouts_that_cannot_be(layout: Layout, setting: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        plan(case(layout), TRN2)
    assert caught.value.setting == setting


def test_weights_by_split() -> None:
    linear = Linear("any", 100, 30, 2, "column")
    assert linear.elements(1) == 2 * 30 * 101
    assert linear.elements(4) == 2 * 8 * 101  # 30 rows as 4 × 8, zero rows included
    assert replace(linear, split="row").elements(4) == 2 * 30 * (25 + 1)  # the bias is whole
    assert replace(linear, split="whole").elements(4) == linear.elements(1)
    assert replace(linear, multiple_of=10).elements(4) == 2 * 10 * 101
    weights = Weights((linear,), (Vector(10, split=True, itemsize=4),))
    assert weights.bytes(4, 2) == 2 * linear.elements(4) + 4 * 3
    assert linear.flops(7, 1) == 2 * 2 * 7 * 30 * 100
    assert replace(linear, rows="lookup").flops(7, 1) == 0


@pytest.mark.parametrize(
    ("collective", "message", "received", "hops"),
    [
        ("all_gather", 8000, 7000, 1),
        ("reduce_scatter", 8 * 2**20, 7 * 2**20, 3),
        ("all_reduce", 8 * 2**20, 14 * 2**20, 6),
        ("all_gather", 64 * 2**20, 56 * 2**20, 4),
        ("rotate", 64 * 2**20, 64 * 2**20, 1),
    ],
)
def test_bytes_and_hops_of_a_collective(collective: str, message: int, received: int, hops: int) -> None:
    traffic = Traffic("cp", "any", collective, 8, 10, message)  # type: ignore[arg-type]
    assert (traffic.bytes, traffic.hops) == (10 * received, hops)
    expected = 10 * received / TRN2.link_bandwidth.value + 10 * hops * TRN2.hop_seconds.value
    assert traffic.seconds(TRN2) == pytest.approx(expected)


def test_gather_and_ring_move_the_same_bytes_and_the_ring_holds_a_cp_th() -> None:
    moved, held = {}, {}
    for method in ("gather", "ring"):
        asked = case(Layout(2, 4, method=method))  # type: ignore[arg-type]
        [moved[method]] = [item.bytes for item in plan_traffic(asked) if item.name == "K and V"]
        [held[method]] = [
            item.bytes for item in plan_memory(asked, 0).items if item.name.startswith("K and V of other ranks")
        ]
    # Two branches, two layers, three of four shards of K and V: 24 tokens of 64 channels, two bytes each.
    assert moved["gather"] == moved["ring"] == 2 * 2 * 3 * 2 * 24 * 64 * 2
    assert held["gather"] == 4 * held["ring"]


def test_sequence_parallelism_moves_as_much_and_holds_less() -> None:
    plain, split = (case(Layout(4, sequence_parallel=switch)) for switch in (False, True))
    sums = sum(item.bytes for item in plan_traffic(plain) if item.name.startswith("sums"))
    parts = sum(item.bytes for item in plan_traffic(split) if item.name.startswith(("sums", "tokens entering")))
    assert sums == parts
    held = [
        next(item.bytes for item in plan_memory(asked, 0).items if item.name == "activations of a layer")
        for asked in (plain, split)
    ]
    assert held[0] - held[1] == 96 * 3 // 4 * 128 * (2 + 4)


def test_nothing_is_sent_by_one_rank() -> None:
    assert plan_traffic(case(Layout())) == ()


def test_branches_on_two_ranks_halve_the_work_and_send_the_predictions() -> None:
    one, two = (plan(case(Layout(cfg=cfg)), TRN2) for cfg in (1, 2))
    assert [part.rank_flops for part in one.work] == [2 * part.rank_flops for part in two.work]
    assert [part.flops for part in one.work] == [part.flops for part in two.work]
    [transfer] = two.transfers
    assert transfer.traffic.bytes == 16 * 3 * 8 * 16 * 2


@pytest.mark.parametrize(("bandwidth", "all_hidden"), [(1e15, True), (1e3, False)])
def test_a_ring_hides_what_fits_behind_its_blocks(bandwidth: float, all_hidden: bool) -> None:
    instant = replace(TRN2.hop_seconds, value=0.0)
    target = replace(TRN2, link_bandwidth=replace(TRN2.link_bandwidth, value=bandwidth), hop_seconds=instant)
    found = plan(case(Layout(1, 4, method="ring")), target)
    [ring] = [transfer for transfer in found.transfers if transfer.traffic.collective == "rotate"]
    attention = next(part for part in found.work if part.name.startswith("self-attention"))
    blocks = max(
        attention.rank_flops / target.matmul_flops.value, attention.rank_exponentials / target.exponentials.value
    )
    assert ring.hidden == pytest.approx(ring.seconds if all_hidden else blocks * 3 / 4)
    assert ring.exposed == pytest.approx(ring.seconds - ring.hidden)
    assert found.step_seconds == pytest.approx(
        max(found.compute_seconds, found.hbm_seconds) + sum(transfer.exposed for transfer in found.transfers)
    )
    gathered = plan(case(Layout(1, 4, method="gather")), target)
    assert gathered.hidden_seconds == 0


def test_measured_terms_are_the_sources_at_its_own_layout_and_scale_from_it() -> None:
    # The source's sizes: 40 heads of 128, 21×45×80 tokens.
    theirs = Case(model(heads=40, head_dim=128), Layout(4, 8, 2), VideoShape(720, 1280, 81))
    assert theirs.tokens.total == MEASURED.tokens

    def measured(asked: Case) -> dict[str, int]:
        return {item.name: item.bytes for item in plan_memory(asked, 0).items if item.basis == "measured"}

    spill, scratch = "DMA spill of graphs that gather", "scratchpad of the fork's graphs"
    at_source = measured(theirs)
    assert at_source[spill] == round(2 * 3.7 * GIB)
    assert at_source[scratch] == round(1.5 * GIB)
    at_tp8 = measured(replace(theirs, layout=Layout(8, 4, 2)))
    assert at_tp8[spill] == at_source[spill] / 2  # half the heads
    assert at_tp8[scratch] == at_source[scratch] * 2  # twice the tokens
    assert spill not in measured(replace(theirs, layout=Layout(4, 8, 2, method="ring")))
    assert measured_comparison_of(theirs) is not None
    assert measured_comparison_of(replace(theirs, layout=Layout(4, 8, 2, method="ring"))) is None


def measured_comparison_of(asked: Case) -> object:
    return plan_as_json(plan(asked, TRN2), 64)["memory"]["measured"]


@pytest.mark.parametrize("heads", [8, 40])
def test_one_account_of_what_a_graph_makes_and_drops_counts(heads: int) -> None:
    memory = plan_memory(Case(model(heads=heads), Layout(2, 2), SHAPE), 24 * GIB)
    accounts = {
        name: sum(item.bytes for item in memory.items if item.name.startswith(starts))
        for name, starts in {
            "layer": ("activations of a layer", "K and V of other ranks"),
            "embedding": ("embedding of all tokens",),
            "scratch": ("scratchpad",),
        }.items()
    }
    rest = sum(
        item.bytes
        for item in memory.items
        if item.stage != "decoding"
        and not item.name.startswith(("activations", "K and V of other", "embedding", "scratchpad"))
    )
    assert memory.total("denoising") == rest + max(accounts.values())
    unmeasured = sum(item.bytes for item in memory.items if item.basis == "measured" and item.stage == "always")
    by_formula = max(accounts["layer"], accounts["embedding"])
    assert memory.formula_total("denoising") == rest - unmeasured + by_formula


def test_the_verdict_names_what_takes_the_room() -> None:
    memory = plan_memory(case(Layout()), 1000)
    assert not memory.fits
    assert "does not fit" in memory.verdict
    assert "unnamed term of the fork's sum 0.5 GiB" in memory.verdict
    assert replace(memory, capacity=24 * GIB).verdict.startswith("fits: ")


def test_tiles_need_less_than_whole_frames() -> None:
    shape = VideoShape(256, 256, 9)
    whole, tiled = (
        next(
            item
            for item in plan_memory(case(Layout(4, vae_patch=ranks), shape), 0).items
            if "feature cache" in item.name
        )
        for ranks in (1, 4)
    )
    assert whole.bytes == 2 * 100 * 32 * 32 * 2
    assert tiled.bytes == 2 * 100 * 8 * 8 * 2


def test_suggestions_fill_the_devices_and_are_ranked() -> None:
    ranked = suggest(model(), SHAPE, TRN2, 12, vae_patch=4)
    layouts = [choice.plan.case.layout for choice in ranked]
    sizes = {(layout.tp, layout.cp, layout.cfg) for layout in layouts}
    assert len(sizes) == len(layouts)
    assert sizes == {
        (tp, cp, cfg) for tp in (1, 2, 4, 8) for cp in range(1, 13) for cfg in (1, 2) if 12 % (tp * cp * cfg) == 0
    }
    seconds = [choice.plan.step_seconds for choice in ranked]
    assert seconds == sorted(seconds)
    assert all(layout.world_size % layout.vae_patch == 0 and layout.vae_patch <= 4 for layout in layouts)
    for choice in ranked:
        layout = choice.plan.case.layout
        assert len(choice.others) + 1 == (1 if layout.cp == 1 else 2) * (1 if layout.tp == 1 else 2)
        assert choice.plan.memory.fits or not any(other.memory.fits for other in choice.others)


def test_suggestions_keep_to_what_is_asked_for() -> None:
    ranked = suggest(model(), SHAPE, TRN2, 8, method="ring", sequence_parallel=True)
    for choice in ranked:
        layout = choice.plan.case.layout
        assert choice.others == ()
        assert layout.method == "ring"
        assert layout.sequence_parallel is (layout.tp > 1)


def test_json_is_plain_data_with_the_documented_keys() -> None:
    data = plan_as_json(plan(case(Layout(2, 2)), TRN2), 64)
    assert list(data) == [
        "format",
        "estimate",
        "model",
        "video",
        "target",
        "layout",
        "devices",
        "valid",
        "tokens",
        "memory",
        "vae",
        "flops",
        "traffic",
        "seconds",
        "other_method",
    ]
    assert json.loads(json.dumps(data)) == data
    assert data["other_method"]["layout"]["method"] == "ring"
    assert plan_as_json(plan(case(Layout(2)), TRN2), 64)["other_method"] is None
    [first, *_] = suggestions_as_json(suggest(model(), SHAPE, TRN2, 2))
    assert set(first) == {"layout", "seconds", "peak_bytes", "fits", "verdict", "others"}
