# SPDX-License-Identifier: Apache-2.0
"""Device memory of the fullest rank, term by term: what formulas say, and what was measured elsewhere, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from omni_neuron_parallel.layers import shard_size
from omni_neuron_parallel.planning.hardware import GIB, MEASURED
from omni_neuron_parallel.planning.layout import Case
from omni_neuron_parallel.tiles import TilePlan, assign_tiles

Stage = Literal["always", "denoising", "decoding"]
Basis = Literal["formula", "measured"]
# What a solver of order 2 keeps of the latents, in float32: the latents, the last ones, the prediction and two before.
LATENT_COPIES = 5
FLOAT32 = 4


@dataclass(frozen=True)
class MemoryItem:
    """One row of the memory table.

    Attributes:
        name: what it is.
        bytes: on the fullest rank.
        stage: when it is there.
        formula: how the number comes about.
        basis: "measured" where the formula scales a figure that a fork measured on a device.
        counted: whether it is in the sum; False where a larger account of the same thing is.
        by_formula: whether it is in the sum of formulas alone.
    """

    name: str
    bytes: int
    stage: Stage
    formula: str
    basis: Basis = "formula"
    counted: bool = True
    by_formula: bool = True


@dataclass(frozen=True)
class Memory:
    """The memory table of one layout.

    Attributes:
        items: the rows.
        capacity: bytes of a core.
    """

    items: tuple[MemoryItem, ...]
    capacity: int

    def total(self, stage: Stage) -> int:
        """Bytes during `stage`, what is there always included."""
        return sum(item.bytes for item in self.items if item.counted and item.stage in ("always", stage))

    def formula_total(self, stage: Stage) -> int:
        """The same from formulas alone, without what a fork measured."""
        return sum(item.bytes for item in self.items if item.by_formula and item.stage in ("always", stage))

    @property
    def peak(self) -> int:
        """The larger of both stages."""
        return max(self.total("denoising"), self.total("decoding"))

    @property
    def peak_stage(self) -> Stage:
        """The stage of the peak."""
        return "denoising" if self.total("denoising") >= self.total("decoding") else "decoding"

    @property
    def fits(self) -> bool:
        """Whether the peak is within the capacity."""
        return self.peak <= self.capacity

    @property
    def verdict(self) -> str:
        """One sentence: fits with how much left, or what takes the room."""
        verb = "fits" if self.fits else "does not fit"
        peak = f"{verb}: {gib(self.peak)} of {gib(self.capacity)} while {self.peak_stage}"
        if self.fits:
            return peak
        rows = [item for item in self.items if item.counted and item.stage in ("always", self.peak_stage)]
        largest = sorted(rows, key=lambda item: -item.bytes)[:4]
        return f"{peak}, of it " + ", ".join(f"{item.name} {gib(item.bytes)}" for item in largest)


def gib(size: float) -> str:
    """`size` bytes for people."""
    return f"{size / GIB:.1f} GiB"


def plan_memory(case: Case, capacity: int) -> Memory:
    """The memory table of the rank that holds most, which is one that decodes."""
    return Memory((*_resident(case), *_denoising(case), *_decoding(case)), capacity)


def _resident(case: Case) -> Iterator[MemoryItem]:
    model, layout = case.model, case.layout
    yield MemoryItem(
        "DiT weights",
        model.experts * model.dit.bytes(layout.tp, model.itemsize),
        "always",
        f"{model.experts} experts × (split weights / {layout.tp} + whole ones)",
    )
    yield MemoryItem(
        "text encoder weights",
        model.text_encoder.bytes(layout.tp, model.itemsize),
        "always",
        f"heads, features and vocabulary / {layout.tp}",
    )
    yield MemoryItem(
        "VAE decoder weights", model.vae.parameters * model.itemsize, "always", "whole, on the ranks that decode"
    )
    if model.has_cross_attention:
        yield MemoryItem(
            "cross-attention K and V",
            case.forwards * model.layers * 2 * model.text_length * case.local_hidden * model.itemsize,
            "always",
            f"{case.forwards} branches × {model.layers} layers × 2 × {model.text_length} tokens × {case.local_hidden} "
            f"channels × {model.itemsize} B",
        )
    yield MemoryItem(
        "unnamed term of the fork's sum",
        round(MEASURED.unnamed),
        "always",
        "0.55 GiB, not scaled",
        "measured",
        by_formula=False,
    )
    if layout.method == "gather" and layout.cp > 1:
        share = case.tokens.padded * case.local_hidden / MEASURED.gathered_values
        yield MemoryItem(
            "DMA spill of graphs that gather",
            round(model.experts * MEASURED.dma_spill * share),
            "always",
            f"{model.experts} graphs × 3.7 GiB × {share:.3f}, gathered values relative to the fork's layout",
            "measured",
            by_formula=False,
        )


def _denoising(case: Case) -> Iterator[MemoryItem]:
    model, tokens = case.model, case.tokens
    yield MemoryItem(
        "latents and solver history",
        LATENT_COPIES * case.shape.latent_values(model) * FLOAT32,
        "denoising",
        f"{LATENT_COPIES} × {case.shape.latent_values(model)} × {FLOAT32} B",
    )
    # Three accounts of the tensors that a graph makes and drops; the largest counts.
    embedding = _embedding(case)
    layer = (_layer_activations(case), _key_values(case))
    scratch = MemoryItem(
        "scratchpad of the fork's graphs",
        round(MEASURED.scratch * tokens.rows / MEASURED.tokens_per_rank),
        "denoising",
        f"1.5 GiB × {tokens.rows} / {MEASURED.tokens_per_rank} tokens a rank; the largest of these accounts counts",
        "measured",
    )
    sizes = (sum(item.bytes for item in layer), embedding.bytes, scratch.bytes)
    by_formula, counted = max(sizes[:2]), max(sizes)
    for items, size in zip((layer, (embedding,), (scratch,)), sizes, strict=True):
        for item in items:
            yield replace(item, counted=size == counted, by_formula=item.basis == "formula" and size == by_formula)


def _embedding(case: Case) -> MemoryItem:
    """What goes into and comes out of the layer that every rank applies to all tokens."""
    tp, tokens, itemsize = case.layout.tp, case.tokens.total, case.model.itemsize
    values = max((sum(linear.local_shape(tp)) for linear in case.model.dit.applied_to("all")), default=0)
    formula = f"{tokens} tokens × {values} values × {itemsize} B, on every rank, before they are split"
    return MemoryItem("embedding of all tokens", tokens * values * itemsize, "denoising", formula)


def _layer_activations(case: Case) -> MemoryItem:
    """The stream, a float32 copy of it for the norm, and what attention or the feed-forward holds at a time."""
    model, tokens = case.model, case.tokens
    attention = model.hidden + 4 * case.local_hidden
    feed_forward = 2 * model.hidden + 2 * shard_size(model.ffn, case.layout.tp)
    inside = max(attention, feed_forward)
    stream, rows = tokens.stream + tokens.joint, tokens.rows + tokens.joint
    size = stream * model.hidden * (model.itemsize + FLOAT32) + rows * inside * model.itemsize
    formula = (
        f"{stream} × {model.hidden} × ({model.itemsize} + {FLOAT32}) B + {rows} × {inside} × "
        f"{model.itemsize} B: the larger of attention (input, q, k, v, output) and feed-forward (input, output, inside "
        "before and after its activation)"
    )
    return MemoryItem("activations of a layer", size, "denoising", formula)


def _key_values(case: Case) -> MemoryItem:
    """K and V of self-attention beyond this rank's own, in one layer."""
    layout, tokens, itemsize = case.layout, case.tokens, case.model.itemsize
    rows = {"gather": tokens.padded, "ring": tokens.rows}[layout.method] if layout.cp > 1 else 0
    copies = {"gather": "as received and joined", "ring": "the shard in use and the one on its way"}[layout.method]
    return MemoryItem(
        f"K and V of other ranks ({layout.method})",
        2 * 2 * rows * case.local_hidden * itemsize,
        "denoising",
        f"2 × 2 × {rows} tokens × {case.local_hidden} channels × {itemsize} B: K and V, {copies}",
    )


def _decoding(case: Case) -> Iterator[MemoryItem]:
    model, vae = case.model, case.model.vae
    frames, height, width = case.shape.latent(model)
    tiles = tile_plan(case)
    if tiles is not None:
        height, width = tiles.tile
    where = f"a tile of {height * vae.spatial_stride}×{width * vae.spatial_stride}" if tiles else "the whole frame"
    positions = height * width
    frames = frames if vae.at_once else 1
    yield MemoryItem(
        "VAE feature cache",
        2 * vae.cached_elements * positions * model.itemsize,
        "decoding",
        f"2 (before and after a frame) × {vae.cached_elements} elements × {positions} latent positions of {where} × "
        f"{model.itemsize} B",
    )
    yield MemoryItem(
        "VAE activations of its largest layer",
        vae.peak_elements * frames * positions * model.itemsize,
        "decoding",
        f"{vae.peak_elements} elements × {frames} frame(s) × {positions} latent positions × {model.itemsize} B",
    )


def tile_plan(case: Case) -> TilePlan | None:
    """The tiles of the decoder, in latent positions; None where it decodes whole frames."""
    vae = case.model.vae
    if case.layout.vae_patch == 1:
        return None
    _, height, width = case.shape.latent(case.model)
    tile, stride = vae.tile_pixels // vae.spatial_stride, vae.tile_stride // vae.spatial_stride
    return TilePlan.for_size(height, width, tile=(tile, tile), stride=(stride, stride), scale=vae.spatial_stride)


def tiles_per_rank(case: Case) -> tuple[int, int]:
    """Tiles of the decoder, and the most that one rank decodes; (0, 0) where it decodes whole frames."""
    tiles = tile_plan(case)
    if tiles is None:
        return 0, 0
    return tiles.count, len(assign_tiles(tiles, case.layout.vae_patch)[0])
