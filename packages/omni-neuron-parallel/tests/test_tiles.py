# SPDX-License-Identifier: Apache-2.0
"""Tile plans, their assignment to ranks, and blending."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from parallel_ranks import random

from omni_neuron_parallel import TilePlan, assign_tiles, stitch_tiles

# Latents of 480p and 720p, with diffusers' tiles of 256 pixels every 192.
DIFFUSERS = {"tile": (32, 32), "stride": (24, 24), "scale": 8}
P480 = TilePlan.for_size(60, 104, **DIFFUSERS)
P720 = TilePlan.for_size(90, 160, **DIFFUSERS)


def test_plan_of_720p() -> None:
    assert P720.rows == (0, 24, 48, 58)  # diffusers: 72, and 18 rows high
    assert P720.columns == (0, 24, 48, 72, 96, 120, 128)  # diffusers: 144, and 16 columns wide
    assert P720.count == 4 * 7
    assert P720.origins[8] == (24, 24)
    assert (P720.output_size, P720.output_tile) == ((720, 1280), (256, 256))
    assert P720.output_rows == (0, 192, 384, 464)


def test_plan_of_480p_has_no_tile_within_another() -> None:
    # diffusers has a fifth column, from 96: 8 columns that the fourth tile holds already.
    assert (P480.rows, P480.columns) == ((0, 24, 28), (0, 24, 48, 72))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 13, 14, 15, 20, 50])
@pytest.mark.parametrize(("tile", "stride"), [(8, 6), (8, 8), (8, 1), (5, 3)])
def test_tiles_of_one_shape_cover_every_size(size: int, tile: int, stride: int) -> None:
    plan = TilePlan.for_size(size, 3, tile=(tile, 4), stride=(stride, 4), scale=8)
    covered = torch.zeros(size, 3)
    for index, (row, column) in enumerate(plan.origins):
        assert plan.cut(covered, index).shape == (min(size, tile), 3)
        covered[row : row + plan.tile[0], column : column + plan.tile[1]] = 1
    assert covered.all()
    assert all(0 < after - before <= stride for before, after in pairwise(plan.rows))


def test_encoding_has_the_plan_of_decoding() -> None:
    plan = TilePlan.for_size(720, 1280, tile=(256, 256), stride=(192, 192), scale=Fraction(1, 8))
    assert plan.origins == tuple((8 * row, 8 * column) for row, column in P720.origins)
    assert (plan.output_size, plan.output_tile) == ((90, 160), (32, 32))
    assert (plan.output_rows, plan.output_columns) == (P720.rows, P720.columns)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 1284}, r"width = 1284: with scale 1/8 valid values are positive multiples of 8"),
        ({"tile": (256, 100)}, r"tile width = 100: with scale 1/8"),
        ({"stride": (90, 192)}, r"stride along the height = 90: with scale 1/8"),
        ({"height": 0}, r"height = 0"),
        ({"stride": (264, 192)}, r"stride along the height = 264 would leave gaps between tiles of 256; .* 8 to 256"),
        ({"scale": 0}, r"scale = 0"),
    ],
)
def test_plan_errors(arguments: dict[str, object], message: str) -> None:
    valid = {"height": 720, "width": 1280, "tile": (256, 256), "stride": (192, 192), "scale": Fraction(1, 8)}
    with pytest.raises(ValueError, match=message):
        TilePlan.for_size(**{**valid, **arguments})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the plan is for inputs of \(90, 160\)"):
        P720.cut(torch.zeros(90, 161), 0)


@pytest.mark.parametrize("plan", [P480, P720], ids=["480p", "720p"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_assignment_is_balanced(plan: TilePlan, ranks: int) -> None:
    assignment = assign_tiles(plan, ranks)
    assert sorted(index for tiles in assignment for index in tiles) == list(range(plan.count))
    assert len(assignment) == ranks
    loads = [len(tiles) for tiles in assignment]
    assert loads == sorted(loads, reverse=True)
    if plan.count >= ranks:
        assert max(loads) * ranks / plan.count <= 1.5
    else:
        assert (max(loads), min(loads)) == (1, 0)


def test_the_balance_of_whole_tiles_is_the_best_there_is() -> None:
    for count in range(1, 60):
        plan = TilePlan.for_size(1, count, tile=(1, 1), stride=(1, 1))
        for ranks in range(1, count + 1):
            loads = [len(tiles) for tiles in assign_tiles(plan, ranks)]
            assert max(loads) - min(loads) <= 1
            assert max(loads) * ranks / count <= 1.5 or ranks < count < 4 / 3 * ranks
    with pytest.raises(ValueError, match="over 0 ranks"):
        assign_tiles(P480, 0)


def cut_all(plan: TilePlan, picture: torch.Tensor) -> list[torch.Tensor]:
    return [plan.cut(picture, index).clone() for index in range(plan.count)]


def stitched(plan: TilePlan, tiles: list[torch.Tensor]) -> torch.Tensor:
    output = torch.full((*tiles[0].shape[:-2], *plan.output_size), torch.nan, dtype=tiles[0].dtype)
    stitch_tiles(plan, tiles, output)
    return output


def plain_blend(plan: TilePlan, tiles: list[torch.Tensor]) -> torch.Tensor:
    """Pixel by pixel, in float64, without any tensor arithmetic in common with `stitch_tiles`."""
    height, width = plan.output_tile
    blended: dict[int, torch.Tensor] = {}
    output = torch.zeros(plan.output_size, dtype=torch.float64)
    rows, columns = plan.output_rows, plan.output_columns
    for i, top in enumerate(rows):
        for j, left in enumerate(columns):
            index = i * len(columns) + j
            tile = tiles[index].double().clone()
            above = rows[i - 1] + height - top if i else 0
            for y in range(above):
                end = blended[index - len(columns)][height - above + y]
                tile[y] = end * (1 - y / above) + tile[y] * (y / above)
            beside = columns[j - 1] + width - left if j else 0
            for x in range(beside):
                end = blended[index - 1][:, width - beside + x]
                tile[:, x] = end * (1 - x / beside) + tile[:, x] * (x / beside)
            blended[index] = tile
            output[top : top + height, left : left + width] = tile
    return output


PLANS = {
    "even": TilePlan.for_size(20, 26, tile=(8, 8), stride=(6, 6)),
    "pulled back": TilePlan.for_size(21, 25, tile=(8, 8), stride=(6, 6)),
    "pulled back by nearly a stride": TilePlan.for_size(21, 27, tile=(8, 8), stride=(6, 6)),
    "overlap of more than half": TilePlan.for_size(17, 11, tile=(8, 6), stride=(3, 2)),
    "no overlap": TilePlan.for_size(16, 12, tile=(4, 4), stride=(4, 4)),
    "no overlap but the last": TilePlan.for_size(17, 13, tile=(4, 4), stride=(4, 4)),
    "one row": TilePlan.for_size(5, 14, tile=(8, 8), stride=(6, 6)),
    "one tile": TilePlan.for_size(5, 6, tile=(8, 8), stride=(6, 6)),
    "enlarged": TilePlan.for_size(11, 9, tile=(4, 4), stride=(3, 3), scale=3),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_blending_is_that_of_the_formula(plan: TilePlan) -> None:
    tiles = [random(*plan.output_tile, seed=index) for index in range(plan.count)]
    expected = plain_blend(plan, tiles)
    torch.testing.assert_close(stitched(plan, tiles).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("plan", [plan for name, plan in PLANS.items() if name != "enlarged"])
def test_tiles_of_one_picture_give_the_picture(plan: TilePlan) -> None:
    picture = random(2, *plan.size, seed=1)
    torch.testing.assert_close(stitched(plan, cut_all(plan, picture)), picture, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", range(33, 81))
def test_nothing_jumps_where_tiles_meet(size: int) -> None:
    """Tiles of a constant each: a seam would be a step of up to 1, a blend has slopes of 1 / overlap."""
    plan = TilePlan.for_size(1, size, tile=(1, 32), stride=(1, 24))
    tiles = [torch.full((1, 32), float(index % 2)) for index in range(plan.count)]
    overlaps = [32 - (after - before) for before, after in pairwise(plan.columns)]
    output = stitched(plan, tiles)
    # Where three tiles meet, the slopes of two overlaps add.
    assert float(output.diff().abs().max()) <= sum(1 / overlap for overlap in overlaps[-2:]) + 1e-6
    assert float(output[0, 0]) == 0.0
    assert float((output[0, -1] - (plan.count - 1) % 2).abs()) <= 1 / min(overlaps) + 1e-6


def test_low_precision_is_blended_in_float32() -> None:
    plan = PLANS["pulled back"]
    tiles = [random(*plan.output_tile, seed=index).bfloat16() for index in range(plan.count)]
    expected = plain_blend(plan, tiles)
    actual = stitched(plan, tiles)
    assert actual.dtype is torch.bfloat16
    # Rounded once an overlap, four at most, not once an operation.
    torch.testing.assert_close(actual.double(), expected, rtol=2**-7, atol=2**-8)


def test_stitching_needs_all_tiles() -> None:
    with pytest.raises(ValueError, match="11 tiles for a plan of 12"):
        stitch_tiles(P480, [torch.zeros(1)] * 11, torch.zeros(1))
