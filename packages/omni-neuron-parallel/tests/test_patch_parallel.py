# SPDX-License-Identifier: Apache-2.0
"""Tiles on several ranks: the result of one process bit for bit, in pieces of bounded size, on the right ranks only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from parallel_ranks import random, with_topology
from tile_ranks import ToyCodec, gathered_dtype, patch_parallel, returns_at_once, run

from omni_neuron_parallel import RankPool, TilePlan, Topology, assign_tiles, run_tiles
from omni_neuron_parallel.patch_parallel import MAX_GATHER_BYTES

# Pixels: 3 × 4 tiles, both axes pulled back; 2 × 1; one smaller than a tile; 1 × 2 and fewer than ranks.
SIZES = {(104, 88): 12, (72, 24): 2, (40, 24): 1, (48, 48): 2}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which on a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("direction", ["decode", "encode"])
@pytest.mark.parametrize(("size", "tiles"), SIZES.items())
def test_one_process(direction: str, size: tuple[int, int], tiles: int) -> None:
    output, computed = run(direction, size)
    assert computed == tiles
    shape = (2, 3, 17, *size) if direction == "decode" else (2, 4, 5, size[0] // 8, size[1] // 8)
    assert output is not None
    assert output.shape == shape
    assert output.isfinite().all()


def test_one_tile_is_the_whole() -> None:
    output, _ = run("decode", (40, 24))
    whole = torch.cat(list(ToyCodec().decode(random(2, 4, 5, 5, 3, seed=100))), dim=2)
    assert output is not None
    assert torch.equal(output, whole)


@pytest.mark.parametrize("direction", ["decode", "encode"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_give_the_result_of_one_process(direction: str, world: int, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[world])
    topology = Topology(cp=world, vae_patch=world)
    for size, count in SIZES.items():
        for frames_a_piece in (1, 3, 1000):
            plan = TilePlan.for_size(1, count, tile=(1, 1), stride=(1, 1))
            shares = [len(tiles) for tiles in assign_tiles(plan, world)]
            height, width = min(size[0], 48), min(size[1], 32)
            frame = 2 * (3 * height * width if direction == "decode" else 4 * (height // 8) * (width // 8)) * 4
            frames = 17 if direction == "decode" else 5
            piece = shares[0] * world * frame
            results = pool.run(with_topology, topology, patch_parallel, direction, size, frames_a_piece * piece + 1)
            assert [computed for computed, _, _ in results] == shares
            assert [equal for _, equal, _ in results] == [True] + [None] * (world - 1)
            runs = [min(frames_a_piece, frames - first) for first in range(0, frames, frames_a_piece)]
            assert [sizes for _, _, sizes in results] == [[piece * run for run in runs]] * world


def test_a_subgroup_decodes_and_other_ranks_do_nothing(four_ranks: RankPool) -> None:
    topology = Topology(tp=2, cp=2, vae_patch=2)
    results = four_ranks.run(with_topology, topology, patch_parallel, "decode", (104, 88), MAX_GATHER_BYTES)
    assert [computed for computed, _, _ in results] == [6, 6, 0, 0]
    assert [equal for _, equal, _ in results] == [True, None, None, None]
    assert [len(sizes) for _, _, sizes in results] == [1, 1, 0, 0]
    # Also where the decoding block never arrives.
    assert all(four_ranks.run(with_topology, topology, returns_at_once))
    assert all(four_ranks.run(with_topology, Topology(tp=4), returns_at_once))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(two_ranks: RankPool, dtype: torch.dtype) -> None:
    results = two_ranks.run(with_topology, Topology(tp=2, vae_patch=2), gathered_dtype, dtype)
    assert results == [True, None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_gather_bytes": 127}, r"max_gather_bytes = 127: one frame of 4 tiles of 2×2 takes 128 bytes"),
        ({"frames": 4}, r"a tile's chunks have 3 frames; frames = 4"),
        ({"frames": 2}, r"a chunk \(1, 2, 1, 2, 2\) after 2 frames does not fit an output tile \(1, 2, 2, 2, 2\)"),
        ({"channels": 1}, r"a chunk \(1, 2, 1, 2, 2\) after 0 frames"),
    ],
)
def test_errors(options: dict[str, int], message: str) -> None:
    plan = TilePlan.for_size(4, 4, tile=(2, 2), stride=(2, 2))
    arguments = {"channels": 2, "frames": 3, "dtype": torch.float32, **options}
    with pytest.raises(ValueError, match=message):
        run_tiles(torch.zeros(1, 2, 3, 4, 4), lambda tile: tile.split(1, 2), plan, **arguments)  # type: ignore[arg-type]
