# SPDX-License-Identifier: Apache-2.0
"""The question that a plan answers: a video's size, a layout, and whether they go together at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from omni_neuron_parallel.planning.model import ModelSizes, Rows
from omni_neuron_parallel.topology import divisors, valid_tensor_parallel_sizes

Method = Literal["gather", "ring"]
METHODS: tuple[Method, ...] = get_args(Method)


class PlanError(ValueError):
    """A setting that no plan can be made for.

    Attributes:
        setting: its name, such as "tp".
    """

    def __init__(self, setting: str, message: str):
        super().__init__(message)
        self.setting = setting


@dataclass(frozen=True)
class VideoShape:
    """Pixels and frames of the video."""

    height: int
    width: int
    frames: int

    def check(self, model: ModelSizes) -> None:
        """Refuse sizes that the model cannot make.

        Raises:
            PlanError: naming the nearest sizes that it can.
        """
        for setting, value, stride in (
            ("height", self.height, model.pixel_stride[0]),
            ("width", self.width, model.pixel_stride[1]),
        ):
            if value < stride or value % stride:
                raise PlanError(setting, f"{value} is not a multiple of {stride}; {_nearest(value, stride, stride)}")
        stride = model.vae.temporal_stride
        if self.frames < 1 or self.frames % stride != 1 % stride:
            raise PlanError("frames", f"{self.frames} is not {stride} k + 1 frames; {_nearest(self.frames, stride, 1)}")
        latent_frames, patch = self.latent(model)[0], model.patch[0]
        if latent_frames % patch:
            raise PlanError(
                "frames", f"{self.frames} frames are {latent_frames} latent ones, not a multiple of {patch}"
            )

    def latent(self, model: ModelSizes) -> tuple[int, int, int]:
        """Latent frames, rows and columns: (F − 1) / stride + 1, H / stride, W / stride."""
        vae = model.vae
        return (
            (self.frames - 1) // vae.temporal_stride + 1,
            self.height // vae.spatial_stride,
            self.width // vae.spatial_stride,
        )

    def tokens(self, model: ModelSizes) -> int:
        """S, the tokens of the video: latent positions / patch volume."""
        (frames, rows, columns), (patch_t, patch_h, patch_w) = self.latent(model), model.patch
        return (frames // patch_t) * (rows // patch_h) * (columns // patch_w)

    def latent_values(self, model: ModelSizes) -> int:
        """Values of one latent video."""
        frames, rows, columns = self.latent(model)
        return model.vae.latent_channels * frames * rows * columns


def _nearest(value: int, stride: int, first: int) -> str:
    below = max(first, first + (value - first) // stride * stride)
    return f"the nearest are {below} and {below + stride}"


@dataclass(frozen=True)
class Layout:
    """How the ranks are used.

    Attributes:
        tp, cp, cfg: sizes of the axes, as in `Topology`.
        vae_patch: ranks that decode; 1 decodes whole frames on one rank, more decode tiles.
        sequence_parallel: TP ranks split the tokens between row- and column-parallel layers.
        method: how context parallelism shares keys and values.
    """

    tp: int = 1
    cp: int = 1
    cfg: int = 1
    vae_patch: int = 1
    sequence_parallel: bool = False
    method: Method = "gather"

    @property
    def world_size(self) -> int:
        """Ranks: tp · cp · cfg."""
        return self.tp * self.cp * self.cfg

    def check(self, model: ModelSizes, devices: int) -> None:
        """Refuse a layout that cannot run, whatever the memory.

        Raises:
            PlanError: naming the sizes that can.
        """
        sizes = {"tp": self.tp, "cp": self.cp, "cfg": self.cfg, "vae_patch": self.vae_patch, "devices": devices}
        for setting, value in sizes.items():
            if value < 1:
                raise PlanError(setting, f"{value} is not 1 or more")
        if self.method not in METHODS:
            raise PlanError("method", f"{self.method!r} is not one of {', '.join(METHODS)}")
        if self.cp > 1 and self.method not in methods_of(model):
            raise PlanError(
                "method",
                f"{self.method} cannot be compiled for a device: the text joins self-attention, which no kernel's ring "
                f"takes; valid is {', '.join(methods_of(model))}",
            )
        if model.heads % self.tp:
            valid = ", ".join(map(str, valid_tensor_parallel_sizes(model.heads)))
            raise PlanError("tp", f"{self.tp} does not divide the {model.heads} attention heads; valid are {valid}")
        if model.branches % self.cfg:
            valid = ", ".join(map(str, divisors(model.branches)))
            raise PlanError("cfg", f"{self.cfg} ranks for {model.branches} branches of guidance; valid are {valid}")
        if self.world_size > devices:
            raise PlanError(
                "devices", f"{self} is a world of {self.world_size} ranks, one a core, and there are {devices} cores"
            )
        if self.world_size % self.vae_patch:
            valid = ", ".join(map(str, divisors(self.world_size)))
            raise PlanError(
                "vae_patch", f"{self.vae_patch} does not divide the world of {self.world_size} ranks; valid are {valid}"
            )

    def __str__(self) -> str:
        return f"TP{self.tp}×CP{self.cp}×CFG{self.cfg}"


def methods_of(model: ModelSizes) -> tuple[Method, ...]:
    """How context parallelism can share the model's keys and values in code that is compiled for a device."""
    return ("gather",) if model.joint_text else METHODS


@dataclass(frozen=True)
class TokenSplit:
    """How the tokens fall on the ranks.

    Attributes:
        total: S, with the text's tokens where they are in the same stream.
        rows: rows that the layers of one rank compute, ceil(S / cp): the same on every CP rank, the last ones padded.
        stream: rows that a rank holds between the layers: `rows`, with SP ceil(rows / tp).
        padded: rows of all CP ranks together.
        joint: text tokens beside them, whole on every rank.
    """

    total: int
    rows: int
    stream: int
    padded: int
    joint: int = 0

    @classmethod
    def of(cls, tokens: int, layout: Layout, joint: int = 0) -> TokenSplit:
        """The split of `tokens` in `layout`."""
        rows = -(-tokens // layout.cp)
        return cls(tokens, rows, -(-rows // layout.tp) if layout.sequence_parallel else rows, rows * layout.cp, joint)

    @property
    def of_rank(self) -> dict[Rows, int]:
        """The rows that one rank computes in a step, by what a matrix is applied to."""
        return {"tokens": self.rows, "stream": self.stream, "all": self.total, "joint": self.joint, "step": 1}

    @property
    def waste(self) -> float:
        """The share of the rows that is padding."""
        return 1 - self.total / self.padded


@dataclass(frozen=True)
class Case:
    """One model, layout and video: what every part of a plan is computed from."""

    model: ModelSizes
    layout: Layout
    shape: VideoShape

    @property
    def tokens(self) -> TokenSplit:
        """How the tokens fall on the ranks."""
        tokens = self.shape.tokens(self.model) + (self.model.text_length if self.model.single_stream else 0)
        return TokenSplit.of(tokens, self.layout, self.model.joint_length)

    @property
    def local_hidden(self) -> int:
        """Channels of the heads of one rank."""
        return self.model.hidden // self.layout.tp

    @property
    def forwards(self) -> int:
        """Forwards of one rank in a step with guidance."""
        return self.model.branches // self.layout.cfg
