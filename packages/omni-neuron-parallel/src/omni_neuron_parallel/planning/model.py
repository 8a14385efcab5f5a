# SPDX-License-Identifier: Apache-2.0
"""What the planner must know of a model: sizes, weights and how they are split. A model package fills it in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from omni_neuron_parallel.layers import shard_size

Split = Literal["column", "row", "whole"]
Rows = Literal["tokens", "stream", "all", "joint", "text", "step", "lookup"]


@dataclass(frozen=True)
class Linear:
    """A weight matrix `[outputs, inputs]` with a bias, or several alike.

    Attributes:
        name: of the part that FLOPs are reported under, such as "feed-forward".
        inputs: features in.
        outputs: features out.
        count: how many alike, usually the layers.
        split: over TP: "column" the outputs, "row" the inputs (its results are summed over TP), "whole" on every rank.
            Outputs of one row a "step" are gathered over TP, those of all such matrices at once.
        rows: what it is applied to. In every step: a CP rank's "tokens", the "stream" that a rank holds between layers
            (with SP a TP-th of them), "all" tokens of the video on every rank, the "joint" tokens of a text, or one row
            a "step". Once a request: the "text". Or a "lookup" of rows, which costs no FLOPs.
        bias: whether there is one; of a row-split matrix every rank holds it whole.
        multiple_of: what must stay together when it is split, such as the channels of a head.
        itemsize: bytes an element; None for the model's.
    """

    name: str
    inputs: int
    outputs: int
    count: int = 1
    split: Split = "whole"
    rows: Rows = "tokens"
    bias: bool = True
    multiple_of: int = 1
    itemsize: int | None = None

    def local_shape(self, tp: int) -> tuple[int, int]:
        """(outputs, inputs) on one rank, rounded up as the layers do."""
        if self.split == "column":
            return shard_size(self.outputs, tp, self.multiple_of), self.inputs
        if self.split == "row":
            return self.outputs, shard_size(self.inputs, tp, self.multiple_of)
        return self.outputs, self.inputs

    def elements(self, tp: int) -> int:
        """Weights and biases on one rank."""
        outputs, inputs = self.local_shape(tp)
        return self.count * outputs * (inputs + self.bias)

    def flops(self, rows: float, tp: int) -> float:
        """FLOPs of all `count` on one rank: 2 · rows · outputs · inputs each; the bias is not counted."""
        outputs, inputs = self.local_shape(tp)
        return 0.0 if self.rows == "lookup" else 2.0 * self.count * rows * outputs * inputs


@dataclass(frozen=True)
class Vector:
    """A weight that takes no part in a matrix product, such as a norm's gain, or several alike.

    Attributes:
        size: elements.
        count: how many alike.
        split: whether TP splits it.
        multiple_of: elements that must stay together when it is split.
        itemsize: bytes an element; None for the model's.
    """

    size: int
    count: int = 1
    split: bool = False
    multiple_of: int = 1
    itemsize: int | None = None

    def elements(self, tp: int) -> int:
        """Elements on one rank."""
        return self.count * (shard_size(self.size, tp, self.multiple_of) if self.split else self.size)


@dataclass(frozen=True)
class Weights:
    """Every weight of one component."""

    linears: tuple[Linear, ...]
    vectors: tuple[Vector, ...] = ()

    def parameters(self, tp: int = 1) -> int:
        """Parameters on one rank."""
        return sum(weight.elements(tp) for weight in self._all())

    def bytes(self, tp: int, itemsize: int) -> int:
        """Bytes on one rank, in a model of `itemsize` bytes an element."""
        return sum(weight.elements(tp) * (weight.itemsize or itemsize) for weight in self._all())

    def applied_to(self, *rows: Rows) -> list[Linear]:
        """The matrices that are applied to one of `rows`."""
        return [linear for linear in self.linears if linear.rows in rows]

    def _all(self) -> Iterator[Linear | Vector]:
        yield from self.linears
        yield from self.vectors


@dataclass(frozen=True)
class VaeSizes:
    """The decoder of a VAE that decodes one latent frame at a time and remembers the last frames of each convolution.

    The video waits on the host, so nothing here grows with its frames; unless it decodes all frames `at_once`.

    Attributes:
        parameters: of the decoder.
        latent_channels: channels of a latent.
        spatial_stride: pixels a latent position, in height and in width.
        temporal_stride: video frames a latent frame, after the first.
        cached_elements: elements remembered between two latent frames, a latent position of one frame.
        peak_elements: elements of the layer that needs most (its shortcuts, its input with the frames remembered, its
            output), a latent position of one frame.
        tile_pixels: height and width of a tile.
        tile_stride: pixels from one tile's start to the next one's.
        at_once: whether it decodes all frames together, and remembers none.
    """

    parameters: int
    latent_channels: int
    spatial_stride: int
    temporal_stride: int
    cached_elements: int
    peak_elements: int
    tile_pixels: int
    tile_stride: int
    at_once: bool = False


@dataclass(frozen=True)
class ModelSizes:
    """A video diffusion model: a transformer of equal layers (self-attention over all tokens of the video,
    cross-attention on a text, feed-forward), one or more experts of it in turn, a text encoder, a VAE.

    With `joint_text` the text is a second stream of tokens instead, with matrices of its own (rows "joint") in every
    layer, whole on every CP rank and whole with SP; both streams meet in self-attention, and there is no
    cross-attention. Without SP the sums of its row-split matrices travel with those of the video's of the same name.
    With `single_stream` the text's tokens pass through the video's matrices, and CP and SP split them likewise.

    Attributes:
        name: how the command line calls it.
        experts: transformers that are resident together; one is used a step.
        layers: of one transformer.
        heads: attention heads.
        head_dim: channels of a head.
        ffn: features inside the feed-forward.
        text_length: tokens of the text, padded.
        patch: latent frames, rows and columns in one token.
        branches: forwards a step with guidance.
        norm_across_heads: queries and keys are normalised over all heads, so that TP must sum their squares.
        dit: one transformer's weights.
        text_encoder: its weights; heads, features and vocabulary split over TP.
        vae: the VAE.
        itemsize: bytes of an element of weights and activations.
        joint_text: whether the text is a second stream.
        single_stream: whether the text's tokens are in the video's stream.
    """

    name: str
    experts: int
    layers: int
    heads: int
    head_dim: int
    ffn: int
    text_length: int
    patch: tuple[int, int, int]
    branches: int
    norm_across_heads: bool
    dit: Weights
    text_encoder: Weights
    vae: VaeSizes
    itemsize: int = 2
    joint_text: bool = False
    single_stream: bool = False

    @property
    def has_cross_attention(self) -> bool:
        """Whether the text is met by cross-attention."""
        return not (self.joint_text or self.single_stream)

    @property
    def joint_length(self) -> int:
        """Text tokens that go through the layers in every step."""
        return self.text_length if self.joint_text else 0

    @property
    def hidden(self) -> int:
        """Width of the token stream."""
        return self.heads * self.head_dim

    @property
    def token_outputs(self) -> int:
        """Values that the transformer predicts for one token."""
        patch_t, patch_h, patch_w = self.patch
        return self.vae.latent_channels * patch_t * patch_h * patch_w

    @property
    def pixel_stride(self) -> tuple[int, int]:
        """Height and width must be multiples of these."""
        return self.vae.spatial_stride * self.patch[1], self.vae.spatial_stride * self.patch[2]
